//! Cases of `flash_attention` whose keys and values arrive with the token. Besides the reference they are judged by the two steps that they
//! stand for, which give the same bits (`Operation::parts`).

use kiln_gguf::TensorType::{self, F16, F32, I32};

use super::Window::{self, Last};
use super::cases::{CLOSE, rounding, splits, whole};
use super::{Call, KvAppend, Mask, Pages};
use crate::case::{Case, Data, Level};
use crate::mul_mat::Norm;
use crate::rope::{RopeParams, RopeStyle};
use crate::tensor::Tensor;

/// One token of each of some sequences.
#[derive(Clone, Copy, Debug)]
struct Tokens {
    style: RopeStyle,
    types: [TensorType; 2],
    /// Elements of a head of keys and of values.
    head: [usize; 2],
    /// Elements of it that turn, and the first of them.
    turned: [usize; 2],
    /// Heads, and those of the cache.
    heads: [usize; 2],
    /// Keys of each sequence, the one that arrives among them; 0 for rows without a token.
    lengths: &'static [usize],
    page: usize,
    window: Option<Window>,
    /// Runs of keys, and whether the last of them adds up.
    splits: (usize, bool),
    /// Whether heads of queries and of keys are normed by weights, where they are normed.
    norms: Option<[bool; 2]>,
    softcap: f32,
    /// Whether the result is left rounded, too.
    rounded: bool,
    /// What the keys and values that arrive are multiplied by: halves do not hold a million.
    times: f64,
}

const PLAIN: Tokens = Tokens {
    style: RopeStyle::Neox,
    types: [F16, F16],
    head: [64, 64],
    turned: [64, 0],
    heads: [4, 2],
    lengths: &[113],
    page: 16,
    window: None,
    splits: (1, false),
    norms: None,
    softcap: 0.0,
    rounded: false,
    times: 1.0,
};

/// Large numbers in these rows of a cache `[width, rows, heads]`: a kernel that reads them before it writes them gives a wrong result.
fn spoil(data: &mut Data, cache: &Tensor, rows: &[i32]) {
    if data.is_blank() {
        return;
    }
    for row in rows.iter().filter(|row| **row >= 0) {
        let row = cache.narrow(1, *row as usize, 1);
        data.memory.write(&row, &vec![60000.0; row.len()]);
    }
}

impl Tokens {
    /// The table of pages, whose numbers go down, and rows of the caches.
    fn places(&self) -> (Vec<i32>, Vec<i32>, usize) {
        let pages_of = |length: usize| length.div_ceil(self.page);
        let longest = self.lengths.iter().copied().map(pages_of).max().unwrap_or(0) + 1;
        let mut left = self.lengths.iter().copied().map(pages_of).sum::<usize>();
        let rows = (left + 1) * self.page;
        let (mut table, mut ids) = (Vec::new(), Vec::new());
        for &length in self.lengths {
            let pages: Vec<i32> = (0..pages_of(length)).map(|i| (left - i) as i32).collect();
            left -= pages.len();
            ids.push(pages.last().map_or(-1, |page| page * self.page as i32 + ((length - 1) % self.page) as i32));
            table.extend(pages.iter().copied().chain(std::iter::repeat_n(-1, longest - pages.len())));
        }
        (table, ids, rows)
    }

    fn call(&self, data: &mut Data) -> Call {
        let Tokens { style, head: [hsk, hsv], heads: [heads, kv_heads], .. } = *self;
        let batch = self.lengths.len();
        let (table, rows, n) = self.places();
        let [n_dims, offset] = self.turned;
        let params = RopeParams::plain(style, n_dims, 10000.0);
        let factors: Vec<f32> = (0..params.pairs()).map(|i| 1.0 + i as f32 / 8.0).collect();
        let freqs = params.freqs(Some(&factors)).expect("there is a factor for every pair");
        let freqs = data.input_with(I32, [2, params.pairs(), 1, 1], |_, i| f64::from(freqs[i]));
        // Products of q, k and v lie side by side.
        let width = heads * hsk + kv_heads * (hsk + hsv);
        let all = data.input_with(F32, [width, batch, 1, 1], |random, i| {
            random.uniform(-1.0, 1.0) * if i % width < heads * hsk { 1.0 } else { self.times }
        });
        let q = all.heads(0, hsk, heads).permute([0, 3, 1, 2]);
        let k = all.heads(heads * hsk, hsk, kv_heads);
        let v = all.heads((heads + kv_heads) * hsk, hsv, kv_heads);
        let [k_cache, v_cache] = [(self.types[0], hsk), (self.types[1], hsv)].map(|(ty, width)| {
            let cache = data.input(ty, [width, kv_heads, n, 1]).permute([0, 2, 1, 3]);
            spoil(data, &cache, &rows);
            cache
        });
        let positions: Vec<i32> = self.lengths.iter().map(|&length| length as i32 - 1).collect();
        let lengths: Vec<i32> = self.lengths.iter().map(|&length| length as i32).collect();
        let (positions, length) = (whole(data, &positions), whole(data, &lengths));
        let mask = Mask::Causal { positions, length, window: self.window, both: false };
        let table = whole(data, &table).reshape([table.len() / batch, batch, 1, 1]);
        let mut norm = |weighed: bool, eps| Norm { weight: weighed.then(|| data.input(F32, [hsk, 1, 1, 1])), eps };
        let norms = self.norms.map(|weighed| [norm(weighed[0], 0.5), norm(weighed[1], 0.01)]);
        let ids = whole(data, &rows);
        let kv_append = KvAppend { k, v, norms, ids, freqs, style, n_dims, offset, magnitude: 1.25 };
        let out = data.output(F32, [hsv, heads, 1, batch]);
        let call = Call {
            mask,
            pages: Some(Pages { table, size: self.page }),
            kv_append: Some(kv_append),
            logit_softcap: self.softcap,
            ..Call::plain(q, k_cache, v_cache, out, 0.125)
        };
        let (count, counted) = self.splits;
        let split = (count > 1).then(|| splits(data, &call, count, counted));
        Call { split, rounding: self.rounded.then(|| rounding(data, &out)), ..call }
    }

    fn case(self) -> Case {
        Case::new(format!("flash_attention arriving {self:?}"), move |data| (self.call(data).into(), CLOSE))
    }
}

/// The cases of a level.
pub(super) fn cases(level: Level) -> Vec<Case> {
    use RopeStyle::{Neox, Normal};
    let llama = Tokens { head: [128, 128], turned: [128, 0], heads: [32, 8], page: 64, ..PLAIN };
    if level == Level::Bench {
        return vec![Tokens { lengths: &[1024], splits: (16, true), ..llama }.case()];
    }
    // Alone, first of a page, last of a page, no token, and in the second round of a workgroup.
    const SEVERAL: &[usize] = &[1, 33, 48, 0, 97, 513];
    let mut cases = vec![
        PLAIN.case(),
        Tokens { style: Normal, ..PLAIN }.case(),
        Tokens { lengths: SEVERAL, style: Normal, head: [128, 128], turned: [128, 0], ..PLAIN }.case(),
        Tokens { lengths: SEVERAL, heads: [8, 1], ..PLAIN }.case(),
        Tokens { lengths: SEVERAL, times: 1e6, ..PLAIN }.case(),
        Tokens { lengths: SEVERAL, heads: [3, 3], types: [F32, F32], ..PLAIN }.case(),
        Tokens { lengths: SEVERAL, heads: [12, 1], splits: (4, true), ..PLAIN }.case(),
        Tokens { lengths: SEVERAL, splits: (3, false), window: Some(Last(40)), types: [F16, F32], ..PLAIN }.case(),
        Tokens { lengths: SEVERAL, norms: Some([true; 2]), head: [128, 128], turned: [128, 0], ..PLAIN }.case(),
        // Some of the elements turn, of the first ones or behind others.
        Tokens { head: [80, 80], turned: [32, 0], lengths: &[70, 2], ..PLAIN }.case(),
        Tokens { head: [96, 64], turned: [48, 16], lengths: &[70, 2], softcap: 10.0, ..PLAIN }.case(),
        Tokens { style: Normal, head: [40, 40], turned: [24, 8], norms: Some([true, false]), ..PLAIN }.case(),
        Tokens { head: [256, 256], turned: [64, 0], norms: Some([false, true]), lengths: &[65, 1], ..PLAIN }.case(),
        Tokens { lengths: &[300], splits: (16, true), ..llama }.case(),
        Tokens { lengths: &[300], splits: (4, true), rounded: true, ..llama }.case(),
        Tokens { rounded: true, norms: Some([true; 2]), ..PLAIN }.case(),
    ];
    if level == Level::Full {
        const LONG: &[usize] = &[16384, 1, 0, 8193, 257];
        for (style, norms) in [(Normal, None), (Neox, None), (Neox, Some([true; 2]))] {
            for splits in [(1, false), (7, true), (64, true), (64, false)] {
                cases.push(Tokens { style, norms, splits, lengths: LONG, ..llama }.case());
                let window = Some(Last(1000));
                cases.push(Tokens { style, norms, splits, lengths: LONG, heads: [14, 2], window, ..llama }.case());
            }
        }
    }
    cases
}
