//! Resource usage of a build, measured from inside: memory of its processes, and written bytes and inodes.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use rustix::{fs::statvfs, io::Errno};
use walkdir::WalkDir;

/// Maximum nesting depth of directories in a build. Real builds use less than a tenth of it.
const MAX_DEPTH: usize = 512;

/// Bytes and inodes that a build has written, as counted by the underlying file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Allocated bytes, without holes.
    pub bytes: u64,
    /// Files, links and directories.
    pub inodes: u64,
    /// Whether a path has more than [`MAX_DEPTH`] directories, or exceeds the kernel's limit (`PATH_MAX`).
    pub is_too_deep: bool,
    /// Whether the content of a directory could not be counted: the directory denies access to its own user, or no descriptor
    /// is left.
    pub is_incomplete: bool,
}

/// Counts the entries below a directory while steps write there. Stops once `is_enough` returns true, so that the limits
/// also bound the work. Every hard link counts. A step that swaps a directory for a link during the count can only increase
/// its own sum.
pub fn written(top: &Path, is_enough: impl Fn(&Written) -> bool) -> Written {
    let mut sum = Written::default();
    for entry in WalkDir::new(top).min_depth(1).max_depth(MAX_DEPTH).max_open(MAX_DEPTH) {
        match entry.and_then(|entry| Ok((entry.depth(), entry.metadata()?))) {
            Ok((depth, found)) => {
                sum.inodes += 1;
                sum.bytes += found.blocks() * 512;
                sum.is_too_deep |= depth == MAX_DEPTH && found.is_dir();
            }
            Err(error) => match error.io_error().and_then(Errno::from_io_error) {
                // The entry was removed or replaced during the count.
                None | Some(Errno::NOENT | Errno::NOTDIR) => {}
                Some(Errno::NAMETOOLONG) => sum.is_too_deep = true,
                Some(_) => sum.is_incomplete = true,
            },
        }
        if is_enough(&sum) {
            break;
        }
    }
    sum
}

/// Bytes of private memory (resident or swapped) of all processes but process 1, plus shared memory.
pub fn memory() -> u64 {
    let Ok(processes) = fs::read_dir("/proc") else { return 0 };
    let own: u64 = processes
        .filter_map(|process| {
            let process = process.ok()?;
            let number = process.file_name().to_str()?.parse::<u32>().ok()?;
            // A process that ends during the count uses nothing.
            let status = fs::read_to_string(process.path().join("status")).ok()?;
            (number > 1).then(|| own_memory(&status))
        })
        .sum();
    own + shared_memory()
}

/// Sum of `RssAnon` and `VmSwap` in `/proc/PID/status`, converted from kibibytes to bytes. Neither counts shared memory. The
/// seccomp filter refuses anonymous shared memory, and files of shared memory are in `/dev/shm`.
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

/// Free bytes and inodes of a file system.
#[derive(Clone, Copy, Debug)]
pub struct FreeSpace {
    pub bytes: u64,
    pub inodes: u64,
}

impl FreeSpace {
    /// Measures the file system at a path. A file system without a fixed number of inodes never runs out of them.
    pub fn at(path: &Path) -> io::Result<Self> {
        let found = statvfs(path)?;
        let inodes = if found.f_files == 0 { u64::MAX } else { found.f_favail };
        Ok(Self { bytes: found.f_bavail.saturating_mul(found.f_frsize), inodes })
    }
}

#[cfg(test)]
mod tests {
    use rustix::{
        fs::{Mode, OFlags, mkdirat, open, openat},
        process::{Resource, Rlimit, getrlimit, setrlimit},
    };

    use super::*;

    #[test]
    fn allocated_bytes_and_all_entries_count() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("a/b/full"), vec![1; 1 << 20]).unwrap();
        fs::File::create(dir.path().join("a/hole")).unwrap().set_len(5 << 30).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("a/link")).unwrap();
        let found = written(dir.path(), |_| false);
        assert_eq!((found.inodes, found.is_too_deep), (5, false));
        assert!((1 << 20..2 << 20).contains(&found.bytes), "{found:?}");
        assert!(written(dir.path(), |sum| sum.inodes > 0).inodes < 5);
    }

    #[test]
    fn a_tree_without_bottom_is_told_as_such() {
        let dir = tempfile::tempdir().unwrap();
        let mut place = open(dir.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..2 * MAX_DEPTH {
            mkdirat(&place, "d", Mode::RWXU).unwrap();
            place = openat(&place, "d", OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        assert!(written(dir.path(), |_| false).is_too_deep);
    }

    /// Without descriptors nothing deeper can be counted, so that the file system's loss is charged instead.
    #[test]
    fn a_count_without_descriptors_is_incomplete() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("d/".repeat(64))).unwrap();
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(32), ..before }).unwrap();
        let found = written(dir.path(), |_| false);
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(found.is_incomplete, "{found:?}");
    }

    #[test]
    fn memory_of_a_process_is_what_it_has_alone() {
        let status = "Name:\tcc1\nVmSwap:\t      8 kB\nRssAnon:\t    1024 kB\nRssFile:\t 512 kB\n";
        assert_eq!(own_memory(status), 1032 << 10);
    }
}
