//! Digests of files and directory trees, recorded until a file is touched.

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

use farrier_core::image::FieldHasher;
use farrier_local::{cache::Cache, files::walk_source};
use fs_err::{self as fs, File};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{FetchError, Result, files, suspects};

/// Returns a hash over texts in order, each with its length: 64 hexadecimal digits.
pub(super) fn of_parts<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = FieldHasher::new("fetch-1");
    for part in parts {
        hasher.add("part", part);
    }
    hasher.finish().to_string()
}

/// Returns the SHA-256 of a file.
pub(super) fn of_file(path: &Path, stop: &AtomicBool) -> Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        files::check_not_canceled(stop)?;
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// Returns a SHA-256 over a tree: names, kinds, executable bits, link targets and contents, in name order. Times, owners and
/// version-control data do not count.
pub(super) fn of_tree(root: &Path, stop: &AtomicBool) -> Result<String> {
    digest_tree(root, stop, |_, _| Ok(()))
}

/// Computes the digest of a tree, calling `visit` with each file's relative and full path.
fn digest_tree(
    root: &Path,
    stop: &AtomicBool,
    mut visit: impl FnMut(&Path, &Path) -> Result<()>,
) -> Result<String> {
    let mut hasher = FieldHasher::new("tree-1");
    for entry in walk(root) {
        let (path, metadata) = entry?;
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let name = relative.as_os_str().as_bytes();
        if metadata.is_file() {
            visit(relative, &path)?;
            // Only distinctions that a container image or a build can observe.
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

/// Digest and kind of a file or tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DigestRecord {
    /// Changes when any file is touched.
    stamp: String,
    /// 64 hexadecimal digits.
    pub(super) digest: String,
    pub(super) is_dir: bool,
    /// Files that look like credentials, for messages.
    pub(super) credentials: Vec<String>,
}

/// Returns the digest of a file or tree, from a record while sizes, times and inodes are unchanged.
pub(super) fn digest_record(cache: &Cache, path: &Path, stop: &AtomicBool) -> Result<DigestRecord> {
    let path = fs::canonicalize(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => FetchError::Absent(path.to_owned()),
        _ => error.into(),
    })?;
    let key = of_parts([&*path.to_string_lossy()]);
    let metadata = fs::metadata(&path)?;
    let is_dir = metadata.is_dir();
    // Take the stamp first: a file that changes during the read then gets another stamp next time.
    let stamp = if is_dir { stamp_of_tree(&path)? } else { stamp_of(&metadata) };
    if let Some(record) = cache.read_record::<DigestRecord>("digests", &key)?
        && record.stamp == stamp
    {
        return Ok(record);
    }
    let mut credentials = Vec::new();
    let digest = if is_dir {
        digest_tree(&path, stop, |relative, full_path| {
            credentials.extend(suspects::credentials_in(relative, full_path)?);
            Ok(())
        })?
    } else {
        let name = path.file_name().map_or(path.as_path(), Path::new);
        credentials.extend(suspects::credentials_in(name, &path)?);
        of_file(&path, stop)?
    };
    let record = DigestRecord { stamp, digest, is_dir, credentials };
    cache.write_record("digests", &key, &record)?;
    Ok(record)
}

fn stamp_of_tree(root: &Path) -> Result<String> {
    let mut hasher = FieldHasher::new("stamp-1");
    for entry in walk(root) {
        let (path, metadata) = entry?;
        hasher.add("path", path.as_os_str().as_bytes()).add("stamp", stamp_of(&metadata));
    }
    Ok(hasher.finish().to_string())
}

pub(super) fn stamp_of(metadata: &Metadata) -> String {
    // The change time cannot be set back, unlike the modification time, which tar and rsync set.
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
    let walk = walkdir::WalkDir::new(root).min_depth(1).sort_by_file_name();
    walk_source(walk).map(|entry| {
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

    /// An open or once edited file does not change a source, and products of a build do: a driver may need them as inputs.
    #[test]
    fn files_of_editors_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, stop) = (dir.path().join("tree"), AtomicBool::new(false));
        fs::create_dir_all(tree.join("sub")).unwrap();
        fs::write(tree.join("sub/file.c"), "text").unwrap();
        let plain = of_tree(&tree, &stop).unwrap();
        for name in [".file.c.swp", "file.c~", "#file.c#"] {
            fs::write(tree.join("sub").join(name), "x").unwrap();
            assert_eq!(of_tree(&tree, &stop).unwrap(), plain, "{name}");
        }
        symlink("me@host.1:2", tree.join("sub/.#file.c")).unwrap();
        let copy = dir.path().join("copy");
        super::super::files::copy_tree(&tree, &copy, &stop).unwrap();
        let names: Vec<_> = fs::read_dir(copy.join("sub")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!((of_tree(&tree, &stop).unwrap(), names), (plain.clone(), vec!["file.c".into()]));
        fs::create_dir(tree.join("old~")).unwrap();
        assert_ne!(of_tree(&tree, &stop).unwrap(), plain, "a directory counts, whatever its name is");
        let directory = of_tree(&tree, &stop).unwrap();
        fs::write(tree.join("nv-kernel.o_binary"), "x").unwrap();
        assert_ne!(of_tree(&tree, &stop).unwrap(), directory);
    }

    /// `git gc`, a commit or another remote do not change a source. A worktree and a submodule have `.git` as a file.
    #[test]
    fn version_control_data_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("cache")).unwrap();
        let (tree, stop) = (dir.path().join("tree"), AtomicBool::new(false));
        fs::create_dir_all(tree.join("sub")).unwrap();
        fs::write(tree.join("sub/file"), "text").unwrap();
        let plain = of_tree(&tree, &stop).unwrap();
        // Published images depend on this digest, so it must never change.
        assert_eq!(plain, "a3d2df7a9d7c08003af3edb039a87398f1c1ed81f67152f6113ef9c9f973f311");
        let known = digest_record(&cache, &tree, &stop).unwrap();
        for (path, content) in [
            (".git/config", "token"),
            ("sub/.git", "gitdir: x"),
            ("sub/.hg/a", ""),
            (".svn/b", ""),
            ("CVS/Root", ""),
        ] {
            fs::create_dir_all(tree.join(path).parent().unwrap()).unwrap();
            fs::write(tree.join(path), content).unwrap();
            assert_eq!(of_tree(&tree, &stop).unwrap(), plain, "{path}");
        }
        assert_eq!(digest_record(&cache, &tree, &stop).unwrap().digest, known.digest);
        // A change in version-control data does not even cause another read of the tree.
        fs::write(tree.join(".git/packed-refs"), "x").unwrap();
        assert!(digest_record(&cache, &tree, &AtomicBool::new(true)).is_ok());
    }

    #[test]
    fn credentials_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("cache")).unwrap();
        let (tree, stop) = (dir.path().join("tree"), AtomicBool::new(false));
        fs::create_dir_all(tree.join("certs")).unwrap();
        fs::create_dir_all(tree.join(".git")).unwrap();
        fs::write(tree.join("certs/signing_key.pem"), "-----BEGIN PRIVATE KEY-----\n").unwrap();
        fs::write(tree.join(".git/key"), "-----BEGIN PRIVATE KEY-----\n").unwrap();
        fs::write(tree.join("a.c"), "int x;\n").unwrap();
        let known = digest_record(&cache, &tree, &stop).unwrap();
        assert_eq!(known.credentials, ["certs/signing_key.pem (a module signing key)"]);
        let all = suspects::of_tree(&tree, &stop).unwrap();
        assert_eq!(all, [".git (version-control data)", "certs/signing_key.pem (a module signing key)"]);
        // The record is used: the stop flag would make another read fail.
        assert_eq!(digest_record(&cache, &tree, &AtomicBool::new(true)).unwrap(), known);
        let file = digest_record(&cache, &tree.join("certs/signing_key.pem"), &stop).unwrap();
        assert_eq!(file.credentials, ["signing_key.pem (a module signing key)"]);
    }

    #[test]
    fn remembered_until_touched() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("cache")).unwrap();
        let file = dir.path().join("file");
        let stop = AtomicBool::new(false);
        fs::write(&file, "one").unwrap();
        let one = digest_record(&cache, &file, &stop).unwrap();
        assert_eq!(one.digest, hex::encode(Sha256::digest("one")));
        // The record is used: the stop flag would make another read fail.
        assert_eq!(digest_record(&cache, &file, &AtomicBool::new(true)).unwrap(), one);
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        assert_ne!(digest_record(&cache, &file, &stop).unwrap().digest, one.digest);
    }
}
