//! The program that owns a network interface: systemd-networkd, NetworkManager or ifupdown. It configures an interface
//! that a new driver has created, before the guard replays saved settings. First, interfaces get their old names back.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    error::Error,
    files::{self, entries, link_name, name_of, text},
    isolated::wait_within,
    node::Node,
    personality::mofed::sriov,
};

/// Maximum time for a program of an owner.
const LIMIT: Duration = Duration::from_secs(30);
/// Maximum number of polls for an interface that a new driver creates.
const POLLS: u32 = 100;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Owner of network interfaces.
#[derive(Debug, PartialEq, Eq)]
struct Owner {
    name: &'static str,
    /// Program that configures an interface. The interface's name follows the arguments.
    program: &'static str,
    arguments: &'static [&'static str],
}

const NETWORKD: Owner =
    Owner { name: "systemd-networkd", program: "networkctl", arguments: &["reconfigure"] };
// Do not wait here (networkctl does not either): the replay waits for all owners together.
const NETWORK_MANAGER: Owner =
    Owner { name: "NetworkManager", program: "nmcli", arguments: &["--wait", "0", "device", "connect"] };
const IFUPDOWN: Owner = Owner { name: "ifupdown", program: "ifup", arguments: &["--force"] };

impl Owner {
    fn named(name: &str) -> Option<&'static Self> {
        [&NETWORKD, &NETWORK_MANAGER, &IFUPDOWN].into_iter().find(|owner| owner.name == name)
    }

    /// Finds the owner of an interface in the state files that the network managers keep below `/run`.
    fn of(node: &Node<'_>, interface: &Path) -> Option<&'static Self> {
        let name = name_of(interface);
        let index = text(interface.join("ifindex"))?;
        let contents = |path: String| text(node.paths.at(&path)).unwrap_or_default();
        let is_managed = |text: &str, prefix: &str, unmanaged: &str| {
            text.lines().filter_map(|line| line.strip_prefix(prefix)).any(|state| state != unmanaged)
        };
        if is_managed(&contents(format!("/run/systemd/netif/links/{index}")), "ADMIN_STATE=", "unmanaged") {
            return Some(&NETWORKD);
        }
        if is_managed(&contents(format!("/run/NetworkManager/devices/{index}")), "managed=", "false") {
            return Some(&NETWORK_MANAGER);
        }
        let is_up = |line: &str| line.split('=').next() == Some(name.as_str());
        contents(format!("/run/network/ifstate.{name}"))
            .lines()
            .chain(contents("/run/network/ifstate".to_owned()).lines())
            .any(is_up)
            .then_some(&IFUPDOWN)
    }
}

/// Placeholder in the file for a missing device or owner.
const NONE: &str = "-";

/// An interface as it was before the swap.
struct SavedInterface<'a> {
    name: &'a str,
    /// Address of its PCI device; `None` on another bus, or if the device has other interfaces as well.
    device: Option<&'a str>,
    owner: Option<&'static Owner>,
}

/// Writes the names, devices and owners of interfaces to a file.
pub(super) fn save(node: &Node<'_>, file: &str, interfaces: &[PathBuf]) -> Result<(), Error> {
    let mut lines = Vec::new();
    for interface in interfaces {
        let name = name_of(interface);
        let device = link_name(interface.join("device"));
        let has_one_interface = |device: &String| {
            entries(node.paths.at("/sys/bus/pci/devices").join(device).join("net")).len() == 1
        };
        let device = device.filter(has_one_interface).unwrap_or_else(|| NONE.to_owned());
        let owner = Owner::of(node, interface).map_or(NONE, |owner| owner.name);
        node.log.step(format!("interface {name}, device {device}, owner {owner}"));
        lines.push(format!("{name} {device} {owner}"));
    }
    files::write(node, file, &lines.join("\n"))
}

/// Gives the interfaces in a file their old names, and has their owners configure them. Returns whether there are owners.
pub(super) fn configure(node: &Node<'_>, file: &str) -> bool {
    let text = text(node.paths.at(file)).unwrap_or_default();
    let saved = text.lines().filter_map(|line| {
        let [name, device, owner] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
        let device = Some(device).filter(|device| *device != NONE);
        Some(SavedInterface { name, device, owner: Owner::named(owner) })
    });
    let saved: Vec<SavedInterface<'_>> = saved.collect();
    restore_names(node, &saved);
    let mut has_owner = false;
    for (owner, interface) in saved.iter().filter_map(|saved| Some((saved.owner?, saved.name))) {
        has_owner = true;
        let path = node.paths.at("/sys/class/net").join(interface);
        node.poll(POLLS, POLL_INTERVAL, || path.exists());
        let Owner { name, program, arguments } = owner;
        let arguments = [*arguments, &[interface]].concat();
        match run(node, program, &arguments) {
            Ok(()) => node.log.step(format!("{name} configures {interface}")),
            Err(reason) => node.log.warn(format!("{program} {}: {reason}", arguments.join(" "))),
        }
    }
    has_owner
}

/// Gives interfaces whose names have changed the names from before the swap. Names can change because the new driver finds its
/// devices in another order, or because udev derives other names from what the driver reports.
fn restore_names(node: &Node<'_>, saved: &[SavedInterface<'_>]) {
    let start = Instant::now();
    let changed_name = |saved: &SavedInterface<'_>| {
        // All interfaces share one wait: some devices may have none with the new driver.
        let polls = if start.elapsed() < POLL_INTERVAL * POLLS { POLLS } else { 0 };
        let interface = sriov::await_interface(node, &format!("pci/{}", saved.device?), polls)?;
        Some(name_of(&interface)).filter(|name| name != saved.name)
    };
    let on_pci = saved.iter().filter(|saved| saved.device.is_some());
    let renamed: Vec<(String, &str)> =
        on_pci.filter_map(|saved| Some((changed_name(saved)?, saved.name))).collect();
    // Use temporary names, because two interfaces may have swapped their names.
    let temporary = |index: usize| format!("farrier{index}");
    for (index, (name, _)) in renamed.iter().enumerate() {
        node.log.warn_of(rename(node, name, &temporary(index)));
    }
    for (index, (name, wanted)) in renamed.iter().enumerate() {
        match rename(node, &temporary(index), wanted) {
            Ok(()) => node.log.step(format!("renamed {name} to {wanted}, as before the swap")),
            Err(reason) => {
                node.log.warn(format!("{name} was {wanted} before the swap: {reason}"));
                node.log.warn_of(rename(node, &temporary(index), name));
            }
        }
    }
}

/// Renames an interface. Takes it down first, because Linux before 6.2 does not rename an interface that is up.
fn rename(node: &Node<'_>, from: &str, to: &str) -> Result<(), String> {
    let set = |arguments: &[&str]| {
        let words = [&["link", "set", "dev", from], arguments].concat();
        run(node, "ip", &words).map_err(|reason| format!("ip {}: {reason}", words.join(" ")))
    };
    set(&["down"])?;
    set(&["name", to])
}

/// Runs a program of the host, with a time limit. Its error messages go to the guard's log.
pub(super) fn run(node: &Node<'_>, program: &str, arguments: &[&str]) -> Result<(), String> {
    let path = files::program(&node.paths, program).ok_or("the host has no such program")?;
    let mut command = Command::new(path);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    match wait_within(&mut child, LIMIT).map_err(|error| error.to_string())? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(status.to_string()),
        None => {
            // Do not wait for the killed program to end: waiting may take long and has no use here.
            let killed = child.kill().map_err(|error| error.to_string());
            killed.and(Err(format!("killed after {} s", LIMIT.as_secs())))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::Bench;

    fn interface(bench: &Bench) -> PathBuf {
        bench.write("/sys/class/net/eth0/ifindex", "7\n");
        bench.at("/sys/class/net/eth0")
    }

    #[test]
    fn owners_are_known_by_their_state() {
        for (path, text, owner) in [
            ("/run/systemd/netif/links/7", "ADMIN_STATE=configured\n", Some(&NETWORKD)),
            ("/run/systemd/netif/links/7", "ADMIN_STATE=unmanaged\n", None),
            ("/run/NetworkManager/devices/7", "[device]\nmanaged=true\n", Some(&NETWORK_MANAGER)),
            ("/run/NetworkManager/devices/7", "[device]\nmanaged=false\n", None),
            ("/run/network/ifstate.eth0", "eth0\n", Some(&IFUPDOWN)),
            ("/run/network/ifstate", "lo=lo\neth0=eth0\n", Some(&IFUPDOWN)),
            ("/run/network/ifstate", "lo=lo\neth01=eth01\n", None),
        ] {
            let bench = Bench::new();
            let interface = interface(&bench);
            bench.write(path, text);
            assert_eq!(Owner::of(&bench.node(), &interface), owner, "{path}: {text}");
        }
    }

    /// In a virtual machine, 20 of the 30 seconds until the time limit passed in `nmcli`.
    #[test]
    fn no_time_for_the_api_server_is_spent_on_waiting_for_networkmanager() {
        let bench = Bench::new();
        let interface = interface(&bench);
        bench.write("/run/NetworkManager/devices/7", "[device]\nmanaged=true\n");
        let said = bench.at("/said");
        bench.program("nmcli", &format!("echo \"$@\" > {}", said.display()));
        let node = bench.node();
        save(&node, "/run/interfaces", &[interface]).unwrap();
        assert!(configure(&node, "/run/interfaces"));
        assert_eq!(text(said).as_deref(), Some("--wait 0 device connect eth0"), "{}", bench.log());
    }

    #[test]
    fn the_owner_configures_the_interface_again() {
        let bench = Bench::new();
        let interface = interface(&bench);
        bench.write("/run/network/ifstate.eth0", "eth0\n");
        let said = bench.at("/said");
        bench.program("ifup", &format!("echo \"$@\" > {}", said.display()));
        let node = bench.node();
        save(&node, "/run/interfaces", &[interface]).unwrap();
        assert!(configure(&node, "/run/interfaces"));
        assert_eq!(text(said).as_deref(), Some("--force eth0"), "{}", bench.log());
        bench.write("/run/interfaces", "");
        assert!(!configure(&node, "/run/interfaces"));
    }

    /// Adds a program `ip` that renames interfaces in the directories of the bench.
    fn add_ip(bench: &Bench) {
        let (sys, said) = (bench.at("/sys"), bench.at("/said"));
        bench.program(
            "ip",
            &format!(
                "echo \"$*\" >> {}\n[ $5 = name ] || exit 0\n[ ! -e {sys}/class/net/$6 ] || exit 2\n\
                 device=$(echo {sys}/bus/pci/devices/*/net/$4)\n\
                 mv $device ${{device%/*}}/$6\nrm {sys}/class/net/$4\nln -s ${{device%/*}}/$6 {sys}/class/net/$6",
                said.display(),
                sys = sys.display(),
            ),
        );
    }

    fn pci_interface(bench: &Bench, address: &str, name: &str) -> PathBuf {
        let device = bench.at(&format!("/sys/bus/pci/devices/{address}"));
        let (interface, link) = (device.join("net").join(name), bench.at(&format!("/sys/class/net/{name}")));
        fs::create_dir_all(&interface).unwrap();
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&device, interface.join("device")).unwrap();
        std::os::unix::fs::symlink(&interface, &link).unwrap();
        link
    }

    /// Without udev's rules, the kernel numbers interfaces in the order in which the driver finds its devices.
    #[test]
    fn interfaces_that_swapped_their_names_have_them_again() {
        let bench = Bench::new();
        let before =
            ["eth0", "eth1"].map(|name| pci_interface(&bench, &format!("0000:00:0{}.0", &name[3..]), name));
        bench.write("/run/network/ifstate.eth0", "eth0\n");
        bench.write("/sys/class/net/eth0/ifindex", "7\n");
        let node = bench.node();
        save(&node, "/run/interfaces", &before).unwrap();
        fs::remove_dir_all(bench.at("/sys")).unwrap();
        pci_interface(&bench, "0000:00:00.0", "eth1");
        pci_interface(&bench, "0000:00:01.0", "eth0");
        add_ip(&bench);
        bench.program(
            "ifup",
            &format!(
                "readlink {}/eth0/device > {}",
                bench.at("/sys/class/net").display(),
                bench.at("/configured").display()
            ),
        );
        assert!(configure(&node, "/run/interfaces"));
        let device = text(bench.at("/configured"));
        assert_eq!(
            device.map(|path| name_of(Path::new(&path))).as_deref(),
            Some("0000:00:00.0"),
            "{}",
            bench.log()
        );
        assert!(bench.at("/sys/bus/pci/devices/0000:00:01.0/net/eth1").exists(), "{}", bench.log());
        // Names that are right are left alone.
        fs::remove_file(bench.at("/said")).unwrap();
        configure(&node, "/run/interfaces");
        assert_eq!(text(bench.at("/said")), None);
    }

    #[test]
    fn a_name_that_another_interface_has_is_not_taken() {
        let bench = Bench::new();
        let before = pci_interface(&bench, "0000:00:00.0", "eth0");
        let node = bench.node();
        save(&node, "/run/interfaces", &[before]).unwrap();
        fs::remove_dir_all(bench.at("/sys")).unwrap();
        pci_interface(&bench, "0000:00:00.0", "ens1");
        pci_interface(&bench, "0000:00:09.0", "eth0");
        add_ip(&bench);
        assert!(!configure(&node, "/run/interfaces"));
        assert!(bench.at("/sys/bus/pci/devices/0000:00:00.0/net/ens1").exists(), "{}", bench.log());
        assert!(
            bench.log().contains("ens1 was eth0 before the swap: ip link set dev farrier0 name eth0"),
            "{}",
            bench.log()
        );
    }
}
