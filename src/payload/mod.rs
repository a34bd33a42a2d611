//! Adapter: the payload directory that an engine left, on its way into an image.

pub mod archive_image;
pub mod layer;
