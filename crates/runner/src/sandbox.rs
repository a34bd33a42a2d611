//! The sandbox: two processes. The first makes the namespaces, which need maps from outside, and waits; the second is
//! the new namespaces' process 1, makes the root, gives up everything, and runs the steps.
//!
//! No process of a build is of farrier's user where farrier is root: farrier maps the sandbox's only user to one that owns
//! nothing else. Everything below process 1 ends with it, and it ends with the first, which ends with farrier.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    process::{Command, Stdio},
};

use nix::sched::{CloneFlags, unshare};
use runner::{
    plan::Plan,
    wire::{Message, Outcome, Sandbox, read_frame},
};
use rustix::{
    fs::{Mode, OFlags, open},
    process::{
        DumpableBehavior, Resource, Rlimit, Signal, set_dumpable_behavior, set_parent_process_death_signal,
        setrlimit, umask,
    },
    system::sethostname,
    thread::{
        CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
        set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    },
};

use crate::{
    canary, filter,
    messages::{Messages, input, said},
    payload, root, steps,
};

/// Processes at a time where the plan does not say. The node's own limits hold beside it.
const PROCESSES: u64 = 16 << 10;

/// The first process. `None`: the second has said how it ended.
pub fn enter(messages: &Messages) -> io::Result<Option<Outcome>> {
    // It has to end by itself when farrier is killed.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let mut input = input()?;
    let Sandbox { lowers, scratch } = read_frame(&mut input)?;
    let namespaces = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(namespaces).map_err(|error| said("the kernel refuses new namespaces", error))?;
    // Opened as who farrier is, who may look where the sandbox's user may not; and in the new namespace's own mounts.
    let scratch = directory(&scratch)?;
    let lowers = lowers.iter().map(|lower| directory(lower)).collect::<io::Result<Vec<_>>>()?;
    messages.send(&Message::Unshared)?;
    input.read_exact(&mut [0])?;
    // Where setgroups is denied there are none that could be taken away.
    let _ = set_thread_groups(&[]);
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    // A change of users clears both. Process 1 reaches what is open here through /proc, so that nothing is open there.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    let mut init = Command::new("/proc/self/exe");
    let own = Path::new("/proc").join(fs::read_link("/proc/self")?).join("fd");
    let place = |fd: &OwnedFd| own.join(fd.as_raw_fd().to_string());
    init.arg("init").arg(place(&scratch)).args(lowers.iter().map(place));
    let ended = init.env_clear().stdin(Stdio::inherit()).status()?;
    if ended.success() {
        return Ok(None);
    }
    Ok(Some(Outcome::Broken(format!("the sandbox's first process ended: {ended}"))))
}

/// The second process: process 1 of the sandbox.
pub fn init(messages: &Messages, scratch: &str, lowers: &[&str]) -> io::Result<Outcome> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    umask(Mode::from_raw_mode(0o022));
    sethostname(b"farrier").map_err(|error| said("name the sandbox", error))?;
    let mut input = input()?;
    let plan: Plan = read_frame(&mut input)?;
    let scratch = Path::new(scratch);
    let context = scratch.join("context");
    unpack(input, &context).map_err(|error| said("unpack the build context", error))?;
    // Open still when there is no path to it any more.
    let (context, disk) = (File::open(&context)?, File::open(scratch)?);
    root::change(scratch, lowers)?;
    give_up_capabilities()?;
    confine(plan.limits.processes)?;
    messages.send(&Message::Canary(canary::look()?))?;
    let context = Path::new("/proc/self/fd").join(context.as_raw_fd().to_string());
    match steps::run(messages, &plan, &context, &disk)? {
        Some(failure) => Ok(failure),
        None => payload::hand_out(messages, Path::new("/out")),
    }
}

/// Gives up the capabilities of a new user namespace's process 1, for good.
fn give_up_capabilities() -> io::Result<()> {
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED
            | CapabilitiesSecureBits::NO_SETUID_FIXUP
            | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
    )?;
    clear_ambient_capability_set()?;
    for capability in CapabilitySet::all().iter() {
        // A capability that this kernel does not know cannot be had.
        let _ = remove_capability_from_bounding_set(capability);
    }
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

/// Gives up what process 1 could do without a capability that a step must not; what it starts inherits that.
pub fn confine(processes: Option<u64>) -> io::Result<()> {
    let limit = |resource, value| setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) });
    limit(Resource::Core, 0)?;
    limit(Resource::Nproc, processes.unwrap_or(PROCESSES))?;
    // Steps have the same user: what process 1 has open is not for them.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    filter::install()
}

fn directory(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).map_err(|error| said(&format!("open {path}"), error))
}

/// Unpacks the build context: farrier wrote the archive. Its places are taken as they are: the archive's own way to unpack
/// looks them up from the root, where the sandbox's user may not look.
fn unpack(input: impl io::Read, context: &Path) -> io::Result<()> {
    fs::create_dir(context)?;
    let mut archive = tar::Archive::new(io::BufReader::with_capacity(256 << 10, input));
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_preserve_ownerships(false);
    let mut directories = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let place = context.join(entry.path()?);
        if entry.header().entry_type().is_dir() {
            fs::create_dir_all(&place)?;
            directories.push((place, entry));
            continue;
        }
        place.parent().map_or(Ok(()), fs::create_dir_all)?;
        entry.unpack(&place)?;
    }
    // When they are full, and the innermost first: a directory may be closed to writers, and has a time.
    for (place, mut directory) in directories.into_iter().rev() {
        directory.unpack(&place)?;
    }
    Ok(())
}
