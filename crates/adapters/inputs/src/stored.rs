//! Puts inputs into the store and finds them there.
//!
//! Each input has two tags. One is derived from the content and never changes. The other is derived from the definition and names
//! the latest content: a site without access to upstream uses this tag to find inputs that another site stored.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{
    facts::{annotations, media_type},
    image::{AptSource, Digest, GitSource, MinimalSpec, SourceOrigin, SourceSpec, Tag},
    kernel::Architecture,
};
use farrier_local::{blocking::stoppable, cache::Scratch};
use farrier_payload::write_source_layer;
use farrier_store as store;
use farrier_store::{
    DECLARED, InputKind, LATEST, NewInput, PackedDefinitions, SignatureStatus, Store, StoreError, StoredInput,
};
use fs_err as fs;
use oci::Layer;

use super::{FetchError, Fetcher, Result, TREE, apt, digest, root_fs_layer, rpm, source::arch_of, unpack};

/// Format version; change it when the keys of definitions are computed differently.
const FORMAT: &str = "declared-1";
/// Format version; change it when the same content of a source is laid out differently.
const SOURCE_FORMAT: &str = "source-2";

/// Separates the keys of stored content from the keys of locally made content.
const STORED: &str = "stored";

/// Name of the layer in a working directory.
const LAYER: &str = "layer";

/// An input that is now in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredUnder {
    /// Description for messages.
    pub what: String,
    /// The artifact.
    pub stored: StoredInput,
    /// Tags of the artifact.
    pub tags: Vec<Tag>,
    /// Whether anything was pushed.
    pub new: bool,
}

/// An input to be stored.
pub(super) struct Input {
    pub(super) kind: InputKind,
    /// Description for messages.
    pub(super) what: String,
    /// Immutable tag, derived from the content.
    pub(super) tag: Tag,
    /// Moving tag, derived from the definition.
    pub(super) declared: Option<Tag>,
}

/// An input's content: one layer in a file. The layer is a packed tree, or a publisher's original file.
pub(super) struct Packed {
    pub(super) file: PathBuf,
    pub(super) layer: Layer,
    pub(super) annotations: BTreeMap<String, String>,
    /// Temporary directory that holds the file, if any.
    pub(super) scratch: Option<Scratch>,
}

impl Packed {
    /// Creates content whose file stays in the cache.
    pub(super) fn in_cache(file: PathBuf, layer: Layer) -> Self {
        Self { file, layer, annotations: BTreeMap::new(), scratch: None }
    }

    /// Creates content from a publisher's unchanged file, which its users verify by a known digest.
    pub(super) fn original(file: PathBuf, sha256: &str, size: u64) -> Result<Self> {
        let digest: Digest = format!("sha256:{sha256}")
            .parse()
            .map_err(|_| FetchError::value("the digest of a source", sha256, "it is not a sha256"))?;
        let (diff_id, media_type) = (digest.clone(), media_type::SOURCE_FILE);
        Ok(Self::in_cache(file, Layer { digest, diff_id, size, media_type }))
    }

    /// Sets the annotations.
    pub(super) fn with_annotations<const N: usize>(self, annotations: [(&str, Option<String>); N]) -> Self {
        let annotations = annotations.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Self { annotations: annotations.collect(), ..self }
    }
}

impl Fetcher {
    /// Puts the definitions directory into the store, without secrets. Returns the omitted paths.
    pub async fn keep_definitions(
        &self,
        root: &Path,
        secrets: Vec<PathBuf>,
    ) -> Result<(StoredUnder, Vec<PathBuf>)> {
        let scratch = self.cache.scratch()?;
        let file = scratch.path().join(LAYER);
        let (from, to) = (root.to_owned(), file.clone());
        let packed = stoppable(move |_| store::pack_definitions(&from, &secrets, &to)).await?;
        let PackedDefinitions { layer, omitted_paths } = packed;
        let what = "definitions".to_owned();
        let (tag, declared) = (store::key_tag(layer.digest.hex())?, Some(store::key_tag(LATEST)?));
        let packed = Packed { file, layer, annotations: BTreeMap::new(), scratch: Some(scratch) }
            .with_annotations([(annotations::TITLE, Some(what.clone()))]);
        let input = Input { kind: InputKind::Definitions, what, tag, declared };
        let stored = self.keep(input, async { Ok(packed) }).await?;
        Ok((stored, omitted_paths))
    }

    /// Puts an input into the store, under all of its tags. Awaits `content` only if the store has no trusted artifact of the input.
    pub(super) async fn keep(
        &self,
        input: Input,
        content: impl Future<Output = Result<Packed>>,
    ) -> Result<StoredUnder> {
        match self.find_trusted(&input).await? {
            Some(stored) => self.tag(input, stored, false).await,
            None => self.put(input, content.await?).await,
        }
    }

    /// Returns the stored artifact of an input, unless it is untrusted. If only another trusted key signed the artifact, also
    /// signs the artifact with the site's key.
    pub(super) async fn find_trusted(&self, input: &Input) -> Result<Option<StoredInput>> {
        let store = self.required_store()?;
        let Some(stored) = store.find(input.kind, &input.tag).await? else { return Ok(None) };
        Ok(match store.signature_status(&stored).await? {
            SignatureStatus::Signed => {
                let signed = store.sign(stored, &input.tag).await?;
                Some(StoredInput { is_signed: true, ..signed })
            }
            SignatureStatus::NoKeys => Some(stored),
            SignatureStatus::Refused(_) => None,
        })
    }

    /// Puts content into the store, replacing an artifact that no trusted key signed.
    pub(super) async fn put(&self, input: Input, content: Packed) -> Result<StoredUnder> {
        let Packed { file, layer, annotations, scratch: _scratch } = content;
        let layer = layer.descriptor();
        let (kind, tag) = (input.kind, &input.tag);
        let store = self.required_store()?;
        let replace = match store.find(kind, tag).await? {
            Some(found) => matches!(store.signature_status(&found).await?, SignatureStatus::Refused(_)),
            None => false,
        };
        let item = NewInput { kind, tag, file: &file, layer: &layer, annotations, replace };
        let stored = store.put(&item).await?;
        self.tag(input, stored, true).await
    }

    /// Tags a stored artifact with the tag derived from its definition.
    pub(super) async fn tag(&self, input: Input, stored: StoredInput, new: bool) -> Result<StoredUnder> {
        let Input { kind: _, what, tag, declared } = input;
        if let Some(declared) = &declared {
            self.required_store()?.move_tag(&stored, declared).await?;
        }
        Ok(StoredUnder { what, stored, tags: std::iter::once(tag).chain(declared).collect(), new })
    }

    /// Returns a root file system in the cache: made on this machine earlier, or else from the store, or else made by `make`. Root
    /// file systems from the store have separate keys, by content, because only those of this machine are trusted without a signature.
    pub(super) async fn obtain_root_fs<F, M>(&self, kind: &str, key: &str, make: F) -> Result<PathBuf>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<()>>,
    {
        if let Some(entry) = self.cache.get(kind, key)?.filter(|entry| root_fs_layer::is_intact(entry)) {
            return Ok(entry);
        }
        let Some(stored) = self.stored(InputKind::RootFs, &store::key_tag(key)?).await? else {
            return self.cache.get_or_make_intact(kind, key, root_fs_layer::is_intact, make).await;
        };
        if stored.annotation(annotations::IDENTITY)? != key {
            return Err(stored.invalid("its annotations name another root file system").into());
        }
        let parts = [STORED, stored.layer.digest.as_str(), stored.annotation(annotations::DIFF_ID)?];
        let content = digest::of_parts(parts);
        let fill = |dir: PathBuf| async move {
            self.required_store()?.fetch(&stored, &dir.join(root_fs_layer::FILE)).await?;
            root_fs_layer::record_stored(&dir, &stored)
        };
        self.cache.get_or_make_intact(kind, &content, root_fs_layer::is_intact, fill).await
    }

    /// Returns the stored input to build with. If the site has keys, one of them must have signed the input.
    pub(super) async fn stored(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>> {
        match &self.store {
            Some(store) => Ok(store.find_trusted(kind, tag).await?),
            None => Ok(None),
        }
    }

    /// Returns a stored package. Falls back to the archive if the stored package is untrusted and the network is allowed.
    pub(super) async fn stored_package(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>> {
        match self.stored(kind, tag).await {
            Err(FetchError::Store(error @ StoreError::Untrusted(..))) if !self.is_offline() => {
                tracing::warn!(%error, "falling back to the archive");
                Ok(None)
            }
            found => found,
        }
    }

    /// Makes `dir/tree` from an artifact.
    pub(super) async fn unpack_stored_tree(&self, stored: &StoredInput, dir: PathBuf) -> Result<()> {
        let what = format!("{}@{}", stored.repository, stored.digest);
        self.unpack_layer(stored, dir, move |stop, layer, tree| unpack(stop, layer, tree, &what)).await
    }

    /// Makes `dir/tree` from an artifact with `unpack`, which gets the layer and the empty directory.
    pub(super) async fn unpack_layer<F>(&self, stored: &StoredInput, dir: PathBuf, unpack: F) -> Result<()>
    where
        F: FnOnce(&AtomicBool, &Path, &Path) -> Result<()> + Send + 'static,
    {
        let (layer, tree) = (dir.join(LAYER), dir.join(TREE));
        self.required_store()?.fetch(stored, &layer).await?;
        stoppable(move |stop| {
            fs::create_dir(&tree)?;
            unpack(stop, &layer, &tree)?;
            Ok(fs::remove_file(&layer)?)
        })
        .await
    }

    /// Packs a tree as a layer, without version-control data.
    pub(super) async fn pack(&self, tree: PathBuf) -> Result<Packed> {
        let scratch = self.cache.scratch()?;
        let file = scratch.path().join(LAYER);
        let to = file.clone();
        // Resolve a link to the tree.
        let layer = stoppable(move |_| {
            let tree = fs::canonicalize(&tree)?;
            Ok::<_, FetchError>(write_source_layer(&tree, &to)?)
        })
        .await?;
        Ok(Packed { file, layer, annotations: BTreeMap::new(), scratch: Some(scratch) })
    }

    pub(super) fn required_store(&self) -> Result<&Store> {
        self.store.as_ref().ok_or(FetchError::NoStore)
    }
}

/// Returns the key of a source's tree, in the cache and in the store.
pub(super) fn content_key(identity: &str) -> String {
    digest::of_parts([SOURCE_FORMAT, identity])
}

/// Returns the immutable tag of a source or root file system.
pub fn content_tag(stored: &StoredInput) -> Option<Tag> {
    let identity = stored.annotations.get(annotations::IDENTITY)?;
    match stored.kind {
        InputKind::Source => store::key_tag(&content_key(identity)).ok(),
        InputKind::RootFs => store::key_tag(identity).ok(),
        InputKind::Headers | InputKind::Definitions => None,
    }
}

/// Returns the tag of a definition's source. It does not depend on where the source is used.
pub fn source_tag(spec: &SourceSpec) -> Result<Tag> {
    let SourceSpec { name: _, from, unpack, subdir, license: _, redistribute: _ } = spec;
    let mut parts = match from {
        SourceOrigin::Path { path, sha256 } => vec![
            "path".to_owned(),
            path.to_string_lossy().into_owned(),
            sha256.as_deref().unwrap_or_default().to_ascii_lowercase(),
        ],
        SourceOrigin::Url { url, sha256 } => {
            vec!["url".to_owned(), url.to_string(), sha256.to_ascii_lowercase()]
        }
        SourceOrigin::Git(source) => {
            let GitSource { url, reference, commit, submodules, signed_by } = source;
            let signers = signed_by.as_ref().map(|file| file.to_string_lossy().into_owned());
            let [reference, commit] =
                [reference.as_deref(), commit.as_deref()].map(Option::unwrap_or_default);
            let head = ["git", url.as_str(), reference, commit, if *submodules { "submodules" } else { "" }];
            head.into_iter().map(str::to_owned).chain(signers).collect()
        }
        SourceOrigin::Apt(source) => {
            let mut parts = apt_parts(source);
            // Tags of amd64 packages omit the architecture, for compatibility with existing tags.
            let other_arch = Some(arch_of(source)).filter(|arch| *arch != Architecture::Amd64);
            parts.extend(other_arch.map(|arch| arch.to_string()));
            parts
        }
        SourceOrigin::Rpm(source) => rpm::source::identity_parts(source)?,
        SourceOrigin::Image(source) => vec!["image".to_owned(), source.reference.to_string()],
    };
    parts.extend(["unpack".to_owned(), unpack.as_deref().unwrap_or_default().to_owned()]);
    parts.extend(["subdir".to_owned(), subdir.as_deref().unwrap_or_default().to_owned()]);
    declared_tag(SOURCE_FORMAT, &parts)
}

/// Returns the tag of a definition's minimal base.
pub fn minimal_tag(spec: &MinimalSpec, arch: Architecture) -> Result<Tag> {
    let mut parts = apt_parts(&spec.source());
    parts.push(arch.to_string());
    declared_tag("minimal", &parts)
}

fn apt_parts(source: &AptSource) -> Vec<String> {
    let AptSource { package, version, .. } = source;
    let head = ["apt".to_owned(), package.to_string(), version.as_deref().unwrap_or_default().to_owned()];
    head.into_iter().chain(apt::key_parts(&source.apt_suites())).collect()
}

fn declared_tag(kind: &str, parts: &[String]) -> Result<Tag> {
    let parts = [FORMAT, kind].into_iter().chain(parts.iter().map(String::as_str));
    Ok(store::key_tag(&format!("{DECLARED}{}", digest::of_parts(parts)))?)
}

#[cfg(test)]
#[path = "stored_tests.rs"]
mod tests;
