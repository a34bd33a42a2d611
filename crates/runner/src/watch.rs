//! Limits that no resource limit expresses: what all processes of a sandbox use together, and what the disk has left.

use std::{
    fs::{self, File},
    io,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use runner::plan::{LEAST_FREE, Limits};
use rustix::{
    fs::fstatvfs,
    param::page_size,
    process::{Pid, Signal, kill_process_group},
};

/// How often it is looked.
const EVERY: Duration = Duration::from_millis(250);

/// Looks at what is used, and ends everything when it is too much.
pub struct Watch(Arc<Mutex<Option<Stop>>>);

/// Why a build is stopped, with what it used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It used more than it may.
    Limit(String),
    /// The disk is full, whoever filled it.
    DiskFull(String),
}

impl Watch {
    /// Starts to look. `disk` is on the file system that the build writes to.
    pub fn start(limits: Limits, disk: &File) -> io::Result<Self> {
        let stopped = Arc::new(Mutex::new(None));
        let (disk, noted) = (disk.try_clone()?, Arc::clone(&stopped));
        let before = free(&disk)?;
        thread::spawn(move || {
            loop {
                let used =
                    Used { memory: memory(), disk: before.saturating_sub(free(&disk).unwrap_or(before)) };
                if let Some(why) = judge(limits, used, free(&disk).unwrap_or(LEAST_FREE)) {
                    noted.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
                    // All but this process, which is process 1.
                    let _ = kill_process_group(Pid::INIT, Signal::KILL);
                }
                thread::sleep(EVERY);
            }
        });
        Ok(Self(stopped))
    }

    /// Why everything was ended, if it was.
    pub fn stopped(&self) -> Option<Stop> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What is used, in bytes.
#[derive(Clone, Copy, Debug)]
struct Used {
    memory: u64,
    disk: u64,
}

fn judge(limits: Limits, used: Used, free: u64) -> Option<Stop> {
    let mib = |bytes: u64| bytes >> 20;
    match limits {
        Limits { memory: Some(limit), .. } if used.memory > limit => Some(Stop::Limit(format!(
            "its processes use {} MiB of memory, and may use {}",
            mib(used.memory),
            mib(limit)
        ))),
        Limits { disk: Some(limit), .. } if used.disk > limit => {
            Some(Stop::Limit(format!("it wrote {} MiB, and may write {}", mib(used.disk), mib(limit))))
        }
        _ if free < LEAST_FREE => Some(Stop::DiskFull(format!(
            "the disk has {} MiB left, of which {} stay free; the build wrote {} MiB",
            mib(free),
            mib(LEAST_FREE),
            mib(used.disk)
        ))),
        _ => None,
    }
}

fn free(disk: &File) -> io::Result<u64> {
    let found = fstatvfs(disk)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// What the processes have in memory for themselves. Who ends meanwhile uses nothing.
fn memory() -> u64 {
    let Ok(entries) = fs::read_dir("/proc") else { return 0 };
    let pages = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let number = entry.file_name().to_str()?.parse::<u32>().ok()?;
        let statm = fs::read_to_string(entry.path().join("statm")).ok()?;
        let mut fields = statm.split(' ').skip(1).map_while(|field| field.trim().parse::<u64>().ok());
        let (resident, shared) = (fields.next()?, fields.next()?);
        (number > 1).then(|| resident.saturating_sub(shared))
    });
    pages.sum::<u64>() * page_size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_with_what_was_used() {
        let limits = Limits { memory: Some(64 << 20), processes: None, disk: Some(100 << 20) };
        let used = |memory: u64, disk: u64| Used { memory: memory << 20, disk: disk << 20 };
        let plenty = 1 << 40;
        let limit = |why: &str| Some(Stop::Limit(why.to_owned()));
        assert_eq!(judge(limits, used(64, 100), plenty), None);
        let memory = "its processes use 65 MiB of memory, and may use 64";
        assert_eq!(judge(limits, used(65, 0), plenty), limit(memory));
        assert_eq!(judge(limits, used(0, 101), plenty), limit("it wrote 101 MiB, and may write 100"));
        assert_eq!(judge(Limits::default(), used(1 << 20, 1 << 20), plenty), None);
    }

    /// Others may have filled it: the same build goes on where there is room.
    #[test]
    fn a_full_disk_is_no_limit_of_the_build() {
        let used = Used { memory: 0, disk: 7 << 20 };
        let why = "the disk has 1 MiB left, of which 512 stay free; the build wrote 7 MiB";
        assert_eq!(judge(Limits::default(), used, 1 << 20), Some(Stop::DiskFull(why.to_owned())));
    }
}
