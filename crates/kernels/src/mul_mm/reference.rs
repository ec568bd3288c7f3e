//! The definition of `mul_mm`: the shared one of matrix products, and for experts the same for each chosen one.

use super::Call;
use crate::host::HostMemory;
use crate::mul_mat::{Epilogue, Product};
use crate::operation::Operation;

/// The product, and what is left beside it.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    compute(call, memory);
    call.leave(memory);
}

/// See [`Product::reference`]; what makes the activations is another operation; with experts, every (slot, token) is a product of one activation vector with its expert's weights.
fn compute(call: &Call, memory: &mut HostMemory) {
    if let Some(gate) = call.gate {
        return call.with_gate(gate, memory, compute, |glu, memory| glu.reference(memory));
    }
    if call.prologue.is_some() {
        return call.with_made(memory, |made, memory| made.operation().reference(memory), compute);
    }
    // The results of fused products are results of the same activations, one matrix after the other.
    call.alone().iter().for_each(|alone| one_matrix(alone, memory));
}

fn one_matrix(Call { product, epilogue, ids, .. }: &Call, memory: &mut HostMemory) {
    let Some(ids) = ids else { return product.reference(epilogue, memory) };
    let Product { a, b, d } = *product;
    let [used, tokens, ..] = ids.shape;
    let chosen = memory.read(ids);
    for token in 0..tokens {
        for slot in 0..used {
            let expert = chosen[token * used + slot] as usize;
            let column = |t: crate::tensor::Tensor, slot| t.narrow(2, token, 1).narrow(1, slot, 1);
            let part = Product { a: a.narrow(2, expert, 1), b: column(b, slot % b.shape[1]), d: column(d, slot) };
            let epilogue = Epilogue {
                bias: epilogue.bias.map(|t| t.narrow(1, expert, 1)),
                residual: epilogue.residual.map(|t| column(t, slot)),
                ..*epilogue
            };
            part.reference(&epilogue, memory);
        }
    }
}
