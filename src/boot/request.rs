//! Pure: what a boot check is to do.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use crate::{inputs::KernelImage, payload::DecompressionBudget};

/// What a boot check is to do.
#[derive(Clone, Debug)]
pub struct BootRequest {
    /// The kernel.
    pub kernel: KernelImage,
    /// A directory that holds the modules, anywhere below it.
    pub payload: PathBuf,
    /// The modules to load, as paths relative to `payload`, in load order. One that has the name of one of the
    /// kernel's own takes its place.
    pub modules: Vec<String>,
    /// Directories with modules that others brought, anywhere below: loaded where one of `modules` needs them, in
    /// place of the kernel's own of the same name.
    pub needed: Vec<PathBuf>,
    /// Parameters by module name, as `insmod` takes them.
    pub parameters: BTreeMap<String, String>,
    /// Each module is unloaded before the next is loaded, and what one becomes does not matter to the next.
    pub tried_alone: bool,
    /// The static `driver-entrypoint`; `boot` finds it beside farrier.
    pub entrypoint: PathBuf,
    /// The emulator; `None` for QEMU in the search path.
    pub emulator: Option<PathBuf>,
    /// Where it is remembered, until the machine restarts, that KVM does not work here; `None` for nowhere.
    pub memory: Option<PathBuf>,
    /// Where the initramfs is written meanwhile; `None` for the system's directory for temporary files.
    pub directory: Option<PathBuf>,
    /// Limits of the virtual machine.
    pub limits: BootLimits,
    /// What is left for the decompression of modules; a budget of its own unless another is set.
    pub decompression: Arc<DecompressionBudget>,
}

impl BootRequest {
    /// Loads `modules`, and nothing special about it.
    pub fn new(kernel: KernelImage, payload: PathBuf, modules: Vec<String>, entrypoint: PathBuf) -> Self {
        Self {
            kernel,
            payload,
            modules,
            needed: Vec::new(),
            parameters: BTreeMap::new(),
            tried_alone: false,
            entrypoint,
            emulator: None,
            memory: None,
            directory: None,
            limits: BootLimits::default(),
            decompression: Arc::new(DecompressionBudget::without_build()),
        }
    }
}

/// Limits of the virtual machine.
#[derive(Clone, Debug)]
pub struct BootLimits {
    /// The virtual machine is ended after this time.
    pub time: Duration,
    /// One module may take this long to load or to unload; then it hangs.
    pub module_time: Duration,
    /// The most memory that the virtual machine may have, in MiB. It gets what its initramfs asks for.
    pub memory: u32,
}

impl Default for BootLimits {
    fn default() -> Self {
        Self { time: Duration::from_mins(2), module_time: Duration::from_secs(30), memory: 1024 }
    }
}
