//! Rows of the commonest block formats times one column on the CPU, without making the weights floats first: codes are
//! multiplied as they are, scales come in once a group. The other formats go the general way of `cpu.rs`.

use half::f16;
use kiln_gguf::TensorType;

/// A column with the sums of its sixteens, which minimums and offsets of codes are multiplied with.
pub(super) struct Column<'a> {
    x: &'a [f32],
    sums: Vec<f32>,
}

impl<'a> Column<'a> {
    pub(super) fn new(x: &'a [f32]) -> Column<'a> {
        Column { x, sums: x.chunks(16).map(|x| x.iter().sum()).collect() }
    }

    /// Elements `16 i .. 16 i + 16`.
    fn sixteen(&self, i: usize) -> &[f32; 16] {
        self.x[16 * i..].first_chunk().expect("columns are as long as rows")
    }

    /// The sum of elements `32 i .. 32 i + 32`.
    fn sum32(&self, i: usize) -> f32 {
        self.sums[2 * i] + self.sums[2 * i + 1]
    }
}

/// Whole blocks of a row times a column.
pub(super) type RowDot = fn(row: &[u8], column: &Column<'_>) -> f32;

/// The function of a format, if it has one.
pub(super) fn row_dot(ty: TensorType) -> Option<RowDot> {
    match ty {
        TensorType::Q4_0 => Some(q4_0),
        TensorType::Q4_1 => Some(q4_1),
        TensorType::Q8_0 => Some(q8_0),
        TensorType::Q4_K => Some(q4_k),
        TensorType::Q6_K => Some(q6_k),
        _ => None,
    }
}

/// Eight sums side by side: the compiler keeps them in vector registers.
type Sums = [f32; 8];

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[inline(always)]
fn add_products(sums: &mut Sums, codes: &[u8; 16], x: &[f32; 16]) {
    for half in 0..2 {
        for j in 0..8 {
            sums[j] += f32::from(codes[8 * half + j]) * x[8 * half + j];
        }
    }
}

#[inline(always)]
fn add_scaled(sums: &mut Sums, part: &Sums, scale: f32) {
    for (sum, part) in sums.iter_mut().zip(part) {
        *sum += scale * part;
    }
}

#[inline(always)]
fn low(bytes: &[u8; 16]) -> [u8; 16] {
    bytes.map(|b| b & 15)
}

#[inline(always)]
fn high(bytes: &[u8; 16]) -> [u8; 16] {
    bytes.map(|b| b >> 4)
}

fn q4_0(row: &[u8], column: &Column<'_>) -> f32 {
    let (mut sums, mut rest) = ([0.0; 8], 0.0);
    for (i, block) in row.as_chunks::<18>().0.iter().enumerate() {
        let d = half_at(block, 0);
        let nibbles = block[2..].first_chunk().expect("16 bytes of nibbles");
        let mut part = [0.0; 8];
        add_products(&mut part, &low(nibbles), column.sixteen(2 * i));
        add_products(&mut part, &high(nibbles), column.sixteen(2 * i + 1));
        add_scaled(&mut sums, &part, d);
        rest += -8.0 * d * column.sum32(i);
    }
    sums.iter().sum::<f32>() + rest
}

fn q4_1(row: &[u8], column: &Column<'_>) -> f32 {
    let (mut sums, mut rest) = ([0.0; 8], 0.0);
    for (i, block) in row.as_chunks::<20>().0.iter().enumerate() {
        let nibbles = block[4..].first_chunk().expect("16 bytes of nibbles");
        let mut part = [0.0; 8];
        add_products(&mut part, &low(nibbles), column.sixteen(2 * i));
        add_products(&mut part, &high(nibbles), column.sixteen(2 * i + 1));
        add_scaled(&mut sums, &part, half_at(block, 0));
        rest += half_at(block, 2) * column.sum32(i);
    }
    sums.iter().sum::<f32>() + rest
}

fn q8_0(row: &[u8], column: &Column<'_>) -> f32 {
    let mut sums = [0.0; 8];
    for (i, block) in row.as_chunks::<34>().0.iter().enumerate() {
        let mut part = [0.0; 8];
        for (j, codes) in block[2..].as_chunks::<8>().0.iter().enumerate() {
            let x: &[f32; 8] = column.x[32 * i + 8 * j..].first_chunk().expect("columns are as long as rows");
            for l in 0..8 {
                part[l] += f32::from(codes[l] as i8) * x[l];
            }
        }
        add_scaled(&mut sums, &part, half_at(block, 0));
    }
    sums.iter().sum()
}

fn q4_k(row: &[u8], column: &Column<'_>) -> f32 {
    let (mut sums, mut rest) = ([0.0; 8], 0.0);
    for (i, block) in row.as_chunks::<144>().0.iter().enumerate() {
        let (d, dmin) = (half_at(block, 0), half_at(block, 2));
        for (pair, nibbles) in block[16..].as_chunks::<32>().0.iter().enumerate() {
            let (first, second) = nibbles.split_at(16);
            let halves: [&[u8; 16]; 2] = [first, second].map(|h| h.first_chunk().expect("half of 32"));
            for upper in 0..2 {
                let sub = 2 * pair + upper;
                let (scale, least) = six_bits(&block[4..16], sub);
                let mut part = [0.0; 8];
                for (half, bytes) in halves.iter().enumerate() {
                    let codes = if upper == 0 { low(bytes) } else { high(bytes) };
                    add_products(&mut part, &codes, column.sixteen(16 * i + 2 * sub + half));
                }
                add_scaled(&mut sums, &part, d * scale);
                rest -= dmin * least * column.sum32(8 * i + sub);
            }
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Scale and minimum of sub-block `i` from the twelve bytes of six-bit numbers.
fn six_bits(c: &[u8], i: usize) -> (f32, f32) {
    let (scale, least) = match i {
        0..4 => (c[i] & 63, c[i + 4] & 63),
        _ => ((c[i + 4] & 15) | (c[i - 4] >> 6) << 4, (c[i + 4] >> 4) | (c[i] >> 6) << 4),
    };
    (f32::from(scale), f32::from(least))
}

fn q6_k(row: &[u8], column: &Column<'_>) -> f32 {
    let (mut sums, mut rest) = ([0.0; 8], 0.0);
    for (i, block) in row.as_chunks::<210>().0.iter().enumerate() {
        let d = half_at(block, 208);
        // Sixteen elements at a time: 128 n + 32 g + 16 h.
        for sixteen in 0..16 {
            let (n, g, h) = (sixteen / 8, sixteen / 2 % 4, sixteen % 2);
            let lows: &[u8; 16] = block[64 * n + 32 * (g % 2) + 16 * h..].first_chunk().expect("low nibbles");
            let highs: &[u8; 16] = block[128 + 32 * n + 16 * h..].first_chunk().expect("upper bits");
            let lows = if g < 2 { low(lows) } else { high(lows) };
            let codes: [u8; 16] = std::array::from_fn(|l| lows[l] | (highs[l] >> (2 * g) & 3) << 4);
            let scale = d * f32::from(block[192 + sixteen] as i8);
            let mut part = [0.0; 8];
            add_products(&mut part, &codes, column.sixteen(16 * i + sixteen));
            add_scaled(&mut sums, &part, scale);
            rest += -32.0 * scale * column.sums[16 * i + sixteen];
        }
    }
    sums.iter().sum::<f32>() + rest
}
