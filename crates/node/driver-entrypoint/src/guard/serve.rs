//! `swap-guard serve`: performs the swaps that containers request. Runs on the host as root.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, flock},
    process::geteuid,
};
use swap_guard::{
    journal::{Entry, Failure, JournalFile, Phase},
    request::{NEW, OLD, Request, is_file_name},
    swap,
};

use super::{
    DIRECTORY, DONE, JOURNAL, LOCK, LOG, REQUEST, is_open, lock_request,
    reboot::{self, Watchdog},
    remove_modules,
    swap_host::SwapHost,
};
use crate::{
    error::Error,
    files::{entries, name_of, text},
    node::Node,
    signals::Signals,
};

/// Interval at which the guard looks for requests.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Serves requests until a signal arrives between two swaps. `reboots` is whether a node that is cut off is rebooted.
pub(crate) fn serve(node: &Node<'_>, reboots: bool, signals: &mut dyn Signals) -> Result<(), Error> {
    let mut guard = Guard { reboots, ..Guard::start(node)? };
    node.log.step(format!("the guard waits for requests in {DIRECTORY}"));
    loop {
        guard.serve_once();
        if let Some(signal) = signals.received() {
            node.log.step(format!("{signal}: the guard ends"));
            return Ok(());
        }
        node.kernel.pause(POLL_INTERVAL);
    }
}

/// A running guard.
pub(super) struct Guard<'a> {
    node: &'a Node<'a>,
    /// Whether the guard reboots a node that is cut off.
    pub(super) reboots: bool,
    /// Inode numbers of directories that are not requests. Each is logged once.
    ignored: BTreeSet<u64>,
    _lock: File,
}

impl<'a> Guard<'a> {
    /// Creates the directory for requests, and becomes the only guard of the node.
    pub(super) fn start(node: &'a Node<'a>) -> Result<Self, Error> {
        let directory = node.paths.at(DIRECTORY);
        let create = fs::create_dir_all(&directory)
            .and_then(|()| fs::set_permissions(&directory, Permissions::from_mode(0o700)));
        create.map_err(Error::on("create", DIRECTORY))?;
        let lock = File::create(directory.join(LOCK)).map_err(Error::on("create", LOCK))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            Error::new("another guard serves this node", "systemctl status farrier-swap-guard shows it")
        })?;
        reboot::copy_records(node);
        Ok(Self { node, reboots: false, ignored: BTreeSet::new(), _lock: lock })
    }

    /// Performs the swaps that are requested now, and completes those of a guard that was killed.
    pub(super) fn serve_once(&mut self) {
        for directory in entries(self.node.paths.at(DIRECTORY)) {
            // A container fills `NAME.new`, and then renames it.
            let is_incomplete = directory.extension().is_some_and(|extension| extension == "new");
            let inode = fs::symlink_metadata(&directory).map(|data| data.ino()).unwrap_or_default();
            if !is_open(&directory) || is_incomplete || self.ignored.contains(&inode) {
                continue;
            }
            if let Err(reason) = check_owner(&directory) {
                self.node.log.warn(format!("ignoring {}: {reason}", directory.display()));
                self.ignored.insert(inode);
                continue;
            }
            // Without the lock, the container has withdrawn the request, and the directory may already have the next one.
            let Some(_lock) = lock_request(&directory) else { continue };
            if let Err(reason) = self.swap(&directory) {
                // The node is unchanged. The container stops waiting when its request is gone.
                self.node.log.warn(format!("dropping {}: {reason}", directory.display()));
                self.node.log.warn_of(remove_modules(&directory));
                self.node.log.warn_of(fs::remove_file(directory.join(REQUEST)));
            }
        }
    }

    fn swap(&self, directory: &Path) -> Result<(), String> {
        let log = OpenOptions::new().append(true).create(true).open(directory.join(LOG));
        // Continue without a log: an earlier guard may have begun the swap.
        let log = log.inspect_err(|error| self.node.log.warn(format!("open {LOG}: {error}")));
        self.node.log.copy_to(log.ok().map(|log| Box::new(log) as Box<dyn io::Write>));
        let result = self.swap_with_log(directory);
        self.node.log.copy_to(None);
        result
    }

    fn swap_with_log(&self, directory: &Path) -> Result<(), String> {
        let node = self.node;
        let mut journal = JournalFile::open(&directory.join(JOURNAL)).map_err(|error| error.to_string())?;
        let request = match read_request(directory) {
            Ok(request) => request,
            Err(reason) => return refuse(directory, &mut journal, reason).map_err(|error| error.to_string()),
        };
        let (limit, image, container) = (request.limit, request.digest.clone(), name_of(directory));
        let watchdog = self.reboots.then(|| Watchdog::of_swap(&node.paths, container.clone(), &request));
        let mut host = SwapHost { node, directory: node.paths.container_path(directory), request };
        node.log.step(format!("swap for {container}"));
        swap::run(&mut host, &mut journal, limit).map_err(|error| format!("write the journal: {error}"))?;
        drop(watchdog);
        let journal = journal.journal();
        let Some(phase) = journal.phase() else { return Err("no phase was recorded".to_owned()) };
        let state = journal.last_failure().filter(|_| phase.is_undo_end());
        let state = state.map(|failure| format!(": {}", failure.reason)).unwrap_or_default();
        node.log.step(format!("the swap has ended: {phase}{state}"));
        match journal.failure() {
            _ if phase == Phase::Committed => {
                host.failure_record().update(&Ok(()));
                reboot::record(node, &container, image).update(&Ok(()));
            }
            Some(Failure { reason, transient }) if phase.is_undo_end() => {
                let transient = *transient && phase == Phase::Undone;
                let error = Error::Guard { state: None, message: reason.clone(), hint: "", transient };
                host.failure_record().update(&Err(error));
            }
            _ => {}
        }
        let finished = finish(directory).map_err(|error| error.to_string());
        if phase == Phase::Lost && self.reboots {
            reboot::reboot(node, &container, host.request.digest, &format!("the node is cut off{state}"));
        }
        finished
    }
}

/// Removes the modules' files of a request, and marks the request as done.
fn finish(directory: &Path) -> io::Result<()> {
    remove_modules(directory)?;
    fs::write(directory.join(DONE), "")
}

/// Refuses a request that cannot be read.
fn refuse(directory: &Path, journal: &mut JournalFile, reason: String) -> io::Result<()> {
    let failure = Some(Failure { reason, transient: false });
    if journal.journal().phase().is_none() {
        journal.append(Entry { uptime: 0, phase: Phase::Refused, failure })?;
    }
    finish(directory)
}

/// Reads a request, after a check that only root could have written it and its files.
fn read_request(directory: &Path) -> Result<Request, String> {
    let path = directory.join(REQUEST);
    check_owner(&path)?;
    let request = Request::parse(&text(&path).unwrap_or_default()).map_err(|error| error.to_string())?;
    for name in [NEW, OLD] {
        check_owner(&directory.join(name))?;
    }
    request.files().try_for_each(|file| check_owner(&directory.join(file)))?;
    Ok(request)
}

/// Fails unless the path is a file or directory, not a symlink, that only the guard's own user can change.
fn check_owner(path: &Path) -> Result<(), String> {
    let name = name_of(path);
    let data = fs::symlink_metadata(path).map_err(|error| format!("{name}: {error}"))?;
    let is_plain = (data.is_file() || data.is_dir()) && is_file_name(&name);
    if !is_plain {
        return Err(format!("{name} is neither a file nor a directory with a plain name"));
    }
    if data.uid() != geteuid().as_raw() || data.mode() & 0o022 != 0 {
        return Err(format!("{name} can be changed by others than root"));
    }
    Ok(())
}
