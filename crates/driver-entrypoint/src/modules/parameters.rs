//! Module parameters and soft dependencies: `/drivers/<module>.conf`, `modprobe.d` and the kernel's command line.

use std::{collections::BTreeMap, path::Path};

use crate::{
    files::{entries, text},
    module_file::{SoftDependencies, kernel_name},
    node::Paths,
};

/// Search path of `modprobe`, in order; a file in an earlier directory hides a later file of the same name.
const MODPROBE_DIRECTORIES: [&str; 4] =
    ["/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"];

/// Parameters and soft dependencies that modules are loaded with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parameters {
    options: BTreeMap<String, Vec<String>>,
    soft: BTreeMap<String, SoftDependencies>,
}

impl Parameters {
    /// Reads the image's `modprobe.d`, then the kernel's command line, then `/drivers`, which the user mounts. The
    /// order sets the precedence, because the kernel takes the last value of a parameter.
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

    /// Appends parameters to a module's existing ones.
    pub(crate) fn add(&mut self, module: &str, options: &str) {
        let options = options.split_whitespace().map(str::to_owned);
        self.options.entry(kernel_name(module)).or_default().extend(options);
    }

    /// Formats the parameters of a module as for `insmod`.
    pub(crate) fn of(&self, module: &str) -> String {
        self.options.get(&kernel_name(module)).map(|options| options.join(" ")).unwrap_or_default()
    }

    /// Soft dependencies from `modprobe.d`, in addition to the module's own `softdep`.
    pub(crate) fn soft_dependencies(&self, module: &str) -> SoftDependencies {
        self.soft.get(&kernel_name(module)).cloned().unwrap_or_default()
    }

    /// Parses `options` and `softdep` lines; a trailing backslash joins lines (modprobe.d(5)).
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

    /// Parses `module.parameter=value` words, as modprobe does.
    fn add_command_line(&mut self, text: &str) {
        for word in text.split_whitespace() {
            let name = word.split('=').next().unwrap_or_default();
            if let Some((module, _)) = name.split_once('.') {
                self.add(module, word.get(module.len() + 1..).unwrap_or_default());
            }
        }
    }
}

/// Reads the `.conf` files of a directory, keyed by name without the extension. Unreadable files are skipped.
fn conf_files(directory: &Path) -> BTreeMap<String, String> {
    let files = entries(directory).into_iter().filter_map(|path| {
        let name = path.file_name()?.to_str()?.strip_suffix(".conf")?.to_owned();
        Some((name, text(path)?))
    });
    files.collect()
}
