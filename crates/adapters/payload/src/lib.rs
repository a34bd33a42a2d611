//! Processes payloads (modules, exposed headers, layers) for the build pipeline and `farrier check`.
#![forbid(unsafe_code)]

mod archive_image;
mod decompression;
mod entrypoint;
mod error;
mod exposed;
mod image_tree;
mod layer;
mod modules;
mod reuse;
mod sign;

pub use archive_image::{ArchiveImage, ImageLayers, extract_modules, import_docker_archive};
pub use decompression::DecompressionBudget;
#[cfg(any(test, feature = "testing"))]
pub use entrypoint::elf_program;
pub use entrypoint::{ENTRYPOINT, Entrypoint, find_entrypoint};
pub use error::{PayloadError, Result};
pub use exposed::{Exposed, expose, read_exposed, read_symbol_tables, unpack_exposed, unpack_modules};
pub use image_tree::{ImageTree, list_tree, unpack_image};
pub use layer::{PayloadLayer, is_usr_merged, write_payload_layer, write_source_layer, write_tree_layer};
pub use modules::{is_module_file, open_module, read_module, read_modules};
pub use reuse::{move_to_kernel, unpack_layer};
pub use sign::{ModuleSigning, sign_modules};
