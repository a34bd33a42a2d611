//! Kernel modules: their files, what is loaded, and the way in and out.

pub(crate) mod index;
pub(crate) mod load;
pub(crate) mod loaded;
pub(crate) mod parameters;
pub(crate) mod unload;
pub(crate) mod users;
pub(crate) mod versions;

/// Can it be a module's name, for `modprobe` too?
pub(crate) fn is_module_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
}
