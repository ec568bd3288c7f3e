//! The `kiln` binary: flags, commands, progress, output.
fn main() {}
