//! Forecast of an unload: what holds each module, and which network interfaces go down with it.

use std::{collections::BTreeSet, fmt, fs, path::Path};

use driver_entrypoint::holders::{Holder, to_text};

use crate::{
    error::Error,
    files,
    modules::{is_module_name, loaded::Loaded, unload, users::module_of},
    node::{Node, is_plain_path},
    routes::Network,
};

/// Usage text of `forecast`.
pub(crate) const USAGE: &str = "\
usage: driver-entrypoint forecast [--message PATH] MODULE...

Forecasts the unload of these modules and of those that use them. Exit code 0: all can be unloaded; 1: at least one cannot.
With hostPID and hostNetwork it sees the node's processes, mounts and routes; else those of its own container.
Also writes their users to PATH (a container's /dev/termination-log), where farrier reads them. Processes of the pod
FARRIER_DRIVER_POD, which is the driver's own, do not count.";

/// Arguments of `forecast`.
#[derive(Debug)]
pub(crate) struct Question<'a> {
    modules: &'a [&'a str],
    /// File that the answer is written to, in addition to the log.
    message: Option<&'a str>,
    /// UID of the pod whose processes are ignored: the driver's own pod.
    driver_pod: Option<String>,
}

impl<'a> Question<'a> {
    /// Parses the arguments after `forecast`; `None` if they are invalid.
    pub(crate) fn parse(arguments: &'a [&'a str], driver_pod: Option<String>) -> Option<Self> {
        let (message, modules) = match arguments {
            ["--message", path, modules @ ..] => (Some(*path), modules),
            modules => (None, modules),
        };
        let are_modules = !modules.is_empty() && modules.iter().all(|name| is_module_name(name));
        let is_path = message.is_none_or(is_plain_path);
        (are_modules && is_path).then_some(Self { modules, message, driver_pod })
    }
}

/// Forecast for one module.
#[derive(Debug)]
pub(crate) struct UnloadForecast {
    name: String,
    /// Holders that prevent the unload.
    held: Vec<Holder>,
    /// Network interfaces that go down with the module.
    down: Vec<String>,
}

impl UnloadForecast {
    pub(crate) fn stays(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether the unload fails or takes an interface down.
    pub(crate) fn matters(&self) -> bool {
        self.stays() || !self.down.is_empty()
    }
}

impl fmt::Display for UnloadForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, held, down } = self;
        match (held.is_empty(), down.is_empty()) {
            (false, _) => {
                let held: Vec<&str> = held.iter().map(|holder| holder.what.as_str()).collect();
                write!(f, "module {name} cannot be unloaded: {}", held.join("; "))
            }
            (true, false) => write!(f, "module {name} can be unloaded, which takes down {}", down.join("; ")),
            (true, true) => write!(f, "module {name} can be unloaded"),
        }
    }
}

/// Runs the `forecast` command: logs a line for each module.
pub(crate) fn run(node: &Node<'_>, question: &Question<'_>) -> Result<(), Error> {
    let departures = forecast(node, question.modules, question.driver_pod.as_deref())?;
    if departures.is_empty() {
        node.log.step("none of these modules is loaded");
    }
    for departure in &departures {
        node.log.step(departure);
    }
    if let Some(path) = question.message {
        let named = |UnloadForecast { name, held, .. }: &UnloadForecast| -> Vec<Holder> {
            held.iter()
                .map(|Holder { pod, what }| Holder { pod: pod.clone(), what: format!("{name}: {what}") })
                .collect()
        };
        let holders: Vec<Holder> = departures.iter().flat_map(named).collect();
        // The kubelet bind-mounts this file, so write it in place instead of renaming another file over it.
        fs::write(node.paths.at(path), to_text(&holders)).map_err(Error::on("write", path))?;
    }
    if departures.iter().any(UnloadForecast::stays) {
        return Err(Error::new(
            "not all of these modules can be unloaded",
            "stop the processes that use them, unmount their file systems, or drain the node",
        ));
    }
    Ok(())
}

/// Logs a forecast before modules are unloaded.
pub(crate) fn announce(node: &Node<'_>, names: &[impl AsRef<str>]) -> Result<(), Error> {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    for departure in forecast(node, &names, None)?.iter().filter(|departure| departure.matters()) {
        node.log.step(format!("forecast: {departure}"));
    }
    Ok(())
}

/// Forecasts the unload of these modules and of all modules that use them, in unload order. Processes of the pod
/// `without` are ignored.
fn forecast(node: &Node<'_>, names: &[&str], without: Option<&str>) -> Result<Vec<UnloadForecast>, Error> {
    let loaded = Loaded::read(&node.paths)?;
    let (interfaces, mounts) = (interfaces(node), mounts(node));
    let departures = loaded.with_holders(names).into_iter().map(|name| {
        let of = |found: &[(String, String)]| -> Vec<String> {
            found.iter().filter(|(module, _)| *module == name).map(|(_, what)| what.clone()).collect()
        };
        let own = |what: String| Holder { pod: None, what };
        let mut held: Vec<Holder> = of(&mounts).into_iter().map(own).collect();
        let users = [unload::in_use, unload::functions_in_use].map(|users| users(node, &loaded, &name));
        for error in users.into_iter().flatten() {
            let Error::InUse { by, references, .. } = error else { continue };
            let others = by.iter().filter(|user| without.is_none() || user.pod.as_deref() != without);
            held.extend(others.map(|user| Holder { pod: user.pod.clone(), what: format!("used by {user}") }));
            if by.is_empty() && held.is_empty() {
                held.push(own(format!("{references} reference(s) of an unknown user")));
            }
        }
        let down = of(&interfaces);
        UnloadForecast { name, held, down }
    });
    Ok(departures.collect())
}

/// Lists network interfaces and the traffic that they carry, each with the module of the interface's driver.
fn interfaces(node: &Node<'_>) -> Vec<(String, String)> {
    let network = Network::read(&node.paths);
    let devices = files::entries(node.paths.at("/sys/class/net")).into_iter();
    devices
        .filter_map(|device| {
            let module = module_of(&device.join("device"))?;
            let name = device.file_name()?.to_str()?;
            let uses = network.uses(&device);
            let uses = if uses.is_empty() { String::new() } else { format!(" ({})", uses.join(", ")) };
            Some((module, format!("interface {name}{uses}")))
        })
        .collect()
}

/// Lists file systems mounted from block devices, each with the module of the device's driver.
fn mounts(node: &Node<'_>) -> Vec<(String, String)> {
    let text = fs::read_to_string(node.paths.at("/proc/1/mountinfo")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| {
        // Fields: id parent major:minor root place ... (proc_pid_mountinfo(5))
        let mut fields = line.split(' ').skip(2);
        let (device, place) = (fields.next()?, fields.nth(1)?);
        let device = fs::canonicalize(node.paths.at(&format!("/sys/dev/block/{device}"))).ok()?;
        let held = move |module| (module, format!("a file system is mounted at {place}"));
        Some(drivers(&device, 8).into_iter().map(held).collect::<Vec<_>>())
    });
    lines.flatten().collect()
}

/// Modules of a block device's driver. For stacked devices (LVM, multipath, RAID) the modules of the underlying
/// devices, at most `depth` levels down.
fn drivers(device: &Path, depth: usize) -> BTreeSet<String> {
    if let Some(module) = device.ancestors().find_map(module_of) {
        return [module].into();
    }
    let parts = device.ancestors().flat_map(|place| files::entries(place.join("slaves")));
    let parts = parts.filter_map(|part| fs::canonicalize(part).ok()).filter(|_| depth > 0);
    parts.flat_map(|part| drivers(&part, depth.saturating_sub(1))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Bench;

    const ROUTES: &str = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                          eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                          eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
    // 192.168.7.9:6443 is established; 10.0.0.5:6443 is closing (TIME_WAIT).
    const CONNECTIONS: &str = "  sl  local_address rem_address   st\n\
                               0: 0100007F:9C40 0907A8C0:192B 01 00000000:00000000\n\
                               1: 0100007F:9C41 0500000A:192B 06 00000000:00000000\n";

    fn bench() -> Bench {
        let bench = Bench::new();
        for (name, depends) in [("mlx5_core", ""), ("mlx5_ib", "mlx5_core"), ("nvme", ""), ("dummy", "")] {
            bench.host_module(name, depends);
        }
        bench.loaded_from_host(&["mlx5_core", "mlx5_ib", "nvme", "dummy"]);
        bench
    }

    /// Creates a device below `/sys` whose driver is the module.
    fn device(bench: &Bench, path: &str, module: &str) {
        let driver = bench.at(path).join("driver");
        fs::create_dir_all(&driver).unwrap();
        symlink(format!("../../../module/{module}"), driver.join("module")).unwrap();
    }

    fn told(bench: &Bench, names: &[&str]) -> Vec<String> {
        forecast(&bench.node(), names, None).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_goes_down_is_told() {
        let bench = bench();
        bench.file("/proc/1/net/route", ROUTES);
        bench.file("/proc/1/net/tcp", CONNECTIONS);
        for name in ["eth0", "eth1", "eth2"] {
            device(&bench, &format!("/sys/class/net/{name}/device"), "mlx5_core");
        }
        fs::create_dir_all(bench.at("/sys/class/net/lo")).unwrap();
        assert_eq!(
            told(&bench, &["mlx5-core", "absent"]),
            [
                "module mlx5_ib can be unloaded",
                "module mlx5_core can be unloaded, which takes down interface eth0 (the node's default route); interface eth1 (routes, the \
                 connection to the API server at 192.168.7.9:6443); interface eth2",
            ]
        );
    }

    #[test]
    fn who_holds_a_module_is_told() {
        let bench = bench();
        device(&bench, "/sys/devices/pci0/nvme0", "nvme");
        let disk = bench.at("/sys/devices/pci0/nvme0/block/nvme0n1/nvme0n1p1");
        fs::create_dir_all(&disk).unwrap();
        fs::create_dir_all(bench.at("/sys/dev/block")).unwrap();
        symlink(&disk, bench.at("/sys/dev/block/259:1")).unwrap();
        let volume = bench.at("/sys/devices/virtual/block/dm-1");
        for (device, part) in [("dm-0", &disk), ("dm-1", &volume.with_file_name("dm-0"))] {
            let parts = volume.with_file_name(device).join("slaves");
            fs::create_dir_all(&parts).unwrap();
            symlink(part, parts.join("part")).unwrap();
        }
        symlink(&volume, bench.at("/sys/dev/block/253:1")).unwrap();
        bench.file(
            "/proc/1/mountinfo",
            "30 1 259:1 / /var/lib/data rw - ext4 /dev/nvme0n1p1 rw\n31 1 0:5 / /dev rw - devtmpfs none rw\n\
             32 1 253:1 / /var/lib/volume rw - xfs /dev/mapper/volume rw\n",
        );
        bench.kernel.users.borrow_mut().extend([
            ("mlx5_ib".into(), 1),
            ("nvme".into(), 1),
            ("dummy".into(), 2),
        ]);
        bench.host_module("x", "");
        bench.loaded_from_host(&["x"]);
        bench.file("/proc/12/comm", "ucx\n");
        bench.file("/proc/12/maps", "7f00-7f01 rw-s 0000 00:05 1 /dev/infiniband/uverbs1\n");
        let departures = forecast(&bench.node(), &["mlx5_core", "nvme", "dummy"], None).unwrap();
        assert_eq!(
            departures.iter().map(UnloadForecast::stays).collect::<Vec<_>>(),
            [true, false, true, true]
        );
        assert_eq!(
            told(&bench, &["mlx5_core", "nvme", "dummy"]),
            [
                "module mlx5_ib cannot be unloaded: used by process 12 (ucx) with /dev/infiniband/uverbs1 open",
                "module mlx5_core can be unloaded",
                "module nvme cannot be unloaded: a file system is mounted at /var/lib/data; a file system is mounted at /var/lib/volume",
                "module dummy cannot be unloaded: 2 reference(s) of an unknown user",
            ]
        );
    }

    #[test]
    fn who_has_a_virtual_function_open_is_told() {
        let bench = bench();
        bench.virtual_function("mlx5_core", "vfio_pci");
        bench.host_module("vfio_pci", "");
        bench.loaded_from_host(&["vfio_pci"]);
        bench.held("vfio_pci", 1);
        bench.file("/proc/12/comm", "qemu\n");
        fs::create_dir_all(bench.at("/proc/12/fd")).unwrap();
        symlink("/dev/vfio/17", bench.at("/proc/12/fd/9")).unwrap();
        assert_eq!(
            told(&bench, &["mlx5_core"]),
            [
                "module mlx5_ib can be unloaded",
                "module mlx5_core cannot be unloaded: used by process 12 (qemu) with /dev/vfio/17 open"
            ]
        );
    }

    /// farrier evicts the named pods, except the driver's own pod. Holders without a pod stay.
    #[test]
    fn pods_that_hold_a_module_are_told_to_farrier() {
        const TRAINING: &str = "0f3a2b1c-0000-4000-8000-000000000001";
        const DRIVER: &str = "0f3a2b1c-0000-4000-8000-000000000002";
        let bench = bench();
        bench.kernel.users.borrow_mut().insert("mlx5_ib".into(), 1);
        let user = |id: u32, group: &str| {
            bench.file(&format!("/proc/{id}/comm"), "ucx\n");
            bench.file(&format!("/proc/{id}/maps"), "7f00-7f01 rw-s 0000 00:05 1 /dev/infiniband/uverbs1\n");
            bench.file(&format!("/proc/{id}/cgroup"), group);
        };
        bench.host_module("x", "");
        bench.loaded_from_host(&["x"]);
        let systemd = TRAINING.replace('-', "_");
        user(12, &format!("0::/../../kubepods-burstable-pod{systemd}.slice/cri-containerd-1.scope\n"));
        user(13, &format!("0::/kubepods/besteffort/pod{DRIVER}/1\n"));
        user(14, "0::/system.slice/opensm.service\n");
        bench.file("/dev/termination-log", "");
        let ask = |driver: &str| {
            let words = ["--message", "/dev/termination-log", "mlx5_ib"];
            let asked = run(&bench.node(), &Question::parse(&words, Some(driver.to_owned())).unwrap());
            (asked.is_ok(), fs::read_to_string(bench.at("/dev/termination-log")).unwrap())
        };
        let stays = format!(
            "{TRAINING} mlx5_ib: used by process 12 (ucx) of pod {TRAINING} with /dev/infiniband/uverbs1 open\n\
             - mlx5_ib: used by process 14 (ucx) with /dev/infiniband/uverbs1 open\n"
        );
        assert_eq!(ask(DRIVER), (false, stays));
        for gone in [12, 14] {
            fs::remove_dir_all(bench.at(&format!("/proc/{gone}"))).unwrap();
        }
        assert_eq!(ask(DRIVER), (true, String::new()));
        assert!(!ask(TRAINING).0, "only processes of the driver's own pod are ignored");
        for wrong in [&["--message", "x", "a"][..], &["--message", "/x"], &["a b"], &[]] {
            assert!(Question::parse(wrong, None).is_none(), "{wrong:?}");
        }
    }

    #[test]
    fn a_container_that_sees_nothing_says_as_much_as_it_can() {
        let bench = bench();
        assert_eq!(
            told(&bench, &["mlx5_core"]),
            ["module mlx5_ib can be unloaded", "module mlx5_core can be unloaded"]
        );
    }
}
