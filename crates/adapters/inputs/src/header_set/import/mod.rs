//! Imports header sets that the user provides. A header set is checked, brought into one canonical form, and stored in the cache
//! and in the store.
//!
//! The same content gives the same layer and the same digest, whatever its original packaging. The digest covers names,
//! kinds, links, contents and executable bits, but not order, times and owners.

mod gather;
mod selection;
mod stage;
mod survey;
mod tools;
mod write;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{
    image::Digest,
    kernel::{Architecture, Compiler, KernelRelease},
};
use farrier_local::{blocking::stoppable, cache::Scratch};
use farrier_store::{InputKind, NewInput, SignatureStatus, StoreError, StoredInput, header_tag};
use fs_err as fs;
use kmod::KernelFacts;
use oci::Layer;
use serde::{Deserialize, Serialize};

use super::{
    HeaderSet, Headers,
    stored::{ImportRecord, LIMITS, display_name},
};
use crate::{FetchError, Result, TREE, header_tree};

/// Source of headers.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{}", _0.display())]
pub enum ImportSource {
    /// A tarball, a directory, or a Debian or RPM package.
    Path(PathBuf),
    /// A node's file system: `/lib/modules/<release>/build` and the trees that its links point to.
    Node(PathBuf),
}

/// Parameters of an import.
#[derive(Clone, Debug)]
pub struct HeaderImport {
    /// Parts of one header set, in any order.
    pub sources: Vec<ImportSource>,
    pub release: KernelRelease,
    /// The kernel's architecture.
    pub arch: Architecture,
    /// Whether to replace existing, different headers of the same kernel.
    pub replace: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The header set is new.
    #[serde(rename = "imported")]
    New,
    /// A header set with this content was already stored; nothing was sent.
    Known,
    /// The header set replaced other headers.
    Replaced,
}

/// An imported header set.
#[derive(Clone, Debug)]
pub struct ImportedHeaders {
    /// Outcome of the import.
    pub outcome: Outcome,
    /// The header set in the cache.
    pub headers: HeaderSet,
    /// Digest of the content.
    pub content: Digest,
    /// Size of the layer in bytes.
    pub size: u64,
    /// Artifact in the store, if there is a store.
    pub stored: Option<StoredInput>,
}

/// A header set packed into one file, for import elsewhere. The file is removed on drop.
#[derive(Debug)]
pub struct PackedHeaders {
    pub release: KernelRelease,
    /// The kernel's architecture.
    pub arch: Architecture,
    /// Facts about the kernel's build.
    pub facts: KernelFacts,
    /// The kernel's compiler.
    pub compiler: Compiler,
    /// Digests and size of the file.
    pub layer: Layer,
    work: Scratch,
}

impl PackedHeaders {
    /// Returns the path of the file: a compressed tarball rooted at `/`.
    pub fn file(&self) -> PathBuf {
        self.work.path().join(LAYER)
    }
}

/// A header set prepared in a temporary directory.
struct Prepared {
    facts: KernelFacts,
    compiler: Compiler,
    layer: Layer,
    origin: Vec<String>,
}

impl Headers<'_> {
    /// Imports a header set into the cache and, if there is one, the store.
    ///
    /// # Errors
    /// A source cannot be read, is not the header set of this kernel, or other headers are already stored. Nothing is stored then.
    pub async fn import(self, import: HeaderImport) -> Result<ImportedHeaders> {
        let HeaderImport { sources, release, arch, replace } = import;
        let work = self.0.cache.scratch()?;
        let (directory, kernel) = (work.path().to_owned(), release.clone());
        let Prepared { facts, compiler, layer, origin } =
            stoppable(move |stop| prepare(&sources, &kernel, arch, &directory, stop)).await?;
        let content = layer.diff_id.clone();
        let imported = ImportRecord {
            release: release.to_string(),
            arch,
            content: content.to_string(),
            identity: Some(content.hex().to_owned()),
            origin,
            compiler: Some(compiler.to_string()),
            is_known: true,
        };
        let (outcome, stored) = if self.0.store().is_some() {
            let annotations = imported.annotations(&facts).into_iter();
            let annotations = annotations.filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
            let file = work.path().join(LAYER);
            let (outcome, stored) =
                self.store(&imported, &release, &layer, &file, annotations, replace).await?;
            (outcome, Some(stored))
        } else {
            let existing = self.imported_here(&release, arch)?;
            let location = || format!("the cache {}", self.0.cache.root().display());
            (outcome(&imported, existing.as_ref(), location, replace)?, None)
        };
        let unpacked = work.path().join(TREE);
        let move_tree = move |entry: PathBuf| async move { Ok(fs::rename(&unpacked, entry.join(TREE))?) };
        let root = self.keep_tree(&imported, move_tree).await?;
        self.remember(&imported)?;
        let key = imported.tree_record().key;
        let ImportRecord { origin, identity, .. } = imported;
        let (compiler, content_of) = (Some(compiler), Some(content.clone()));
        let headers =
            HeaderSet { root, facts, compiler, origin, key, identity, content: content_of, unverified: None };
        Ok(ImportedHeaders { outcome, headers, content, size: layer.size, stored })
    }

    /// Packs a kernel's header set from the file system of a node below `root`.
    ///
    /// # Errors
    /// The header set cannot be read, or belongs to another kernel.
    pub async fn pack(
        self,
        root: PathBuf,
        release: KernelRelease,
        arch: Architecture,
    ) -> Result<PackedHeaders> {
        let work = self.0.cache.scratch()?;
        let (directory, kernel) = (work.path().to_owned(), release.clone());
        let Prepared { facts, compiler, layer, origin: _ } =
            stoppable(move |stop| prepare(&[ImportSource::Node(root)], &kernel, arch, &directory, stop))
                .await?;
        Ok(PackedHeaders { release, arch, facts, compiler, layer, work })
    }

    /// Puts the header set into the store unless it is already there.
    async fn store(
        self,
        imported: &ImportRecord,
        release: &KernelRelease,
        layer: &Layer,
        file: &Path,
        annotations: BTreeMap<String, String>,
        replace: bool,
    ) -> Result<(Outcome, StoredInput)> {
        let store = self.0.store().ok_or(FetchError::NoStore)?;
        let tag = header_tag(release, imported.arch)?;
        let found = store.find(InputKind::Headers, &tag).await?;
        let refused = match &found {
            Some(found) => match store.signature_status(found).await? {
                SignatureStatus::Refused(why) => Some(why),
                SignatureStatus::Signed | SignatureStatus::NoKeys => None,
            },
            None => None,
        };
        let outcome = match &found {
            None => Outcome::New,
            Some(_) if refused.is_some() && replace => Outcome::Replaced,
            Some(found) => match ImportRecord::of_stored(found, release, imported.arch) {
                Ok(existing) => outcome(imported, Some(&existing), || display_name(found, &tag), replace)?,
                // Damaged annotations must not block the replacement by a good header set.
                Err(_) if replace => Outcome::Replaced,
                Err(error) => return Err(error),
            },
        };
        let descriptor = layer.descriptor();
        let (kind, replace) = (InputKind::Headers, outcome == Outcome::Replaced);
        let item = NewInput { kind, tag: &tag, file, layer: &descriptor, annotations, replace };
        match (outcome, found, refused) {
            (Outcome::Known, Some(found), None) => Ok((outcome, found)),
            // Signs the artifact if it is identical. An artifact with the same content annotation but other bytes is refused.
            (Outcome::Known, _, Some(why)) => match store.put(&item).await {
                Err(StoreError::Taken(reference, _)) => Err(StoreError::Untrusted(reference, why).into()),
                stored => Ok((outcome, stored?)),
            },
            _ => Ok((outcome, store.put(&item).await?)),
        }
    }
}

/// Determines the outcome of an import at `location`, where another header set may exist.
fn outcome(
    imported: &ImportRecord,
    existing: Option<&ImportRecord>,
    location: impl FnOnce() -> String,
    replace: bool,
) -> Result<Outcome> {
    let ImportRecord { release, arch, content, .. } = imported;
    match existing {
        None => Ok(Outcome::New),
        Some(existing) if existing.content == *content => Ok(Outcome::Known),
        Some(_) if replace => Ok(Outcome::Replaced),
        Some(existing) => {
            let (location, other) = (location(), &existing.content);
            Err(FetchError::unusable(
                format!(
                    "cannot import headers of {release} ({arch}): {location} has other headers, with content {other}, not {content}"
                ),
                format!(
                    "a release's headers should never change: give the changed kernel another local \
                     version; or, if {location} is wrong, import with --replace: new builds for this kernel \
                     then use the new headers, and images built with the old headers get another input \
                     hash"
                ),
            ))
        }
    }
}

/// File name of the layer in the working directory.
const LAYER: &str = "layer";

fn prepare(
    sources: &[ImportSource],
    release: &KernelRelease,
    arch: Architecture,
    directory: &Path,
    stop: &AtomicBool,
) -> Result<Prepared> {
    let staged = stage::stage(sources, directory, stop)?;
    let survey = survey::survey(&staged, release)?;
    let entries = gather::gather(&survey, release, arch, stop)?;
    let tree = directory.join(TREE);
    let layer = write::write(&entries, &tree, &directory.join(LAYER), stop)?;
    let (facts, compiler) = header_tree::read_header_set(&tree, release, arch)?;
    let compiler = compiler.ok_or_else(|| {
        FetchError::unusable(
            format!("cannot find CONFIG_CC_VERSION_TEXT in the configuration of {release}: the kernel's compiler is unknown"),
            "run `make olddefconfig modules_prepare` in the build tree with the kernel's own .config and compiler",
        )
    })?;
    let build = header_tree::find_build(&tree, release)?;
    tools::check(&tree, &build, &facts.config, arch)?;
    Ok(Prepared { facts, compiler, layer, origin: staged.origin })
}
