//! Image signatures: farrier verifies them and holds a rollout when a required signature is missing.
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use farrier_cluster::{KubeOptions, KubeSecrets};
use farrier_core::site::{SecretKey, SecretSource};
use farrier_net::SecretReader;

use crate::support::{
    kernels,
    kube_api::{ApiFailure, FakeApi, Requests},
    site::Site,
};
use serde_json::{Value, json};

/// Creates a key pair in the definitions directory: `NAME.key` and `NAME.pem`.
pub fn key(site: &Site, name: &str, options: &[&str]) {
    let private = site.definitions().join(format!("{name}.key"));
    let public = site.definitions().join(format!("{name}.pem"));
    let run = |args: &[&str]| {
        let output =
            Command::new("openssl").args(args).output().expect("run openssl (Debian package openssl)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let (private, public) = (private.display().to_string(), public.display().to_string());
    run(&[&["genpkey", "-out", &private], options].concat());
    run(&["pkey", "-in", &private, "-pubout", "-out", &public]);
}

pub const P256: &[&str] = &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
pub const RSA: &[&str] = &["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072"];

pub fn site_yaml(site: &Site, spec: &str) {
    let head = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: here}\nspec:\n";
    site.define("site.yaml", &format!("{head}{spec}"));
}

pub const SIGNING: &str = "  imageSigning: {key: {file: site.key}}\n";
/// Documents beside an image, as `verify` names them.
pub const DOCUMENTS: [&str; 4] =
    ["check report", "bill of materials", "bill of materials (SPDX)", "provenance"];
const NO_SIGNATURE: &str = "--insecure-no-signature";

/// Returns the published image by digest.
pub fn pinned(site: &Site, kernel: &str) -> String {
    let name = format!("hello:1.0-{kernel}-debian12-amd64");
    format!("{}/hello@{}", site.location, site.inspect(&name)["Digest"].as_str().unwrap())
}

/// Returns the checks of an image. An image whose signatures are skipped never counts as verified.
#[track_caller]
pub fn rows(site: &Site, args: &[&str], code: i32) -> Vec<(String, String, String)> {
    let report = site.farrier(&[&["verify", "-o", "json"], args].concat()).exits(code).json();
    assert_eq!(report["verified"], code == 0 && !args.contains(&NO_SIGNATURE));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let checks = report["checks"].as_array().unwrap().iter();
    checks.map(|row| (text(&row["check"]), text(&row["result"]), text(&row["message"]))).collect()
}

#[track_caller]
pub fn result<'a>(rows: &'a [(String, String, String)], check: &str) -> (&'a str, &'a str) {
    let (_, result, message) = rows.iter().find(|row| row.0 == check).expect(check);
    (result, message)
}

/// A rollout that requires signatures holds an unsigned image and gives the reason. A signing key in site.yaml does not sign an
/// image found under a tag, whoever pushed it, unless the site allows that. Then farrier signs without a build, and writes
/// nothing the second time.
#[test]
fn a_required_signature() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    key(&site, "site", P256);
    key(&site, "foreign", P256);
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    // Without a key farrier verifies nothing and does not claim to.
    let run = site.farrier(&["verify", &image]).exits(2);
    run.line("no key to verify the image with");
    let plain = rows(&site, &[NO_SIGNATURE, &image], 0);
    assert_eq!(result(&plain, "signature"), ("skipped", "no key given"));
    let table = site.farrier(&["verify", NO_SIGNATURE, &image]).exits(0);
    table.line("no problem found, but NOT verified");
    table.line("not checked: the signatures of the image");
    table.line("not checked: the content of the blobs");
    site.farrier(&["verify", NO_SIGNATURE, "--key", "site.pem", &image]).exits(2);

    site_yaml(&site, "  policy: {requireSigned: [site.pem]}\n");
    let before = site.manifests();
    let held = site.run_once().exits(1);
    held.line("does not satisfy policy.requireSigned: it has no signature");
    assert_eq!(site.manifests(), before);
    let status = site.farrier(&["plan", "-o", "json"]).json();
    assert_eq!(status["rollouts"][0]["reason"], "not-signed");
    assert_eq!(result(&rows(&site, &[&image], 1), "signature"), ("absent", "it has no signature"));

    // Anyone with write access to the registry could have pushed the image, so having the key does not make farrier sign it.
    site_yaml(&site, &format!("{SIGNING}  policy: {{requireSigned: [site.pem]}}\n"));
    site.run_once().exits(1).line("it has no signature");
    site.build("hello", &kernel, &["--push"]).exits(0).line("up to date");
    assert_eq!(result(&rows(&site, &[&image], 1), "signature"), ("absent", "it has no signature"));
    assert_eq!(site.manifests(), before);

    // To sign existing images and then require that signature is a configuration error, unless the site explicitly trusts all
    // writers.
    let existing = "  imageSigning: {key: {file: site.key}, existing: sign}\n";
    site_yaml(&site, &format!("{existing}  policy: {{requireSigned: [site.pem]}}\n"));
    site.farrier(&["plan"]).exits(2).line("policy.requireSigned would accept the signature");
    let meant = existing.replace("existing: sign", "existing: sign, trustRegistryWriters: true");
    site_yaml(&site, &format!("{meant}  policy: {{requireSigned: [site.pem]}}\n"));
    site.farrier(&["plan"]).line("lacks the site's signature");
    let run = site.run_once().exits(0);
    run.line("signed    hello");
    run.line("rewrote");
    assert_eq!(site.image(), image, "the image was rebuilt instead of signed");
    // Whoever may write to the registry could have attached the documents, and no trusted key signed them.
    let found = rows(&site, &[&image], 1);
    assert_eq!(result(&found, "signature").0, "ok");
    for document in DOCUMENTS {
        assert_eq!(result(&found, document), ("failed", "it is not signed with an accepted key"));
    }
    let writes = site.registry.requests("PUT");
    site.run_once().exits(0).line("nothing to do");
    fs::remove_dir_all(site.cache().join("records/signed")).unwrap();
    site.build("hello", &kernel, &["--push"]).exits(0).line("up to date");
    assert_eq!(site.registry.requests("PUT"), writes, "an existing signature is made again");

    // A valid signature by a key that the policy does not name.
    site_yaml(&site, "  policy: {requireSigned: [foreign.pem]}\n");
    site.run_once().exits(1).line("it has signatures, but no accepted key has signed this image");
}

/// Without a key, a reconcile sends no requests about signatures.
#[test]
fn an_unsigned_site_asks_for_no_signatures() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    site.run_once().exits(0);
    // farrier also looks up a toolchain in the store that only the engine has.
    let asked = || site.registry.requests("GET") - site.registry.requests_to("GET", "drivers/rootfs");
    let before = asked();
    site.run_once().exits(0).line("nothing to do");
    assert_eq!(
        asked() - before,
        6,
        "what the tag names, what the DaemonSet names, headers that were brought for the kernel and for its system, the toolchain, \
         and the record of the kernels that were seen"
    );
    let image = site.image();
    let all = rows(&site, &[NO_SIGNATURE, &image], 0);
    assert!(DOCUMENTS.iter().all(|document| result(&all, document).0 == "ok"), "{all:?}");
    assert_eq!(
        result(&rows(&site, &[NO_SIGNATURE, "--registry", &site.location, "hello:none"], 1), "manifest").0,
        "absent"
    );
}

/// An unusable key fails the build before anything is compiled.
#[test]
fn a_key_that_cannot_be_used() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site_yaml(&site, SIGNING);
    let run = site.build("hello", &kernel, &["--push"]).exits(2);
    run.line("site.key");
    key(&site, "site", &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"]);
    let run = site.build("hello", &kernel, &["--push"]).exits(2);
    run.line("neither ECDSA over P-256 nor RSA");
    assert!(site.tags("hello").is_empty());
}

/// Publishes a signed `hello` to a layout directory. Returns the image as an argument of `verify`, and the directory of its
/// blobs.
fn in_a_layout(site: &Site, kernel: &str) -> (String, PathBuf) {
    let layout = site.path("layout");
    let location = format!("oci:{}", layout.display());
    site.build("hello", kernel, &["--push", "--registry", &location]).exits(0);
    let name = format!("{location}:hello:1.0-{kernel}-debian12-amd64");
    (name, layout.join("blobs/sha256"))
}

/// Returns the last layers' blobs of the manifests that satisfy `is_wanted`.
fn blobs_of(blobs: &Path, is_wanted: impl Fn(&Value) -> bool) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(blobs).unwrap().map(Result::unwrap) {
        let Ok(manifest) = serde_json::from_slice::<Value>(&fs::read(entry.path()).unwrap()) else {
            continue;
        };
        if let (true, Some(layers)) = (is_wanted(&manifest), manifest["layers"].as_array()) {
            let digest = layers.last().unwrap()["digest"].as_str().unwrap();
            found.insert(blobs.join(digest.strip_prefix("sha256:").unwrap()));
        }
    }
    assert!(!found.is_empty(), "no matching manifest in {}", blobs.display());
    found
}

/// Flips a bit in the middle of a file without changing the length.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// A layout directory is verified like a registry, and each damaged or missing blob has a row.
#[test]
fn a_layout_in_which_something_was_changed() {
    let kernel = kernels::newest().newer;
    // With a sandbox, the toolchain would also be stored, with a separate signature.
    let site = Site::in_docker();
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    let (image, blobs) = in_a_layout(&site, &kernel);
    let all = rows(&site, &["--deep", &image], 0);
    assert!(all.iter().all(|(_, result, _)| result == "ok"), "{all:?}");

    let report = "application/vnd.farrier.check-report.v1+json";
    for (check, what) in [
        ("blobs", "application/vnd.oci.image.config.v1+json"),
        ("check report", report),
        ("bill of materials", "application/vnd.cyclonedx+json"),
        ("bill of materials (SPDX)", "application/spdx+json"),
        ("provenance", "application/vnd.in-toto+json"),
    ] {
        let paths = blobs_of(&blobs, |manifest| {
            let is_image = manifest["artifactType"].is_null()
                && manifest["annotations"]["farrier.dev/kernel-release"].is_string();
            manifest["artifactType"] == what || (check == "blobs" && is_image)
        });
        let path = paths.first().unwrap();
        let whole = fs::read(path).unwrap();
        damage(path);
        let found = rows(&site, &["--deep", &image], 1);
        let (said, message) = result(&found, check);
        assert_eq!(said, "failed", "{check}: {found:?}");
        assert!(message.contains("sha256:"), "{check}: {message}");
        fs::remove_file(path).unwrap();
        let found = rows(&site, &[&image], 1);
        assert_eq!(result(&found, check).0, "failed", "{check}: {found:?}");
        fs::write(path, whole).unwrap();
        rows(&site, &["--deep", &image], 0);
    }

    // Damage the content under the signature tags: what is stored beside the image may have one, too.
    let signatures = blobs_of(&blobs, |manifest| {
        manifest["layers"][0]["annotations"]["dev.cosignproject.cosign/signature"].is_string()
            && manifest["layers"][0]["mediaType"] == "application/vnd.dev.cosign.simplesigning.v1+json"
    });
    for signature in &signatures {
        damage(signature);
    }
    let found = rows(&site, &[&image], 1);
    let (said, message) = result(&found, "signature");
    assert_eq!(said, "failed");
    assert!(message.starts_with("its signature cannot be read"), "{message}");
}

/// An attacker with write access to the registry can replace an image's attestations but cannot sign the replacements.
#[test]
fn documents_that_were_put_in_the_place_of_ours() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    site.build("hello", &kernel, &["--push"]).exits(0);
    let image = pinned(&site, &kernel);
    rows(&site, &[&image], 0);
    replace(&site, &image, "application/vnd.in-toto+json", |content| {
        content["predicate"]["runDetails"]["builder"]["version"]["farrier"] = "6.6.6".into();
    });
    let found = rows(&site, &[&image], 1);
    let differs = "the signed document differs from the attached document";
    assert_eq!(result(&found, "provenance"), ("failed", differs));
    assert_eq!(result(&found, "check report").0, "ok");
    replace(&site, &image, "application/vnd.farrier.check-report.v1+json", |content| {
        content["report"]["modules"] = json!([]);
    });
    assert_eq!(result(&rows(&site, &[&image], 1), "check report"), ("failed", differs));
}

/// Stores a changed document and lists it as the only referrer of its kind.
fn replace(site: &Site, image: &str, kind: &str, change: impl Fn(&mut Value)) {
    let digest = image.split_once('@').unwrap().1;
    let list = format!("hello:{}", digest.replace(':', "-"));
    let mut index = site.inspect_raw(&list);
    let entries = index["manifests"].as_array_mut().unwrap();
    let entry = entries.iter_mut().find(|entry| entry["artifactType"] == kind).unwrap();
    let mut manifest = site.inspect_raw(&format!("hello@{}", entry["digest"].as_str().unwrap()));
    let base = format!("http://{}/v2/drivers/hello", site.registry.host);
    let work = tempfile::tempdir().unwrap();
    let layer = manifest["layers"][0]["digest"].as_str().unwrap().to_owned();
    let mut content: Value = serde_json::from_str(&curl(&["-L", &format!("{base}/blobs/{layer}")])).unwrap();
    change(&mut content);
    let (digest, length) = (describe(&content), content.to_string().len());
    let file = work.path().join("file");
    fs::write(&file, content.to_string()).unwrap();
    let data = format!("@{}", file.display());
    let headers = curl(&["-X", "POST", "-D", "-", &format!("{base}/blobs/uploads/")]);
    let location =
        headers.lines().find_map(|line| line.strip_prefix("Location: ")).unwrap().trim().to_owned();
    let binary = "Content-Type: application/octet-stream";
    curl(&["-X", "PUT", "-H", binary, "--data-binary", &data, &format!("{location}&digest={digest}")]);
    manifest["layers"][0]["digest"] = digest.into();
    manifest["layers"][0]["size"] = length.into();
    let put = |content: &Value, version: &str| {
        fs::write(&file, content.to_string()).unwrap();
        let media_type = format!("Content-Type: {}", content["mediaType"].as_str().unwrap());
        let url = format!("{base}/manifests/{version}");
        curl(&["-X", "PUT", "-H", &media_type, "--data-binary", &data, &url]);
    };
    let digest = describe(&manifest);
    put(&manifest, &digest);
    entry["digest"] = digest.into();
    entry["size"] = manifest.to_string().len().into();
    put(&index, list.strip_prefix("hello:").unwrap());
}

fn describe(content: &Value) -> String {
    use sha2::Digest as _;
    format!("sha256:{}", hex::encode(sha2::Sha256::digest(content.to_string().as_bytes())))
}

pub fn curl(args: &[&str]) -> String {
    let output =
        Command::new("curl").args(["-sSf"]).args(args).output().expect("run curl (Debian package curl)");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn secret(name: &str, data: &[(&str, String)]) -> Value {
    let data: serde_json::Map<String, Value> =
        data.iter().map(|(key, value)| ((*key).to_owned(), value.as_str().into())).collect();
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": "farrier", "name": name}, "data": data})
}

#[tokio::test]
async fn secrets_of_a_cluster() {
    let api = FakeApi::start();
    // base64 of "anvil".
    api.create(secret("key", &[("other", "YW52aWw=".to_owned()), ("tls.key", "YW52aWw=".to_owned())]));
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = Some(api.kubeconfig(directory.path()));
    let options = KubeOptions { kubeconfig, context: Some("test".to_owned()), ..KubeOptions::default() };
    let reader = SecretReader::new(PathBuf::new(), Some(Arc::new(KubeSecrets::new(options))));
    let source = |name: &str, key: &str| {
        let (namespace, name) = ("farrier".parse().unwrap(), name.parse().unwrap());
        SecretSource::Secret(SecretKey { namespace, name, key: key.to_owned() })
    };
    assert_eq!(reader.read(&source("key", "tls.key")).await.unwrap().as_bytes(), b"anvil");
    let error = reader.read(&source("key", "absent")).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot read Secret farrier/key: there is no key \"absent\"; its keys: other, tls.key"
    );
    let error = reader.read(&source("absent", "key")).await.unwrap_err();
    assert!(error.hint().unwrap().starts_with("create Secret farrier/absent"), "{error}");
    api.fail(Requests::verb("get").resource("secrets"), ApiFailure::Forbidden, 1);
    let error = reader.read(&source("key", "tls.key")).await.unwrap_err();
    assert!(error.hint().unwrap().contains("allow farrier to `get` Secret farrier/key"), "{error}");
    assert!(!error.is_transient());
}

/// Secrets come from the cluster of the `--context` option, whatever the kubeconfig's current context is.
#[test]
fn a_key_in_the_cluster_of_the_named_context() {
    let kernel = kernels::newest().newer;
    let (api, elsewhere) = (FakeApi::start(), FakeApi::start());
    let site = Site::new();
    key(&site, "site", P256);
    let pem = site.definitions().join("site.key");
    let output = Command::new("base64").arg("-w0").arg(&pem).output().unwrap();
    api.create(secret("signing", &[("key.pem", String::from_utf8(output.stdout).unwrap())]));
    fs::remove_file(pem).unwrap();
    site_yaml(&site, "  imageSigning: {key: {secret: {namespace: farrier, name: signing, key: key.pem}}}\n");
    let cluster = |name: &str, api: &FakeApi| json!({"name": name, "cluster": {"server": api.url()}});
    let context = |name: &str| json!({"name": name, "context": {"cluster": name, "user": "me"}});
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "elsewhere",
        "clusters": [cluster("elsewhere", &elsewhere), cluster("ours", &api)],
        "users": [{"name": "me", "user": {"token": "of-the-test"}}],
        "contexts": [context("elsewhere"), context("ours")],
    });
    fs::write(site.path("kubeconfig"), config.to_string()).unwrap();
    let prebuild = |cluster: &str| {
        let target = ["--kernel", &kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
        let args = [&["prebuild", "--image", "hello", "--cluster", cluster][..], &target].concat();
        let mut command = site.command(&args);
        command.env("KUBECONFIG", site.path("kubeconfig"));
        site.finish(command.spawn().unwrap())
    };
    prebuild("kube").exits(2).line("create Secret farrier/signing");
    prebuild("kube:ours").exits(0);
    let public = site.definitions().join("site.pem").display().to_string();
    rows(&site, &["--key", &public, &pinned(&site, &kernel)], 0);
}
