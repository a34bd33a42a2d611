//! The root file system of a build: an overlay of the lower trees and a writable upper directory, with a minimal `/dev` and
//! `/proc`.
//!
//! Files that only process 1 needs are mounted below [`OWN`], so that it holds no descriptor of a directory outside.

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

use crate::messages::failed;

/// Temporary mount point of the old root.
const OLD: &str = ".farrier-old-root";
/// Harmless devices, each with the host device that backs it. `/dev/zero` is backed by `full`: it reads the same zeros but
/// cannot be mapped. A mapping of the real `zero` would be shared memory that no per-process counter shows.
const DEVICES: [(&str, &str); 5] =
    [("null", "null"), ("zero", "full"), ("full", "full"), ("random", "random"), ("urandom", "urandom")];
/// Links that shells and scripts expect.
const LINKS: [(&str, &str); 4] =
    [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")];
/// Directories that every root file system must have, with their modes.
const DIRECTORIES: [(&str, u32); 4] = [("dev", 0o755), ("proc", 0o555), ("sys", 0o555), ("tmp", 0o1777)];

/// Mount point of the files that only process 1 needs.
const OWN: &str = "/.farrier";
/// The build context.
pub const CONTEXT: &str = "/.farrier/context";
/// The upper directory of the overlay: everything that the build has written.
pub const WRITTEN: &str = "/.farrier/written";
/// Flags of a sealed mount: read-only, without executables, devices or setuid programs.
const SEALED: MountFlags = MountFlags::BIND
    .union(MountFlags::RDONLY)
    .union(MountFlags::NOSUID)
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);

/// Stops mounts of this process's mount namespace from propagating to the host.
pub fn separate_mounts() -> io::Result<()> {
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .map_err(|error| failed("take mounts apart from the host's", error))
}

/// Replaces the root of this process's mount namespace with an overlay over the trees at `lowers`, the uppermost first. The
/// upper and work directories are below `scratch`. The old root is unmounted, so there is no way back. [`CONTEXT`] stays
/// writable until [`seal`].
pub fn pivot(scratch: &Path, lowers: &[PathBuf]) -> io::Result<()> {
    let [root, upper, work, own] = ["root", "upper", "work", "own"].map(|name| scratch.join(name));
    for directory in [&root, &upper, &work, &own, &own.join("context"), &own.join("written")] {
        fs::create_dir(directory)?;
    }
    let overlay = |upper: &Path, work: &Path| {
        // Volatile: nothing needs to survive a crash, and unmounting does not wait for the disk.
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
    overlay(&upper, &work).map_err(|error| failed("mount an overlay over the toolchain", error))?;
    let place = root.join(OWN.trim_start_matches('/'));
    fs::create_dir(&place)?;
    mount_bind(&own, &place).map_err(|error| failed("bring in the build context", error))?;
    mount_bind(&upper, place.join("written")).map_err(|error| failed("bring in the upper layer", error))?;
    chdir(&root)?;
    fs::create_dir(OLD)?;
    pivot_root(".", OLD).map_err(|error| failed("change the root", error))?;
    chdir("/")?;
    for (name, mode) in DIRECTORIES {
        if Path::new(name).symlink_metadata().is_err() {
            fs::create_dir(name)?;
            fs::set_permissions(name, Permissions::from_mode(mode))?;
        }
    }
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", quiet | MountFlags::NODEV, None)
        .map_err(|error| failed("mount /proc", error))?;
    // A step in a new user namespace could gain capabilities.
    fs::write("/proc/sys/user/max_user_namespaces", "0")
        .map_err(|error| failed("forbid namespaces in the sandbox", error))?;
    mount("dev", "/dev", "tmpfs", quiet, c"mode=755,size=1m").map_err(|error| failed("mount /dev", error))?;
    for (name, device) in DEVICES {
        let place = Path::new("/dev").join(name);
        File::create(&place)?;
        mount_bind(Path::new("/").join(OLD).join("dev").join(device), &place)
            .map_err(|error| failed(&format!("bring in {}", place.display()), error))?;
    }
    for (name, target) in LINKS {
        symlink(target, Path::new("/dev").join(name))?;
    }
    fs::create_dir("/dev/shm")?;
    mount("shm", "/dev/shm", "tmpfs", quiet | MountFlags::NODEV, c"mode=1777,size=64m")
        .map_err(|error| failed("mount /dev/shm", error))?;
    // From here on no device can be added.
    mount_remount("/dev", MountFlags::BIND | quiet | MountFlags::RDONLY, c"")
        .map_err(|error| failed("seal /dev", error))?;
    unmount(Path::new("/").join(OLD), UnmountFlags::DETACH)
        .map_err(|error| failed("leave the old root", error))?;
    fs::remove_dir(Path::new("/").join(OLD))
}

/// Makes everything below [`OWN`] read-only.
pub fn seal() -> io::Result<()> {
    for mount in [OWN, WRITTEN] {
        mount_remount(mount, SEALED, c"").map_err(|error| failed(&format!("seal {mount}"), error))?;
    }
    Ok(())
}
