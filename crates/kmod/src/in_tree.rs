//! Modules that come with a kernel, from `modules.dep`, `modules.order` and `modules.builtin`.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::module_name;

/// Maximum number of modules of a kernel. Distribution kernels have about 4,000.
const MAX_MODULES: usize = 100_000;

/// Modules that come with a kernel, by their names as `lsmod` shows them.
///
/// Memory: at most 30 times the texts that are added, and at most 32 MiB beyond their length. Holds at most 100,000
/// modules of each kind; further ones are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InTree {
    /// Loadable modules, with their files relative to the kernel's module directory.
    pub modules: BTreeMap<String, String>,
    /// Modules that are built into the kernel image.
    pub builtin: BTreeSet<String>,
}

impl InTree {
    /// Adds the modules of `modules.dep` (`kernel/a.ko.xz: kernel/b.ko.xz ...`) or `modules.order` (`kernel/a.ko`). The
    /// first word of each line is a module's file. Modules that are already known keep their file.
    pub fn add_modules(&mut self, text: &str) {
        for line in text.lines() {
            let file = line.split([':', ' ', '\t']).next().unwrap_or_default();
            self.add_module(file);
        }
    }

    /// Adds one module by its file, relative to the kernel's module directory; other files are ignored.
    pub fn add_module(&mut self, file: &str) {
        if is_module(file) && self.modules.len() < MAX_MODULES {
            self.modules.entry(module_name(file)).or_insert_with(|| file.to_owned());
        }
    }

    /// Adds the modules of `modules.builtin` (one `kernel/a.ko` per line).
    pub fn add_builtin(&mut self, text: &str) {
        let files = text.lines().map(str::trim).filter(|file| is_module(file));
        self.builtin.extend(files.map(module_name).take(MAX_MODULES.saturating_sub(self.builtin.len())));
    }

    /// Whether no module is known.
    pub fn is_empty(&self) -> bool {
        let Self { modules, builtin } = self;
        modules.is_empty() && builtin.is_empty()
    }
}

/// Whether the path is a module file within the module directory.
fn is_module(file: &str) -> bool {
    let has_suffix = [".ko", ".ko.gz", ".ko.xz", ".ko.zst"].iter().any(|end| file.ends_with(end));
    has_suffix && !file.starts_with('/') && !file.split('/').any(|part| matches!(part, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_index_files_of_a_kernel() {
        let mut index = InTree::default();
        assert!(index.is_empty());
        index.add_modules(
            "kernel/drivers/net/mlx5-core.ko.xz: kernel/net/psample.ko.xz\nkernel/net/psample.ko.xz:\n\
             /outside.ko: \n../up.ko:\nupdates/dkms/nvidia.ko:\nmodules.alias\n\n",
        );
        index.add_modules("kernel/net/psample.ko\nkernel/fs/ext4/ext4.ko\n");
        index.add_builtin(
            "kernel/arch/x86/crypto/aes-x86_64.ko\nkernel/fs/nfs_common/nfs_acl.ko\nnot a module\n",
        );
        let modules: Vec<_> =
            index.modules.iter().map(|(name, file)| (name.as_str(), file.as_str())).collect();
        assert_eq!(
            modules,
            [
                ("ext4", "kernel/fs/ext4/ext4.ko"),
                ("mlx5_core", "kernel/drivers/net/mlx5-core.ko.xz"),
                ("nvidia", "updates/dkms/nvidia.ko"),
                ("psample", "kernel/net/psample.ko.xz"),
            ]
        );
        assert_eq!(index.builtin.iter().collect::<Vec<_>>(), ["aes_x86_64", "nfs_acl"]);
        assert!(!index.is_empty());
    }

    proptest! {
        #[test]
        fn never_panics_and_stays_inside(text in "[a-z./: \\n\\PC]{0,200}") {
            let mut index = InTree::default();
            index.add_modules(&text);
            index.add_builtin(&text);
            prop_assert!(index.modules.values().all(|file| !file.contains("..") || !file.split('/').any(|p| p == "..")));
        }
    }
}
