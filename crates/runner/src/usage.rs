//! Resource usage of a build, measured from inside: memory of its processes, and written bytes and inodes.

use std::{
    ffi::{CString, OsString},
    fs, io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat, statvfs},
    io::Errno,
};

/// Levels of directories below which nothing is counted: paths of builds are a tenth as deep.
const DEEPEST: usize = 512;

/// Bytes and inodes that a build has written, as the file system below counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes that are allocated; holes are not.
    pub bytes: u64,
    /// Files, links and directories.
    pub inodes: u64,
    /// Whether directories are nested deeper than any build needs.
    pub is_too_deep: bool,
    /// Whether a directory is closed to its own user, so that nothing in it was counted.
    pub has_closed: bool,
}

/// Counts what lies below a directory while others write there. Stops as soon as `is_enough` says so, so that the limits bound
/// the work. A hard link counts each time.
pub fn written(top: &OwnedFd, is_enough: impl Fn(&Written) -> bool) -> io::Result<Written> {
    let mut sum = Written::default();
    let mut current = open_directory(top, OsString::from("."))?;
    let mut levels = vec![Level::read(&current, &mut sum, &is_enough)?];
    while let Some(level) = levels.last_mut() {
        if is_enough(&sum) {
            break;
        }
        if let Some(name) = level.pending.pop() {
            if levels.len() >= DEEPEST {
                sum.is_too_deep = true;
                break;
            }
            match open_directory(&current, name) {
                Ok(below) => {
                    levels.push(Level::read(&below, &mut sum, &is_enough)?);
                    current = below;
                }
                Err(Errno::ACCESS) => sum.has_closed = true,
                // It is gone by now.
                Err(_) => {}
            }
        } else {
            levels.pop();
            let Some(above) = levels.last() else { break };
            current = open_directory(&current, OsString::from(".."))?;
            // A directory that was moved meanwhile has another parent: what is left of it counts the next time.
            if identity(&current)? != above.identity {
                break;
            }
        }
    }
    Ok(sum)
}

/// A directory on the way to the current one.
struct Level {
    identity: (u64, u64),
    /// Subdirectories that are still to be visited.
    pending: Vec<OsString>,
}

impl Level {
    /// Counts the entries of a directory, and notes its subdirectories.
    fn read(
        directory: &OwnedFd,
        sum: &mut Written,
        is_enough: &impl Fn(&Written) -> bool,
    ) -> io::Result<Self> {
        let mut pending = Vec::new();
        for entry in Dir::read_from(directory)? {
            let Ok(entry) = entry else { break };
            let name: CString = entry.file_name().to_owned();
            if matches!(name.as_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(found) = statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            sum.inodes += 1;
            sum.bytes += u64::try_from(found.st_blocks).unwrap_or_default() * 512;
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                pending.push(OsString::from_vec(name.into_bytes()));
            }
            if is_enough(sum) {
                break;
            }
        }
        Ok(Self { identity: identity(directory)?, pending })
    }
}

fn open_directory(at: &OwnedFd, name: OsString) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at.as_fd(), name, flags, Mode::empty())
}

fn identity(directory: &OwnedFd) -> io::Result<(u64, u64)> {
    let found = fstat(directory)?;
    Ok((found.st_dev, found.st_ino))
}

/// Bytes of memory that all processes but process 1 have for themselves, swapped out or not, and that shared memory takes.
pub fn memory() -> u64 {
    let Ok(processes) = fs::read_dir("/proc") else { return 0 };
    let own: u64 = processes
        .filter_map(|process| {
            let process = process.ok()?;
            let number = process.file_name().to_str()?.parse::<u32>().ok()?;
            // Whoever ends meanwhile uses nothing.
            let status = fs::read_to_string(process.path().join("status")).ok()?;
            (number > 1).then(|| own_memory(&status))
        })
        .sum();
    own + shared_memory()
}

/// Bytes of `RssAnon` and `VmSwap` in `/proc/PID/status`, which states kibibytes. Shared memory without a file, which neither of
/// them counts, is refused (`filter`), and with one it lies in `/dev/shm`.
fn own_memory(status: &str) -> u64 {
    let fields = status.lines().filter_map(|line| {
        let text = line.strip_prefix("RssAnon:").or_else(|| line.strip_prefix("VmSwap:"))?;
        text.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    fields.sum::<u64>() << 10
}

fn shared_memory() -> u64 {
    let Ok(found) = statvfs("/dev/shm") else { return 0 };
    found.f_blocks.saturating_sub(found.f_bfree).saturating_mul(found.f_frsize)
}

/// Bytes and inodes that a file system has left.
#[derive(Clone, Copy, Debug)]
pub struct Free {
    pub bytes: u64,
    pub inodes: u64,
}

impl Free {
    /// Of the file system at a path. One without a fixed number of inodes never runs out of them.
    pub fn at(path: &Path) -> io::Result<Self> {
        let found = statvfs(path)?;
        let inodes = if found.f_files == 0 { u64::MAX } else { found.f_favail };
        Ok(Self { bytes: found.f_bavail.saturating_mul(found.f_frsize), inodes })
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{mkdirat, open};

    use super::*;

    fn count(place: &Path, is_enough: impl Fn(&Written) -> bool) -> Written {
        let top = open(place, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        written(&top, is_enough).unwrap()
    }

    #[test]
    fn allocated_bytes_and_all_entries_count() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("a/b/full"), vec![1; 1 << 20]).unwrap();
        fs::File::create(dir.path().join("a/hole")).unwrap().set_len(5 << 30).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("a/link")).unwrap();
        let found = count(dir.path(), |_| false);
        assert_eq!((found.inodes, found.is_too_deep), (5, false));
        assert!((1 << 20..2 << 20).contains(&found.bytes), "{found:?}");
        assert!(count(dir.path(), |sum| sum.inodes > 0).inodes < 5);
    }

    #[test]
    fn a_tree_without_bottom_is_told_as_such() {
        let dir = tempfile::tempdir().unwrap();
        let mut place = open(dir.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..2 * DEEPEST {
            mkdirat(&place, "d", Mode::RWXU).unwrap();
            place = openat(&place, "d", OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        assert!(count(dir.path(), |_| false).is_too_deep);
    }

    #[test]
    fn memory_of_a_process_is_what_it_has_alone() {
        let status = "Name:\tcc1\nVmSwap:\t      8 kB\nRssAnon:\t    1024 kB\nRssFile:\t 512 kB\n";
        assert_eq!(own_memory(status), 1032 << 10);
    }
}
