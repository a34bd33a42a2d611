//! Adapter: digests of files and directory trees, remembered for as long as they are not touched.

use std::{
    fs::Metadata,
    io::{self, Read},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use fs_err::{self as fs, File};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{FetchError, Result, files};
use crate::{cache::Cache, image::InputHasher};

/// Hash over texts in order, each with its length: 64 hexadecimal digits.
pub(super) fn of_parts<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = InputHasher::new("fetch-1");
    for part in parts {
        hasher.add("part", part);
    }
    hasher.finish().to_string()
}

/// sha256 of a file.
pub(super) fn of_file(path: &Path, stop: &AtomicBool) -> Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        files::go_on(stop)?;
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// sha256 over a tree: names, kinds, permissions, link targets and contents, in name order. Times and
/// owners do not count.
pub(super) fn of_tree(root: &Path, stop: &AtomicBool) -> Result<String> {
    let mut hasher = InputHasher::new("tree-1");
    for entry in walk(root) {
        let (path, metadata) = entry?;
        let name = path.strip_prefix(root).unwrap_or(&path).as_os_str().as_bytes();
        if metadata.is_file() {
            // Only what a container image or a build can tell apart.
            let mode = if metadata.permissions().mode() & 0o111 == 0 { "file" } else { "executable" };
            hasher.add(mode, name).add("content", of_file(&path, stop)?);
        } else if metadata.is_symlink() {
            hasher.add("link", name).add("target", fs::read_link(&path)?.as_os_str().as_bytes());
        } else if metadata.is_dir() {
            hasher.add("directory", name);
        } else {
            return Err(files::special(root, &path));
        }
    }
    Ok(hasher.finish().to_string())
}

/// The content of a file or tree, with its digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    /// Changes when anything is touched.
    stamp: String,
    /// 64 hexadecimal digits.
    pub(super) digest: String,
    pub(super) is_dir: bool,
}

/// The digest of a file or tree, from a record while sizes, times and inodes are what they were.
pub(super) fn remembered(cache: &Cache, path: &Path, stop: &AtomicBool) -> Result<Known> {
    let path = fs::canonicalize(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => FetchError::Absent(path.to_owned()),
        _ => error.into(),
    })?;
    let key = of_parts([&*path.to_string_lossy()]);
    let metadata = fs::metadata(&path)?;
    let is_dir = metadata.is_dir();
    // Taken first: what changes while it is read gets another stamp next time.
    let stamp = if is_dir { stamp_of_tree(&path)? } else { stamp_of(&metadata) };
    if let Some(known) = cache.read_record::<Known>("digests", &key)?
        && known.stamp == stamp
    {
        return Ok(known);
    }
    let digest = if is_dir { of_tree(&path, stop)? } else { of_file(&path, stop)? };
    let known = Known { stamp, digest, is_dir };
    cache.write_record("digests", &key, &known)?;
    Ok(known)
}

fn stamp_of_tree(root: &Path) -> Result<String> {
    let mut hasher = InputHasher::new("stamp-1");
    for entry in walk(root) {
        let (path, metadata) = entry?;
        hasher.add("path", path.as_os_str().as_bytes()).add("stamp", stamp_of(&metadata));
    }
    Ok(hasher.finish().to_string())
}

pub(super) fn stamp_of(metadata: &Metadata) -> String {
    // The change time cannot be set back, as the modification time can (tar and rsync do).
    format!(
        "{} {} {} {}.{} {}.{}",
        metadata.dev(),
        metadata.ino(),
        metadata.size(),
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec()
    )
}

fn walk(root: &Path) -> impl Iterator<Item = Result<(PathBuf, Metadata)>> {
    walkdir::WalkDir::new(root).min_depth(1).sort_by_file_name().into_iter().map(|entry| {
        let entry = entry?;
        let metadata = entry.metadata()?;
        Ok((entry.into_path(), metadata))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_trees_digest_is_its_content() {
        let run = |change: &dyn Fn(&Path)| {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("sub")).unwrap();
            fs::write(dir.path().join("sub/file"), "text").unwrap();
            symlink("sub/file", dir.path().join("link")).unwrap();
            change(dir.path());
            of_tree(dir.path(), &AtomicBool::new(false)).unwrap()
        };
        let plain = run(&|_| {});
        assert_eq!(plain, run(&|_| {}));
        let changes: [&dyn Fn(&Path); 5] = [
            &|dir| fs::write(dir.join("sub/file"), "tex").unwrap(),
            &|dir| fs::rename(dir.join("sub/file"), dir.join("sub/file2")).unwrap(),
            &|dir| fs::create_dir(dir.join("empty")).unwrap(),
            &|dir| fs::set_permissions(dir.join("sub/file"), std::fs::Permissions::from_mode(0o755)).unwrap(),
            &|dir| {
                fs::remove_file(dir.join("link")).unwrap();
                symlink("sub", dir.join("link")).unwrap();
            },
        ];
        for change in changes {
            assert_ne!(plain, run(change));
        }
    }

    #[test]
    fn remembered_until_touched() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("cache")).unwrap();
        let file = dir.path().join("file");
        let stop = AtomicBool::new(false);
        fs::write(&file, "one").unwrap();
        let one = remembered(&cache, &file, &stop).unwrap();
        assert_eq!(one.digest, hex::encode(Sha256::digest("one")));
        // From the record: reading the file would end here.
        assert_eq!(remembered(&cache, &file, &AtomicBool::new(true)).unwrap(), one);
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        assert_ne!(remembered(&cache, &file, &stop).unwrap().digest, one.digest);
    }
}
