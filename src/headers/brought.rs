//! Adapter: finds header sets that somebody brought: in the store beside the images, else in the cache.
//!
//! They come before a family's own source. What the store answered is believed for as long as package lists are.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{
    FetchError, Fetcher, HeaderLookup, ImportError,
    blocking::blocking,
    digest,
    header_set::{Found, KIND},
    import::LIMITS,
};
use crate::{
    archive,
    image::{Digest, Tag},
    kernel::{Architecture, KernelRelease, KernelTarget},
    oci::{LayerReader, annotations},
    store::{Kind, Stored, header_tag},
};

/// Changes when the same set is laid out differently in the cache.
const FORMAT: &str = "brought-1";
/// The kind of the records of what was imported here.
const IMPORTED: &str = "imported-headers";
/// The kind of the records of what the store answered.
const STORED: &str = "stored-headers";
/// The tree's name in its cache entry. It has a mode of its own: the entry's is private.
pub(super) const TREE: &str = super::header_set::TREE;
/// Longest origin and identity that are read from the store.
const MAX_VALUE: usize = 4096;

/// A header set that somebody brought.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Brought {
    pub release: String,
    pub arch: Architecture,
    /// Digest of its uncompressed layer.
    pub content: String,
    /// What goes into input hashes; `None` where the release says it all.
    pub identity: Option<String>,
    pub origin: Vec<String>,
}

/// What the store answered.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// Seconds since 1970.
    at: u64,
    found: Option<Brought>,
}

impl Brought {
    /// Reads an artifact's annotations, which are not trusted.
    pub(super) fn of_stored(
        stored: &Stored,
        release: &KernelRelease,
        arch: Architecture,
    ) -> Result<Self, FetchError> {
        let note = |key: &'static str| stored.annotations.get(key).map(String::as_str);
        let wrong = |key: &'static str| ImportError::Annotation {
            place: stored.repository.to_string(),
            key,
            value: note(key).unwrap_or_default().chars().take(80).filter(|c| !c.is_control()).collect(),
        };
        let text = |key: &'static str| match note(key) {
            Some(text) if text.len() > MAX_VALUE || text.chars().any(char::is_control) => Err(wrong(key)),
            text => Ok(text.map(str::to_owned)),
        };
        if note(annotations::KERNEL_RELEASE) != Some(release.as_str()) {
            return Err(wrong(annotations::KERNEL_RELEASE).into());
        }
        if note(annotations::ARCHITECTURE) != Some(arch.as_str()) {
            return Err(wrong(annotations::ARCHITECTURE).into());
        }
        let content = note(annotations::HEADERS_CONTENT).and_then(|text| text.parse::<Digest>().ok());
        let origin = text(annotations::HEADERS)?.unwrap_or_default();
        Ok(Self {
            release: release.to_string(),
            arch,
            content: content.ok_or_else(|| wrong(annotations::HEADERS_CONTENT))?.to_string(),
            identity: text(annotations::HEADERS_IDENTITY)?,
            origin: origin.split(", ").filter(|part| !part.is_empty()).map(str::to_owned).collect(),
        })
    }

    /// The cache's key for it.
    fn key(&self) -> String {
        digest::of_parts([FORMAT, &self.release, self.arch.as_str(), &self.content])
    }

    fn found(&self) -> Found {
        Found { release: self.release.clone(), arch: self.arch, key: self.key(), origin: self.origin.clone() }
    }
}

/// Repository and tag, for messages.
pub(super) fn place_of(stored: &Stored, tag: &Tag) -> String {
    format!("{}:{tag}", stored.repository)
}

/// A header set in the store, as its notes say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedHeaders {
    /// Kernel release.
    pub release: String,
    /// Architecture.
    pub arch: String,
    /// The kernel's compiler.
    pub compiler: Option<String>,
    /// Symbols in `Module.symvers`; `None` without one.
    pub exported_symbols: Option<usize>,
    /// Repository and tag.
    pub reference: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// Where it came from.
    pub origin: Vec<String>,
}

impl Fetcher {
    /// What the store has, by tag.
    pub async fn stored_header_sets(&self) -> Result<Vec<ListedHeaders>, FetchError> {
        let Some(store) = self.store() else { return Ok(Vec::new()) };
        let mut listed = Vec::new();
        for tag in store.tags(Kind::Headers).await? {
            // Deleted in between.
            let Some(stored) = store.find(Kind::Headers, &tag).await? else { continue };
            let note = |key: &str| {
                let text = stored.annotations.get(key)?;
                (text.len() <= MAX_VALUE && !text.chars().any(char::is_control)).then(|| text.clone())
            };
            let origin = note(annotations::HEADERS).unwrap_or_default();
            listed.push(ListedHeaders {
                release: note(annotations::KERNEL_RELEASE).unwrap_or_else(|| "unknown".to_owned()),
                arch: note(annotations::ARCHITECTURE).unwrap_or_else(|| "unknown".to_owned()),
                compiler: note(annotations::COMPILER),
                exported_symbols: note(annotations::EXPORTED_SYMBOLS).and_then(|count| count.parse().ok()),
                reference: place_of(&stored, &tag),
                digest: stored.digest.clone(),
                origin: origin.split(", ").filter(|part| !part.is_empty()).map(str::to_owned).collect(),
            });
        }
        Ok(listed)
    }

    /// The set that somebody brought for this kernel, if any: what the store has comes first, so that all who publish
    /// to one registry build with the same headers.
    pub(super) async fn brought(&self, target: &KernelTarget) -> Result<Option<Brought>, FetchError> {
        let KernelTarget { os: _, os_version: _, release, arch } = target;
        if let Some(found) = self.ask_store(release, *arch).await? {
            return Ok(Some(found));
        }
        self.local_headers(release, *arch)
    }

    async fn ask_store(
        &self,
        release: &KernelRelease,
        arch: Architecture,
    ) -> Result<Option<Brought>, FetchError> {
        let Some(key) = self.answer_key(release, arch)? else { return Ok(None) };
        let now = now();
        if let Some(Answer { at, found }) = self.cache.read_record::<Answer>(STORED, &key)?
            && at <= now
            && now - at < self.options.refresh.as_secs()
        {
            return Ok(found);
        }
        let stored = self.stored_headers(release, arch).await?;
        let found = stored.map(|stored| Brought::of_stored(&stored, release, arch)).transpose()?;
        let answer = Answer { at: now, found };
        self.cache.write_record(STORED, &key, &answer)?;
        Ok(answer.found)
    }

    /// Forgets what the store answered for a kernel: what is missing now may be imported at any moment.
    pub(super) fn forget_answer(&self, target: &KernelTarget) -> Result<(), FetchError> {
        if let Some(key) = self.answer_key(&target.release, target.arch)? {
            self.cache.remove_record(STORED, &key)?;
        }
        Ok(())
    }

    fn answer_key(&self, release: &KernelRelease, arch: Architecture) -> Result<Option<String>, FetchError> {
        let Some(store) = self.store() else { return Ok(None) };
        let repository = store.repository(Kind::Headers)?.to_string();
        Ok(Some(digest::of_parts([repository.as_str(), release.as_str(), arch.as_str()])))
    }

    /// What was imported on this machine, if it is still in the cache.
    pub(super) fn local_headers(
        &self,
        release: &KernelRelease,
        arch: Architecture,
    ) -> Result<Option<Brought>, FetchError> {
        let found = self.cache.read_record::<Brought>(IMPORTED, &local_key(release.as_str(), arch))?;
        let Some(found) = found else { return Ok(None) };
        Ok(self.cache.get(KIND, &found.key())?.map(|_| found))
    }

    /// Notes an imported set, so that look-ups find it.
    pub(super) fn remember(&self, brought: &Brought, stored: Option<&Stored>) -> Result<(), FetchError> {
        self.cache.write_record(IMPORTED, &local_key(&brought.release, brought.arch), brought)?;
        if let Some(stored) = stored
            && let Ok(release) = brought.release.parse()
            && let Some(key) = self.answer_key(&release, brought.arch)?
        {
            // What the store says of itself counts: the same content may have come from packages.
            let found = Some(Brought::of_stored(stored, &release, brought.arch)?);
            self.cache.write_record(STORED, &key, &Answer { at: now(), found })?;
        }
        Ok(())
    }

    /// The set's tree in the cache, made by `make` if it is not there.
    pub(super) async fn keep_tree<F, M>(&self, brought: &Brought, make: F) -> Result<PathBuf, FetchError>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), FetchError>>,
    {
        let found = brought.found();
        let place = self.cache.get_or_make(KIND, &found.key, make).await?;
        self.cache.write_record(KIND, &found.key, &found)?;
        Ok(place.join(TREE))
    }

    /// Loads a set that was brought, from the store if the cache does not have it.
    pub(super) async fn load_brought(
        &self,
        brought: &Brought,
        target: &KernelTarget,
    ) -> Result<HeaderLookup, FetchError> {
        let make = |directory: PathBuf| self.fetch_tree(brought, target, directory);
        self.keep_tree(brought, make).await?;
        self.load(brought.found(), target).await
    }

    async fn fetch_tree(
        &self,
        brought: &Brought,
        target: &KernelTarget,
        directory: PathBuf,
    ) -> Result<(), FetchError> {
        let KernelTarget { os: _, os_version: _, release, arch } = target;
        let tag = header_tag(release, *arch)?;
        let stored = self.stored_headers(release, *arch).await?.filter(|stored| {
            Brought::of_stored(stored, release, *arch).is_ok_and(|there| there.content == brought.content)
        });
        let (Some(store), Some(stored)) = (self.store(), stored) else {
            self.forget_answer(target)?;
            return Err(ImportError::Vanished { release: release.clone(), arch: *arch }.into());
        };
        let layer = directory.join("layer");
        store.fetch(&stored, &layer).await?;
        let (target, what, content) = (target.clone(), place_of(&stored, &tag), brought.content.clone());
        blocking(move |stop| {
            let root = directory.join(TREE);
            std::fs::create_dir(&root).map_err(super::io_error("create", &root))?;
            unpack_content(&layer, &root, &content, &what, stop)?;
            std::fs::remove_file(&layer).map_err(super::io_error("remove", &layer))?;
            super::header_set::verify(Path::new(&root), &target)
        })
        .await
    }
}

/// Unpacks a layer whose notes say what is in it: by that the set is known from now on.
fn unpack_content(
    layer: &Path,
    root: &Path,
    content: &str,
    what: &str,
    stop: &AtomicBool,
) -> Result<(), FetchError> {
    let file = File::open(layer).map_err(super::io_error("open", layer))?;
    let inner = LayerReader::new(file).map_err(super::io_error("read", layer))?;
    let mut tar = Hashed { inner, hash: Sha256::new(), stop };
    archive::unpack_tar(&mut tar, root, &LIMITS)
        .map_err(|source| FetchError::Unpack { what: what.to_owned(), source })?;
    let found = Digest::from_sha256(&tar.hash.finalize().into()).to_string();
    if found == content {
        return Ok(());
    }
    Err(ImportError::Content { place: what.to_owned(), found, stated: content.to_owned() }.into())
}

/// Hashes what passes through; fails once it is told to stop.
struct Hashed<'a, R> {
    inner: R,
    hash: Sha256,
    stop: &'a AtomicBool,
}

impl<R: Read> Read for Hashed<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("stopped"));
        }
        let count = self.inner.read(buffer)?;
        self.hash.update(buffer.get(..count).unwrap_or_default());
        Ok(count)
    }
}

fn local_key(release: &str, arch: Architecture) -> String {
    digest::of_parts([release, arch.as_str()])
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
