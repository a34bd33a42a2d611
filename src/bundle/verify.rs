//! Adapter: reads all of a bundle before anything of it is used: every frame, every digest, every manifest's references.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::{
    BundleError, Meter, Phase,
    collect::{blobs_of, children},
    entry,
    index::Blob,
    read::{Bundle, HEAD, read_blob},
};
use crate::{image::Digest, oci::AnyManifest};

/// Threads that compare digests, at most: more than this are faster than disks.
const MAX_THREADS: usize = 4;

/// A bundle that is whole, blob by blob.
pub struct Verified {
    pub(super) bundle: Bundle,
    pub(super) manifests: BTreeMap<Digest, Manifest>,
    /// In which frame each carried blob is.
    pub(super) frames: BTreeMap<Digest, usize>,
}

/// A manifest of the bundle.
pub(super) struct Manifest {
    pub(super) bytes: Vec<u8>,
    pub(super) media_type: String,
    pub(super) parsed: AnyManifest,
}

impl Verified {
    /// What was verified.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }
}

impl Bundle {
    /// Reads everything, on several processors. The first thing that is wrong is the error.
    pub fn verify(self, meter: &dyn Meter) -> Result<Verified, BundleError> {
        let blobs: Vec<&Blob> = self.index().carried().collect();
        meter.begin(Phase::Verify, blobs.iter().map(|blob| blob.size).sum());
        let work =
            Work { bundle: &self, blobs: &blobs, next: AtomicUsize::new(0), found: Mutex::default(), meter };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| work.run());
            }
        });
        let Found { manifests, error } = work.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, error)) = error {
            return Err(error);
        }
        self.compare(HEAD + blobs.len(), "the end of the tar", &entry::END)?;
        let frames = blobs.iter().enumerate().map(|(at, blob)| (blob.digest.clone(), HEAD + at)).collect();
        let manifests = self.parse(&manifests)?;
        self.check_references(&manifests)?;
        meter.end();
        Ok(Verified { manifests, frames, bundle: self })
    }

    fn inconsistent(&self, reason: String) -> BundleError {
        BundleError::Inconsistent { path: self.path.clone(), reason }
    }

    fn parse(
        &self,
        manifests: &BTreeMap<Digest, Vec<u8>>,
    ) -> Result<BTreeMap<Digest, Manifest>, BundleError> {
        let mut parsed = BTreeMap::new();
        for blob in &self.index().blobs {
            let (Some(media_type), Some(bytes)) = (&blob.manifest, manifests.get(&blob.digest)) else {
                continue;
            };
            let manifest = AnyManifest::parse(bytes)
                .map_err(|error| self.inconsistent(format!("manifest {}: {error}", blob.digest)))?;
            let own = match &manifest {
                AnyManifest::Image(image) => image.media_type.as_ref(),
                AnyManifest::Index(index) => index.media_type.as_ref(),
            };
            if own.is_some_and(|own| own != media_type) {
                return Err(self.inconsistent(format!("manifest {} is no {media_type}", blob.digest)));
            }
            let (bytes, media_type) = (bytes.clone(), media_type.clone());
            parsed.insert(blob.digest.clone(), Manifest { bytes, media_type, parsed: manifest });
        }
        Ok(parsed)
    }

    /// What manifests name is in the bundle, or in its base, for the same repositories.
    fn check_references(&self, manifests: &BTreeMap<Digest, Manifest>) -> Result<(), BundleError> {
        let known: BTreeMap<&Digest, &Blob> =
            self.index().blobs.iter().map(|blob| (&blob.digest, blob)).collect();
        for (digest, manifest) in manifests {
            let Some(holder) = known.get(digest) else { continue };
            let named = blobs_of(&manifest.parsed).map(|blob| (blob, false));
            for (wanted, is_manifest) in named.chain(children(&manifest.parsed).iter().map(|m| (m, true))) {
                let fits = known.get(&wanted.digest).is_some_and(|blob| {
                    blob.size == wanted.size
                        && holder.repositories.is_subset(&blob.repositories)
                        && (!is_manifest || blob.manifest.is_some())
                });
                if !fits {
                    return Err(self.inconsistent(format!(
                        "manifest {digest} names {} of {} bytes, which is missing",
                        wanted.digest, wanted.size
                    )));
                }
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct Found {
    manifests: BTreeMap<Digest, Vec<u8>>,
    /// The first in the file, and in which frame.
    error: Option<(usize, BundleError)>,
}

struct Work<'a> {
    bundle: &'a Bundle,
    blobs: &'a [&'a Blob],
    next: AtomicUsize,
    found: Mutex<Found>,
    meter: &'a dyn Meter,
}

impl Work<'_> {
    fn run(&self) {
        loop {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(blob) = self.blobs.get(at) else { return };
            if let Err(error) = self.blob(HEAD + at, blob) {
                let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
                if found.error.as_ref().is_none_or(|(first, _)| HEAD + at < *first) {
                    found.error = Some((HEAD + at, error));
                }
                // The others end after the frame that they are at.
                self.next.store(self.blobs.len(), Ordering::Relaxed);
            }
        }
    }

    fn blob(&self, frame: usize, blob: &Blob) -> Result<(), BundleError> {
        let what = || format!("blob {}", blob.digest);
        let mut bytes = Vec::new();
        let section = self.bundle.section(frame);
        let length = section.len();
        let read = read_blob(section, blob, |chunk| {
            self.meter.advance(chunk.len() as u64);
            if blob.manifest.is_some() {
                bytes.extend_from_slice(chunk);
            }
        });
        match read {
            Ok(read) if read == length => {}
            Ok(_) => {
                return Err(self.bundle.damaged(frame, &what(), "its frame is shorter than the end says"));
            }
            Err(error) => return Err(self.bundle.damaged(frame, &what(), &error.to_string())),
        }
        if blob.manifest.is_some() {
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.manifests.insert(blob.digest.clone(), bytes);
        }
        Ok(())
    }
}
