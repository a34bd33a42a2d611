//! Tests of the cache. Two `Cache` objects act as two processes: each has its own file handles.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use farrier_core::{image::Memory, site::Storage};
use tempfile::TempDir;

use super::*;

pub(super) fn cache() -> (TempDir, Cache) {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path().join("cache")).unwrap();
    (directory, cache)
}

fn left_over(cache: &Cache, kind: &str) -> Vec<String> {
    let names = fs::read_dir(cache.root().join(kind)).unwrap();
    names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn its_paths_are_absolute() {
    let directory = tempfile::tempdir_in(".").unwrap();
    let relative = Path::new(directory.path().file_name().unwrap()).join("cache");
    let cache = Cache::open(relative.clone()).unwrap();
    assert_eq!(cache.root(), std::env::current_dir().unwrap().join(relative));
}

/// Sources and build logs are private to the user who runs farrier.
#[tokio::test]
async fn no_other_user_reaches_into_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("above/cache");
    // A cache as an earlier release left it.
    fs::create_dir_all(root.join("locks")).unwrap();
    for path in [&root, &root.join("locks")] {
        fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let cache = Cache::open(root.clone()).unwrap();
    cache.get_or_make::<_, _, CacheError>("kind", "key", |_| async { Ok(()) }).await.unwrap();
    cache.write_record("failures", "x", &1).unwrap();
    cache.stamp("engine", "x").unwrap();
    let scratch = cache.scratch().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&root), 0o700);
    for entry in fs::read_dir(&root).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o700, "{}", path.display());
    }
    assert_eq!(mode(scratch.path()), 0o700);
    // A directory shared with others keeps its mode.
    for (shared, wanted) in [("sticky", 0o1777), ("full", 0o755)] {
        let shared = directory.path().join(shared);
        fs::create_dir_all(shared.join("theirs")).unwrap();
        fs::set_permissions(&shared, std::fs::Permissions::from_mode(wanted)).unwrap();
        Cache::open(shared.clone()).unwrap();
        assert_eq!(mode(&shared), wanted);
    }
}

#[tokio::test]
async fn two_makers_make_one() {
    let (_directory, cache) = cache();
    // A second cache object has its own file handles, as a second process would.
    let other = Cache::open(cache.root().to_owned()).unwrap();
    let runs = AtomicUsize::new(0);
    let runs = &runs;
    let make = |path: PathBuf| async move {
        runs.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        fs::write(path.join("file"), "x").unwrap();
        Ok::<(), CacheError>(())
    };
    let (a, b) = tokio::join!(cache.get_or_make("kind", "key", make), other.get_or_make("kind", "key", make));
    assert_eq!(a.unwrap(), b.unwrap());
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert_eq!(left_over(&cache, "kind"), ["key"]);
}

#[tokio::test]
async fn failure_and_cancellation_leave_nothing() {
    let (_directory, cache) = cache();
    let fail = |path: PathBuf| async move {
        fs::write(path.join("half"), "x").unwrap();
        Err(CacheError(io::ErrorKind::StorageFull.into()))
    };
    cache.get_or_make::<_, _, CacheError>("kind", "key", fail).await.unwrap_err();
    assert!(left_over(&cache, "kind").is_empty());

    let (started, start) = tokio::sync::oneshot::channel();
    let hang = |path: PathBuf| async move {
        fs::write(path.join("half"), "x").unwrap();
        started.send(()).unwrap();
        std::future::pending::<Result<(), CacheError>>().await
    };
    tokio::select! {
        _ = cache.get_or_make("kind", "key", hang) => unreachable!(),
        () = async { start.await.unwrap() } => {}
    }
    assert!(left_over(&cache, "kind").is_empty());
    // The lock is free again.
    cache.get_or_make::<_, _, CacheError>("kind", "key", |_| async { Ok(()) }).await.unwrap();
}

#[tokio::test]
async fn an_empty_archive_is_set_aside_and_made_again() {
    let (_directory, cache) = cache();
    let make_file = |file: PathBuf| async move { Ok::<_, CacheError>(fs::write(file, "text")?) };
    let make = |directory: PathBuf| make_file(directory.join("file"));
    for attempt in 0..2 {
        let entry = cache.get_or_make_intact("kind", "key", has_content, make).await.unwrap();
        let file = cache.get_or_make_file("files", "key", make_file).await.unwrap();
        for file in [entry.join("file"), file] {
            assert_eq!(fs::read(&file).unwrap(), b"text", "{attempt}");
            fs::write(file, "").unwrap();
        }
    }
    assert_eq!(fs::read_dir(cache.root().join(QUARANTINE)).unwrap().count(), 2);
}

#[tokio::test]
async fn leftovers_of_a_killed_process_are_removed() {
    let (_directory, cache) = cache();
    fs::create_dir_all(cache.root().join("kind/.tmp-key-abc/deep")).unwrap();
    fs::create_dir_all(cache.root().join("kind/.tmp-other-abc")).unwrap();
    cache.get_or_make::<_, _, CacheError>("kind", "key", |_| async { Ok(()) }).await.unwrap();
    let mut names = left_over(&cache, "kind");
    names.sort();
    assert_eq!(names, [".tmp-other-abc", "key"]);
}

#[test]
fn scratch_directories_go_with_their_owner() {
    let (_directory, cache) = cache();
    let live = cache.scratch().unwrap();
    fs::write(live.path().join("x"), "x").unwrap();
    // What a killed farrier leaves: a lock file without a holder, and its directory.
    let work = cache.root().join("work");
    fs::write(work.join("build-dead.lock"), "").unwrap();
    fs::create_dir(work.join("build-dead.d")).unwrap();
    let second = cache.scratch().unwrap();
    assert!(live.path().join("x").exists() && second.path().exists());
    assert!(!work.join("build-dead.lock").exists() && !work.join("build-dead.d").exists());
    drop((live, second));
    assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
}

/// Nests `levels` directories inside each other.
fn make_deep(directory: &Path, levels: u32) {
    use rustix::fs::{Mode, OFlags, mkdirat, open, openat};
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut here = open(directory, flags, Mode::empty()).unwrap();
    for _ in 0..levels {
        mkdirat(&here, "d", Mode::RWXU).unwrap();
        here = openat(&here, "d", flags, Mode::empty()).unwrap();
    }
}

/// Limits this process to `to` descriptors.
fn limit_descriptors(to: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(to), ..limit }).unwrap();
}

/// Runs a closure in a thread with a small stack.
fn on_small_stack(what: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(256 << 10).spawn(what).unwrap().join().unwrap();
}

#[test]
fn a_directory_200_000_levels_deep_stops_no_later_build() {
    // Prefer memory: a disk would journal each of these directories.
    let memory = Path::new("/dev/shm");
    let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let cache = Cache::open(directory.path().to_owned()).unwrap();
    let work = cache.root().join("work");
    // One directory left by a killed farrier, and one left by a finished build.
    let dead = work.join("build-dead.d");
    fs::create_dir_all(&dead).unwrap();
    make_deep(&dead, 200_000);
    on_small_stack(move || {
        let build = cache.scratch().unwrap();
        assert!(!dead.exists(), "the directory of a killed farrier stayed");
        make_deep(build.path(), 20_000);
        limit_descriptors(40);
        drop(build);
        assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
        cache.scratch().unwrap();
        assert!(!cache.root().join("quarantine").exists());
    });
}

/// Runs a closure while this process cannot open any more files.
fn without_descriptors<T>(what: impl FnOnce() -> T) -> T {
    use std::os::fd::AsRawFd as _;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let lowest_free = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
    let none = Rlimit { current: Some(u64::try_from(lowest_free).unwrap()), ..limit };
    setrlimit(Resource::Nofile, none).unwrap();
    let outcome = what();
    setrlimit(Resource::Nofile, limit).unwrap();
    outcome
}

#[test]
fn what_cannot_be_removed_is_quarantined_and_tried_again() {
    let (_directory, cache) = cache();
    let build = cache.scratch().unwrap();
    fs::create_dir_all(build.path().join("out/deep")).unwrap();
    without_descriptors(|| drop(build));
    let left = |of: &str| left_over(&cache, of).len();
    assert_eq!((left("work"), left("quarantine")), (0, 1));
    // What is stuck in the quarantine blocks neither the next build nor the next sweep.
    let next = cache.scratch().unwrap();
    assert!(next.path().is_dir());
    let stuck = cache.root().join("quarantine").join(&left_over(&cache, "quarantine")[0]);
    assert!(stuck.join("out/deep").is_dir());
    cache.make_room(&quotas(1, 1)).unwrap();
    assert_eq!(left("quarantine"), 0);
    // A stale temporary directory of an entry does not block making that entry.
    let stale = cache.root().join("kind/.tmp-key-abc");
    fs::create_dir_all(stale.join("deep")).unwrap();
    without_descriptors(|| cache.quarantine().remove(&stale)).unwrap();
    assert_eq!((stale.exists(), left("quarantine")), (false, 1));
}

#[test]
fn what_was_set_aside_is_kept_for_a_week() {
    let (_directory, cache) = cache();
    let entry = cache.root().join("trees/key");
    fs::create_dir_all(entry.join("tree")).unwrap();
    used_before(&entry, 60 * 24 * 30);
    let place = cache.quarantine().set_aside(&entry).unwrap();
    assert!(!entry.exists());
    for (days, stays) in [(0, true), (6, true), (8, false)] {
        if days > 0 {
            used_before(&place, 60 * 24 * days);
        }
        cache.make_room(&quotas(1, 1)).unwrap();
        assert_eq!(place.exists(), stays, "after {days} days");
    }
}

#[test]
fn records_round_trip_and_damage_is_absence() {
    let (_directory, cache) = cache();
    assert_eq!(cache.read_record::<Vec<u32>>("kind", "key").unwrap(), None);
    cache.write_record("kind", "key", &vec![1, 2]).unwrap();
    assert_eq!(cache.read_record("kind", "key").unwrap(), Some(vec![1, 2]));
    fs::write(cache.root().join("records/kind/key.json"), "[1,").unwrap();
    assert_eq!(cache.read_record::<Vec<u32>>("kind", "key").unwrap(), None);
}

#[test]
fn names_are_single_components() {
    let (_directory, cache) = cache();
    for name in ["", "..", ".hidden", "a/b", "a\0b", "a b", &"x".repeat(256)] {
        cache.entry_path("kind", name).unwrap_err();
        cache.entry_path(name, "key").unwrap_err();
    }
}

#[test]
fn default_root_follows_xdg() {
    let root = |xdg: Option<&str>, home: Option<&str>| {
        Cache::default_root(xdg.map(Into::into), home.map(Into::into))
    };
    assert_eq!(root(Some("/x"), Some("/h")), Some("/x/farrier".into()));
    assert_eq!(root(Some("relative"), Some("/h")), Some("/h/.cache/farrier".into()));
    assert_eq!(root(None, Some("/h")), Some("/h/.cache/farrier".into()));
    assert_eq!(root(Some(""), None), None);
}

fn quotas(cache: u64, logs: u64) -> Storage {
    let [cache, logs] = [cache, logs].map(Memory::from_bytes);
    Storage { cache, logs, ..Storage::default() }
}

/// Makes an entry of 64 KiB that is no longer in use and was last used `minutes` ago.
async fn old_entry(cache: &Cache, kind: &str, key: &str, minutes: u64) {
    let other = Cache::open(cache.root().to_owned()).unwrap();
    let fill = |directory: PathBuf| async move { Ok(fs::write(directory.join("file"), vec![1; 64 << 10])?) };
    let place = other.get_or_make::<_, _, CacheError>(kind, key, fill).await.unwrap();
    used_before(&place, minutes);
}

fn used_before(place: &Path, minutes: u64) {
    let at = SystemTime::now() - Duration::from_mins(minutes);
    std::fs::File::open(place).unwrap().set_modified(at).unwrap();
}

#[tokio::test]
async fn above_the_quota_the_least_recently_used_goes_first_whatever_its_kind() {
    let (_directory, cache) = cache();
    for (minutes, (kind, key)) in
        [("headers", "a"), ("sources", "b"), ("kind-to-come", "c")].iter().enumerate()
    {
        old_entry(&cache, kind, key, 30 - minutes as u64).await;
    }
    // Getting an entry is a use.
    Cache::open(cache.root().to_owned()).unwrap().get("headers", "a").unwrap().unwrap();
    cache.make_room(&quotas(1 << 20, 1)).unwrap();
    assert_eq!(left_over(&cache, "sources").len(), 1, "an entry within the quota was evicted");
    cache.make_room(&quotas(150 << 10, 1)).unwrap();
    let left = ["headers", "sources", "kind-to-come"].map(|kind| left_over(&cache, kind).len());
    assert_eq!(left, [1, 0, 1]);
    cache.make_room(&quotas(1, 1)).unwrap();
    let left = ["headers", "kind-to-come", "records/sizes"].map(|kind| left_over(&cache, kind).len());
    assert_eq!(left, [0, 0, 0]);
}

#[tokio::test]
async fn what_is_in_use_stays_above_any_quota() {
    let (_directory, cache) = cache();
    for key in ["a", "b", "c"] {
        old_entry(&cache, "headers", key, 30).await;
    }
    // Another process, with one entry in use for its whole life, and another for one task.
    let other = Cache::open(cache.root().to_owned()).unwrap();
    other.get("headers", "a").unwrap().unwrap();
    let work = other.in_use();
    work.get("headers", "b").unwrap().unwrap();
    let log = other.root().join("logs/build.log");
    fs::create_dir_all(log.parent().unwrap()).unwrap();
    fs::write(&log, "it runs").unwrap();
    work.hold("logs", "build.log").unwrap();
    cache.make_room(&quotas(1, 1)).unwrap();
    let mut left = left_over(&cache, "headers");
    left.sort();
    assert_eq!((left, log.exists()), (vec!["a".to_owned(), "b".to_owned()], true));

    drop(work);
    cache.make_room(&quotas(1, 1)).unwrap();
    assert_eq!((left_over(&cache, "headers"), log.exists()), (vec!["a".to_owned()], false));
    // An entry in progress is in use as soon as it appears, and an evicted entry is made again.
    let made = cache.get_or_make::<_, _, CacheError>("headers", "b", |_| async { Ok(()) }).await.unwrap();
    other.make_room(&quotas(1, 1)).unwrap();
    assert!(made.exists());
}

/// Users come and go while another process evicts everything it may: no user loses an entry it was given.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_goes_while_it_is_taken_into_use() {
    let (_directory, cache) = cache();
    let stop = Arc::new(AtomicBool::new(false));
    let (remover, stopped) = (Cache::open(cache.root().to_owned()).unwrap(), Arc::clone(&stop));
    let removing = std::thread::spawn(move || {
        while !stopped.load(Ordering::SeqCst) {
            remover.make_room(&quotas(1, 1)).unwrap();
        }
    });
    let made = Arc::new(AtomicUsize::new(0));
    let users = (0..3).map(|_| {
        let (root, made) = (cache.root().to_owned(), Arc::clone(&made));
        tokio::spawn(async move {
            for round in 0..20_000 {
                // Run until an eviction happened in between, which may take a while on a busy machine.
                if round >= 200 && made.load(Ordering::SeqCst) > 1 {
                    break;
                }
                let user = Cache::open(root.clone()).unwrap();
                let fill = |directory: PathBuf| {
                    made.fetch_add(1, Ordering::SeqCst);
                    async move { Ok(fs::write(directory.join("file"), "x")?) }
                };
                let place = user.get_or_make::<_, _, CacheError>("kind", "key", fill).await.unwrap();
                tokio::task::yield_now().await;
                assert_eq!(fs::read(place.join("file")).unwrap(), b"x");
            }
        })
    });
    let users: Vec<_> = users.collect();
    for user in users {
        user.await.unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    removing.join().unwrap();
    assert!(made.load(Ordering::SeqCst) > 1, "it was removed in between");
}

#[tokio::test]
async fn what_killed_farriers_left_is_swept() {
    let (_directory, cache) = cache();
    let living = Cache::open(cache.root().to_owned()).unwrap();
    let _made_elsewhere = living.lock("kind", "living", LockMode::Exclusive).await.unwrap();
    let scratch = living.scratch().unwrap();
    let yesterday = 25 * 60;
    let root = cache.root();
    for directory in [
        "kind/.tmp-dead-abc/deep",
        "kind/.tmp-living-abc",
        "kind/.gone-x/deep",
        "work/build-dead.d",
        "uses",
        "records/kind",
        "locks",
        "attempts",
    ] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    let files = [
        "work/build-gone.lock",
        "uses/dead",
        "records/kind/.tmp-x",
        "locks/kind-old",
        "locks/kind-new",
        "attempts/.new-x",
    ];
    for file in files {
        fs::write(root.join(file), "").unwrap();
    }
    for old in ["records/kind/.tmp-x", "locks/kind-old", "locks/kind-living", "attempts/.new-x"] {
        used_before(&root.join(old), yesterday);
    }
    cache.make_room(&Storage::default()).unwrap();
    let mut left: Vec<String> = walkdir::WalkDir::new(root)
        .into_iter()
        .map(|entry| entry.unwrap().path().strip_prefix(root).unwrap().display().to_string())
        .filter(|name| name.contains('/'))
        .collect();
    left.sort();
    let own = scratch.path().strip_prefix(root).unwrap().display().to_string();
    let own_lock = own.replace(".d", ".lock");
    let mut expected = vec![
        "kind/.tmp-living-abc".to_owned(),
        "locks/.room".to_owned(),
        "locks/kind-dead".to_owned(),
        "locks/kind-living".to_owned(),
        "locks/kind-new".to_owned(),
        "records/kind".to_owned(),
        "uses/.gate".to_owned(),
        own,
        own_lock,
    ];
    expected.sort();
    expected.retain(|name| name != "uses/.gate" || left.contains(name));
    assert_eq!(left, expected);
}

/// A site may link a directory of its cache to another cache.
#[tokio::test]
async fn a_kind_that_is_a_link_is_another_caches() {
    let (_directory, cache) = cache();
    let (_elsewhere, theirs) = self::cache();
    old_entry(&theirs, "headers", "a", 30).await;
    std::os::unix::fs::symlink(theirs.root().join("headers"), cache.root().join("headers")).unwrap();
    cache.make_room(&quotas(1, 1)).unwrap();
    assert_eq!(left_over(&theirs, "headers"), ["a"]);
}
