//! What Kiln asks of the machine it runs on: files that are written whole or not at all ([`files`]), text of others
//! that is shown without harm ([`text`]), memory that is left ([`memory`]) and large pieces of it ([`pages`]), what is freed
//! of it ([`allocator`]) and what the program's code takes ([`code`]), cores ([`cores`]), what the process takes ([`process`]), variables of the environment
//! ([`environment`]), Ctrl-C that does not end the program ([`interrupt`]), the terminal ([`terminal`]), instructions that Rust's library does not offer
//! ([`instructions`]). Operating systems differ in [`os`], and nowhere else. Nothing here knows of models.

pub mod allocator;
pub mod code;
pub mod cores;
pub mod environment;
pub mod files;
pub mod instructions;
pub mod interrupt;
pub mod memory;
pub mod os;
pub mod pages;
pub mod process;
pub mod terminal;
pub mod text;
