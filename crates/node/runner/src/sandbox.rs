//! Creates a sandbox with two processes:
//!
//! - The outer process creates the namespaces, and waits until farrier has written their UID and GID maps.
//! - The inner process is process 1 of the new PID namespace. It assembles the root file system, drops all privileges, and runs
//!   the steps.
//!
//! If farrier runs as root, no process of a build runs as farrier's user: farrier maps the sandbox's only user to a user that
//! owns nothing else.
//!
//! No process outlives farrier. The outer process dies with farrier, process 1 dies with the outer process, and the kernel then
//! kills every other process in the PID namespace.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read, Seek as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
        unix::fs::PermissionsExt as _,
    },
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    time::{Duration, SystemTime},
};

use nix::sched::{CloneFlags, unshare};
use runner::{
    plan::Plan,
    wire::{Canary, Message, Outcome, Sandbox, read_frame},
};
use rustix::{
    fs::{CWD, Mode, OFlags, open},
    io::{FdFlags, fcntl_setfd},
    mount::{MoveMountFlags, OpenTreeFlags, mount_bind, move_mount, open_tree},
    process::{
        DumpableBehavior, Resource, Rlimit, Signal, geteuid, getrlimit, set_dumpable_behavior,
        set_parent_process_death_signal, setrlimit, setsid, umask,
    },
    system::sethostname,
    thread::{
        CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
        set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    },
};

use crate::{
    canary, filter, landlock_rules,
    messages::{Context as _, Messages, StandardInput},
    restrictions::{self, Restrictions},
    root,
    rooted::{Root, path_of},
    steps::{self, BuildPaths},
    sys,
};

/// Runs the outer process. Returns `None` if process 1 has already sent the outcome.
pub fn enter(messages: &Messages, enabled: &Restrictions) -> io::Result<Option<Outcome>> {
    // This process must die with farrier.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    sys::close_inherited(None)?;
    sys::replace_session_keyring().context("replace the session keyring")?;
    let Sandbox { lowers, scratch, maps_owners } = read_frame(&mut StandardInput)?;
    if geteuid().is_root() {
        // Only root can drop supplementary groups. Otherwise the sandbox runs as farrier's own user, which has these groups anyway.
        set_thread_groups(&[]).context("drop all supplementary groups")?;
    }
    // Does nothing, except in the attack suite.
    restrictions::leak(enabled)?;
    // Detach the trees before `unshare`, which takes the privilege to map their owners from this process.
    let detached = if maps_owners { Some(detach(&lowers)?) } else { None };
    let namespaces = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(namespaces).context("the kernel refuses new namespaces")?;
    // Open the directories after `unshare`, so that they belong to the new mount namespace, but before the user changes, because
    // the sandbox's user may lack access to them.
    let scratch = open_directory(&scratch)?;
    let (trees, helper) = match detached {
        Some((mounts, helper)) => (mounts, Some(helper)),
        None => (lowers.iter().map(|path| open_directory(path)).collect::<io::Result<_>>()?, None),
    };
    messages.send(&Message::Unshared)?;
    // farrier sends one byte after it has written the UID and GID maps.
    StandardInput.read_exact(&mut [0])?;
    if let Some(helper) = helper {
        map_owners(helper)?;
    }
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    // A change of the user ID clears the death signal.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    root::separate_mounts()?;
    let count = mount_trees(trees, maps_owners, &scratch)?;
    fcntl_setfd(&scratch, FdFlags::empty())?;
    let mut init = Command::new("/proc/self/exe");
    init.args(["init", &scratch.as_raw_fd().to_string(), &count.to_string()]);
    let mut init = init.args(restrictions::options(enabled)).env_clear().stdin(Stdio::inherit()).spawn()?;
    drop(scratch);
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let status = init.wait()?;
    if status.success() {
        return Ok(None);
    }
    Ok(Some(Outcome::Broken(format!("the sandbox's first process ended: {status}"))))
}

/// Creates a detached mount of each tree, and starts the helper process, which keeps the privilege to idmap the mounts.
fn detach(lowers: &[String]) -> io::Result<(Vec<OwnedFd>, Child)> {
    // No close-on-exec: the helper inherits the mounts.
    let detach = |lower: &String| open_tree(CWD, lower, OpenTreeFlags::OPEN_TREE_CLONE);
    let mounts = lowers.iter().map(detach).collect::<Result<Vec<_>, _>>();
    let mounts = mounts.context("detach mounts of the trees")?;
    let mut helper = Command::new("/proc/self/exe");
    helper.arg("map-owners").arg(process::id().to_string());
    helper.args(mounts.iter().map(|mount| mount.as_raw_fd().to_string()));
    let helper =
        helper.env_clear().stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    mounts.iter().try_for_each(|mount| fcntl_setfd(mount, FdFlags::CLOEXEC))?;
    Ok((mounts, helper))
}

/// Lets the helper idmap the detached mounts to this process's user namespace, and waits until the helper has ended.
fn map_owners(mut helper: Child) -> io::Result<()> {
    if let Some(mut stdin) = helper.stdin.take() {
        stdin.write_all(b".")?;
    }
    let output = helper.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("map the owners of trees: {}", message.trim())))
}

/// Mounts the lower directories of the overlay, the uppermost first, below the scratch directory: attaches detached mounts, and
/// bind-mounts open directories. Returns their number.
fn mount_trees(trees: Vec<OwnedFd>, are_detached: bool, scratch: &OwnedFd) -> io::Result<usize> {
    let count = trees.len();
    for (number, tree) in trees.into_iter().enumerate() {
        let mount_point = lower_path(&path_of(scratch), number);
        fs::create_dir(&mount_point)?;
        let result = if are_detached {
            move_mount(&tree, "", CWD, &mount_point, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        } else {
            mount_bind(path_of(&tree), &mount_point)
        };
        result.context("mount the toolchain and headers")?;
    }
    Ok(count)
}

/// Runs the helper process. Waits until the user namespace of the parent process has UID and GID maps, and then idmaps the
/// inherited detached mounts to that namespace.
pub fn map_owners_helper(arguments: &[&str]) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let numbers = arguments.iter().map(|argument| argument.parse::<RawFd>().map_err(io::Error::other));
    let numbers = numbers.collect::<io::Result<Vec<_>>>()?;
    let Some((parent, mounts)) = numbers.split_first() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mounts: Vec<OwnedFd> = mounts.iter().map(|mount| sys::inherited(*mount)).collect();
    StandardInput.read_exact(&mut [0])?;
    let namespace = open(format!("/proc/{parent}/ns/user"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    mounts.iter().try_for_each(|mount| sys::idmap_mount(mount.as_fd(), namespace.as_fd()))
}

fn lower_path(scratch: &Path, number: usize) -> PathBuf {
    scratch.join(format!("lower-{number}"))
}

/// Runs process 1 of the sandbox.
pub fn init(messages: &Messages, scratch: &str, lowers: &str, enabled: &Restrictions) -> io::Result<Outcome> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    sys::remove_signal_handlers();
    // A step can set the CPU share of its whole session (`/proc/PID/autogroup`), which must not be farrier's.
    setsid().context("start a session")?;
    umask(Mode::from_raw_mode(0o022));
    let scratch_number: RawFd = scratch.parse().map_err(io::Error::other)?;
    let lowers: usize = lowers.parse().map_err(io::Error::other)?;
    sys::close_inherited([scratch_number].into_iter().chain(restrictions::leaked(enabled)))?;
    let scratch = sys::inherited(scratch_number);
    sethostname(b"farrier").context("set the sandbox's host name")?;
    let plan: Plan = read_frame(&mut StandardInput)?;
    let scratch_path = path_of(&scratch);
    let trees: Vec<_> = (0..lowers).map(|number| lower_path(&scratch_path, number)).collect();
    root::pivot(&scratch_path, &trees)?;
    drop(scratch);
    unpack(StandardInput, Path::new(root::CONTEXT)).context("unpack the build context")?;
    root::seal()?;
    drop_capabilities().context("drop all capabilities")?;
    let requires_all = enabled.filter;
    let landlock = confine(plan.limits.processes, enabled)?;
    messages.send(&Message::Canary(Canary { refused: canary::attempt_all(requires_all)?, landlock }))?;
    let root = Root::open(Path::new("/"))?;
    steps::run(messages, &plan, &BuildPaths { root, context: root::CONTEXT, write_dir: Some(root::WRITTEN) })
}

/// Permanently drops the capabilities that process 1 of a new user namespace has.
fn drop_capabilities() -> io::Result<()> {
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
        // A capability that this kernel does not know cannot be gained either.
        let _ = remove_capability_from_bounding_set(capability);
    }
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

/// Restricts this process and its children beyond dropped capabilities: with resource limits, Landlock and the seccomp filter.
/// Returns the Landlock ABI in force, or 0 without Landlock.
pub fn confine(processes: Option<u64>, enabled: &Restrictions) -> io::Result<u32> {
    // Keep the caller's limit if it is lower, because an unprivileged process cannot raise a hard limit.
    let lower_limit = |resource, value: u64| {
        let value = getrlimit(resource).maximum.map_or(value, |limit| limit.min(value));
        setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })
    };
    // With a limit of 0 the kernel still starts a program that the host has for core dumps; with 1 it does not (core(5)).
    lower_limit(Resource::Core, 1).context("forbid core dumps")?;
    if let Some(processes) = processes {
        lower_limit(Resource::Nproc, processes).context("limit processes")?;
    }
    // Steps run as the same user and must not access the open files of process 1.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let landlock = if enabled.landlock { landlock_rules::restrict()? } else { 0 };
    if enabled.filter {
        filter::install(landlock >= landlock_rules::FIRST_ABI_WITH_TRUNCATE)?;
    }
    Ok(landlock)
}

fn open_directory(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).context(&format!("open {path}"))
}

/// Unpacks the build context. Does not check paths, because farrier wrote the archive, no step has run yet, and nothing outside of
/// the root is mounted.
fn unpack(archive: impl Read, context: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(io::BufReader::with_capacity(256 << 10, archive));
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_preserve_ownerships(false);
    let (mut directories, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = context.join(entry.path()?);
        if entry.header().entry_type().is_dir() {
            fs::create_dir_all(&path)?;
            directories.push((path, entry));
            continue;
        }
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        if entry.header().entry_type().is_file() {
            unpack_file(&mut entry, &path, &mut buffer)?;
        } else {
            entry.unpack(&path)?;
        }
    }
    // Set the modes and times of directories last, innermost directories first, because a directory may be read-only, and writes
    // change its modification time.
    for (path, mut directory) in directories.into_iter().rev() {
        directory.unpack(&path)?;
    }
    Ok(())
}

/// Unpacks a file. Zeros become holes, because a small source archive can contain a file of many GiB of zeros.
fn unpack_file(entry: &mut tar::Entry<'_, impl Read>, path: &Path, buffer: &mut [u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    let mut remaining = entry.size();
    while remaining > 0 {
        let length = usize::try_from(remaining).unwrap_or(usize::MAX).min(buffer.len());
        let chunk = &mut buffer[..length];
        entry.read_exact(chunk)?;
        remaining -= length as u64;
        if chunk.iter().all(|byte| *byte == 0) {
            file.seek_relative(i64::try_from(length).map_err(io::Error::other)?)?;
        } else {
            file.write_all(chunk)?;
        }
    }
    file.set_len(entry.size())?;
    file.set_permissions(Permissions::from_mode(entry.header().mode()?))?;
    // A time before 1970 is a huge number in the header. Some tools take 0 for a missing time.
    let modified = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(entry.header().mtime()?.max(1)));
    modified.map_or(Ok(()), |modified| file.set_modified(modified))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_context_is_unpacked_with_holes_modes_and_times() {
        let mut tar = tar::Builder::new(Vec::new());
        let mut add = |path: &str, mode: u32, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(mode);
            header.set_mtime(1_700_000_000);
            tar.append_data(&mut header, path, content).unwrap();
        };
        let mut content = vec![0; 16 << 20];
        content[5 << 20] = 1;
        add("sources/x/hole", 0o444, &content);
        add("sources/x/run.sh", 0o755, b"#!/bin/sh\n");
        let tar = tar.into_inner().unwrap();
        let dir = tempfile::tempdir().unwrap();
        unpack(tar.as_slice(), dir.path()).unwrap();
        let [hole, script] = ["hole", "run.sh"].map(|name| dir.path().join("sources/x").join(name));
        assert!(fs::read(&hole).unwrap() == content);
        assert!(hole.metadata().unwrap().blocks() * 512 <= 1 << 20);
        let metadata = script.metadata().unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.mtime()), (0o755, 1_700_000_000));
        assert!(unpack(&tar[..1 << 20], tempfile::tempdir().unwrap().path()).is_err());
    }
}
