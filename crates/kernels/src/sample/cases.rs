//! Cases of `sample`. Tokens are exact; log-probabilities are right to some ulps of f32, and an id that is off by one is far
//! outside of what is allowed for them.

use kiln_gguf::TensorType::{F32, I32};

use super::{Bias, Call, Logprobs, Row, WORDS, draw, gumbel, score, scratch_words};
use crate::case::{Case, Data, Level, Random, Tolerance};
use crate::tensor::Tensor;

const CLOSE: Tolerance = Tolerance::Nmse(1e-11);

/// Logits like those of a model: a few far above the rest.
fn peaked(random: &mut Random) -> f64 {
    let x = random.uniform(0.0, 1.0);
    -4.0 + 3.0 * random.uniform(-1.0, 1.0) + 14.0 * x.powi(40)
}

fn settings(data: &mut Data, rows: &[Row]) -> Tensor {
    let words: Vec<i32> = rows.iter().flat_map(|row| row.encode()).collect();
    data.input_with(I32, [WORDS, rows.len(), 1, 1], |_, i| f64::from(words[i]))
}

fn call_of(data: &mut Data, vocab: usize, rows: &[Row], value: fn(&mut Random) -> f64) -> Call {
    let n = rows.len();
    let logits = data.input_with(F32, [vocab, n, 1, 1], |random, _| value(random));
    Call {
        logits,
        settings: settings(data, rows),
        positions: data.input_with(I32, [n, 1, 1, 1], |random, _| random.below(5000) as f64),
        recent: None,
        bias: None,
        mask: None,
        token: data.output(I32, [n, 1, 1, 1]),
        logprobs: None,
        scratch: data.output(I32, [scratch_words(vocab), n, 1, 1]),
        cuts: rows.iter().any(Row::cuts),
    }
}

fn call(data: &mut Data, vocab: usize, rows: &[Row]) -> Call {
    call_of(data, vocab, rows, peaked)
}

fn case(name: &str, vocab: usize, rows: &[Row]) -> Case {
    case_of(name, vocab, rows, peaked)
}

fn case_of(name: &str, vocab: usize, rows: &[Row], value: fn(&mut Random) -> f64) -> Case {
    let rows = rows.to_vec();
    Case::new(format!("sample {name} vocab={vocab} rows={}", rows.len()), move |data| {
        (call_of(data, vocab, &rows, value).into(), Tolerance::Exact)
    })
}

fn logprobs(data: &mut Data, rows: usize, n: usize) -> Option<Logprobs> {
    let chosen = data.output(F32, [rows, 1, 1, 1]);
    Some(Logprobs { chosen, ids: data.output(I32, [n, rows, 1, 1]), values: data.output(F32, [n, rows, 1, 1]) })
}

fn warm(seed: u64) -> Row {
    Row { temperature: 0.8, seed: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), ..Row::default() }
}

/// Every cut alone and some together, for rows of different seeds.
fn cut_rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for seed in 0..3 {
        let row = warm(seed);
        rows.extend([1, 2, 5, 40, 700].map(|top_k| Row { top_k, ..row }));
        rows.extend([0.0, 0.1, 0.5, 0.95, 0.9999].map(|top_p| Row { top_p, ..row }));
        rows.extend([0.001, 0.05, 0.3, 1.0].map(|min_p| Row { min_p, ..row }));
        rows.extend([0.0, 0.2, 0.9, 0.999].map(|typical_p| Row { typical_p, ..row }));
        rows.push(Row { top_k: 40, top_p: 0.95, min_p: 0.05, ..row });
        rows.push(Row { top_k: 40, top_p: 0.5, typical_p: 0.9, min_p: 0.1, temperature: 1.5, ..row });
        rows.push(Row { top_p: 0.8, typical_p: 0.5, temperature: 3.0, ..row });
        rows.push(Row { top_k: 1 << 30, top_p: 0.7, ..row });
    }
    rows
}

fn with_lists(vocab: usize, rows: Vec<Row>) -> Case {
    Case::new(format!("sample with penalties, bias and mask vocab={vocab} rows={}", rows.len()), move |data| {
        let n = rows.len();
        let mut call = call(data, vocab, &rows);
        // Tokens of a small range are met several times; some entries are empty, and one lies outside of the vocabulary.
        let token = |random: &mut Random, i: usize| match i % 9 {
            0 => -1.0,
            1 => vocab as f64,
            2 => random.below(vocab) as f64,
            _ => random.below(vocab.min(12)) as f64,
        };
        call.recent = Some(data.input_with(I32, [37, n, 1, 1], token));
        let ids = data.input_with(I32, [11, n, 1, 1], token);
        let values = data.input_with(F32, [11, n, 1, 1], |random, i| {
            if i % 7 == 3 { f64::NEG_INFINITY } else { random.uniform(-3.0, 12.0) }
        });
        call.bias = Some(Bias { ids, values });
        call.mask = Some(data.input_with(I32, [vocab.div_ceil(32), n, 1, 1], |random, _| {
            f64::from((random.bits() & random.bits()) as u32 as i32)
        }));
        (call.into(), Tolerance::Exact)
    })
}

fn penalised() -> Vec<Row> {
    let row = Row { last_n: 30, repetition: 1.3, frequency: 0.25, presence: 0.5, biases: 9, ..warm(5) };
    vec![
        Row { temperature: 0.0, ..row },
        Row { temperature: 0.0, masked: true, ..row },
        row,
        Row { masked: true, ..row },
        Row { masked: true, top_k: 9, ..row },
        Row { top_p: 0.9, min_p: 0.02, last_n: 500, biases: 500, ..row },
        Row { typical_p: 0.7, masked: true, last_n: 1, biases: 1, ..row },
        Row { repetition: 0.5, frequency: -1.0, last_n: 37, biases: 0, ..row },
    ]
}

/// Rows that have no answer, and rows beside them that have one.
fn broken(cuts: bool) -> Case {
    Case::new(format!("sample of NaN, of infinities, of nothing allowed, of padding, cuts={cuts}"), move |data| {
        let row = if cuts { Row { top_k: 3, top_p: 0.9, ..warm(1) } } else { warm(1) };
        let mut call = call(data, 1500, &[row; 9]);
        let mut values = data.memory.read(&call.logits);
        values[700] = f64::NAN;
        values[1500..3000].fill(f64::NEG_INFINITY);
        values[3000..4500].fill(f64::NEG_INFINITY);
        values[3000 + 1400] = -3e38;
        (values[4500 + 7], values[4500 + 1300]) = (f64::INFINITY, f64::INFINITY);
        values[7500..9000].fill(2.5);
        values[9000..10500].fill(-1e30);
        data.memory.write(&call.logits, &values);
        call.positions = data.input_with(I32, [9, 1, 1, 1], |_, i| if i == 4 { -1.0 } else { i as f64 });
        call.logprobs = logprobs(data, 9, 3);
        (call.into(), CLOSE)
    })
}

/// Two tokens whose scores are equal or one step of f32 apart: a Gumbel number of other bits draws the other one.
fn near_ties(rows: usize) -> Case {
    Case::new(format!("sample scores a step apart, rows={rows}"), move |data| {
        let all: Vec<Row> = (0..rows as u64).map(|seed| Row { temperature: 1.0, ..warm(seed) }).collect();
        let mut call = call(data, 2, &all);
        let positions = data.memory.read(&call.positions);
        call.logits = data.input_with(F32, [2, rows, 1, 1], |_, i| {
            let number = |id| gumbel(all[i / 2].seed, positions[i / 2] as u32, id);
            // The step that the second score shall take from the first one.
            let want = if i / 2 % 2 == 0 { number(0) } else { number(0).next_up() };
            let mut logit = want - number(1);
            for _ in 0..64 {
                let got = score(logit, 1.0, number(1));
                logit = if got < want {
                    logit.next_up()
                } else if got > want {
                    logit.next_down()
                } else {
                    logit
                };
            }
            if i % 2 == 0 { 0.0 } else { f64::from(logit) }
        });
        (call.into(), Tolerance::Exact)
    })
}

/// Two tokens, the second of which top_p keeps or drops by one step of f32 of its logit: a weight of other bits does the other.
fn near_cuts(rows: usize) -> Case {
    Case::new(format!("sample weights a step from the cut, rows={rows}"), move |data| {
        let mut all: Vec<Row> = Vec::new();
        for i in 0..rows {
            // Seeds with which the second token is drawn if it is kept.
            let wins = |seed: &u64| gumbel(*seed, 7, 1) > gumbel(*seed, 7, 0) + 6.0;
            let seed = (1000 * i as u64..).find(wins).expect("such seeds are not rare");
            all.push(Row { temperature: 1.0, seed, top_p: 0.55 + 0.4 * i as f32 / rows as f32, ..Row::default() });
        }
        let mut call = call(data, 2, &all);
        call.positions = data.input_with(I32, [rows, 1, 1, 1], |_, _| 7.0);
        call.logits = data.input_with(F32, [2, rows, 1, 1], |_, i| {
            let kept = |logit: f32| draw(&all[i / 2], 7, &[0.0, logit]) == Some(1);
            // The least logit that is kept, between floats as between their bits.
            let (mut dropped, mut least) = ((-5.0f32).to_bits(), (-1e-3f32).to_bits());
            while dropped - least > 1 {
                let middle = least + (dropped - least) / 2;
                if kept(f32::from_bits(middle)) { least = middle } else { dropped = middle }
            }
            let logit = f32::from_bits(if i / 2 % 2 == 0 { least } else { dropped });
            if i % 2 == 0 { 0.0 } else { f64::from(logit) }
        });
        (call.into(), Tolerance::Exact)
    })
}

fn small() -> Vec<Case> {
    let greedy = Row::default();
    let mut cases: Vec<Case> =
        [1, 2, 33, 1023, 1024, 1025, 5000].iter().map(|&vocab| case("greedy", vocab, &[greedy; 3])).collect();
    cases.push(case_of("greedy of equal logits", 3000, &[greedy; 2], |random| random.below(2) as f64));
    let draws: Vec<Row> = (0..40).map(|seed| Row { temperature: 0.3 + 0.05 * seed as f32, ..warm(seed) }).collect();
    cases.push(case("draws", 1300, &draws));
    cases.push(case_of("draws of equal logits", 2100, &draws, |_| -1.5));
    cases.push(case("draws among few", 3, &draws));
    cases.push(case("cuts", 1, &cut_rows()));
    cases.push(case("cuts", 50, &cut_rows()));
    cases.push(case("cuts", 2500, &cut_rows()));
    cases.push(case_of("cuts of equal logits", 1100, &cut_rows(), |_| 7.0));
    cases.push(case_of("cuts of few different logits", 2300, &cut_rows(), |random| random.below(4) as f64));
    cases.push(case_of("cuts of flat logits", 1400, &cut_rows(), |random| random.uniform(-0.01, 0.01)));
    cases.push(case_of("cuts of logits far apart", 1400, &cut_rows(), |random| random.uniform(-1e4, 1e4)));
    // More tokens are left than a list holds, and more chunks than a workgroup of the second launch has threads.
    let wide = [Row { top_p: 0.9, ..warm(3) }, Row { top_k: 17_000, ..warm(4) }, Row { top_k: 40, ..warm(5) }];
    cases.push(case_of("cuts of a long row", 40_001, &wide, |random| random.uniform(-0.5, 0.5)));
    cases.push(with_lists(70, penalised()));
    cases.push(with_lists(2300, penalised()));
    cases.extend([broken(false), broken(true)]);
    cases.extend([near_ties(60), near_cuts(60)]);
    cases.push(Case::new("sample several biases of a token", |data| {
        let rows = [Row { biases: 20, ..Row::default() }; 12];
        let mut call = call(data, 1100, &rows);
        let ids = data.input_with(I32, [20, 12, 1, 1], |random, _| random.below(5) as f64 * 250.0);
        call.bias =
            Some(Bias { ids, values: data.input_with(F32, [20, 12, 1, 1], |random, _| random.uniform(20.0, 90.0)) });
        (call.into(), Tolerance::Exact)
    }));
    cases.push(Case::new("sample cuts that the call does not offer", move |data| {
        let call = call(data, 300, &[greedy, Row { top_k: 4, ..warm(1) }, warm(2)]);
        (Call { cuts: false, ..call }.into(), Tolerance::Exact)
    }));
    for (vocab, n) in [(1, 1), (40, 40), (2600, 0), (2600, 20)] {
        let rows = [greedy, warm(9), Row { top_k: 20, ..warm(10) }];
        cases.push(Case::new(format!("sample log-probabilities of the {n} best of {vocab}"), move |data| {
            let call = call(data, vocab, &rows);
            (Call { logprobs: logprobs(data, 3, n), ..call }.into(), CLOSE)
        }));
    }
    cases.push(Case::new("sample rows of a larger tensor", move |data| {
        let call = call(data, 1200, &[warm(1), greedy, Row { top_k: 5, ..warm(2) }]);
        let logits = data.strided_input(F32, [1200, 3, 1, 1], [1203, 3, 1, 1]);
        (Call { logits, ..call }.into(), Tolerance::Exact)
    }));
    cases
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let usual = Row { top_k: 40, top_p: 0.95, min_p: 0.05, ..warm(1) };
    let nucleus = Row { top_p: 0.9, ..warm(2) };
    if level == Level::Bench {
        let mut cases = Vec::new();
        for (vocab, rows) in [(128_256, 1), (262_144, 1), (128_256, 64)] {
            let rows_of = |row: Row| vec![row; rows];
            cases.push(case("greedy", vocab, &rows_of(Row::default())));
            cases.push(case("temperature", vocab, &rows_of(warm(1))));
            cases.push(case("top_k, top_p, min_p", vocab, &rows_of(usual)));
            cases.push(case("top_p", vocab, &rows_of(nucleus)));
        }
        cases.push(Case::new("sample log-probabilities vocab=128256", |data| {
            let call = call(data, 128_256, &[Row::default()]);
            (Call { logprobs: logprobs(data, 1, 20), ..call }.into(), CLOSE)
        }));
        return cases;
    }
    let mut cases = small();
    if level == Level::Full {
        for vocab in [128_256, 262_144] {
            cases.push(case("greedy", vocab, &[Row::default(); 5]));
            cases.push(case("draws", vocab, &[warm(1), warm(2), warm(3)]));
            cases.push(case("cuts", vocab, &cut_rows()));
            cases.push(case_of("cuts of equal logits", vocab, &[usual, nucleus], |_| 1.0));
        }
        cases.push(with_lists(151_936, penalised()));
        let many: Vec<Row> =
            (0..64).map(|seed| Row { seed, ..[usual, nucleus, warm(1), Row::default()][seed as usize % 4] }).collect();
        cases.push(case("of everything", 128_256, &many));
    }
    cases
}
