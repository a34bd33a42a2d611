//! The root file system of a build: an overlay of the lower trees and a writable upper directory, with a minimal `/dev` and
//! `/proc`.
//!
//! Files that only process 1 needs are mounted below [`PRIVATE`]. Process 1 therefore needs no descriptor of a directory outside.

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

use crate::messages::Context as _;

/// Temporary mount point of the old root.
const OLD_ROOT: &str = ".farrier-old-root";
/// Harmless devices, each with the host device behind it. Behind `/dev/zero` is `full`, which reads as zeros too but cannot be
/// mapped. A mapping of the real `zero` would be shared memory, which no per-process counter shows.
const DEVICES: [(&str, &str); 5] =
    [("null", "null"), ("zero", "full"), ("full", "full"), ("random", "random"), ("urandom", "urandom")];
/// Links in `/dev` that shells and scripts expect.
const LINKS: [(&str, &str); 4] =
    [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")];
/// Directories that every root file system must have, with their modes.
const DIRECTORIES: [(&str, u32); 4] = [("dev", 0o755), ("proc", 0o555), ("sys", 0o555), ("tmp", 0o1777)];

/// Mount point of the files that only process 1 needs.
const PRIVATE: &str = "/.farrier";
/// The build context.
pub const CONTEXT: &str = "/.farrier/context";
/// The upper directory of the overlay, which contains everything that the build has written.
pub const WRITTEN: &str = "/.farrier/written";
const NOSUID_NOEXEC: MountFlags = MountFlags::NOSUID.union(MountFlags::NOEXEC);

/// Flags of a sealed mount: read-only, without executables, devices or setuid programs.
const SEALED: MountFlags = MountFlags::BIND
    .union(MountFlags::RDONLY)
    .union(MountFlags::NOSUID)
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);

/// Stops mounts of this process's mount namespace from propagating to the host.
pub fn separate_mounts() -> io::Result<()> {
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
        .context("stop the propagation of mounts to the host")
}

/// Replaces the root of this process's mount namespace with an overlay over the trees at `lowers`, the uppermost first. The upper
/// and work directories are below `scratch`.
///
/// The old root is unmounted, so that no process can return to it. [`CONTEXT`] stays writable until [`seal`].
pub fn pivot(scratch: &Path, lowers: &[PathBuf]) -> io::Result<()> {
    let [root, upper, work, private] = ["root", "upper", "work", "own"].map(|name| scratch.join(name));
    for directory in [&root, &upper, &work, &private, &private.join("context"), &private.join("written")] {
        fs::create_dir(directory)?;
    }
    mount_overlay(&root, lowers, &upper, &work).context("mount an overlay over the toolchain")?;
    let mount_point = root.join(PRIVATE.trim_start_matches('/'));
    fs::create_dir(&mount_point)?;
    mount_bind(&private, &mount_point).context("mount the build context")?;
    mount_bind(&upper, mount_point.join("written")).context("mount the upper directory")?;
    change_root(&root)?;
    create_missing_directories()?;
    mount_proc()?;
    mount_dev()?;
    let old_root = Path::new("/").join(OLD_ROOT);
    unmount(&old_root, UnmountFlags::DETACH).context("unmount the old root")?;
    fs::remove_dir(old_root)
}

fn mount_overlay(root: &Path, lowers: &[PathBuf], upper: &Path, work: &Path) -> io::Result<()> {
    // Volatile: nothing needs to survive a crash, and unmounting does not wait for the disk.
    let options = format!(
        "lowerdir={},upperdir={},workdir={},userxattr,volatile\0",
        lowers.iter().map(|lower| lower.display().to_string()).collect::<Vec<_>>().join(":"),
        upper.display(),
        work.display()
    );
    let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).map_err(io::Error::other)?;
    Ok(mount("overlay", root, "overlay", MountFlags::NOSUID | MountFlags::NODEV, options)?)
}

/// Makes `root` the root directory. The old root stays mounted at [`OLD_ROOT`], because its devices are still needed.
fn change_root(root: &Path) -> io::Result<()> {
    chdir(root)?;
    fs::create_dir(OLD_ROOT)?;
    pivot_root(".", OLD_ROOT).context("change the root")?;
    Ok(chdir("/")?)
}

fn create_missing_directories() -> io::Result<()> {
    for (name, mode) in DIRECTORIES {
        if Path::new(name).symlink_metadata().is_err() {
            fs::create_dir(name)?;
            fs::set_permissions(name, Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

fn mount_proc() -> io::Result<()> {
    mount("proc", "/proc", "proc", NOSUID_NOEXEC | MountFlags::NODEV, None).context("mount /proc")?;
    // A step in a new user namespace could gain capabilities.
    fs::write("/proc/sys/user/max_user_namespaces", "0").context("forbid namespaces in the sandbox")
}

/// Mounts a `/dev` with the devices of [`DEVICES`] from the old root, and makes it read-only.
fn mount_dev() -> io::Result<()> {
    mount("dev", "/dev", "tmpfs", NOSUID_NOEXEC, c"mode=755,size=1m").context("mount /dev")?;
    for (name, device) in DEVICES {
        let mount_point = Path::new("/dev").join(name);
        File::create(&mount_point)?;
        mount_bind(Path::new("/").join(OLD_ROOT).join("dev").join(device), &mount_point)
            .context(&format!("mount {}", mount_point.display()))?;
    }
    for (name, target) in LINKS {
        symlink(target, Path::new("/dev").join(name))?;
    }
    fs::create_dir("/dev/shm")?;
    mount("shm", "/dev/shm", "tmpfs", NOSUID_NOEXEC | MountFlags::NODEV, c"mode=1777,size=64m")
        .context("mount /dev/shm")?;
    mount_remount("/dev", MountFlags::BIND | NOSUID_NOEXEC | MountFlags::RDONLY, c"")
        .context("make /dev read-only")
}

/// Makes everything below [`PRIVATE`] read-only.
pub fn seal() -> io::Result<()> {
    for mount in [PRIVATE, WRITTEN] {
        mount_remount(mount, SEALED, c"").context(&format!("make {mount} read-only"))?;
    }
    Ok(())
}
