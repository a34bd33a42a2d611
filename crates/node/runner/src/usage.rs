//! Resource usage of a build, measured from inside the sandbox: memory of processes, and written bytes and inodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{fs::statvfs, io::Errno};
use walkdir::WalkDir;

/// Maximum nesting depth of directories in a build. Real builds have less than a tenth of this depth.
const MAX_DEPTH: usize = 512;
/// Maximum duration of a count of unlinked files. Real builds need a hundredth of it.
const MAX_UNLINKED_TIME: Duration = Duration::from_secs(5);

/// Bytes and inodes that a build has written, as the underlying file system counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Allocated bytes, without holes.
    pub bytes: u64,
    /// Files, links and directories.
    pub inodes: u64,
    /// Whether a path has more than [`MAX_DEPTH`] directories, or exceeds the kernel's limit (`PATH_MAX`).
    pub is_too_deep: bool,
    /// Whether files may be missing from the count: a directory or a process denies access to its user, no file descriptor is
    /// left, or a process can hold files that no file descriptor shows.
    pub is_incomplete: bool,
}

/// Counts the entries below a directory while steps write to it. Every hard link counts. Stops once `is_enough` returns true, so
/// that the limits of the build also bound the time of the count.
///
/// A step that replaces a directory with a link during the count can only increase the sum. A step that moves a file can hide it.
pub fn disk_usage(top: &Path, is_enough: impl Fn(&DiskUsage) -> bool) -> DiskUsage {
    let mut sum = DiskUsage::default();
    for entry in WalkDir::new(top).min_depth(1).max_depth(MAX_DEPTH).max_open(MAX_DEPTH) {
        match entry.and_then(|entry| Ok((entry.depth(), entry.metadata()?))) {
            Ok((depth, metadata)) => {
                sum.inodes += 1;
                sum.bytes += metadata.blocks() * 512;
                sum.is_too_deep |= depth == MAX_DEPTH && metadata.is_dir();
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

/// Adds the files without a name that the processes in `proc` hold open. They use disk space until the last process closes them.
pub fn add_unlinked_files(proc: &Path, sum: &mut DiskUsage) {
    let (started, mut counted) = (Instant::now(), BTreeSet::new());
    // Threads can have separate descriptors.
    for thread in processes(proc).flat_map(|process| entries(&process.join("task"))) {
        let result = add_files_of_thread(&thread, &mut counted, sum);
        sum.is_incomplete |=
            result.is_err() && read_status(&thread).is_some_and(|status| has_memory(&status));
        if started.elapsed() > MAX_UNLINKED_TIME {
            sum.is_incomplete = true;
            return;
        }
    }
}

/// Adds the unlinked files of a thread whose devices and inodes are not in `counted`.
fn add_files_of_thread(
    thread: &Path,
    counted: &mut BTreeSet<(u64, u64)>,
    sum: &mut DiskUsage,
) -> io::Result<()> {
    let descriptors = fs::read_dir(thread.join("fd"))?.map(|entry| entry.map(|entry| entry.path()));
    // The kernel keeps the file of a running program as well.
    for file in descriptors.chain([Ok(thread.join("exe"))]) {
        let metadata = match fs::metadata(file?) {
            // The thread has closed the file, or has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        // Files that were sent to a socket stay open until they are received.
        sum.is_incomplete |= metadata.file_type().is_socket();
        let is_unlinked = metadata.is_file() && metadata.nlink() == 0;
        if is_unlinked && counted.insert((metadata.dev(), metadata.ino())) {
            sum.inodes += 1;
            sum.bytes += metadata.blocks() * 512;
        }
    }
    let maps = fs::read(thread.join("maps"))?;
    sum.is_incomplete |= String::from_utf8_lossy(&maps).lines().any(maps_unlinked_file);
    Ok(())
}

/// Whether a line of `/proc/PID/maps` is about an unlinked file on a disk. Such a mapping outlives the descriptor.
fn maps_unlinked_file(line: &str) -> bool {
    let path = line.splitn(6, ' ').nth(5).unwrap_or_default().trim_start();
    path.ends_with(" (deleted)") && !path.starts_with("/dev/shm/")
}

/// Whether a thread has memory. A thread that is ending has none, and denies access to its descriptors, which are closed next.
fn has_memory(status: &str) -> bool {
    status.contains("\nVmSize:")
}

/// Reads the status of a process or thread, which may have ended.
fn read_status(process: &Path) -> Option<String> {
    fs::read_to_string(process.join("status")).ok()
}

/// Returns the directories of all processes in `proc` except process 1.
fn processes(proc: &Path) -> impl Iterator<Item = PathBuf> {
    entries(proc).filter(|entry| {
        let number = entry.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
        number.is_some_and(|number| number > 1)
    })
}

/// Returns the paths in a directory, none if the directory cannot be read.
fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Memory and number of a build's processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Bytes of private memory (resident or swapped), plus shared memory.
    pub memory: u64,
    /// Processes and threads.
    pub threads: u64,
}

/// Measures all processes in `proc` except process 1. Does not include shared memory.
pub fn process_usage(proc: &Path) -> ProcessUsage {
    let mut sum = ProcessUsage::default();
    for process in processes(proc) {
        // A process that ends during the count uses nothing.
        let Some(status) = read_status(&process) else { continue };
        // A process that waits for its parent has no thread left, but counts as one.
        sum.threads += field(&status, "Threads:").unwrap_or_default().max(1);
        // Threads share their memory. The process itself shows none after its main thread has ended.
        let memory_of_thread = |thread: PathBuf| private_memory(&read_status(&thread)?);
        let memory =
            private_memory(&status).or_else(|| entries(&process.join("task")).find_map(memory_of_thread));
        sum.memory += memory.unwrap_or_default();
    }
    sum
}

/// Returns the sum of `RssAnon` and `VmSwap` in `/proc/PID/status` in bytes, or `None` without memory. Neither counts shared memory:
/// the seccomp filter refuses anonymous shared memory, and files of shared memory are in `/dev/shm`.
fn private_memory(status: &str) -> Option<u64> {
    Some((field(status, "RssAnon:")? + field(status, "VmSwap:").unwrap_or_default()) << 10)
}

fn field(status: &str, name: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().trim_end_matches(" kB").parse().ok()
}

/// Returns the number of context switches of each stopped thread in `proc`, which grows if the thread runs. Returns `None` if a
/// thread is not stopped. A thread that waits for a disk is going to stop, and one that is ending runs no code of the build.
pub fn stopped_threads(proc: &Path) -> Option<BTreeMap<PathBuf, u64>> {
    let mut stopped = BTreeMap::new();
    for thread in processes(proc).flat_map(|process| entries(&process.join("task"))) {
        let Some(status) = read_status(&thread).filter(|status| has_memory(status)) else { continue };
        let state = status.lines().find_map(|line| line.strip_prefix("State:")?.trim().chars().next());
        match state {
            Some('R' | 'S') => return None,
            Some('T') => {
                let switches = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
                let switches = switches.iter().filter_map(|name| field(&status, name)).sum::<u64>();
                stopped.insert(thread, switches);
            }
            _ => {}
        }
    }
    Some(stopped)
}

/// Returns the bytes of shared memory.
pub fn shared_memory() -> u64 {
    let Ok(statistics) = statvfs("/dev/shm") else { return 0 };
    statistics.f_blocks.saturating_sub(statistics.f_bfree).saturating_mul(statistics.f_frsize)
}

/// Free bytes and used inodes of a file system.
#[derive(Clone, Copy, Debug)]
pub struct FreeSpace {
    pub bytes: u64,
    /// Not the free inodes, which XFS and ZFS compute from the free bytes. A file system that counts none has 0.
    pub used_inodes: u64,
}

impl FreeSpace {
    /// Measures the file system at a path.
    pub fn at(path: &Path) -> io::Result<Self> {
        let statistics = statvfs(path)?;
        Ok(Self {
            bytes: statistics.f_bavail.saturating_mul(statistics.f_frsize),
            used_inodes: statistics.f_files.saturating_sub(statistics.f_ffree),
        })
    }

    /// Returns what all programs together have written since an earlier measurement.
    pub fn lost_since(&self, earlier: &Self) -> DiskUsage {
        DiskUsage {
            bytes: earlier.bytes.saturating_sub(self.bytes),
            inodes: self.used_inodes.saturating_sub(earlier.used_inodes),
            ..DiskUsage::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        os::{fd::AsRawFd as _, unix::fs::symlink},
    };

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
        symlink("/", dir.path().join("a/link")).unwrap();
        let found = disk_usage(dir.path(), |_| false);
        assert_eq!((found.inodes, found.is_too_deep), (5, false));
        assert!((1 << 20..2 << 20).contains(&found.bytes), "{found:?}");
        assert!(disk_usage(dir.path(), |sum| sum.inodes > 0).inodes < 5);
    }

    #[test]
    fn a_too_deep_tree_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let mut directory = open(dir.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..2 * MAX_DEPTH {
            mkdirat(&directory, "d", Mode::RWXU).unwrap();
            directory = openat(&directory, "d", OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        assert!(disk_usage(dir.path(), |_| false).is_too_deep);
    }

    /// Without file descriptors, deeper directories cannot be counted.
    #[test]
    fn a_count_without_descriptors_is_incomplete() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("d/".repeat(64))).unwrap();
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(32), ..before }).unwrap();
        let found = disk_usage(dir.path(), |_| false);
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(found.is_incomplete, "{found:?}");
    }

    #[test]
    fn a_mapping_of_an_unlinked_file_on_a_disk_is_recognized() {
        let line = |path: &str| format!("7f00-7f01 rw-s 00000000 00:31 12                         {path}");
        assert!(maps_unlinked_file(&line("/tmp/ /dev/shm/x (deleted)")));
        assert!(!maps_unlinked_file(&line("/dev/shm/x (deleted)")));
        assert!(!maps_unlinked_file(&line("/bin/busybox")) && !maps_unlinked_file(&line("")));
    }

    #[test]
    fn private_memory_is_the_sum_of_rss_anon_and_swap() {
        let status = "Name:\tcc1\nVmSwap:\t      8 kB\nRssAnon:\t    1024 kB\nRssFile:\t 512 kB\n";
        assert_eq!(private_memory(status), Some(1032 << 10));
    }

    /// The other threads of a process keep its memory after the end of the main thread.
    #[test]
    fn a_process_without_its_main_thread_uses_memory() {
        let proc = tempfile::tempdir().unwrap();
        let zombie = "Name:\ta\nState:\tZ (zombie)\nThreads:\t2\n";
        let alive = "Name:\ta\nRssAnon:\t    1024 kB\nVmSwap:\t       0 kB\nThreads:\t2\n";
        for (path, status) in
            [("2", zombie), ("2/task/2", zombie), ("2/task/3", alive), ("4", "Threads:\t0\n")]
        {
            fs::create_dir_all(proc.path().join(path)).unwrap();
            fs::write(proc.path().join(path).join("status"), status).unwrap();
        }
        assert_eq!(process_usage(proc.path()), ProcessUsage { memory: 1 << 20, threads: 3 });
    }

    #[test]
    fn only_threads_that_do_not_run_count_as_stopped() {
        let proc = tempfile::tempdir().unwrap();
        let (first, second) = (proc.path().join("2/task/2"), proc.path().join("2/task/3"));
        let set = |thread: &Path, state: &str| {
            let status = format!(
                "State:\t{state}\nVmSize:\t1 kB\nvoluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\n"
            );
            fs::create_dir_all(thread).unwrap();
            fs::write(thread.join("status"), status).unwrap();
        };
        set(&first, "T (stopped)");
        set(&second, "D (disk sleep)");
        assert_eq!(stopped_threads(proc.path()), Some(BTreeMap::from([(first, 7)])));
        set(&second, "R (running)");
        assert_eq!(stopped_threads(proc.path()), None);
    }

    /// The kernel keeps the file of a running program, even without a descriptor or mapping of it.
    #[test]
    fn the_unlinked_file_of_a_running_program_counts() {
        let proc = tempfile::tempdir().unwrap();
        let thread = proc.path().join("2/task/2");
        fs::create_dir_all(thread.join("fd")).unwrap();
        fs::write(thread.join("maps"), "").unwrap();
        let mut program = tempfile::tempfile().unwrap();
        program.write_all(&vec![1; 1 << 20]).unwrap();
        program.sync_all().unwrap();
        symlink(format!("/proc/self/fd/{}", program.as_raw_fd()), thread.join("exe")).unwrap();
        let mut sum = DiskUsage::default();
        add_unlinked_files(proc.path(), &mut sum);
        assert_eq!((sum.inodes, sum.is_incomplete), (1, false));
        assert!(sum.bytes >= 1 << 20, "{sum:?}");
    }
}
