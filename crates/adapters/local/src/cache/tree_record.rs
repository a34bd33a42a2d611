//! Detects changes to cached trees since farrier made them. If build steps run as the cache's owner, a step that escapes the
//! sandbox could change the trees of later builds.

use std::{
    ffi::{CStr, CString},
    io::{self, Read as _, Write},
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use fs_err as fs;
use oci::Hashing;
use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, statat},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::{Cache, CacheError, LockMode};
use crate::blocking::blocking;

/// Kinds whose entries are trees that build steps read in place.
const KINDS: [&str; 2] = ["headers", "trees"];
/// Name of the tree in such an entry.
const TREE: &str = "tree";
/// Name of the record, next to the tree: steps only see the tree.
const RECORD: &str = "tree.json";
/// Format version; change it whenever the digests are computed differently.
const FORMAT: &str = "tree-record-1";

/// State of a tree when farrier made it. Both digests are SHA-256 in hexadecimal form.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TreeRecord {
    /// Digest over path, type, size, mode, inode, change time and link target of each entry. Programs cannot set a change time,
    /// unlike a modification time.
    metadata: String,
    /// Digest over path, type, mode, and content or link target of each entry.
    content: String,
}

/// Result of comparing a tree with its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TreeState {
    Intact,
    /// There is no record, or it has another format.
    Unrecorded,
    Changed,
}

/// Reason why a tree has no digest.
enum WalkError {
    /// The tree contains something that farrier never puts into a tree.
    Foreign,
    Io(io::Error),
}

impl From<io::Error> for WalkError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{InvalidFilename, IsADirectory, NotADirectory, NotFound, PermissionDenied};
        match error.kind() {
            InvalidFilename | IsADirectory | NotADirectory | NotFound | PermissionDenied => Self::Foreign,
            _ => Self::Io(error),
        }
    }
}

impl From<Errno> for WalkError {
    fn from(error: Errno) -> Self {
        match error {
            // A symbolic link has replaced a directory.
            Errno::LOOP => Self::Foreign,
            _ => io::Error::from(error).into(),
        }
    }
}

impl Cache {
    /// Whether a cached tree is unchanged since farrier made it. A changed tree is moved to the quarantine, with a warning, and
    /// the next caller who gets the entry makes the tree again. Trees outside the cache count as intact.
    pub async fn is_tree_intact(&self, tree: &Path) -> Result<bool, CacheError> {
        let Some((entry, kind, key)) = self.entry_of(tree) else { return Ok(true) };
        let entry_to_verify = entry.clone();
        if blocking(move || verify(&entry_to_verify)).await? == TreeState::Intact {
            return Ok(true);
        }
        // Another build may have found the same change and already made the tree again.
        let _lock = self.lock(&kind, &key, LockMode::Exclusive).await?;
        let entry_to_verify = entry.clone();
        let state = blocking(move || verify(&entry_to_verify)).await?;
        if state == TreeState::Intact {
            return Ok(true);
        }
        if entry.exists() {
            self.move_to_quarantine(&entry, state)?;
        }
        Ok(false)
    }

    fn move_to_quarantine(&self, entry: &Path, state: TreeState) -> Result<(), CacheError> {
        let new_path = self.quarantine().set_aside(entry)?;
        let (path, quarantine) = (entry.display(), new_path.display());
        if state == TreeState::Unrecorded {
            tracing::info!(%path, %quarantine, "a cached tree has no record of its content and is rebuilt");
        } else {
            tracing::warn!(
                %path,
                %quarantine,
                "a cached tree was modified: moved it to the quarantine and rebuilding it; find out what \
                 wrote to the cache, and distrust builds made since then"
            );
        }
        Ok(())
    }

    /// Returns the path, kind and key of the entry that a tree belongs to.
    fn entry_of(&self, tree: &Path) -> Option<(PathBuf, String, String)> {
        let entry = tree.parent().filter(|_| tree.ends_with(TREE))?;
        let mut names = entry.strip_prefix(self.root()).ok()?.iter();
        let (kind, key) = (names.next()?.to_str()?, names.next()?.to_str()?);
        let is_entry = names.next().is_none() && KINDS.contains(&kind);
        is_entry.then(|| (entry.to_owned(), kind.to_owned(), key.to_owned()))
    }
}

/// Records the tree of a new entry, if entries of its kind have a record.
pub(super) async fn record(kind: &str, entry: &Path) -> Result<(), CacheError> {
    if !KINDS.contains(&kind) || !entry.join(TREE).is_dir() {
        return Ok(());
    }
    let entry = entry.to_owned();
    Ok(blocking(move || {
        let tree = entry.join(TREE);
        let digest_of = |kind_of_digest| {
            digest(&tree, kind_of_digest).map_err(|error| match error {
                WalkError::Foreign => io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("record {}: its content cannot be read", tree.display()),
                ),
                WalkError::Io(error) => error,
            })
        };
        // Digest the metadata first: a write during the content digest then shows in the next comparison.
        let metadata = digest_of(DigestKind::Metadata)?;
        write(&entry, &TreeRecord { metadata, content: digest_of(DigestKind::Content)? })
    })
    .await?)
}

/// Compares the tree of an entry with its record. Writes a new record if only the metadata differs, as in a copied cache.
fn verify(entry: &Path) -> io::Result<TreeState> {
    let tree = entry.join(TREE);
    let record = fs::read(entry.join(RECORD)).ok();
    let Some(record) = record.and_then(|bytes| serde_json::from_slice::<TreeRecord>(&bytes).ok()) else {
        return Ok(TreeState::Unrecorded);
    };
    let outcome = digest(&tree, DigestKind::Metadata).and_then(|metadata| {
        if metadata == record.metadata {
            return Ok(TreeState::Intact);
        }
        let content = digest(&tree, DigestKind::Content)?;
        if content != record.content {
            return Ok(TreeState::Changed);
        }
        // If the record cannot be written, the next comparison reads the contents again.
        if let Err(error) = write(entry, &TreeRecord { metadata, content }) {
            tracing::warn!(path = %entry.display(), %error, "cannot write the record of a cached tree");
        }
        Ok(TreeState::Intact)
    });
    match outcome {
        Ok(state) => Ok(state),
        Err(WalkError::Foreign) => Ok(TreeState::Changed),
        Err(WalkError::Io(error)) => Err(error),
    }
}

fn write(entry: &Path, record: &TreeRecord) -> io::Result<()> {
    let file = NamedTempFile::with_prefix_in(".tmp-", entry)?;
    serde_json::to_writer(&file, record)?;
    file.persist(entry.join(RECORD))?;
    Ok(())
}

/// Maximum depth of a tree. farrier unpacks at most 64 levels, and each open level holds a descriptor here.
const MAX_DEPTH: usize = 80;
/// Marks the end of a directory, in the position of the next name's length.
const END: [u8; 8] = [0xff; 8];
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const FILE: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

#[derive(Clone, Copy, PartialEq, Eq)]
enum DigestKind {
    Metadata,
    Content,
}

/// Returns the digest of a tree: entries in name order, each directory followed directly by its content. Links are not followed.
///
/// A build waits for the digest of tens of thousands of entries, so each entry costs one system call, relative to an open
/// directory.
fn digest(tree: &Path, kind: DigestKind) -> Result<String, WalkError> {
    let mut hasher = io::BufWriter::with_capacity(64 << 10, Hashing::new(io::sink()));
    write_with_length(&mut hasher, FORMAT.as_bytes())?;
    let root = openat(CWD, tree, DIRECTORY, Mode::empty())?;
    add_stat(&mut hasher, &fstat(&root)?, kind)?;
    let mut levels = vec![Level::of(root)?];
    while let Some(Level { directory, names }) = levels.last_mut() {
        let Some(name) = names.next() else {
            hasher.write_all(&END)?;
            levels.pop();
            continue;
        };
        let directory = directory.fd()?;
        if let Some(subdirectory) = add(&mut hasher, directory, &name, kind)? {
            if levels.len() == MAX_DEPTH {
                return Err(WalkError::Foreign);
            }
            levels.push(Level::of(subdirectory)?);
        }
    }
    let (_, digest, _) = hasher.into_inner().map_err(io::IntoInnerError::into_error)?.into_parts();
    Ok(digest.hex().to_owned())
}

/// An open directory of the walk, with its remaining entries.
struct Level {
    directory: Dir,
    names: std::vec::IntoIter<CString>,
}

impl Level {
    fn of(directory: OwnedFd) -> Result<Self, WalkError> {
        let mut directory = Dir::new(directory)?;
        let mut names = Vec::new();
        while let Some(entry) = directory.read() {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        names.sort_unstable();
        Ok(Self { directory, names: names.into_iter() })
    }
}

/// Adds an entry to the digest. Returns the opened directory if the entry is one.
fn add(
    hasher: &mut impl Write,
    parent: BorrowedFd<'_>,
    name: &CStr,
    kind: DigestKind,
) -> Result<Option<OwnedFd>, WalkError> {
    let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    write_with_length(hasher, name.to_bytes())?;
    add_stat(hasher, &stat, kind)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => return Ok(Some(openat(parent, name, DIRECTORY, Mode::empty())?)),
        FileType::Symlink => write_with_length(hasher, readlinkat(parent, name, Vec::new())?.as_bytes())?,
        FileType::RegularFile if kind == DigestKind::Content => {
            let file = std::fs::File::from(openat(parent, name, FILE, Mode::empty())?);
            // Read at most one byte beyond the file's size: a file that grows during the read gets another digest.
            let size = u64::try_from(stat.st_size).unwrap_or_default();
            hasher.write_all(&size.to_le_bytes())?;
            let read = io::copy(&mut file.take(size.saturating_add(1)), hasher)?;
            hasher.write_all(&read.to_le_bytes())?;
        }
        FileType::RegularFile => {}
        _ => return Err(WalkError::Foreign),
    }
    Ok(None)
}

/// Adds an entry's metadata. The mode includes the type.
fn add_stat(hasher: &mut impl Write, stat: &Stat, kind: DigestKind) -> io::Result<()> {
    hasher.write_all(&stat.st_mode.to_le_bytes())?;
    if kind == DigestKind::Content {
        return Ok(());
    }
    // Omit a directory's size: the digest already covers the directory's entries.
    let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let size = if is_directory { 0 } else { stat.st_size };
    hasher.write_all(&size.to_le_bytes())?;
    hasher.write_all(&stat.st_ino.to_le_bytes())?;
    hasher.write_all(&stat.st_ctime.to_le_bytes())?;
    hasher.write_all(&stat.st_ctime_nsec.to_le_bytes())
}

/// Writes bytes preceded by their length, so that no two lists of texts produce the same digest input.
fn write_with_length(writer: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    writer.write_all(&(bytes.len() as u64).to_le_bytes())?;
    writer.write_all(bytes)
}

#[cfg(test)]
#[path = "tree_record_tests.rs"]
mod tests;
