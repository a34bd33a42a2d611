//! Tools that compile, check and sign a build.

use std::sync::Arc;

use farrier_core::plan::Budget;
use farrier_signing::ModuleSigner;

use super::{
    boot::BootChecker,
    lazy::{LazyEngine, LazyEntrypoint},
    outputs::OutputMaker,
};

/// Limits on concurrent builds.
#[derive(Clone, Copy, Debug)]
pub struct BuildLimits {
    /// Maximum number of builds.
    pub at_once: usize,
    /// Resources that concurrent builds may use together.
    pub budget: Budget,
}

/// Tools that compile, check and sign a build, and make its outputs. Clones share the engine.
#[derive(Clone)]
pub struct BuildTools {
    /// Engine that compiles. It is connected when the first build needs it, so that a reconcile with nothing to do
    /// needs no engine.
    pub engine: LazyEngine,
    /// The `driver-entrypoint` binary for images.
    pub entrypoint: LazyEntrypoint,
    /// Limits on concurrent builds.
    pub limits: BuildLimits,
    /// Signs modules, if the site signs modules.
    pub module_signer: Option<Arc<ModuleSigner>>,
    /// Boots kernels for definitions with `check.boot: true`. Without a boot checker, their builds fail.
    pub boot_checker: Option<Arc<dyn BootChecker>>,
    /// Makes the outputs that definitions ask for in addition to the image. Without a maker, their builds fail.
    pub output_maker: Option<Arc<dyn OutputMaker>>,
}
