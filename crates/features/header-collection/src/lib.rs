//! Sends header sets from nodes to farrier, for `farrier headers collect` and the HTTP port of `farrier run`.
//!
//! The node needs no registry credential.
//!
//! A Job on the node packs the header set and [sends](send()) it to farrier's HTTP port. [`Receiver`] writes it to a temporary
//! directory, checks it in the same way as an import, and stores it. The Job has one secret: the key that an administrator
//! created for this one kernel. A holder of the key, the node itself included, can make farrier store one header set for that
//! kernel, but cannot replace an existing one. The key itself is never sent. The request carries a MAC over the kernel, the size
//! and the digest, and farrier verifies it before reading the body.
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
const PATH: &str = "/headers";
const KERNEL: HeaderName = HeaderName::from_static("x-farrier-kernel");
const ARCH: HeaderName = HeaderName::from_static("x-farrier-arch");
const DIGEST: HeaderName = HeaderName::from_static("x-farrier-digest");
/// Prefix of the MAC in the `authorization` header.
const SCHEME: &str = "Farrier ";
/// Maximum size of a packed header set in bytes. A distribution's has 10 to 50 MiB.
const MOST: u64 = 512 << 20;
/// Minimum length of a key in bytes; shorter keys could be guessed.
const SHORTEST_KEY: usize = 32;

/// Kernel, size and digest under which a header set is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parcel {
    release: KernelRelease,
    arch: Architecture,
    size: u64,
    digest: Digest,
}

/// farrier's answer to an upload.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
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
    /// Reads a key from a file; surrounding whitespace is ignored.
    ///
    /// # Errors
    /// The file cannot be read, or is too short for a key.
    pub fn read(file: &Path) -> io::Result<Self> {
        let text = zeroize::Zeroizing::new(fs::read(file)?);
        let key = text.trim_ascii();
        if key.len() < SHORTEST_KEY {
            let what = format!("{}: a key must have at least {SHORTEST_KEY} characters", file.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, key)))
    }

    fn sign(&self, parcel: &Parcel) -> String {
        format!("{SCHEME}{}", hex::encode(hmac::sign(&self.0, parcel.text().as_bytes())))
    }

    fn has_signed(&self, parcel: &Parcel, said: &str) -> bool {
        let mac = said.strip_prefix(SCHEME).and_then(|mac| hex::decode(mac).ok());
        mac.is_some_and(|mac| hmac::verify(&self.0, parcel.text().as_bytes(), &mac).is_ok())
    }
}

impl Parcel {
    fn of_packed(packed: &PackedHeaders) -> Self {
        let PackedHeaders { release, arch, layer, .. } = packed;
        Self { release: release.clone(), arch: *arch, size: layer.size, digest: layer.digest.clone() }
    }

    /// Parses a request's headers, which are untrusted input.
    fn of_headers(headers: &HeaderMap) -> Option<Self> {
        Some(Self {
            release: text(headers, &KERNEL)?.parse().ok()?,
            arch: text(headers, &ARCH)?.parse().ok()?,
            size: text(headers, &header::CONTENT_LENGTH)?.parse().ok()?,
            digest: text(headers, &DIGEST)?.parse().ok()?,
        })
    }

    /// Returns the text that the MAC covers. None of the parts can contain a line break.
    fn text(&self) -> String {
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

    fn parcel() -> Parcel {
        Parcel {
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
    fn a_key_signs_all_that_is_said_of_a_parcel() {
        let own = key(&"k".repeat(32)).unwrap();
        let said = own.sign(&parcel());
        assert!(own.has_signed(&parcel(), &said));
        assert!(key(&format!("{}\n", "k".repeat(32))).unwrap().has_signed(&parcel(), &said));
        for other in [
            Parcel { release: "6.1.192-acme".parse().unwrap(), ..parcel() },
            Parcel { arch: Architecture::Arm64, ..parcel() },
            Parcel { size: 8, ..parcel() },
            Parcel { digest: Digest::of(b"others"), ..parcel() },
        ] {
            assert!(!own.has_signed(&other, &said), "{other:?}");
        }
        assert!(!key(&"l".repeat(32)).unwrap().has_signed(&parcel(), &said));
        for wrong in ["", "Farrier ", "Farrier zz", &said[SCHEME.len()..], &said[..said.len() - 2]] {
            assert!(!own.has_signed(&parcel(), wrong), "{wrong:?}");
        }
    }

    #[test]
    fn a_key_that_can_be_guessed_is_refused() {
        for text in ["", "\n", "secret", &format!("  {}  ", "k".repeat(31))] {
            assert!(key(text).is_err(), "{text:?}");
        }
    }
}
