//! Adapter: inputs in the store beside the images.
//!
//! Each stands there under two tags: one made from what it holds, which never changes, and one made from what the
//! definition says, by which a site that cannot ask upstream finds what another one found there last.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use fs_err as fs;

use super::{FetchError, Fetcher, Result, TREE, apt, digest, root_fs_layer, rpm, source::arch_of, unpack};
use crate::{
    blocking::stoppable,
    cache::Scratch,
    image::{AptSource, Digest, MinimalSpec, SourceOrigin, SourceSpec, Tag},
    kernel::Architecture,
    oci::{Layer, annotations, media_type},
    payload::write_source_layer,
    store::{self, InputKind, NewInput, PackedDefinitions, Standing, Store, StoreError, StoredInput},
};

/// Changes when definitions' own keys are made otherwise.
const FORMAT: &str = "declared-1";
/// Changes when the same content of a source is laid out differently.
const SOURCE_FORMAT: &str = "source-2";

/// The tag of the definitions that were kept last.
pub const LATEST: &str = "latest";

/// Apart from all keys of what is made here.
const STORED: &str = "stored";

/// The layer's name in a working directory.
const LAYER: &str = "layer";

/// Something that the store holds now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredUnder {
    /// What it is, for people.
    pub what: String,
    /// The artifact.
    pub stored: StoredInput,
    /// The tags by which it is found.
    pub tags: Vec<Tag>,
    /// Was something sent?
    pub new: bool,
}

/// An input that is to be in the store.
pub(super) struct Input {
    pub(super) kind: InputKind,
    /// For people.
    pub(super) what: String,
    /// The tag that never changes.
    pub(super) tag: Tag,
    /// The one that names what a definition came to last.
    pub(super) declared: Option<Tag>,
}

/// An input's content: one layer, in a file. A layer is a packed tree, or the file that a publisher made.
pub(super) struct Packed {
    pub(super) file: PathBuf,
    pub(super) layer: Layer,
    /// By annotation.
    pub(super) notes: BTreeMap<String, String>,
    /// What the file lies in, if that goes away.
    pub(super) scratch: Option<Scratch>,
}

impl Packed {
    /// Content whose file stays in the cache.
    pub(super) fn in_cache(file: PathBuf, layer: Layer) -> Self {
        Self { file, layer, notes: BTreeMap::new(), scratch: None }
    }

    /// A publisher's file, as it is: it is verified by the digest that its users know.
    pub(super) fn original(file: PathBuf, sha256: &str, size: u64) -> Result<Self> {
        let digest: Digest = format!("sha256:{sha256}")
            .parse()
            .map_err(|_| FetchError::value("the digest of a source", sha256, "it is no sha256"))?;
        let (diff_id, media_type) = (digest.clone(), media_type::SOURCE_FILE);
        Ok(Self::in_cache(file, Layer { digest, diff_id, size, media_type }))
    }

    /// The same with what is noted of it, by annotation.
    pub(super) fn with_notes<const N: usize>(self, notes: [(&str, Option<String>); N]) -> Self {
        let notes = notes.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Self { notes: notes.collect(), ..self }
    }
}

impl Fetcher {
    /// Puts the definitions directory into the store, without what is secret; says what was left out.
    pub async fn keep_definitions(
        &self,
        root: &Path,
        secrets: Vec<PathBuf>,
    ) -> Result<(StoredUnder, Vec<PathBuf>)> {
        let scratch = self.cache.scratch()?;
        let file = scratch.path().join(LAYER);
        let (from, to) = (root.to_owned(), file.clone());
        let packed = stoppable(move |_| store::pack_definitions(&from, &secrets, &to)).await?;
        let PackedDefinitions { layer, left_out } = packed;
        let what = "definitions".to_owned();
        let (tag, declared) = (store::key_tag(layer.digest.hex())?, Some(store::key_tag(LATEST)?));
        let packed = Packed { file, layer, notes: BTreeMap::new(), scratch: Some(scratch) }
            .with_notes([(annotations::TITLE, Some(what.clone()))]);
        let input = Input { kind: InputKind::Definitions, what, tag, declared };
        let kept = self.keep(input, async { Ok(packed) }).await?;
        Ok((kept, left_out))
    }

    /// Puts an input into the store, under all of its tags. `content` is awaited only where the store lacks it, or has
    /// what does not count.
    pub(super) async fn keep(
        &self,
        input: Input,
        content: impl Future<Output = Result<Packed>>,
    ) -> Result<StoredUnder> {
        match self.kept(&input).await? {
            Some(stored) => self.name(input, stored, false).await,
            None => self.put(input, content.await?).await,
        }
    }

    /// What the store has of an input, and can keep.
    pub(super) async fn kept(&self, input: &Input) -> Result<Option<StoredInput>> {
        let store = self.required_store()?;
        let Some(stored) = store.find(input.kind, &input.tag).await? else { return Ok(None) };
        Ok(match store.standing(&stored).await? {
            Standing::Signed => Some(StoredInput { is_signed: true, ..stored }),
            Standing::NoKeys => Some(stored),
            Standing::Refused(_) => None,
        })
    }

    /// The same for content that the store lacks. It takes the place of what no key of the site signed.
    pub(super) async fn put(&self, input: Input, content: Packed) -> Result<StoredUnder> {
        let Packed { file, layer, notes: annotations, scratch: _scratch } = content;
        let layer = layer.descriptor();
        let (kind, tag) = (input.kind, &input.tag);
        let store = self.required_store()?;
        let replace = match store.find(kind, tag).await? {
            Some(found) => matches!(store.standing(&found).await?, Standing::Refused(_)),
            None => false,
        };
        let item = NewInput { kind, tag, file: &file, layer: &layer, annotations, replace };
        let stored = store.put(&item).await?;
        self.name(input, stored, true).await
    }

    /// Gives what is stored the tag that is made from a definition.
    pub(super) async fn name(&self, input: Input, stored: StoredInput, new: bool) -> Result<StoredUnder> {
        let Input { kind: _, what, tag, declared } = input;
        if let Some(declared) = &declared {
            self.required_store()?.name(&stored, declared).await?;
        }
        Ok(StoredUnder { what, stored, tags: std::iter::once(tag).chain(declared).collect(), new })
    }

    /// A root file system in the cache: what was made here, else from the store, else made by `make`. What came from the
    /// store is kept apart by its content, because only what was made here has no need of a signature.
    pub(super) async fn obtain_root_fs<F, M>(&self, place: &str, key: &str, make: F) -> Result<PathBuf>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<()>>,
    {
        if let Some(made) = self.cache.get(place, key)? {
            return Ok(made);
        }
        let Some(stored) = self.stored(InputKind::RootFs, &store::key_tag(key)?).await? else {
            return self.cache.get_or_make(place, key, make).await;
        };
        if stored.note(annotations::IDENTITY)? != key {
            return Err(stored.is_not("it says that it is another root file system").into());
        }
        let parts = [STORED, stored.layer.digest.as_str(), stored.note(annotations::DIFF_ID)?];
        let content = digest::of_parts(parts);
        let fill = |dir: PathBuf| async move {
            self.required_store()?.fetch(&stored, &dir.join(root_fs_layer::FILE)).await?;
            root_fs_layer::record_stored(&dir, &stored)
        };
        self.cache.get_or_make(place, &content, fill).await
    }

    /// What the store has to build with: where the site has keys, what one of them signed.
    pub(super) async fn stored(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>> {
        match &self.store {
            Some(store) => Ok(store.take(kind, tag).await?),
            None => Ok(None),
        }
    }

    /// The same for what an archive has, too: that is asked where it may be and no key signed what the store has.
    pub(super) async fn stored_package(&self, kind: InputKind, tag: &Tag) -> Result<Option<StoredInput>> {
        match self.stored(kind, tag).await {
            Err(FetchError::Store(error @ StoreError::Untrusted(..))) if !self.is_offline() => {
                tracing::warn!(%error, "the archive is asked instead");
                Ok(None)
            }
            found => found,
        }
    }

    /// Makes `dir/tree` from an artifact.
    pub(super) async fn take_tree(&self, stored: &StoredInput, dir: PathBuf) -> Result<()> {
        let what = format!("{}@{}", stored.repository, stored.digest);
        self.take_layer(stored, dir, move |stop, layer, tree| unpack(stop, layer, tree, &what)).await
    }

    /// Makes `dir/tree` from an artifact by `unpack`, which is given its layer and the empty directory.
    pub(super) async fn take_layer<F>(&self, stored: &StoredInput, dir: PathBuf, unpack: F) -> Result<()>
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

    /// A tree as a layer, without version-control data.
    pub(super) async fn pack(&self, tree: PathBuf) -> Result<Packed> {
        let scratch = self.cache.scratch()?;
        let file = scratch.path().join(LAYER);
        let to = file.clone();
        // A link to the tree is not the tree.
        let layer = stoppable(move |_| {
            let tree = fs::canonicalize(&tree)?;
            Ok::<_, FetchError>(write_source_layer(&tree, &to)?)
        })
        .await?;
        Ok(Packed { file, layer, notes: BTreeMap::new(), scratch: Some(scratch) })
    }

    pub(super) fn required_store(&self) -> Result<&Store> {
        self.store.as_ref().ok_or(FetchError::NoStore)
    }
}

/// The key of a source's tree, in the cache and in the store.
pub(super) fn content_key(identity: &str) -> String {
    digest::of_parts([SOURCE_FORMAT, identity])
}

/// The tag of a source or root file system that never changes.
pub fn content_tag(stored: &StoredInput) -> Option<Tag> {
    let identity = stored.annotations.get(annotations::IDENTITY)?;
    match stored.kind {
        InputKind::Source => store::key_tag(&content_key(identity)).ok(),
        InputKind::RootFs => store::key_tag(identity).ok(),
        InputKind::Headers | InputKind::Definitions => None,
    }
}

/// The tag under which a definition's source is found: the same wherever these lines stand in a definition.
pub fn source_tag(spec: &SourceSpec) -> Result<Tag> {
    let SourceSpec { name: _, from, unpack, subdir } = spec;
    let mut parts = match from {
        SourceOrigin::Path { path, sha256 } => vec![
            "path".to_owned(),
            path.to_string_lossy().into_owned(),
            sha256.as_deref().unwrap_or_default().to_ascii_lowercase(),
        ],
        SourceOrigin::Url { url, sha256 } => {
            vec!["url".to_owned(), url.to_string(), sha256.to_ascii_lowercase()]
        }
        SourceOrigin::Apt(source) => {
            let mut parts = apt_parts(source);
            // Tags that are in use name no architecture.
            let other = Some(arch_of(source)).filter(|arch| *arch != Architecture::Amd64);
            parts.extend(other.map(|arch| arch.to_string()));
            parts
        }
        SourceOrigin::Rpm(source) => rpm::source::declared(source)?,
        SourceOrigin::Image(source) => vec!["image".to_owned(), source.reference.to_string()],
    };
    parts.extend(["unpack".to_owned(), unpack.as_deref().unwrap_or_default().to_owned()]);
    parts.extend(["subdir".to_owned(), subdir.as_deref().unwrap_or_default().to_owned()]);
    declared_tag(SOURCE_FORMAT, &parts)
}

/// The tag under which a definition's minimal base is found.
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
    Ok(store::key_tag(&format!("declared-{}", digest::of_parts(parts)))?)
}

#[cfg(test)]
#[path = "stored_tests.rs"]
mod tests;
