//! `farrier gc` with real components: images in Debian's docker-registry, a cluster that references some of them, and a layout
//! directory.
use std::time::Duration;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use farrier_core::{
    facts::{CheckReportDocument, media_type},
    image::{Digest, HostOutput, ImageReference, Repository, Version},
    kernel::Architecture,
};
use farrier_store::registry::{Registry, RegistryOptions, RemoteRegistry};

use crate::support::{
    kube_api::objects::{daemon_set, node},
    live::{DRIVER, Live, NAMESPACE},
    registry_process::Wants,
    site::{Run, Site, entries, skopeo},
};
use kmod::{CheckReport, Verdict};
use oci::{self, Descriptor, ImageIndex, ImageManifest};
use serde_json::{Value, json};

const A: &str = "6.1.0-901-amd64";
const B: &str = "6.1.0-902-amd64";
const C: &str = "6.1.0-903-amd64";
const D: &str = "6.1.0-904-amd64";
const E: &str = "6.1.0-905-amd64";
const LONG_AGO: &str = "2020-01-02";

/// Calls the site's registry like an independent client.
fn talk<T>(ask: impl AsyncFnOnce(&RemoteRegistry) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let registry = RemoteRegistry::new("registry".to_owned(), &RegistryOptions::default());
    runtime.block_on(ask(&registry))
}

fn manifest(reference: &str) -> Option<ImageManifest> {
    let reference: ImageReference = reference.parse().unwrap();
    // docker-registry 2.8 answers 500 during a concurrent manifest write, so retry.
    let stored = (0..50).find_map(|_| {
        let answer =
            talk(async |registry| registry.manifest(&reference.repository, &reference.version).await);
        answer.inspect_err(|_| std::thread::sleep(Duration::from_millis(100))).ok()
    });
    stored.expect("the registry answers").map(|stored| ImageManifest::parse(&stored.bytes).unwrap())
}

/// Writes farrier's kernel record with the given days.
fn remember(site: &Site, days: &[(&str, &str)]) {
    let days: BTreeMap<&str, &str> = days.iter().copied().collect();
    let empty = || Descriptor::new(media_type::OCI_EMPTY, Digest::of(oci::EMPTY), oci::EMPTY.len() as u64);
    let manifest = ImageManifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: Some(media_type::KERNEL_RECORD.to_owned()),
        config: empty(),
        layers: vec![empty()],
        subject: None,
        annotations: [("farrier.dev/kernels-seen".to_owned(), json!(days).to_string())].into(),
    };
    let repository: Repository = format!("{}/kernels", site.location).parse().unwrap();
    let version = Version::Tag("last-seen".parse().unwrap());
    talk(async |registry| {
        registry.push_bytes(&repository, oci::EMPTY).await.unwrap();
        let bytes = manifest.to_bytes().unwrap();
        registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &bytes).await.unwrap();
    });
}

fn remembered(site: &Site) -> Value {
    let record = manifest(&format!("{}/kernels:last-seen", site.location)).unwrap();
    serde_json::from_str(&record.annotations["farrier.dev/kernels-seen"]).unwrap()
}

/// Stores a check report as a referrer of an image, and returns the digest of the report's manifest.
fn add_report(image: &str) -> Digest {
    let reference: ImageReference = image.parse().unwrap();
    talk(async |registry| {
        let repository = &reference.repository;
        let stored = registry.manifest(repository, &reference.version).await.unwrap().unwrap();
        let report = CheckReport {
            kernel: "6.1.0".to_owned(),
            architecture: Architecture::Amd64,
            verdict: Verdict::Loads,
            findings: Vec::new(),
            modules: Vec::new(),
            load_order: Vec::new(),
            boot: None,
        };
        let document = CheckReportDocument { report: &report, reused_from: None };
        let artifact = document.artifact(&stored.bytes, "1 module: loads").unwrap();
        registry.push_bytes(repository, &artifact.content).await.unwrap();
        registry.push_bytes(repository, oci::EMPTY).await.unwrap();
        registry.push_referrer(repository, &artifact.manifest).await.unwrap()
    })
}

fn gc(live: &Live, args: &[&str]) -> Run {
    live.site.finish(live.command(&[&["gc"], args].concat()).spawn().unwrap())
}

/// Creates a cluster with a node on kernel A, and published images for all five kernels.
fn fleet(wants: Wants) -> (Live, BTreeMap<String, String>) {
    let live = Live::at(Site::with_registry(wants), [node("n0", A)], "image");
    let images = live.publish_for("n0", &[B, C, D, E]);
    let today = jiff::Zoned::now().date().to_string();
    remember(&live.site, &[(A, &today), (B, LONG_AGO), (C, LONG_AGO), (D, LONG_AGO)]);
    (live, images)
}

fn going(run: &Run) -> BTreeSet<String> {
    let report = run.json();
    let images = report["images"].as_array().unwrap().iter();
    images
        .map(|image| {
            format!("{}@{}", image["repository"].as_str().unwrap(), image["digest"].as_str().unwrap())
        })
        .collect()
}

#[test]
fn images_of_kernels_that_are_gone_go_and_nothing_that_somebody_names() {
    let (live, images) = fleet(Wants { deletion: true, ..Wants::default() });
    // B runs in a DaemonSet that farrier does not manage, and C is the image that a rollback would restore.
    live.api.create(daemon_set("elsewhere", "tool", &images[B]));
    let record = json!({"driver": {"set": "x", "replaced": images[C], "at": "2026-01-01T00:00:00Z"}});
    let annotated = json!({"metadata": {"annotations": {"farrier.dev/record": record.to_string()}}});
    live.api.patch_as("farrier", "daemonsets.apps", NAMESPACE, DRIVER, &annotated);
    let report = add_report(&images[D]);
    add_report(&images[A]);
    let repository = images[D].split('@').next().unwrap();
    let digest = |image: &str| image.split('@').nth(1).unwrap().to_owned();
    let (record, tags) = (remembered(&live.site), live.site.tags(DRIVER));

    let dry = gc(&live, &["-o", "json"]).exits(0);
    assert_eq!(going(&dry), [images[D].clone()].into());
    assert_eq!(dry.json()["images"][0]["gone"], json!({D: LONG_AGO}));
    let layer = manifest(&images[D]).unwrap().layers[0].clone();
    assert!(dry.json()["bytes"].as_u64().unwrap() > layer.size, "{dry}");
    assert_eq!((remembered(&live.site), live.site.tags(DRIVER)), (record, tags.clone()), "{dry}");
    let table = gc(&live, &[]).exits(0);
    assert!(table.line("1 image would be deleted with --delete").contains("no other image references"));

    gc(&live, &["--delete"]).exits(0).line("1 of 1 image deleted");
    assert_eq!(manifest(&images[D]), None);
    assert_eq!(manifest(&format!("{repository}@{report}")), None, "the report is left");
    let hex = |image: &str| digest(image).replace(':', "-");
    let all = talk(async |registry| registry.tags(&repository.parse().unwrap()).await.unwrap());
    let all: BTreeSet<String> = all.iter().map(ToString::to_string).collect();
    assert!(!all.contains(&hex(&images[D])) && all.contains(&hex(&images[A])), "{all:?}");
    for kernel in [A, B, C, E] {
        assert!(manifest(&images[kernel]).is_some(), "{kernel}");
    }
    assert_eq!(live.site.tags(DRIVER).len(), tags.len() - 1);
    // The record lacked E, so the retention time of E starts today.
    assert_ne!(remembered(&live.site)[E], Value::Null);

    let again = gc(&live, &["--delete", "-o", "json"]).exits(0);
    assert_eq!(going(&again), BTreeSet::new());
    let config = manifest(&images[A]).unwrap().config;
    live.site.registry.collect_garbage();
    assert!(!live.site.registry.stores(layer.digest.as_str()));
    assert!(live.site.registry.stores(config.digest.as_str()));
}

/// Anyone who may push can write the list of an image's referrers.
#[test]
fn an_image_in_a_forged_list_of_referrers_is_kept() {
    let (live, images) = fleet(Wants { deletion: true, ..Wants::default() });
    let (_, gone) = images[D].split_once('@').unwrap();
    let used: ImageReference = images[A].parse().unwrap();
    talk(async |registry| {
        let stored = registry.manifest(&used.repository, &used.version).await.unwrap().unwrap();
        let mut list = ImageIndex::empty();
        list.manifests.push(Descriptor {
            artifact_type: Some(HostOutput::Sysext.media_type().to_owned()),
            ..Descriptor::of(&stored.media_type, &stored.bytes)
        });
        let version = Version::Tag(oci::referrers_tag(&gone.parse().unwrap()).unwrap());
        let list = list.to_bytes().unwrap();
        registry.push_manifest(&used.repository, &version, media_type::OCI_INDEX, &list).await.unwrap();
    });
    gc(&live, &["--delete"]).exits(0).line("3 of 3 images deleted");
    assert_eq!(manifest(&images[D]), None);
    assert!(manifest(&images[A]).is_some());
}

#[test]
fn a_registry_that_does_not_allow_it_is_named_with_what_to_set() {
    let (live, images) = fleet(Wants::default());
    let tags = live.site.tags(DRIVER);
    let run = gc(&live, &["--delete", "-o", "json"]).exits(1);
    run.line("does not allow to delete manifest");
    run.line("REGISTRY_STORAGE_DELETE_ENABLED=true");
    let states: Vec<Value> =
        run.json()["images"].as_array().unwrap().iter().map(|image| image["state"].clone()).collect();
    assert_eq!(states, ["failed", "untouched", "untouched"]);
    assert_eq!(live.site.tags(DRIVER), tags);
    assert!(images.values().all(|image| manifest(image).is_some()));
}

#[test]
fn what_an_interrupted_run_left_is_found() {
    let (live, images) = fleet(Wants { deletion: true, ..Wants::default() });
    let report = add_report(&images[D]);
    let (repository, digest) = images[D].split_once('@').unwrap();
    // Simulate a run that was killed after it deleted the image itself.
    talk(async |registry| {
        let deleted = registry.delete_manifest(&repository.parse().unwrap(), &digest.parse().unwrap()).await;
        assert!(deleted.unwrap());
    });
    let run = gc(&live, &["--delete", "--keep-days", "100000", "-o", "json"]).exits(0);
    assert_eq!(run.json()["leftovers"][0]["subject"], digest);
    assert_eq!(run.json()["leftovers"][0]["state"], "deleted");
    assert_eq!(manifest(&format!("{repository}@{report}")), None);
    let run = gc(&live, &["-o", "json"]).exits(0);
    assert_eq!(run.json()["leftovers"], json!([]));
}

#[test]
fn a_record_in_which_every_kernel_is_old_is_not_trusted() {
    let (live, images) = fleet(Wants { deletion: true, ..Wants::default() });
    remember(&live.site, &[A, B, C, D].map(|kernel| (kernel, LONG_AGO)));
    for args in [&["-o", "json"][..], &["--delete", "-o", "json"]] {
        let run = gc(&live, args).exits(1);
        run.line("no kernel was seen after 2020-01-02");
        run.line("--accept-stale-record");
        assert!(run.json()["images"].as_array().unwrap().iter().all(|image| image["state"] == "untouched"));
    }
    assert!(images.values().all(|image| manifest(image).is_some()));
    gc(&live, &["--delete", "--accept-stale-record"]).exits(0).line("3 of 3 images deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_differs_from_the_registrys_deletes_nothing() {
    let site = Site::new();
    for (ahead, code) in [(jiff::Span::new().minutes(50), 0), (jiff::Span::new().minutes(70), 1)] {
        let date = (jiff::Zoned::now() + ahead).with_time_zone(jiff::tz::TimeZone::UTC);
        let date = date.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let location = format!("{}/drivers", listener.local_addr().unwrap());
        // An empty registry, whose clock is ahead.
        let answer = move || async move { (axum::http::StatusCode::NOT_FOUND, [("date", date)]) };
        let server = axum::serve(listener, axum::Router::new().fallback(answer));
        let server = tokio::spawn(async { server.await });
        let run = tokio::task::block_in_place(|| site.farrier(&["gc", "--registry", &location, "--delete"]));
        let run = run.exits(code);
        assert_eq!(run.stderr.contains("differ by more than an hour"), code == 1, "{run}");
        server.abort();
    }
}

#[test]
fn without_a_view_of_the_cluster_nothing_is_deleted() {
    let (live, images) = fleet(Wants { deletion: true, ..Wants::default() });
    let mut command = live.command(&["gc", "--delete"]);
    command.env("KUBECONFIG", live.site.path("nowhere"));
    live.site.finish(command.spawn().unwrap()).exits(2);
    assert!(images.values().all(|image| manifest(image).is_some()));
}

#[test]
fn a_layout_directory_is_emptied_of_what_nothing_names() {
    let (live, images) = fleet(Wants::default());
    let layout = live.site.path("layout");
    let tag_of = |kernel: &str| {
        let tags = live.site.tags(DRIVER);
        tags.into_iter().find(|tag| tag.contains(kernel)).unwrap()
    };
    for kernel in [A, B] {
        let tag = tag_of(kernel);
        let from = format!("docker://{}/{DRIVER}:{tag}", live.site.location);
        let to = format!("oci:{}:{DRIVER}:{tag}", layout.display());
        let copied = skopeo(&["copy", "--src-tls-verify=false", &from, &to]);
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    }
    let [kept, gone] = [A, B].map(|kernel| manifest(&images[kernel]).unwrap());
    // The kustomization references the image only by tag.
    let kustomization = format!("images: [{{name: driver, newTag: {}}}]\n", tag_of(A));
    fs::write(live.site.cluster().join("kustomization.yaml"), kustomization).unwrap();
    let location = format!("oci:{}", layout.display());
    let args = ["gc", "--registry", &location, "--keep-days", "0", "--delete", "-o", "json"];
    let run = live.site.farrier(&args).exits(0);
    assert_eq!(run.json()["images"].as_array().unwrap().len(), 1);
    let blobs = entries(&layout.join("blobs/sha256"));
    let holds = |digest: &Digest| blobs.contains(&digest.hex().to_owned());
    assert!(holds(&kept.layers[0].digest) && holds(&kept.config.digest), "{blobs:?}");
    assert!(!holds(&gone.layers[0].digest), "{blobs:?}");
    assert!(!blobs.contains(&images[B].split(':').next_back().unwrap().to_owned()), "{blobs:?}");
    live.site.farrier(&args).exits(0);
}

#[test]
fn reconciles_record_the_kernels_that_they_see_once_a_day() {
    let mut live = Live::new([node("n0", A)], "image");
    live.publish();
    live.start(&["--interval", "1"]);
    let record = |live: &Live| manifest(&format!("{}/kernels:last-seen", live.site.location));
    live.until("the record", |live| record(live).is_some());
    let today = remembered(&live.site)[format!("{A} amd64")].clone();
    assert!(today.as_str().unwrap() > "2026-01-01", "{today}");
    let (puts, reconciles) = (live.site.registry.requests("PUT"), live.reconciles());
    live.until("further reconciles", |live| live.reconciles() > reconciles + 2);
    assert_eq!(live.site.registry.requests("PUT"), puts, "{}", live.log());
    live.api.set_kernel("n0", B);
    live.until("the new kernel", |live| !remembered(&live.site)[format!("{B} amd64")].is_null());
    assert_eq!(remembered(&live.site)[format!("{A} amd64")], today);
}
