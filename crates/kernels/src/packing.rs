//! Weights packed for a device: which types take another form there, and calls on what was packed.

use kiln_gguf::{TensorType, quant};
use kiln_gpu::Caps;

use crate::Call;
use crate::tensor::{Slot, Tensor};

/// The type that weights of `ty` in rows of `len` elements should have on a device: a packed one, or `ty` itself.
pub fn type_on(ty: TensorType, len: usize, caps: &Caps) -> TensorType {
    // A software GPU loads elements one by one, whatever their place.
    if caps.is_cpu { ty } else { quant::packed_type(ty, len).unwrap_or(ty) }
}

/// The operands of a call that may be packed.
fn weights(call: &mut Call) -> Vec<&mut Tensor> {
    match call {
        Call::MulMatVec(call) => {
            let others = call.others.iter_mut().map(|fused| &mut fused.a);
            let up = call.gate.as_mut().map(|gate| &mut gate.up);
            [&mut call.product.a].into_iter().chain(up).chain(others).collect()
        }
        Call::MulMm(call) => {
            let others = call.others.iter_mut().map(|fused| &mut fused.a);
            let up = call.gate.as_mut().map(|gate| &mut gate.up);
            [&mut call.product.a].into_iter().chain(up).chain(others).collect()
        }
        Call::GetRows(call) => vec![&mut call.src],
        Call::Dequantise(call) => vec![&mut call.src],
        Call::Copy(call) if !call.dst.ty.is_quantised() => vec![&mut call.src],
        _ => Vec::new(),
    }
}

/// Changes the operands of a call that lie in slots which were packed; `packed` gives the slot that holds what came of such a slot, and
/// its type. Says which operand cannot be read where it is packed.
pub fn use_packed(call: &mut Call, packed: &dyn Fn(Slot) -> Option<(Slot, TensorType)>) -> Result<(), String> {
    for tensor in weights(call) {
        if let Some(view) = packed(tensor.slot).and_then(|(slot, ty)| Some(Tensor { slot, ..view(tensor, ty)? })) {
            *tensor = view;
        }
    }
    let operation = call.operation();
    let left = operation.reads().into_iter().find(|t| packed(t.slot).is_some_and(|(_, ty)| t.ty != ty));
    left.map_or(Ok(()), |t| Err(format!("{} reads {t}, which was packed and cannot be read so", operation.name())))
}

/// The same elements in a slot whose blocks were packed as `ty`, if they are whole blocks of it.
fn view(tensor: &Tensor, ty: TensorType) -> Option<Tensor> {
    let (base, len) = (ty.base(), ty.block_len());
    let group = len / base.block_len() * base.block_bytes();
    let fits = tensor.ty == base && tensor.has_dense_rows() && tensor.shape[0].is_multiple_of(len);
    let bytes = |n: usize| n.is_multiple_of(group).then(|| n / group * ty.block_bytes());
    // Strides of dimensions with one element need not be whole blocks.
    let row = ty.row_bytes(tensor.shape[0])?;
    let outer = |d: usize| bytes(tensor.stride[d]).or((tensor.shape[d] == 1).then_some(row));
    let stride = [ty.block_bytes(), outer(1)?, outer(2)?, outer(3)?];
    fits.then_some(Tensor { ty, offset: bytes(tensor.offset)?, stride, ..*tensor })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mul_mat::Product;
    use crate::{get_rows, mul_mat_vec};

    fn tensor(slot: u32, ty: TensorType, shape: [usize; 4]) -> Tensor {
        Tensor::dense(Slot(slot), ty, shape)
    }

    fn packed(slot: Slot) -> Option<(Slot, TensorType)> {
        (slot == Slot(0)).then_some((Slot(7), TensorType::Q6_Kx8))
    }

    #[test]
    fn views_of_whole_blocks_are_views_of_packed_ones() {
        let whole = tensor(0, TensorType::Q6_K, [4096, 6, 3, 1]);
        let part = whole.narrow(1, 2, 3).narrow(2, 1, 2);
        let want = tensor(0, TensorType::Q6_Kx8, [4096, 6, 3, 1]).narrow(1, 2, 3).narrow(2, 1, 2);
        assert_eq!(view(&part, TensorType::Q6_Kx8), Some(want));
        assert_eq!(view(&whole.narrow(0, 2048, 2048), TensorType::Q6_Kx8).map(|t| t.offset), Some(1680));
        assert_eq!(view(&whole.narrow(0, 256, 2048), TensorType::Q6_Kx8), None);
    }

    #[test]
    fn calls_on_packed_slots_change_their_weights_alone() {
        let (a, up) = (tensor(0, TensorType::Q6_K, [2048, 8, 1, 1]), tensor(3, TensorType::Q6_K, [2048, 8, 1, 1]));
        let (b, d) = (tensor(1, TensorType::F32, [2048, 1, 1, 1]), tensor(2, TensorType::F32, [8, 1, 1, 1]));
        let mut call: Call = mul_mat_vec::Call {
            others: vec![mul_mat_vec::FusedProduct { a: up, d, bias: None }],
            ..mul_mat_vec::Call::plain(Product { a, b, d })
        }
        .into();
        use_packed(&mut call, &packed).unwrap();
        let types: Vec<TensorType> = call.operation().reads().iter().map(|t| t.ty).collect();
        assert!(types.contains(&TensorType::Q6_Kx8) && types.contains(&TensorType::Q6_K), "{types:?}");
        let slots: Vec<Slot> = call.operation().reads().iter().map(|t| t.slot).collect();
        assert!(slots.contains(&Slot(7)) && !slots.contains(&Slot(0)), "{slots:?}");
        assert_eq!(call.operation().check(), Ok(()));
    }

    #[test]
    fn what_cannot_be_read_packed_is_named() {
        let src = tensor(0, TensorType::Q6_K, [2048, 8, 1, 1]).narrow(0, 0, 256);
        let ids = tensor(1, TensorType::I32, [1, 1, 1, 1]);
        let dst = tensor(2, TensorType::F32, [256, 1, 1, 1]);
        let refused = use_packed(&mut get_rows::Call { src, ids, dst }.into(), &packed).unwrap_err();
        assert!(refused.contains("get_rows reads Q6_K[256, 8]"), "{refused}");
    }

    #[test]
    fn types_are_packed_where_rows_are_whole_blocks() {
        let (gpu, software) = (Caps::example_nvidia(), Caps { is_cpu: true, ..Caps::example_nvidia() });
        assert_eq!(type_on(TensorType::Q6_K, 4096, &gpu), TensorType::Q6_Kx8);
        assert_eq!(type_on(TensorType::Q6_K, 2560, &gpu), TensorType::Q6_Kx2);
        assert_eq!(type_on(TensorType::MXFP4, 2880, &gpu), TensorType::MXFP4x30);
        assert_eq!(type_on(TensorType::Q8_0, 96, &gpu), TensorType::Q8_0);
        assert_eq!(type_on(TensorType::Q4_K, 4096, &gpu), TensorType::Q4_K);
        assert_eq!(type_on(TensorType::Q6_K, 4096, &software), TensorType::Q6_K);
    }
}
