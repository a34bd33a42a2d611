//! Pure: driver images: their definitions, names, tags and input hashes.

pub mod checked;
mod definition;
mod input_hash;
mod reference;
mod tag;

pub use definition::{
    ApiVersion, AptSource, Definitions, DriverImage, DriverImageSpec, ImageName, ImageNameError, Metadata,
    NodeSelector, OnConflict, Output, PatchSpec, RolloutSpec, RuntimeBase, RuntimeSpec, SourceOrigin,
    SourceSpec, VersionSpec,
};
pub use input_hash::{InputHash, InputHashError, InputHasher};
pub use reference::{Digest, ImageReference, ReferenceError, Repository, Tag, Version};
pub use tag::{TagError, TagInputs, render_tags};
