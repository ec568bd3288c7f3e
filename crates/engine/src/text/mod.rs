//! What stands between tokens and people: text that comes piece by piece.

pub mod stop;
