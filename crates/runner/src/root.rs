//! The root that a build sees: the lower trees with a writable layer over them, and a minimal /dev and /proc.
//!
//! What process 1 needs beside them lies below [`OWN`], mounted there: it holds no descriptor of a directory outside.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use rustix::{
    mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, mount_remount,
        unmount,
    },
    process::{chdir, pivot_root},
};

use crate::messages::said;

/// Where the old root is for a moment.
const OLD: &str = ".farrier-old-root";
/// Devices that hold nothing of anybody, and those of the machine that stand for them. Memory that is mapped from the true
/// `zero` is shared memory that no process's figures show: `full` reads the same zeros, and cannot be mapped.
const DEVICES: [(&str, &str); 5] =
    [("null", "null"), ("zero", "full"), ("full", "full"), ("random", "random"), ("urandom", "urandom")];
/// Links that shells and scripts look for.
const LINKS: [(&str, &str); 4] =
    [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")];
/// Directories that are expected in any root.
const DIRECTORIES: [(&str, u32); 4] = [("dev", 0o755), ("proc", 0o555), ("sys", 0o555), ("tmp", 0o1777)];

/// The mount below which process 1 finds what it needs.
const OWN: &str = "/.farrier";
/// The build context.
pub const CONTEXT: &str = "/.farrier/context";
/// What the build has written: the upper layer of its root.
pub const WRITTEN: &str = "/.farrier/written";
/// Mounts that only read, and run nothing.
const SEALED: MountFlags = MountFlags::BIND
    .union(MountFlags::RDONLY)
    .union(MountFlags::NOSUID)
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);

/// Keeps mounts of this process's namespace from the machine's.
pub fn separate_mounts() -> io::Result<()> {
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(|error| said("take mounts apart from the host's", error))
}

/// Makes the trees at `lowers`, the uppermost first, the root of this process's mount namespace; what is written goes below
/// `scratch`. No way leads back. [`CONTEXT`] is writable until [`seal`].
pub fn change(scratch: &Path, lowers: &[PathBuf]) -> io::Result<()> {
    let [root, upper, work, own] = ["root", "upper", "work", "own"].map(|name| scratch.join(name));
    for directory in [&root, &upper, &work, &own, &own.join("context"), &own.join("written")] {
        fs::create_dir(directory)?;
    }
    let overlay = |upper: &Path, work: &Path| {
        // Volatile: nothing of it is needed after a crash, and unmounting does not wait for the disk.
        let options = format!(
            "lowerdir={},upperdir={},workdir={},userxattr,volatile\0",
            lowers.iter().map(|lower| lower.display().to_string()).collect::<Vec<_>>().join(":"),
            upper.display(),
            work.display()
        );
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).map_err(io::Error::other)?;
        Ok::<_, io::Error>(mount(
            "overlay",
            &root,
            "overlay",
            MountFlags::NOSUID | MountFlags::NODEV,
            options,
        )?)
    };
    overlay(&upper, &work).map_err(|error| said("mount an overlay over the toolchain", error))?;
    let place = root.join(OWN.trim_start_matches('/'));
    fs::create_dir(&place)?;
    mount_bind(&own, &place).map_err(|error| said("bring in the build context", error))?;
    mount_bind(&upper, place.join("written")).map_err(|error| said("bring in the upper layer", error))?;
    chdir(&root)?;
    fs::create_dir(OLD)?;
    pivot_root(".", OLD).map_err(|error| said("change the root", error))?;
    chdir("/")?;
    for (name, mode) in DIRECTORIES {
        if Path::new(name).symlink_metadata().is_err() {
            fs::create_dir(name)?;
            fs::set_permissions(name, Permissions::from_mode(mode))?;
        }
    }
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", quiet | MountFlags::NODEV, None)
        .map_err(|error| said("mount /proc", error))?;
    // A namespace of a step's own is a way to capabilities.
    fs::write("/proc/sys/user/max_user_namespaces", "0")
        .map_err(|error| said("forbid namespaces in the sandbox", error))?;
    mount("dev", "/dev", "tmpfs", quiet, c"mode=755,size=1m").map_err(|error| said("mount /dev", error))?;
    for (name, device) in DEVICES {
        let place = Path::new("/dev").join(name);
        File::create(&place)?;
        mount_bind(Path::new("/").join(OLD).join("dev").join(device), &place)
            .map_err(|error| said(&format!("bring in {}", place.display()), error))?;
    }
    for (name, target) in LINKS {
        symlink(target, Path::new("/dev").join(name))?;
    }
    fs::create_dir("/dev/shm")?;
    mount("shm", "/dev/shm", "tmpfs", quiet | MountFlags::NODEV, c"mode=1777,size=64m")
        .map_err(|error| said("mount /dev/shm", error))?;
    // No device is added.
    mount_remount("/dev", MountFlags::BIND | quiet | MountFlags::RDONLY, c"")
        .map_err(|error| said("seal /dev", error))?;
    unmount(Path::new("/").join(OLD), UnmountFlags::DETACH)
        .map_err(|error| said("leave the old root", error))?;
    fs::remove_dir(Path::new("/").join(OLD))
}

/// Closes what lies below [`OWN`] to writers.
pub fn seal() -> io::Result<()> {
    for mount in [OWN, WRITTEN] {
        mount_remount(mount, SEALED, c"").map_err(|error| said(&format!("seal {mount}"), error))?;
    }
    Ok(())
}
