//! Adapter: sources and root file systems in the store beside the images.
//!
//! Each stands there under two tags: one made from what it holds, which never changes, and one made from what the
//! definition says, by which a site that cannot ask upstream finds what another one found there last.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use super::{
    FetchError, Fetcher, RootFs, SourceIdentity, apt,
    blocking::blocking,
    bootstrap::{self, LAYER},
    bootstrap_key, digest, io_error,
    source::{TREE, content_key},
    unpack,
};
use crate::{
    image::{AptSource, Digest, MinimalSpec, SourceOrigin, SourceSpec, Tag},
    kernel::{Architecture, BootstrapSpec},
    oci::{Descriptor, Layer, annotations},
    payload::write_payload_layer,
    store::{self, Item, Kind, PackedDefinitions, Store, StoreError, Stored},
};

/// Changes when definitions' own keys are made otherwise.
const FORMAT: &str = "declared-1";

/// What to do about something that the store lacks.
pub(super) const CARRY: &str = "where the network is, `farrier mirror --kernel RELEASE --registry REGISTRY` puts it into a \
                                registry's store, and `farrier bundle` carries it here; or name a mirror that has it, and its \
                                host, in site.yaml";

/// The tag of the definitions that were kept last.
pub const LATEST: &str = "latest";

/// Something that the store holds now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What it is, for people.
    pub what: String,
    /// The artifact.
    pub stored: Stored,
    /// The tags by which it is found.
    pub tags: Vec<Tag>,
    /// Was something sent?
    pub new: bool,
}

/// What is to be kept.
pub(super) struct Keep<'a> {
    pub(super) kind: Kind,
    pub(super) what: String,
    /// The tag that never changes.
    pub(super) tag: Tag,
    /// The one that names what a definition came to last.
    pub(super) declared: Option<Tag>,
    pub(super) file: &'a Path,
    pub(super) layer: Descriptor,
    pub(super) notes: BTreeMap<String, String>,
}

impl Fetcher {
    /// Puts the source into the store, unless it is there; relative paths start at `root`.
    pub async fn keep_source(&self, spec: &SourceSpec, root: &Path) -> Result<Kept, FetchError> {
        let SourceIdentity { identity, version } = self.source_identity(spec, root).await?;
        let (tag, declared) = (key_tag(&content_key(&identity))?, source_tag(spec)?);
        let what = format!("source {} ({identity})", spec.name);
        if let Some(kept) = self.kept_already(Kind::Source, &what, &tag, Some(&declared)).await? {
            return Ok(kept);
        }
        let tree = self.source(spec, root).await?.root;
        let notes = [
            (annotations::TITLE, Some(spec.name.to_string())),
            (annotations::IDENTITY, Some(identity)),
            (annotations::VERSION, version),
        ];
        let (file, layer, _scratch) = self.pack(tree).await?;
        let layer = Descriptor::new(layer.media_type, layer.digest, layer.size);
        let keep = Keep {
            kind: Kind::Source,
            what,
            tag,
            declared: Some(declared),
            file: &file,
            layer,
            notes: notes.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect(),
        };
        self.keep(keep).await
    }

    /// Puts a bootstrapped root file system into the store, unless it is there.
    pub async fn keep_bootstrap(&self, spec: &BootstrapSpec, arch: Architecture) -> Result<Kept, FetchError> {
        let key = bootstrap_key(spec, arch);
        let (tag, what) = (key_tag(&key)?, format!("root file system of {} ({arch})", spec.suite));
        if let Some(kept) = self.kept_already(Kind::RootFs, &what, &tag, None).await? {
            return Ok(kept);
        }
        let root_fs = self.bootstrap(spec, arch).await?;
        self.keep_root_fs(&root_fs, what, (tag, None), &key, spec.include.join(" ")).await
    }

    /// Puts a minimal base into the store, unless it is there.
    pub async fn keep_minimal(&self, spec: &MinimalSpec, arch: Architecture) -> Result<Kept, FetchError> {
        let key = self.minimal_key(spec, arch).await?;
        let (tag, declared) = (key_tag(&key)?, minimal_tag(spec, arch)?);
        let what = format!("minimal base of {} ({arch})", spec.package);
        if let Some(kept) = self.kept_already(Kind::RootFs, &what, &tag, Some(&declared)).await? {
            return Ok(kept);
        }
        let root_fs = self.minimal(spec, arch).await?;
        let package = self.minimal_package(spec, arch).await?;
        self.keep_root_fs(&root_fs, what, (tag, Some(declared)), &key, package).await
    }

    async fn keep_root_fs(
        &self,
        root_fs: &RootFs,
        what: String,
        (tag, declared): (Tag, Option<Tag>),
        key: &str,
        packages: String,
    ) -> Result<Kept, FetchError> {
        let RootFs { layer, digest, diff_id, size, arch } = root_fs;
        let notes = [
            (annotations::TITLE, what.clone()),
            (annotations::IDENTITY, key.to_owned()),
            (annotations::DIFF_ID, diff_id.to_string()),
            (annotations::ARCHITECTURE, arch.to_string()),
            (annotations::PACKAGES, packages),
        ];
        let layer_type = crate::oci::media_type::OCI_LAYER_GZIP;
        let descriptor = Descriptor::new(layer_type, digest.clone(), *size);
        self.keep(Keep {
            kind: Kind::RootFs,
            what,
            tag,
            declared,
            file: layer,
            layer: descriptor,
            notes: notes.map(|(key, value)| (key.to_owned(), value)).into(),
        })
        .await
    }

    /// Puts the definitions directory into the store, without what is secret; says what was left out.
    pub async fn keep_definitions(
        &self,
        root: &Path,
        secrets: Vec<PathBuf>,
    ) -> Result<(Kept, Vec<PathBuf>), FetchError> {
        let scratch = self.cache.scratch()?;
        let file = scratch.path().join(LAYER);
        let (from, to) = (root.to_owned(), file.clone());
        let packed = blocking(move |_| Ok(store::pack_definitions(&from, &secrets, &to)?)).await?;
        let PackedDefinitions { layer, left_out } = packed;
        let what = "definitions".to_owned();
        let (tag, declared) = (key_tag(layer.digest.hex())?, key_tag(LATEST)?);
        if let Some(kept) = self.kept_already(Kind::Definitions, &what, &tag, Some(&declared)).await? {
            return Ok((kept, left_out));
        }
        let notes = [(annotations::TITLE.to_owned(), what.clone())].into();
        let layer = Descriptor::new(layer.media_type, layer.digest, layer.size);
        let (kind, declared, file) = (Kind::Definitions, Some(declared), &*file);
        Ok((self.keep(Keep { kind, what, tag, declared, file, layer, notes }).await?, left_out))
    }

    /// What the store has in place of a source that is not asked about upstream: one that the site lacks, one whose
    /// content is fixed, and with `--offline` any.
    pub(super) async fn stored_source(
        &self,
        spec: &SourceSpec,
        root: &Path,
    ) -> Result<Option<Stored>, FetchError> {
        let wanted = match &spec.from {
            // Its content says what it is, wherever it comes from.
            SourceOrigin::Url { .. } => false,
            SourceOrigin::Path { path, .. } => !root.join(path).exists(),
            SourceOrigin::Apt(source) => self.asks_store(source, super::source::native())?,
        };
        if wanted { self.stored(Kind::Source, &source_tag(spec)?).await } else { Ok(None) }
    }

    /// Is the store asked before the archive which package this is?
    fn asks_store(&self, source: &AptSource, arch: Architecture) -> Result<bool, FetchError> {
        let is_fixed = source.version.is_some();
        Ok((self.is_offline() || is_fixed) && !(is_fixed && self.known_package(source, arch)?.is_some()))
    }

    /// What the store notes of a minimal base that is not asked about upstream: its key, its package.
    pub(super) async fn stored_minimal_note(
        &self,
        spec: &MinimalSpec,
        arch: Architecture,
        key: &str,
    ) -> Result<Option<String>, FetchError> {
        if !self.asks_store(&spec.source(), arch)? {
            return Ok(None);
        }
        let stored = self.stored(Kind::RootFs, &minimal_tag(spec, arch)?).await?;
        stored.map(|stored| note(&stored, key).map(str::to_owned)).transpose()
    }

    /// What the store has under a key made from the content.
    pub(super) async fn stored_content(&self, kind: Kind, key: &str) -> Result<Option<Stored>, FetchError> {
        self.stored(kind, &key_tag(key)?).await
    }

    pub(super) async fn stored(&self, kind: Kind, tag: &Tag) -> Result<Option<Stored>, FetchError> {
        match &self.store {
            Some(store) => Ok(store.find(kind, tag).await?),
            None => Ok(None),
        }
    }

    /// Makes `dir/tree` from an artifact.
    pub(super) async fn take_tree(&self, stored: &Stored, dir: PathBuf) -> Result<(), FetchError> {
        let file = dir.join("layer");
        self.required_store()?.fetch(stored, &file).await?;
        let what = format!("{}@{}", stored.repository, stored.digest);
        blocking(move |stop| {
            let tree = dir.join(TREE);
            fs::create_dir(&tree).map_err(io_error("create", &tree))?;
            unpack(stop, &file, &tree, &what)?;
            fs::remove_file(&file).map_err(io_error("remove", &file))
        })
        .await
    }

    /// Makes a root file system's cache entry from an artifact.
    pub(super) async fn take_root_fs(&self, stored: &Stored, dir: &Path) -> Result<(), FetchError> {
        let wrong = || StoreError::NotAnArtifact {
            reference: format!("{}@{}", stored.repository, stored.digest),
            reason: format!("its {} is no digest", annotations::DIFF_ID),
        };
        let diff_id: Digest = note(stored, annotations::DIFF_ID)?.parse().map_err(|_| wrong())?;
        self.required_store()?.fetch(stored, &dir.join(LAYER)).await?;
        bootstrap::record(dir, &stored.layer.digest, &diff_id, stored.layer.size)
    }

    /// A tree as a layer in a file that lasts as long as the guard.
    pub(super) async fn pack(
        &self,
        tree: PathBuf,
    ) -> Result<(PathBuf, Layer, crate::cache::Scratch), FetchError> {
        let scratch = self.cache.scratch()?;
        let file = scratch.path().join(LAYER);
        let to = file.clone();
        // A link to the tree is not the tree.
        let layer = blocking(move |_| {
            let tree = fs::canonicalize(&tree).map_err(io_error("find", &tree))?;
            Ok(write_payload_layer(&tree, false, &to)?.layer)
        })
        .await?;
        Ok((file, layer, scratch))
    }

    /// Names what is there; `None` where it must be put.
    pub(super) async fn kept_already(
        &self,
        kind: Kind,
        what: &str,
        tag: &Tag,
        declared: Option<&Tag>,
    ) -> Result<Option<Kept>, FetchError> {
        let store = self.required_store()?;
        let Some(stored) = store.find(kind, tag).await? else { return Ok(None) };
        if let Some(declared) = declared {
            store.name(&stored, declared).await?;
        }
        let tags = std::iter::once(tag).chain(declared).cloned().collect();
        Ok(Some(Kept { what: what.to_owned(), stored, tags, new: false }))
    }

    pub(super) async fn keep(&self, keep: Keep<'_>) -> Result<Kept, FetchError> {
        let Keep { kind, what, tag, declared, file, layer, notes } = keep;
        let store = self.required_store()?;
        let item = Item { kind, tag: &tag, file, layer: &layer, annotations: notes };
        let stored = store.put(&item).await?;
        if let Some(declared) = &declared {
            store.name(&stored, declared).await?;
        }
        Ok(Kept { what, stored, tags: std::iter::once(tag).chain(declared).collect(), new: true })
    }

    /// Offline it is what was never kept that matters, and not in which words a network that is not there refused.
    pub(super) fn unless_kept<T>(
        &self,
        outcome: Result<T, FetchError>,
        what: impl FnOnce() -> String,
        hint: &'static str,
    ) -> Result<T, FetchError> {
        outcome.map_err(|error| {
            if self.is_offline() && self.store.is_some() && error.is_upstream() {
                FetchError::NotKept { what: what(), hint, source: Box::new(error) }
            } else {
                error
            }
        })
    }

    fn required_store(&self) -> Result<&Store, FetchError> {
        self.store.as_ref().ok_or(FetchError::NoStore)
    }
}

/// What an artifact says of itself.
pub(super) fn note<'a>(stored: &'a Stored, key: &str) -> Result<&'a str, FetchError> {
    let wrong = || StoreError::NotAnArtifact {
        reference: format!("{}@{}", stored.repository, stored.digest),
        reason: format!("it has no annotation {key}"),
    };
    Ok(stored.annotations.get(key).ok_or_else(wrong)?)
}

fn key_tag(key: &str) -> Result<Tag, FetchError> {
    Ok(store::key_tag(key)?)
}

/// The tag of a source or root file system that never changes.
pub fn content_tag(stored: &Stored) -> Option<Tag> {
    let identity = stored.annotations.get(annotations::IDENTITY)?;
    match stored.kind {
        Kind::Source => store::key_tag(&content_key(identity)).ok(),
        Kind::RootFs => store::key_tag(identity).ok(),
        Kind::Headers | Kind::Definitions => None,
    }
}

/// The tag under which a definition's source is found: the same wherever these lines stand in a definition.
pub fn source_tag(spec: &SourceSpec) -> Result<Tag, FetchError> {
    let SourceSpec { name: _, from, unpack, subdir } = spec;
    let mut parts = match from {
        SourceOrigin::Path { path, sha256 } => vec![
            "path".to_owned(),
            path.to_string_lossy().into_owned(),
            sha256.clone().unwrap_or_default().to_ascii_lowercase(),
        ],
        SourceOrigin::Url { url, sha256 } => {
            vec!["url".to_owned(), url.clone(), sha256.to_ascii_lowercase()]
        }
        SourceOrigin::Apt(source) => apt_parts(source),
    };
    parts.extend(["unpack".to_owned(), unpack.clone().unwrap_or_default()]);
    parts.extend(["subdir".to_owned(), subdir.clone().unwrap_or_default()]);
    declared_tag("source", &parts)
}

/// The tag under which a definition's minimal base is found.
pub fn minimal_tag(spec: &MinimalSpec, arch: Architecture) -> Result<Tag, FetchError> {
    let mut parts = apt_parts(&spec.source());
    parts.push(arch.to_string());
    declared_tag("minimal", &parts)
}

fn apt_parts(source: &AptSource) -> Vec<String> {
    let AptSource { package, version, suites } = source;
    let head = ["apt".to_owned(), package.clone(), version.clone().unwrap_or_default()];
    head.into_iter().chain(apt::key_parts(suites)).collect()
}

fn declared_tag(kind: &str, parts: &[String]) -> Result<Tag, FetchError> {
    let parts = [FORMAT, kind].into_iter().chain(parts.iter().map(String::as_str));
    key_tag(&format!("declared-{}", digest::of_parts(parts)))
}

#[cfg(test)]
#[path = "stored_tests.rs"]
mod tests;
