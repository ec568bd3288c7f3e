//! The definition of `advance`.

use super::Call;
use crate::host::HostMemory;
use crate::tensor::Tensor;

/// The inputs of the next step.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let read = |t: &Tensor| memory.read(t).into_iter().map(|x| x as i64).collect::<Vec<_>>();
    let (sampled, table) = (read(&call.sampled), read(&call.places.table));
    let other = call.others.map(|o| read(&o.table));
    let (mut tokens, mut positions, mut lengths) = (read(&call.tokens), read(&call.positions), read(&call.lengths));
    let (mut history, mut step) = (read(&call.history), read(&call.step));
    let mut recent = call.recent.map(|t| read(&t));
    let mut coordinates = call.coordinates.map(|t| read(&t));
    let (pages, steps, page) = (call.places.table.shape[0], call.history.shape[0], call.page as i64);
    let (mut rows, mut other_rows) = (vec![-1; sampled.len()], vec![-1; sampled.len()]);
    for i in 0..sampled.len() {
        let (active, next) = (positions[i] >= 0, positions[i] + 1);
        // Counted as the kernel does, where the number wraps around.
        let place = i * steps + step[0] as u32 as usize % steps;
        history[place] = if active { sampled[i].max(-1) } else { -1 };
        let entry = |table: &[i64]| match next / page < pages as i64 {
            true => table[i * pages + (next / page) as usize],
            false => -1,
        };
        let (own, others) = (entry(&table), other.as_ref().map_or(0, |table| entry(table)));
        if !active || sampled[i] < 0 || own < 0 || others < 0 {
            positions[i] = -1;
            continue;
        }
        tokens[i] = sampled[i];
        positions[i] = next;
        lengths[i] += 1;
        coordinates.iter_mut().for_each(|coordinates| coordinates[i] += 1);
        rows[i] = own * page + next % page;
        other_rows[i] = others * page + next % page;
        if let (Some(recent), Some(t)) = (&mut recent, call.recent) {
            let window = t.shape[0];
            recent[i * window + next as usize % window] = sampled[i];
        }
    }
    step[0] += 1;
    let mut write = |t: &Tensor, values: &[i64]| {
        let values: Vec<f64> = values.iter().map(|x| *x as f64).collect();
        memory.write(t, &values);
    };
    write(&call.tokens, &tokens);
    write(&call.positions, &positions);
    write(&call.lengths, &lengths);
    write(&call.places.rows, &rows);
    if let (Some(coordinates), Some(t)) = (coordinates, call.coordinates) {
        write(&t, &coordinates);
    }
    if let Some(others) = call.others {
        write(&others.rows, &other_rows);
    }
    write(&call.history, &history);
    write(&call.step, &step);
    if let (Some(recent), Some(t)) = (recent, call.recent) {
        write(&t, &recent);
    }
}
