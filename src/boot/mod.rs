//! Adapter: boots a kernel in a throwaway virtual machine and loads modules in it.

use std::{path::PathBuf, time::Duration};

/// What a boot check is to do.
#[derive(Clone, Debug)]
pub struct BootRequest {
    /// The kernel.
    pub kernel: crate::headers::KernelImage,
    /// A directory that holds the modules, anywhere below it.
    pub payload: PathBuf,
    /// The modules to load, as paths relative to `payload`, in load order.
    pub modules: Vec<String>,
    /// Limits of the virtual machine.
    pub limits: BootLimits,
}

/// Limits of the virtual machine.
#[derive(Clone, Debug)]
pub struct BootLimits {
    /// The virtual machine is ended after this time.
    pub time: Duration,
    /// Its memory in MiB.
    pub memory: u32,
}

impl Default for BootLimits {
    fn default() -> Self {
        Self { time: Duration::from_mins(2), memory: 1024 }
    }
}
