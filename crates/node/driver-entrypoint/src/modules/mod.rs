//! Kernel modules: finding their files, reading the list of loaded modules, loading and unloading.

pub(crate) mod index;
pub(crate) mod load;
pub(crate) mod loaded;
pub(crate) mod parameters;
pub(crate) mod unload;
pub(crate) mod users;
pub(crate) mod versions;

/// Formats the parameters of a module for messages: empty, or such as ` with "a=1"`.
pub(crate) fn with_parameters(parameters: &str) -> String {
    if parameters.is_empty() { String::new() } else { format!(" with \"{parameters}\"") }
}

/// Whether the name is a valid module name, for `modprobe` too.
pub(crate) fn is_module_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
}
