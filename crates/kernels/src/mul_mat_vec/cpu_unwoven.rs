//! What stands in for `cpu_woven.rs` and `cpu_tiles.rs` on machines where no rows are woven: types that nothing is of.

use std::ops::Range;
use std::sync::Arc;

use kiln_gguf::TensorType;
use kiln_system::pages::Pages;

use crate::host::Spare;

/// See `cpu_woven.rs`.
#[derive(Debug)]
pub(crate) enum Woven {}

/// See `cpu_woven.rs`.
#[derive(Clone, Copy)]
pub(crate) struct WovenRows<'a>(&'a Woven);

impl Woven {
    pub(crate) fn room(_: TensorType, _: usize, _: usize) -> Option<usize> {
        None
    }

    pub(crate) fn weave(_: TensorType, _: usize, _: &[u8], _: &mut [u8]) {}

    pub(crate) fn new(ty: TensorType, _: usize, _: Arc<Pages>, _: Range<usize>) -> Woven {
        unreachable!("nothing has room to be woven here, {ty} neither")
    }

    pub(crate) fn rows(&self, _: usize) -> WovenRows<'_> {
        WovenRows(self)
    }

    pub(crate) fn row(&self, _: usize) -> Vec<u8> {
        match *self {}
    }

    pub(crate) fn is_of(&self, _: TensorType, _: usize) -> bool {
        match *self {}
    }
}

/// See `cpu_tiles.rs`.
pub(super) enum TiledColumns {}

pub(super) fn has_tiles() -> bool {
    false
}

impl TiledColumns {
    pub(super) fn new(_: usize, _: &[&[&[f32]]], _: &mut Spare) -> Option<TiledColumns> {
        None
    }

    pub(super) fn end(self, _: &mut Spare) {
        match self {}
    }

    pub(super) fn unfit(&self, _: usize, _: usize) -> std::iter::Empty<usize> {
        match *self {}
    }

    pub(super) fn dots(&self, _: usize, _: usize, _: WovenRows<'_>, _: &mut [f32]) {
        match *self {}
    }
}
