//! Pure: the names of an entry in a tar of others, which may come in entries of their own before it. The tar crate reads such
//! entries into memory without a bound.

use std::{
    ffi::OsString,
    io::{self, Read},
    ops::ControlFlow,
    os::unix::ffi::OsStringExt,
};

use tar::EntryType;

/// Longest extension read: several times the longest path (4,096 bytes) in every record.
pub const MAX_NAME: u64 = 1 << 20;

/// Why an entry's names are not known.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// Longer than any path.
    #[error("archive holds more than {MAX_NAME} bytes in the name of one entry")]
    TooLong,
    /// The name of a file with holes, whose content is not what follows.
    #[error("entry {0:?} is a sparse file")]
    Sparse(String),
    /// Damaged or truncated.
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

/// Shows the entries of a tar with their names, until `look` has found what it looks for.
pub fn each_entry<R: Read, T, E: From<io::Error>>(
    tar: R,
    mut look: impl FnMut(&Names, &mut tar::Entry<'_, R>) -> std::result::Result<ControlFlow<T>, E>,
) -> std::result::Result<Option<T>, E> {
    let mut extensions = Extensions::default();
    for entry in tar::Archive::new(tar).entries()?.raw(true) {
        let mut entry = entry?;
        if extensions.absorb(&mut entry).map_err(io::Error::from)? {
            continue;
        }
        let names = std::mem::take(&mut extensions).names(&entry).map_err(io::Error::from)?;
        if let ControlFlow::Break(found) = look(&names, &mut entry)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// What GNU's and POSIX's extension entries say about the entry that follows them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// What an entry is called, and what it points to if it is a link.
#[derive(Debug)]
pub struct Names {
    /// As it stands in the archive.
    pub path: OsString,
    /// Empty where it is no link.
    pub link: OsString,
}

impl Extensions {
    /// Takes in an extension entry; `false` for any other, which is left unread.
    pub fn absorb(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> Result<bool> {
        match entry.header().entry_type() {
            EntryType::GNULongName => self.path = Some(text(entry)?),
            EntryType::GNULongLink => self.link = Some(text(entry)?),
            EntryType::XHeader => self.records(&data(entry)?).map_err(NameError::Damaged)?,
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
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The names of the entry that the extensions belong to.
    pub fn names(self, entry: &tar::Entry<'_, impl Read>) -> Result<Names> {
        let path = OsString::from_vec(self.path.unwrap_or_else(|| entry.path_bytes().into_owned()));
        let lossy = || path.to_string_lossy().into_owned();
        if self.sparse {
            return Err(NameError::Sparse(lossy()));
        }
        // Only files over 8 GiB need it, and two sizes are how an archive shows two faces.
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

/// A name that ends at the first zero byte.
fn text(entry: &mut tar::Entry<'_, impl Read>) -> Result<Vec<u8>> {
    let mut name = data(entry)?;
    if let Some(end) = name.iter().position(|b| *b == 0) {
        name.truncate(end);
    }
    Ok(name)
}
