//! Resources that this machine or container offers for builds, and the deviation of its clock.

use std::{
    fs,
    num::NonZero,
    path::{Path, PathBuf},
    thread,
};

use farrier_core::{
    image::{Cpus, Memory},
    kernel::Architecture,
    plan::Budget,
};
use http::{
    HeaderMap,
    header::{AGE, DATE},
};
use jiff::{SignedDuration, Timestamp};

const CGROUPS: &str = "/sys/fs/cgroup";

/// Returns this machine's architecture.
pub fn native() -> Architecture {
    if cfg!(target_arch = "aarch64") { Architecture::Arm64 } else { Architecture::Amd64 }
}

/// Returns farrier's program for an architecture: the file with a suffix such as `driver-entrypoint-arm64` if
/// it exists, otherwise `program` itself.
pub fn program_for(program: &Path, arch: Architecture) -> PathBuf {
    let mut path = program.as_os_str().to_owned();
    path.push(format!("-{arch}"));
    let path = PathBuf::from(path);
    if path.is_file() { path } else { program.to_owned() }
}

/// Returns the CPUs and memory that this process may use: the machine's, or the smaller limits of its control
/// groups. Users set the budget explicitly for an engine that runs on another machine.
pub fn budget() -> Budget {
    // The standard library respects CPU affinity and `cpu.max`.
    let cpus = thread::available_parallelism().map_or(1, NonZero::get) as u64;
    let limit = fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| memory_limit(Path::new(CGROUPS), own_group(&text)?));
    let memory = [limit, fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_total(&text))];
    let memory = memory.into_iter().flatten().min().unwrap_or(u64::MAX);
    Budget { cpus: Cpus::from_thousandths(cpus.saturating_mul(1000)), memory: Memory::from_bytes(memory) }
}

/// Returns how far the sender's clock is ahead of this machine's, in whole seconds. `now` is the time when the headers arrived.
/// Returns `None` if the headers do not state the time (`Date` and `Age`, RFC 9110 and 9111).
pub fn clock_ahead(headers: &HeaderMap, now: Timestamp) -> Option<SignedDuration> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let date = jiff::fmt::rfc2822::parse(text(DATE)?).ok()?.timestamp();
    // Seconds since the origin generated a cached response.
    let age: u32 = text(AGE).and_then(|age| age.trim().parse().ok()).unwrap_or_default();
    Some(date.duration_since(now) + SignedDuration::from_secs(age.into()))
}

/// Returns the control group of the unified hierarchy (version 2) from the text of `/proc/self/cgroup`.
fn own_group(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// Returns the smallest `memory.max` of a group and its ancestors. A container sees its own group as the root.
fn memory_limit(root: &Path, group: &str) -> Option<u64> {
    let read = |directory: &Path| fs::read_to_string(directory.join("memory.max")).ok()?.trim().parse().ok();
    root.join(group).ancestors().take_while(|directory| directory.starts_with(root)).filter_map(read).min()
}

/// Parses `MemTotal` of `/proc/meminfo`, in bytes.
fn mem_total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_on_the_way_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("kubepods/pod1/c");
        fs::create_dir_all(&inner).unwrap();
        assert_eq!(memory_limit(root.path(), "kubepods/pod1/c"), None);
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("kubepods/pod1/memory.max"), "2147483648\n").unwrap();
        fs::write(root.path().join("kubepods/memory.max"), "8589934592\n").unwrap();
        assert_eq!(memory_limit(root.path(), "kubepods/pod1/c"), Some(2 << 30));
        assert_eq!(memory_limit(root.path(), ""), None);
    }

    #[test]
    fn what_time_it_is_elsewhere() {
        let now: Timestamp = "2026-11-25T10:00:00Z".parse().unwrap();
        let ahead = |headers: &[(http::HeaderName, &'static str)]| {
            let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
            clock_ahead(&headers.collect(), now).map(|ahead| ahead.as_secs())
        };
        assert_eq!(ahead(&[(DATE, "Wed, 25 Nov 2026 12:00:30 GMT")]), Some(7230));
        assert_eq!(ahead(&[(DATE, "Wed, 25 Nov 2026 09:00:00 GMT"), (AGE, "3600")]), Some(0));
        assert_eq!(ahead(&[(DATE, "yesterday")]), None);
        assert_eq!(ahead(&[(AGE, "1")]), None);
    }

    #[test]
    fn what_the_kernel_says() {
        assert_eq!(own_group("12:memory:/x\n0::/user.slice/a\n"), Some("user.slice/a"));
        assert_eq!(own_group("0::/\n"), Some(""));
        assert_eq!(mem_total("MemTotal:       16384 kB\nMemFree: 1 kB\n"), Some(16 << 20));
        assert_eq!(mem_total("MemTotal: many\n"), None);
        let Budget { cpus, memory } = budget();
        assert!(cpus.thousandths() >= 1000 && memory.bytes() > 0);
    }
}
