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
/// Maximum number of polls for NetworkManager to activate the profiles of all interfaces by itself.
const OWN_POLLS: u32 = 50;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Owner of network interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Networkd,
    NetworkManager,
    Ifupdown,
}

impl Owner {
    fn name(self) -> &'static str {
        match self {
            Self::Networkd => "systemd-networkd",
            Self::NetworkManager => "NetworkManager",
            Self::Ifupdown => "ifupdown",
        }
    }

    fn named(name: &str) -> Option<Self> {
        [Self::Networkd, Self::NetworkManager, Self::Ifupdown].into_iter().find(|owner| owner.name() == name)
    }

    /// Finds the owner of an interface in the state files that the network managers keep below `/run`. NetworkManager owns an
    /// interface on which a profile is active.
    fn of(node: &Node<'_>, interface: &Path) -> Option<Self> {
        let name = name_of(interface);
        let index = text(interface.join("ifindex"))?;
        let contents = |path: String| text(node.paths.at(&path)).unwrap_or_default();
        if value(&contents(format!("/run/systemd/netif/links/{index}")), "ADMIN_STATE=")
            .is_some_and(|state| state != "unmanaged")
        {
            return Some(Self::Networkd);
        }
        if active_profile(node, interface).is_some() {
            return Some(Self::NetworkManager);
        }
        let is_up = |line: &str| line.split('=').next() == Some(name.as_str());
        contents(format!("/run/network/ifstate.{name}"))
            .lines()
            .chain(contents("/run/network/ifstate".to_owned()).lines())
            .any(is_up)
            .then_some(Self::Ifupdown)
    }

    /// Program and arguments that have the owner configure an interface.
    fn command<'a>(self, interface: &'a str, profile: &'a str) -> (&'static str, Vec<&'a str>) {
        match self {
            Self::Networkd => ("networkctl", vec!["reconfigure", interface]),
            // `nmcli device connect` would write a new profile, with DHCP, where NetworkManager is still busy with the interface.
            // Do not wait here (networkctl does not either): the replay waits for all owners together.
            Self::NetworkManager => {
                ("nmcli", vec!["--wait", "0", "connection", "up", "uuid", profile, "ifname", interface])
            }
            Self::Ifupdown => ("ifup", vec!["--force", interface]),
        }
    }
}

fn value<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(prefix))
}

/// UUID of the profile that NetworkManager has activated on an interface.
fn active_profile(node: &Node<'_>, interface: &Path) -> Option<String> {
    let index = text(interface.join("ifindex"))?;
    let state = text(node.paths.at(&format!("/run/NetworkManager/devices/{index}")))?;
    let profile = value(&state, "connection-uuid=").filter(|_| value(&state, "managed=") != Some("false"));
    profile.map(str::to_owned)
}

/// Placeholder in the file for a missing device, owner or profile.
const NONE: &str = "-";

/// An interface as it was before the swap.
struct SavedInterface<'a> {
    name: &'a str,
    /// Address of its PCI device; `None` on another bus, or if the device has other interfaces as well.
    device: Option<&'a str>,
    owner: Option<Owner>,
    /// UUID of NetworkManager's profile.
    profile: &'a str,
}

/// Writes the names, devices, owners and profiles of interfaces to a file.
pub(super) fn save(node: &Node<'_>, file: &str, interfaces: &[PathBuf]) -> Result<(), Error> {
    let mut lines = Vec::new();
    for interface in interfaces {
        let name = name_of(interface);
        let device = link_name(interface.join("device"));
        let has_one_interface = |device: &String| {
            entries(node.paths.at("/sys/bus/pci/devices").join(device).join("net")).len() == 1
        };
        let device = device.filter(has_one_interface).unwrap_or_else(|| NONE.to_owned());
        let owner = Owner::of(node, interface).map_or(NONE, Owner::name);
        let profile = active_profile(node, interface).unwrap_or_else(|| NONE.to_owned());
        node.log.step(format!("interface {name}, device {device}, owner {owner}"));
        lines.push(format!("{name} {device} {owner} {profile}"));
    }
    files::write(node, file, &lines.join("\n"))
}

/// Gives the interfaces in a file their old names, and has their owners configure them. Returns whether there are owners.
pub(super) fn configure(node: &Node<'_>, file: &str) -> bool {
    let text = text(node.paths.at(file)).unwrap_or_default();
    let saved = text.lines().filter_map(|line| {
        let [name, device, owner, profile] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
        let device = Some(device).filter(|device| *device != NONE);
        Some(SavedInterface { name, device, owner: Owner::named(owner), profile })
    });
    let saved: Vec<SavedInterface<'_>> = saved.collect();
    restore_names(node, &saved);
    let mut has_owner = false;
    let start = Instant::now();
    for (owner, interface) in saved.iter().filter_map(|saved| Some((saved.owner?, saved))) {
        has_owner = true;
        let SavedInterface { name, profile, .. } = *interface;
        let path = node.paths.at("/sys/class/net").join(name);
        node.poll(POLLS, POLL_INTERVAL, || path.exists());
        // NetworkManager activates most profiles by itself.
        let is_configured = || active_profile(node, &path).as_deref() == Some(profile);
        if owner == Owner::NetworkManager {
            let polls = if start.elapsed() < POLL_INTERVAL * OWN_POLLS { OWN_POLLS } else { 0 };
            node.poll(polls, POLL_INTERVAL, is_configured);
        }
        let (program, arguments) = owner.command(name, profile);
        let result = if is_configured() { Ok(()) } else { run(node, program, &arguments) };
        match result {
            Ok(()) => node.log.step(format!("{} configures {name}", owner.name())),
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

    const PROFILE: &str = "80c57db6-b98e-3486-bb41-7486503f2560";

    fn managed(state: &str) -> String {
        format!("[device]\nmanaged={state}\nconnection-uuid={PROFILE}\nnm-owned=false\n")
    }

    #[test]
    fn owners_are_known_by_their_state() {
        for (path, text, owner) in [
            ("/run/systemd/netif/links/7", "ADMIN_STATE=configured\n", Some(Owner::Networkd)),
            ("/run/systemd/netif/links/7", "ADMIN_STATE=unmanaged\n", None),
            ("/run/NetworkManager/devices/7", &managed("true"), Some(Owner::NetworkManager)),
            ("/run/NetworkManager/devices/7", &managed("false"), None),
            // Without a profile, NetworkManager does not configure it.
            ("/run/NetworkManager/devices/7", "[device]\nmanaged=true\n", None),
            ("/run/network/ifstate.eth0", "eth0\n", Some(Owner::Ifupdown)),
            ("/run/network/ifstate", "lo=lo\neth0=eth0\n", Some(Owner::Ifupdown)),
            ("/run/network/ifstate", "lo=lo\neth01=eth01\n", None),
        ] {
            let bench = Bench::new();
            let interface = interface(&bench);
            bench.write(path, text);
            assert_eq!(Owner::of(&bench.node(), &interface), owner, "{path}: {text}");
        }
    }

    /// `nmcli device connect` wrote a profile to `/etc` for each swap, and gave a bond's port an address.
    #[test]
    fn networkmanager_activates_the_profile_that_was_active() {
        let bench = Bench::new();
        let interface = interface(&bench);
        bench.write("/run/NetworkManager/devices/7", &managed("true"));
        let said = bench.at("/said");
        bench.program("nmcli", &format!("echo \"$@\" > {}", said.display()));
        let node = bench.node();
        save(&node, "/run/interfaces", std::slice::from_ref(&interface)).unwrap();
        // The new driver's interface has another index.
        bench.write("/sys/class/net/eth0/ifindex", "8\n");
        assert!(configure(&node, "/run/interfaces"));
        // It does not wait: in a virtual machine, 20 of the 30 seconds until the time limit passed in `nmcli`.
        let expected = format!("--wait 0 connection up uuid {PROFILE} ifname eth0");
        assert_eq!(text(&said).as_deref(), Some(expected.as_str()), "{}", bench.log());

        fs::remove_file(&said).unwrap();
        bench.write("/run/NetworkManager/devices/8", &managed("true"));
        assert!(configure(&node, "/run/interfaces"));
        assert_eq!(text(said), None, "NetworkManager has activated it by itself: {}", bench.log());
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
