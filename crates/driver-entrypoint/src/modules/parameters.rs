//! Module parameters and soft dependencies: `/drivers/<module>.conf`, `modprobe.d` and the kernel's command line.

use std::{collections::BTreeMap, path::Path};

use crate::{
    files::{entries, text},
    module_file::{SoftDependencies, kernel_name},
    node::Paths,
};

/// Where `modprobe` looks, in its order; a file of the same name in an earlier directory hides a later one.
const MODPROBE_DIRECTORIES: [&str; 4] =
    ["/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"];

/// What modules are loaded with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parameters {
    options: BTreeMap<String, Vec<String>>,
    soft: BTreeMap<String, SoftDependencies>,
}

impl Parameters {
    /// The image's `modprobe.d` first, then the kernel's command line, then `/drivers`, which the user mounts: the
    /// kernel takes the last value of a parameter.
    pub(crate) fn read(paths: &Paths) -> Self {
        let mut parameters = Self::default();
        let mut files = BTreeMap::new();
        for directory in MODPROBE_DIRECTORIES {
            for (name, text) in conf_files(&paths.at(directory)) {
                files.entry(name).or_insert(text);
            }
        }
        for text in files.values() {
            parameters.add_modprobe(text);
        }
        parameters.add_command_line(&text(paths.at("/proc/cmdline")).unwrap_or_default());
        for (name, text) in conf_files(&paths.at("/drivers")) {
            let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
            parameters.add(&name, &lines.collect::<Vec<_>>().join(" "));
        }
        parameters
    }

    /// Adds to what a module is loaded with, after what is there.
    pub(crate) fn add(&mut self, module: &str, options: &str) {
        let options = options.split_whitespace().map(str::to_owned);
        self.options.entry(kernel_name(module)).or_default().extend(options);
    }

    /// As `insmod` takes them.
    pub(crate) fn of(&self, module: &str) -> String {
        self.options.get(&kernel_name(module)).map(|options| options.join(" ")).unwrap_or_default()
    }

    /// What `modprobe.d` says beyond the module's own `softdep`.
    pub(crate) fn soft_dependencies(&self, module: &str) -> SoftDependencies {
        self.soft.get(&kernel_name(module)).cloned().unwrap_or_default()
    }

    /// `options` and `softdep` lines; a backslash at the end joins lines (modprobe.d(5)).
    fn add_modprobe(&mut self, text: &str) {
        for line in text.replace("\\\n", " ").lines() {
            match line.split_whitespace().collect::<Vec<_>>().as_slice() {
                ["options", module, rest @ ..] => self.add(module, &rest.join(" ")),
                ["softdep", module, rest @ ..] => {
                    self.soft.entry(kernel_name(module)).or_default().add(&rest.join(" "));
                }
                _ => {}
            }
        }
    }

    /// `module.parameter=value`, as modprobe takes them over.
    fn add_command_line(&mut self, text: &str) {
        for word in text.split_whitespace() {
            let name = word.split('=').next().unwrap_or_default();
            if let Some((module, _)) = name.split_once('.') {
                self.add(module, word.get(module.len() + 1..).unwrap_or_default());
            }
        }
    }
}

/// The `.conf` files of a directory by their names without that ending. What cannot be read holds nothing.
fn conf_files(directory: &Path) -> BTreeMap<String, String> {
    let files = entries(directory).into_iter().filter_map(|path| {
        let name = path.file_name()?.to_str()?.strip_suffix(".conf")?.to_owned();
        Some((name, text(path)?))
    });
    files.collect()
}
