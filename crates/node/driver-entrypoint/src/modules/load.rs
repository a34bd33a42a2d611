//! Loads modules and their dependencies in order.

use std::time::Duration;

use rustix::io::Errno;

use super::{
    index::Index,
    loaded::Loaded,
    parameters::Parameters,
    unload::{MAX_ATTEMPTS, RETRY_INTERVAL},
    with_parameters,
};
use crate::{
    devices,
    error::Error,
    files::text,
    module_file::{ModuleFile, Origin, REBUILD, kernel_name},
    node::{Node, Paths},
};

/// Loads modules from an index, with their parameters.
pub(crate) struct Loader<'a> {
    pub(crate) node: &'a Node<'a>,
    pub(crate) index: Index,
    pub(crate) parameters: Parameters,
}

/// One module to load.
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) file: ModuleFile,
    /// Whether the module is a soft dependency. A failure to load it is only logged.
    pub(crate) optional: bool,
    /// PCI devices that the module drives, as patterns.
    pub(crate) aliases: Vec<String>,
}

impl<'a> Loader<'a> {
    /// Reads the modules and parameters of the image; the host's modules complete the image's.
    pub(crate) fn of_node(node: &'a Node<'a>) -> Result<Self, Error> {
        Ok(Self { node, index: Index::of_node(node)?, parameters: Parameters::read(&node.paths) })
    }

    /// Loads a module and its dependencies. Returns the names of the newly loaded modules, in load order.
    pub(crate) fn load(&self, name: &str) -> Result<Vec<String>, Error> {
        let mut inserted = Vec::new();
        self.load_into(name, &mut inserted).map(|()| inserted)
    }

    /// Like [`load`](Self::load), but appends the names to `inserted`, which is also filled if a later module fails.
    pub(crate) fn load_into(&self, name: &str, inserted: &mut Vec<String>) -> Result<(), Error> {
        for step in self.plan(name, &Loaded::read(&self.node.paths)?)? {
            if self.insert(&step)? {
                inserted.push(step.name);
            }
        }
        Ok(())
    }

    /// Loads the dependencies of a module that come from the host, but not the module itself. Plans as if only the modules in
    /// `loaded` were loaded.
    pub(crate) fn load_host_deps(&self, name: &str, loaded: &Loaded) -> Result<Vec<String>, Error> {
        let mut inserted = Vec::new();
        let name = kernel_name(name);
        for step in self.plan(&name, loaded)? {
            // Skip modules that directly depend on a module of the image. They are loaded later.
            let depends = step.file.info()?.depends;
            let is_ready = depends.iter().all(|need| self.index.image_file(need).is_none());
            if step.file.origin == Origin::Host && step.name != name && is_ready && self.insert(&step)? {
                inserted.push(step.name);
            }
        }
        Ok(inserted)
    }

    /// Returns the names of the image's modules that must be loaded for a module if no modules are loaded yet.
    pub(crate) fn image_modules_for(&self, name: &str) -> Result<Vec<String>, Error> {
        let steps = self.plan(name, &Loaded::default())?.into_iter();
        Ok(steps.filter(|step| step.file.origin == Origin::Image).map(|step| step.name).collect())
    }

    /// Whether a module of this name is loaded and is the image's build.
    pub(crate) fn is_image_build(&self, loaded: &Loaded, name: &str) -> bool {
        let info = self.index.image_file(name).and_then(|file| file.info().ok());
        info.is_some_and(|info| loaded.matches_file(&self.node.paths, name, &info))
    }

    /// Returns the names of modules that are not loaded, or whose loaded module is not the image's build.
    pub(crate) fn without_image_build(&self, loaded: &Loaded, names: &[String]) -> Vec<String> {
        names.iter().filter(|name| !self.is_image_build(loaded, name)).cloned().collect()
    }

    /// Returns the steps that load a module and its dependencies, in load order. Empty if the module is loaded or built in.
    pub(crate) fn plan(&self, name: &str, loaded: &Loaded) -> Result<Vec<Step>, Error> {
        let mut walk = DependencyWalk { loader: self, loaded, path: Vec::new(), steps: Vec::new() };
        walk.visit(&kernel_name(name), None, false)?;
        Ok(walk.steps)
    }

    /// Warns of devices that the module should drive but does not, because a failed probe does not fail the load. Polls,
    /// because probes may still be running.
    fn warn_of_unbound_devices(&self, name: &str, aliases: &[String]) {
        let Self { node, .. } = self;
        let mut unbound = Vec::new();
        let are_bound = node.poll(MAX_ATTEMPTS, RETRY_INTERVAL, || {
            unbound = devices::without_driver(&node.paths, aliases);
            unbound.is_empty()
        });
        if !are_bound {
            let devices = unbound.join(", ");
            node.log.warn(format!(
                "module {name} is loaded, but is not bound to all of its devices: {devices} has no driver"
            ));
        }
    }

    /// Loads one module. Returns whether this call loaded the module.
    ///
    /// - `EEXIST`: another process loaded the module first, which is not an error.
    /// - `EBUSY`: an attempt of another process has just failed. The call is retried.
    fn insert(&self, step: &Step) -> Result<bool, Error> {
        let Step { name, file, optional, aliases } = step;
        let parameters = self.parameters.of(name);
        let path = self.node.paths.container_path(&file.path);
        let origin = if file.origin == Origin::Host { " of the host" } else { "" };
        let mut progress = |time: Duration| {
            let seconds = time.as_secs();
            self.node.log.warn(format!(
                "still waiting for the kernel to load module {name} ({seconds} s): see dmesg on the node"
            ));
        };
        let mut result = Ok(Vec::new());
        self.node.poll(MAX_ATTEMPTS, RETRY_INTERVAL, || {
            result = self.node.kernel.load(file, &parameters, &mut progress);
            !result.as_ref().is_err_and(|refusal| refusal.errno == Errno::BUSY)
        });
        match result {
            Ok(warnings) => {
                let options = with_parameters(&parameters);
                self.node.log.step(format!("loaded module {name}{origin} ({path}){options}"));
                for warning in warnings {
                    self.node.log.warn(format!("kernel: {warning}"));
                }
                self.warn_of_unbound_devices(name, aliases);
                Ok(true)
            }
            Err(refusal) if refusal.errno == Errno::EXIST => Ok(false),
            Err(mut refusal) => {
                refusal.locked_down = is_locked_down(&self.node.paths, &refusal.messages);
                let error = Error::Refused { name: name.clone(), path, parameters, refusal };
                if !optional {
                    return Err(error);
                }
                self.node.log.warn(format!("continuing without {name}: {error}"));
                Ok(false)
            }
        }
    }
}

/// Whether the kernel is locked down, according to its file or its messages during the load.
fn is_locked_down(paths: &Paths, messages: &[String]) -> bool {
    // For example: none [integrity] confidentiality
    let state = text(paths.at("/sys/kernel/security/lockdown"));
    state.is_some_and(|state| state.contains('[') && !state.contains("[none]"))
        || messages.iter().any(|message| message.starts_with("Lockdown: "))
}

/// Depth-first search through the dependencies of a module.
struct DependencyWalk<'a> {
    loader: &'a Loader<'a>,
    loaded: &'a Loaded,
    /// Modules from the first module to the current one, to detect cycles.
    path: Vec<String>,
    steps: Vec<Step>,
}

impl DependencyWalk<'_> {
    fn visit(&mut self, name: &str, needed_by: Option<&str>, optional: bool) -> Result<(), Error> {
        if self.loaded.contains(name) || self.steps.iter().any(|step| step.name == name) {
            return Ok(());
        }
        if self.path.iter().any(|other| other == name) {
            // Soft dependencies may form cycles, which modprobe also tolerates.
            if optional {
                return Ok(());
            }
            let names = format!("{} -> {name}", self.path.join(" -> "));
            return Err(Error::new(format!("modules depend on each other: {names}"), REBUILD));
        }
        let Some(file) = self.loader.index.file(name) else {
            // Soft dependencies are often aliases, which have no file.
            if optional || self.loader.index.is_built_in(name) {
                return Ok(());
            }
            return Err(self.loader.index.missing_error(name, needed_by));
        };
        let info = file.info()?;
        let configured = self.loader.parameters.soft_dependencies(name);
        self.path.push(name.to_owned());
        for need in info.soft.before.iter().chain(&configured.before) {
            self.visit(need, Some(name), true)?;
        }
        for need in &info.depends {
            self.visit(need, Some(name), optional)?;
        }
        self.path.pop();
        self.steps.push(Step { name: name.to_owned(), file: file.clone(), optional, aliases: info.aliases });
        for after in info.soft.after.iter().chain(&configured.after) {
            self.visit(after, Some(name), true)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, RELEASE, elf_module};

    fn load(bench: &Bench, name: &str) -> Result<Vec<String>, Error> {
        let node = bench.node();
        Loader::of_node(&node)?.load(name)
    }

    #[test]
    fn dependencies_come_first_with_their_parameters() {
        let bench = Bench::new();
        bench.host_module("i2c_core", "");
        bench.image_module("nvidia", "i2c_core");
        bench.image_module("nvidia-uvm", "nvidia");
        bench.write(
            "/etc/modprobe.d/nvidia.conf",
            "options nvidia NVreg_A=1 \\\n NVreg_B=2\nblacklist nouveau\n",
        );
        bench.write("/drivers/nvidia-uvm.conf", "# of the user\nuvm_x=1\nuvm_y=2\n");
        bench.write("/proc/cmdline", "quiet nvidia.NVreg_A=3 nvidia-uvm.uvm_x=0\n");
        assert_eq!(load(&bench, "nvidia-uvm").unwrap(), ["i2c_core", "nvidia", "nvidia_uvm"]);
        assert_eq!(
            bench.calls(),
            [
                "load i2c_core of the host",
                "load nvidia of the image NVreg_A=1 NVreg_B=2 NVreg_A=3",
                "load nvidia_uvm of the image uvm_x=0 uvm_x=1 uvm_y=2",
            ]
        );
        assert_eq!(load(&bench, "nvidia_uvm").unwrap(), Vec::<String>::new(), "already loaded");
    }

    #[test]
    fn soft_dependencies_come_before_and_after_and_may_fail() {
        let bench = Bench::new();
        let tree = format!("/lib/modules/{RELEASE}");
        let module = elf_module("softdep=pre: early absent post: late m\0");
        bench.image_module("early", "");
        bench.image_module("late", "m");
        bench.image_module("more", "");
        std::fs::write(bench.at(&format!("{tree}/m.ko")), module).unwrap();
        bench.write("/etc/modprobe.d/x.conf", "softdep m pre: more\n");
        bench.kernel.load_errors.borrow_mut().insert("early".into(), Errno::NODEV);
        assert_eq!(load(&bench, "m").unwrap(), ["more", "m", "late"]);
        assert!(bench.log().contains("WARN  continuing without early: load early from"), "{}", bench.log());
    }

    #[test]
    fn optional_host_dependencies_may_fail() {
        let bench = Bench::new();
        bench.host_module("early", "");
        let module = elf_module("softdep=pre: early\0");
        std::fs::create_dir_all(bench.at(&format!("/lib/modules/{RELEASE}"))).unwrap();
        std::fs::write(bench.at(&format!("/lib/modules/{RELEASE}/m.ko")), module).unwrap();
        bench.kernel.load_errors.borrow_mut().insert("early".into(), Errno::NODEV);
        let node = bench.node();
        let loader = Loader::of_node(&node).unwrap();
        let needs = loader.load_host_deps("m", &Loaded::default()).unwrap();
        assert_eq!(needs, Vec::<String>::new());
        assert!(bench.log().contains("WARN  continuing without early: load early from"), "{}", bench.log());
    }

    #[test]
    fn busy_module_is_retried() {
        let bench = Bench::new();
        bench.image_module("m", "");
        bench.kernel.busy_attempts.borrow_mut().insert("m".into(), 3);
        assert_eq!(load(&bench, "m").unwrap(), ["m"]);
        assert_eq!(bench.kernel.pauses.get(), 3);
        bench.image_module("n", "");
        bench.kernel.busy_attempts.borrow_mut().insert("n".into(), MAX_ATTEMPTS);
        assert!(load(&bench, "n").unwrap_err().to_string().contains("it is being loaded or unloaded"));
    }

    #[test]
    fn built_in_dependencies_are_not_loaded() {
        let bench = Bench::new();
        bench.image_module("m", "libcrc32c");
        bench.write(&format!("/host/lib/modules/{RELEASE}/modules.builtin"), "kernel/lib/libcrc32c.ko\n");
        bench.kernel.load_errors.borrow_mut().insert("m".into(), Errno::NODEV);
        assert_eq!(
            load(&bench, "m").unwrap_err().to_string().split_once(".ko: ").unwrap().1,
            "the hardware is absent, or does not answer (No such device (os error 19))\n    kernel: m: no"
        );
    }

    #[test]
    fn dependency_cycles_and_missing_modules_are_reported() {
        let bench = Bench::new();
        bench.image_module("a", "b");
        bench.image_module("b", "c");
        bench.image_module("c", "a");
        assert_eq!(
            load(&bench, "a").unwrap_err().to_string(),
            "modules depend on each other: a -> b -> c -> a"
        );
        bench.image_module("d", "gone");
        let error = load(&bench, "d").unwrap_err().to_string();
        assert!(
            error.starts_with("module gone, which d needs, is missing for kernel 6.1.0-56-amd64"),
            "{error}"
        );
    }

    /// A probe that fails does not fail the load of its driver.
    #[test]
    fn devices_without_a_driver_and_kernel_warnings_are_logged() {
        let bench = Bench::new();
        let file = format!("/lib/modules/{RELEASE}/m.ko");
        bench.write(&file, "");
        std::fs::write(bench.at(&file), elf_module("alias=pci:v000015B3d00001013sv*sd*bc*sc*i*\0")).unwrap();
        let device = |address: &str, id: &str, other: &str| {
            let place = format!("/sys/bus/pci/devices/{address}");
            bench.write(
                &format!("{place}/modalias"),
                &format!("pci:v000015B3d0000{id}sv000015B3sd00000050bc02sc00i00\n"),
            );
            bench.write(&format!("{place}/{other}"), "vfio-pci\n");
        };
        for (address, id, other) in [
            ("0000:08:00.0", "1013", "enable"),
            ("0000:08:00.1", "1013", "driver_override"),
            ("0000:08:00.2", "1013", "physfn/enable"),
            ("0000:09:00.0", "1015", "enable"),
            ("0000:0a:00.0", "1013", "enable"),
        ] {
            device(address, id, other);
        }
        std::os::unix::fs::symlink("../../drivers/m", bench.at("/sys/bus/pci/devices/0000:0a:00.0/driver"))
            .unwrap();
        let warning = "m 0000:08:00.0: probe failed with error code -110";
        bench.kernel.warnings.borrow_mut().insert("m".into(), warning.into());
        bench.kernel.slow_calls.borrow_mut().insert("m".into(), 2);
        load(&bench, "m").unwrap();
        let log = bench.log();
        let lines: Vec<&str> = log.lines().filter(|line| line.starts_with("WARN")).collect();
        assert_eq!(
            lines,
            [
                "WARN  still waiting for the kernel to load module m (10 s): see dmesg on the node",
                "WARN  still waiting for the kernel to load module m (20 s): see dmesg on the node",
                &format!("WARN  kernel: {warning}"),
                "WARN  module m is loaded, but is not bound to all of its devices: 0000:08:00.0 has no driver",
            ]
        );
        assert!(bench.kernel.pauses.get() > 0, "probes may still be running");
    }

    #[test]
    fn lockdown_is_detected_by_its_file_or_the_kernels_messages() {
        let bench = Bench::new();
        let is = |messages: &[String]| is_locked_down(&bench.node().paths, messages);
        assert!(is(&["Lockdown: driver-entrypoi: unsigned module loading is restricted".to_owned()]));
        for (state, wanted) in
            [("[none] integrity confidentiality\n", false), ("none [integrity] confidentiality\n", true)]
        {
            bench.write("/sys/kernel/security/lockdown", state);
            assert_eq!(is(&[]), wanted, "{state}");
        }
        bench.image_module("m", "");
        bench.kernel.load_errors.borrow_mut().insert("m".into(), Errno::PERM);
        let error = load(&bench, "m").unwrap_err();
        assert!(error.to_string().contains("and the kernel is locked down"), "{error}");
    }

    /// For any acyclic graph, each module is loaded once and after its dependencies.
    #[test]
    fn any_graph_is_loaded_in_order() {
        proptest::proptest!(|(edges in proptest::collection::vec((0usize..12, 0usize..12), 0..30))| {
            let bench = Bench::new();
            for module in 0..12 {
                let needs = edges.iter().filter(|(from, to)| *from == module && to < from);
                let mut needs: Vec<String> = needs.map(|(_, to)| format!("m{to}")).collect();
                needs.dedup();
                bench.image_module(&format!("m{module}"), &needs.join(","));
            }
            // The kernel of the test bench refuses a module whose dependencies are not loaded.
            let done = load(&bench, "m11").unwrap();
            let once: std::collections::BTreeSet<&String> = done.iter().collect();
            proptest::prop_assert_eq!(once.len(), done.len());
            proptest::prop_assert_eq!(done.last().map(String::as_str), Some("m11"));
        });
    }
}
