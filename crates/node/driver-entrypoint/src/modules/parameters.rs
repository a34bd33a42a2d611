//! Module parameters and soft dependencies: `/drivers/<module>.conf`, `modprobe.d` of the image or the host, and the
//! kernel's command line.

use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt as _, path::Path};

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

/// Directories where a container sees the host's root: `/host`, below which the manifest mounts parts of it, and with `hostPID` the
/// root of process 1.
const HOST_ROOTS: [&str; 2] = ["/host", "/proc/1/root"];

impl Parameters {
    /// Reads the parameters of the host's own modules: its `modprobe.d` and the kernel's command line. Also
    /// returns whether the host's `/etc` is visible.
    pub(crate) fn of_host(paths: &Paths) -> (Self, bool) {
        let is_host_root = |root: &&&str| {
            let id = |path: &str| fs::metadata(paths.at(path)).map(|data| (data.dev(), data.ino())).ok();
            // Without hostPID, process 1 is the container's own.
            id(root) != id("/") && paths.at(root).join("etc").is_dir()
        };
        let root = HOST_ROOTS.iter().find(is_host_root);
        let mut parameters = Self::default();
        if let Some(root) = root {
            parameters.add_directories(paths, root);
        }
        parameters.add_command_line(&text(paths.at("/proc/cmdline")).unwrap_or_default());
        (parameters, root.is_some())
    }

    /// Reads the image's `modprobe.d`, then the kernel's command line, then `/drivers`, which the user mounts. The
    /// order sets the precedence, because the kernel takes the last value of a parameter.
    pub(crate) fn read(paths: &Paths) -> Self {
        let mut parameters = Self::default();
        parameters.add_directories(paths, "");
        parameters.add_command_line(&text(paths.at("/proc/cmdline")).unwrap_or_default());
        for (name, text) in conf_files(&paths.at("/drivers")) {
            let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
            parameters.add(&name, &lines.collect::<Vec<_>>().join(" "));
        }
        parameters
    }

    /// Reads the files of the `modprobe.d` directories below a root.
    fn add_directories(&mut self, paths: &Paths, root: &str) {
        let mut files = BTreeMap::new();
        for directory in MODPROBE_DIRECTORIES {
            for (name, text) in conf_files(&paths.at(&format!("{root}{directory}"))) {
                files.entry(name).or_insert(text);
            }
        }
        for text in files.values() {
            self.add_modprobe(text);
        }
    }

    /// Appends parameters to a module's existing ones.
    pub(crate) fn add(&mut self, module: &str, options: &str) {
        let options = options.split_whitespace().map(str::to_owned);
        self.options.entry(kernel_name(module)).or_default().extend(options);
    }

    /// Adds a parameter that a module gets unless another source sets it: the kernel takes the last value.
    pub(crate) fn add_default(&mut self, module: &str, option: &str) {
        self.options.entry(kernel_name(module)).or_default().insert(0, option.to_owned());
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
            if let Some((module, option)) = word.split_once('.').filter(|(module, _)| !module.contains('=')) {
                self.add(module, option);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn the_host_has_its_own_options() {
        let bench = Bench::new();
        bench.write("/etc/modprobe.d/image.conf", "options mlx5_core prof_sel=3\n");
        bench.write("/drivers/mlx5_core.conf", "num_of_groups=4\n");
        bench.write("/proc/cmdline", "quiet mlx5_core.debug_mask=1\n");
        let of_host = || {
            let (parameters, is_visible) = Parameters::of_host(&bench.node().paths);
            (parameters.of("mlx5_core"), is_visible)
        };
        // Without hostPID, process 1 has the container's own root.
        std::fs::create_dir_all(bench.at("/proc/1")).unwrap();
        std::os::unix::fs::symlink(bench.at("/"), bench.at("/proc/1/root")).unwrap();
        assert_eq!(of_host(), ("debug_mask=1".to_owned(), false));
        bench.write("/host/etc/modprobe.d/site.conf", "options mlx5-core prof_sel=1\n");
        bench.write("/host/usr/lib/modprobe.d/site.conf", "options mlx5-core prof_sel=2\n");
        assert_eq!(of_host(), ("prof_sel=1 debug_mask=1".to_owned(), true));
    }
}
