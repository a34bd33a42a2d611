//! Enforces limits that no kernel resource limit covers: memory of all processes of a sandbox together, and the bytes and
//! inodes that they have written.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use runner::plan::{LEAST_FREE, Limits};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::usage::{FreeSpace, Written, memory, written};

/// Time between two measurements.
const INTERVAL: Duration = Duration::from_millis(250);
/// The next count of written files waits this many times the duration of the last count. It starts earlier if the file
/// system has lost as much space as the build may still write.
const PAUSE: u32 = 50;

/// Measures the resource usage of a build, and kills its processes when they exceed a limit.
pub struct Watch {
    limits: Limits,
    stopped: Arc<Mutex<Option<Stop>>>,
}

/// Reason to stop a build, with its usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The build exceeded a limit.
    Limit(String),
    /// The disk is full, whether or not the build filled it.
    DiskFull(String),
}

impl Watch {
    /// Starts the measurements. `written` is the directory that receives everything the build writes. With `None`, the
    /// container runtime limits the disk usage.
    pub fn start(limits: Limits, written: Option<&Path>) -> io::Result<Self> {
        let disk = written.map(|directory| Disk::open(directory, limits)).transpose()?;
        let stopped = Arc::new(Mutex::new(None));
        let shared = Arc::clone(&stopped);
        thread::Builder::new().name("watch".to_owned()).spawn(move || watch(limits, disk, &shared))?;
        Ok(Self { limits, stopped })
    }

    /// Returns the reason to stop the build, if there is one. Checks the free disk space again, because a step can fail on a
    /// full disk before the next measurement.
    pub fn stopped(&self) -> Option<Stop> {
        let shared = self.stopped.lock().unwrap_or_else(PoisonError::into_inner).clone();
        shared.or_else(|| stop_reason(self.limits, 0, Written::default(), free_bytes()))
    }
}

fn watch(limits: Limits, mut disk: Option<Disk>, shared: &Mutex<Option<Stop>>) {
    loop {
        // A failed measurement is repeated in the next round.
        let written = disk.as_mut().map(Disk::written).unwrap_or_default();
        if let Some(why) = stop_reason(limits, memory(), written, free_bytes()) {
            shared.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
            // All processes except this one, which is process 1.
            let _ = kill_process_group(Pid::INIT, Signal::KILL);
        }
        thread::sleep(INTERVAL);
    }
}

/// Free bytes on the build's file system.
fn free_bytes() -> u64 {
    FreeSpace::at(Path::new("/")).map_or(LEAST_FREE, |free| free.bytes)
}

/// The directory that receives everything a build writes.
struct Disk {
    top: PathBuf,
    limits: Limits,
    last: Written,
    free_at_start: FreeSpace,
    /// Free space at the last count.
    free: FreeSpace,
    due: Instant,
}

impl Disk {
    fn open(top: &Path, limits: Limits) -> io::Result<Self> {
        let free = FreeSpace::at(Path::new("/"))?;
        Ok(Self {
            top: top.to_owned(),
            limits,
            last: Written::default(),
            free_at_start: free,
            free,
            due: Instant::now(),
        })
    }

    /// Returns the latest count of written bytes and inodes, and counts again if necessary.
    fn written(&mut self) -> Written {
        let now = FreeSpace::at(Path::new("/")).unwrap_or(self.free);
        let lost = u64::saturating_sub;
        let may_exceed = lost(self.free.bytes, now.bytes) > remaining(self.limits.disk, self.last.bytes)
            || lost(self.free.inodes, now.inodes) > remaining(self.limits.inodes, self.last.inodes);
        let begun = Instant::now();
        if may_exceed || begun >= self.due {
            let exceeds = |sum: &Written| exceeded(self.limits, *sum).is_some();
            self.last = written(&self.top, exceeds);
            if self.last.is_incomplete {
                // Directories without access cannot be counted: charge everything that the file system has lost instead.
                self.last.bytes = self.last.bytes.max(lost(self.free_at_start.bytes, now.bytes));
                self.last.inodes = self.last.inodes.max(lost(self.free_at_start.inodes, now.inodes));
            }
            self.free = now;
            self.due = Instant::now() + begun.elapsed() * PAUSE;
        }
        self.last
    }
}

fn remaining(limit: Option<u64>, used: u64) -> u64 {
    limit.map_or(u64::MAX, |limit| limit.saturating_sub(used))
}

fn stop_reason(limits: Limits, memory: u64, written: Written, free: u64) -> Option<Stop> {
    if let Some(limit) = limits.memory.filter(|limit| memory > *limit) {
        return Some(Stop::Limit(format!(
            "its processes use {} MiB of memory; the limit is {} MiB",
            mib(memory),
            mib(limit)
        )));
    }
    if let Some(why) = exceeded(limits, written) {
        return Some(Stop::Limit(why));
    }
    (free < LEAST_FREE).then(|| {
        Stop::DiskFull(format!(
            "the disk has {} MiB left, less than the reserve of {} MiB; the build wrote {} MiB",
            mib(free),
            mib(LEAST_FREE),
            mib(written.bytes)
        ))
    })
}

/// Describes the exceeded disk or inode limit, if any.
fn exceeded(limits: Limits, written: Written) -> Option<String> {
    match limits {
        Limits { disk: Some(limit), .. } if written.bytes > limit => {
            Some(format!("it wrote {} MiB; the limit is {} MiB", mib(written.bytes), mib(limit)))
        }
        Limits { inodes: Some(limit), .. } if written.inodes > limit => {
            Some(format!("it made more than {limit} files and directories"))
        }
        _ if written.is_too_deep => {
            Some("it made a path of more than 500 directories or 4,096 bytes".to_owned())
        }
        _ => None,
    }
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LIMITS: Limits =
        Limits { memory: Some(64 << 20), processes: None, disk: Some(100 << 20), inodes: Some(1000) };
    const PLENTY: u64 = 1 << 40;

    fn wrote(mib: u64, inodes: u64) -> Written {
        Written { bytes: mib << 20, inodes, ..Written::default() }
    }

    #[test]
    fn a_limit_is_named_with_what_was_used() {
        let limit = |why: &str| Some(Stop::Limit(why.to_owned()));
        let reason = |memory: u64, written| stop_reason(LIMITS, memory << 20, written, PLENTY);
        assert_eq!(reason(64, wrote(100, 1000)), None);
        assert_eq!(reason(65, wrote(0, 0)), limit("its processes use 65 MiB of memory; the limit is 64 MiB"));
        assert_eq!(reason(0, wrote(101, 0)), limit("it wrote 101 MiB; the limit is 100 MiB"));
        assert_eq!(reason(0, wrote(0, 1001)), limit("it made more than 1000 files and directories"));
        let deep = Written { is_too_deep: true, ..Written::default() };
        assert_eq!(reason(0, deep), limit("it made a path of more than 500 directories or 4,096 bytes"));
        assert_eq!(stop_reason(Limits::default(), 1 << 50, wrote(1 << 20, 1 << 40), PLENTY), None);
    }

    /// Other programs may have filled the disk: the same build succeeds where there is space.
    #[test]
    fn a_full_disk_is_no_limit_of_the_build() {
        let why = "the disk has 1 MiB left, less than the reserve of 512 MiB; the build wrote 7 MiB";
        assert_eq!(
            stop_reason(Limits::default(), 0, wrote(7, 1), 1 << 20),
            Some(Stop::DiskFull(why.to_owned()))
        );
    }

    /// Only files in the build's own directory count, even if other programs fill the file system.
    #[test]
    fn a_neighbor_is_not_charged_to_the_build() {
        let dir = tempfile::tempdir().unwrap();
        let (own, others) = (dir.path().join("own"), dir.path().join("others"));
        fs::create_dir_all(&own).unwrap();
        fs::write(&others, vec![1; 4 << 20]).unwrap();
        let mut disk = Disk::open(&own, LIMITS).unwrap();
        fs::write(own.join("a"), vec![1; 1 << 20]).unwrap();
        let found = disk.written();
        assert_eq!(found.inodes, 1);
        assert!(found.bytes < 2 << 20, "{found:?}");
    }
}
