//! Finds imported header sets, in the store first and then in the cache, and stores them there.
//!
//! Imported header sets take precedence over a family's own source. Each lookup queries the store, so that a new import changes the
//! input hashes of all farriers at once.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{
    facts::annotations,
    image::{Digest, Tag},
    kernel::{Architecture, Compiler, HeaderSource, KernelRelease, KernelTarget},
};
use farrier_local::archive::{self, Limits, Stoppable};
use farrier_store::{InputKind, StoreError, StoredInput, header_tag, platform_header_tag};
use fs_err::File;
use kmod::{KernelFacts, SymbolTable};
use oci::{Hashing, LayerReader, error_chain};
use serde::{Deserialize, Serialize};

use super::{HeaderIdentity, HeaderLookup, HeaderSet, Headers, KIND, verify};
use crate::{
    FetchError, Lookup, Result, TREE, digest,
    kernel_packages::TreeRecord,
    stored::{Input, StoredUnder},
};

/// Limits for imports: several times a kernel's whole source tree.
pub(super) const LIMITS: Limits = Limits { entries: 500_000, bytes: 4 << 30, depth: 64 };

/// Format version; change it when the same set is laid out differently in the cache.
const FORMAT: &str = "brought-1";
/// Kind of the records of imports on this machine.
const IMPORTED: &str = "imported-headers";
/// Maximum length of an origin or identity read from the store.
const MAX_VALUE: usize = 4096;

/// Record of an imported header set in the cache, or its description by the annotations in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ImportRecord {
    pub release: String,
    pub arch: Architecture,
    /// Digest of the uncompressed layer.
    pub content: String,
    /// Contribution to input hashes; `None` if the release determines the content.
    pub identity: Option<String>,
    pub origin: Vec<String>,
    /// Compiler that built the kernel (`gcc 12`), as the set states.
    #[serde(default)]
    pub compiler: Option<String>,
    /// Whether the set was made on this machine or signed by a trusted key. Unsigned registry content is untrusted.
    #[serde(skip, default = "made_here")]
    pub is_known: bool,
}

fn made_here() -> bool {
    true
}

impl ImportRecord {
    /// Parses an artifact's annotations, which are untrusted input.
    pub(super) fn of_stored(
        stored: &StoredInput,
        release: &KernelRelease,
        arch: Architecture,
    ) -> Result<Self> {
        let annotation = |key: &str| stored.annotations.get(key).map(String::as_str);
        let invalid = |key: &str| {
            let value = annotation(key).unwrap_or_default().chars().take(80).filter(|c| !c.is_control());
            let (location, value) = (stored.repository.to_string(), value.collect::<String>());
            unusable(&location, &format!("its annotation {key} holds {value:?}"))
        };
        for (key, expected) in
            [(annotations::KERNEL_RELEASE, release.as_str()), (annotations::ARCHITECTURE, arch.as_str())]
        {
            if annotation(key) != Some(expected) {
                return Err(invalid(key));
            }
        }
        let text = |key: &str| match annotation(key) {
            Some(_) => printable_annotation(stored, key).map(Some).ok_or_else(|| invalid(key)),
            None => Ok(None),
        };
        let content = annotation(annotations::HEADERS_CONTENT).and_then(|text| text.parse::<Digest>().ok());
        Ok(Self {
            release: release.to_string(),
            arch,
            content: content.ok_or_else(|| invalid(annotations::HEADERS_CONTENT))?.to_string(),
            identity: text(annotations::HEADERS_IDENTITY)?,
            origin: parts(&text(annotations::HEADERS)?.unwrap_or_default()),
            compiler: printable_annotation(stored, annotations::COMPILER),
            is_known: stored.is_signed,
        })
    }

    /// Returns the content digest if the annotations are unverified. If the identity equals the content digest, input hashes
    /// already contain the digest.
    pub(super) fn unverified(&self) -> Option<Digest> {
        let content: Digest = self.content.parse().ok()?;
        (!self.is_known && self.identity.as_deref() != Some(content.hex())).then_some(content)
    }

    /// Returns the annotations of the artifact in the store.
    pub(super) fn annotations(&self, facts: &KernelFacts) -> [(&'static str, Option<String>); 8] {
        let symbols =
            facts.symbols.as_ref().map_or_else(|| "none".to_owned(), |table| table.len().to_string());
        let Self { release, arch, content, identity, origin, compiler, is_known: _ } = self;
        [
            (annotations::TITLE, Some(title_of(release, *arch))),
            (annotations::KERNEL_RELEASE, Some(release.clone())),
            (annotations::ARCHITECTURE, Some(arch.to_string())),
            (annotations::COMPILER, compiler.clone()),
            (annotations::EXPORTED_SYMBOLS, Some(symbols)),
            (annotations::HEADERS_CONTENT, Some(content.clone())),
            (annotations::HEADERS_IDENTITY, identity.clone()),
            (annotations::HEADERS, Some(origin.join(", "))),
        ]
    }

    /// Returns the record of the entry in the cache.
    pub(super) fn tree_record(&self) -> TreeRecord {
        let key = digest::of_parts([FORMAT, &self.release, self.arch.as_str(), &self.content]);
        TreeRecord { release: self.release.clone(), arch: Some(self.arch), key, origin: self.origin.clone() }
    }
}

/// Returns the display name of a header set.
fn title_of(release: &str, arch: Architecture) -> String {
    format!("headers of {release} ({arch})")
}

/// Creates an error about an unusable header set in the store.
fn unusable(location: &str, reason: &str) -> FetchError {
    FetchError::StoredHeaders {
        message: format!("cannot use the headers in {location}: {reason}"),
        hint: format!("import the headers again with --replace, or delete {location}"),
    }
}

/// Returns an annotation if it is short enough and printable.
fn printable_annotation(stored: &StoredInput, key: &str) -> Option<String> {
    let text = stored.annotations.get(key)?;
    (text.len() <= MAX_VALUE && !text.chars().any(char::is_control)).then(|| text.clone())
}

/// Whether a stored set was imported: the digest of its content is its identity. Sets of a kernel family's own source have another
/// identity, or none.
fn is_imported(stored: &StoredInput) -> bool {
    let [content, identity] = [annotations::HEADERS_CONTENT, annotations::HEADERS_IDENTITY]
        .map(|key| stored.annotations.get(key).map(String::as_str));
    identity.is_some() && content.and_then(|content| content.strip_prefix("sha256:")) == identity
}

/// Returns the stored header set for a kernel target: an imported set, or else the set of the target's platform. An older farrier
/// stored sets of all platforms under the release. `find` looks up a tag.
async fn first_stored<F>(target: &KernelTarget, find: impl Fn(Tag) -> F) -> Result<Option<StoredInput>>
where
    F: Future<Output = Result<Option<StoredInput>>>,
{
    let of_release = find(header_tag(&target.release, target.arch)?).await;
    let is_decisive = match &of_release {
        Ok(stored) => stored.as_ref().is_some_and(is_imported),
        Err(error) => !matches!(error, FetchError::Store(StoreError::Untrusted(..))),
    };
    if is_decisive {
        return of_release;
    }
    match find(platform_header_tag(target)?).await? {
        Some(stored) if is_for(&stored, target) => Ok(Some(stored)),
        _ => Ok(of_release?.filter(|stored| is_for(stored, target))),
    }
}

/// Whether a stored set may be used on a target's platform.
fn is_for(stored: &StoredInput, target: &KernelTarget) -> bool {
    stored.annotations.get(annotations::OS).is_none_or(|os| *os == platform_of(target))
}

fn platform_of(target: &KernelTarget) -> String {
    format!("{}-{}", target.os, target.os_version)
}

/// Returns the compiler that built the kernel of a stored set, as its annotation states.
pub(super) fn compiler_of(stored: &StoredInput) -> Option<Compiler> {
    Compiler::from_name(&printable_annotation(stored, annotations::COMPILER)?)
}

fn parts(origin: &str) -> Vec<String> {
    origin.split(", ").filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Returns repository and tag, for messages.
pub(super) fn display_name(stored: &StoredInput, tag: &Tag) -> String {
    format!("{}:{tag}", stored.repository)
}

/// A header set in the cache, or one in the store as described by its annotations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedHeaders {
    /// Kernel release.
    pub release: String,
    /// Architecture.
    pub arch: String,
    /// Operating system and version for which a stored set counts, such as `debian-12`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// The kernel's compiler.
    pub compiler: Option<String>,
    /// Number of symbols in `Module.symvers`; `None` without that file.
    pub exported_symbols: Option<usize>,
    /// Location: `cache` or `registry`.
    pub place: &'static str,
    /// Path of the tree, or repository and tag.
    #[serde(rename = "path")]
    pub reference: String,
    /// Digest of the manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Origin of the set.
    pub origin: Vec<String>,
}

impl From<&HeaderSet> for ListedHeaders {
    fn from(headers: &HeaderSet) -> Self {
        Self {
            release: headers.facts.release.to_string(),
            arch: headers.facts.arch.to_string(),
            os: None,
            compiler: headers.compiler.map(|compiler| compiler.to_string()),
            exported_symbols: headers.facts.symbols.as_ref().map(SymbolTable::len),
            place: "cache",
            reference: headers.root.display().to_string(),
            digest: None,
            origin: headers.origin.clone(),
        }
    }
}

impl Headers<'_> {
    /// Returns the stored header set that counts for every platform of a kernel release.
    pub async fn in_store(self, release: &KernelRelease, arch: Architecture) -> Result<Option<StoredInput>> {
        self.0.stored(InputKind::Headers, &header_tag(release, arch)?).await
    }

    /// Returns the stored header set for a kernel target.
    pub(super) async fn in_store_for(self, target: &KernelTarget) -> Result<Option<StoredInput>> {
        let fetcher = self.0;
        first_stored(target, |tag| async move { fetcher.stored(InputKind::Headers, &tag).await }).await
    }

    /// Lists all stored header sets, by tag.
    pub async fn list_store(self) -> Result<Vec<ListedHeaders>> {
        let Some(store) = self.0.store() else { return Ok(Vec::new()) };
        let mut listed = Vec::new();
        for tag in store.tags(InputKind::Headers).await? {
            // The artifact may have been deleted since the listing.
            let Some(stored) = store.find(InputKind::Headers, &tag).await? else { continue };
            let text = |key: &str| printable_annotation(&stored, key);
            listed.push(ListedHeaders {
                release: text(annotations::KERNEL_RELEASE).unwrap_or_else(|| "unknown".to_owned()),
                arch: text(annotations::ARCHITECTURE).unwrap_or_else(|| "unknown".to_owned()),
                os: text(annotations::OS),
                compiler: text(annotations::COMPILER),
                exported_symbols: text(annotations::EXPORTED_SYMBOLS).and_then(|count| count.parse().ok()),
                place: "registry",
                reference: display_name(&stored, &tag),
                digest: Some(stored.digest.clone()),
                origin: parts(&text(annotations::HEADERS).unwrap_or_default()),
            });
        }
        Ok(listed)
    }

    /// Puts the header set of a kernel into the store, unless the store already has one for the platform or an imported one. If the
    /// family's own source is unavailable, a set that an older farrier stored under the release counts. A set from packages has no
    /// identity beyond its release.
    pub async fn keep(self, source: &HeaderSource, target: &KernelTarget) -> Result<Lookup<StoredUnder>> {
        let KernelTarget { os: _, os_version: _, release, arch } = target;
        let (kind, what) = (InputKind::Headers, title_of(release.as_str(), *arch));
        let imported = Input { kind, what: what.clone(), tag: header_tag(release, *arch)?, declared: None };
        let own = Input { kind, what, tag: platform_header_tag(target)?, declared: None };
        let of_release = self.0.find_trusted(&imported).await?.filter(|stored| is_for(stored, target));
        if let Some(stored) = of_release.clone().filter(is_imported) {
            return Ok(Lookup::Found(self.0.tag(imported, stored, false).await?));
        }
        if let Some(stored) = self.0.find_trusted(&own).await?.filter(|stored| is_for(stored, target)) {
            return Ok(Lookup::Found(self.0.tag(own, stored, false).await?));
        }
        let found = self.find_without_store(source, target).await;
        let is_unavailable = match &found {
            Ok(lookup) => matches!(lookup, Lookup::Missing { .. }),
            Err(error) => error.is_upstream(),
        };
        if is_unavailable && let Some(stored) = of_release {
            return Ok(Lookup::Found(self.0.tag(imported, stored, false).await?));
        }
        let HeaderSet { root: tree, facts, compiler, origin, identity, content, .. } = match found? {
            Lookup::Found(found) => *found,
            Lookup::Missing { looked_for, hint } => return Ok(Lookup::Missing { looked_for, hint }),
        };
        let packed = self.0.pack(tree).await?;
        let set = ImportRecord {
            release: release.to_string(),
            arch: *arch,
            content: packed.layer.diff_id.to_string(),
            identity,
            origin,
            compiler: compiler.map(|compiler| compiler.to_string()),
            is_known: true,
        };
        let mut packed = packed.with_annotations(set.annotations(&facts));
        // Only an imported set has its content's digest here.
        let input = if content.is_some() {
            imported
        } else {
            packed.annotations.insert(annotations::OS.to_owned(), platform_of(target));
            own
        };
        Ok(Lookup::Found(self.0.put(input, packed).await?))
    }

    /// Returns the identity of a refused header set, as its annotations state it, so that images built with the header set stay
    /// up to date.
    pub(super) async fn refused(self, target: &KernelTarget, error: &StoreError) -> Result<HeaderIdentity> {
        let KernelTarget { os: _, os_version: _, release, arch } = target;
        let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
        let refused = Some(format!("{}{hint}", error_chain(error)));
        let store = self.0.required_store()?;
        let found = first_stored(target, |tag| async move {
            store.find(InputKind::Headers, &tag).await.map_err(FetchError::from)
        });
        let found = found.await?;
        let imported = found.and_then(|stored| ImportRecord::of_stored(&stored, release, *arch).ok());
        let compiler = imported.as_ref().and_then(|set| Compiler::from_name(set.compiler.as_deref()?));
        let identity = imported.and_then(|set| set.identity);
        Ok(HeaderIdentity { identity, compiler, refused, ..HeaderIdentity::default() })
    }

    /// Returns the imported set of this kernel, if any. The store takes precedence, so that all farriers that publish to one
    /// registry build with the same headers.
    pub(super) async fn imported(self, target: &KernelTarget) -> Result<Option<ImportRecord>> {
        let KernelTarget { os: _, os_version: _, release, arch } = target;
        match self.in_store_for(target).await? {
            Some(stored) => ImportRecord::of_stored(&stored, release, *arch).map(Some),
            None => self.imported_here(release, *arch),
        }
    }

    /// Returns the import made on this machine, if it is still in the cache.
    pub(super) fn imported_here(
        self,
        release: &KernelRelease,
        arch: Architecture,
    ) -> Result<Option<ImportRecord>> {
        let key = local_key(release.as_str(), arch);
        let Some(imported) = self.0.cache.read_record::<ImportRecord>(IMPORTED, &key)? else {
            return Ok(None);
        };
        Ok(self.0.cache.get(KIND, &imported.tree_record().key)?.map(|_| imported))
    }

    /// Records an imported set for lookups on this machine.
    pub(super) fn remember(self, imported: &ImportRecord) -> Result<()> {
        let ImportRecord { release, arch, .. } = imported;
        Ok(self.0.cache.write_record(IMPORTED, &local_key(release, *arch), imported)?)
    }

    /// Returns the set's tree in the cache; `make` creates it if it is missing.
    pub(super) async fn keep_tree<F, M>(self, imported: &ImportRecord, make: F) -> Result<PathBuf>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<()>>,
    {
        let record = imported.tree_record();
        let entry = self.0.cache.get_or_make(KIND, &record.key, make).await?;
        self.0.cache.write_record(KIND, &record.key, &record)?;
        Ok(entry.join(TREE))
    }

    /// Loads an imported set, fetching it from the store if the cache does not have it.
    pub(super) async fn load_imported(
        self,
        imported: &ImportRecord,
        target: &KernelTarget,
    ) -> Result<HeaderLookup> {
        self.keep_tree(imported, |directory| self.fetch_tree(imported, target, directory)).await?;
        let (content, unverified) = (imported.content.parse().ok(), imported.unverified());
        let found = self.load(imported.tree_record(), imported.identity.clone(), target).await?;
        Ok(found.map(|set| Box::new(HeaderSet { content, unverified, ..*set })))
    }

    async fn fetch_tree(
        self,
        imported: &ImportRecord,
        target: &KernelTarget,
        directory: PathBuf,
    ) -> Result<()> {
        let KernelTarget { os: _, os_version: _, release, arch } = target;
        let stored = self.in_store_for(target).await?.filter(|stored| {
            let existing = ImportRecord::of_stored(stored, release, *arch);
            existing.is_ok_and(|existing| existing.content == imported.content)
        });
        let Some(stored) = stored else {
            return Err(FetchError::StoredHeaders {
                message: format!(
                    "cannot fetch the {} from the store: they no longer exist",
                    title_of(release.as_str(), *arch)
                ),
                hint: "import them again, or run farrier again to look for them elsewhere".to_owned(),
            });
        };
        let what = format!("{}@{}", stored.repository, stored.digest);
        let (target, content) = (target.clone(), imported.content.clone());
        let unpack = move |stop: &AtomicBool, layer: &Path, tree: &Path| {
            unpack_content(layer, tree, &content, &what, stop)?;
            verify(tree, &target)
        };
        self.0.unpack_layer(&stored, directory, unpack).await
    }
}

/// Unpacks a layer and verifies its content digest against the annotation.
fn unpack_content(layer: &Path, root: &Path, content: &str, what: &str, stop: &AtomicBool) -> Result<()> {
    let inner = Stoppable { inner: LayerReader::new(File::open(layer)?)?, stop };
    let mut tar = Hashing::new(inner);
    archive::unpack_tar(&mut tar, root, &LIMITS)
        .map_err(|source| FetchError::Unpack(what.to_owned(), source))?;
    let (_, actual, _) = tar.into_parts();
    if actual.as_str() == content {
        return Ok(());
    }
    Err(unusable(what, &format!("their content is {actual}, but the annotation says {content}")))
}

fn local_key(release: &str, arch: Architecture) -> String {
    digest::of_parts([release, arch.as_str()])
}
