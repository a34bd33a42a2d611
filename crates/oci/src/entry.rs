//! Names of tar entries from untrusted archives. Long names are in extension entries before the entry itself. The tar crate reads
//! extension entries into memory without a limit. This module limits their size.

use std::{
    ffi::OsString,
    io::{self, Read},
    ops::ControlFlow,
    os::unix::ffi::OsStringExt,
    str::FromStr,
};

use tar::EntryType;

/// Maximum size of an extension entry, many times the size of the longest path (4,096 bytes).
pub const MAX_NAME: u64 = 1 << 20;

/// Reason why the names of an entry cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// The extension entry is larger than [`MAX_NAME`].
    #[error("archive has an entry with a name longer than {MAX_NAME} bytes")]
    TooLong,
    /// The entry is a sparse file, whose stored bytes are not its content. Contains its name.
    #[error("entry {0:?} is a sparse file")]
    Sparse(String),
    /// The archive is damaged or truncated.
    #[error("archive is damaged or truncated")]
    Damaged(#[source] io::Error),
}

impl From<NameError> for io::Error {
    fn from(error: NameError) -> Self {
        match error {
            NameError::Damaged(error) => error,
            other => Self::new(io::ErrorKind::InvalidData, other),
        }
    }
}

type Result<T> = std::result::Result<T, NameError>;

/// Calls `visit` with each entry of a tar archive and its names, until `visit` breaks with a result.
pub fn each_entry<R: Read, T, E: From<io::Error>>(
    tar: R,
    mut visit: impl FnMut(&Names, &mut tar::Entry<'_, R>) -> std::result::Result<ControlFlow<T>, E>,
) -> std::result::Result<Option<T>, E> {
    let mut extensions = Extensions::default();
    for entry in tar::Archive::new(tar).entries()?.raw(true) {
        let mut entry = entry?;
        if extensions.record(&mut entry).map_err(io::Error::from)? {
            continue;
        }
        let names = std::mem::take(&mut extensions).names(&entry).map_err(io::Error::from)?;
        if let ControlFlow::Break(result) = visit(&names, &mut entry)? {
            return Ok(Some(result));
        }
    }
    Ok(None)
}

/// Values of GNU and POSIX extension entries, which apply to the next entry.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// Path of an entry, and the target if it is a link.
#[derive(Debug)]
pub struct Names {
    /// Unaltered path from the archive.
    pub path: OsString,
    /// Link target. Empty if the entry is not a link.
    pub link: OsString,
}

/// Parses a decimal number.
fn number<T: FromStr>(digits: &[u8]) -> Option<T> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

impl Extensions {
    /// Records an extension entry. Returns `false` for any other entry, whose content is not read.
    pub fn record(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> Result<bool> {
        match entry.header().entry_type() {
            EntryType::GNULongName => self.path = Some(text(entry)?),
            EntryType::GNULongLink => self.link = Some(text(entry)?),
            EntryType::XHeader => self.records(&data(entry)?).map_err(NameError::Damaged)?,
            // Global headers apply to the whole archive, so they cannot contain names. git stores a comment in one.
            EntryType::XGlobalHeader => drop(data(entry)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Parses POSIX records of the form `<length> <key>=<value>\n`. The length is that of the whole record.
    fn records(&mut self, mut remaining: &[u8]) -> io::Result<()> {
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "malformed extended header");
        while !remaining.is_empty() {
            let space = remaining.iter().position(|b| *b == b' ').ok_or_else(malformed)?;
            let length: usize = number(&remaining[..space]).ok_or_else(malformed)?;
            let record = remaining.get(space + 1..length).ok_or_else(malformed)?;
            let record = record.strip_suffix(b"\n").ok_or_else(malformed)?;
            let equals = record.iter().position(|b| *b == b'=').ok_or_else(malformed)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.path = Some(value.to_owned()),
                b"linkpath" => self.link = Some(value.to_owned()),
                b"size" => self.size = Some(number(value).ok_or_else(malformed)?),
                _ if key.starts_with(b"GNU.sparse.") => self.sparse = true,
                _ => {}
            }
            remaining = &remaining[length..];
        }
        Ok(())
    }

    /// Whether no extension entry was recorded.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the names of the entry that follows the extension entries.
    pub fn names(self, entry: &tar::Entry<'_, impl Read>) -> Result<Names> {
        let path = OsString::from_vec(self.path.unwrap_or_else(|| entry.path_bytes().into_owned()));
        let lossy = || path.to_string_lossy().into_owned();
        if self.sparse {
            return Err(NameError::Sparse(lossy()));
        }
        // Reject a size that contradicts the header, because other tools could read different content from the same archive. Only
        // files over 8 GiB need this record.
        if self.size.is_some_and(|size| size != entry.size()) {
            return Err(NameError::Damaged(io::Error::new(
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
    if size > MAX_NAME {
        return Err(NameError::TooLong);
    }
    let mut data = Vec::new();
    entry.take(MAX_NAME).read_to_end(&mut data).map_err(NameError::Damaged)?;
    if data.len() as u64 == size {
        Ok(data)
    } else {
        Err(NameError::Damaged(io::ErrorKind::UnexpectedEof.into()))
    }
}

/// Reads a name, which ends at the first zero byte.
fn text(entry: &mut tar::Entry<'_, impl Read>) -> Result<Vec<u8>> {
    let mut name = data(entry)?;
    if let Some(end) = name.iter().position(|b| *b == 0) {
        name.truncate(end);
    }
    Ok(name)
}
