//! The bundle commands on the command line.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use farrier_bundle::{ContentKind, PreviousBundle};
use farrier_core::{facts::media_type, image::Digest, provenance::PublicKey};
use oci::{Descriptor, ImageIndex};

use super::{KERNEL, Site, content, farrier, filled, image, noise, text};
use crate::support::fake_http::{FakeHttp, answer};

/// Imports an unsigned bundle.
const IMPORT: [&str; 3] = ["bundle", "import", "--insecure-no-signature"];

/// Returns the exit code and the error message for an unusable bundle.
fn refusal(path: &Path) -> (Option<i32>, String) {
    let output =
        farrier(&[&IMPORT, &[path.to_str().unwrap(), "--registry", "127.0.0.1:1/never-asked"][..]].concat());
    (output.status.code(), text(&output.stderr).replace(path.to_str().unwrap(), "FILE"))
}

#[tokio::test]
async fn damaged_and_truncated_bundles_are_refused_before_anything_is_pushed() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let whole = fs::read(&file).unwrap();
    let bad: PathBuf = directory.path().join("bad.bundle");
    for cut in [10, 300, whole.len() / 3, whole.len() / 2, whole.len() - 100, whole.len() - 1] {
        fs::write(&bad, &whole[..cut]).unwrap();
        let (code, said) = refusal(&bad);
        assert_eq!(code, Some(1), "cut at {cut}: {said}");
        assert!(
            said.contains("FILE is truncated") && said.contains("hint: copy it again"),
            "cut at {cut}: {said}"
        );
    }
    for at in [20, 200, whole.len() / 2, whole.len() - 500_000, whole.len() - 30] {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        fs::write(&bad, &flipped).unwrap();
        let (code, said) = refusal(&bad);
        assert_eq!(code, Some(1), "flipped at {at}: {said}");
        assert!(said.contains("FILE is damaged at bytes"), "flipped at {at}: {said}");
        let place = said.split_once("at bytes ").unwrap().1.split_once(", in ").unwrap();
        let (first, last) = place.0.split_once(" to ").unwrap();
        let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
        // The last bytes hold the index's digest: either of the two may be damaged.
        assert!((first..=last).contains(&at) || at > whole.len() - 100, "flipped at {at}: {said}");
        assert!(at < 1000 || at > whole.len() - 100 || place.1.starts_with("blobs/sha256/"), "{said}");
    }
    fs::write(&bad, b"PK\x03\x04 something else").unwrap();
    let (code, said) = refusal(&bad);
    assert_eq!(code, Some(2));
    assert!(said.contains("FILE is not a bundle: it is not compressed with zstd"), "{said}");
}

/// Returns the command that exports one reference with `farrier bundle export`.
fn export_command(registry: &str, to: &Path, cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farrier"));
    command
        .args(["bundle", "export", "--registry", registry, "--reference", "large:1", "--to"])
        .arg(to)
        .env("XDG_CACHE_HOME", cache)
        .env("DOCKER_CONFIG", cache)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

#[tokio::test]
async fn an_export_that_is_killed_goes_on_to_the_same_bytes() {
    let from = Site::start();
    let layers: Vec<Vec<u8>> = (1..13).map(|seed| noise(4 << 20, seed)).collect();
    let layers: Vec<&[u8]> = layers.iter().map(Vec::as_slice).collect();
    from.publish("large", "1", &layers).await;
    let directory = tempfile::tempdir().unwrap();
    let registry = from.location.to_string();
    let whole = directory.path().join("whole");
    let gets = from.process.requests("GET");
    let output = export_command(&registry, &whole, directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let all_gets = from.process.requests("GET") - gets;

    let killed = directory.path().join("killed");
    let partial = directory.path().join("killed.partial");
    let mut child = export_command(&registry, &killed, directory.path()).spawn().unwrap();
    let written = || fs::metadata(&partial).map_or(0, |metadata| metadata.len());
    while written() < 10 << 20 && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!killed.exists(), "the export finished before the kill");
    assert!(written() >= 10 << 20);

    let gets = from.process.requests("GET");
    let output = export_command(&registry, &killed, directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("blobs that an earlier run wrote"));
    let resumed_gets = from.process.requests("GET") - gets;
    assert!(resumed_gets < all_gets, "{resumed_gets} of {all_gets} requests: all blobs were fetched again");
    assert!(fs::read(&killed).unwrap() == fs::read(&whole).unwrap());
    assert!(!partial.exists());
}

/// As after a kill or a full disk between the bundle and the files beside it.
#[tokio::test]
async fn an_export_that_lacks_its_checksums_is_completed() {
    let from = Site::start();
    from.publish("large", "1", &[b"one"]).await;
    let directory = tempfile::tempdir().unwrap();
    let (file, registry) = (directory.path().join("site.bundle"), from.location.to_string());
    let export = || export_command(&registry, &file, directory.path()).output().unwrap();
    let output = export();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let whole = fs::read(&file).unwrap();
    let checksums = directory.path().join("site.bundle.sha256");
    let text_of_checksums = fs::read(&checksums).unwrap();
    fs::write(&checksums, "").unwrap();
    let output = export();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("kept the bundle that an earlier run wrote"));
    assert!(fs::read(&file).unwrap() == whole && fs::read(&checksums).unwrap() == text_of_checksums);
    let output = export();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    // A file that is not this bundle stays.
    fs::remove_file(&checksums).unwrap();
    fs::write(&file, "of others").unwrap();
    let output = export();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert_eq!(fs::read(&file).unwrap(), b"of others");
}

/// A medium comes back from the other side.
#[tokio::test]
async fn an_export_writes_through_no_link() {
    let from = Site::start();
    from.publish("large", "1", &[b"one"]).await;
    let directory = tempfile::tempdir().unwrap();
    let other = directory.path().join("other");
    fs::write(&other, "of others").unwrap();
    for name in ["site.bundle.partial", "site.bundle.sha256"] {
        std::os::unix::fs::symlink(&other, directory.path().join(name)).unwrap();
    }
    let file = directory.path().join("site.bundle");
    let output = export_command(&from.location.to_string(), &file, directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read(&other).unwrap(), b"of others");
    assert!(!file.is_symlink() && !directory.path().join("site.bundle.sha256").is_symlink());
}

#[tokio::test]
async fn a_full_disk_is_told_and_what_is_written_is_kept() {
    let from = Site::start();
    let (one, two) = (noise(600_000, 1), noise(900_000, 2));
    from.publish("large", "1", &[&one, &two]).await;
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    fs::create_dir(&disk).unwrap();
    // A user namespace lets any user mount the file system, and the mount namespace hides it from other processes.
    let script = "mount -t tmpfs -o size=1m tmpfs \"$1\" && shift && \"$@\"; code=$?; ls \"${@: -1}.partial\"; exit $code";
    let to = disk.join("bundle");
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "bash", "-c", script, "bash"])
        .arg(&disk)
        .args([env!("CARGO_BIN_EXE_farrier"), "bundle", "export", "--registry", &from.location.to_string()])
        .args(["--reference", "large:1", "--to"])
        .arg(&to)
        .env("XDG_CACHE_HOME", directory.path())
        .output()
        .unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("write ") && said.contains("No space left on device"), "{said}");
    assert!(said.contains("hint: free some space and run the same command again"), "{said}");
    assert!(text(&output.stdout).contains("bundle.partial"), "{}", text(&output.stdout));
}

/// Writes definitions of three images, the last one for kernels of another series.
pub(super) fn definitions(directory: &Path) -> String {
    for (name, kernels) in [("one", ">=6.1"), ("two", ">=6.1"), ("three", ">=6.12")] {
        let text = format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: DriverImage\nmetadata: {{name: {name}}}\nspec:\n  version: '1'\n  \
             template: kbuild\n  vars: {{directory: s, makeArgs: ''}}\n  kernels: '{kernels}'\n  modules: [m]\n  sources: [{{name: s, from: {{path: {{path: s}}}}}}]\n  \
             nodes: {{matchLabels: {{a: b}}}}\n  rollout: []\n"
        );
        fs::create_dir_all(directory.join("images")).unwrap();
        fs::write(directory.join(format!("images/{name}.yaml")), text).unwrap();
    }
    directory.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_image_that_is_not_published_is_missed() {
    let site = Site::start();
    site.publish("one", "1", &[b"one"]).await;
    let directory = tempfile::tempdir().unwrap();
    let definitions = definitions(&directory.path().join("definitions"));
    let file = directory.path().join("site.bundle");
    let registry = site.location.to_string();
    let mut words = vec!["bundle", "export", "--registry", &registry, "--definitions", &definitions];
    words.extend(["--kernel", KERNEL, "--os", "debian", "--os-version", "12", "--arch", "amd64"]);
    words.extend(["--to", file.to_str().unwrap()]);
    let output = farrier(&words);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let missing = format!(
        "missing: two for {KERNEL} (debian 12, amd64): not in the registry (run farrier build two --kernel {KERNEL} --os debian \
         --os-version 12 --arch amd64 --push)"
    );
    assert!(said.contains(&missing), "{said}");
    assert!(!said.contains("missing: one for") && !said.contains("missing: three for"), "{said}");
    assert!(said.contains("error: nothing was written"), "{said}");
    assert!(!file.exists());

    words.push("--incomplete");
    let output = farrier(&words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(file.exists());
}

#[tokio::test]
async fn farriers_own_image_goes_along() {
    let (from, elsewhere, to) = (Site::start(), Site::start(), Site::start());
    from.publish("one", "1", &[b"one"]).await;
    let digest = elsewhere.publish("tools/farrier", "0.1.0", &[b"farrier itself"]).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle").to_str().unwrap().to_owned();
    let export = |reference: &str| {
        let registry = from.location.to_string();
        let words = ["--reference", "one:1", "--farrier-image", reference, "--to", &file];
        farrier(&[&["bundle", "export", "--registry", &registry], &words[..]].concat())
    };
    let output = export(&format!("{}/tools/farrier:none", elsewhere.location));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("tools/farrier:none"), "{}", text(&output.stderr));
    let output = export(&format!("{}/tools/farrier:0.1.0", elsewhere.location));
    assert!(output.status.success(), "{}", text(&output.stderr));

    let output = farrier(&[&IMPORT, &[&*file, "--registry", &to.location.to_string()][..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let arrived = to.manifest("farrier", "0.1.0").await.unwrap();
    assert_eq!(Digest::of(&arrived), digest);
}

#[tokio::test]
async fn the_definitions_directory_may_be_the_one_that_the_import_makes() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let digest = from.publish("definitions", "latest", &[b"kind: Site"]).await;
    let file = directory.path().join("site.bundle");
    from.export(&[content(ContentKind::Definitions, "definitions", "latest", &digest)], &file, None)
        .await
        .unwrap();
    let import = |definitions: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farrier"));
        command.current_dir(directory.path()).env("XDG_CACHE_HOME", directory.path().join("cache"));
        command
            .env("DOCKER_CONFIG", directory.path())
            .env("FARRIER_DEFINITIONS", directory.path().join(definitions));
        command.args(IMPORT).args(["site.bundle", "--definitions-to", "definitions", "--registry"]);
        command.arg(to.location.to_string()).output().unwrap()
    };
    let output = import("others");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(!directory.path().join("definitions").exists());
    let output = import("definitions");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(directory.path().join("definitions/driver.ko").exists());
}

/// Commands in definitions (a signing program, a template) run with the privileges of the site's farrier, so an import requires
/// `--accept`.
#[tokio::test]
async fn definitions_that_bring_commands_are_taken_at_a_word_only() {
    let site = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: s}\nspec:\n  imageSigning:\n    \
                key: {command: [/bin/sh, -c, id]}\n    publicKey: p.pem\n";
    for (path, content) in [("site.yaml", site), ("templates/x.Dockerfile.hbs", "FROM a\nRUN id\n")] {
        let (from, to) = (Site::start(), Site::start());
        let directory = tempfile::tempdir().unwrap();
        let digest = from.publish_files("definitions", "latest", &[(path, content.as_bytes())]).await;
        let file = directory.path().join("site.bundle");
        let definitions = super::content(ContentKind::Definitions, "definitions", "latest", &digest);
        from.export(&[definitions], &file, None).await.unwrap();
        let place = directory.path().join("definitions");
        let registry = to.location.to_string();
        let words = [file.to_str().unwrap(), "--definitions-to", place.to_str().unwrap(), "--registry"];
        let import = |more: &[&str]| farrier(&[&IMPORT, &words[..], &[&*registry], more].concat());
        let output = import(&[]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("--- {path}")) && said.contains("then pass --accept"), "{said}");
        assert!(!place.join(path).exists() && to.manifest("definitions", "latest").await.is_none());
        let output = import(&["--accept"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(fs::read_to_string(place.join(path)).unwrap(), content);
    }
}

#[tokio::test]
async fn a_delta_brings_its_definitions_and_none_if_it_is_refused() {
    let (from, to) = (Site::start(), Site::start());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let publish = async |text: &str| {
        let digest = from.publish_files("definitions", "latest", &[("site.yaml", text.as_bytes())]).await;
        content(ContentKind::Definitions, "definitions", "latest", &digest)
    };
    let one = image("one", "1", &from.publish("one", "1", &[b"one"]).await);
    let two = image("two", "2", &from.publish("two", "2", &[b"two"]).await);
    from.export(&[publish("old").await, one.clone()], &file("base"), None).await.unwrap();
    let new = publish("new").await;
    let since = PreviousBundle::read(&file("base")).unwrap();
    from.export(&[new.clone(), one.clone()], &file("delta"), Some(&since)).await.unwrap();
    let since = PreviousBundle::read(&file("delta")).unwrap();
    from.export(&[new, one, two], &file("same-definitions"), Some(&since)).await.unwrap();

    let (registry, place) = (to.location.to_string(), file("definitions"));
    let import = |name: &str| {
        let words = ["--definitions-to", place.to_str().unwrap(), "--overwrite", "--accept", "--registry"];
        let bundle = file(name);
        let output = farrier(&[&IMPORT, &[bundle.to_str().unwrap()][..], &words, &[&*registry]].concat());
        let written = fs::read_to_string(place.join("site.yaml")).unwrap_or_default();
        (output.status.code(), written, text(&output.stderr))
    };
    fs::create_dir(&place).unwrap();
    fs::write(place.join("site.yaml"), "of the site").unwrap();
    let (code, written, said) = import("delta");
    assert!(said.contains("the bundle is a delta to bundle"), "{said}");
    assert_eq!((code, &*written), (Some(1), "of the site"));
    for (name, expected) in [("base", "old"), ("delta", "new"), ("same-definitions", "new")] {
        let (code, written, said) = import(name);
        assert_eq!((code, &*written), (Some(0), expected), "{name}: {said}");
    }
}

/// A key pair in PEM form: `name` and `name.pub`.
fn key(directory: &Path, name: &str) -> PathBuf {
    let openssl = |words: &[&str]| {
        let output = Command::new("openssl").args(words).current_dir(directory).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    let public = format!("{name}.pub");
    openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", name]);
    openssl(&["pkey", "-in", name, "-pubout", "-out", &public]);
    directory.join(public)
}

/// Definition of a site that signs images with the key `ours` of this directory.
fn signing_site(directory: &Path) -> String {
    format!(
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {{name: s}}\nspec:\n  imageSigning:\n    key: {{file: {}}}\n",
        directory.join("ours").display()
    )
}

#[tokio::test]
async fn a_bundle_counts_for_who_signed_it() {
    let (from, to) = (Site::start(), Site::start());
    from.publish("one", "1", &[b"a driver"]).await;
    let directory = tempfile::tempdir().unwrap();
    let (ours, stranger) = (key(directory.path(), "ours"), key(directory.path(), "stranger"));
    let definitions = directory.path().join("definitions");
    fs::create_dir(&definitions).unwrap();
    fs::write(definitions.join("site.yaml"), signing_site(directory.path())).unwrap();
    let file = directory.path().join("site.bundle").to_str().unwrap().to_owned();
    let registry = from.location.to_string();
    let definitions = definitions.to_str().unwrap();
    let words = ["--definitions", definitions, "bundle", "export", "--registry", &registry];
    let words = [&words[..], &["--reference", "one:1", "--to", &file]].concat();
    // The site has a key, which did not sign the image.
    let output = farrier(&words);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("warning: one:1: "), "{said}");
    assert!(said.contains("the bundle's signature covers it"), "{said}");

    let registry = to.location.to_string();
    let import = |key: &[&str]| {
        let output = farrier(&[&["bundle", "import", &file, "--registry", &registry], key].concat());
        (output.status.code(), text(&output.stderr))
    };
    assert_eq!(import(&[]).0, Some(2));
    let (code, said) = import(&["--key", stranger.to_str().unwrap()]);
    let fingerprint =
        PublicKey::image_key_from_pem(&fs::read_to_string(&ours).unwrap()).unwrap().fingerprint();
    let wrong = format!("is signed by {fingerprint}, which is not among the given keys");
    assert!(code == Some(1) && said.contains(&wrong), "{said}");
    let words = ["bundle", "inspect", &file, "--key", ours.to_str().unwrap()];
    assert!(text(&farrier(&words).stdout).contains(&format!("signed   by {fingerprint}")));
    let printed = farrier(&[&words[..], &["-o", "json"]].concat()).stdout;
    let printed: serde_json::Value = serde_json::from_slice(&printed).unwrap();
    assert_eq!(printed["signedBy"], fingerprint.as_str());
    assert!(to.manifest("one", "1").await.is_none());
    let (code, said) = import(&["--key", ours.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
    // A key that the site's own directory revokes does not replace the revocation.
    let place = directory.path().join("place");
    fs::create_dir(&place).unwrap();
    fs::copy(&ours, place.join("ours.pub")).unwrap();
    let revoked = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: s}\nspec:\n  revoked:\n    \
                   - {key: ours.pub, since: \"2026-11-01T00:00:00Z\"}\n";
    fs::write(place.join("site.yaml"), revoked).unwrap();
    let words = ["--key", ours.to_str().unwrap(), "--definitions-to", place.to_str().unwrap(), "--overwrite"];
    let (code, said) = import(&words);
    assert!(code != Some(0) && said.contains("is revoked since 2026-11-01T00:00:00Z"), "{said}");
    // Other programs verify the signature of the index.
    let script = "zstd -dc $1 | tar -x farrier-bundle.json && openssl dgst -sha256 -verify $2 \
                  -signature <(base64 -d $1.sig) farrier-bundle.json";
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", script, "bash", &file, ours.to_str().unwrap()]);
    assert!(bash.current_dir(directory.path()).status().unwrap().success());
    // The signature of one bundle is not valid for another bundle.
    let other = directory.path().join("other.bundle");
    from.publish("two", "2", &[b"another"]).await;
    let registry = from.location.to_string();
    let words = ["bundle", "export", "--registry", &registry, "--reference", "two:2", "--to"];
    let output = farrier(&[&words, &[other.to_str().unwrap()][..]].concat());
    assert!(output.status.success() && text(&output.stderr).contains("the bundle is not signed"));
    fs::copy(format!("{file}.sig"), other.with_extension("bundle.sig")).unwrap();
    let words = ["bundle", "inspect", other.to_str().unwrap(), "--key", ours.to_str().unwrap()];
    assert_eq!(farrier(&words).status.code(), Some(1));
    fs::remove_file(format!("{file}.sig")).unwrap();
    let (code, said) = import(&["--key", ours.to_str().unwrap()]);
    assert!(code == Some(1) && said.contains("its signature cannot be read"), "{said}");
}

/// The other side takes the definitions of a signed bundle, and every writer to the registry can replace them there.
#[tokio::test]
async fn definitions_that_no_key_of_the_site_signed_are_not_exported() {
    let site = Site::start();
    let directory = tempfile::tempdir().unwrap();
    key(directory.path(), "ours");
    let definitions = definitions(&directory.path().join("definitions"));
    fs::write(Path::new(&definitions).join("site.yaml"), signing_site(directory.path())).unwrap();
    let repository = site.location.repository("definitions").unwrap();
    let layer = b"kind: Site";
    for bytes in [&layer[..], oci::EMPTY] {
        site.registry.push_bytes(&repository, bytes).await.unwrap();
    }
    let layer = Descriptor::new(media_type::OCI_LAYER, Digest::of(layer), layer.len() as u64);
    let manifest = oci::ImageManifest::artifact(media_type::DEFINITIONS, vec![layer], []).to_bytes().unwrap();
    site.put("definitions", "latest", media_type::OCI_MANIFEST, &manifest).await;
    site.publish("one", "1", &[b"one"]).await;

    let (file, registry) = (directory.path().join("site.bundle"), site.location.to_string());
    let mut words =
        vec!["--offline", "bundle", "export", "--registry", &registry, "--definitions", &definitions];
    words.extend(["--kernel", KERNEL, "--os", "debian", "--os-version", "12", "--arch", "amd64"]);
    words.extend(["--reference", "one:1", "--to", file.to_str().unwrap(), "--incomplete"]);
    let output = farrier(&words);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("missing: definitions: "), "{said}");
    assert!(said.contains("left out: one:1: ") && said.contains("missing: one for "), "{said}");
    assert!(said.contains("is not signed with a key of this site"), "{said}");
    let listed = text(&farrier(&["bundle", "inspect", file.to_str().unwrap()]).stdout);
    assert!(listed.contains("one:1") && !listed.contains("definitions"), "{listed}");
}

/// A registry that fails while farrier reads signatures is unreachable, and its images are not unsigned.
#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_fails_during_an_export_has_no_unsigned_image() {
    let directory = tempfile::tempdir().unwrap();
    key(directory.path(), "ours");
    fs::write(directory.path().join("site.yaml"), signing_site(directory.path())).unwrap();
    let manifest = answer(200, r#"{"schemaVersion":2}"#).header("Content-Type", media_type::OCI_MANIFEST);
    // Later requests fail.
    let registry = FakeHttp::start(vec![manifest]).await;
    let (location, definitions) = (format!("{}/drivers", registry.host), directory.path().to_str().unwrap());
    let file = directory.path().join("site.bundle");
    let words = ["--definitions", definitions, "bundle", "export", "--registry", &location];
    let words = [&words[..], &["--reference", "one:1", "--to", file.to_str().unwrap()]].concat();
    let output = farrier(&words);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(!said.contains("warning: one:1"), "{said}");
}

/// The blobs are missing, so any copy of them would fail first.
#[tokio::test]
async fn a_signature_is_verified_before_any_blob_is_copied() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    from.export(&contents, &directory.path().join("site.bundle"), None).await.unwrap();
    let ours = key(directory.path(), "ours");
    let script = "zstd -dc site.bundle > site.tar && mkdir layout && tar -xf site.tar -C layout && rm -r layout/blobs && \
                  truncate -s 64K site.tar && echo bm9uZQ== | tee site.tar.sig > layout.sig";
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", script]);
    assert!(bash.current_dir(directory.path()).status().unwrap().success());
    // The signature lies beside the directory, also if its name ends with a `/`.
    for name in ["site.tar", "layout", "layout/"] {
        let path = directory.path().join(name);
        let output = farrier(&["bundle", "inspect", path.to_str().unwrap(), "--key", ours.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let name = name.trim_end_matches('/');
        assert!(said.contains(&format!("{name}.sig was not made with a given key")), "{said}");
    }
}

/// An image published for several architectures: each member image is signed and has a check report.
#[tokio::test]
async fn an_index_that_is_named_brings_what_is_said_of_its_images() {
    let site = Site::start();
    let member = site.publish("one", "1-amd64", &[b"one"]).await;
    let report = site.refer("one", &member).await;
    let bytes = site.manifest("one", member.as_str()).await.unwrap();
    let descriptor = Descriptor::new(media_type::OCI_MANIFEST, member.clone(), bytes.len() as u64);
    let list = ImageIndex { manifests: vec![descriptor], ..ImageIndex::empty() }.to_bytes().unwrap();
    let index = site.put("one", "1", media_type::OCI_INDEX, &list).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    let (registry, to) = (site.location.to_string(), file.to_str().unwrap());
    let output = farrier(&["bundle", "export", "--registry", &registry, "--reference", "one:1", "--to", to]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = farrier(&["bundle", "inspect", to, "-o", "json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let word = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let contents = printed["contents"].as_array().unwrap().iter();
    let rows: Vec<_> =
        contents.map(|row| (word(row, "kind"), word(row, "tag"), word(row, "digest"))).collect();
    let row = |kind: &str, tag: &str, digest: &str| (kind.to_owned(), tag.to_owned(), digest.to_owned());
    assert!(rows.contains(&row("image", "1", index.as_str())), "{rows:?}");
    assert!(rows.contains(&row("image", "", member.as_str())), "{rows:?}");
    assert!(rows.contains(&row("referrer", "", report.as_str())), "{rows:?}");
    let signature = format!("sha256-{}.sig", member.hex());
    assert!(rows.iter().any(|(kind, tag, _)| kind == "signature" && *tag == signature), "{rows:?}");
}
