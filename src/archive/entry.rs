//! Pure: an entry's names, which may come in entries of their own before it.

use std::{
    ffi::OsString,
    io::{self, Read},
    os::unix::ffi::OsStringExt,
};

use tar::EntryType;

use super::{Result, UnpackError};

/// Longest extension read: several times the longest path (4,096 bytes) in every record.
const LIMIT: u64 = 1 << 20;

/// What GNU's and POSIX's extension entries say about the entry that follows them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// What an entry is called, and what it points to if it is a link.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) path: OsString,
    pub(super) link: OsString,
}

impl Extensions {
    /// Takes in an extension entry; `false` for any other, which is left unread.
    pub(super) fn absorb(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> Result<bool> {
        match entry.header().entry_type() {
            EntryType::GNULongName => self.path = Some(text(entry)?),
            EntryType::GNULongLink => self.link = Some(text(entry)?),
            EntryType::XHeader => self.records(&data(entry)?).map_err(UnpackError::Damaged)?,
            // Defaults for the whole archive: git puts a comment there. No name can be common to all.
            EntryType::XGlobalHeader => drop(data(entry)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// POSIX's records, `<length> <key>=<value>\n`, the length counting the whole record.
    fn records(&mut self, mut rest: &[u8]) -> io::Result<()> {
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed extended header");
        while !rest.is_empty() {
            let space = rest.iter().position(|b| *b == b' ').ok_or_else(malformed)?;
            let length: usize = std::str::from_utf8(&rest[..space])
                .ok()
                .and_then(|digits| digits.parse().ok())
                .ok_or_else(malformed)?;
            let record = rest.get(space + 1..length).ok_or_else(malformed)?;
            let record = record.strip_suffix(b"\n").ok_or_else(malformed)?;
            let equals = record.iter().position(|b| *b == b'=').ok_or_else(malformed)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.path = Some(value.to_owned()),
                b"linkpath" => self.link = Some(value.to_owned()),
                b"size" => {
                    let size = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                    self.size = Some(size.ok_or_else(malformed)?);
                }
                _ if key.starts_with(b"GNU.sparse.") => self.sparse = true,
                _ => {}
            }
            rest = &rest[length..];
        }
        Ok(())
    }

    /// Whether nothing was said.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The names of the entry that the extensions belong to.
    pub(super) fn names(self, entry: &tar::Entry<'_, impl Read>) -> Result<Names> {
        let path = OsString::from_vec(self.path.unwrap_or_else(|| entry.path_bytes().into_owned()));
        let lossy = || path.to_string_lossy().into_owned();
        if self.sparse {
            return Err(UnpackError::Kind(lossy(), "sparse file"));
        }
        // Only files over 8 GiB need it, and two sizes are how an archive shows two faces.
        if self.size.is_some_and(|size| size != entry.size()) {
            return Err(UnpackError::Damaged(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("entry {:?} has two sizes", lossy()),
            )));
        }
        let link = self.link.or_else(|| entry.link_name_bytes().map(std::borrow::Cow::into_owned));
        Ok(Names { path, link: OsString::from_vec(link.unwrap_or_default()) })
    }
}

fn data(entry: &mut tar::Entry<'_, impl Read>) -> Result<Vec<u8>> {
    let size = entry.size();
    if size > LIMIT {
        return Err(UnpackError::Limit(format!("{LIMIT} bytes in the name of one entry")));
    }
    let mut data = Vec::new();
    entry.take(LIMIT).read_to_end(&mut data).map_err(UnpackError::Damaged)?;
    if data.len() as u64 == size { Ok(data) } else { Err(super::truncated()) }
}

/// A name that ends at the first zero byte.
fn text(entry: &mut tar::Entry<'_, impl Read>) -> Result<Vec<u8>> {
    let mut name = data(entry)?;
    if let Some(end) = name.iter().position(|b| *b == 0) {
        name.truncate(end);
    }
    Ok(name)
}

/// What an entry that is refused is called.
pub(super) fn kind(entry_type: EntryType) -> &'static str {
    match entry_type {
        EntryType::Block | EntryType::Char => "device",
        EntryType::Fifo => "FIFO",
        EntryType::GNUSparse => "sparse file",
        _ => "special entry",
    }
}
