//! Adapter: the tree that a build leaves: its modules, and the layers that the image takes from it.

mod archive_image;
mod entrypoint;
mod exposed;
mod image_tree;
mod layer;
mod modules;
mod reuse;
mod sign;

pub use archive_image::{ArchiveImage, ImportError, extract_modules, import_docker_archive};
#[cfg(test)]
pub use entrypoint::elf_program;
pub use entrypoint::{Entrypoint, EntrypointError};
pub use exposed::{
    Exposed, ExposedError, expose, read_exposed, read_symbol_tables, unpack_exposed, unpack_modules,
};
pub use image_tree::{ImageLayers, ImageTree, unpack_image};
pub use layer::{LayerFileError, PayloadLayer, is_usr_merged, write_payload_layer};
pub use modules::{PayloadError, is_module_file, open_module, read_module, read_modules};
pub use reuse::{ReuseError, move_to_kernel, unpack_layer};
pub use sign::{ModuleSigning, SignModulesError, sign_modules};
