//! Judges cases on a device: against the reference in f64, with NaN-filled guard bands around every slot, run twice
//! for determinism, and once more in parts for batch invariance. Tests and `kiln selftest` both come through here.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rayon::prelude::*;

use kiln_gpu::{Address, Buffer, Device, MemoryKind, Recorder, Shader, Uploader};

use crate::Call;
use crate::case::{Case, POISON, Tolerance};
use crate::host::HostMemory;
use crate::operation::{Choice, Path, rows_apart};
use crate::record::{Error, record};
use crate::tensor::Tensor;

/// Bytes of poison before, between and after the slots.
const GUARD: usize = 512;
/// Calls with more parts than this are not run in parts: batch invariance shows in a few.
const MOST_PARTS: usize = 64;

/// What came of one case on one path.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The largest error of any written tensor.
    pub error: f64,
    /// Time on the GPU of the first run, where the device has a clock.
    pub time: Option<Duration>,
    /// What was wrong; empty where the case passed.
    pub failures: Vec<String>,
}

/// A case made ready for one path.
pub struct Prepared {
    /// The path.
    pub path: Path,
    pub(crate) call: Call,
    pub(crate) choice: Choice,
    parts: Vec<(Call, Choice)>,
    tolerance: Tolerance,
    pub(crate) memory: Arc<HostMemory>,
    /// What the reference makes of it: the same for every path.
    expected: Arc<OnceLock<HostMemory>>,
}

impl Prepared {
    /// Builds a case for every path the device offers. Errors are of the case itself, not of the device.
    pub fn all(case: &Case, device: &Device) -> Result<Vec<Prepared>, Error> {
        Prepared::on(case, device, &Path::ALL)
    }

    /// The path a call takes by itself on a device.
    pub fn chosen(case: &Case, device: &Device) -> Result<Path, Error> {
        let (call, ..) = case.build();
        Ok(call.operation().pick(&device.adapter.caps, None)?.path)
    }

    /// Builds a case for those of the paths that the device offers.
    pub fn on(case: &Case, device: &Device, paths: &[Path]) -> Result<Vec<Prepared>, Error> {
        let caps = &device.adapter.caps;
        let (call, tolerance, memory) = case.build();
        call.operation().check()?;
        let (memory, expected) = (Arc::new(memory), Arc::default());
        let mut prepared = Vec::new();
        for &path in paths {
            let Ok(choice) = call.operation().pick(caps, Some(path)) else { continue };
            let mut parts = call.operation().parts();
            if parts.len() > MOST_PARTS {
                parts.clear();
            }
            let pick = |part: Call| {
                part.operation().check()?;
                let choice = part.operation().pick(caps, Some(path))?;
                Ok::<_, Error>((part, choice))
            };
            let parts = parts.into_iter().map(pick).collect::<Result<Vec<_>, _>>()?;
            let (call, memory, expected) = (call.clone(), Arc::clone(&memory), Arc::clone(&expected));
            prepared.push(Prepared { path, call, choice, parts, tolerance, memory, expected });
        }
        Ok(prepared)
    }

    /// The shaders of the case itself, without those of its parts.
    pub fn shaders_of_call(&self) -> impl Iterator<Item = &Shader> {
        self.choice.launches.iter().map(|launch| &launch.shader)
    }

    /// The shaders it will run.
    pub fn shaders(&self) -> impl Iterator<Item = &Shader> {
        let choices = std::iter::once(&self.choice).chain(self.parts.iter().map(|(_, choice)| choice));
        choices.flat_map(|choice| choice.launches.iter().map(|launch| &launch.shader))
    }

    /// What the reference gives: computed at the first call, by whichever path comes first. Not for several paths of a case in
    /// parallel: references use all threads, and one of them would wait for itself.
    pub fn expected(&self) -> &HostMemory {
        self.expected.get_or_init(|| {
            let mut expected = HostMemory::clone(&self.memory);
            self.call.operation().reference(&mut expected);
            expected
        })
    }

    /// Runs and judges it.
    pub fn run(&self, device: &Arc<Device>) -> Result<Outcome, Error> {
        let expected = self.expected();
        let bench = Image::new(device, &self.memory)?;
        let (got, time) = bench.run(&[(&self.call, &self.choice)])?;
        let mut outcome = Outcome { error: 0.0, time, failures: Vec::new() };
        self.judge_untouched(&bench, &got, &mut outcome);
        let got = self.unpack(&bench, &got);
        for written in self.call.operation().writes() {
            self.judge(&written, &got, expected, &mut outcome);
        }
        // Nothing else was touched, or that was told: from here on only what the call writes goes to and fro.
        let again = self.run_again(&bench, &[(&self.call, &self.choice)])?;
        let differs = |other: &HostMemory| self.written().any(|i| other.slots[i] != got.slots[i]);
        if differs(&again) {
            outcome.failures.push("a second run gave other bits".into());
        }
        if !self.parts.is_empty() {
            let steps: Vec<(&Call, &Choice)> = self.parts.iter().map(|(call, choice)| (call, choice)).collect();
            if differs(&self.run_again(&bench, &steps)?) {
                outcome.failures.push(format!("{} calls of a part each gave other bits", steps.len()));
            }
        }
        Ok(outcome)
    }

    /// The slots of what the call writes.
    fn written(&self) -> impl Iterator<Item = usize> {
        let slots: BTreeSet<usize> = self.call.operation().writes().iter().map(|t| t.slot.0 as usize).collect();
        slots.into_iter()
    }

    /// Runs the steps on fresh data where it was written, and gives those slots back; the others are empty.
    fn run_again(&self, bench: &Image, steps: &[(&Call, &Choice)]) -> Result<HostMemory, Error> {
        let operation = self.call.operation();
        let changed: BTreeSet<usize> =
            operation.writes().iter().chain(&operation.scratch()).map(|t| t.slot.0 as usize).collect();
        bench.renew(&changed)?;
        bench.submit(steps)?;
        let mut slots = vec![Vec::new(); bench.lengths.len()];
        for i in self.written() {
            slots[i] = bench.read(i)?;
        }
        let mut memory = HostMemory { slots, ..HostMemory::default() };
        self.clear_scratch(&mut memory);
        Ok(memory)
    }

    /// The call, for its bytes and operations.
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// The slots of an image.
    fn unpack(&self, bench: &Image, image: &[u8]) -> HostMemory {
        let mut memory = bench.unpack(image);
        self.clear_scratch(&mut memory);
        memory
    }

    /// What is left in scratch memory means nothing, and parts leave something else.
    fn clear_scratch(&self, memory: &mut HostMemory) {
        for scratch in self.call.operation().scratch() {
            let (first, bytes) = scratch.span();
            if let Some(scratch) = memory.bytes_mut(scratch.slot).get_mut(first..first + bytes) {
                scratch.fill(0);
            }
        }
    }

    /// Every byte that no written tensor owns is as it was, guard bands included.
    fn judge_untouched(&self, bench: &Image, got: &[u8], outcome: &mut Outcome) {
        let mut owned = vec![false; got.len()];
        let operation = self.call.operation();
        for t in operation.writes().iter().chain(&operation.scratch()) {
            let start = bench.offsets[t.slot.0 as usize];
            for i in rows_apart(t.shape) {
                let row = start + t.row_offset(i);
                if t.has_dense_rows() {
                    owned[row..row + t.row_bytes()].fill(true);
                    continue;
                }
                for block in 0..t.shape[0] / t.ty.block_len() {
                    let at = row + block * t.stride[0];
                    owned[at..at + t.ty.block_bytes()].fill(true);
                }
            }
        }
        let bytes = (owned.par_iter(), got.par_iter(), bench.bytes.par_iter()).into_par_iter();
        let touched = bytes.position_first(|(owned, now, before)| !owned && now != before);
        if let Some(i) = touched {
            let slot = bench.offsets.iter().rposition(|&o| o <= i);
            let place = slot.map_or("before slot 0".to_owned(), |s| {
                format!("byte {} of slot {s} ({} bytes)", i - bench.offsets[s], self.memory.slots[s].len())
            });
            outcome.failures.push(format!("wrote outside its result: {place}"));
        }
    }

    fn judge(&self, tensor: &Tensor, got: &HostMemory, expected: &HostMemory, outcome: &mut Outcome) {
        let (got, want) = (got.read(tensor), expected.read(tensor));
        let cols = tensor.shape[0].max(1);
        let place = |i: usize| format!("[{}, row {}]", i % cols, i / cols);
        let wrong = |i: usize| format!("{} {}: got {}, want {}", tensor, place(i), got[i], want[i]);
        match self.tolerance {
            Tolerance::Exact => {
                let same = |i: &usize| got[*i] == want[*i] || (got[*i].is_nan() && want[*i].is_nan());
                if let Some(i) = (0..got.len()).find(|i| !same(i)) {
                    outcome.error = f64::INFINITY;
                    outcome.failures.push(wrong(i));
                }
            }
            Tolerance::SameSetPerRow => {
                let sorted = |row: &[f64]| {
                    let mut row = row.to_vec();
                    row.sort_by(f64::total_cmp);
                    row
                };
                let rows = got.chunks_exact(cols).zip(want.chunks_exact(cols)).enumerate();
                let differ = |(_, (a, b)): &(usize, (&[f64], &[f64]))| sorted(a) != sorted(b);
                if let Some((row, (a, b))) = rows.into_iter().find(differ) {
                    outcome.error = f64::INFINITY;
                    outcome.failures.push(format!("{tensor} row {row}: got {a:?}, want {b:?}"));
                }
            }
            Tolerance::Nmse(limit) => {
                let rows = vec![(got.clone(), want.clone())];
                Self::judge_rows(&rows, limit, outcome, |_, i| wrong(i));
            }
            Tolerance::NmsePerRow(limit) => {
                let own_rows = |values: &[f64]| values.chunks(cols).map(<[f64]>::to_vec).collect();
                let rows =
                    |values: &[f64]| self.call.operation().judged(tensor, values).unwrap_or_else(|| own_rows(values));
                let rows: Vec<_> = rows(&got).into_iter().zip(rows(&want)).collect();
                Self::judge_rows(&rows, limit, outcome, |row, i| {
                    format!("{tensor} row {row} [{i}]: got {}, want {}", rows[row].0[i], rows[row].1[i])
                });
            }
        }
    }

    /// The first row whose error is over the limit, with the element that is furthest off; `wrong` describes it.
    fn judge_rows(
        rows: &[(Vec<f64>, Vec<f64>)],
        limit: f64,
        outcome: &mut Outcome,
        wrong: impl Fn(usize, usize) -> String,
    ) {
        for (row, (got, want)) in rows.iter().enumerate() {
            // Infinities must agree; NaN never passes.
            let odd = |i: &usize| !(got[*i].is_finite() && want[*i].is_finite()) && got[*i] != want[*i];
            if let Some(i) = (0..got.len()).find(odd) {
                outcome.error = f64::INFINITY;
                outcome.failures.push(wrong(row, i));
                return;
            }
            let finite = || (0..got.len()).filter(|i| want[*i].is_finite());
            let squared = |i: usize| (got[i] - want[i]).powi(2);
            let (sum, norm) = finite().fold((0.0, 0.0), |(s, n), i| (s + squared(i), n + want[i].powi(2)));
            let error = if sum == 0.0 { 0.0 } else { sum / norm.max(f64::MIN_POSITIVE) };
            outcome.error = outcome.error.max(error);
            if error > limit {
                let worst = finite().max_by(|a, b| squared(*a).total_cmp(&squared(*b))).unwrap_or(0);
                outcome.failures.push(format!("error {error:.2e} over {limit:.0e}; worst {}", wrong(row, worst)));
                return;
            }
        }
    }
}

/// The slots of a case in one device buffer, guard bands between them.
struct Image {
    device: Arc<Device>,
    buffer: Buffer,
    bytes: Vec<u8>,
    offsets: Vec<usize>,
    lengths: Vec<usize>,
}

impl Image {
    fn new(device: &Arc<Device>, memory: &HostMemory) -> Result<Image, Error> {
        let mut bytes = vec![POISON; GUARD];
        let (mut offsets, mut lengths) = (Vec::new(), Vec::new());
        for slot in &memory.slots {
            offsets.push(bytes.len());
            lengths.push(slot.len());
            bytes.extend_from_slice(slot);
            bytes.resize((bytes.len() + GUARD).next_multiple_of(256), POISON);
        }
        let buffer = device.allocate(MemoryKind::Device, bytes.len() as u64)?;
        Ok(Image { device: Arc::clone(device), buffer, bytes, offsets, lengths })
    }

    /// Runs the steps on fresh data and gives the whole image back.
    fn run(&self, steps: &[(&Call, &Choice)]) -> Result<(Vec<u8>, Option<Duration>), Error> {
        let mut uploader = Uploader::new(&self.device)?;
        uploader.write(&self.buffer, 0, &self.bytes)?;
        uploader.finish()?;
        let time = self.submit(steps)?;
        let mut out = vec![0; self.bytes.len()];
        self.device.read(&self.buffer, 0, &mut out)?;
        Ok((out, time))
    }

    /// Gives these slots their first bytes again.
    fn renew(&self, slots: &BTreeSet<usize>) -> Result<(), Error> {
        let mut uploader = Uploader::new(&self.device)?;
        for &i in slots {
            let (start, bytes) = (self.offsets[i], self.lengths[i]);
            uploader.write(&self.buffer, start as u64, &self.bytes[start..start + bytes])?;
        }
        Ok(uploader.finish()?)
    }

    /// Runs the steps on what is there.
    fn submit(&self, steps: &[(&Call, &Choice)]) -> Result<Option<Duration>, Error> {
        let at = |t: &Tensor| -> Address {
            self.buffer.address().offset((self.offsets[t.slot.0 as usize] + t.offset) as u64)
        };
        let mut recorder = Recorder::new(&self.device)?;
        for (call, choice) in steps {
            record(&mut recorder, &self.device, call.operation().name(), (call, choice), &at)?;
        }
        let commands = recorder.finish()?;
        commands.run()?;
        Ok(commands.gpu_time())
    }

    /// The bytes of a slot.
    fn read(&self, slot: usize) -> Result<Vec<u8>, Error> {
        let mut out = vec![0; self.lengths[slot]];
        self.device.read(&self.buffer, self.offsets[slot] as u64, &mut out)?;
        Ok(out)
    }

    fn unpack(&self, image: &[u8]) -> HostMemory {
        let slots = self.offsets.iter().zip(&self.lengths).map(|(&o, &n)| image[o..o + n].to_vec()).collect();
        HostMemory { slots, ..HostMemory::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_row_of_small_numbers_is_found_beside_large_ones() {
        let failures = |rows: &[(Vec<f64>, Vec<f64>)]| {
            let mut outcome = Outcome { error: 0.0, time: None, failures: Vec::new() };
            Prepared::judge_rows(rows, 1e-6, &mut outcome, |row, i| format!("row {row} [{i}]"));
            outcome.failures
        };
        let (large, small) = (vec![1e6, -2e6], vec![1e-6, 3e-6]);
        let wrong = vec![1e-6, 4e-6];
        let whole = ([large.clone(), wrong.clone()].concat(), [large.clone(), small.clone()].concat());
        assert!(failures(&[whole]).is_empty(), "all together hide it");
        let found = failures(&[(large.clone(), large), (wrong, small)]);
        assert!(found.len() == 1 && found[0].ends_with("worst row 1 [1]"), "{found:?}");
        // Rows of zeros must be zeros; infinities must agree, and NaN never passes.
        assert_eq!(failures(&[(vec![0.0], vec![0.0])]), Vec::<String>::new());
        assert_eq!(failures(&[(vec![1e-30], vec![0.0])]).len(), 1);
        assert_eq!(failures(&[(vec![f64::INFINITY], vec![f64::INFINITY])]), Vec::<String>::new());
        assert_eq!(failures(&[(vec![f64::NAN], vec![f64::NAN])]), ["row 0 [0]"]);
    }
}
