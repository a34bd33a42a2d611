//! The guard: a program on the host that swaps drivers for containers, and undoes a swap that cuts the node off. [`client`]
//! is the container's side, [`serve`] the guard's, and [`install`] starts the guard on the host. The crate `swap_guard` has
//! the request, the journal and the order of phases.

pub(crate) mod client;
pub(crate) mod install;
mod owner;
mod reboot;
mod serve;
mod swap_host;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use rustix::fs::{FlockOperation, flock};

pub(crate) use serve::serve;
use swap_guard::request::{NEW, OLD};

use crate::{failure::FailureRecord, files, node::Node};

/// Directory of the guard, which driver containers mount at the same path. It is below `/run`, so a boot clears it.
pub(crate) const DIRECTORY: &str = "/run/farrier/swap";

/// Environment variable of driver containers with the guard's directory. Without it, the container swaps drivers itself.
pub(crate) const VARIABLE: &str = "SWAP_GUARD";

/// Usage text of `swap-guard`.
pub(crate) const USAGE: &str = "\
usage: driver-entrypoint swap-guard install [--host ROOT] [--reboot]
       driver-entrypoint swap-guard serve [--reboot]

install   copy this program to the host, whose root is mounted at ROOT (default: /host), run it there with systemd, and
          start it again if it is gone
serve     swap drivers for the containers that ask for it in /run/farrier/swap; runs on the host

--reboot  reboot the node if it is cut off after a swap was undone, or if a swap hangs";

/// Option that lets the guard reboot the node.
pub(crate) const REBOOT: &str = "--reboot";

/// File in the directory of a request: the request. A directory without one is incomplete.
const REQUEST: &str = "request";
/// File in the directory of a request: the phases of the swap.
const JOURNAL: &str = "journal";
/// File in the directory of a request: the guard's messages.
const LOG: &str = "log";
/// File in the directory of a request. It exists once the guard has removed the modules' files after the swap.
const DONE: &str = "done";

/// File below [`DIRECTORY`] that a running guard holds locked.
const LOCK: &str = "lock";

/// Suffix of the digest of a swap that restores the host's modules.
pub(crate) const END: &str = "-end";

/// Name of the record of a swap. The end of a container has a record of its own, because the start of the same image may succeed.
fn record_name(container: &str, digest: &str) -> String {
    let suffix = if digest.ends_with(END) { END } else { "" };
    format!("{container}{suffix}")
}

/// Returns the record of a container's image that failed, in the guard's directory.
fn failure_record<'a>(
    node: &'a Node<'a>,
    directory: &str,
    container: &str,
    image: String,
) -> FailureRecord<'a> {
    let name = record_name(container, &image);
    let lasting_file = Some(reboot::record_file(&name));
    FailureRecord { node, file: format!("{directory}/failed-{name}"), lasting_file, image }
}

/// Whether a guard holds its lock in this directory.
fn has_guard(directory: &Path) -> bool {
    let lock = File::open(directory.join(LOCK));
    lock.is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockShared).is_err())
}

/// Whether a request is unfinished. A guard removes a request that it cannot begin, and writes `done` at the end of a swap.
fn is_open(directory: &Path) -> bool {
    directory.join(REQUEST).exists() && !directory.join(DONE).exists()
}

/// Locks a request, for the guard that begins it or the container that withdraws it. Returns `None` if the other one has
/// locked or removed the request.
fn lock_request(directory: &Path) -> Option<File> {
    let request = File::open(directory.join(REQUEST)).ok()?;
    flock(&request, FlockOperation::NonBlockingLockExclusive).ok()?;
    // The container may have removed the request since this process opened it.
    let is_there = request.metadata().is_ok_and(|data| data.nlink() > 0);
    is_there.then_some(request)
}

/// Removes the modules' files of a request, which take memory.
fn remove_modules(directory: &Path) -> io::Result<()> {
    for name in [NEW, OLD] {
        files::if_exists(fs::remove_dir_all(directory.join(name)))?;
    }
    Ok(())
}
