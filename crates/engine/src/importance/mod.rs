//! How much every column of every matrix counts: the mean square of what it is multiplied by while a model reads a text. Errors
//! of weights that multiply large values cost more, so quantising weighs them by this.

mod file;
mod observe;

use std::collections::BTreeMap;

pub use file::ImportanceError;
pub use observe::Observer;

/// What was seen of one matrix, or of each matrix of a stack of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Columns of a matrix.
    pub columns: usize,
    /// Sums of squares, matrix after matrix.
    pub sums: Vec<f32>,
    /// How many rows each matrix was multiplied by.
    pub counts: Vec<f32>,
}

impl Seen {
    fn new(columns: usize, matrices: usize) -> Seen {
        Seen { columns, sums: vec![0.0; columns * matrices], counts: vec![0.0; matrices] }
    }

    /// Another row that a matrix was multiplied by.
    fn add(&mut self, matrix: usize, row: impl Iterator<Item = f64>) {
        self.counts[matrix] += 1.0;
        let sums = &mut self.sums[matrix * self.columns..(matrix + 1) * self.columns];
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += (value * value) as f32;
        }
    }

    /// The mean squares for one matrix. An expert that was never asked counts its columns alike.
    pub fn means(&self, matrix: usize) -> Vec<f32> {
        let count = self.counts.get(matrix).copied().unwrap_or(0.0);
        let sums = self.sums.get(matrix * self.columns..(matrix + 1) * self.columns);
        match sums {
            Some(sums) if count > 0.0 => sums.iter().map(|sum| sum / count).collect(),
            _ => vec![1.0; self.columns],
        }
    }

    /// Number of matrices.
    pub fn matrices(&self) -> usize {
        self.counts.len()
    }
}

/// An importance matrix: what was seen of every matrix of a model, by the name of its tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Importance {
    /// By the name of the tensor.
    pub tensors: BTreeMap<String, Seen>,
    /// What was read, for people.
    pub datasets: Vec<String>,
    /// Pieces of text that were read, and the tokens of each.
    pub chunks: [u32; 2],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_by_matrix_and_what_was_never_seen_counts_alike() {
        let mut seen = Seen::new(2, 3);
        seen.add(0, [1.0, 2.0].into_iter());
        seen.add(0, [3.0, 0.0].into_iter());
        seen.add(2, [0.0, 5.0].into_iter());
        assert_eq!([seen.means(0), seen.means(1), seen.means(2)], [vec![5.0, 2.0], vec![1.0, 1.0], vec![0.0, 25.0]]);
        assert_eq!(seen.means(7), [1.0, 1.0]);
    }
}
