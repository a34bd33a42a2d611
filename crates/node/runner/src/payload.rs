//! Sends `/out` as a tar archive, in the form in which container engines export a directory.

use std::{
    collections::HashMap,
    fs::{self, File, Metadata},
    io::{self, Read as _, Write},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use runner::wire::{Message, Outcome};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};
use walkdir::WalkDir;

use crate::{
    messages::Messages,
    rooted::{Root, path_of},
};

/// Sends the tree at `/out` as `out/...`. Without `/out` the archive is empty, and farrier reports that it is missing.
pub fn send_payload(messages: &Messages, root: &Root) -> io::Result<Outcome> {
    let mut writer =
        io::BufWriter::with_capacity(256 << 10, PayloadWriter { messages, size: 0, hash: Sha256::new() });
    match root.existing_directory(Path::new("/out")) {
        Ok(out) => write_tar(&mut writer, &path_of(&out))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Builder::new(&mut writer).finish()?,
        Err(error) => return Err(error),
    }
    let PayloadWriter { size, hash, .. } = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
    Ok(Outcome::Done { size, sha256: hash.finalize().into() })
}

/// Writes the tree at `out` as a tar archive. `out` may be a symbolic link.
fn write_tar(to: impl Write, out: &Path) -> io::Result<()> {
    let mut tar = Builder::new(to);
    let mut first_links: HashMap<(u64, u64), PathBuf> = HashMap::new();
    // With a trailing slash, the kernel follows the link.
    let out = &out.join("");
    for entry in WalkDir::new(out).sort_by_file_name() {
        let entry = entry?;
        let relative = entry.path().strip_prefix(out).map_err(io::Error::other)?;
        let name: PathBuf = Path::new("out").components().chain(relative.components()).collect();
        let metadata =
            if entry.depth() == 0 { fs::metadata(out)? } else { entry.path().symlink_metadata()? };
        let mut header = header(&metadata);
        if metadata.is_dir() {
            header.set_entry_type(EntryType::Directory);
            tar.append_data(&mut header, &name, io::empty())?;
        } else if metadata.is_symlink() {
            header.set_entry_type(EntryType::Symlink);
            tar.append_link(&mut header, &name, fs::read_link(entry.path())?)?;
        } else if let Some(first_link) = first_links.get(&(metadata.dev(), metadata.ino())) {
            header.set_entry_type(EntryType::Link);
            tar.append_link(&mut header, &name, first_link)?;
        } else if metadata.is_file() {
            header.set_size(metadata.len());
            tar.append_data(&mut header, &name, File::open(entry.path())?.take(metadata.len()))?;
        } else if metadata.file_type().is_fifo() {
            // farrier refuses the FIFO when it reads the archive, and names the FIFO in the error.
            header.set_entry_type(EntryType::Fifo);
            tar.append_data(&mut header, &name, io::empty())?;
        }
        if metadata.is_file() && metadata.nlink() > 1 {
            first_links.entry((metadata.dev(), metadata.ino())).or_insert(name);
        }
    }
    tar.into_inner().map(drop)
}

/// Returns a header with the owner root, and with the entry's mode and modification time.
fn header(metadata: &Metadata) -> Header {
    let mut header = Header::new_gnu();
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header.set_mode(metadata.mode() & 0o7777);
    header.set_mtime(u64::try_from(metadata.mtime()).unwrap_or_default());
    header
}

struct PayloadWriter<'a> {
    messages: &'a Messages,
    size: u64,
    hash: Sha256,
}

impl Write for PayloadWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.messages.send(&Message::Payload(bytes.to_vec()))?;
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn links_modes_and_fifos_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("tree");
        fs::create_dir_all(out.join("sub")).unwrap();
        fs::write(out.join("sub/a"), "text").unwrap();
        fs::set_permissions(out.join("sub/a"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::hard_link(out.join("sub/a"), out.join("sub/b")).unwrap();
        symlink("a", out.join("sub/c")).unwrap();
        let mut bytes = Vec::new();
        write_tar(&mut bytes, &out).unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let found: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let path = entry.path().unwrap().display().to_string();
                (path, entry.header().entry_type(), entry.header().mode().unwrap(), entry.size())
            })
            .collect();
        let expected = [
            ("out", EntryType::Directory, 0o755, 0),
            ("out/sub", EntryType::Directory, 0o755, 0),
            ("out/sub/a", EntryType::Regular, 0o4755, 4),
            ("out/sub/b", EntryType::Link, 0o4755, 0),
            ("out/sub/c", EntryType::Symlink, 0o777, 0),
        ];
        assert_eq!(found, expected.map(|(path, kind, mode, size)| (path.to_owned(), kind, mode, size)));
    }

    #[test]
    fn a_missing_payload_is_an_empty_archive() {
        let dir = tempfile::tempdir().unwrap();
        let messages = Messages::in_file(File::create(dir.path().join("messages")).unwrap());
        let empty = Sha256::digest([0; 1024]).into();
        let outcome = send_payload(&messages, &Root::open(dir.path()).unwrap()).unwrap();
        assert_eq!(outcome, Outcome::Done { size: 1024, sha256: empty });
        fs::write(dir.path().join("out"), "a file").unwrap();
        assert!(send_payload(&messages, &Root::open(dir.path()).unwrap()).is_err());
    }
}
