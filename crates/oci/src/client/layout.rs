//! An OCI image layout directory (image-spec `image-layout.md`) that holds several repositories.
//!
//! The annotation `org.opencontainers.image.ref.name` has the image's name, `<repository>:<tag>` or `<repository>@<digest>`.
//! `skopeo inspect oci:PATH:<repository>:<tag>` and related tools look up this name.
//!
//! These tools accept letters and digits with single `-._:@+/` or `--` between them. They can use an image whose tag contains
//! `__`, for example, only by digest.

use std::{
    collections::BTreeMap,
    fmt::Display,
    io::{self, BufReader, ErrorKind, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use fs_err::{self as fs, File};
use futures::TryStreamExt as _;
use tokio_util::io::ReaderStream;

use super::{
    error::{RegistryError, Result},
    registry::{BlobContent, BlobStream, Registry, StoredManifest, Upload},
    stream::{CHUNK, blocking, copy_verified, digest_of, replace, save, write_verified},
};
use crate::{
    AnyManifest, Descriptor, Digest, ImageIndex, ImageManifest, MAX_MANIFEST, Repository, Tag, Version,
    annotations::REF_NAME, media_type,
};

/// Content of the file `oci-layout`.
const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
/// Lock file of index writers. It is not part of the specification, and other tools ignore it.
const LOCK: &str = ".farrier.lock";

/// Images in a layout directory. Blobs and the index are replaced atomically and durably.
#[derive(Clone, Debug)]
pub struct LayoutRegistry {
    pub(super) root: PathBuf,
}

impl LayoutRegistry {
    /// Creates a client of the layout at `root`. The first push creates the directory.
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(super) fn blob(&self, digest: &Digest) -> PathBuf {
        self.root.join("blobs/sha256").join(digest.hex())
    }

    /// Whether the blob exists and has content. A power failure can leave an empty file.
    fn is_stored(&self, digest: &Digest) -> bool {
        fs::metadata(self.blob(digest)).is_ok_and(|blob| blob.len() > 0 || *digest == Digest::of(b""))
    }

    fn prepare(&self) -> Result<()> {
        let blobs = self.root.join("blobs/sha256");
        fs::create_dir_all(&blobs)?;
        let marker = self.root.join("oci-layout");
        if !marker.exists() {
            replace(&marker, LAYOUT)?;
        }
        Ok(())
    }

    /// Returns the layout's index, whichever tool wrote it. The index is empty if there is no `index.json`.
    pub fn index(&self) -> Result<ImageIndex> {
        let path = self.root.join("index.json");
        let bytes = match read_bounded(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(ImageIndex::empty()),
            Err(error) => return Err(error.into()),
        };
        ImageIndex::parse(&bytes).map_err(|error| self.protocol("read its index", error))
    }

    pub(super) fn write_index(&self, index: &ImageIndex, action: &str) -> Result<()> {
        let text = index.to_bytes().map_err(|error| self.protocol(action, error))?;
        replace(&self.root.join("index.json"), &text)
    }

    pub(super) fn protocol(&self, action: &str, reason: impl Display) -> RegistryError {
        RegistryError::protocol(self.describe(), action, reason.to_string())
    }

    fn find(&self, repository: &Repository, version: &Version) -> Result<Option<StoredManifest>> {
        let index = self.index()?;
        let found = index.manifests.into_iter().find(|descriptor| match version {
            Version::Tag(_) => name_of(descriptor) == format!("{repository}{version}"),
            Version::Digest(digest) => descriptor.digest == *digest && belongs_to(descriptor, repository),
        });
        found.map(|descriptor| self.read(&descriptor)).transpose()
    }

    /// Reads the manifest of a descriptor and verifies its digest.
    pub fn read(&self, descriptor: &Descriptor) -> Result<StoredManifest> {
        let path = self.blob(&descriptor.digest);
        let bytes = read_bounded(&path)?;
        let digest = digest_of(&bytes, Some(&descriptor.digest), &format!("read {}", path.display()))?;
        Ok(StoredManifest { digest, media_type: descriptor.media_type.clone(), bytes })
    }

    /// Verifies the content of a blob, and returns its path. Blocks the thread.
    pub fn verified_blob(&self, digest: &Digest) -> Result<PathBuf> {
        let path = self.blob(digest);
        copy_verified(File::open(&path)?, io::sink(), digest, &format!("read {}", path.display()))?;
        Ok(path)
    }

    /// Adds a blob of this size. Replaces a blob of another size, which a power failure left.
    fn push_file(&self, digest: &Digest, from: impl Read, size: u64, what: &str) -> Result<Upload> {
        self.prepare()?;
        let path = self.blob(digest);
        if fs::metadata(&path).is_ok_and(|blob| blob.len() == size) {
            return Ok(Upload::Present);
        }
        let action = format!("copy {what} to {}", self.describe());
        write_verified(from, digest, &path, &action).map(Upload::Sent)
    }

    fn push_image(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest> {
        let action = format!("add {repository}{version}");
        let digest = digest_of(bytes, version.digest(), &action)?;
        self.prepare()?;
        let manifest = AnyManifest::parse(bytes).map_err(|error| self.protocol(&action, error))?;
        // While the lock is held, no other process deletes blobs that this manifest names.
        let _lock = self.lock()?;
        for Descriptor { digest, size, .. } in manifest.blobs().chain(manifest.children()) {
            let path = self.blob(digest);
            if !fs::metadata(&path).is_ok_and(|blob| blob.len() == *size) {
                let reason = format!("blob {} is missing or does not have {size} bytes", path.display());
                return Err(self.protocol(&action, reason));
            }
        }
        self.push_file(&digest, bytes, bytes.len() as u64, "manifest")?;

        let mut index = self.index()?;
        let name = format!("{repository}{version}");
        let is_same =
            |descriptor: &Descriptor| descriptor.digest == digest && belongs_to(descriptor, repository);
        if version.digest().is_some() && index.manifests.iter().any(is_same) {
            return Ok(digest);
        }
        // A tag entry replaces a digest entry of the same manifest.
        let by_digest = format!("{repository}@{digest}");
        index.manifests.retain(|descriptor| ![name.as_str(), &by_digest].contains(&name_of(descriptor)));
        let artifact_type = match manifest {
            AnyManifest::Image(image) => image.artifact_type,
            AnyManifest::Index(_) => None,
        };
        index.manifests.push(Descriptor {
            artifact_type,
            annotations: BTreeMap::from([(REF_NAME.to_owned(), name)]),
            ..Descriptor::new(media_type, digest.clone(), bytes.len() as u64)
        });
        self.write_index(&index, &action)?;
        Ok(digest)
    }

    /// Returns descriptors of the manifests with this `subject`. If `artifact_type` is given, only of this type.
    fn referrers_of(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        let mut referrers = Vec::new();
        for descriptor in self.index()?.manifests {
            // Every referrer has an artifact type, from its manifest or its configuration.
            if descriptor.artifact_type.is_none()
                || artifact_type.is_some_and(|kind| descriptor.artifact_type.as_deref() != Some(kind))
            {
                continue;
            }
            let version = Version::Digest(descriptor.digest);
            let Some(stored) = self.find(repository, &version)? else { continue };
            let manifest = ImageManifest::parse(&stored.bytes)
                .map_err(|error| self.protocol(&format!("read {repository}{version}"), error))?;
            if manifest.subject.as_ref().is_some_and(|descriptor| descriptor.digest == *subject) {
                referrers.push(manifest.as_referrer(&stored.bytes));
            }
        }
        Ok(referrers)
    }

    /// Waits for other writers, and locks the index. The kernel releases the lock with the file handle, even if farrier is killed.
    pub(super) fn lock(&self) -> Result<File> {
        let file = File::create(self.root.join(LOCK))?;
        file.lock()?;
        Ok(file)
    }

    /// Runs file I/O outside the async worker threads.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let layout = self.clone();
        blocking(move || work(&layout)).await
    }
}

/// Returns the name of a manifest in the index. Empty if the manifest has no name.
fn name_of(descriptor: &Descriptor) -> &str {
    descriptor.annotations.get(REF_NAME).map(String::as_str).unwrap_or_default()
}

/// Whether a manifest of the index belongs to the repository, under any tag or digest.
pub(super) fn belongs_to(descriptor: &Descriptor, repository: &Repository) -> bool {
    let version = name_of(descriptor).strip_prefix(repository.as_str());
    version.is_some_and(|version| version.starts_with([':', '@']))
}

pub(super) fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // Read one byte more than the limit, so that the parser rejects oversized content.
    BufReader::new(File::open(path)?).take(MAX_MANIFEST as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[async_trait::async_trait]
impl Registry for LayoutRegistry {
    fn describe(&self) -> String {
        format!("oci:{}", self.root.display())
    }

    async fn manifest(&self, repository: &Repository, version: &Version) -> Result<Option<StoredManifest>> {
        let (repository, version) = (repository.clone(), version.clone());
        self.blocking(move |layout| layout.find(&repository, &version)).await
    }

    async fn tags(&self, repository: &Repository) -> Result<Vec<Tag>> {
        let prefix = format!("{repository}:");
        let index = self.blocking(Self::index).await?;
        let names = index.manifests.iter().map(name_of);
        Ok(names.filter_map(|name| name.strip_prefix(&prefix)?.parse().ok()).collect())
    }

    async fn has_blob(&self, _repository: &Repository, digest: &Digest) -> Result<bool> {
        let digest = digest.clone();
        self.blocking(move |layout| Ok(layout.is_stored(&digest))).await
    }

    async fn push(&self, _: &Repository, digest: &Digest, content: BlobContent<'_>) -> Result<Upload> {
        let digest = digest.clone();
        match content {
            BlobContent::File(path) => {
                let (path, what) = (path.to_owned(), path.display().to_string());
                self.blocking(move |layout| {
                    let file = File::open(path)?;
                    let size = file.metadata()?.len();
                    layout.push_file(&digest, file, size, &what)
                })
                .await
            }
            BlobContent::Source(source) => {
                let source = Arc::clone(source);
                self.blocking(move |layout| layout.push_file(&digest, source.open()?, source.size(), "blob"))
                    .await
            }
            BlobContent::Bytes(bytes) => {
                let bytes = bytes.to_vec();
                let size = bytes.len() as u64;
                self.blocking(move |layout| layout.push_file(&digest, &bytes[..], size, "bytes")).await
            }
        }
    }

    async fn mount_blob(
        &self,
        _repository: &Repository,
        digest: &Digest,
        _from: &Repository,
    ) -> Result<bool> {
        // All repositories of a layout share their blobs.
        Ok(self.is_stored(digest))
    }

    async fn fetch_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        max_size: u64,
        to: &Path,
    ) -> Result<()> {
        let action = format!("copy {} to {}", self.blob(digest).display(), to.display());
        save(self.open_blob(repository, digest).await?, digest, max_size, to, action).await
    }

    async fn open_blob(&self, _repository: &Repository, digest: &Digest) -> Result<BlobStream> {
        let file = fs::tokio::File::open(self.blob(digest)).await?;
        Ok(Box::pin(ReaderStream::with_capacity(file, CHUNK).map_err(RegistryError::from)))
    }

    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest> {
        let (repository, version) = (repository.clone(), version.clone());
        let (media_type, bytes) = (media_type.to_owned(), bytes.to_vec());
        self.blocking(move |layout| layout.push_image(&repository, &version, &media_type, &bytes)).await
    }

    async fn push_referrer(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest> {
        let version = Version::Digest(Digest::of(bytes));
        self.push_manifest(repository, &version, media_type::OCI_MANIFEST, bytes).await
    }

    async fn referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        let (repository, subject) = (repository.clone(), subject.clone());
        let artifact_type = artifact_type.map(str::to_owned);
        self.blocking(move |layout| layout.referrers_of(&repository, &subject, artifact_type.as_deref()))
            .await
    }

    async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool> {
        let (repository, digest) = (repository.clone(), digest.clone());
        self.blocking(move |layout| layout.delete(&repository, &digest)).await
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
