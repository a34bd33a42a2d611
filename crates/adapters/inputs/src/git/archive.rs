//! Lists the tree of a commit and writes the tree as an archive. Files have exactly the content of their blobs: attributes,
//! filters and line endings of `.gitattributes` do not apply.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::{self, BufRead, BufReader, BufWriter, Read, Write as _},
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::AtomicBool,
};

use farrier_local::archive::Limits;
use flate2::{Compression, write::GzEncoder};
use fs_err::File;
use tar::{EntryType, Header};

use super::{
    super::{FetchError, Result, files, process},
    MEMORY,
};

/// Maximum size of a list of entries in bytes.
pub(super) const MAX_LIST_BYTES: u64 = 256 << 20;
/// Maximum size of a file that is read into memory, and of a link's target, as in Linux.
const MAX_BUFFERED: u64 = 4096;
/// First bytes of a Git LFS pointer file, and its maximum size (specification of git-lfs).
const LFS: (&[u8], u64) = (b"version https://git-lfs.github.com/spec/", 1024);

/// Kind of an entry in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
    File { mode: u32 },
    Link,
    Submodule,
}

/// An entry of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) path: PathBuf,
    pub(super) kind: EntryKind,
    /// The blob, or the commit of a submodule.
    pub(super) id: String,
}

/// Parses the output of `git ls-tree -r -z`. `what` names the tree in errors.
pub(super) fn entries(listed: &[u8], what: &str) -> Result<Vec<Entry>> {
    let lines = || listed.split(|byte| *byte == 0).filter(|line| !line.is_empty());
    check_weight(lines().map(|line| weight(line.len())).sum(), what)?;
    lines().map(|line| entry(line, what)).collect()
}

/// Returns how many entries a path of this length counts as: farrier keeps paths in memory, as it does for archives.
pub(super) fn weight(length: usize) -> u64 {
    1 + length as u64 / 256
}

/// Fails when a source has too many entries.
pub(super) fn check_weight(weight: u64, what: &str) -> Result<()> {
    let max_entries = Limits::default().entries;
    if weight > max_entries {
        return Err(refused(what, &format!("more than {max_entries} entries")));
    }
    Ok(())
}

/// Parses `<mode> <type> <id>\t<path>`.
fn entry(line: &[u8], what: &str) -> Result<Entry> {
    let tab = line.iter().position(|byte| *byte == b'\t').ok_or_else(|| damaged(what))?;
    let (head, path) =
        (String::from_utf8_lossy(&line[..tab]), Path::new(OsStr::from_bytes(&line[tab + 1..])));
    let mut words = head.split(' ');
    let (mode, id) = (words.next().unwrap_or_default(), words.nth(1).unwrap_or_default());
    let kind = match mode {
        "120000" => EntryKind::Link,
        "160000" => EntryKind::Submodule,
        "100755" => EntryKind::File { mode: 0o755 },
        _ => EntryKind::File { mode: 0o644 },
    };
    let is_allowed = |part: Component<'_>| matches!(part, Component::Normal(name) if !name.as_bytes().eq_ignore_ascii_case(b".git"));
    let normalized: PathBuf = path.components().collect();
    if !path.components().all(is_allowed)
        || normalized.as_os_str() != path.as_os_str()
        || normalized.as_os_str().is_empty()
    {
        return Err(refused(what, &format!("entry {:?} has an invalid path", path.to_string_lossy())));
    }
    Ok(Entry { path: normalized, kind, id: id.to_owned() })
}

/// Writes the entries, sorted by path. `command` is `git cat-file --batch`, and `ids` a file for its input.
pub(super) fn write(
    mut command: Command,
    entries: &BTreeMap<PathBuf, Entry>,
    ids: &Path,
    output: &Path,
    mtime: u64,
    what: &str,
    stop: &AtomicBool,
) -> Result<()> {
    let mut list = BufWriter::new(File::create(ids)?);
    for entry in entries.values().filter(|entry| entry.kind != EntryKind::Submodule) {
        writeln!(list, "{}", entry.id)?;
    }
    list.flush()?;
    let (input, _) = File::open(ids)?.into_parts();
    let child = command.stdin(input).stderr(Stdio::null()).spawn();
    let mut child = KillOnDrop(child.map_err(|source| FetchError::Start("git", source))?);
    process::limit_memory(child.0.id(), MEMORY);
    let mut objects = BufReader::new(child.0.stdout.take().ok_or_else(|| damaged(what))?);
    let gzip = GzEncoder::new(BufWriter::new(File::create(output)?), Compression::fast());
    let mut archive = tar::Builder::new(gzip);
    let mut quota = Limits::default().bytes;
    for (path, entry) in entries {
        files::check_not_canceled(stop)?;
        let mut header = Header::new_gnu();
        header.set_mtime(mtime);
        header.set_size(0);
        if entry.kind == EntryKind::Submodule {
            header.set_mode(0o755);
            header.set_entry_type(EntryType::Directory);
            archive.append_data(&mut header, path, io::empty())?;
            continue;
        }
        let size = size_of(&mut objects).map_err(|_| damaged(what))?;
        quota =
            quota.checked_sub(size).ok_or_else(|| refused(what, "its files are larger than any source"))?;
        let mut small = Vec::new();
        if size <= MAX_BUFFERED {
            objects.by_ref().take(size).read_to_end(&mut small)?;
        }
        if let EntryKind::File { mode } = entry.kind {
            if size <= LFS.1 && small.starts_with(LFS.0) {
                return Err(lfs(path, what));
            }
            let remainder = objects.by_ref().take(size - small.len() as u64);
            header.set_mode(mode);
            header.set_size(size);
            archive.append_data(&mut header, path, small.as_slice().chain(remainder))?;
        } else {
            if small.is_empty() || small.contains(&0) {
                return Err(refused(what, &format!("link {} has no valid target", path.display())));
            }
            header.set_mode(0o777);
            header.set_entry_type(EntryType::Symlink);
            // `append_link` handles long targets, and shortens `./a` to `a`.
            if header.set_link_name_literal(&small).is_ok() {
                archive.append_data(&mut header, path, io::empty())?;
            } else {
                archive.append_link(&mut header, path, OsStr::from_bytes(&small))?;
            }
        }
        // A line feed follows each object.
        objects.read_exact(&mut [0]).map_err(|_| damaged(what))?;
    }
    Ok(archive.into_inner()?.finish()?.flush()?)
}

/// Reads the line before an object, `<id> blob <size>`, and returns the size.
fn size_of(objects: &mut impl BufRead) -> io::Result<u64> {
    let mut line = String::new();
    objects.take(256).read_line(&mut line)?;
    let size = line.trim_end().split_once(" blob ").and_then(|(_, size)| size.parse().ok());
    size.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, line))
}

/// Program that is killed when this value is dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // A program that has already exited is not an error.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn damaged(what: &str) -> FetchError {
    refused(what, "git cannot read an object or a list of the repository")
}

fn refused(what: &str, why: &str) -> FetchError {
    FetchError::unusable(format!("cannot archive {what}: {why}"), "check the origin of the repository")
}

fn lfs(path: &Path, what: &str) -> FetchError {
    let message = format!("archive {what}: {} is in Git LFS, which farrier does not fetch", path.display());
    FetchError::unusable(message, "name an archive with all files as a `url` or `path` source")
}
