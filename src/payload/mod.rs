//! Adapter: the tree that a build leaves: its modules, and what else the image takes from it.

mod modules;

pub use modules::{PayloadError, read_modules};
