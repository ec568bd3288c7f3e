//! `rope`: rotary position embedding. Pairs of elements of each head are turned by an angle that grows with the token's
//! position; how fast each pair turns is a table made by [`RopeParams::freqs`] when the model is loaded.

pub mod cases;
mod cpu;
mod frequencies;
mod reference;

pub(crate) use cpu::Angles;
pub use frequencies::RopeParams;
use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, require};
use crate::rows::{float_functions, outer, reachable, require_whole_strides};
use crate::tensor::Tensor;

const NAME: &str = "rope";

/// One line for the registry.
pub const SUMMARY: &str = "rotary position embedding: normal, neox, mrope, imrope, vision; YaRN and frequency factors";

/// Which elements form a pair, and which position a pair follows. With several positions for a token (rows of
/// `positions`: time, height, width, extra), sections give each row its number of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Elements 2p and 2p + 1 are pair p.
    Normal,
    /// Elements p and p + n_dims / 2 are pair p.
    Neox,
    /// Pairs as `Neox`; the sections lie one after the other, and repeat.
    Mrope,
    /// Pairs as `Neox`; the first three sections are interleaved (time, height, width, time, ..), the rest is extra.
    Imrope,
    /// Elements p and p + n_dims are pair p; the first two sections repeat, and frequencies start again with each.
    Vision,
}

impl RopeStyle {
    /// Number of pairs.
    pub fn pairs(self, n_dims: usize) -> usize {
        if self == RopeStyle::Vision { n_dims } else { n_dims / 2 }
    }

    /// Number of positions of a token.
    pub fn position_rows(self) -> usize {
        if matches!(self, RopeStyle::Normal | RopeStyle::Neox) { 1 } else { 4 }
    }

    /// Which row of positions a pair follows.
    pub fn position_row(self, pair: usize, sections: [usize; 4]) -> usize {
        match self {
            RopeStyle::Normal | RopeStyle::Neox => 0,
            RopeStyle::Vision => usize::from(pair % (sections[0] + sections[1]) >= sections[0]),
            RopeStyle::Mrope => {
                let sector = pair % sections.iter().sum::<usize>();
                (0..3).find(|&row| sector < sections[..=row].iter().sum()).unwrap_or(3)
            }
            RopeStyle::Imrope => {
                let sector = pair % sections.iter().sum::<usize>();
                if sector < 3 * sections[sector % 3] { sector % 3 } else { 3 }
            }
        }
    }

    /// SECTIONS in the shader.
    fn number(self) -> u32 {
        match self {
            RopeStyle::Normal | RopeStyle::Neox => 0,
            RopeStyle::Mrope => 1,
            RopeStyle::Imrope => 2,
            RopeStyle::Vision => 3,
        }
    }
}

/// Operands of `rope`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[head_dim, heads, tokens, batch]`, F32, F16 or BF16, dense rows.
    pub x: Tensor,
    /// I32 `[tokens]`, or `[tokens, 4]` for the styles with several positions. Every batch uses the same.
    pub positions: Tensor,
    /// I32 `[2, pairs]`: what [`RopeParams::freqs`] gives.
    pub freqs: Tensor,
    /// Result, same extents as `x`, F32, F16 or BF16; may be `x` itself.
    pub y: Tensor,
    /// Which elements form a pair, and which positions a pair follows.
    pub style: RopeStyle,
    /// Rotated elements of a head (half of them for [`RopeStyle::Vision`]); the others are copied.
    pub n_dims: usize,
    /// The first rotated element of a head.
    pub offset: usize,
    /// Pairs per section, for the styles with several positions.
    pub sections: [usize; 4],
    /// Factor of the rotated elements: what [`RopeParams::magnitude`] gives.
    pub magnitude: f32,
    /// Turn the other way round.
    pub backward: bool,
}

impl Call {
    fn pairs(&self) -> usize {
        self.style.pairs(self.n_dims)
    }

    /// The elements of pair `p`.
    fn pair(&self, p: usize) -> (usize, usize) {
        match self.style {
            RopeStyle::Normal => (self.offset + 2 * p, self.offset + 2 * p + 1),
            _ => (self.offset + p, self.offset + p + self.pairs()),
        }
    }

    /// Work of one row: its pairs, and the elements to copy unless they are in place already.
    fn row_items(&self) -> usize {
        self.pairs() + if self.x == self.y { 0 } else { self.x.shape[0] - 2 * self.pairs() }
    }
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        y: Address,
        positions: Address,
        freqs: Address,
        shape: [u32; 3],
        x_stride: [u32; 3],
        y_stride: [u32; 3],
        row_items: u32,
        items: u32,
        pairs: u32,
        offset: u32,
        positions_stride: u32,
        sections: [u32; 4],
        magnitude: f32,
        direction: f32,
    }
}

/// Threads of a workgroup: within every device's limit.
const THREADS: u32 = 128;

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.x, self.positions, self.freqs]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, positions, freqs, y, style, n_dims, offset, sections, .. } = self;
        require(x.shape == y.shape, NAME, || format!("x is {x} but y is {y}"))?;
        require(!x.is_empty(), NAME, || format!("x is {x}: there is nothing to turn"))?;
        require(x.has_dense_rows() && y.has_dense_rows(), NAME, || "rows of x and y must be dense".into())?;
        require_whole_strides(NAME, x)?;
        require_whole_strides(NAME, y)?;
        let rotated = 2 * self.pairs();
        let even = *style == RopeStyle::Vision || n_dims % 2 == 0;
        require(even && *n_dims > 0, NAME, || format!("n_dims is {n_dims}, want an even number above 0"))?;
        require(offset.saturating_add(rotated) <= x.shape[0], NAME, || {
            format!("elements {offset} to {offset} + {rotated} are turned, but a row of x {x} has {}", x.shape[0])
        })?;
        let (tokens, rows) = (x.shape[2], style.position_rows());
        let fits = positions.ty == TensorType::I32 && positions.shape == [tokens, rows, 1, 1];
        require(fits && positions.has_dense_rows(), NAME, || {
            format!("positions are {positions}, want I32[{tokens}, {rows}] with dense rows for {style:?}")
        })?;
        require_whole_strides(NAME, positions)?;
        let fits = freqs.ty == TensorType::I32 && freqs.shape == [2, self.pairs(), 1, 1] && freqs.is_dense();
        require(fits, NAME, || format!("turns are {freqs}, want dense I32[2, {}]", self.pairs()))?;
        let used = if *style == RopeStyle::Vision { 2 } else { 4 };
        let total = sections[..used].iter().fold(0usize, |sum, &n| sum.saturating_add(n));
        let bounded = u32::try_from(total.saturating_mul(3)).is_ok();
        require(rows == 1 || (total > 0 && bounded), NAME, || {
            format!("the first {used} sections of {sections:?} must hold some pairs, and fewer than 2^30")
        })
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let (load_x, _) = float_functions(NAME, &self.x)?;
        let (_, store_y) = float_functions(NAME, &self.y)?;
        reachable(NAME, &self.positions)?;
        let items = self.x.rows() * self.row_items();
        // The last workgroups of the grid lie past the end, and their indices must not wrap.
        if items > 1 << 31 {
            return Err(Unsupported { operation: NAME, reason: format!("{items} pairs in one call, at most 2^31") });
        }
        let shader =
            Shader::new(format!("{NAME}.{}", self.x.ty.name().to_lowercase()), "rope/rope.comp", Params::glsl())
                .define("WG", THREADS)
                .define("LOAD_X", load_x)
                .define("STORE_Y", store_y)
                .define("ADJACENT", u32::from(self.style == RopeStyle::Normal))
                .define("SECTIONS", self.style.number())
                .define("COPY", u32::from(self.row_items() > self.pairs()));
        Ok(Choice::one(Path::Scalar, shader, grid(items.div_ceil(THREADS as usize), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let narrow = |n: usize| u32::try_from(n).expect("check and pick refuse numbers past 32 bits");
        let sections = if self.style.position_rows() == 1 { [0; 4] } else { self.sections };
        Params {
            x: at(&self.x),
            y: at(&self.y),
            positions: at(&self.positions),
            freqs: at(&self.freqs),
            shape: outer(self.x.extents()),
            x_stride: outer(self.x.element_strides()),
            y_stride: outer(self.y.element_strides()),
            row_items: narrow(self.row_items()),
            items: narrow(self.x.rows() * self.row_items()),
            pairs: narrow(self.pairs()),
            offset: narrow(self.offset),
            positions_stride: self.positions.element_strides()[1],
            sections: sections.map(narrow),
            magnitude: self.magnitude,
            direction: if self.backward { -1.0 } else { 1.0 },
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        (0..self.x.shape[2])
            .map(|token| {
                let (x, y) = (self.x.narrow(2, token, 1), self.y.narrow(2, token, 1));
                Call { x, y, positions: self.positions.narrow(0, token, 1), ..*self }.into()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    fn call(style: RopeStyle) -> Call {
        let tensor = |slot, ty, shape| Tensor::dense(Slot(slot), ty, shape);
        Call {
            x: tensor(0, TensorType::F32, [16, 2, 3, 1]),
            positions: tensor(1, TensorType::I32, [3, style.position_rows(), 1, 1]),
            freqs: tensor(2, TensorType::I32, [2, style.pairs(8), 1, 1]),
            y: tensor(3, TensorType::F32, [16, 2, 3, 1]),
            style,
            n_dims: 8,
            offset: 0,
            sections: [2, 1, 1, 0],
            magnitude: 1.0,
            backward: false,
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let good = call(RopeStyle::Mrope);
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { offset: 9, ..good }).contains("9 + 8"));
        assert!(reason(Call { offset: usize::MAX, ..good }).contains("a row of x"));
        assert!(reason(Call { n_dims: 7, ..good }).contains("even"));
        assert!(reason(Call { n_dims: 6, ..good }).contains("turns"));
        assert!(reason(Call { sections: [0; 4], ..good }).contains("sections"));
        assert!(reason(Call { sections: [usize::MAX; 4], ..good }).contains("sections"));
        assert!(reason(Call { style: RopeStyle::Neox, ..good }).contains("positions"));
        assert!(reason(Call { y: good.y.narrow(1, 0, 1), ..good }).contains("y is"));
    }

    #[test]
    fn the_parameter_block_fits_every_device() {
        let call = call(RopeStyle::Vision);
        let choice = call.pick(&Caps::least(), None).unwrap();
        assert!(call.params(&choice, 0, &|_| Address(0)).len() <= 128);
        assert!(call.pick(&Caps::least(), Some(Path::Coopmat2)).is_err());
        let whole = Tensor::dense(Slot(0), TensorType::I32, [16, 2, 3, 1]);
        assert!(Call { x: whole, ..call }.pick(&Caps::least(), None).is_err());
    }

    #[test]
    fn sections_choose_the_row_of_positions() {
        let rows = |style: RopeStyle, sections, pairs: usize| -> Vec<usize> {
            (0..pairs).map(|p| style.position_row(p, sections)).collect()
        };
        assert_eq!(rows(RopeStyle::Mrope, [2, 1, 1, 1], 7), [0, 0, 1, 2, 3, 0, 0]);
        assert_eq!(rows(RopeStyle::Mrope, [0, 2, 0, 1], 3), [1, 1, 3]);
        assert_eq!(rows(RopeStyle::Imrope, [3, 2, 1, 2], 8), [0, 1, 2, 0, 1, 3, 0, 3]);
        assert_eq!(rows(RopeStyle::Vision, [2, 2, 9, 9], 6), [0, 0, 1, 1, 0, 0]);
    }
}
