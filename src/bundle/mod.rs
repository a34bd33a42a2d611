//! What a site carries to another one that nothing outside can reach.

pub mod contents;

pub use contents::{Content, ContentKind, Needed, needed};
