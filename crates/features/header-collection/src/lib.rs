//! Sends header sets from nodes to farrier, for `farrier headers collect` and the HTTP port of `farrier run`. Nodes need no
//! registry credentials.
//!
//! A Job on the node packs the header set and [sends](send()) it to farrier's HTTP port. [`Receiver`] writes the upload to a
//! temporary directory, checks the header set like an import, and stores it.
//!
//! The Job has one secret: the key that an administrator created for one kernel. A holder of the key, the node itself included,
//! can make farrier store one header set for this kernel, but cannot replace an existing header set. The key is never sent. The
//! request contains a MAC over the kernel, the size and the digest, which farrier verifies before it reads the body.
#![forbid(unsafe_code)]

mod receive;
mod send;

use std::{io, path::Path};

use fs_err as fs;
use http::{HeaderMap, HeaderName, header};
use ring::hmac;
use serde::{Deserialize, Serialize};

use farrier_core::{
    image::Digest,
    kernel::{Architecture, KernelRelease},
};
use farrier_inputs::{Outcome, PackedHeaders};
pub use receive::Receiver;
pub use send::{SendError, send};

/// Path of the upload endpoint.
const UPLOAD_PATH: &str = "/headers";
const KERNEL: HeaderName = HeaderName::from_static("x-farrier-kernel");
const ARCH: HeaderName = HeaderName::from_static("x-farrier-arch");
const DIGEST: HeaderName = HeaderName::from_static("x-farrier-digest");
/// Prefix of the MAC in the `authorization` header.
const SCHEME: &str = "Farrier ";
/// Maximum size of a packed header set in bytes. Header sets of distributions have 10 to 50 MiB.
const MAX_SIZE: u64 = 512 << 20;
/// Minimum length of a key in bytes. Shorter keys could be guessed.
const MIN_KEY_BYTES: usize = 32;

/// Header fields of an upload: kernel, size and digest of the header set. The MAC covers all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UploadHeaders {
    release: KernelRelease,
    arch: Architecture,
    size: u64,
    digest: Digest,
}

/// farrier's response to an accepted upload.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Receipt {
    /// Outcome of the import.
    pub outcome: Outcome,
    /// Digest of the header set's content.
    pub content: String,
    /// Artifact in the registry, by digest.
    pub reference: Option<String>,
}

/// An administrator's key, which allows a node to send the header set of one kernel.
pub struct Key(hmac::Key);

impl Key {
    /// Reads a key from a file. Surrounding whitespace is ignored.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is too short for a key.
    pub fn read(file: &Path) -> io::Result<Self> {
        let text = zeroize::Zeroizing::new(fs::read(file)?);
        let key = text.trim_ascii();
        if key.len() < MIN_KEY_BYTES {
            let message = format!("{}: a key must have at least {MIN_KEY_BYTES} characters", file.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, key)))
    }

    fn sign(&self, upload: &UploadHeaders) -> String {
        format!("{SCHEME}{}", hex::encode(hmac::sign(&self.0, upload.signed_text().as_bytes())))
    }

    fn verifies(&self, upload: &UploadHeaders, authorization: &str) -> bool {
        let mac = authorization.strip_prefix(SCHEME).and_then(|mac| hex::decode(mac).ok());
        mac.is_some_and(|mac| hmac::verify(&self.0, upload.signed_text().as_bytes(), &mac).is_ok())
    }
}

impl UploadHeaders {
    fn of_packed(packed: &PackedHeaders) -> Self {
        let PackedHeaders { release, arch, layer, .. } = packed;
        Self { release: release.clone(), arch: *arch, size: layer.size, digest: layer.digest.clone() }
    }

    /// Parses the HTTP headers of a request, which are untrusted input.
    fn of_headers(headers: &HeaderMap) -> Option<Self> {
        Some(Self {
            release: text(headers, &KERNEL)?.parse().ok()?,
            arch: text(headers, &ARCH)?.parse().ok()?,
            size: text(headers, &header::CONTENT_LENGTH)?.parse().ok()?,
            digest: text(headers, &DIGEST)?.parse().ok()?,
        })
    }

    /// Returns the text that the MAC covers. The text is unambiguous, because no field can contain a line break.
    fn signed_text(&self) -> String {
        let Self { release, arch, size, digest } = self;
        format!("farrier headers 1\n{release}\n{arch}\n{size}\n{digest}\n")
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upload() -> UploadHeaders {
        UploadHeaders {
            release: "6.1.192-acme+".parse().unwrap(),
            arch: Architecture::Amd64,
            size: 7,
            digest: Digest::of(b"headers"),
        }
    }

    fn key(text: &str) -> io::Result<Key> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Key::read(file.path())
    }

    #[test]
    fn the_mac_covers_all_header_fields() {
        let own = key(&"k".repeat(32)).unwrap();
        let authorization = own.sign(&upload());
        assert!(own.verifies(&upload(), &authorization));
        assert!(key(&format!("{}\n", "k".repeat(32))).unwrap().verifies(&upload(), &authorization));
        for other in [
            UploadHeaders { release: "6.1.192-acme".parse().unwrap(), ..upload() },
            UploadHeaders { arch: Architecture::Arm64, ..upload() },
            UploadHeaders { size: 8, ..upload() },
            UploadHeaders { digest: Digest::of(b"others"), ..upload() },
        ] {
            assert!(!own.verifies(&other, &authorization), "{other:?}");
        }
        assert!(!key(&"l".repeat(32)).unwrap().verifies(&upload(), &authorization));
        for wrong in [
            "",
            "Farrier ",
            "Farrier zz",
            &authorization[SCHEME.len()..],
            &authorization[..authorization.len() - 2],
        ] {
            assert!(!own.verifies(&upload(), wrong), "{wrong:?}");
        }
    }

    #[test]
    fn a_short_key_is_rejected() {
        for text in ["", "\n", "secret", &format!("  {}  ", "k".repeat(31))] {
            assert!(key(text).is_err(), "{text:?}");
        }
    }
}
