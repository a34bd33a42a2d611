//! Shared code of the fuzz targets: the parser crates, and the program's parsers without its runtime and TLS, so that
//! the targets build in minutes. Each of these targets has a function here.
// Each target uses only a part.
#![allow(dead_code)]

use std::{
    fs,
    io::{self, Cursor, Read},
    path::Path,
};

pub use farrier_core::{image, kernel, kernel::debian_version as version, template};
pub use kmod;
pub use oci;

#[path = "../../crates/adapters/local/src/archive/mod.rs"]
pub mod archive;
#[path = "../../crates/adapters/inputs/src/checksum.rs"]
mod checksum;
#[path = "../../crates/adapters/inputs/src/apt/control.rs"]
pub mod control;
#[path = "../../crates/adapters/cluster/src/edit.rs"]
mod edit;
#[path = "../../crates/adapters/local/src/files.rs"]
pub(crate) mod files;
#[path = "../../crates/features/bundle/src/frame.rs"]
mod frames;
#[path = "../../crates/adapters/inputs/src/rpm/metadata.rs"]
mod metadata;
#[path = "../../crates/adapters/inputs/src/rpm/package.rs"]
mod package;
#[path = "../../crates/features/bootcheck/src/protocol.rs"]
pub mod protocol;
#[path = "../../crates/adapters/inputs/src/apt/sources.rs"]
mod sources;
#[path = "../../crates/adapters/local/src/tree_removal.rs"]
pub(crate) mod tree_removal;

/// Error types of `sources` and `metadata`.
pub(crate) mod error {
    #[derive(Debug)]
    pub enum FetchError {
        NoAptSource(String),
        Value,
    }

    impl FetchError {
        pub fn value(_: &'static str, _: &str, _: &'static str) -> Self {
            Self::Value
        }
    }

    #[derive(Debug)]
    pub struct MetadataError(pub(crate) String);

    pub type Result<T, E = FetchError> = std::result::Result<T, E>;
}

pub(crate) use error::{FetchError, Result};

use archive::{Limits, Options};
use farrier_core::provenance::{Envelope, PublicKey, Statement};
use farrier_yaml as yaml;

/// Limits for unpacking an input of 8 MiB, to save disk space.
const LIMITS: Limits = Limits { entries: 2_000, bytes: 16 << 20, depth: 64 };

/// A tar archive: whatever its headers say, nothing is written outside the directory.
pub fn archive(data: &[u8]) {
    unpacked(|dest| drop(archive::unpack_tar(data, dest, &LIMITS)));
}

/// A self-extracting archive, after the line that identifies it.
pub fn makeself(data: &[u8]) {
    let work = tempfile::tempdir().unwrap();
    let file = work.path().join("x.run");
    fs::write(&file, [b"#!/bin/sh\n# This script was generated using Makeself\n", data].concat()).unwrap();
    let options = Options { limits: LIMITS, ..Options::default() };
    unpacked(|dest| drop(archive::unpack_file(&file, dest, &options)));
}

/// Unpacks something and asserts that nothing was written outside the directory.
fn unpacked(unpack: impl FnOnce(&Path)) {
    let work = tempfile::tempdir().unwrap();
    let dest = work.path().join("a/b/c/dest");
    fs::create_dir_all(&dest).unwrap();
    unpack(&dest);
    for directory in ["", "a", "a/b", "a/b/c"] {
        assert_eq!(fs::read_dir(work.path().join(directory)).unwrap().count(), 1, "written outside");
    }
}

/// A manifest or index: what was parsed can be serialized and parsed again.
pub fn manifest(data: &[u8]) {
    if let Ok(oci::AnyManifest::Image(manifest)) = oci::AnyManifest::parse(data) {
        let bytes = manifest.to_bytes().unwrap();
        assert_eq!(oci::ImageManifest::parse(&bytes).unwrap(), *manifest);
    }
}

/// An archive as `docker save` writes it: every layer lies within the file.
pub fn docker_archive(data: &[u8]) {
    let Ok(archive) = oci::docker_archive::ImageArchive::open(Cursor::new(data)) else { return };
    for layer in archive.layers {
        let mut file = Cursor::new(data);
        let mut part = oci::docker_archive::part(&mut file, layer).unwrap();
        let _ = io::copy(&mut part, &mut io::sink());
    }
}

/// A layer in any compression, searched for names.
pub fn layer(data: &[u8]) {
    for name in ["usr", "lib", "bin"] {
        let Ok(tar) = oci::LayerReader::new(data) else { return };
        let _ = oci::top_level_entry(tar.take(64 << 20), name);
    }
}

/// A bundle's frame, of which at most 64 MiB of content are read.
pub fn frame(data: &[u8]) {
    let Ok(mut frame) = frames::FrameReader::new(data) else { return };
    let _ = io::copy(&mut (&mut frame).take(64 << 20), &mut io::sink());
    assert!(frame.consumed() <= data.len() as u64);
    let _ = frame.expect_end();
}

/// A signed envelope, and a statement.
pub fn dsse(data: &[u8]) {
    let _ = Envelope::parse(data);
    let _ = Statement::parse(data);
}

/// A public key in PEM or DER: a parsed key can be parsed again with the same result, and does not verify arbitrary
/// data.
pub fn public_key(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for key in [PublicKey::any_from_pem(&text), PublicKey::any_from_info(data)].into_iter().flatten() {
        assert_eq!(PublicKey::any_from_info(key.info()).unwrap().fingerprint(), key.fingerprint());
        assert!(!key.verify_sha256(b"message", data));
    }
}

/// Output of `apt-cache show`, including dependencies.
pub fn apt_control(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for package in control::packages(&text, kernel::Architecture::Amd64) {
        assert!(control::is_package_name(&package.name));
        let _ = package.identity();
    }
    let _ = control::dependencies(&text);
}

/// The host's entries for archives, in both of apt's formats. The chosen entries stay the same when written and parsed
/// again. No option is added, such as one that trusts an archive without a signature.
pub fn apt_sources(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let host = [sources::parse_deb822(&text), sources::parse_one_line(&text)].concat();
    let suites = ["bookworm", "bookworm-security"].map(|suite| suite.parse().unwrap());
    let wanted = kernel::AptSuites { suites: suites.to_vec(), ..Default::default() };
    if let Ok(chosen) = sources::select(&host, &wanted) {
        let written = sources::render(&chosen);
        let told = |entries: &[sources::SourceEntry]| {
            let texts = |entry: &sources::SourceEntry| {
                (entry.uris.clone(), entry.suites.clone(), entry.components.clone(), entry.checks.clone())
            };
            entries.iter().map(texts).collect::<Vec<_>>()
        };
        assert_eq!(told(&sources::parse_deb822(&written)), told(&chosen), "{written}");
        assert!(!written.lines().any(|line| line.to_ascii_lowercase().starts_with("trusted")), "{written}");
    }
}

/// Metadata of an RPM repository, and lists of its mirrors. The parsed data is never larger than the input, and no
/// package has a checksum too weak to prove anything.
pub fn rpm_metadata(data: &[u8]) {
    let _ = metadata::repomd(data);
    let _ = metadata::mirrors(data);
    let kept = |packages: &[package::RpmPackage]| -> usize {
        let texts = |package: &package::RpmPackage| {
            let releases: usize = package.releases.iter().map(String::len).sum();
            package.name.len() + package.version.len() + package.location.len() + releases
        };
        packages.iter().map(texts).sum()
    };
    if let Ok(packages) = metadata::primary(data, kernel::Architecture::Amd64, &|name| name.starts_with('k'))
    {
        assert!(kept(&packages) <= data.len(), "{} bytes of {}", kept(&packages), data.len());
        for package in &packages {
            assert!([64, 128].contains(&package.checksum.hex().len()));
            let _ =
                (package.identity(), package.is_for("6.1.0-1"), package::names_for(&package.name, "6.1.0-1"));
        }
        let _ = package::choose(&packages, &["kernel".to_owned()], "6.1.0-1");
    }
    if let Ok(found) = metadata::filelists(data, &["a"].into()) {
        let kept: usize = found.values().flatten().map(String::len).sum();
        assert!(kept <= data.len(), "{kept} bytes of {}", data.len());
    }
}

/// A manifest in which every scalar is replaced in place: each edit is exact or refused.
pub fn yaml_edit(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(documents) = yaml::documents(text) else { return };
    let mut scalars = Vec::new();
    documents.iter().for_each(|document| add_scalars(document, &mut scalars));
    // Each edit parses the text twice.
    for scalar in scalars.into_iter().take(8) {
        let _ = edit::replace(text, &scalar, "registry.example/drivers/x@sha256:0");
    }
}

fn add_scalars(node: &yaml::Node, found: &mut Vec<yaml::Scalar>) {
    if found.len() >= 8 {
        return;
    }
    found.extend(node.scalar().cloned());
    for item in node.items().into_iter().flatten() {
        add_scalars(&item, found);
    }
    for (key, value) in node.entries().unwrap_or_default() {
        add_scalars(key, found);
        add_scalars(value, found);
    }
}
