//! Reads layers of other tools: decompresses them, and looks up single entries.

use std::{
    ffi::OsStr,
    io::{self, BufRead, BufReader, Read},
    ops::ControlFlow,
    os::unix::ffi::OsStrExt as _,
    path::{Component, Path, PathBuf},
};

use flate2::bufread::MultiGzDecoder;
use tar::EntryType;

use super::each_entry;

/// Tar stream of a layer with any supported compression. Detects the compression by the first bytes, because media types can be
/// wrong, and `docker save` states none.
pub struct LayerReader<'a>(Box<dyn Read + Send + 'a>);

impl<'a> LayerReader<'a> {
    /// Detects the compression from the first bytes.
    pub fn new(blob: impl Read + Send + 'a) -> io::Result<Self> {
        let mut blob = BufReader::with_capacity(128 << 10, blob);
        let start = blob.fill_buf()?;
        Ok(Self(if start.starts_with(&[0x1f, 0x8b]) {
            // gzip allows several members in sequence (pigz, eStargz).
            Box::new(MultiGzDecoder::new(blob))
        } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            Box::new(zstd::Decoder::with_buffer(blob)?)
        } else {
            Box::new(blob)
        }))
    }
}

impl Read for LayerReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

/// Content of one layer at a name in the image's root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopLevel {
    /// A symbolic link.
    Symlink(PathBuf),
    /// Anything else that exists.
    Other,
    /// Deleted by this layer.
    Deleted,
}

/// Looks up a name in the root of a layer's tar stream. Stops at the first match, because the OCI image spec allows only one entry
/// for each path in a layer.
pub fn top_level_entry(tar: impl Read, name: &str) -> io::Result<Option<TopLevel>> {
    let whiteout = format!(".wh.{name}");
    each_entry(tar, |names, entry| {
        let path = plain_path(Path::new(&names.path));
        Ok(match (path, entry.header().entry_type()) {
            (Some(path), EntryType::Symlink) if path == Path::new(name) => {
                ControlFlow::Break(TopLevel::Symlink(PathBuf::from(&names.link)))
            }
            (Some(path), _) if path == Path::new(name) => ControlFlow::Break(TopLevel::Other),
            (Some(path), _) if path == Path::new(&whiteout) => ControlFlow::Break(TopLevel::Deleted),
            _ => ControlFlow::Continue(()),
        })
    })
}

/// Content of lower layers that a whiteout deletes (OCI image spec, `layer.md`, "whiteouts").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whiteout<'a> {
    /// Everything that lower layers have in the whiteout's directory.
    Opaque,
    /// The entry with this name in the whiteout's directory. The name is a plain file name.
    Of(&'a OsStr),
}

impl<'a> Whiteout<'a> {
    const PREFIX: &'static [u8] = b".wh.";

    /// Parses a file name; `None` if it is not a whiteout.
    pub fn of(name: &'a OsStr) -> Option<Self> {
        match name.as_bytes().strip_prefix(Self::PREFIX)? {
            b".wh..opq" => Some(Self::Opaque),
            // These names would lead out of the directory.
            b"" | b"." | b".." => None,
            name => Some(Self::Of(OsStr::from_bytes(name))),
        }
    }

    /// Whether any runtime might treat the name as a whiteout.
    pub(crate) fn may_be(name: &OsStr) -> bool {
        name.as_bytes().starts_with(Self::PREFIX)
    }
}

/// Returns the path of an entry below the image's root, without `./`, a leading `/` or inner `.`. Returns `None` for the root itself
/// and for paths with `..`.
pub fn plain_path(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => plain.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (plain.components().next().is_some()).then_some(plain)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn tar_of(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, kind, link) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_size(0);
            header.set_mode(0o755);
            if *kind == EntryType::Symlink {
                builder.append_link(&mut header, path, link).unwrap();
            } else {
                builder.append_data(&mut header, path, io::empty()).unwrap();
            }
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn entries_are_found_in_every_compression() {
        let tar = tar_of(&[
            ("./", EntryType::Directory, ""),
            ("./bin/lib", EntryType::Regular, ""),
            ("./lib", EntryType::Symlink, "usr/lib"),
        ]);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&tar).unwrap();
        for blob in [tar.clone(), gzip.finish().unwrap(), zstd::encode_all(&tar[..], 1).unwrap()] {
            let mut plain = Vec::new();
            LayerReader::new(&blob[..]).unwrap().read_to_end(&mut plain).unwrap();
            assert_eq!(plain, tar);
            let found = top_level_entry(LayerReader::new(&blob[..]).unwrap(), "lib").unwrap();
            assert_eq!(found, Some(TopLevel::Symlink("usr/lib".into())));
        }
    }

    #[test]
    fn directories_deletions_and_missing_entries_are_distinguished() {
        let find = |tar: &[u8]| top_level_entry(tar, "lib").unwrap();
        assert_eq!(find(&tar_of(&[("lib/", EntryType::Directory, "")])), Some(TopLevel::Other));
        assert_eq!(find(&tar_of(&[(".wh.lib", EntryType::Regular, "")])), Some(TopLevel::Deleted));
        assert_eq!(find(&tar_of(&[("lib/x", EntryType::Regular, "")])), None);
        assert!(top_level_entry(&tar_of(&[("a", EntryType::Regular, "")])[..100], "lib").is_err());
    }

    #[test]
    fn too_long_names_are_not_read_into_memory() {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(1 << 32);
        header.set_cksum();
        let endless = header.as_bytes().chain(io::repeat(b'a'));
        let error = top_level_entry(endless, "lib").unwrap_err();
        assert!(error.to_string().contains("a name longer than 1048576 bytes"), "{error}");
    }

    #[test]
    fn paths_are_normalized() {
        for (path, plain) in [
            ("./lib/x", Some("lib/x")),
            ("/lib", Some("lib")),
            ("../x", None),
            ("a/../b", None),
            ("./", None),
        ] {
            assert_eq!(plain_path(Path::new(path)), plain.map(PathBuf::from), "{path}");
        }
    }
}
