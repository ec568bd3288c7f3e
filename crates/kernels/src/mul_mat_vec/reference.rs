//! The definition of `mul_mat_vec`: the shared one of matrix products.

use super::Call;
use crate::host::HostMemory;

/// See [`crate::mul_mat::Product::reference`].
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    call.product.reference(&call.epilogue, memory);
}
