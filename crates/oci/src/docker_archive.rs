//! Reads `docker save` archives. Supported formats:
//!
//! - Docker up to version 24 (`<id>/layer.tar`),
//! - Docker from version 25 (an OCI layout with `manifest.json`),
//! - Podman and buildah (`<digest>.tar`).

use std::{
    collections::HashMap,
    io::{self, Read, Seek, SeekFrom},
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Map, Value};
use tar::EntryType;

use super::{MAX_MANIFEST, base::diff_ids, scan::plain_path};

/// Maximum number of entries, more than any archive of one image has.
const MAX_ENTRIES: usize = 10_000;
/// Maximum number of links to follow to a layer. Engines use a single link.
const MAX_LINKS: usize = 8;

/// Error of reading an image archive.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The file is not a tar archive, or is truncated.
    #[error("cannot read image archive")]
    Read(#[from] io::Error),
    /// The archive does not have the form that engines write.
    #[error("image archive: {0}")]
    Invalid(String),
}

/// Byte range in the archive file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub size: u64,
}

/// The only image of an archive.
#[derive(Clone, Debug)]
pub struct ImageArchive {
    /// The configuration's bytes.
    pub config: Vec<u8>,
    /// The layers' blobs, lowest first: tar, sometimes compressed.
    pub layers: Vec<Extent>,
    /// Digests of the layers' tar streams, according to the configuration.
    pub diff_ids: Vec<String>,
}

enum Member {
    File(Extent),
    Link(PathBuf),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ManifestEntry {
    config: String,
    layers: Vec<String>,
}

impl ImageArchive {
    /// Parses an archive. Does not read the layers.
    pub fn open(mut file: impl Read + Seek) -> Result<Self, ArchiveError> {
        let members = members(&mut file)?;
        let list = read_small(&mut file, &members, "manifest.json")?;
        let list: Vec<ManifestEntry> = serde_json::from_slice(&list)
            .map_err(|e| ArchiveError::Invalid(format!("manifest.json is not valid: {e}")))?;
        let [image] = &list[..] else {
            return Err(ArchiveError::Invalid(format!("contains {} images, expected one", list.len())));
        };
        let config = read_small(&mut file, &members, &image.config)?;
        let parsed: Map<String, Value> = serde_json::from_slice(&config)
            .map_err(|e| ArchiveError::Invalid(format!("the image configuration is not valid: {e}")))?;
        let diff_ids = diff_ids(&parsed).filter(|ids| ids.len() == image.layers.len()).ok_or_else(|| {
            ArchiveError::Invalid("the image configuration does not describe the layers".to_owned())
        })?;
        let layers = image.layers.iter().map(|name| find(&members, name)).collect::<Result<_, _>>()?;
        Ok(Self { config, layers, diff_ids })
    }
}

/// Returns a reader of one byte range of an archive.
pub fn part<F: Read + Seek>(file: &mut F, extent: Extent) -> io::Result<io::Take<&mut F>> {
    file.seek(SeekFrom::Start(extent.offset))?;
    Ok(file.take(extent.size))
}

fn members(file: &mut (impl Read + Seek)) -> Result<HashMap<PathBuf, Member>, ArchiveError> {
    file.seek(SeekFrom::Start(0))?;
    let mut archive = tar::Archive::new(file);
    let mut members = HashMap::new();
    for (number, entry) in archive.entries_with_seek()?.enumerate() {
        if number == MAX_ENTRIES {
            return Err(ArchiveError::Invalid(format!("contains more than {MAX_ENTRIES} entries")));
        }
        let entry = entry?;
        let Some(path) = plain_path(&entry.path()?) else { continue };
        let member = match entry.header().entry_type() {
            EntryType::Regular => {
                Some(Member::File(Extent { offset: entry.raw_file_position(), size: entry.size() }))
            }
            // Engines write a layer once, and link to it if it occurs again.
            EntryType::Symlink => entry.link_name()?.and_then(|to| resolve(&path, &to)).map(Member::Link),
            EntryType::Link => entry.link_name()?.and_then(|to| plain_path(&to)).map(Member::Link),
            _ => None,
        };
        members.extend(member.map(|member| (path, member)));
    }
    Ok(members)
}

/// Returns the target of a symbolic link as a path in the archive. Returns `None` if the link leads outside.
fn resolve(link: &Path, target: &Path) -> Option<PathBuf> {
    let mut resolved = link.parent()?.to_owned();
    for component in target.components() {
        match component {
            Component::Normal(name) => resolved.push(name),
            Component::ParentDir if resolved.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(resolved)
}

fn find(members: &HashMap<PathBuf, Member>, name: &str) -> Result<Extent, ArchiveError> {
    let mut path = Path::new(name);
    for _ in 0..MAX_LINKS {
        match members.get(path) {
            Some(Member::File(extent)) => return Ok(*extent),
            Some(Member::Link(target)) => path = target,
            None => break,
        }
    }
    let name: String = name.chars().take(120).collect();
    Err(ArchiveError::Invalid(format!("{name:?} is missing")))
}

fn read_small(
    file: &mut (impl Read + Seek),
    members: &HashMap<PathBuf, Member>,
    name: &str,
) -> Result<Vec<u8>, ArchiveError> {
    let extent = find(members, name)?;
    if extent.size > MAX_MANIFEST as u64 {
        return Err(ArchiveError::Invalid(format!("{name:?} has {} bytes", extent.size)));
    }
    let mut bytes = Vec::new();
    part(file, extent)?.read_to_end(&mut bytes)?;
    if bytes.len() as u64 != extent.size {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::Digest;

    fn archive(members: &[(&str, &[u8])], links: &[(&str, &str)]) -> Cursor<Vec<u8>> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, content) in members {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, path, *content).unwrap();
        }
        for (path, target) in links {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(EntryType::Symlink);
            header.set_size(0);
            builder.append_link(&mut header, path, target).unwrap();
        }
        Cursor::new(builder.into_inner().unwrap())
    }

    fn config(layers: &[&[u8]]) -> Vec<u8> {
        let ids: Vec<_> = layers.iter().map(|l| Digest::of(l).to_string()).collect();
        serde_json::json!({"rootfs": {"type": "layers", "diff_ids": ids}}).to_string().into_bytes()
    }

    #[test]
    fn an_archive_of_docker_20_with_a_repeated_layer_is_read() {
        let config = config(&[b"one", b"two", b"one"]);
        let list =
            br#"[{"Config":"c.json","RepoTags":null,"Layers":["a/layer.tar","b/layer.tar","c/layer.tar"]}]"#;
        let mut file = archive(
            &[("a/layer.tar", b"one"), ("b/layer.tar", b"two"), ("c.json", &config), ("manifest.json", list)],
            &[("c/layer.tar", "../a/layer.tar")],
        );
        let image = ImageArchive::open(&mut file).unwrap();
        assert_eq!(image.config, config);
        let mut contents = Vec::new();
        for extent in &image.layers {
            let mut text = String::new();
            part(&mut file, *extent).unwrap().read_to_string(&mut text).unwrap();
            contents.push(text);
        }
        assert_eq!(contents, ["one", "two", "one"]);
    }

    #[test]
    fn invalid_archives_are_rejected() {
        let error = |members: &[(&str, &[u8])], links: &[(&str, &str)]| {
            ImageArchive::open(archive(members, links)).unwrap_err().to_string()
        };
        assert_eq!(error(&[], &[]), r#"image archive: "manifest.json" is missing"#);
        assert_eq!(error(&[("manifest.json", b"[]")], &[]), "image archive: contains 0 images, expected one");
        let outside = br#"[{"Config":"../../etc/passwd","Layers":[]}]"#;
        assert_eq!(
            error(&[("manifest.json", outside)], &[]),
            r#"image archive: "../../etc/passwd" is missing"#
        );
        let cycle = error(&[], &[("manifest.json", "x"), ("x", "manifest.json")]);
        assert_eq!(cycle, r#"image archive: "manifest.json" is missing"#);
        let list = br#"[{"Config":"c","Layers":["l"]}]"#;
        let no_layers = error(&[("manifest.json", list), ("c", b"{}"), ("l", b"")], &[]);
        assert_eq!(no_layers, "image archive: the image configuration does not describe the layers");
    }
}
