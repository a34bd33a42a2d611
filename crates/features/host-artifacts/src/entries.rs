//! Entries of the archives that a host unpacks.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::payload::HostPayload;

/// Entries of an archive by path.
pub(super) type Entries = BTreeMap<PathBuf, Entry>;

pub(super) enum Entry {
    Directory,
    /// An unpacked file or symbolic link of the payload.
    Payload(PathBuf),
    /// Content that farrier writes: a script or a text.
    Text(Vec<u8>),
}

impl HostPayload {
    /// Returns the modules and the firmware.
    pub(super) fn entries(&self) -> Entries {
        self.files.iter().map(|(path, file)| (path.clone(), Entry::Payload(file.clone()))).collect()
    }
}

/// Adds the directories that contain the entries.
pub(super) fn with_directories(mut entries: Entries) -> Entries {
    let parents: Vec<PathBuf> =
        entries.keys().flat_map(|path| path.ancestors().skip(1)).map(Path::to_owned).collect();
    let parents = parents.into_iter().filter(|directory| !directory.as_os_str().is_empty());
    entries.extend(parents.map(|directory| (directory, Entry::Directory)));
    entries
}
