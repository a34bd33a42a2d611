//! Test bench: a node in a temporary directory, and a fake kernel that keeps its loaded modules in files there. A
//! second "container" on the same bench therefore finds what the first one left.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    io::{self, Write},
    net::SocketAddr,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use rustix::{io::Errno, mount::MountPropagationFlags};
use tempfile::TempDir;

use crate::{
    error::LoadRefusal,
    kernel::{Kernel, LoadError, Progress},
    log::Log,
    module_file::{ModuleFile, Origin},
    modules::loaded::Loaded,
    node::{Node, Paths},
    signals::Signals,
};

/// Release of the bench's kernel.
pub(crate) const RELEASE: &str = "6.1.0-56-amd64";

/// A node with a fake kernel.
pub(crate) struct Bench {
    directory: TempDir,
    pub(crate) kernel: FakeKernel,
    log: Rc<RefCell<Vec<u8>>>,
}

/// Fake kernel: its behavior, and the calls that it received.
pub(crate) struct FakeKernel {
    paths: Paths,
    /// Calls in order, such as `load ib_core of the image`, `unload mlx5_ib`, `bind /usr/src ...`.
    pub(crate) calls: RefCell<Vec<String>>,
    /// References that processes hold, by module.
    pub(crate) references: RefCell<BTreeMap<String, usize>>,
    /// Modules whose loading fails: `ib_core`, or `ib_core of the host`.
    pub(crate) load_errors: RefCell<BTreeMap<String, Errno>>,
    /// How often loading a module fails with `EBUSY` before it succeeds.
    pub(crate) busy_attempts: RefCell<BTreeMap<String, u32>>,
    /// How often loading or unloading a module is reported as slow.
    pub(crate) slow_calls: RefCell<BTreeMap<String, u64>>,
    /// The kernel's warning while a module is loaded.
    pub(crate) warnings: RefCell<BTreeMap<String, String>>,
    /// Modules without an exit function.
    pub(crate) permanent: RefCell<Vec<String>>,
    /// Called after a module is unloaded, with its name.
    pub(crate) after_unload: RefCell<Option<Box<AfterUnload>>>,
    /// Called at each pause, to change the node.
    pub(crate) at_pause: RefCell<Option<Box<dyn FnMut()>>>,
    /// Called at each connection, to change the node.
    pub(crate) at_connect: RefCell<Option<Box<dyn FnMut()>>>,
    /// Number of calls before the call that kills the container, and whether that call takes effect.
    pub(crate) killed_at: Cell<Option<(usize, bool)>>,
    pub(crate) pauses: Cell<u32>,
    /// Parameters that the kernel refuses in [`Kernel::load_within`].
    pub(crate) refused_parameters: RefCell<Vec<String>>,
    /// `srcversion` of drivers with which no host answers.
    pub(crate) without_link: RefCell<Vec<String>>,
    /// Servers that do not answer.
    pub(crate) silent_servers: RefCell<Vec<SocketAddr>>,
    /// Whether new mounts are private instead of shared.
    pub(crate) private_mounts: Cell<bool>,
}

type AfterUnload = dyn Fn(&FakeKernel, &str);

/// Panic payload of a killed container.
pub(crate) struct Killed;

/// Calls the closure when the container is ready, then asks the container to end.
pub(crate) struct EndsWhenReady<'a>(pub(crate) &'a mut dyn FnMut());

impl Signals for EndsWhenReady<'_> {
    fn received(&mut self) -> Option<&'static str> {
        None
    }

    fn wait(&mut self) -> &'static str {
        (self.0)();
        "SIGTERM"
    }
}

/// Asks the container to end from its start on.
pub(crate) struct EndsNow;

impl Signals for EndsNow {
    fn received(&mut self) -> Option<&'static str> {
        Some("SIGTERM")
    }

    fn wait(&mut self) -> &'static str {
        "SIGTERM"
    }
}

struct Shared(Rc<RefCell<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Bench {
    pub(crate) fn new() -> Self {
        // Canonical path, because the kernel shows paths without symlinks.
        let directory = tempfile::tempdir_in(fs::canonicalize(std::env::temp_dir()).unwrap()).unwrap();
        let paths = Paths::new(directory.path());
        let kernel = FakeKernel {
            paths,
            calls: RefCell::default(),
            references: RefCell::default(),
            load_errors: RefCell::default(),
            busy_attempts: RefCell::default(),
            slow_calls: RefCell::default(),
            warnings: RefCell::default(),
            permanent: RefCell::default(),
            after_unload: RefCell::default(),
            at_pause: RefCell::default(),
            at_connect: RefCell::default(),
            killed_at: Cell::default(),
            pauses: Cell::default(),
            refused_parameters: RefCell::default(),
            without_link: RefCell::default(),
            silent_servers: RefCell::default(),
            private_mounts: Cell::default(),
        };
        let bench = Self { directory, kernel, log: Rc::default() };
        bench.write("/proc/modules", "");
        bench.write(
            "/proc/self/mountinfo",
            "1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /run/mellanox/drivers rw shared:5 - tmpfs tmpfs rw\n",
        );
        bench
    }

    pub(crate) fn node(&self) -> Node<'_> {
        Node {
            paths: Paths::new(self.directory.path()),
            kernel: &self.kernel,
            log: Log::to(Box::new(Shared(Rc::clone(&self.log)))),
        }
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        Paths::new(self.directory.path()).at(path)
    }

    /// Returns the log without the times.
    pub(crate) fn log(&self) -> String {
        let text = String::from_utf8(self.log.borrow().clone()).unwrap();
        let lines: Vec<&str> =
            text.lines().map(|line| line.split_once(' ').map_or(line, |(_, line)| line)).collect();
        lines.join("\n")
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.kernel.calls.take()
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Adds a program to the image.
    pub(crate) fn program(&self, name: &str, script: &str) {
        let path = format!("/usr/bin/{name}");
        self.write(&path, &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(self.at(&path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.at(path)).ok()
    }

    /// Adds a module to the image's tree, with another `srcversion` than the host's.
    pub(crate) fn image_module(&self, name: &str, depends: &str) {
        self.module(&format!("/lib/modules/{RELEASE}/updates/{name}.ko"), depends, &format!("image-{name}"));
    }

    /// Adds a module to the host's tree.
    pub(crate) fn host_module(&self, name: &str, depends: &str) {
        self.module(
            &format!("/host/lib/modules/{RELEASE}/kernel/{name}.ko"),
            depends,
            &format!("host-{name}"),
        );
    }

    pub(crate) fn module(&self, path: &str, depends: &str, source_version: &str) {
        let info = format!("depends={depends}\0srcversion={source_version}\0");
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, elf_module(&info)).unwrap();
    }

    /// Lists modules as loaded in `/proc/modules`.
    pub(crate) fn set_loaded_modules(&self, names: &[&str]) {
        let lines: Vec<String> = names.iter().map(|name| format!("{name} 1 0 - Live 0x0")).collect();
        self.write("/proc/modules", &lines.join("\n"));
    }

    /// Loads modules of the host, as before the container.
    pub(crate) fn load_from_host(&self, names: &[&str]) {
        for name in names {
            self.load_from(&format!("/host/lib/modules/{RELEASE}/kernel/{name}.ko"));
        }
    }

    /// Loads a module from a file, as another program would before the container.
    pub(crate) fn load_from(&self, path: &str) {
        let (_, file) = ModuleFile::of(&self.at(path), Origin::Host).unwrap();
        self.kernel.load(&file, "", &mut |_| {}).unwrap();
        self.calls();
    }

    /// Sets the number of references that processes hold on a module.
    pub(crate) fn set_references(&self, name: &str, references: usize) {
        self.kernel.references.borrow_mut().insert(name.to_owned(), references);
        self.kernel.write_modules(&self.kernel.modules());
    }

    /// Adds a device driven by a module, with a virtual function that is bound to another driver.
    pub(crate) fn virtual_function(&self, module: &str, other: &str) {
        let driver = format!("/sys/bus/pci/drivers/{module}");
        for (to, at) in [
            (format!("/sys/module/{other}"), "/sys/devices/function/driver/module"),
            ("/sys/devices/function".to_owned(), "/sys/devices/card/virtfn0"),
            ("/sys/devices/card".to_owned(), &format!("{driver}/0000:0a:00.0")),
            (driver.clone(), &format!("/sys/module/{module}/drivers/pci:{module}")),
        ] {
            fs::create_dir_all(self.at(at).parent().unwrap()).unwrap();
            symlink(self.at(&to), self.at(at)).unwrap();
        }
    }

    /// Lists the `srcversion` of the loaded modules, sorted by module name.
    pub(crate) fn loaded_versions(&self) -> Vec<String> {
        let loaded = Loaded::read(&self.node().paths).unwrap();
        loaded.names().map(|name| loaded.get(name).unwrap().source_version.clone()).collect()
    }
}

impl FakeKernel {
    fn record_call(&self, call: String, work: impl FnOnce()) {
        self.calls.borrow_mut().push(call);
        match self.killed_at.get() {
            Some((0, takes_place)) => {
                if takes_place {
                    work();
                }
                std::panic::resume_unwind(Box::new(Killed));
            }
            Some((left, takes_place)) => self.killed_at.set(Some((left - 1, takes_place))),
            None => {}
        }
        work();
    }

    fn report_slow_call(&self, name: &str, progress: Progress<'_>) {
        let reports = self.slow_calls.borrow().get(name).copied().unwrap_or_default();
        (1..=reports).for_each(|report| progress(Duration::from_secs(10 * report)));
    }

    fn module_lines(&self) -> Vec<String> {
        fs::read_to_string(self.paths.at("/proc/modules")).unwrap().lines().map(str::to_owned).collect()
    }

    fn mounts(&self) -> Vec<String> {
        fs::read_to_string(self.paths.at("/proc/self/mountinfo"))
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    fn write(&self, path: &str, lines: &[String]) {
        fs::write(self.paths.at(path), lines.join("\n")).unwrap();
    }

    /// Writes `/proc/modules`; the users of a module are those whose file depends on it.
    fn write_modules(&self, modules: &BTreeMap<String, Vec<String>>) {
        let lines: Vec<String> = modules
            .keys()
            .map(|name| {
                let holders: Vec<&str> = modules
                    .iter()
                    .filter(|(_, depends)| depends.contains(name))
                    .map(|(holder, _)| holder.as_str())
                    .collect();
                let references = holders.len() + self.references.borrow().get(name).unwrap_or(&0);
                let holders =
                    if holders.is_empty() { "-".to_owned() } else { format!("{},", holders.join(",")) };
                format!("{name} 4096 {references} {holders} Live 0x0000000000000000")
            })
            .collect();
        self.write("/proc/modules", &lines);
    }

    fn modules(&self) -> BTreeMap<String, Vec<String>> {
        let names = self.module_lines().into_iter().map(|line| line.split(' ').next().unwrap().to_owned());
        let depends = |name: &str| {
            let text = fs::read_to_string(self.paths.at(&format!("/sys/module/{name}/depends"))).unwrap();
            text.split_whitespace().map(str::to_owned).collect()
        };
        names.map(|name| (name.clone(), depends(&name))).collect()
    }
}

impl Kernel for FakeKernel {
    fn release(&self) -> String {
        RELEASE.to_owned()
    }

    fn load(
        &self,
        file: &ModuleFile,
        parameters: &str,
        progress: Progress<'_>,
    ) -> Result<Vec<String>, LoadRefusal> {
        let (name, _) = ModuleFile::of(&file.path, file.origin).unwrap();
        let warnings = self.warnings.borrow().get(&name).cloned().into_iter().collect();
        self.report_slow_call(&name, progress);
        let info = file.info().unwrap();
        // The files of a request to the guard have other paths.
        let is_from_host = self.paths.container_path(&file.path).starts_with("/host/")
            || info.source_version.starts_with("host-");
        let from = if is_from_host { "host" } else { "image" };
        let parameters = if parameters.is_empty() { String::new() } else { format!(" {parameters}") };
        let mut modules = self.modules();
        let refuse = |errno, message: &str| {
            Err(LoadRefusal { errno, locked_down: false, messages: vec![message.to_owned()] })
        };
        let refuses = self.load_errors.borrow();
        if let Some(errno) = refuses.get(&name).or_else(|| refuses.get(&format!("{name} of the {from}"))) {
            return refuse(*errno, &format!("{name}: no"));
        }
        if let Some(left) = self.busy_attempts.borrow_mut().get_mut(&name).filter(|left| **left > 0) {
            *left -= 1;
            return refuse(Errno::BUSY, "");
        }
        if modules.contains_key(&name) {
            return refuse(Errno::EXIST, "");
        }
        if let Some(missing) = info.depends.iter().find(|need| !modules.contains_key(*need)) {
            return refuse(Errno::NOENT, &format!("{name}: Unknown symbol of {missing}"));
        }
        self.record_call(format!("load {name} of the {from}{parameters}"), || {
            let directory = self.paths.at(&format!("/sys/module/{name}"));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("srcversion"), format!("{}\n", info.source_version)).unwrap();
            fs::write(directory.join("depends"), info.depends.join(" ")).unwrap();
            fs::write(directory.join("taint"), if from == "host" { "\n" } else { "OE\n" }).unwrap();
            modules.insert(name, info.depends);
            self.write_modules(&modules);
        });
        Ok(warnings)
    }

    fn load_within(&self, file: &ModuleFile, parameters: &str, _: Duration) -> Result<(), LoadError> {
        if self.refused_parameters.borrow().iter().any(|refused| parameters.contains(refused)) {
            let refusal = LoadRefusal { errno: Errno::INVAL, locked_down: false, messages: Vec::new() };
            return Err(LoadError::Refused(refusal));
        }
        self.load(file, parameters, &mut |_| {}).map(|_| ()).map_err(LoadError::Refused)
    }

    fn unload(&self, name: &str, progress: Progress<'_>) -> Result<(), Errno> {
        self.report_slow_call(name, progress);
        let mut modules = self.modules();
        if !modules.contains_key(name) {
            return Err(Errno::NOENT);
        }
        if self.permanent.borrow().iter().any(|other| other == name) {
            return Err(Errno::BUSY);
        }
        let held = modules.values().any(|depends| depends.iter().any(|need| need == name));
        if held || self.references.borrow().get(name).is_some_and(|users| *users > 0) {
            return Err(Errno::AGAIN);
        }
        self.record_call(format!("unload {name}"), || {
            modules.remove(name);
            self.write_modules(&modules);
            // Keep the directory elsewhere, so that its inode number is not reused: sysfs does not reuse numbers, but
            // file systems do.
            let gone = self.paths.at("/sys/gone");
            fs::create_dir_all(&gone).unwrap();
            let number = fs::read_dir(&gone).unwrap().count();
            fs::rename(self.paths.at(&format!("/sys/module/{name}")), gone.join(number.to_string())).unwrap();
            if let Some(happens) = self.after_unload.borrow().as_ref() {
                happens(self, name);
            }
        });
        Ok(())
    }

    fn bind(&self, from: &Path, to: &Path) -> io::Result<()> {
        let place = fs::canonicalize(to).unwrap();
        let (from, to) = (self.paths.container_path(from), self.paths.container_path(&place));
        self.record_call(format!("bind {from} {to}"), || {
            let mut mounts = self.mounts();
            let id = mounts.len() + 1;
            let parents = mounts.iter().rev().map(|line| line.split(' ').collect::<Vec<_>>());
            let parent =
                parents.clone().find(|fields| Path::new(&to).starts_with(fields[4])).unwrap()[0].to_owned();
            let shared = if self.private_mounts.get() { "" } else { "shared:5 " };
            mounts.push(format!("{id} {parent} 0:1 {from} {to} rw {shared}- overlay overlay rw"));
            self.write("/proc/self/mountinfo", &mounts);
            // The mount hides the previous contents until it is unmounted.
            fs::create_dir_all(self.paths.at("/under")).unwrap();
            fs::rename(&place, self.paths.at(&format!("/under/{id}"))).unwrap();
            fs::create_dir(&place).unwrap();
        });
        Ok(())
    }

    fn unmount(&self, place: &Path) -> io::Result<()> {
        let at = fs::canonicalize(place).unwrap();
        let place = self.paths.container_path(&at);
        self.record_call(format!("unmount {place}"), || {
            let mut mounts = self.mounts();
            let last = mounts.iter().rposition(|line| line.split(' ').nth(4) == Some(place.as_str()));
            let line = mounts.remove(last.unwrap());
            self.write("/proc/self/mountinfo", &mounts);
            fs::remove_dir_all(&at).unwrap();
            fs::rename(self.paths.at(&format!("/under/{}", line.split(' ').next().unwrap())), &at).unwrap();
        });
        Ok(())
    }

    fn propagation(&self, place: &Path, flags: MountPropagationFlags) -> io::Result<()> {
        let kind = if flags.contains(MountPropagationFlags::PRIVATE) { "private" } else { "runbindable" };
        self.record_call(format!("make {} {kind}", self.paths.container_path(place)), || {});
        Ok(())
    }

    fn make_device(&self, path: &Path, major: u32) -> io::Result<()> {
        self.record_call(format!("device {} {major}", self.paths.container_path(path)), || {
            fs::write(path, "").unwrap();
        });
        Ok(())
    }

    fn connects(&self, server: SocketAddr, _: Duration) -> bool {
        if let Some(others) = self.at_connect.borrow_mut().as_mut() {
            others();
        }
        let is_without_link = |name: &String| {
            let version = fs::read_to_string(self.paths.at(&format!("/sys/module/{name}/srcversion")));
            version
                .is_ok_and(|version| self.without_link.borrow().iter().any(|other| other == version.trim()))
        };
        !self.silent_servers.borrow().contains(&server) && !self.modules().keys().any(is_without_link)
    }

    fn pause(&self, _: Duration) {
        self.pauses.set(self.pauses.get() + 1);
        // The closure may run the guard, which also pauses.
        if let Ok(mut others) = self.at_pause.try_borrow_mut()
            && let Some(others) = others.as_mut()
        {
            others();
        }
    }
}

/// Builds the smallest ELF file with a `.modinfo` section.
pub(crate) fn elf_module(info: &str) -> Vec<u8> {
    elf(&[(".modinfo", info.as_bytes())])
}

/// Builds an ELF file: header, these sections, their names, and the section table.
pub(crate) fn elf(sections: &[(&str, &[u8])]) -> Vec<u8> {
    let mut names = b"\0.shstrtab\0".to_vec();
    let count = u16::try_from(sections.len()).unwrap() + 2;
    let mut table = vec![[0; 4]];
    let mut offset = 64;
    for (name, bytes) in sections {
        table.push([names.len(), 1, offset, bytes.len()]);
        names.extend([name.as_bytes(), b"\0"].concat());
        offset += bytes.len();
    }
    table.push([1, 3, offset, names.len()]);
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    elf.extend(1u16.to_le_bytes()); // ET_REL
    elf.extend(62u16.to_le_bytes()); // EM_X86_64
    elf.extend(1u32.to_le_bytes());
    elf.extend([0; 16]); // no entry point, no program headers
    elf.extend(((offset + names.len()) as u64).to_le_bytes());
    elf.extend([0; 4]);
    for half in [64u16, 0, 0, 64, count, count - 1] {
        elf.extend(half.to_le_bytes());
    }
    for (_, bytes) in sections {
        elf.extend(*bytes);
    }
    elf.extend(names);
    for [name, kind, offset, size] in table {
        for word in [name, kind] {
            elf.extend(u32::try_from(word).unwrap().to_le_bytes());
        }
        elf.extend([0; 16]);
        elf.extend((offset as u64).to_le_bytes());
        elf.extend((size as u64).to_le_bytes());
        elf.extend([0; 24]);
    }
    elf
}
