//! `topk_moe`: the router of a mixture of experts: which experts a token goes to, and with which weights.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader, SubgroupRequest};

use crate::formats::row_strides;
use crate::host::HostMemory;
use crate::mul_mat::{Epilogue, Norm, Product};
use crate::mul_mat_vec;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, Work, grid, only_scalar, require};
use crate::rows::{cols_bound, reachable, require_whole_strides};
use crate::tensor::Tensor;

const NAME: &str = "topk_moe";

/// One line for the registry.
pub const SUMMARY: &str = "the n_used best experts of each token and their weights";

/// What becomes of the logits before experts are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// Softmax over all experts.
    Softmax,
    /// 1 / (1 + exp(-x)).
    Sigmoid,
    /// sqrt(ln(1 + exp(x))).
    SqrtSoftplus,
    /// The logits themselves.
    Identity,
}

/// How the gates of the chosen experts become weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shares {
    /// As they are.
    Gates,
    /// Divided by their sum, which is first brought into `least ..= most`.
    OfSum {
        /// The least divisor.
        least: f32,
        /// The largest divisor.
        most: f32,
    },
    /// Softmax over the chosen ones.
    Softmax,
}

/// Experts in consecutive groups of the same size: only those of the best groups can be chosen. A group is as good as the sum of
/// its two largest gates, bias included; of equal groups the first is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups whose experts can be chosen.
    pub used: usize,
}

/// The product that makes the logits of one token, where it is part of the call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// F32 `[K, experts]`, dense rows.
    pub a: Tensor,
    /// F32 `[K]`: the token.
    pub b: Tensor,
    /// How the token is normed first.
    pub norm: Option<Norm>,
    /// Factor of the product.
    pub scale: f32,
    /// F32 `[experts]`, added to the product.
    pub bias: Option<Tensor>,
    /// I32 `[1]`: zero before the call and zero again after it. The last workgroup to finish chooses.
    pub counter: Tensor,
}

impl Router {
    /// The product as an operation of its own.
    fn product(&self, logits: Tensor) -> mul_mat_vec::Call {
        let product = Product { a: self.a, b: self.b, d: logits };
        let epilogue = Epilogue { scale: self.scale, bias: self.bias, residual: None };
        mul_mat_vec::Call { epilogue, norm: self.norm, ..mul_mat_vec::Call::plain(product) }
    }
}

/// Most groups: a thread each.
const MOST_GROUPS: usize = 32;

/// Operands of `topk_moe`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// F32 `[experts, tokens]`, dense rows. With a router they are a result, too.
    pub logits: Tensor,
    /// What makes the logits, for one token; `None` where they are there.
    pub router: Option<Router>,
    /// F32 `[experts]`: added to the gates for the choice, not for the weights.
    pub bias: Option<Tensor>,
    /// I32 `[n_used, tokens]`, dense rows: the chosen experts, best first; of equal ones the lower number.
    pub ids: Tensor,
    /// F32 `[n_used, tokens]`, dense rows: their weights.
    pub weights: Tensor,
    /// Groups of experts, where the best groups are chosen first.
    pub groups: Option<Groups>,
    /// What becomes of the logits.
    pub gate: Gate,
    /// How gates become weights.
    pub shares: Shares,
    /// Factor of the weights.
    pub scale: f32,
    /// Added to the weights in the end.
    pub shift: f32,
}

kiln_gpu::params! {
    struct Params {
        logits: Address,
        bias: Address,
        ids: Address,
        weights: Address,
        logits_stride: u32,
        ids_stride: u32,
        weights_stride: u32,
        cols: u32,
        tokens: u32,
        n_used: u32,
        least_sum: f32,
        most_sum: f32,
        scale: f32,
        shift: f32,
    }
}

kiln_gpu::params! {
    struct RouterParams {
        logits: Address,
        bias: Address,
        ids: Address,
        weights: Address,
        a: Address,
        b: Address,
        norm_weight: Address,
        router_bias: Address,
        counter: Address,
        logits_stride: u32,
        ids_stride: u32,
        weights_stride: u32,
        cols: u32,
        n_used: u32,
        least_sum: f32,
        most_sum: f32,
        scale: f32,
        shift: f32,
        a_stride: u32,
        k: u32,
        router_scale: f32,
        eps: f32,
    }
}

impl Call {
    /// The choice that the logits of a product are for, with the product; the counter is [`Router::counter`].
    pub(crate) fn with_router(&self, product: &mul_mat_vec::Call, counter: Tensor) -> Option<Call> {
        let Product { a, b, d } = product.product;
        let epilogue = product.epilogue;
        let router = Router { a, b, norm: product.norm, scale: epilogue.scale, bias: epilogue.bias, counter };
        // What else the product does must be nothing.
        let same = mul_mat_vec::Call {
            exact: product.exact,
            batch_invariant: product.batch_invariant,
            scratch: product.scratch,
            ..router.product(d)
        };
        let fits = self.router.is_none() && d == self.logits && same == *product && !product.batch_invariant;
        fits.then_some(Call { router: Some(router), ..*self })
    }

    fn router_params(
        &self,
        router: &Router,
        (least_sum, most_sum): (f32, f32),
        at: &dyn Fn(&Tensor) -> Address,
    ) -> Vec<u8> {
        let place = |t: Option<Tensor>| t.as_ref().map_or(Address::default(), at);
        RouterParams {
            logits: at(&self.logits),
            bias: place(self.bias),
            ids: at(&self.ids),
            weights: at(&self.weights),
            a: at(&router.a),
            b: at(&router.b),
            norm_weight: place(router.norm.and_then(|norm| norm.weight)),
            router_bias: place(router.bias),
            counter: at(&router.counter),
            logits_stride: self.logits.element_strides()[1],
            ids_stride: self.ids.element_strides()[1],
            weights_stride: self.weights.element_strides()[1],
            cols: self.logits.extents()[0],
            n_used: self.ids.extents()[0],
            least_sum,
            most_sum,
            scale: self.scale,
            shift: self.shift,
            a_stride: row_strides(&router.a)[0],
            k: router.a.extents()[0],
            router_scale: router.scale,
            eps: router.norm.map_or(0.0, |norm| norm.eps),
        }
        .bytes()
    }
}

/// Experts a thread can keep in its registers: the rounds of `glsl/row_share.glsl`.
const PER_THREAD: usize = 16;
/// Threads that make a logit.
const ROUTER_THREADS: usize = 128;

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let Some(Router { a, b, norm, bias, .. }) = self.router else {
            return [Some(self.logits), self.bias].into_iter().flatten().collect();
        };
        [Some(a), Some(b), norm.and_then(|norm| norm.weight), bias, self.bias].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        let made = self.router.map(|router| [self.logits, router.counter]);
        [self.ids, self.weights].into_iter().chain(made.into_iter().flatten()).collect()
    }

    /// The router's weights.
    fn early(&self) -> Vec<Tensor> {
        self.router.map(|router| router.a).into_iter().collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { logits, bias, ids, weights, shares, .. } = self;
        if let Some(router) = &self.router {
            router.product(*logits).check()?;
            let plain = [router.a, router.b].iter().all(|t| t.ty == TensorType::F32 && t.has_dense_rows());
            require(plain && router.b.rows() == 1, NAME, || {
                format!("a router of {} and {}, want F32 and one token", router.a, router.b)
            })?;
            let counter = router.counter;
            let fits = counter.ty == TensorType::I32 && counter.len() == 1;
            require(fits, NAME, || format!("the router's counter is {counter}, want I32[1]"))?;
        }
        let [experts, tokens, n2, n3] = logits.shape;
        require(!logits.is_empty() && n2 * n3 == 1 && logits.ty == TensorType::F32, NAME, || {
            format!("logits are {logits}, want F32[experts, tokens]")
        })?;
        let n_used = ids.shape[0];
        require(n_used > 0 && n_used <= experts, NAME, || format!("{n_used} of {experts} experts cannot be chosen"))?;
        for (what, tensor, ty) in [("ids", ids, TensorType::I32), ("weights", weights, TensorType::F32)] {
            require(tensor.ty == ty && tensor.shape == [n_used, tokens, 1, 1], NAME, || {
                format!("{what} are {tensor}, want {ty}[{n_used}, {tokens}]")
            })?;
        }
        for tensor in [logits, ids, weights] {
            require(tensor.has_dense_rows(), NAME, || format!("rows of {tensor} must be dense"))?;
            require_whole_strides(NAME, tensor)?;
        }
        if let Some(b) = bias {
            let fits = b.len() == experts && b.ty == TensorType::F32 && b.is_dense();
            require(fits, NAME, || format!("bias is {b}, want F32[{experts}]"))?;
        }
        if let Some(Groups { count, used }) = self.groups {
            let divided = count > 0 && experts.is_multiple_of(count) && experts / count >= 2;
            require(divided && count <= MOST_GROUPS && used > 0 && used <= count, NAME, || {
                format!(
                    "{used} of {count} groups of {experts} experts, want at most {MOST_GROUPS} groups of at least 2 each"
                )
            })?;
            let left = experts / count * used;
            require(n_used <= left, NAME, || {
                format!("{n_used} of the {left} experts of {used} groups cannot be chosen")
            })?;
        }
        match shares {
            Shares::OfSum { least, most } => {
                require(least <= most, NAME, || format!("the sum cannot be at least {least} and at most {most}"))
            }
            _ => Ok(()),
        }
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        for tensor in [&self.logits, &self.ids, &self.weights] {
            reachable(NAME, tensor)?;
        }
        let bound = cols_bound(self.logits.shape[0]);
        // One subgroup finds a maximum fastest; more are used only if one cannot hold the logits.
        let lanes = caps.subgroups.size.max(1) as usize;
        let solo = caps.subgroups.arithmetic && caps.subgroups.full && bound <= lanes * PER_THREAD;
        let threads = match self.router {
            Some(_) => lanes.max(ROUTER_THREADS),
            _ if solo => lanes,
            _ if bound <= 32 * PER_THREAD => 32,
            _ => 128,
        };
        if bound > threads * PER_THREAD {
            let reason = format!("{} experts, at most {}", self.logits.shape[0], threads * PER_THREAD);
            return Err(Unsupported { operation: NAME, reason });
        }
        if let Some(router) = &self.router {
            let aligned = |t: &Tensor| t.offset.is_multiple_of(16) && t.stride[1].is_multiple_of(16);
            let quads = router.a.shape[0].is_multiple_of(4)
                && aligned(&router.a)
                && aligned(&router.b)
                && router.norm.and_then(|norm| norm.weight).is_none_or(|weight| aligned(&weight));
            if !quads {
                let reason = format!("a router of {} wants fours of elements at multiples of 16 bytes", router.a);
                return Err(Unsupported { operation: NAME, reason });
            }
        }
        let gate = match self.gate {
            Gate::Softmax => 0,
            Gate::Sigmoid => 1,
            Gate::SqrtSoftplus => 2,
            Gate::Identity => 3,
        };
        let shares = match self.shares {
            Shares::Gates => 0,
            Shares::OfSum { .. } => 1,
            Shares::Softmax => 2,
        };
        let (name, params) = match self.router {
            Some(_) => ("router", RouterParams::glsl()),
            None => ("f32", Params::glsl()),
        };
        let shader = Shader::new(format!("{NAME}.{name}"), "topk_moe/topk_moe.comp", params)
            .define("WG", threads)
            .define("SUBGROUPS", u32::from(caps.subgroups.arithmetic))
            .define("COLS_BOUND", bound)
            .define("SOLO", u32::from(solo))
            .define("LANES", lanes)
            .define("GATE", gate)
            .define("SHARES", shares)
            .define("BIAS", u32::from(self.bias.is_some()))
            .define("GROUPS", self.groups.map_or(0, |g| g.count))
            .define("GROUPS_USED", self.groups.map_or(0, |g| g.used))
            .define("ROUTER", u32::from(self.router.is_some()));
        let shader = if solo { shader.subgroup(SubgroupRequest::Full) } else { shader };
        let Some(router) = self.router else {
            return Ok(Choice::one(Path::Scalar, shader, grid(self.logits.shape[1], caps)));
        };
        let weight = router.norm.and_then(|norm| norm.weight);
        let shader = shader
            .define("NORM", u32::from(router.norm.is_some()))
            .define("NORM_WEIGHT", u32::from(weight.is_some()))
            .define("ROUTER_BIAS", u32::from(router.bias.is_some()));
        Ok(Choice::one(Path::Scalar, shader, [self.logits.shape[0] as u32, 1, 1]))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let (least_sum, most_sum) = match self.shares {
            Shares::OfSum { least, most } => (least, most),
            _ => (0.0, 0.0),
        };
        if let Some(router) = self.router {
            return self.router_params(&router, (least_sum, most_sum), at);
        }
        Params {
            logits: at(&self.logits),
            bias: self.bias.as_ref().map_or(Address::default(), at),
            ids: at(&self.ids),
            weights: at(&self.weights),
            logits_stride: self.logits.element_strides()[1],
            ids_stride: self.ids.element_strides()[1],
            weights_stride: self.weights.element_strides()[1],
            cols: self.logits.extents()[0],
            tokens: self.logits.extents()[1],
            n_used: self.ids.extents()[0],
            least_sum,
            most_sum,
            scale: self.scale,
            shift: self.shift,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        if let Some(router) = &self.router {
            router.product(self.logits).reference(memory);
        }
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        if let Some(router) = &self.router {
            router.product(self.logits).cpu(memory);
        }
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        let row = self.logits.row_bytes() + self.ids.row_bytes() + self.weights.row_bytes();
        let flops = self.logits.len() * (self.ids.shape[0] + 4);
        let made = self.router.map_or(Work { bytes: 0.0, flops: 0.0 }, |router| router.product(self.logits).work());
        Work { bytes: (self.logits.rows() * row) as f64 + made.bytes, flops: flops as f64 + made.flops }
    }

    fn parts(&self) -> Vec<crate::Call> {
        if self.router.is_some() {
            return Vec::new();
        }
        let token = |t: Tensor, i: usize| t.narrow(1, i, 1);
        (0..self.logits.shape[1])
            .map(|i| {
                let (ids, weights) = (token(self.ids, i), token(self.weights, i));
                Call { logits: token(self.logits, i), ids, weights, ..*self }.into()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    fn call(experts: usize) -> Call {
        let tensor = |slot, ty, n| Tensor::dense(Slot(slot), ty, [n, 3, 1, 1]);
        Call {
            logits: tensor(0, TensorType::F32, experts),
            router: None,
            bias: None,
            ids: tensor(1, TensorType::I32, 4),
            weights: tensor(2, TensorType::F32, 4),
            groups: None,
            gate: Gate::Softmax,
            shares: Shares::Gates,
            scale: 1.0,
            shift: 0.0,
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(call(8).check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(call(3)).contains("4 of 3 experts"));
        assert!(reason(Call { weights: call(8).ids, ..call(8) }).contains("want F32[4, 3]"));
        assert!(reason(Call { bias: Some(call(8).logits), ..call(8) }).contains("bias"));
        let grouped = |count, used| reason(Call { groups: Some(Groups { count, used }), ..call(8) });
        assert!(grouped(3, 1).contains("1 of 3 groups of 8 experts") && grouped(4, 5).contains("5 of 4 groups"));
        assert!(grouped(4, 1).contains("4 of the 2 experts of 1 groups"));
        assert!(reason(Call { shares: Shares::OfSum { least: 2.0, most: 1.0 }, ..call(8) }).contains("sum"));
    }

    #[test]
    fn limits_are_answers() {
        let pick = |experts| call(experts).pick(&Caps::least(), None);
        assert!(pick(512).is_ok() && pick(2048).is_ok());
        assert!(pick(2049).unwrap_err().reason.contains("at most 2048"));
        let choice = pick(8).unwrap();
        assert!(call(8).params(&choice, 0, &|_| Address(0)).len() <= 128);
    }
}
