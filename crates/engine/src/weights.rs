//! Weights on their way from the file to an executor: looked at before anybody computes with them.

use kiln_gguf::{Gguf, TensorInfo, quant};

use crate::Error;

/// The bytes of a tensor, all of whose values are finite. One NaN among billions of weights would make every later number
/// one, or a wrong one without a word; only scales of blocks are looked at, which costs far less than loading does.
pub fn data<'g>(gguf: &'g Gguf, info: &TensorInfo) -> Result<&'g [u8], Error> {
    let bytes = gguf.data(info);
    match quant::first_not_finite(info.ty, bytes) {
        None => Ok(bytes),
        Some(element) => Err(Error::NotFinite { tensor: info.name.clone(), element }),
    }
}
