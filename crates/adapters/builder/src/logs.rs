//! Build logs in the cache.

use std::{
    collections::HashMap,
    fs::TryLockError,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    time::SystemTime,
};

use farrier_core::{
    image::{ImageName, InputHash},
    kernel::{KernelRelease, KernelTarget},
    plan::Cell,
};
use farrier_local::{
    cache::{Cache, CacheError},
    files::if_there,
};
use fs_err::{self as fs, File};

const KIND: &str = "logs";
/// Number of digits of the input hash in a log's name.
const HASH_DIGITS: usize = 12;

/// Number of days that [`LogTimes::by_day`] counts.
pub const DAYS: usize = 30;

/// Returns a log's file name, such as `gpu-6.1.0-1-amd64-0123456789ab-debian-12-amd64.log`. It includes the platform,
/// because one release runs on several platforms.
fn log_file_name(image: &ImageName, target: &KernelTarget, inputs: &InputHash) -> String {
    let KernelTarget { os, os_version, release, arch } = target;
    format!("{image}-{release}-{}-{os}-{os_version}-{arch}.log", inputs.short())
}

/// Returns the path for a build's log, and protects it from eviction while the build runs.
pub(super) fn log_path(cache: &Cache, cell: &Cell) -> Result<PathBuf, CacheError> {
    let name = log_file_name(&cell.image, &cell.target, &cell.input_hash);
    cache.hold(KIND, &name)?;
    cache.entry_path(KIND, &name)
}

/// Returns the log of the latest build of these inputs, if the cache has it.
pub fn log_of(
    cache: &Cache,
    image: &ImageName,
    target: &KernelTarget,
    inputs: &InputHash,
) -> Option<PathBuf> {
    Some(cache.root().join(KIND).join(log_file_name(image, target, inputs))).filter(|path| path.is_file())
}

/// Last write time of each log, by file name. Empty if the cache cannot be read.
pub struct LogTimes(HashMap<String, SystemTime>);

impl LogTimes {
    pub fn of(cache: &Cache) -> Self {
        let entries = list_logs(cache).unwrap_or_default().into_iter();
        Self(entries.map(|(written, name)| (name, written)).collect())
    }

    pub fn get(&self, image: &ImageName, target: &KernelTarget, inputs: &InputHash) -> Option<SystemTime> {
        self.0.get(&log_file_name(image, target, inputs)).copied()
    }

    /// Returns the number of each image's builds on each of the last [`DAYS`] days, the oldest first. Images without a build are
    /// omitted.
    pub fn by_day<'a>(
        &self,
        images: impl Iterator<Item = &'a ImageName>,
        now: SystemTime,
    ) -> HashMap<ImageName, [usize; DAYS]> {
        // A log's name begins with the image's name, and one image's name can begin with another's.
        let mut images: Vec<&ImageName> = images.collect();
        images.sort_by_key(|image| std::cmp::Reverse(image.as_str().len()));
        let mut days: HashMap<ImageName, [usize; DAYS]> = HashMap::new();
        for (name, written) in &self.0 {
            let image = images.iter().find(|image| {
                name.strip_prefix(image.as_str()).is_some_and(|suffix| suffix.starts_with('-'))
            });
            let Some(image) = image else { continue };
            let age = now.duration_since(*written).unwrap_or_default().as_secs() / (24 * 3600);
            let day = usize::try_from(age).ok().and_then(|age| (DAYS - 1).checked_sub(age));
            if let Some(day) = day {
                days.entry((*image).clone()).or_insert([0; DAYS])[day] += 1;
            }
        }
        days
    }
}

/// A log of an image for a kernel release.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundLog {
    pub written: SystemTime,
    pub release: KernelRelease,
    /// Platform, such as `debian-12-amd64`.
    pub platform: String,
    pub path: PathBuf,
}

/// Returns the cached build logs of an image, the newest first.
pub fn logs_for(cache: &Cache, image: &ImageName) -> Result<Vec<FoundLog>, CacheError> {
    let mut logs = Vec::new();
    for (written, name) in list_logs(cache)? {
        if let Some((release, platform)) = parse_name(image, &name) {
            logs.push(FoundLog { written, release, platform, path: cache.root().join(KIND).join(name) });
        }
    }
    logs.sort_by(|a, b| b.cmp(a));
    Ok(logs)
}

/// Parses the release and the platform from the name of an image's log; `None` for another image's log.
fn parse_name(image: &ImageName, name: &str) -> Option<(KernelRelease, String)> {
    let stem = name.strip_prefix(image.as_str())?.strip_prefix('-')?.strip_suffix(".log")?;
    // Search for the hash from the end, because a release can contain a word that looks like a hash. A platform cannot.
    let (release, platform) = stem.rmatch_indices('-').find_map(|(end, _)| {
        let (hash, platform) = stem[end + 1..].split_once('-')?;
        let is_hash = hash.len() == HASH_DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hash.then(|| (&stem[..end], platform))
    })?;
    // If another image's name begins with this image's name, `release` starts with the rest of that name instead of a number.
    let (major, _) = release.split_once('.')?;
    let release = release.parse().ok().filter(|_| major.bytes().all(|byte| byte.is_ascii_digit()))?;
    Some((release, platform.to_owned()))
}

fn list_logs(cache: &Cache) -> io::Result<Vec<(SystemTime, String)>> {
    let Some(entries) = if_there(fs::read_dir(cache.root().join(KIND)))? else { return Ok(Vec::new()) };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry?;
        // Skip an entry that was removed in the meantime.
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        files.extend(modified.ok().zip(entry.file_name().into_string().ok()));
    }
    Ok(files)
}

/// Reads a log that may still be growing.
pub struct LogReader(File);

impl LogReader {
    /// Opens a log for reading from an offset in bytes.
    pub fn open(path: &Path, from: u64) -> io::Result<Self> {
        let mut log = File::open(path)?;
        log.seek(SeekFrom::Start(from))?;
        Ok(Self(log))
    }

    /// Whether a build is still writing the log.
    pub fn is_being_written(&self) -> io::Result<bool> {
        let is_locked = matches!(self.0.try_lock_shared(), Err(TryLockError::WouldBlock));
        if !is_locked {
            self.0.unlock()?;
        }
        Ok(is_locked)
    }

    /// Returns the text written since the last call, and whether the log may still grow. The writer of a log holds the
    /// lock on the file.
    pub fn read_new(&mut self) -> io::Result<(Vec<u8>, bool)> {
        // Test the lock before reading: if no writer holds the lock, the following read returns the rest of the log.
        let may_grow = self.is_being_written()?;
        let mut text = Vec::new();
        self.0.read_to_end(&mut text)?;
        Ok((text, may_grow))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::{BTreeMap, BTreeSet},
        time::Duration,
    };

    use farrier_engines::BuildLog as _;

    use super::*;
    use crate::FileLog;

    #[test]
    fn logs_are_told_apart_by_platform_and_inputs() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path().to_owned()).unwrap();
        let (image, release): (ImageName, KernelRelease) =
            ("gpu".parse().unwrap(), "6.1.0-1-amd64".parse().unwrap());
        let found = || -> Vec<String> {
            let found = logs_for(&cache, &image).unwrap().into_iter().filter(|log| log.release == release);
            found.map(|log| format!("{} {}", log.platform, log.path.display())).collect()
        };
        assert!(found().is_empty());
        let logs = directory.path().join(KIND);
        fs::create_dir(&logs).unwrap();
        assert!(found().is_empty());
        let now = SystemTime::now();
        for (age, name) in [
            (3, "gpu-6.1.0-1-amd64-0123456789ab-debian-12-amd64.log"),
            (2, "gpu-6.1.0-1-amd64-ba9876543210-opensuse-leap-15.6-arm64.log"),
            (1, "gpu-6.1.0-1-amd64-rt-0123456789ab-debian-12-amd64.log"),
            (1, "gpu-open-6.1.0-1-amd64-0123456789ab-debian-12-amd64.log"),
            (1, "gpu-6.1.0-1-amd64-0123456789ab-debian-12-amd64.txt"),
            (1, "gpu-6.1.0-1-amd64-0123456789ab.log"),
            (1, "gpu-2-6.1.0-1-amd64-0123456789ab-debian-12-amd64.log"),
            (1, "gpu-6.1.0-ba9876543210-x-0123456789ab-debian-12-amd64.log"),
        ] {
            let file = File::create(logs.join(name)).unwrap();
            file.set_modified(now - Duration::from_secs(age)).unwrap();
        }
        let at = |name: &str| logs.join(name).display().to_string();
        let [newer, older] = [
            "gpu-6.1.0-1-amd64-ba9876543210-opensuse-leap-15.6-arm64.log",
            "gpu-6.1.0-1-amd64-0123456789ab-debian-12-amd64.log",
        ];
        let wanted =
            [format!("opensuse-leap-15.6-arm64 {}", at(newer)), format!("debian-12-amd64 {}", at(older))];
        assert_eq!(found(), wanted);
        let all: BTreeSet<KernelRelease> =
            logs_for(&cache, &image).unwrap().into_iter().map(|log| log.release).collect();
        let all: Vec<&str> = all.iter().map(KernelRelease::as_str).collect();
        assert_eq!(all, ["6.1.0-1-amd64", "6.1.0-1-amd64-rt", "6.1.0-ba9876543210-x"]);

        let inputs = |start: &str| format!("{start:0<64}").parse::<InputHash>().unwrap();
        let target = |os: &str, version: &str| KernelTarget {
            os: os.parse().unwrap(),
            os_version: version.parse().unwrap(),
            release: release.clone(),
            arch: farrier_core::kernel::Architecture::Amd64,
        };
        let (debian, other) = (target("debian", "12"), target("debian", "13"));
        let own = log_of(&cache, &image, &debian, &inputs("0123456789ab"));
        assert_eq!(own.unwrap().display().to_string(), at(older));
        assert_eq!(log_of(&cache, &image, &other, &inputs("0123456789ab")), None);
        assert_eq!(log_of(&cache, &image, &debian, &inputs("ba9876543210")), None);
        let times = LogTimes::of(&cache);
        let written = times.get(&image, &debian, &inputs("0123456789ab"));
        assert_eq!(written, Some(now - Duration::from_secs(3)));
        assert_eq!(times.get(&image, &other, &inputs("0123456789ab")), None);

        let images: [ImageName; 3] = ["gpu", "gpu-open", "mft"].map(|name| name.parse().unwrap());
        let at = |days: u64| times.by_day(images.iter(), now + Duration::from_secs(days * 24 * 3600));
        let last = |days: u64| at(days).into_iter().map(|(image, counts)| (image.to_string(), counts));
        let today: BTreeMap<_, _> = last(0).collect();
        assert_eq!(today.len(), 2, "{today:?}");
        assert_eq!([today["gpu"][DAYS - 1], today["gpu"][DAYS - 2], today["gpu-open"][DAYS - 1]], [7, 0, 1]);
        assert!(last(29).all(|(_, counts)| counts[0] > 0) && last(30).next().is_none());
    }

    #[test]
    fn a_log_is_read_while_it_is_written_and_its_end_is_known() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("build.log");
        let log = FileLog::create(&path, |_| {}).unwrap();
        let mut reader = LogReader::open(&path, 0).unwrap();
        assert_eq!(reader.read_new().unwrap(), (vec![], true));
        log.line("CC [M] a.o");
        assert_eq!(reader.read_new().unwrap(), (b"CC [M] a.o\n".to_vec(), true));
        assert_eq!(LogReader::open(&path, 7).unwrap().read_new().unwrap(), (b"a.o\n".to_vec(), true));
        log.line("LD [M] a.ko");
        drop(log);
        assert_eq!(reader.read_new().unwrap(), (b"LD [M] a.ko\n".to_vec(), false));
        assert_eq!(reader.read_new().unwrap(), (vec![], false));
    }
}
