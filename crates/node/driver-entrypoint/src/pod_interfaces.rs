//! Finds network interfaces of a driver in other network namespaces. For example, a pod may have a virtual function, or a
//! macvlan, an ipvlan or a VLAN of one of the node's interfaces.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::{
    devices,
    disruption::{Disruption, Loss},
    files::{entries, link_name, name_of, names_after, text},
    modules::users::{module_of, pod_of},
    mountinfo,
    node::Paths,
};

/// Types (`DEVTYPE` in `uevent`) of interfaces whose `iflink` is the interface below them. A veth's `iflink` is its peer.
const STACKED_TYPES: [&str; 3] = ["macvlan", "ipvlan", "vlan"];

/// A network interface in another namespace. Its name and pod are known only with `hostPID`.
pub(crate) struct PodInterface {
    name: String,
    pod: Option<String>,
    /// Modules of the drivers below the interface.
    modules: BTreeSet<String>,
    /// Name of the device, such as a PCI address; empty for an interface on top of another.
    device: String,
}

/// Reads the interfaces of each process's network namespace, through the `/sys` that is mounted in its root.
pub(crate) fn read(paths: &Paths) -> Vec<PodInterface> {
    let namespace_of = |process: &str| fs::read_link(paths.at(&format!("/proc/{process}/ns/net"))).ok();
    let mut seen: BTreeSet<PathBuf> = ["1", "self"].into_iter().filter_map(namespace_of).collect();
    let nodes_sys: Vec<String> =
        ["1", "self"].into_iter().filter_map(|id| sysfs_of(&paths.at(&format!("/proc/{id}")))).collect();
    let node_interfaces = entries(paths.at("/sys/class/net")).into_iter();
    let by_index = node_interfaces.filter_map(|path| Some((text(path.join("ifindex"))?, path))).collect();
    let mut interfaces = Vec::new();
    for process in entries(paths.at("/proc")) {
        let Ok(namespace) = fs::read_link(process.join("ns/net")) else { continue };
        // In its own network namespace, a service with a private network or a container with the node's `/sys` sees the node's
        // interfaces in `/sys`. Another process of the namespace may see the right ones.
        if sysfs_of(&process).is_some_and(|sys| nodes_sys.contains(&sys)) || !seen.insert(namespace) {
            continue;
        }
        let pod = pod_of(&process);
        for interface in entries(process.join("root/sys/class/net")) {
            interfaces.extend(PodInterface::read(&interface, pod.as_ref(), &by_index));
        }
    }
    interfaces
}

/// Lists the losses of pods if a module is unloaded. `interfaces` are all in other namespaces.
pub(crate) fn losses(interfaces: &[PodInterface], paths: &Paths, module: &str) -> Vec<Loss> {
    let loss = |pod, resource| Loss { disruption: Disruption::Pods, pod, resource };
    let driven = interfaces.iter().filter(|interface| interface.modules.contains(module));
    let mut losses = Vec::new();
    for PodInterface { name, pod, device, .. } in driven.clone() {
        let owner = pod.as_ref().map(|pod| format!("of pod {pod}"));
        let owner = owner.unwrap_or_else(|| "of another network namespace".to_owned());
        let device_text = if device.is_empty() { String::new() } else { format!(" ({device})") };
        losses.push(loss(pod.clone(), format!("interface {name}{device_text} {owner}")));
    }
    // The directory of a device's interfaces exists while the device has an interface in any namespace, but lists only
    // the interfaces in this namespace.
    for device in devices::driver_entries(paths, module) {
        let interfaces = device.join("net");
        let name = name_of(&device);
        let is_away = interfaces.is_dir() && entries(&interfaces).is_empty();
        if is_away && !driven.clone().any(|interface| interface.device == name) {
            losses.push(loss(None, format!("the interface of {name} in another network namespace")));
        }
    }
    losses
}

/// Returns the device number of the file system that a process sees at `/sys`. Each network namespace has its own.
fn sysfs_of(process: &Path) -> Option<String> {
    let mounts = mountinfo::read(process).ok()?;
    mounts.into_iter().rfind(|mount| mount.point == Path::new("/sys")).map(|mount| mount.device)
}

impl PodInterface {
    fn read(interface: &Path, pod: Option<&String>, by_index: &BTreeMap<String, PathBuf>) -> Option<Self> {
        let (modules, device) = if let Some(module) = module_of(&interface.join("device")) {
            ([module].into(), link_name(interface.join("device")).unwrap_or_default())
        } else {
            let uevent = text(interface.join("uevent")).unwrap_or_default();
            let kind = uevent.lines().find_map(|line| line.strip_prefix("DEVTYPE="))?;
            let below = STACKED_TYPES.contains(&kind).then(|| text(interface.join("iflink")))??;
            (driver_modules(by_index.get(&below)?), String::new())
        };
        Some(Self { name: name_of(interface), pod: pod.cloned(), modules, device })
    }
}

/// Lists the modules that drive an interface or the interfaces below it, such as a bond's slaves.
fn driver_modules(interface: &Path) -> BTreeSet<String> {
    let (mut modules, mut seen, mut next) = (BTreeSet::new(), BTreeSet::new(), vec![interface.to_owned()]);
    while let Some(interface) = next.pop() {
        if !seen.insert(interface.clone()) {
            continue;
        }
        modules.extend(module_of(&interface.join("device")));
        let lower = names_after(&interface, "lower_").into_iter();
        next.extend(lower.map(|name| interface.with_file_name(name)));
    }
    modules
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Bench;

    const POD: &str = "0f3a2b1c-0000-4000-8000-000000000001";

    /// Creates a process in a network namespace, and an interface of that namespace.
    fn process(bench: &Bench, id: u32, namespace: u32, interface: &str) -> String {
        fs::create_dir_all(bench.at(&format!("/proc/{id}/ns"))).unwrap();
        symlink(format!("net:[{namespace}]"), bench.at(&format!("/proc/{id}/ns/net"))).unwrap();
        bench.write(&format!("/proc/{id}/cgroup"), &format!("0::/kubepods/besteffort/pod{POD}/1\n"));
        let place = format!("/proc/{id}/root/sys/class/net/{interface}");
        fs::create_dir_all(bench.at(&place)).unwrap();
        place
    }

    /// Gives an interface a device, whose driver is the module.
    fn driven(bench: &Bench, interface: &str, module: &str, device: &str) {
        let driver = bench.at(&format!("/sys/devices/{device}/driver"));
        fs::create_dir_all(&driver).unwrap();
        symlink(format!("/sys/module/{module}"), driver.join("module")).unwrap();
        fs::create_dir_all(bench.at(interface)).unwrap();
        symlink(bench.at(&format!("/sys/devices/{device}")), bench.at(interface).join("device")).unwrap();
    }

    fn loss_lines(bench: &Bench) -> Vec<String> {
        let paths = bench.node().paths;
        let losses = losses(&read(&paths), &paths, "mlx5_core");
        losses.iter().map(|loss| format!("{:?}: {}", loss.pod.is_some(), loss.resource)).collect()
    }

    #[test]
    fn a_virtual_function_in_a_pod_is_seen_through_the_pods_sys() {
        let bench = Bench::new();
        process(&bench, 1, 10, "eth0");
        process(&bench, 20, 10, "node-process");
        let interface = process(&bench, 30, 11, "net1");
        driven(&bench, &interface, "mlx5_core", "0000:08:00.2");
        let interface = process(&bench, 31, 11, "again");
        driven(&bench, &interface, "mlx5_core", "0000:08:00.3");
        assert_eq!(loss_lines(&bench), [format!("true: interface net1 (0000:08:00.2) of pod {POD}")]);
    }

    /// Services with `PrivateNetwork=yes`, such as systemd-hostnamed, and containers that mount the node's `/sys`.
    #[test]
    fn a_process_that_has_the_nodes_sys_shows_no_interface_of_its_namespace() {
        let bench = Bench::new();
        let mount = |id, device| {
            let text =
                format!("21 1 0:4 / /proc rw - proc proc rw\n22 1 {device} / /sys rw - sysfs sysfs rw\n");
            bench.write(&format!("/proc/{id}/mountinfo"), &text);
        };
        process(&bench, 1, 10, "eth0");
        mount(1, "0:21");
        for (id, namespace, device) in [(20, 11, "0000:08:00.0"), (30, 12, "0000:08:00.1")] {
            let interface = process(&bench, id, namespace, "eth0");
            driven(&bench, &interface, "mlx5_core", device);
            mount(id, "0:21");
        }
        // Another process of the second namespace shows the namespace's interfaces.
        let interface = process(&bench, 31, 12, "net1");
        driven(&bench, &interface, "mlx5_core", "0000:08:00.2");
        mount(31, "0:45");
        assert_eq!(loss_lines(&bench), [format!("true: interface net1 (0000:08:00.2) of pod {POD}")]);
    }

    #[test]
    fn a_macvlan_in_a_pod_leads_to_the_interface_below_it() {
        let bench = Bench::new();
        process(&bench, 1, 10, "eth0");
        driven(&bench, "/sys/class/net/eth0", "mlx5_core", "0000:08:00.0");
        bench.write("/sys/class/net/eth0/ifindex", "3\n");
        bench.write("/sys/class/net/bond0/ifindex", "5\n");
        symlink("../eth0", bench.at("/sys/class/net/bond0/lower_eth0")).unwrap();
        let interface = process(&bench, 30, 11, "net1");
        bench.write(&format!("{interface}/uevent"), "DEVTYPE=macvlan\nINTERFACE=net1\nIFINDEX=7\n");
        bench.write(&format!("{interface}/iflink"), "5\n");
        // A veth's peer may have any number.
        let veth = process(&bench, 40, 12, "eth0");
        bench.write(&format!("{veth}/uevent"), "INTERFACE=eth0\nIFINDEX=2\n");
        bench.write(&format!("{veth}/iflink"), "3\n");
        assert_eq!(loss_lines(&bench), [format!("true: interface net1 of pod {POD}")]);
    }

    #[test]
    fn an_interface_that_is_elsewhere_is_known_without_its_processes() {
        let bench = Bench::new();
        for (device, interface) in
            [("0000:08:00.0", "net/ens1"), ("0000:08:00.2", "net"), ("0000:08:00.4", "")]
        {
            fs::create_dir_all(
                bench.at(&format!("/sys/module/mlx5_core/drivers/pci:mlx5_core/{device}/{interface}")),
            )
            .unwrap();
        }
        assert_eq!(loss_lines(&bench), ["false: the interface of 0000:08:00.2 in another network namespace"]);
    }
}
