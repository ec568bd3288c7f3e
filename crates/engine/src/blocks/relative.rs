//! Attention without positions: scores get a bias by the distance of keys instead, from a table that has one for each of the nearest
//! distances, and one for each of some ranges of those far away. Scores are not scaled.

use kiln_kernels::tensor::Tensor;

use super::attend::{Attended, Extras};
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Source};

/// The key of the number of ranges.
pub const BUCKETS: &str = "attention.relative_buckets_count";
/// Distances from here on are all alike. Files do not say it.
const FAR: usize = 128;

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub struct RelativeSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// Heads, of queries as of keys.
    pub heads: usize,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
}

/// Attention to the tokens of a text, or to those of the text that it answers.
#[derive(Clone, Debug)]
pub struct Relative {
    attended: Attended,
    q: Linear,
    k: Linear,
    v: Linear,
    output: Linear,
    caches: [Tensor; 2],
    distances: Option<Tensor>,
}

impl Relative {
    /// Reads `KIND_q`, `KIND_k`, `KIND_v` and `KIND_o`. With `causal`, a token sees those up to itself.
    pub fn load(
        l: &mut Loader<'_>,
        kind: &str,
        spec: &RelativeSpec,
        causal: bool,
        caches: [Tensor; 2],
        distances: Option<Tensor>,
    ) -> Result<Relative, Error> {
        let RelativeSpec { hidden, heads, head_dim, value_dim } = *spec;
        let mut matrix = |part: &str, shape: [usize; 2]| {
            let name = format!("{kind}_{part}");
            // Files of some tools carry this factor without using it.
            l.ignore(&format!("{name}.scale"));
            l.matrix(&name, &shape)
        };
        Ok(Relative {
            q: matrix("q", [hidden, heads * head_dim])?,
            k: matrix("k", [hidden, heads * head_dim])?,
            v: matrix("v", [hidden, heads * value_dim])?,
            output: matrix("o", [heads * value_dim, hidden])?,
            attended: Attended {
                heads,
                kv_heads: heads,
                head_dim,
                value_dim,
                scale: 1.0,
                softcap: 0.0,
                max_bias: 0.0,
                window: None,
                chunk: None,
                causal,
            },
            caches,
            distances,
        })
    }

    /// Writes keys and values of `x` to the caches.
    pub fn remember(&self, b: &mut Builder, batch: &Batch, x: Tensor) {
        let k = b.linear("k", x, &self.k);
        let v = b.linear("v", x, &self.v);
        b.store("k_write", k, batch.ports.rows, self.caches[0]);
        b.store("v_write", v, batch.ports.rows, self.caches[1]);
    }

    /// What `x` finds in the caches: among the tokens of its own text, or of the one that it answers.
    pub fn attend(&self, b: &mut Builder, batch: &Batch, x: Tensor, source: Option<Source>) -> Tensor {
        let q = b.linear("q", x, &self.q);
        let q = q.reshape([self.attended.head_dim, self.attended.heads, q.shape[1], 1]);
        let extras = Extras { distances: self.distances, source, ..Extras::default() };
        let y = self.attended.build(b, batch, q, self.caches, extras);
        b.linear("output", y, &self.output)
    }
}

/// Reads how many ranges of distances there are.
pub fn buckets(l: &Loader<'_>) -> Result<usize, Error> {
    // The nearest distances, a half of them or a quarter, have a range of their own, which must end before all are far.
    let (least, most) = (4, 2 * FAR - 1);
    let buckets = l.keys.count(BUCKETS, most)?;
    l.keys.require(buckets >= least, BUCKETS, buckets, &format!("{least} to {most}"))?;
    Ok(buckets)
}

/// The biases `[heads, distances]` of a layer, from its table `attn_rel_b`; the first layer's where it has none. With `both`, half of
/// the ranges are those of keys behind the query.
pub fn distances(l: &mut Loader<'_>, heads: usize, buckets: usize, both: bool) -> Result<Option<Tensor>, Error> {
    let name = "attn_rel_b.weight";
    let Some(shape) = l.shape(name) else { return Ok(None) };
    if shape != [heads, buckets, 1, 1] {
        let (name, got) = (l.full(name), shape.to_vec());
        return Err(Error::TensorShape { name, got, want: vec![heads, buckets] });
    }
    let table = l.values(name)?.unwrap_or_default();
    let far = FAR as isize;
    let row = |distance: isize| &table[bucket(distance, buckets, both) * heads..][..heads];
    let values: Vec<f32> = (-far..=far).flat_map(row).copied().collect();
    let name = l.full("attn_rel_b.distances");
    Ok(Some(l.constant(&name, &values, [heads, 2 * FAR + 1, 1, 1])))
}

/// The range of a distance, key minus query.
fn bucket(distance: isize, buckets: usize, both: bool) -> usize {
    let (count, first, away) = match both {
        true => (buckets / 2, if distance > 0 { buckets / 2 } else { 0 }, distance.unsigned_abs()),
        false => (buckets, 0, (-distance).max(0).unsigned_abs()),
    };
    let near = count / 2;
    if away < near {
        return first + away;
    }
    // Far ranges grow with the distance. Rounded as those who made the models round it: the logarithm to 32 bits, the rest to 64.
    let grown = (away as f64 / near as f64) as f32;
    let steps = f64::from(grown.ln() * (count - near) as f32) / (FAR as f64 / near as f64).ln();
    let far = (near as f64 + steps) as f32;
    first + (far as usize).min(count - 1)
}

#[cfg(test)]
mod tests {
    use super::bucket;

    #[test]
    fn near_distances_have_a_range_each_and_far_ones_share_some() {
        let both = |distances: &[isize]| distances.iter().map(|d| bucket(*d, 32, true)).collect::<Vec<_>>();
        // As `transformers` says it of T5's 32 ranges.
        assert_eq!(both(&[0, -1, -7, -8, -11, -12, -15, -16, -127, -128]), [0, 1, 7, 8, 8, 9, 9, 10, 15, 15]);
        assert_eq!(both(&[1, 7, 8, 12, 64, 128]), [17, 23, 24, 25, 30, 31]);
        let causal = |distances: &[isize]| distances.iter().map(|d| bucket(*d, 32, false)).collect::<Vec<_>>();
        assert_eq!(causal(&[0, 5, -1, -15, -16, -19, -31, -64, -128]), [0, 0, 1, 15, 16, 17, 21, 26, 31]);
    }
}
