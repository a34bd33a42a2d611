//! Verifies a whole bundle before any of it is used: every frame, every digest, and the references of every manifest.

use std::{
    collections::BTreeMap,
    panic,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use farrier_core::image::Digest;
use oci::AnyManifest;

use super::{
    BundleError, Meter, Phase, Result,
    collect::blobs_of,
    entry,
    index::Blob,
    read::{Bundle, HEAD_ENTRIES, read_blob},
};

/// Maximum number of threads; more would be faster than the disk.
const MAX_THREADS: usize = 4;

/// A bundle whose content is completely verified.
pub struct Verified {
    pub(super) bundle: Bundle,
    pub(super) manifests: BTreeMap<Digest, Manifest>,
    /// Frame of each blob in the bundle.
    pub(super) frames: BTreeMap<Digest, usize>,
}

pub(super) struct Manifest {
    pub(super) bytes: Vec<u8>,
    pub(super) media_type: String,
    pub(super) parsed: AnyManifest,
}

impl Verified {
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }
}

impl Bundle {
    /// Reads and verifies everything, on several threads. The error is the first problem in the file.
    pub fn verify(self, meter: &dyn Meter) -> Result<Verified> {
        let blobs: Vec<&Blob> = self.index().carried().collect();
        meter.begin(Phase::Verify, blobs.iter().map(|blob| blob.size).sum());
        let next = AtomicUsize::new(0);
        let read_frames = || {
            let mut outcomes = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(blob) = blobs.get(at) else { return outcomes };
                let outcome = self.read_frame(HEAD_ENTRIES + at, blob, meter);
                if outcome.is_err() {
                    // Stops the other threads after their current frame.
                    next.store(blobs.len(), Ordering::Relaxed);
                }
                outcomes.push((at, outcome));
            }
        };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let mut outcomes: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(read_frames)).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, Vec<_>>| {
                thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
            };
            threads.into_iter().flat_map(join).collect()
        });
        // Report the first error in the file, independent of the threads' timing.
        outcomes.sort_by_key(|(at, _)| *at);
        let contents = outcomes.into_iter().map(|(_, content)| content).collect::<Result<Vec<_>>>()?;
        self.compare(HEAD_ENTRIES + blobs.len(), "the end of the tar", &entry::TAR_END)?;
        let frames = blobs.iter().map(|blob| blob.digest.clone()).zip(HEAD_ENTRIES..).collect();
        let mut manifests = BTreeMap::new();
        for (blob, content) in blobs.iter().zip(contents) {
            if let (Some(media_type), Some(bytes)) = (&blob.manifest, content) {
                manifests.insert(blob.digest.clone(), self.parse(&blob.digest, media_type, bytes)?);
            }
        }
        self.check_references(&manifests)?;
        meter.end();
        Ok(Verified { manifests, frames, bundle: self })
    }

    fn inconsistent(&self, reason: &str) -> BundleError {
        BundleError::inconsistent(&self.path, reason)
    }

    fn parse(&self, digest: &Digest, media_type: &str, bytes: Vec<u8>) -> Result<Manifest> {
        let parsed = AnyManifest::parse(&bytes)
            .map_err(|error| self.inconsistent(&format!("manifest {digest}: {error}")))?;
        let stated_type = match &parsed {
            AnyManifest::Image(image) => image.media_type.as_ref(),
            AnyManifest::Index(index) => index.media_type.as_ref(),
        };
        if stated_type.is_some_and(|stated_type| stated_type != media_type) {
            return Err(self.inconsistent(&format!("manifest {digest} is not a {media_type}")));
        }
        Ok(Manifest { bytes, media_type: media_type.to_owned(), parsed })
    }

    /// Checks that everything that manifests name is in the bundle, or in its base, for the same repositories.
    fn check_references(&self, manifests: &BTreeMap<Digest, Manifest>) -> Result<()> {
        let known: BTreeMap<&Digest, &Blob> =
            self.index().blobs.iter().map(|blob| (&blob.digest, blob)).collect();
        for (digest, manifest) in manifests {
            let Some(manifest_blob) = known.get(digest) else { continue };
            let children = manifest.parsed.children().iter().map(|child| (child, true));
            for (referenced, is_manifest) in
                blobs_of(&manifest.parsed).map(|blob| (blob, false)).chain(children)
            {
                let is_present = known.get(&referenced.digest).is_some_and(|blob| {
                    blob.size == referenced.size
                        && manifest_blob.repositories.is_subset(&blob.repositories)
                        && (!is_manifest || blob.manifest.is_some())
                });
                if !is_present {
                    return Err(self.inconsistent(&format!(
                        "manifest {digest} names {} of {} bytes, which is missing",
                        referenced.digest, referenced.size
                    )));
                }
            }
        }
        Ok(())
    }

    /// Reads a blob's frame and verifies its digest. Returns the content if it is a manifest.
    fn read_frame(&self, frame: usize, blob: &Blob, meter: &dyn Meter) -> Result<Option<Vec<u8>>> {
        let is_manifest = blob.manifest.is_some();
        let mut bytes = Vec::new();
        let section = self.section(frame);
        let length = section.len();
        let read = read_blob(section, blob, |chunk| {
            meter.advance(chunk.len() as u64);
            if is_manifest {
                bytes.extend_from_slice(chunk);
            }
        });
        let reason = match read {
            Ok(read) if read == length => return Ok(is_manifest.then_some(bytes)),
            Ok(_) => "its frame is shorter than the trailer states".to_owned(),
            Err(error) => error.to_string(),
        };
        Err(self.damaged(frame, &entry::blob_name(&blob.digest), &reason))
    }
}
