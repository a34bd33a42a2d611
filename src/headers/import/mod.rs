//! Adapter: header sets that the user brings: looked at, checked, brought into one form, and kept in the cache and in
//! the store beside the images.
//!
//! The same content gives the same layer and the same digest, whatever it came in: names, kinds, links, contents and
//! whether a file can be executed count; order, times and owners do not.

mod error;
mod gather;
mod selection;
mod stage;
mod survey;
mod tools;
mod write;

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use serde::Serialize;

pub use error::ImportError;

use super::{
    FetchError, Fetcher, HeaderSet,
    blocking::blocking,
    brought::{Brought, TREE, place_of},
    io_error, tree,
};
use crate::{
    archive::Limits,
    image::Digest,
    kernel::{Architecture, Compiler, KernelRelease},
    kmod::KernelFacts,
    oci::{Descriptor, Layer, annotations},
    store::{Item, Kind, Store, Stored, header_tag},
};

/// Bounds on what is imported: several times a kernel's whole source tree.
pub(super) const LIMITS: Limits = Limits { entries: 500_000, bytes: 4 << 30, depth: 64 };

/// Where headers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImportSource {
    /// A tarball, a directory, a Debian or RPM package.
    Path(PathBuf),
    /// A node's file system: `/lib/modules/<release>/build` and what it leads to.
    Node(PathBuf),
}

impl fmt::Display for ImportSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Path(path) | Self::Node(path)) = self;
        write!(f, "{}", path.display())
    }
}

/// What is to be imported.
#[derive(Clone, Debug)]
pub struct HeaderImport {
    /// Parts of one header set, in any order.
    pub sources: Vec<ImportSource>,
    /// Its kernel.
    pub release: KernelRelease,
    /// The kernel's architecture.
    pub arch: Architecture,
    /// Take the place of other headers for the same kernel.
    pub replace: bool,
}

/// What became of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It was not known.
    #[serde(rename = "imported")]
    New,
    /// The same content was there already; nothing was sent.
    Known,
    /// It took the place of other headers.
    Replaced,
}

/// An imported header set.
#[derive(Clone, Debug)]
pub struct ImportedHeaders {
    /// What became of it.
    pub outcome: Outcome,
    /// The set in the cache.
    pub headers: HeaderSet,
    /// Digest of its content.
    pub content: Digest,
    /// Bytes of the layer.
    pub size: u64,
    /// Where it stands in the store, when there is one.
    pub stored: Option<Stored>,
}

/// What was made of the sources, in a directory that goes away.
struct Prepared {
    facts: KernelFacts,
    compiler: Compiler,
    layer: Layer,
    origin: Vec<String>,
}

impl Fetcher {
    /// What the store has for a kernel.
    pub async fn stored_headers(
        &self,
        release: &KernelRelease,
        arch: Architecture,
    ) -> Result<Option<Stored>, FetchError> {
        match self.store() {
            Some(store) => Ok(store.find(Kind::Headers, &header_tag(release, arch)?).await?),
            None => Ok(None),
        }
    }

    /// Imports a header set into the cache and, where there is one, the store.
    ///
    /// # Errors
    /// A source cannot be read, is not the header set of this kernel, or others are there already. Nothing is left then.
    pub async fn import_headers(&self, import: HeaderImport) -> Result<ImportedHeaders, FetchError> {
        let HeaderImport { sources, release, arch, replace } = import;
        let work = self.cache.scratch()?;
        let (directory, wanted) = (work.path().to_owned(), release.clone());
        let Prepared { facts, compiler, layer, origin } =
            blocking(move |stop| prepare(&sources, &wanted, arch, &directory, stop)).await?;
        let content = layer.diff_id.clone();
        let brought = Brought {
            release: release.to_string(),
            arch,
            content: content.to_string(),
            identity: Some(content.hex().to_owned()),
            origin,
        };
        let (outcome, stored) = match self.store() {
            Some(store) => {
                let file = work.path().join(LAYER);
                let annotations = annotations_of(&brought, &facts, Some(compiler));
                let (outcome, stored) =
                    keep(store, &brought, &release, &layer, &file, annotations, replace).await?;
                (outcome, Some(stored))
            }
            None => (self.keep_locally(&brought, &release, replace)?, None),
        };
        let made = work.path().join(TREE);
        let place = move |entry: PathBuf| async move {
            fs::rename(&made, entry.join(TREE)).map_err(io_error("rename", &made))
        };
        let root = self.keep_tree(&brought, place).await?;
        self.remember(&brought, stored.as_ref())?;
        let identity = content.hex().to_owned();
        let headers = HeaderSet { root, facts, compiler: Some(compiler), origin: brought.origin, identity };
        Ok(ImportedHeaders { outcome, headers, content, size: layer.size, stored })
    }

    /// May this set be the cache's own for its kernel?
    fn keep_locally(
        &self,
        brought: &Brought,
        release: &KernelRelease,
        replace: bool,
    ) -> Result<Outcome, FetchError> {
        match self.local_headers(release, brought.arch)? {
            None => Ok(Outcome::New),
            Some(found) if found.content == brought.content => Ok(Outcome::Known),
            Some(_) if replace => Ok(Outcome::Replaced),
            Some(found) => Err(ImportError::Different {
                release: release.clone(),
                arch: brought.arch,
                place: format!("the cache {}", self.cache.root().display()),
                holds: found.content,
                content: brought.content.clone(),
            }
            .into()),
        }
    }
}

/// The layer's name in the working directory.
const LAYER: &str = "layer";

fn prepare(
    sources: &[ImportSource],
    release: &KernelRelease,
    arch: Architecture,
    directory: &Path,
    stop: &AtomicBool,
) -> Result<Prepared, FetchError> {
    let staged = stage::stage(sources, directory, stop)?;
    let survey = survey::survey(&staged, release)?;
    let entries = gather::gather(&survey, release, arch, stop)?;
    let tree = directory.join(TREE);
    let layer = write::write(&entries, &tree, &directory.join(LAYER), stop)?;
    let (facts, compiler) = tree::read_header_set(&tree, release, arch)?;
    let compiler = compiler.ok_or_else(|| ImportError::NoCompiler { release: release.clone() })?;
    let build = tree::find_build(&tree, release)?;
    tools::check(&tree, &build, &facts.config, arch)?;
    Ok(Prepared { facts, compiler, layer, origin: staged.origin })
}

/// Puts the set into the store, unless it is there.
async fn keep(
    store: &Store,
    brought: &Brought,
    release: &KernelRelease,
    layer: &Layer,
    file: &Path,
    annotations: BTreeMap<String, String>,
    replace: bool,
) -> Result<(Outcome, Stored), FetchError> {
    let tag = header_tag(release, brought.arch)?;
    let found = store.find(Kind::Headers, &tag).await?;
    if let Some(found) = &found {
        // Damaged notes must not keep a good set from taking their place.
        let there = Brought::of_stored(found, release, brought.arch);
        match there {
            Ok(there) if there.content == brought.content => return Ok((Outcome::Known, found.clone())),
            Err(error) if !replace => return Err(error),
            Ok(there) if !replace => {
                return Err(ImportError::Different {
                    release: release.clone(),
                    arch: brought.arch,
                    place: place_of(found, &tag),
                    holds: there.content,
                    content: brought.content.clone(),
                }
                .into());
            }
            Ok(_) | Err(_) => {}
        }
    }
    let descriptor = Descriptor::new(layer.media_type, layer.digest.clone(), layer.size);
    let item = Item { kind: Kind::Headers, tag: &tag, file, layer: &descriptor, annotations };
    Ok(match found {
        Some(_) => (Outcome::Replaced, store.replace(&item).await?),
        None => (Outcome::New, store.put(&item).await?),
    })
}

/// What a header set in the store says of itself.
pub(super) fn annotations_of(
    brought: &Brought,
    facts: &KernelFacts,
    compiler: Option<Compiler>,
) -> BTreeMap<String, String> {
    let symbols = facts.symbols.as_ref().map_or_else(|| "none".to_owned(), |table| table.len().to_string());
    let Brought { release, arch, content, identity, origin } = brought;
    let notes = [
        (annotations::TITLE, Some(title_of(release, *arch))),
        (annotations::KERNEL_RELEASE, Some(release.clone())),
        (annotations::ARCHITECTURE, Some(arch.to_string())),
        (annotations::COMPILER, compiler.map(|compiler| compiler.to_string())),
        (annotations::EXPORTED_SYMBOLS, Some(symbols)),
        (annotations::HEADERS_CONTENT, Some(content.clone())),
        (annotations::HEADERS_IDENTITY, identity.clone()),
        (annotations::HEADERS, Some(origin.join(", "))),
    ];
    notes.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// A header set as people call it.
pub(super) fn title_of(release: &str, arch: Architecture) -> String {
    format!("headers of {release} ({arch})")
}
