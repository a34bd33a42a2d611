//! Locates the kernel's in-tree modules and their dependencies. The dependencies are read from the module files, because an
//! unpacked package has no `modules.dep` until `depmod` runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    path::{Path, PathBuf},
};

use farrier_local::files::read_start;
use farrier_payload::{self as payload, DecompressionBudget, is_module_file};
use kmod::{CachedFile, InTree, Module, module_name};

use super::{BootError, Result};

/// Maximum size of `modules.builtin` in bytes. Debian's file has 20 kB.
const MAX_BUILTIN_INDEX: u64 = 16 << 20;

/// The kernel's in-tree modules.
#[derive(Debug, Default)]
pub(super) struct InTreeModules {
    files: BTreeMap<String, PathBuf>,
    /// Names of the modules that are built into the kernel image.
    built_in: BTreeSet<String>,
}

impl InTreeModules {
    /// Finds the modules below a kernel's module directory. Modules in `kernel/` come with the kernel, and take
    /// precedence over modules that were added later.
    pub(super) fn find(directory: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        for entry in walkdir::WalkDir::new(directory).sort_by_file_name() {
            let entry = entry.map_err(io::Error::from)?;
            let name = entry.file_name().to_string_lossy();
            if !entry.file_type().is_file() || !is_module_file(&name) {
                continue;
            }
            let is_in_tree =
                entry.path().strip_prefix(directory).is_ok_and(|path| path.starts_with("kernel"));
            let name = module_name(&name);
            if is_in_tree || !files.contains_key(&name) {
                files.insert(name, entry.into_path());
            }
        }
        Ok(Self { files, built_in: built_in(directory)? })
    }

    /// Adds the modules of another image, which replace in-tree modules of the same name.
    pub(super) fn override_with(&mut self, others: Self) {
        self.files.extend(others.files);
    }

    /// Whether a module of this name is built into the kernel image.
    pub(super) fn is_built_in(&self, name: &str) -> bool {
        self.built_in.contains(name)
    }

    /// Returns the file of a module by its name as `lsmod` shows it.
    pub(super) fn file(&self, name: &str) -> Option<PathBuf> {
        self.files.get(name).cloned()
    }

    /// Returns the modules that must be loaded before a module: those in `depends`, and those that `modprobe` loads
    /// first (`softdep` with `pre:`).
    pub(super) fn prerequisites(&self, file: &Path, budget: &DecompressionBudget) -> Result<Vec<String>> {
        let Some(module) = parse(file, budget)? else { return Ok(Vec::new()) };
        let mut names = dependencies(&module);
        for soft_dependency in module.fields("softdep").flat_map(pre_dependencies) {
            if self.files.contains_key(&soft_dependency) {
                names.push(soft_dependency);
            } else {
                names.extend(self.algorithm_modules(&soft_dependency, budget)?);
            }
        }
        Ok(names)
    }

    /// Returns the modules that provide a cryptographic algorithm. A `softdep` can name an algorithm instead of a
    /// module: `libcrc32c` names `crc32c`.
    fn algorithm_modules(&self, algorithm: &str, budget: &DecompressionBudget) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let is_crypto = |path: &Path| path.components().any(|part| part.as_os_str() == "crypto");
        for (name, file) in self.files.iter().filter(|(_, file)| is_crypto(file)) {
            let Some(module) = parse(file, budget)? else { continue };
            if module.fields("alias").any(|alias| module_name(alias) == algorithm) {
                names.push(name.clone());
            }
        }
        Ok(names)
    }
}

/// Reads the names in `modules.builtin`, if the file exists.
fn built_in(directory: &Path) -> Result<BTreeSet<String>> {
    let mut index = InTree::default();
    if let Some(text) = read_start(&directory.join("modules.builtin"), MAX_BUILTIN_INDEX)? {
        index.add_builtin(&String::from_utf8_lossy(&text));
    }
    Ok(index.builtin)
}

/// Parses a module file. Returns `None` for a file that is not a module: the kernel will refuse it.
fn parse(file: &Path, budget: &DecompressionBudget) -> Result<Option<Module>> {
    Ok(Module::parse(&CachedFile::new(open(file, budget)?)).ok())
}

/// Returns the names in `depends`, as `lsmod` shows them.
pub(super) fn dependencies(module: &Module) -> Vec<String> {
    let names = module.fields("depends").flat_map(|list| list.split(','));
    names.filter(|name| !name.is_empty()).map(module_name).collect()
}

/// Opens a module file for reading its decompressed content.
pub(super) fn open(path: &Path, budget: &DecompressionBudget) -> Result<File> {
    let reason = match payload::open_module(path, budget)? {
        Some(Ok(file)) => return Ok(file),
        Some(Err(error)) => error.to_string(),
        None => "its name does not end in .ko, .ko.gz, .ko.xz or .ko.zst".to_owned(),
    };
    Err(BootError::Module(path.to_owned(), reason))
}

/// Returns the module names that follow `pre:` in a `softdep` value.
fn pre_dependencies(softdep: &str) -> Vec<String> {
    let mut in_pre = false;
    let mut names = Vec::new();
    for word in softdep.split_whitespace() {
        match word {
            "pre:" => in_pre = true,
            "post:" => in_pre = false,
            name if in_pre => names.push(module_name(name)),
            _ => {}
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_modules_come_from_modules_builtin() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!InTreeModules::find(dir.path()).unwrap().is_built_in("crc32c_intel"));
        let text = "kernel/arch/x86/crypto/crc32c-intel.ko\n";
        fs_err::write(dir.path().join("modules.builtin"), text).unwrap();
        let modules = InTreeModules::find(dir.path()).unwrap();
        assert!(modules.is_built_in("crc32c_intel") && !modules.is_built_in("crc32c"));
    }

    #[test]
    fn post_dependencies_are_ignored() {
        assert_eq!(pre_dependencies("pre: a-b c post: d"), ["a_b", "c"]);
        assert_eq!(pre_dependencies("post: d pre: e"), ["e"]);
        assert_eq!(pre_dependencies("d"), [""; 0]);
    }
}
