//! How a GPU keeps the weights of a model, and how it computes with them.

use crate::lower::{DequantCache, PackB, Packing, Rounds};

/// What products of many columns add up in, where matrix units have both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// 32 bits.
    F32,
    /// 16 bits: less exact, and faster on some devices.
    F16,
}

/// How the steps of generating wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By themselves where the device has proved that they can, else by barriers.
    Proved,
    /// By themselves: for tests on devices that gain nothing.
    DependentLaunch,
    /// By barriers.
    Barriers,
    /// By themselves, and the first run counts as one in which a step waited in vain: for tests of what follows.
    #[doc(hidden)]
    Stalls,
}

/// How weights lie on the device, and how they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which are packed.
    pub packing: Packing,
    /// Which are kept decoded.
    pub f16_cache: DequantCache,
    /// What long prompts add up in.
    pub sums: Sums,
    /// How steps wait for each other.
    pub order: Order,
    /// Whether every row goes the way that it would go alone.
    pub reproducible: bool,
    /// Who leaves columns rounded for the products that take them.
    pub rounds: Rounds,
    /// Who leaves columns as matrix units take them.
    pub pack_b: PackB,
    /// Bytes of the device's memory that may be taken; all there are where that is not said.
    pub memory_limit: Option<u64>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            packing: Packing::Faster,
            f16_cache: DequantCache::WhenRoom,
            sums: Sums::F32,
            order: Order::Proved,
            reproducible: false,
            rounds: Rounds::ByTable,
            pack_b: PackB::ByPath,
            memory_limit: None,
        }
    }
}
