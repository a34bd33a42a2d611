//! Creates a sandbox with two processes. The first process creates the namespaces, which need UID and GID maps from outside,
//! and waits. The second process is process 1 of the new PID namespace. It builds the root file system, gives up all
//! privileges, and runs the steps.
//!
//! If farrier runs as root, no process of a build runs as farrier's user: farrier maps the sandbox's only user to a user
//! that owns nothing else. The end of process 1 kills every process in the sandbox. Process 1 ends with the first process,
//! which ends with farrier.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd},
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
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
        set_parent_process_death_signal, setrlimit, umask,
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
    messages::{Messages, StandardInput, said},
    root,
    rooted::Root,
    steps::{self, Place},
    sys, wall,
    walls::{self, Walls},
};

/// Default limit of concurrent processes. Limits of the node apply in addition.
const PROCESSES: u64 = 16 << 10;

/// Runs the first process. Returns `None` if the second process has already sent the outcome.
pub fn enter(messages: &Messages, walls: &Walls) -> io::Result<Option<Outcome>> {
    // This process must end when farrier is killed.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    sys::close_inherited(None)?;
    sys::leave_keyring().map_err(|error| said("leave the caller's keyring", error))?;
    let Sandbox { lowers, scratch, maps_owners } = read_frame(&mut StandardInput)?;
    if geteuid().is_root() {
        // An ordinary user cannot drop groups: the groups stay, and grant nothing that the user does not have.
        set_thread_groups(&[]).map_err(|error| said("leave all supplementary groups", error))?;
    }
    walls::leak(walls)?;
    let trees = if maps_owners { Trees::detach(&lowers)? } else { Trees::Owned(lowers) };
    let namespaces = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(namespaces).map_err(|error| said("the kernel refuses new namespaces", error))?;
    // Opened as farrier's user, who can access directories that the sandbox's user cannot, and in the new mount namespace.
    let scratch = directory(&scratch)?;
    let trees = trees.open()?;
    messages.send(&Message::Unshared)?;
    StandardInput.read_exact(&mut [0])?;
    let trees = trees.map_owners()?;
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    // A change of the user ID clears the death signal.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    root::separate_mounts()?;
    let count = trees.attach(&scratch)?;
    fcntl_setfd(&scratch, FdFlags::empty())?;
    let mut init = Command::new("/proc/self/exe");
    init.arg("init").arg(scratch.as_raw_fd().to_string()).arg(count.to_string()).args(walls::options(walls));
    let mut init = init.env_clear().stdin(Stdio::inherit()).spawn()?;
    drop(scratch);
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let ended = init.wait()?;
    if ended.success() {
        return Ok(None);
    }
    Ok(Some(Outcome::Broken(format!("the sandbox's first process ended: {ended}"))))
}

/// The lower directories of the overlay, on their way into the sandbox's mount namespace.
enum Trees {
    /// Paths of trees that belong to the sandbox's user.
    Owned(Vec<String>),
    /// Open directories of trees that belong to the sandbox's user.
    Opened(Vec<OwnedFd>),
    /// Detached mounts of trees that belong to farrier's user, and the helper process that may map their owners.
    Detached(Vec<OwnedFd>, Child),
    /// Detached idmapped mounts.
    Mapped(Vec<OwnedFd>),
}

impl Trees {
    /// Makes a detached mount of each tree and starts the helper, which keeps the privileges that this process gives up.
    fn detach(lowers: &[String]) -> io::Result<Self> {
        // Without close-on-exec: the helper inherits them.
        let detach = |lower: &String| open_tree(CWD, lower, OpenTreeFlags::OPEN_TREE_CLONE);
        let mounts = lowers.iter().map(detach).collect::<Result<Vec<_>, _>>();
        let mounts = mounts.map_err(|error| said("detach mounts of the trees", error))?;
        let mut helper = Command::new("/proc/self/exe");
        helper.arg("map-owners").arg(process::id().to_string());
        helper.args(mounts.iter().map(|mount| mount.as_raw_fd().to_string()));
        let helper =
            helper.env_clear().stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        mounts.iter().try_for_each(|mount| fcntl_setfd(mount, FdFlags::CLOEXEC))?;
        Ok(Self::Detached(mounts, helper))
    }

    fn open(self) -> io::Result<Self> {
        match self {
            Self::Owned(lowers) => {
                lowers.iter().map(|lower| directory(lower)).collect::<io::Result<_>>().map(Self::Opened)
            }
            other => Ok(other),
        }
    }

    /// Lets the helper map the owners with the maps of this process's user namespace, and waits for it.
    fn map_owners(self) -> io::Result<Self> {
        let Self::Detached(mounts, mut helper) = self else { return Ok(self) };
        if let Some(mut go) = helper.stdin.take() {
            go.write_all(b".")?;
        }
        let output = helper.wait_with_output()?;
        if output.status.success() {
            return Ok(Self::Mapped(mounts));
        }
        let why = String::from_utf8_lossy(&output.stderr);
        Err(io::Error::other(format!("{MAP_OWNERS}: {}", why.trim())))
    }

    /// Mounts the trees below the scratch directory, the uppermost first, and returns their number.
    fn attach(self, scratch: &OwnedFd) -> io::Result<usize> {
        let (Self::Opened(trees) | Self::Mapped(trees) | Self::Detached(trees, _)) = &self else {
            return Ok(0);
        };
        for (number, tree) in trees.iter().enumerate() {
            let place = lower(&path_of(scratch), number);
            fs::create_dir(&place)?;
            let attached = match &self {
                Self::Mapped(_) => move_mount(tree, "", CWD, &place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH),
                _ => mount_bind(path_of(tree), &place),
            };
            attached.map_err(|error| said("bring in the toolchain and headers", error))?;
        }
        Ok(trees.len())
    }
}

/// Action in the error message if the helper fails; farrier then retries without idmapped mounts.
const MAP_OWNERS: &str = "map the owners of trees";

/// Runs the helper: once its parent's user namespace has its maps, turns the inherited detached mounts into idmapped mounts.
pub fn map_owners(words: &[&str]) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let numbers = words.iter().map(|word| word.parse::<RawFd>().map_err(io::Error::other));
    let numbers = numbers.collect::<io::Result<Vec<_>>>()?;
    let Some((parent, mounts)) = numbers.split_first() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mounts: Vec<OwnedFd> = mounts.iter().map(|mount| sys::inherited(*mount)).collect();
    StandardInput.read_exact(&mut [0])?;
    let namespace = open(format!("/proc/{parent}/ns/user"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    mounts.iter().try_for_each(|mount| sys::map_owners(mount.as_fd(), namespace.as_fd()))
}

fn lower(scratch: &Path, number: usize) -> PathBuf {
    scratch.join(format!("lower-{number}"))
}

/// Path of an open file of this process.
fn path_of(file: &OwnedFd) -> PathBuf {
    Path::new("/proc/self/fd").join(file.as_raw_fd().to_string())
}

/// Runs the second process: process 1 of the sandbox.
pub fn init(messages: &Messages, scratch: &str, lowers: &str, walls: &Walls) -> io::Result<Outcome> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    sys::handle_no_signals();
    umask(Mode::from_raw_mode(0o022));
    let number: RawFd = scratch.parse().map_err(io::Error::other)?;
    let lowers: usize = lowers.parse().map_err(io::Error::other)?;
    sys::close_inherited([number].into_iter().chain(walls::leaked(walls)))?;
    let scratch = sys::inherited(number);
    sethostname(b"farrier").map_err(|error| said("name the sandbox", error))?;
    let plan: Plan = read_frame(&mut StandardInput)?;
    let place = path_of(&scratch);
    let trees: Vec<_> = (0..lowers).map(|number| lower(&place, number)).collect();
    root::change(&place, &trees)?;
    drop(scratch);
    unpack(Path::new(root::CONTEXT)).map_err(|error| said("unpack the build context", error))?;
    root::seal()?;
    give_up_capabilities().map_err(|error| said("give up all capabilities", error))?;
    let all_walls = walls.filter;
    let landlock = confine(plan.limits.processes, walls)?;
    messages.send(&Message::Canary(Canary { refused: canary::look(all_walls)?, landlock }))?;
    let root = Root::open(Path::new("/"))?;
    steps::run(messages, &plan, &Place { root, context: root::CONTEXT, written: Some(root::WRITTEN) })
}

/// Permanently drops the capabilities that process 1 of a new user namespace has.
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
        // A capability that this kernel does not know cannot be gained either.
        let _ = remove_capability_from_bounding_set(capability);
    }
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

/// Gives up what process 1 could do even without capabilities but a step must not; its children inherit the restrictions.
/// Returns the Landlock ABI in force.
pub fn confine(processes: Option<u64>, walls: &Walls) -> io::Result<u32> {
    // The caller's limit may already be lower, and no process here may raise it.
    let lower = |resource, value: u64| {
        let value = getrlimit(resource).maximum.map_or(value, |limit| limit.min(value));
        setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })
    };
    lower(Resource::Core, 0).map_err(|error| said("forbid core dumps", error))?;
    lower(Resource::Nproc, processes.unwrap_or(PROCESSES)).map_err(|error| said("limit processes", error))?;
    // Steps run as the same user and must not access the open files of process 1.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let landlock = if walls.landlock { wall::restrict()? } else { 0 };
    if walls.filter {
        filter::install(landlock >= wall::WATCHES_TRUNCATE)?;
    }
    Ok(landlock)
}

fn directory(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).map_err(|error| said(&format!("open {path}"), error))
}

/// Unpacks the build context, an archive that farrier wrote. No step has run yet, and nothing outside of the root is
/// mounted.
fn unpack(context: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(io::BufReader::with_capacity(256 << 10, StandardInput));
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
    // Once all directories are filled, and from the innermost outward: a directory may be read-only, and writes change its
    // time.
    for (place, mut directory) in directories.into_iter().rev() {
        directory.unpack(&place)?;
    }
    Ok(())
}
