//! Reboots a node that a swap has cut off, if `--reboot` allows it. The node boots with the host's drivers. A record on its disk
//! keeps the guard from trying the same image again.

use std::{
    fs,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use swap_guard::request::Request;

use super::{DIRECTORY, owner, record_name};
use crate::{
    error::Error,
    failure::FailureRecord,
    files::{entries, name_of},
    kernel::Linux,
    log::Log,
    node::{Node, Paths},
};

/// Directory of the records that outlive a boot.
const RECORDS: &str = "/var/lib/farrier";
/// File name of a record up to the record's name. It has the image that was loaded when the node was cut off.
const RECORD: &str = "swap-failed-";

/// Time for the steps of a swap that have their own limits: loads of old modules, programs of the network's owners.
const ALLOWANCE: Duration = Duration::from_mins(10);
/// Time for an orderly reboot.
const REBOOT_TIME: Duration = Duration::from_mins(3);

/// Reboots the node at a deadline, unless the watchdog is dropped before. Only a reboot ends an unload or a load that hangs in
/// the kernel.
pub(super) struct Watchdog {
    /// Dropping the sender ends the thread.
    _sender: Sender<()>,
}

impl Watchdog {
    /// Starts a watchdog for a swap. The swap and its undo may each take the request's limit.
    pub(super) fn of_swap(paths: &Paths, container: String, request: &Request) -> Self {
        Self::start(paths.clone(), container, request.digest.clone(), request.limit * 2 + ALLOWANCE)
    }

    fn start(paths: Paths, container: String, image: String, deadline: Duration) -> Self {
        let (sender, dropped) = mpsc::channel();
        thread::spawn(move || {
            if dropped.recv_timeout(deadline) == Err(RecvTimeoutError::Timeout) {
                let node = Node { paths, kernel: &Linux, log: Log::stderr() };
                let reason = format!("the swap did not end within {} s", deadline.as_secs());
                reboot(&node, &container, image, &reason);
            }
        });
        Self { _sender: sender }
    }
}

/// Returns the record of a container's image that has cut this node off.
pub(super) fn record<'a>(node: &'a Node<'a>, container: &str, image: String) -> FailureRecord<'a> {
    FailureRecord { node, file: record_file(&record_name(container, &image)), lasting_file: None, image }
}

/// Path of the record with this name.
pub(super) fn record_file(name: &str) -> String {
    format!("{RECORDS}/{RECORD}{name}")
}

/// Copies the records to the guard's directory, where containers read them. Keeps those that are there.
pub(super) fn copy_records(node: &Node<'_>) {
    for path in entries(node.paths.at(RECORDS)) {
        let file = name_of(&path);
        let Some(name) = file.strip_prefix(RECORD) else { continue };
        let copy = node.paths.at(&format!("{DIRECTORY}/failed-{name}"));
        if !copy.exists() {
            node.log.warn_of(fs::copy(path, copy));
        }
    }
}

/// Records the image, and reboots the node through systemd: orderly first, by force if that takes too long. Does not wait,
/// because systemd waits for the end of this process.
pub(super) fn reboot(node: &Node<'_>, container: &str, image: String, reason: &str) {
    node.log.error(format!("{reason}: rebooting the node"));
    record(node, container, image).update(&Err(Error::new(reason, "")));
    run_systemctl(node, &["--force", "reboot"]);
    let paths = node.paths.clone();
    thread::spawn(move || {
        thread::sleep(REBOOT_TIME);
        let node = Node { paths, kernel: &Linux, log: Log::stderr() };
        run_systemctl(&node, &["--force", "--force", "reboot"]);
    });
}

fn run_systemctl(node: &Node<'_>, arguments: &[&str]) {
    if let Err(error) = owner::run(node, "systemctl", arguments) {
        node.log.warn(format!("systemctl {}: {error}", arguments.join(" ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::text, testing::Bench};

    #[test]
    fn a_swap_that_hangs_ends_in_a_reboot() {
        let bench = Bench::new();
        let said = bench.at("/said");
        bench.program("systemctl", &format!("echo \"$@\" >> {}", said.display()));
        let paths = bench.node().paths;
        let acme = "acme".to_owned();
        drop(Watchdog::start(paths.clone(), acme.clone(), "ended".to_owned(), Duration::from_hours(1)));
        let _watchdog = Watchdog::start(paths, acme, "hanging".to_owned(), Duration::ZERO);
        while text(&said).is_none_or(|text| text.is_empty()) {
            thread::yield_now();
        }
        assert_eq!(text(&said).as_deref(), Some("--force reboot"));
        assert!(record(&bench.node(), "acme", "ended".to_owned()).check().is_ok());
        let error = record(&bench.node(), "acme", "hanging".to_owned()).check().unwrap_err();
        assert!(error.to_string().ends_with("not tried again: the swap did not end within 0 s"), "{error}");
    }
}
