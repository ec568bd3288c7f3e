//! Uninhabited stand-ins for `cpu_interleaved.rs` and `cpu_tiles.rs` where row interleaving is not compiled in.

use std::ops::Range;
use std::sync::Arc;

use kiln_gguf::TensorType;
use kiln_system::pages::Pages;

use crate::host::Spare;

/// See `cpu_interleaved.rs`.
#[derive(Debug)]
pub(crate) enum Interleaved {}

/// See `cpu_interleaved.rs`.
#[derive(Clone, Copy)]
pub(crate) struct InterleavedRows<'a>(&'a Interleaved);

impl Interleaved {
    pub(crate) fn room(_: TensorType, _: usize, _: usize) -> Option<usize> {
        None
    }

    pub(crate) fn interleave(_: TensorType, _: usize, _: &[u8], _: &mut [u8]) {}

    pub(crate) fn new(ty: TensorType, _: usize, _: Arc<Pages>, _: Range<usize>) -> Interleaved {
        unreachable!("nothing has room to be interleaved here, {ty} neither")
    }

    pub(crate) fn rows(&self, _: usize) -> InterleavedRows<'_> {
        InterleavedRows(self)
    }

    pub(crate) fn row(&self, _: usize) -> Vec<u8> {
        match *self {}
    }

    pub(crate) fn is_of(&self, _: TensorType, _: usize) -> bool {
        match *self {}
    }
}

/// See `cpu_tiles.rs`.
pub(super) enum TiledActivations {}

pub(super) fn has_tiles() -> bool {
    false
}

impl TiledActivations {
    pub(super) fn new(_: usize, _: &[&[&[f32]]], _: &mut Spare) -> Option<TiledActivations> {
        None
    }

    pub(super) fn end(self, _: &mut Spare) {
        match self {}
    }

    pub(super) fn unfit(&self, _: usize, _: usize) -> std::iter::Empty<usize> {
        match *self {}
    }

    pub(super) fn dots(&self, _: usize, _: usize, _: InterleavedRows<'_>, _: &mut [f32]) {
        match *self {}
    }
}
