use std::{fs, path::Path, sync::Arc};

use farrier_core::site::{KeySource, ModuleSigning, Policy, Signed};
use farrier_engines::EngineError;
use farrier_net::SecretReader;
use farrier_signing::{
    ModuleSigner,
    testing::{EC_256, OpensslDir, RSA_2048},
};
use kmod::{Rule, Verdict, testing::ModuleFile};
use oci::error_chain;
use serde_json::json;

use super::*;
use crate::{
    services::{BuildProblem, ProblemKind},
    testing::{Bench, K9, K10, SYMBOLS, module},
};

/// Configuration of kernels that load only signed modules.
const ENFORCING: &str = "CONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_FORCE=y\nCONFIG_MODULE_SIG_HASH=\"sha512\"\n";

fn bench(options: &str) -> Bench {
    let mut bench = Bench::new(&json!({
        "reuse": "compatible", "tags": ["{{version}}-{{kernel_label}}-{{signer}}"],
    }));
    bench.sign_images_with(&openssl_dir(EC_256));
    for release in [K9, K10] {
        bench.headers_with(release, SYMBOLS, options);
    }
    bench
}

/// Creates a key with its certificate.
fn openssl_dir(kind: &str) -> OpensslDir {
    let openssl_dir = OpensslDir::new();
    openssl_dir.key(kind);
    openssl_dir.certificate("/CN=Acme");
    openssl_dir
}

fn sign_with(bench: &mut Bench, openssl_dir: &OpensslDir, signed: Signed) {
    let spec = ModuleSigning {
        key: KeySource::File("k.pem".parse().unwrap()),
        passphrase: None,
        certificate: "c.pem".parse().unwrap(),
        signed,
    };
    let secrets = SecretReader::new(openssl_dir.root().to_owned(), None);
    let opened = ModuleSigner::open(&spec, openssl_dir.root(), secrets).unwrap();
    bench.services.tools.module_signer = Some(Arc::new(opened));
}

/// The certificate's serial number, as OpenSSL prints it.
fn serial(openssl_dir: &OpensslDir) -> String {
    farrier_signing::read_certificate(&openssl_dir.path("c.pem")).unwrap().key_id
}

#[tokio::test]
async fn an_enforcing_kernel_takes_what_will_be_signed() {
    let mut bench = bench(ENFORCING);
    let error = bench.publish(K9, &[&module()]).await.unwrap_err();
    let BuildError::Problem(BuildProblem { kind: ProblemKind::Refused, message, .. }) = &error else {
        panic!("{error}")
    };
    assert!(message.contains("not signed"), "{message}");

    let openssl_dir = openssl_dir(RSA_2048);
    sign_with(&mut bench, &openssl_dir, Signed::Keep);
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    assert_eq!(built.report.verdict, Verdict::Loads);
    let about = &built.report.modules[0].about;
    let signed_by = about.signed_by.as_ref().unwrap();
    assert_eq!((signed_by.signer.as_deref(), signed_by.hash.as_deref()), (Some("Acme"), Some("sha512")));
    assert_eq!(signed_by.key_id, serial(&openssl_dir));
    assert!(built.report.modules[0].findings.iter().all(|finding| finding.rule != Rule::Signature));
    let annotations = bench.annotations(K9).await;
    let fingerprint = bench.services.tools.module_signer.as_ref().unwrap().fingerprint();
    assert_eq!(
        annotations[annotations::MODULE_SIGNER],
        format!("keep {} {fingerprint}", serial(&openssl_dir))
    );
    assert!(annotations.contains_key(annotations::UNSIGNED_HASH));
}

/// No engine is available, so these images cannot have been compiled.
#[tokio::test]
async fn another_key_signs_anew_without_a_build() {
    let mut bench = bench(ENFORCING);
    let (first, second) = (openssl_dir(RSA_2048), openssl_dir(RSA_2048));
    sign_with(&mut bench, &first, Signed::Keep);
    let before = bench.publish(K9, &[&module()]).await.unwrap();
    let old = bench.cell(K9).await;
    sign_with(&mut bench, &second, Signed::Keep);
    let new = bench.cell(K9).await;
    assert_ne!((old.input_hash, &old.reference), (new.input_hash, &new.reference));
    assert_eq!(old.unsigned_hash, new.unsigned_hash);
    let after = bench.build(K9).await.unwrap();
    assert_ne!(before.digest, after.digest);
    assert_eq!(after.reused_from.unwrap().digest, before.digest);
    assert_eq!(after.report.modules[0].about.signed_by.as_ref().unwrap().key_id, serial(&second));
    // With the first key again, the published image is up to date. If the registry loses the image, re-signing produces
    // the same payload.
    sign_with(&mut bench, &first, Signed::Keep);
    bench.lose(&old.reference);
    let back = bench.build(K9).await.unwrap();
    assert_eq!(back.reused_from.unwrap().digest, after.digest);
    let payload = |annotations: std::collections::BTreeMap<String, String>| {
        annotations[annotations::PAYLOAD_DIGEST].clone()
    };
    let again = payload(bench.annotations(K9).await);
    bench.lose(&old.reference);
    bench.publish(K9, &[&module()]).await.unwrap();
    assert_eq!(
        payload(bench.annotations(K9).await),
        again,
        "re-signing gives the same payload as signing the first time"
    );
}

#[tokio::test]
async fn signing_switched_on_takes_the_unsigned_payload() {
    let mut bench = bench("CONFIG_MODULE_SIG=y\nCONFIG_MODULE_SIG_HASH=sha256\n");
    let unsigned = bench.cell(K9).await;
    assert_eq!(unsigned.unsigned_hash, None);
    assert!(unsigned.reference.to_string().ends_with("-unsigned"), "{}", unsigned.reference);
    let before = bench.publish(K9, &[&module()]).await.unwrap();
    assert!(!bench.annotations(K9).await.contains_key(annotations::MODULE_SIGNER));
    let key = openssl_dir(RSA_2048);
    sign_with(&mut bench, &key, Signed::Keep);
    assert_eq!(bench.cell(K9).await.unsigned_hash, Some(unsigned.input_hash));
    let after = bench.build(K9).await.unwrap();
    assert_eq!(after.reused_from.unwrap().digest, before.digest);

    // After signing is disabled, a signed payload cannot be reused: farrier does not remove signatures.
    bench.services.tools.module_signer = None;
    bench.lose(&unsigned.reference);
    let error = bench.build(K9).await.unwrap_err();
    assert!(matches!(error, BuildError::Engine(EngineError::Unavailable(_))), "{error}");
}

/// Anyone who can write to the registry can give a payload any annotations. No engine is available, so nothing else is
/// published.
#[tokio::test]
async fn payloads_that_a_stranger_published_are_neither_signed_nor_reused() {
    let mut bench = bench(ENFORCING);
    let key = openssl_dir(RSA_2048);
    let strangers: [fn(&mut Bench); 2] = [
        |bench| bench.sign_images_with(&openssl_dir(EC_256)),
        |bench| bench.services.definitions.site.image_signing = None,
    ];
    for publish_as in strangers {
        let ours = bench.services.definitions.site.image_signing.clone();
        let keys =
            ["images.pem", "images.pub"].map(|name| (name, fs::read(bench.root().join(name)).unwrap()));
        publish_as(&mut bench);
        let their_key = openssl_dir(RSA_2048);
        sign_with(&mut bench, &their_key, Signed::Keep);
        let theirs = bench.publish(K9, &[&module()]).await.unwrap().digest;
        for (name, bytes) in keys {
            fs::write(bench.root().join(name), bytes).unwrap();
        }
        bench.services.definitions.site.image_signing = ours;
        sign_with(&mut bench, &key, Signed::Keep);
        for release in [K9, K10] {
            bench.heard();
            let error = bench.build(release).await.unwrap_err();
            assert!(matches!(error, BuildError::Engine(EngineError::Unavailable(_))), "{error}");
            let (heard, refused) = (bench.heard(), format!("{theirs} is not reused: "));
            assert!(heard.iter().any(|note| note.contains(&refused)), "{heard:?}");
        }
    }
}

#[tokio::test]
async fn nothing_is_compiled_against_an_image_that_a_stranger_published() {
    let mut bench = Bench::new(&json!({"exposes": ["/usr/src/x"], "reuse": "never"}));
    bench.add("y", &json!({"modules": ["y"], "needs": ["x"]}));
    bench.publish_of("x", K9, &[&module()]).await.unwrap();
    let module = ModuleFile::named("y").needs("printk", 1);
    bench.publish_of("y", K9, &[&module]).await.unwrap();
    bench.sign_images_with(&openssl_dir(EC_256));
    let error = bench.publish_of("y", K9, &[&module]).await.unwrap_err();
    assert!(error.to_string().starts_with("needed image "), "{error}");
    assert!(error.to_string().contains("is not signed with a key of this site"), "{error}");
    assert!(error.hint().unwrap().contains("policy.requireSigned"));
}

/// If two keys must sign, one signature is not enough to reuse an image, unless the site's own key made it.
#[tokio::test]
async fn what_one_of_two_signers_signed_is_not_reused() {
    let mut bench = bench("");
    let (site, release) = (openssl_dir(EC_256), openssl_dir(EC_256));
    for (name, keys) in [("site.pub", &site), ("release.pub", &release)] {
        fs::copy(keys.path("p.pem"), bench.root().join(name)).unwrap();
    }
    let both = r#"{"atLeast": 2, "keys": ["site.pub", "release.pub"]}"#;
    let policy = Policy { require_signed: serde_json::from_str(both).unwrap(), ..Policy::default() };
    bench.sign_images_with(&release);
    let theirs = bench.publish(K9, &[&module()]).await.unwrap();
    bench.services.definitions.site.policy = policy;
    bench.sign_images_with(&site);
    bench.heard();
    let error = bench.build(K10).await.unwrap_err();
    assert!(matches!(error, BuildError::Engine(EngineError::Unavailable(_))), "{error}");
    let heard = bench.heard().join("\n");
    assert!(heard.contains("1 of 2 required keys have signed: release.pub (sha256:"), "{heard}");
    assert!(heard.contains("missing: site.pub (sha256:"), "{heard}");

    let reference = bench.cell(K9).await.reference;
    let image =
        StoredImage { services: &bench.services, repository: &reference.repository, digest: &theirs.digest };
    image.sign("x", &[]).await.unwrap();
    let built = bench.build(K10).await.unwrap();
    assert_eq!(built.reused_from.unwrap().digest, theirs.digest);
}

#[tokio::test]
async fn without_keys_for_images_no_published_payload_is_signed() {
    let mut bench = bench(ENFORCING);
    let (first, second) = (openssl_dir(RSA_2048), openssl_dir(RSA_2048));
    sign_with(&mut bench, &first, Signed::Keep);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.services.definitions.site.image_signing = None;
    sign_with(&mut bench, &second, Signed::Keep);
    let error = bench.build(K9).await.unwrap_err();
    assert!(matches!(error, BuildError::Engine(EngineError::Unavailable(_))), "{error}");
}

#[tokio::test]
async fn another_kernels_payload_is_signed_anew() {
    let mut bench = bench(ENFORCING);
    bench.headers_with(K10, SYMBOLS, &ENFORCING.replace("sha512", "sha256"));
    let (first, second) = (openssl_dir(RSA_2048), openssl_dir(RSA_2048));
    sign_with(&mut bench, &first, Signed::Keep);
    bench.publish(K9, &[&module()]).await.unwrap();
    sign_with(&mut bench, &second, Signed::Keep);
    let built = bench.build(K10).await.unwrap();
    let signed_by = built.report.modules[0].about.signed_by.clone().unwrap();
    assert_eq!((signed_by.key_id, signed_by.hash.as_deref()), (serial(&second), Some("sha256")));
    assert_eq!(built.reused_from.unwrap().kernel.as_str(), K9);
}

/// Signatures are looked up only when a candidate is tried, and an untrusted image's claim about its payload does not
/// count.
#[tokio::test]
async fn who_signed_a_lender_is_looked_up_when_its_turn_comes() {
    const K8: &str = "6.1.0-8-amd64";
    let mut bench = bench("");
    bench.headers_with(K8, SYMBOLS, "");
    let ours = bench.services.definitions.site.image_signing.take();
    bench.publish(K8, &[&module()]).await.unwrap();
    bench.services.definitions.site.image_signing = ours;
    let candidate = bench.publish(K9, &[&module()]).await.unwrap();
    bench.heard();
    let built = bench.build(K10).await.unwrap();
    assert_eq!(built.reused_from.unwrap().digest, candidate.digest);
    let heard = bench.heard();
    assert!(!heard.iter().any(|note| note.contains("is not reused")), "{heard:?}");
}

#[tokio::test]
async fn signatures_that_were_replaced_cannot_be_had_again() {
    let mut bench = bench(ENFORCING);
    let key = openssl_dir(RSA_2048);
    sign_with(&mut bench, &key, Signed::Replace);
    bench.publish(K9, &[&module()]).await.unwrap();
    let replaced = bench.cell(K9).await;
    sign_with(&mut bench, &key, Signed::Keep);
    assert_ne!(bench.cell(K9).await.input_hash, replaced.input_hash);
    let error = bench.build(K9).await.unwrap_err();
    assert!(matches!(error, BuildError::Engine(EngineError::Unavailable(_))), "{error}");
}

#[tokio::test]
async fn kernels_and_keys_that_do_not_go_together() {
    let mut bench = bench(ENFORCING);
    sign_with(&mut bench, &openssl_dir(EC_256), Signed::Keep);
    let error = bench.publish(K9, &[&module()]).await.unwrap_err();
    assert!(error_chain(&error).contains("CONFIG_CRYPTO_ECDSA"), "{}", error_chain(&error));
    assert!(error.hint().unwrap().contains("RSA"));
    // The directory and its files are removed. The certificate is loaded already, but the key is not.
    bench.headers_with(K9, SYMBOLS, &format!("{ENFORCING}CONFIG_CRYPTO_ECDSA=y\n"));
    let error = bench.publish(K9, &[&module()]).await.unwrap_err();
    assert!(matches!(error, BuildError::Signing(_)), "{error}");
}

#[tokio::test]
async fn kernels_that_look_at_no_signature_get_none() {
    let mut bench = bench("");
    let key = openssl_dir(RSA_2048);
    sign_with(&mut bench, &key, Signed::Keep);
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    assert_eq!(built.report.modules[0].about.signed_by, None);
    bench.build(K9).await.unwrap();
    assert!(bench.heard().iter().any(|note| note.contains("no CONFIG_MODULE_SIG")));
}

#[tokio::test]
async fn the_key_is_nowhere_but_where_it_was() {
    let mut bench = bench(ENFORCING);
    let key = openssl_dir(RSA_2048);
    sign_with(&mut bench, &key, Signed::Keep);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.build(K10).await.unwrap();
    let (secret, mut searched) = (key.secret(), 0);
    for entry in walkdir::WalkDir::new(bench.root()).into_iter().map(Result::unwrap) {
        if entry.file_type().is_file() {
            searched += 1;
            assert!(!holds(entry.path(), &secret), "{}", entry.path().display());
        }
    }
    assert!(searched > 10);
    assert!(holds(&key.path("k.pem"), &secret));
}

fn holds(path: &Path, text: &str) -> bool {
    let bytes = fs::read(path).unwrap();
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}
