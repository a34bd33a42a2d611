//! Limits that no resource limit expresses: what all processes of a sandbox use together.

use std::{
    fs::{self, File},
    io,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use runner::plan::Limits;
use rustix::{
    fs::fstatvfs,
    param::page_size,
    process::{Pid, Signal, kill_process_group},
};

/// How often it is looked.
const EVERY: Duration = Duration::from_millis(250);
/// What stays free on the disk whatever a build may write: others write there, too.
const FREE: u64 = 512 << 20;

/// Looks at what is used, and ends everything when it is too much.
pub struct Watch(Arc<Mutex<Option<String>>>);

impl Watch {
    /// Starts to look. `disk` is on the file system that the build writes to.
    pub fn start(limits: Limits, disk: &File) -> io::Result<Self> {
        let exceeded = Arc::new(Mutex::new(None));
        let (disk, noted) = (disk.try_clone()?, Arc::clone(&exceeded));
        let before = free(&disk)?;
        thread::spawn(move || {
            loop {
                let used =
                    Used { memory: memory(), disk: before.saturating_sub(free(&disk).unwrap_or(before)) };
                if let Some(why) = judge(limits, used, free(&disk).unwrap_or(FREE)) {
                    noted.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
                    // All but this process, which is process 1.
                    let _ = kill_process_group(Pid::INIT, Signal::KILL);
                }
                thread::sleep(EVERY);
            }
        });
        Ok(Self(exceeded))
    }

    /// What was too much, if anything was.
    pub fn exceeded(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What is used, in bytes.
#[derive(Clone, Copy, Debug)]
struct Used {
    memory: u64,
    disk: u64,
}

fn judge(limits: Limits, used: Used, free: u64) -> Option<String> {
    let mib = |bytes: u64| bytes >> 20;
    match limits {
        Limits { memory: Some(limit), .. } if used.memory > limit => {
            Some(format!("its processes use {} MiB of memory, and may use {}", mib(used.memory), mib(limit)))
        }
        Limits { disk: Some(limit), .. } if used.disk > limit => {
            Some(format!("it wrote {} MiB, and may write {}", mib(used.disk), mib(limit)))
        }
        _ if free < FREE => {
            Some(format!("it wrote {} MiB, and the disk has {} MiB left", mib(used.disk), mib(free)))
        }
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
        assert_eq!(judge(limits, used(64, 100), plenty), None);
        assert_eq!(
            judge(limits, used(65, 0), plenty).unwrap(),
            "its processes use 65 MiB of memory, and may use 64"
        );
        assert_eq!(judge(limits, used(0, 101), plenty).unwrap(), "it wrote 101 MiB, and may write 100");
        assert_eq!(judge(Limits::default(), used(1 << 20, 1 << 20), plenty), None);
        // The floor holds where no limit does.
        assert_eq!(
            judge(Limits::default(), used(0, 7), 1 << 20).unwrap(),
            "it wrote 7 MiB, and the disk has 1 MiB left"
        );
    }
}
