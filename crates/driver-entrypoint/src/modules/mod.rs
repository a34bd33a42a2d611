//! Kernel modules: their files, what is loaded, and the way in and out.

pub(crate) mod file;
pub(crate) mod index;
pub(crate) mod load;
pub(crate) mod loaded;
pub(crate) mod parameters;
pub(crate) mod unload;
pub(crate) mod users;

/// A module's name as the kernel knows it: `nvidia-uvm` is `nvidia_uvm`.
pub(crate) fn kernel_name(name: &str) -> String {
    name.trim().replace('-', "_")
}

/// Can it be a module's name, for `modprobe` too?
pub(crate) fn is_module_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
}
