//! The check report as a referrer of an image, read by farrier's library and by independent tools. The registries list
//! referrers, do not list them, or are layout directories.
use std::{collections::BTreeMap, fs, process::Command, sync::Arc};

use farrier_core::{
    facts::{CheckReportDocument, media_type},
    image::{Digest, Repository, Version},
    kernel::Architecture,
};
use farrier_store::registry::{LayoutRegistry, Registry, RegistryError, RegistryOptions, RemoteRegistry};

use crate::support::{
    fake_http::{Answer, FakeHttp, answer},
    kernels,
    registry_process::{RegistryProcess, Wants},
    site::{Site, skopeo},
};
use kmod::{CheckReport, Verdict};
use oci::{Artifact, Assembly, ImageIndex, ImageManifest, assemble, keep_tag, referrers_tag};
use serde_json::{Value, json};

const KERNEL: &str = "6.1.0-56-amd64";

fn remote() -> Arc<dyn Registry> {
    Arc::new(RemoteRegistry::new("test".to_owned(), &RegistryOptions::default()))
}

fn repository(host: &str) -> Repository {
    format!("{host}/drivers/x").parse().unwrap()
}

/// Returns the manifest and the configuration of an image without layers.
fn image(name: &str) -> (Vec<u8>, Vec<u8>) {
    let notes = BTreeMap::from([("org.opencontainers.image.title".to_owned(), name.to_owned())]);
    let assembled = assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: &[],
        entrypoint: &["driver-entrypoint".to_owned()],
        env: &BTreeMap::new(),
        labels: &BTreeMap::new(),
        annotations: &notes,
        architecture: "amd64",
    })
    .unwrap();
    (assembled.manifest, assembled.config)
}

fn artifact(subject: &[u8], verdict: Verdict) -> Artifact {
    let report = CheckReport {
        kernel: KERNEL.to_owned(),
        architecture: Architecture::Amd64,
        verdict,
        findings: Vec::new(),
        modules: Vec::new(),
        load_order: Vec::new(),
        boot: None,
    };
    let document = CheckReportDocument { report: &report, reused_from: None };
    document.artifact(subject, &format!("0 modules: {verdict}")).unwrap()
}

async fn push(
    registry: &dyn Registry,
    repository: &Repository,
    artifact: &Artifact,
) -> Result<(), RegistryError> {
    registry.push_bytes(repository, oci::EMPTY).await?;
    registry.push_bytes(repository, &artifact.content).await?;
    let digest = registry.push_referrer(repository, &artifact.manifest).await?;
    assert_eq!(digest, artifact.digest);
    Ok(())
}

async fn reports(registry: &dyn Registry, repository: &Repository, subject: &Digest) -> Vec<Digest> {
    let found = registry.referrers(repository, subject, Some(media_type::CHECK_REPORT)).await.unwrap();
    for descriptor in &found {
        assert_eq!(descriptor.annotations["farrier.dev/kernel-release"], KERNEL);
    }
    found.into_iter().map(|descriptor| descriptor.digest).collect()
}

/// Sends a plain `GET` to a registry, like an independent client, and returns the JSON answer.
fn get(url: &str) -> Value {
    let accept = format!("Accept: {}, {}", media_type::OCI_INDEX, media_type::OCI_MANIFEST);
    let output = Command::new("curl").args(["-sSfL", "-H", &accept, url]).output().expect("run curl");
    assert!(output.status.success(), "{url}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// docker-registry 2.8 does not list referrers, so farrier uses the specification's fallback tag.
#[tokio::test]
async fn a_registry_that_does_not_list_referrers_has_a_tag_for_them() {
    let server = RegistryProcess::start(Wants::default());
    let (registry, repository) = (remote(), repository(&server.host));
    let (subject, config) = image("a");
    let digest = Digest::of(&subject);
    assert!(reports(registry.as_ref(), &repository, &digest).await.is_empty());

    // The subject may be pushed after its referrer.
    let first = artifact(&subject, Verdict::Unknown);
    push(registry.as_ref(), &repository, &first).await.unwrap();
    assert_eq!(reports(registry.as_ref(), &repository, &digest).await, std::slice::from_ref(&first.digest));
    registry.push_bytes(&repository, &config).await.unwrap();
    let version = Version::Tag("1".parse().unwrap());
    registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &subject).await.unwrap();

    // A different report is added, an identical report is not, and entries from other writers stay.
    let second = artifact(&subject, Verdict::Loads);
    push(registry.as_ref(), &repository, &second).await.unwrap();
    push(registry.as_ref(), &repository, &second).await.unwrap();
    let both = [first.digest.clone(), second.digest.clone()];
    assert_eq!(reports(registry.as_ref(), &repository, &digest).await, both);
    let signature = "application/vnd.example.signature";
    assert!(registry.referrers(&repository, &digest, Some(signature)).await.unwrap().is_empty());
    let elsewhere = Digest::of(b"another image");
    assert!(reports(registry.as_ref(), &repository, &elsewhere).await.is_empty());

    // Read the list like any other client.
    let base = format!("http://{}/v2/drivers/x", server.host);
    let index = get(&format!("{base}/manifests/sha256-{}", digest.hex()));
    assert_eq!(index["mediaType"], media_type::OCI_INDEX);
    let listed = index["manifests"].as_array().unwrap();
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[1]["artifactType"], media_type::CHECK_REPORT);
    assert_eq!(listed[1]["annotations"]["farrier.dev/check-verdict"], "loads");
    let manifest = get(&format!("{base}/manifests/{}", listed[1]["digest"].as_str().unwrap()));
    assert_eq!(manifest["subject"]["digest"], digest.as_str());
    assert_eq!(manifest["subject"]["size"], subject.len());
    let blob = get(&format!("{base}/blobs/{}", manifest["layers"][0]["digest"].as_str().unwrap()));
    assert_eq!(blob["report"]["verdict"], "loads");
}

/// One process adds several reports to one list concurrently, and the list contains all of them. Two processes add the same
/// report concurrently, and the list contains the report. Different reports of different processes have no such guarantee,
/// because the tag schema has no lock.
#[tokio::test]
async fn writers_at_the_same_time() {
    let server = RegistryProcess::start(Wants::default());
    let repository = repository(&server.host);
    let (subject, _) = image("a");
    let digest = Digest::of(&subject);
    let artifacts = [Verdict::Unknown, Verdict::Loads, Verdict::Refused].map(|v| artifact(&subject, v));
    let one = remote();
    let pushes = artifacts.iter().map(|artifact| push(one.as_ref(), &repository, artifact));
    for pushed in futures::future::join_all(pushes).await {
        pushed.unwrap();
    }
    let mut found = reports(one.as_ref(), &repository, &digest).await;
    let mut wanted = artifacts.map(|artifact| artifact.digest);
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted);

    let (subject, _) = image("b");
    let same = artifact(&subject, Verdict::Loads);
    let two = remote();
    // docker-registry 2.8 answers 500 during a concurrent manifest write; a reconcile retries transient errors.
    let patient = async |registry: &dyn Registry| {
        let mut outcome = push(registry, &repository, &same).await;
        for _ in 0..5 {
            if !outcome.as_ref().is_err_and(RegistryError::is_transient) {
                break;
            }
            outcome = push(registry, &repository, &same).await;
        }
        outcome
    };
    let both = tokio::join!(patient(one.as_ref()), patient(two.as_ref()));
    both.0.unwrap();
    both.1.unwrap();
    assert_eq!(reports(one.as_ref(), &repository, &Digest::of(&subject)).await, [same.digest]);
}

/// A registry that implements specification 1.1 confirms the referrer, so farrier writes no fallback tag.
#[tokio::test]
async fn a_registry_that_lists_referrers_is_asked_for_them() {
    let (subject, _) = image("a");
    let digest = Digest::of(&subject);
    let artifact = artifact(&subject, Verdict::Loads);
    let listed = ImageManifest::parse(&artifact.manifest).unwrap().as_referrer(&artifact.manifest);
    let mut other = listed.clone();
    other.artifact_type = Some("application/vnd.example.signature".to_owned());
    let page = |descriptor: &oci::Descriptor| {
        let mut index = ImageIndex::empty();
        index.manifests.push(descriptor.clone());
        answer(200, index.to_bytes().unwrap()).header("content-type", media_type::OCI_INDEX)
    };
    let fake = FakeHttp::start_with(|_| {
        vec![
            answer(201, "").header("OCI-Subject", &digest),
            // The answer has two pages and ignores the filter.
            page(&other)
                .header("Link", format!("</v2/drivers/x/referrers/{digest}?n=1&last=1>; rel=\"next\"")),
            page(&listed),
            answer(200, &artifact.manifest),
        ]
    })
    .await;
    let (registry, repository) = (remote(), repository(&fake.host));
    registry.push_referrer(&repository, &artifact.manifest).await.unwrap();
    assert_eq!(
        reports(registry.as_ref(), &repository, &digest).await,
        std::slice::from_ref(&artifact.digest)
    );

    let requests = fake.requests();
    let targets: Vec<String> =
        requests.iter().map(|request| format!("{} {}", request.method, request.target)).collect();
    let filter = "?artifactType=application%2Fvnd.farrier.check-report.v1%2Bjson";
    assert_eq!(
        targets,
        [
            format!("PUT /v2/drivers/x/manifests/{}", artifact.digest),
            format!("GET /v2/drivers/x/referrers/{digest}{filter}"),
            format!("GET /v2/drivers/x/referrers/{digest}?n=1&last=1"),
            format!("GET /v2/drivers/x/manifests/{}", artifact.digest),
        ]
    );
    assert_eq!(requests[0].header("content-type"), Some(media_type::OCI_MANIFEST));
    assert_eq!(requests[0].body, artifact.manifest);
}

/// farrier writes or reads the fallback tag when a registry confirms another subject or returns an empty list.
#[tokio::test]
async fn half_hearted_registries_get_the_tag_as_well() {
    let (subject, _) = image("a");
    let digest = Digest::of(&subject);
    let artifact = artifact(&subject, Verdict::Loads);
    let mut index = ImageIndex::empty();
    index.manifests.push(ImageManifest::parse(&artifact.manifest).unwrap().as_referrer(&artifact.manifest));
    let by_tag = || answer(200, index.to_bytes().unwrap()).header("content-type", media_type::OCI_INDEX);
    let empty = || answer(200, ImageIndex::empty().to_bytes().unwrap());
    let script: Vec<Answer> = vec![
        answer(201, "").header("OCI-Subject", Digest::of(b"another")),
        // The tag that keeps the report is not there yet.
        answer(404, ""),
        answer(201, ""),
        answer(404, ""),
        answer(201, ""),
        by_tag(),
        empty(),
        by_tag(),
        answer(200, &artifact.manifest),
    ];
    let fake = FakeHttp::start(script).await;
    let (registry, repository) = (remote(), repository(&fake.host));
    registry.push_referrer(&repository, &artifact.manifest).await.unwrap();
    assert_eq!(
        reports(registry.as_ref(), &repository, &digest).await,
        std::slice::from_ref(&artifact.digest)
    );
    let tag = referrers_tag(&digest).unwrap();
    let requests = fake.requests();
    let keep = keep_tag(&digest, &artifact.digest).unwrap();
    assert_eq!(requests[2].target, format!("/v2/drivers/x/manifests/{keep}"));
    assert_eq!(requests[2].body, artifact.manifest);
    assert_eq!(requests[4].target, format!("/v2/drivers/x/manifests/{tag}"));
    assert_eq!((requests[4].method.as_str(), requests[4].body.clone()), ("PUT", index.to_bytes().unwrap()));
}

#[tokio::test]
async fn answers_that_are_no_lists() {
    let (subject, config) = image("a");
    let digest = Digest::of(&subject);
    for (script, wanted) in [
        (vec![answer(200, "<html>")], "list referrers of drivers/x@"),
        (vec![answer(403, "no")], "refused to list referrers"),
    ] {
        let fake = FakeHttp::start(script).await;
        let error = remote()
            .referrers(&repository(&fake.host), &digest, Some(media_type::CHECK_REPORT))
            .await
            .unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
    // A manifest without a subject is not a referrer.
    let fake = FakeHttp::start(Vec::new()).await;
    for bytes in [subject, config] {
        let error = remote().push_referrer(&repository(&fake.host), &bytes).await.unwrap_err();
        assert!(matches!(error, RegistryError::Protocol { .. }), "{error}");
    }
    assert!(fake.requests().is_empty());
}

/// A registry's words reach the terminal without characters that hide or turn around text.
#[tokio::test(flavor = "multi_thread")]
async fn a_registrys_words_do_not_steer_the_terminal() {
    let body = "{\"errors\": [{\"code\": \"DENIED\", \"message\": \"ask \u{202e}nimda\u{9b}31m\u{200b}\"}]}";
    let fake = FakeHttp::start((0..8).map(|_| answer(403, body)).collect()).await;
    let image = format!("{}/drivers/x@{}", fake.host, Digest::of(b"x"));
    let command = std::process::Command::new(env!("CARGO_BIN_EXE_farrier"))
        .args(["verify", "--insecure-no-signature", &image])
        .output();
    let output = command.unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(said.contains("nimda"), "{said}");
    assert!(!said.contains(['\u{202e}', '\u{9b}', '\u{200b}']), "{said:?}");
}

/// A layout directory lists the report in `index.json` and leaves named images unchanged.
#[tokio::test]
async fn a_layout_lists_reports_in_its_index() {
    let directory = tempfile::tempdir().unwrap();
    let layout = LayoutRegistry::new(directory.path().to_owned());
    let (one, two): (Repository, Repository) = ("one".parse().unwrap(), "two".parse().unwrap());
    let (subject, config) = image("a");
    let digest = Digest::of(&subject);
    layout.push_bytes(&one, &config).await.unwrap();
    let by_digest = Version::Digest(digest.clone());
    layout.push_manifest(&one, &by_digest, media_type::OCI_MANIFEST, &subject).await.unwrap();
    let artifact = artifact(&subject, Verdict::Loads);
    push(&layout, &one, &artifact).await.unwrap();
    let tag = Version::Tag("1".parse().unwrap());
    layout.push_manifest(&one, &tag, media_type::OCI_MANIFEST, &subject).await.unwrap();
    // A repeated push changes nothing.
    push(&layout, &one, &artifact).await.unwrap();
    layout.push_manifest(&one, &by_digest, media_type::OCI_MANIFEST, &subject).await.unwrap();

    assert_eq!(reports(&layout, &one, &digest).await, std::slice::from_ref(&artifact.digest));
    assert!(reports(&layout, &two, &digest).await.is_empty(), "the report belongs to another repository");
    assert_eq!(layout.tags(&one).await.unwrap(), ["1".parse().unwrap()]);
    assert!(layout.manifest(&one, &by_digest).await.unwrap().is_some());
    let index: Value =
        serde_json::from_slice(&fs::read(directory.path().join("index.json")).unwrap()).unwrap();
    let listed: Vec<_> = index["manifests"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry["artifactType"].clone(), entry["digest"].clone()))
        .collect();
    assert_eq!(
        listed,
        [
            (json!(media_type::CHECK_REPORT), json!(artifact.digest.as_str())),
            (Value::Null, json!(digest.as_str())),
        ]
    );
    let output = skopeo(&["inspect", &format!("oci:{}:one:1", directory.path().display())]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// After a real build the published image has a check report with the build's verdict.
#[test]
fn a_published_image_has_its_report_beside_it() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    let built = site.build("hello", &kernel, &["--push", "-o", "json"]).exits(0).json();
    let digest = built["digest"].as_str().unwrap();
    let notes = site.inspect_raw(&format!("hello@{digest}"))["annotations"].clone();
    assert_eq!(notes["farrier.dev/check-verdict"], built["check"]["verdict"]);
    let words = format!("1 module: {}", built["check"]["verdict"].as_str().unwrap());
    assert_eq!(notes["farrier.dev/check-summary"], words);

    let list = site.inspect_raw(&format!("hello:{}", digest.replace(':', "-")));
    // The image's other referrers are the two forms of the bill of materials, and the provenance.
    let listed = list["manifests"].as_array().unwrap();
    assert_eq!(listed.len(), 4, "{list:#}");
    let of_reports = |entry: &&Value| entry["artifactType"] == media_type::CHECK_REPORT;
    let report = listed.iter().find(of_reports).unwrap()["digest"].as_str().unwrap();
    let manifest = site.inspect_raw(&format!("hello@{report}"));
    assert_eq!(manifest["artifactType"], media_type::CHECK_REPORT);
    assert_eq!(manifest["subject"]["digest"], digest);
    let blob = manifest["layers"][0]["digest"].as_str().unwrap();
    let document = get(&format!("http://{}/v2/drivers/hello/blobs/{blob}", site.registry.host));
    assert_eq!(document["report"], built["check"]);
    assert_eq!(document.get("reusedFrom"), None);

    // A forced rebuild yields the same referrers.
    site.build("hello", &kernel, &["--push", "--force"]).exits(0);
    let again = site.inspect_raw(&format!("hello:{}", digest.replace(':', "-")));
    assert_eq!(again, list);
}
