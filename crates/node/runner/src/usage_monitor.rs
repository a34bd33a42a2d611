//! Enforces limits that no resource limit of the kernel covers: the memory and number of all processes of a build together, and
//! the bytes and inodes that they have written.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use runner::plan::{Limits, MIN_FREE};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::usage::{
    DiskUsage, FreeSpace, ProcessUsage, add_unlinked_files, disk_usage, process_usage, shared_memory,
    stopped_threads,
};

/// Interval between two measurements.
const INTERVAL: Duration = Duration::from_millis(250);
/// Pause between two counts of the written files, as a multiple of the duration of the last count. The next count starts earlier
/// if the file system has lost as much space as the build may still use.
const RECOUNT_FACTOR: u32 = 50;
/// Maximum number of attempts to count the files of a stopped build while none of its processes runs.
const STOPPED_COUNTS: u32 = 3;
/// Maximum time until the processes of a build have stopped. A process does not stop during a write, which may be of 2 GiB.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two checks whether the processes have stopped.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Measures the resource usage of a build, and kills its processes when they exceed a limit.
pub struct UsageMonitor {
    limits: Limits,
    stop_reason: Arc<Mutex<Option<StopReason>>>,
}

/// Reason to stop a build, with the build's usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The build exceeded its memory limit.
    MemoryLimit(String),
    /// The build exceeded a limit of files or processes, which its definition cannot raise.
    FixedLimit(String),
    /// The build may have exceeded a limit with files that cannot be counted.
    HiddenFiles(String),
    /// The disk is full, whether or not the build filled it.
    DiskFull(String),
}

impl UsageMonitor {
    /// Starts the measurements. `written` is the directory that receives everything that the build writes. With `None`, the
    /// container runtime limits the disk usage.
    pub fn start(limits: Limits, written: Option<&Path>) -> io::Result<Self> {
        let disk = written.map(|directory| DiskMeter::open(directory, limits, signal_all)).transpose()?;
        let stop_reason = Arc::new(Mutex::new(None));
        let shared = Arc::clone(&stop_reason);
        thread::Builder::new().name("watch".to_owned()).spawn(move || monitor(limits, disk, &shared))?;
        Ok(Self { limits, stop_reason })
    }

    /// Returns the reason to stop the build, if there is one. Checks the free disk space again, because a step can fail on a
    /// full disk before the next measurement.
    pub fn stop_reason(&self) -> Option<StopReason> {
        let shared = self.stop_reason.lock().unwrap_or_else(PoisonError::into_inner).clone();
        shared
            .or_else(|| check_usage(self.limits, ProcessUsage::default(), DiskUsage::default(), free_bytes()))
    }
}

fn monitor(limits: Limits, mut disk: Option<DiskMeter>, shared: &Mutex<Option<StopReason>>) {
    loop {
        // If a measurement fails, the next round repeats it.
        let disk_usage = disk.as_mut().map(DiskMeter::disk_usage).unwrap_or_default();
        let mut processes = process_usage(Path::new("/proc"));
        processes.memory += shared_memory();
        if let Some(why) = check_usage(limits, processes, disk_usage, free_bytes()) {
            shared.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
            signal_all(Signal::KILL);
        }
        thread::sleep(INTERVAL);
    }
}

/// Sends a signal to all processes except this one, which is process 1.
pub fn signal_all(signal: Signal) {
    // For process group 1, this is `kill(-1)`, which signals all processes.
    let _ = kill_process_group(Pid::INIT, signal);
}

/// Returns the free bytes on the build's file system.
fn free_bytes() -> u64 {
    FreeSpace::at(Path::new("/")).map_or(MIN_FREE, |free| free.bytes)
}

/// Measures the directory that receives everything that a build writes.
struct DiskMeter {
    top: PathBuf,
    /// Directory of the build's processes.
    proc: PathBuf,
    /// Sends a signal to the build's processes.
    signal: Box<dyn Fn(Signal) + Send>,
    stop_timeout: Duration,
    limits: Limits,
    last: DiskUsage,
    free_at_start: FreeSpace,
    /// Free space at the last count.
    free: FreeSpace,
    next_count: Instant,
}

impl DiskMeter {
    fn open(top: &Path, limits: Limits, signal: impl Fn(Signal) + Send + 'static) -> io::Result<Self> {
        let free = FreeSpace::at(Path::new("/"))?;
        Ok(Self {
            top: top.to_owned(),
            proc: "/proc".into(),
            signal: Box::new(signal),
            stop_timeout: STOP_TIMEOUT,
            limits,
            last: DiskUsage::default(),
            free_at_start: free,
            free,
            next_count: Instant::now(),
        })
    }

    /// Returns the bytes and inodes that the build has written. Counts again if a new count is due, or if the build may have
    /// exceeded a limit since the last count.
    fn disk_usage(&mut self) -> DiskUsage {
        let free = FreeSpace::at(Path::new("/")).unwrap_or(self.free);
        let started = Instant::now();
        if self.may_exceed(self.last, free.lost_since(&self.free)) || started >= self.next_count {
            let lost = free.lost_since(&self.free_at_start);
            // A step that runs during a count can move files, or pass on descriptors of unlinked files, so that the count misses
            // them. Stop its processes if such files could exceed a limit.
            let must_stop = self.may_exceed(DiskUsage::default(), lost);
            self.last = if must_stop { self.count_stopped() } else { self.count() };
            // A count that already exceeds a limit need not be complete.
            self.last.is_incomplete &= exceeded(self.limits, self.last).is_none();
            if self.last.is_incomplete {
                // Charge the build everything that the file system has lost, because a part of its files may not be counted.
                self.last.bytes = self.last.bytes.max(lost.bytes);
                self.last.inodes = self.last.inodes.max(lost.inodes);
            }
            self.free = free;
            self.next_count = Instant::now() + started.elapsed() * RECOUNT_FACTOR;
        }
        self.last
    }

    fn count(&self) -> DiskUsage {
        let mut sum = disk_usage(&self.top, |sum| exceeded(self.limits, *sum).is_some());
        add_unlinked_files(&self.proc, &mut sum);
        sum
    }

    /// Counts while the build's processes are stopped. Repeats a count during which a process ran or ended: a timer can send
    /// SIGCONT to a stopped process, and the end of a step kills its processes.
    fn count_stopped(&self) -> DiskUsage {
        let mut sum = DiskUsage::default();
        for _ in 0..STOPPED_COUNTS {
            (self.signal)(Signal::STOP);
            let before = self.wait_until_stopped();
            sum = self.count();
            let after = stopped_threads(&self.proc);
            (self.signal)(Signal::CONT);
            let Some(before) = before else { break };
            let stayed = |after: BTreeMap<PathBuf, u64>| {
                before.iter().all(|(thread, switches)| after.get(thread) == Some(switches))
            };
            if after.is_some_and(stayed) || exceeded(self.limits, sum).is_some() {
                return sum;
            }
        }
        DiskUsage { is_incomplete: true, ..sum }
    }

    /// Waits until all threads of the build have stopped, and returns each with its number of context switches; `None` if one still
    /// runs at the timeout. Polls, because the kernel reports stops only to the parent of a process.
    fn wait_until_stopped(&self) -> Option<BTreeMap<PathBuf, u64>> {
        let started = Instant::now();
        loop {
            thread::sleep(STOP_CHECK_INTERVAL);
            let stopped = stopped_threads(&self.proc);
            if stopped.is_some() || started.elapsed() > self.stop_timeout {
                return stopped;
            }
        }
    }

    /// Whether `used` and `lost` together exceed a limit. `lost` is the space that the file system has lost since `used` was counted:
    /// other programs may have used a part of it.
    fn may_exceed(&self, used: DiskUsage, lost: DiskUsage) -> bool {
        lost.bytes > remaining(self.limits.disk, used.bytes)
            || lost.inodes > remaining(self.limits.inodes, used.inodes)
    }
}

fn remaining(limit: Option<u64>, used: u64) -> u64 {
    limit.map_or(u64::MAX, |limit| limit.saturating_sub(used))
}

/// Returns a reason to stop the build, if its usage exceeds a limit or the disk is full.
fn check_usage(
    limits: Limits,
    processes: ProcessUsage,
    disk_usage: DiskUsage,
    free: u64,
) -> Option<StopReason> {
    let ProcessUsage { memory, threads } = processes;
    if let Some(limit) = limits.memory.filter(|limit| memory > *limit) {
        return Some(StopReason::MemoryLimit(format!(
            "the build's processes use {} MiB of memory; the limit is {} MiB",
            mib(memory),
            mib(limit)
        )));
    }
    if let Some(limit) = limits.processes.filter(|limit| threads > *limit) {
        return Some(StopReason::FixedLimit(format!(
            "the build runs {threads} processes and threads; the limit is {limit}"
        )));
    }
    match exceeded(limits, disk_usage) {
        Some(_) if disk_usage.is_incomplete => {
            return Some(StopReason::HiddenFiles(format!(
                "the build or other programs used {} MiB and {} inodes of the disk, and the build may hide files",
                mib(disk_usage.bytes),
                disk_usage.inodes
            )));
        }
        Some(why) => return Some(StopReason::FixedLimit(why)),
        None => {}
    }
    (free < MIN_FREE).then(|| {
        StopReason::DiskFull(format!(
            "the disk has {} MiB left, less than the reserve of {} MiB; the build wrote {} MiB",
            mib(free),
            mib(MIN_FREE),
            mib(disk_usage.bytes)
        ))
    })
}

/// Returns a description of the exceeded disk or inode limit, if one is exceeded.
fn exceeded(limits: Limits, disk_usage: DiskUsage) -> Option<String> {
    match limits {
        Limits { disk: Some(limit), .. } if disk_usage.bytes > limit => {
            Some(format!("the build wrote {} MiB; the limit is {} MiB", mib(disk_usage.bytes), mib(limit)))
        }
        Limits { inodes: Some(limit), .. } if disk_usage.inodes > limit => {
            Some(format!("the build created more than {limit} files and directories"))
        }
        _ if disk_usage.is_too_deep => {
            Some("the build created a path of more than 500 directories or 4,096 bytes".to_owned())
        }
        _ => None,
    }
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixListener};

    use super::*;

    const LIMITS: Limits =
        Limits { memory: Some(64 << 20), processes: Some(8), disk: Some(100 << 20), inodes: Some(1000) };
    const PLENTY: u64 = 1 << 40;

    fn mib_and_inodes(mib: u64, inodes: u64) -> DiskUsage {
        DiskUsage { bytes: mib << 20, inodes, ..DiskUsage::default() }
    }

    fn processes(memory: u64, threads: u64) -> ProcessUsage {
        ProcessUsage { memory, threads }
    }

    #[test]
    fn an_exceeded_limit_is_reported_with_the_usage() {
        let memory_limit = |why: &str| Some(StopReason::MemoryLimit(why.to_owned()));
        let fixed_limit = |why: &str| Some(StopReason::FixedLimit(why.to_owned()));
        let reason =
            |memory: u64, disk_usage| check_usage(LIMITS, processes(memory << 20, 8), disk_usage, PLENTY);
        assert_eq!(reason(64, mib_and_inodes(100, 1000)), None);
        assert_eq!(
            reason(65, mib_and_inodes(0, 0)),
            memory_limit("the build's processes use 65 MiB of memory; the limit is 64 MiB")
        );
        assert_eq!(
            reason(0, mib_and_inodes(101, 0)),
            fixed_limit("the build wrote 101 MiB; the limit is 100 MiB")
        );
        assert_eq!(
            reason(0, mib_and_inodes(0, 1001)),
            fixed_limit("the build created more than 1000 files and directories")
        );
        let deep = DiskUsage { is_too_deep: true, ..DiskUsage::default() };
        assert_eq!(
            reason(0, deep),
            fixed_limit("the build created a path of more than 500 directories or 4,096 bytes")
        );
        assert_eq!(
            check_usage(LIMITS, processes(0, 9), mib_and_inodes(0, 0), PLENTY),
            fixed_limit("the build runs 9 processes and threads; the limit is 8")
        );
        let huge = processes(1 << 50, 1 << 20);
        assert_eq!(check_usage(Limits::default(), huge, mib_and_inodes(1 << 20, 1 << 40), PLENTY), None);
    }

    /// Other programs may have filled the disk: the same build succeeds where there is space.
    #[test]
    fn a_full_disk_is_not_a_limit_of_the_build() {
        let why = "the disk has 1 MiB left, less than the reserve of 512 MiB; the build wrote 7 MiB";
        assert_eq!(
            check_usage(Limits::default(), processes(0, 0), mib_and_inodes(7, 1), 1 << 20),
            Some(StopReason::DiskFull(why.to_owned()))
        );
    }

    /// A process with a socket can hide files. Other programs may have used the space as well.
    #[test]
    fn a_count_that_may_miss_files_proves_no_exceeded_limit() {
        let dir = tempfile::tempdir().unwrap();
        let (own, thread) = (dir.path().join("own"), dir.path().join("proc/2/task/2"));
        fs::create_dir_all(&own).unwrap();
        fs::create_dir_all(thread.join("fd")).unwrap();
        fs::write(thread.join("maps"), "").unwrap();
        let _socket = UnixListener::bind(thread.join("fd/3")).unwrap();
        fs::write(own.join("a"), vec![1; 1 << 20]).unwrap();
        let reason = |limits: Limits| {
            let mut disk = DiskMeter::open(&own, limits, |_| {}).unwrap();
            disk.proc = dir.path().join("proc");
            disk.free_at_start.bytes = u64::MAX;
            check_usage(limits, processes(0, 0), disk.disk_usage(), PLENTY)
        };
        assert!(matches!(reason(LIMITS), Some(StopReason::HiddenFiles(_))));
        let exceeded = reason(Limits { disk: Some(512 << 10), ..LIMITS });
        assert_eq!(
            exceeded,
            Some(StopReason::FixedLimit("the build wrote 1 MiB; the limit is 0 MiB".to_owned()))
        );
    }

    /// A step that follows the count can move its files past it, but not while it is stopped.
    #[test]
    fn processes_are_stopped_for_a_count_if_the_disk_has_lost_more_than_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let (own, hidden) = (dir.path().join("own"), dir.path().join("hidden"));
        fs::create_dir_all(&own).unwrap();
        fs::write(&hidden, vec![1; 1 << 20]).unwrap();
        let shown = own.join("a");
        // The file is in the counted directory only while the processes are stopped.
        let signal = move |signal: Signal| {
            let (from, to) = if signal == Signal::STOP { (&hidden, &shown) } else { (&shown, &hidden) };
            fs::rename(from, to).unwrap();
        };
        let mut disk = DiskMeter::open(&own, Limits::default(), signal).unwrap();
        disk.proc = dir.path().join("proc");
        assert_eq!(disk.disk_usage(), DiskUsage::default());
        disk.limits.disk = Some(512 << 10);
        disk.free_at_start.bytes = u64::MAX;
        disk.next_count = Instant::now();
        assert!(disk.disk_usage().bytes >= 1 << 20);
        assert_eq!(fs::read_dir(&own).unwrap().count(), 0);
    }

    /// A process may continue although it was stopped.
    #[test]
    fn a_count_during_which_a_process_runs_is_incomplete() {
        let dir = tempfile::tempdir().unwrap();
        let thread = dir.path().join("proc/2/task/2");
        fs::create_dir_all(thread.join("fd")).unwrap();
        fs::write(thread.join("maps"), "").unwrap();
        let is_incomplete = |on_stop: &'static str| {
            let status = thread.join("status");
            fs::write(&status, "State:\tS (sleeping)\n").unwrap();
            let signal = move |signal: Signal| {
                if signal == Signal::STOP {
                    fs::write(&status, on_stop).unwrap();
                }
            };
            let mut disk = DiskMeter::open(dir.path(), Limits::default(), signal).unwrap();
            disk.proc = dir.path().join("proc");
            disk.stop_timeout = Duration::ZERO;
            disk.count_stopped().is_incomplete
        };
        assert!(!is_incomplete("State:\tT (stopped)\nVmSize:\t1 kB\n"));
        assert!(is_incomplete("State:\tR (running)\nVmSize:\t1 kB\n"));
    }

    /// Only files in the build's own directory count, even if other programs fill the file system.
    #[test]
    fn files_of_other_programs_are_not_charged_to_the_build() {
        let dir = tempfile::tempdir().unwrap();
        let (own, others) = (dir.path().join("own"), dir.path().join("others"));
        fs::create_dir_all(&own).unwrap();
        fs::write(&others, vec![1; 4 << 20]).unwrap();
        let mut disk = DiskMeter::open(&own, LIMITS, |_| {}).unwrap();
        // Outside of a sandbox, `/proc` has the processes of other programs.
        disk.proc = dir.path().join("proc");
        fs::write(own.join("a"), vec![1; 1 << 20]).unwrap();
        let found = disk.disk_usage();
        assert_eq!(found.inodes, 1);
        assert!(found.bytes < 2 << 20, "{found:?}");
    }
}
