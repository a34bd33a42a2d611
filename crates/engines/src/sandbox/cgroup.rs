//! Control groups (v2) for builds, if a subtree is delegated to farrier.
//!
//! systemd delegates a subtree with `Delegate=yes` and marks its directory with an extended attribute (systemd's "Control
//! Group APIs and Delegation"). Only a subtree with that mark is changed. A group with controllers must not contain
//! processes (cgroups(7), "no internal processes"), so farrier moves itself into a child group.

use std::{
    io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use fs_err as fs;
use runner::plan::Limits;
use rustix::fs::getxattr;

/// Mount point of cgroup v2.
const MOUNT: &str = "/sys/fs/cgroup";
/// Name of the group in the subtree that holds farrier itself.
const FARRIER: &str = "farrier";
/// Prefix of the names of build groups; farrier's process ID and a counter follow.
const PREFIX: &str = "build-";

/// A subtree that is delegated to farrier.
#[derive(Debug)]
pub(super) struct Subtree(PathBuf);

/// The group of one build, removed on drop.
pub(super) struct Group(PathBuf);

impl Subtree {
    /// Finds the delegated subtree and moves farrier out of its top. Returns `None` if no subtree is delegated, or if it
    /// contains other processes.
    pub(super) fn find() -> Option<Self> {
        let own = own_group(&fs::read_to_string("/proc/self/cgroup").ok()?)?;
        let top = if own.file_name().is_some_and(|name| name == FARRIER) { own.parent()? } else { &own };
        if !is_delegated(top) {
            return None;
        }
        match Self::prepare(top) {
            Ok(subtree) => Some(subtree),
            Err(error) => {
                tracing::debug!(%error, group = %top.display(), "the delegated control group cannot be used");
                None
            }
        }
    }

    fn prepare(top: &Path) -> io::Result<Self> {
        let own = top.join(FARRIER);
        if !own.exists() {
            fs::create_dir(&own)?;
        }
        fs::write(own.join("cgroup.procs"), "0")?;
        fs::write(top.join("cgroup.subtree_control"), "+memory +pids")?;
        remove_stale_groups(top)?;
        Ok(Self(top.to_owned()))
    }

    /// Creates the group of a build.
    pub(super) fn group(&self, limits: Limits) -> io::Result<Group> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("{PREFIX}{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let group = Group(self.0.join(name));
        fs::create_dir(&group.0)?;
        let text = |limit: Option<u64>| limit.map_or_else(|| "max".to_owned(), |limit| limit.to_string());
        fs::write(group.0.join("memory.max"), text(limits.memory))?;
        fs::write(group.0.join("memory.oom.group"), "1")?;
        fs::write(group.0.join("pids.max"), text(limits.processes))?;
        // The file is absent if the kernel has no swap.
        let swap = group.0.join("memory.swap.max");
        if swap.exists() {
            fs::write(swap, "0")?;
        }
        Ok(group)
    }
}

impl Group {
    /// Moves a process into the group.
    pub(super) fn add(&self, process: u32) -> io::Result<()> {
        fs::write(self.0.join("cgroup.procs"), process.to_string())
    }

    /// If the kernel has killed processes of the group for memory, describes the memory limit.
    pub(super) fn memory_limit_exceeded(&self) -> Option<String> {
        let events = fs::read_to_string(self.0.join("memory.events")).ok()?;
        let limit = fs::read_to_string(self.0.join("memory.max")).ok()?;
        let mib = limit.trim().parse::<u64>().ok()? >> 20;
        has_oom_kill(&events).then(|| format!("its control group used all of its {mib} MiB of memory"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::warn!(%error, "the control group of a build was not removed");
        }
    }
}

/// Removes build groups whose farrier process has ended.
fn remove_stale_groups(top: &Path) -> io::Result<()> {
    for entry in fs::read_dir(top)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some((process, _)) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-'))
        else {
            continue;
        };
        if !Path::new("/proc").join(process).exists() {
            // A group that still contains processes stays.
            let _ = fs::remove_dir(entry.path());
        }
    }
    Ok(())
}

/// Directory of this process's group, from `/proc/self/cgroup`.
fn own_group(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new(MOUNT).join(path))
}

fn is_delegated(directory: &Path) -> bool {
    let mut value = [0; 1];
    ["trusted.delegate", "user.delegate"]
        .iter()
        .any(|name| getxattr(directory, *name, &mut value).is_ok_and(|size| size == 1) && value == *b"1")
}

fn has_oom_kill(events: &str) -> bool {
    let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.is_some_and(|count| count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_a_process_is_that_of_version_two() {
        let text = "9:name=systemd:/x\n4:memory:/y\n0::/system.slice/farrier.service\n";
        assert_eq!(own_group(text).unwrap(), Path::new("/sys/fs/cgroup/system.slice/farrier.service"));
        assert_eq!(own_group("4:memory:/y\n"), None);
    }

    #[test]
    fn a_group_whose_processes_were_killed_for_memory_is_told() {
        assert!(has_oom_kill("low 0\noom 1\noom_kill 3\noom_group_kill 1\n"));
        assert!(!has_oom_kill("low 0\noom 1\noom_kill 0\n"));
    }

    #[test]
    fn what_is_not_delegated_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_delegated(dir.path()));
    }
}
