//! Writes the build context as a tar stream.

use std::{
    fs::Metadata,
    io::{self, Read as _, Write},
    os::unix::fs::MetadataExt as _,
    path::{Component, Path, PathBuf},
};

use farrier_local::files::walk_source;
use fs_err as fs;
use tar::{Builder, EntryType, Header, HeaderMode};
use walkdir::WalkDir;

use super::{ContextEntry, Result};

/// Name of the Dockerfile in the context, which no other entry may have.
pub(super) const DOCKERFILE: &str = ".farrier.Dockerfile";

/// A file, directory or link of the context.
struct ContextItem {
    /// Path in the context.
    dest: PathBuf,
    /// Path on this machine.
    from: PathBuf,
    metadata: Metadata,
}

/// File with the paths that a builder excludes from the context: this file and the Dockerfile, which only the builder reads.
const IGNORE_FILE: &str = ".dockerignore";

/// Writes the context as tar while walking it: entries sorted by name, owned by root. Files keep their modification times.
/// Directories and links get the epoch, because their times depend on the machine that unpacked them. A builder gets the
/// Dockerfile too; in-place engines have already parsed it.
pub fn write_tar(dockerfile: Option<&str>, entries: &[ContextEntry], out: &mut impl Write) -> Result<()> {
    let mut tar = Builder::new(out);
    let ignored = format!("{DOCKERFILE}\n{IGNORE_FILE}\n");
    let builder_files = dockerfile.map(|text| [(DOCKERFILE, text), (IGNORE_FILE, ignored.as_str())]);
    for (name, text) in builder_files.into_iter().flatten() {
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(text.len() as u64);
        tar.append_data(&mut header, name, text.as_bytes())?;
    }
    for entry in entries {
        walk(entry, |item| append(&mut tar, item))?;
    }
    Ok(tar.finish()?)
}

fn append(tar: &mut Builder<impl Write>, item: &ContextItem) -> io::Result<()> {
    let ContextItem { dest, from, metadata } = item;
    let mut header = Header::new_gnu();
    header.set_metadata_in_mode(metadata, HeaderMode::Complete);
    header.set_uid(0);
    header.set_gid(0);
    if !metadata.is_file() {
        header.set_mtime(0);
    }
    // The input hash covers only the executable bit. Other bits depend on the umask of the machine that made the tree, and the
    // user of a pod's steps may not be allowed to read the owner's files.
    let is_executable = metadata.is_dir() || metadata.mode() & 0o111 != 0;
    header.set_mode(if is_executable { 0o755 } else { 0o644 });
    if metadata.is_symlink() {
        header.set_size(0);
        header.set_entry_type(EntryType::Symlink);
        let target = fs::read_link(from)?;
        tar.append_link(&mut header, dest, &target)
    } else if metadata.is_dir() {
        header.set_size(0);
        tar.append_data(&mut header, dest, io::empty())
    } else {
        // Write exactly as many bytes as the header states: a file that shrinks or grows during the read would shift all later
        // entries.
        let mut exact = fs::File::open(from)?.take(metadata.len());
        tar.append_data(&mut header, dest, &mut exact)?;
        if exact.limit() > 0 {
            let reason = format!("{} became shorter while it was read", from.display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        Ok(())
    }
}

/// Visits an entry and everything below it except version-control data: directories before their content, names in order.
fn walk(entry: &ContextEntry, mut visit: impl FnMut(&ContextItem) -> io::Result<()>) -> Result<()> {
    let dest = checked_dest(&entry.dest)?;
    for item in walk_source(WalkDir::new(&entry.from).sort_by_file_name()) {
        let item = item.map_err(io::Error::from)?;
        // Follow the entry itself if it is a link. Links below the entry stay links.
        let metadata = match item.depth() {
            0 => fs::metadata(item.path()),
            _ => fs::symlink_metadata(item.path()),
        }?;
        if !(metadata.is_file() || metadata.is_dir() || metadata.is_symlink()) {
            let path = item.path().display();
            let reason = format!("{path} is neither file, directory nor symbolic link");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason).into());
        }
        let relative = item.path().strip_prefix(&entry.from).map_err(io::Error::other)?;
        let (dest, from) = if item.depth() == 0 {
            (dest.to_owned(), fs::canonicalize(item.path())?)
        } else {
            (dest.join(relative), item.path().to_owned())
        };
        visit(&ContextItem { dest, from, metadata })?;
    }
    Ok(())
}

/// Checks that the destination of an entry is relative and inside the context.
fn checked_dest(dest: &str) -> Result<&Path> {
    let path = Path::new(dest);
    let is_inside = path.components().all(|part| matches!(part, Component::Normal(_)));
    if dest.is_empty() || [DOCKERFILE, IGNORE_FILE].contains(&dest) || !is_inside {
        let reason = format!("{dest} is not a path inside the build context");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason).into());
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs::Permissions, os::unix::fs::PermissionsExt};

    use fs_err::os::unix::fs::symlink;

    use super::*;

    fn tree() -> (tempfile::TempDir, Vec<ContextEntry>) {
        let dir = tempfile::tempdir().unwrap();
        let src = dir.path().join("src");
        fs::create_dir_all(src.join("sub")).unwrap();
        fs::write(src.join("sub/run.sh"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(src.join("sub/run.sh"), Permissions::from_mode(0o755)).unwrap();
        fs::write(src.join("n".repeat(180)), "long").unwrap();
        symlink("/etc/passwd", src.join("link")).unwrap();
        symlink(&src, dir.path().join("entry")).unwrap();
        let entries = vec![
            ContextEntry { dest: "sources/x".into(), from: dir.path().join("entry") },
            ContextEntry { dest: "patches/1.patch".into(), from: src.join("sub/run.sh") },
        ];
        (dir, entries)
    }

    fn tar_of(entries: &[ContextEntry]) -> Vec<u8> {
        let mut out = Vec::new();
        write_tar(Some("FROM scratch\n"), entries, &mut out).unwrap();
        out
    }

    #[test]
    fn tar_holds_everything_as_root_and_in_order() {
        let (_dir, entries) = tree();
        let bytes = tar_of(&entries);
        assert_eq!(bytes, tar_of(&entries));
        let mut found = BTreeMap::new();
        let mut archive = tar::Archive::new(bytes.as_slice());
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.gid().unwrap()), (0, 0));
            let path = entry.path().unwrap().into_owned();
            found.insert(path, (header.entry_type(), header.mode().unwrap() & 0o777));
        }
        assert_eq!(found[Path::new("sources/x")].0, EntryType::Directory);
        assert_eq!(found[Path::new("sources/x/link")].0, EntryType::Symlink);
        assert_eq!(found[Path::new("sources/x/sub/run.sh")], (EntryType::Regular, 0o755));
        assert!(found.contains_key(&Path::new("sources/x").join("n".repeat(180))));
        assert!(
            found.contains_key(Path::new("patches/1.patch")) && found.contains_key(Path::new(DOCKERFILE))
        );
    }

    #[test]
    fn nothing_but_the_executable_bit_of_a_mode_counts() {
        let dir = tempfile::tempdir().unwrap();
        let src = dir.path().join("src");
        fs::create_dir(&src).unwrap();
        let mut contexts = Vec::new();
        for (directory, file, program) in
            [(0o700, 0o600, 0o700), (0o775, 0o664, 0o775), (0o755, 0o444, 0o4555)]
        {
            for (name, mode) in [("a.c", file), ("configure", program), ("", directory)] {
                let path = src.join(name);
                if !path.exists() {
                    fs::write(&path, "").unwrap();
                }
                fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            }
            let entries = [ContextEntry { dest: "sources/x".into(), from: src.clone() }];
            let mut context = Vec::new();
            write_tar(None, &entries, &mut context).unwrap();
            contexts.push(context);
        }
        assert_eq!([&contexts[1], &contexts[2]], [&contexts[0]; 2]);
        let mut archive = tar::Archive::new(contexts[0].as_slice());
        let modes: Vec<_> =
            archive.entries().unwrap().map(|entry| entry.unwrap().header().mode().unwrap()).collect();
        assert_eq!(modes, [0o755, 0o644, 0o755]);
    }

    #[test]
    fn version_control_data_is_not_sent() {
        let (dir, entries) = tree();
        for path in ["src/.git/config", "src/sub/.svn/wc.db"] {
            fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
            fs::write(dir.path().join(path), "token").unwrap();
        }
        fs::write(dir.path().join("src/sub/.git"), "gitdir: elsewhere\n").unwrap();
        fs::write(dir.path().join("src/.gitignore"), "*.o\n").unwrap();
        let bytes = tar_of(&entries);
        let mut archive = tar::Archive::new(bytes.as_slice());
        let places: Vec<_> =
            archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().into_owned()).collect();
        assert!(places.contains(&PathBuf::from("sources/x/.gitignore")));
        let is_data = |place: &&PathBuf| place.iter().any(|name| name == ".git" || name == ".svn");
        assert_eq!(places.iter().find(is_data), None);
    }

    #[test]
    fn places_outside_the_context_are_refused() {
        for dest in ["", "/etc", "../x", "a/../../b", DOCKERFILE, IGNORE_FILE] {
            assert!(checked_dest(dest).is_err(), "{dest}");
        }
        assert!(checked_dest("kernel/usr/src").is_ok());
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        let entries = [ContextEntry { dest: "x".into(), from: dir.path().to_owned() }];
        assert!(write_tar(None, &entries, &mut Vec::new()).is_err());
    }
}
