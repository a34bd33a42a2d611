//! Adapter: the command line, one file for each command.

pub mod check;
