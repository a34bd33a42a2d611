//! The request for a boot check.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use farrier_inputs::KernelImage;
use farrier_payload::DecompressionBudget;

/// Request for a boot check.
#[derive(Clone, Debug)]
pub struct BootRequest {
    /// The kernel to boot.
    pub kernel: KernelImage,
    /// Directory that contains the modules, at any depth.
    pub payload: PathBuf,
    /// The modules to load, as paths relative to `payload`, in load order. A module replaces an in-tree module of the
    /// same name.
    pub modules: Vec<String>,
    /// Directories with modules of other images, at any depth. Such a module is loaded if one of `modules` depends on it, and
    /// replaces an in-tree module of the same name.
    pub needed: Vec<PathBuf>,
    /// Module parameters by module name, in the syntax of `insmod`.
    pub parameters: BTreeMap<String, String>,
    /// Whether each module is unloaded before the next is loaded, so that their outcomes are independent.
    pub unload_each: bool,
    /// The static `driver-entrypoint`. [`find_entrypoint`](super::find_entrypoint) finds the one next to farrier.
    pub entrypoint: PathBuf,
    /// The emulator; `None` for QEMU in the search path.
    pub emulator: Option<PathBuf>,
    /// Directory that records, until this host restarts, that KVM does not work here; `None` to record nothing.
    pub kvm_state_dir: Option<PathBuf>,
    /// Directory for the temporary initramfs; `None` for the system's temporary directory.
    pub scratch_dir: Option<PathBuf>,
    /// Limits of the virtual machine.
    pub limits: BootLimits,
    /// Budget for decompressing modules, shared with the static check. The default is a separate budget.
    pub decompression: Arc<DecompressionBudget>,
}

impl BootRequest {
    /// Creates a request to load `modules`, with default options.
    pub fn new(kernel: KernelImage, payload: PathBuf, modules: Vec<String>, entrypoint: PathBuf) -> Self {
        Self {
            kernel,
            payload,
            modules,
            needed: Vec::new(),
            parameters: BTreeMap::new(),
            unload_each: false,
            entrypoint,
            emulator: None,
            kvm_state_dir: None,
            scratch_dir: None,
            limits: BootLimits::default(),
            decompression: Arc::new(DecompressionBudget::without_build()),
        }
    }
}

/// Limits of the virtual machine.
#[derive(Clone, Debug)]
pub struct BootLimits {
    /// Total time, after which the virtual machine is killed.
    pub time: Duration,
    /// Time for loading or unloading one module, after which the module counts as hung.
    pub module_time: Duration,
    /// Maximum memory of the virtual machine in MiB. The machine gets as much as its initramfs needs.
    pub memory: u32,
}

impl Default for BootLimits {
    fn default() -> Self {
        Self { time: Duration::from_mins(2), module_time: Duration::from_secs(30), memory: 1024 }
    }
}
