use std::{
    collections::BTreeMap, fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command, sync::Arc,
};

use farrier_core::site::{self, KeySource, Signed};
use farrier_net::SecretReader;
use farrier_signing::{
    SigningError,
    testing::{EC_384, OpensslDir, RSA_2048},
};
use kmod::{Signature, testing::ModuleFile};

use super::*;
use crate::read_modules;

/// Makes a certificate with its key.
async fn key(openssl_dir: &OpensslDir, kind: &str) -> (ModuleSigner, Arc<Signer>) {
    openssl_dir.key(kind);
    openssl_dir.certificate("/CN=Acme");
    let spec = site::ModuleSigning {
        key: KeySource::File("k.pem".parse().unwrap()),
        passphrase: None,
        certificate: "c.pem".parse().unwrap(),
        signed: Signed::Keep,
    };
    let secrets = SecretReader::new(openssl_dir.root().to_owned(), None);
    let certificate = ModuleSigner::open(&spec, openssl_dir.root(), secrets).unwrap();
    let signer = certificate.load().await.unwrap();
    (certificate, signer)
}

fn budget() -> DecompressionBudget {
    DecompressionBudget::without_build()
}

fn contents(tree: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = walkdir::WalkDir::new(tree).into_iter().map(Result::unwrap);
    files
        .filter(|entry| entry.file_type().is_file())
        .map(|entry| (entry.path().strip_prefix(tree).unwrap().to_owned(), fs::read(entry.path()).unwrap()))
        .collect()
}

/// Makes a payload with one module in every compression that kernels read.
fn payload() -> tempfile::TempDir {
    let tree = tempfile::tempdir().unwrap();
    let module = ModuleFile::named("m").build();
    for (name, compression) in [
        ("a.ko", Compression::None),
        ("b.ko.gz", Compression::Gzip),
        ("c.ko.xz", Compression::Xz),
        ("d.ko.zst", Compression::Zstd),
    ] {
        let mut file = fs::File::create(tree.path().join(name)).unwrap();
        compress(compression, &module, &mut file).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o644)).unwrap();
    }
    fs::write(tree.path().join("readme"), "no module").unwrap();
    tree
}

#[tokio::test]
async fn every_compression_is_signed_and_the_bytes_are_the_same_again() {
    let openssl_dir = OpensslDir::new();
    for kind in [RSA_2048, EC_384] {
        let (certificate, signer) = key(&openssl_dir, kind).await;
        let rule = SigningRule::default();
        let hash = SignatureHash::Sha512;
        let how = ModuleSigning { certificate: &certificate, signer: &signer, hash, rule: &rule };
        let (tree, again) = (payload(), payload());
        let before = contents(tree.path());
        assert_eq!(sign_modules(tree.path(), &how, &budget()).unwrap(), 4);
        assert_eq!(sign_modules(again.path(), &how, &budget()).unwrap(), 4);
        let after = contents(tree.path());
        assert_eq!(after, contents(again.path()));
        assert_eq!(after.len(), 5, "a temporary file was left");
        assert_eq!(after[Path::new("readme")], before[Path::new("readme")]);
        let expected = Signature::By(kmod::signer(certificate.certificate(), hash));
        for module in read_modules(tree.path(), &budget()).unwrap() {
            let read = module.module.unwrap();
            assert_eq!(read.signature, expected, "{}", module.path);
            assert!(!read.has_unsupported_xz_check, "{}", module.path);
        }
        for name in after.keys() {
            let mode = fs::metadata(tree.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o644, "{}", name.display());
        }
        assert_eq!(sign_modules(tree.path(), &how, &budget()).unwrap(), 0, "a module was signed twice");
        verify(&openssl_dir, &tree.path().join("a.ko"), "m");
    }
}

/// Verifies with OpenSSL that the message signs the bare module.
fn verify(openssl_dir: &OpensslDir, module: &Path, what: &str) {
    let bytes = fs::read(module).unwrap();
    let (bare, _) = kmod::without_signature(&bytes);
    fs::write(openssl_dir.path("bare"), bare).unwrap();
    let message = &bytes[bare.len()..bytes.len() - 12 - 28];
    fs::write(openssl_dir.path("message"), message).unwrap();
    let output = Command::new("openssl")
        .args([
            "cms",
            "-verify",
            "-binary",
            "-inform",
            "DER",
            "-in",
            "message",
            "-content",
            "bare",
            "-noverify",
        ])
        .args(["-certfile", "c.pem", "-nointern", "-out", "/dev/null"])
        .current_dir(openssl_dir.root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn signatures_are_kept_or_replaced_as_said() {
    let (theirs, ours) = (OpensslDir::new(), OpensslDir::new());
    let vendor = key(&theirs, RSA_2048).await;
    let own = key(&ours, RSA_2048).await;
    let tree = payload();
    let hash = SignatureHash::Sha256;
    let sign = |key: &(ModuleSigner, Arc<Signer>), rule: &SigningRule| {
        let how = ModuleSigning { certificate: &key.0, signer: &key.1, hash, rule };
        sign_modules(tree.path(), &how, &budget()).unwrap()
    };
    assert_eq!(sign(&vendor, &SigningRule::default()), 4);
    let by_vendor = contents(tree.path());
    assert_eq!(sign(&own, &SigningRule::default()), 0);
    assert_eq!(contents(tree.path()), by_vendor);
    // A signature by farrier's previous key is replaced in any case.
    let previous = Some(vendor.0.certificate().key_id.clone());
    assert_eq!(sign(&own, &SigningRule { replace: false, previous }), 4);
    let by_us = contents(tree.path());
    assert_eq!(sign(&vendor, &SigningRule { replace: true, previous: None }), 4);
    assert_eq!(contents(tree.path()), by_vendor, "a part of the replaced signature was left");
    assert_eq!(sign(&own, &SigningRule { replace: true, previous: None }), 4);
    assert_eq!(contents(tree.path()), by_us);
}

#[tokio::test]
async fn the_certificate_must_be_the_keys_and_its_age_is_said() {
    let (ours, other) = (OpensslDir::new(), OpensslDir::new());
    let (certificate, _) = key(&ours, RSA_2048).await;
    let now = certificate.certificate().not_before;
    assert_eq!(certificate.warning(now), None);
    let day = jiff::SignedDuration::from_hours(48);
    assert!(certificate.warning(now + day).unwrap().contains("expired at"));
    assert!(certificate.warning(now - day).unwrap().contains("is not valid before"));
    key(&other, RSA_2048).await;
    fs::copy(other.path("c.pem"), ours.path("c.pem")).unwrap();
    let spec = site::ModuleSigning {
        key: KeySource::File("k.pem".parse().unwrap()),
        passphrase: None,
        certificate: "c.pem".parse().unwrap(),
        signed: Signed::Keep,
    };
    let secrets = SecretReader::new(ours.root().to_owned(), None);
    let error = ModuleSigner::open(&spec, ours.root(), secrets.clone()).unwrap().load().await.unwrap_err();
    assert!(matches!(error, SigningError::Mismatch { .. }), "{error}");
    fs::write(ours.path("c.pem"), "no certificate").unwrap();
    let error = ModuleSigner::open(&spec, ours.root(), secrets).unwrap_err();
    assert!(matches!(error, SigningError::Certificate(..)), "{error}");
}

/// Signing is charged to the same budget as the check, and leaves no incomplete file.
#[tokio::test]
async fn signing_spends_the_budget_of_the_check() {
    let openssl_dir = OpensslDir::new();
    let (certificate, signer) = key(&openssl_dir, RSA_2048).await;
    let rule = SigningRule::default();
    let how = ModuleSigning {
        certificate: &certificate,
        signer: &signer,
        hash: SignatureHash::Sha256,
        rule: &rule,
    };
    let tree = payload();
    let before = contents(tree.path());
    let size = before[Path::new("a.ko")].len() as u64;
    // Three modules are compressed.
    let budget = DecompressionBudget::of_bytes(5 * size);
    assert_eq!(read_modules(tree.path(), &budget).unwrap().len(), 4);
    let error = sign_modules(tree.path(), &how, &budget).unwrap_err();
    assert!(matches!(error, PayloadError::DecompressionBytes { bytes, .. } if bytes == size), "{error}");
    let after = contents(tree.path());
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    let late =
        DecompressionBudget::of_build(farrier_core::image::Period::seconds(0), std::time::Duration::ZERO);
    let error = replace(&tree.path().join("a.ko"), Compression::Xz, b"module", late.meter(Path::new("a.ko")));
    let error = error.unwrap_err().downcast::<PayloadError>().unwrap();
    assert!(error.is_caused_by_deadline(), "{error}");
    assert_eq!(contents(tree.path()), after);
}
