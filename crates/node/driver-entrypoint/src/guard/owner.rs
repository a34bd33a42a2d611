//! The program that owns a network interface: systemd-networkd, NetworkManager or ifupdown. It configures an interface
//! that a new driver has created, before the guard replays saved settings.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use crate::{
    error::Error,
    files::{self, name_of, text},
    isolated::wait_within,
    node::Node,
};

/// Maximum time for a program of an owner.
const LIMIT: Duration = Duration::from_secs(30);
/// Maximum number of polls for an interface that a new driver creates.
const POLLS: u32 = 100;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Owner of a network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Networkd,
    NetworkManager,
    Ifupdown,
}

impl Owner {
    const ALL: [(Self, &str); 3] = [
        (Self::Networkd, "systemd-networkd"),
        (Self::NetworkManager, "NetworkManager"),
        (Self::Ifupdown, "ifupdown"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(owner, _)| *owner == self).map_or("", |(_, name)| name)
    }

    /// Finds the owner of an interface in the state files that the network managers keep below `/run`.
    fn of(node: &Node<'_>, interface: &Path) -> Option<Self> {
        let name = name_of(interface);
        let index = text(interface.join("ifindex"))?;
        let lines = |path: String| text(node.paths.at(&path)).unwrap_or_default();
        let is_managed = |text: &str, prefix: &str, unmanaged: &str| {
            text.lines().filter_map(|line| line.strip_prefix(prefix)).any(|state| state != unmanaged)
        };
        if is_managed(&lines(format!("/run/systemd/netif/links/{index}")), "ADMIN_STATE=", "unmanaged") {
            return Some(Self::Networkd);
        }
        if is_managed(&lines(format!("/run/NetworkManager/devices/{index}")), "managed=", "false") {
            return Some(Self::NetworkManager);
        }
        let is_up = |line: &str| line.split('=').next() == Some(name.as_str());
        lines(format!("/run/network/ifstate.{name}"))
            .lines()
            .chain(lines("/run/network/ifstate".to_owned()).lines())
            .any(is_up)
            .then_some(Self::Ifupdown)
    }

    /// Returns the command that configures an interface.
    fn command(self, interface: &str) -> (&'static str, Vec<&str>) {
        match self {
            Self::Networkd => ("networkctl", vec!["reconfigure", interface]),
            // Do not wait here (networkctl does not either): the replay waits for all owners together.
            Self::NetworkManager => ("nmcli", vec!["--wait", "0", "device", "connect", interface]),
            Self::Ifupdown => ("ifup", vec!["--force", interface]),
        }
    }
}

/// Writes the owners of interfaces to a file.
pub(super) fn save(node: &Node<'_>, file: &str, interfaces: &[PathBuf]) -> Result<(), Error> {
    let owned = interfaces.iter().filter_map(|interface| Some((Owner::of(node, interface)?, interface)));
    let lines: Vec<String> =
        owned.map(|(owner, interface)| format!("{} {}", owner.name(), name_of(interface))).collect();
    if !lines.is_empty() {
        node.log.step(format!("owners of interfaces: {}", lines.join(", ")));
    }
    files::write(node, file, &lines.join("\n"))
}

/// Has the owners in a file configure their interfaces again. Returns whether any interface has an owner.
pub(super) fn configure(node: &Node<'_>, file: &str) -> bool {
    let text = text(node.paths.at(file)).unwrap_or_default();
    let owned = text.lines().filter_map(|line| {
        let (name, interface) = line.split_once(' ')?;
        let (owner, _) = Owner::ALL.into_iter().find(|(_, other)| *other == name)?;
        Some((owner, interface))
    });
    let mut has_owner = false;
    for (owner, interface) in owned {
        has_owner = true;
        await_interface(node, interface);
        let (program, arguments) = owner.command(interface);
        match run(node, program, &arguments) {
            Ok(()) => node.log.step(format!("{} configures {interface}", owner.name())),
            Err(reason) => node.log.warn(format!("{program} {}: {reason}", arguments.join(" "))),
        }
    }
    has_owner
}

fn await_interface(node: &Node<'_>, interface: &str) {
    let path = node.paths.at("/sys/class/net").join(interface);
    for _ in 0..POLLS {
        if path.exists() {
            return;
        }
        node.kernel.pause(POLL_INTERVAL);
    }
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
    use super::*;
    use crate::testing::Bench;

    fn interface(bench: &Bench) -> PathBuf {
        bench.write("/sys/class/net/eth0/ifindex", "7\n");
        bench.at("/sys/class/net/eth0")
    }

    #[test]
    fn owners_are_known_by_their_state() {
        for (path, text, owner) in [
            ("/run/systemd/netif/links/7", "ADMIN_STATE=configured\n", Some(Owner::Networkd)),
            ("/run/systemd/netif/links/7", "ADMIN_STATE=unmanaged\n", None),
            ("/run/NetworkManager/devices/7", "[device]\nmanaged=true\n", Some(Owner::NetworkManager)),
            ("/run/NetworkManager/devices/7", "[device]\nmanaged=false\n", None),
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

    /// In a virtual machine, 20 of the 30 seconds until the time limit passed in `nmcli`.
    #[test]
    fn no_time_for_the_api_server_is_spent_on_waiting_for_networkmanager() {
        let bench = Bench::new();
        let interface = interface(&bench);
        bench.write("/run/NetworkManager/devices/7", "[device]\nmanaged=true\n");
        let said = bench.at("/said");
        bench.program("nmcli", &format!("echo \"$@\" > {}", said.display()));
        let node = bench.node();
        save(&node, "/run/owners", &[interface]).unwrap();
        assert!(configure(&node, "/run/owners"));
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
        save(&node, "/run/owners", &[interface]).unwrap();
        assert!(configure(&node, "/run/owners"));
        assert_eq!(text(said).as_deref(), Some("--force eth0"), "{}", bench.log());
        bench.write("/run/owners", "");
        assert!(!configure(&node, "/run/owners"));
    }
}
