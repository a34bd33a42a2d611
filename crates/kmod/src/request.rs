//! Pure: what is checked against what.

use super::{KernelFacts, Module, ModuleError, SymbolTable};

/// What is checked against what.
#[derive(Clone, Copy, Debug)]
pub struct CheckRequest<'a> {
    /// The kernel, from its header set.
    pub kernel: &'a KernelFacts,
    /// What the images export that were compiled against, in the order of `needs`.
    pub needs: &'a [NeededTable],
    /// All modules of the payload.
    pub modules: &'a [PayloadModule],
    /// Names of modules that must be there, `-` and `_` being the same.
    pub required: &'a [String],
    /// All files of the payload, as paths relative to it, to look for firmware among them; `None` where it is
    /// not a whole payload that is checked.
    pub files: Option<&'a [String]>,
}

impl<'a> CheckRequest<'a> {
    /// Modules that need nothing but the kernel and each other.
    pub fn new(kernel: &'a KernelFacts, modules: &'a [PayloadModule]) -> Self {
        Self { kernel, needs: &[], modules, required: &[], files: None }
    }
}

/// What a needed image exports.
#[derive(Clone, Debug)]
pub struct NeededTable {
    /// The image's name, or what else tells people where the table is from.
    pub image: String,
    /// The `Module.symvers` of its exposed headers.
    pub symbols: SymbolTable,
}

/// A module file of a payload.
#[derive(Clone, Debug)]
pub struct PayloadModule {
    /// The file, relative to the payload.
    pub path: String,
    /// What it says, or why it is no module.
    pub module: Result<Module, ModuleError>,
}
