//! Measures disk usage while 2,000 kernels pass through a cache. Each kernel leaves what a real one does, on a smaller
//! scale, and a tenth of the kernels fill the quota. Prints lines of `<what> <number>`; `ci/bench` turns them into
//! table rows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use farrier_controller::runtime::Metrics;
use farrier_core::{image::Memory, site::Storage};
use farrier_local::cache::{BLOBS, Cache, CacheError};

const KERNELS: usize = 2_000;
/// Number of files in a header set, of 4 KiB each.
const FILES: usize = 40;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let directory = tempfile::tempdir().unwrap();
    let root = Cache::open(directory.path().join("cache")).unwrap();
    let mebibytes = |number: u64| Memory::from_bytes(number << 20);
    let quotas = Storage { cache: mebibytes(64), logs: mebibytes(2), ..Storage::default() };
    for kernel in 1..=KERNELS {
        let cache = root.in_use();
        let begun = Instant::now();
        cache.make_room(&quotas).unwrap();
        println!("room-ms {:.3}", begun.elapsed().as_secs_f64() * 1000.0);
        build(&cache, kernel).await;
        if [500, 1_000, KERNELS].contains(&kernel) {
            drop(cache);
            root.make_room(&quotas).unwrap();
            let (bytes, files) = on_disk(root.root());
            println!("bytes-{kernel} {bytes}\nfiles-{kernel} {files}");
            assert!(bytes < 100 << 20, "{bytes} bytes after {kernel} kernels");
        }
    }
    let metrics = Metrics::default();
    let waiting = |kernel| (format!("debian 12 6.1.{kernel} amd64"), Duration::from_secs(1));
    metrics.kernels((0..KERNELS).map(waiting).collect());
    let text = metrics.text().unwrap();
    println!("series {}", text.lines().filter(|line| line.starts_with("farrier_kernel")).count());
}

/// Adds what a build leaves in the cache: a header set with its packages, a kernel's facts, a blob, a log.
async fn build(cache: &Cache, kernel: usize) {
    let key = format!("{kernel:064x}");
    let fill = |files: usize| {
        move |directory: PathBuf| async move {
            for file in 0..files {
                fs::write(directory.join(file.to_string()), [1; 4 << 10])?;
            }
            Ok::<_, CacheError>(())
        }
    };
    for (kind, files) in [("headers", FILES), ("debs", 4), ("exposed", 4)] {
        cache.get_or_make(kind, &key, fill(files)).await.unwrap();
        cache.write_record(kind, &key, &key).unwrap();
    }
    let blob = |file: PathBuf| async move { Ok::<_, CacheError>(fs::write(file, vec![1; 32 << 10])?) };
    cache.get_or_make_file(BLOBS, &key, blob).await.unwrap();
    let logs = cache.root().join("logs");
    fs::create_dir_all(&logs).unwrap();
    fs::write(logs.join(format!("{key}.log")), vec![1; 16 << 10]).unwrap();
}

/// Bytes and files below a directory, without records. These have a separate quota that 2,000 kernels do not reach.
fn on_disk(root: &Path) -> (u64, usize) {
    let parts = walkdir::WalkDir::new(root).into_iter().filter_entry(|entry| entry.file_name() != "records");
    parts
        .map(|entry| entry.unwrap().metadata().unwrap())
        .fold((0, 0), |(bytes, files), found| (bytes + found.blocks() * 512, files + 1))
}
