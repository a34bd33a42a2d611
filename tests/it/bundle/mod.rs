//! Bundles between real registries: Debian's docker-registry on both sides, skopeo and tar as other readers.

mod command;
mod fleet;
mod held;
mod immutable;
mod licenses;
mod messages;
mod order;
mod parts;
mod scripted;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::{Command, Output},
    sync::Arc,
};

use farrier_bundle as bundle;
use farrier_bundle::{
    Bundle, BundleError, Content, ContentKind,
    ContentKind::{Image, Mirror, Referrer, Signature},
    ContentRequest, Exported, ImportOutcome, Meter, Phase, PreviousBundle, Target, Verified,
};
use farrier_core::{
    facts::{CheckReportDocument, ImageFacts, media_type},
    image::{Digest, Tag, Version},
};
use farrier_store::registry::{Registry, RegistryLocation, RegistryOptions, connect};

use crate::support::registry_process::{RegistryProcess, Wants};
use oci::{Assembly, Descriptor, EntryKind, ImageIndex, LayerWriter, assemble};

/// Drops the progress.
struct Silent;

impl Meter for Silent {
    fn begin(&self, _: Phase, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}

const KERNEL: &str = "6.1.0-47-amd64";

/// A registry with images as farrier publishes them.
struct Site {
    process: RegistryProcess,
    location: RegistryLocation,
    registry: Arc<dyn Registry>,
}

impl Site {
    fn start() -> Self {
        let process = RegistryProcess::start(Wants::default());
        let location: RegistryLocation = format!("{}/drivers", process.host).parse().unwrap();
        let registry = connect(&location, &RegistryOptions::default());
        Self { process, location, registry }
    }

    fn target(&self) -> Target {
        Target { location: self.location.clone(), registry: Arc::clone(&self.registry) }
    }

    /// Publishes an image under a tag with one layer per content, each with the file `driver.ko`.
    async fn publish(&self, name: &str, tag: &str, layers: &[&[u8]]) -> Digest {
        let files: Vec<(&str, &[u8])> = layers.iter().map(|content| ("driver.ko", *content)).collect();
        self.publish_files(name, tag, &files).await
    }

    /// Publishes an image under a tag with one layer per named file.
    async fn publish_files(&self, name: &str, tag: &str, files: &[(&str, &[u8])]) -> Digest {
        let facts = ImageFacts { kernel_release: Some(KERNEL.parse().unwrap()), ..ImageFacts::default() };
        self.publish_for((name, tag), files, &facts, "amd64").await
    }

    /// Publishes an image with these facts for an architecture.
    async fn publish_for(
        &self,
        (name, tag): (&str, &str),
        files: &[(&str, &[u8])],
        facts: &ImageFacts,
        architecture: &str,
    ) -> Digest {
        let repository = self.location.repository(name).unwrap();
        let mut made = Vec::new();
        for (path, content) in files {
            let mut writer = LayerWriter::new(Vec::new(), 0);
            let kind = EntryKind::File { size: content.len() as u64, content: &mut &content[..] };
            writer.entry(Path::new(path), 0o644, kind).unwrap();
            let (layer, blob) = writer.finish().unwrap();
            self.registry.push_bytes(&repository, &blob).await.unwrap();
            made.push(layer);
        }
        let image = assemble(&Assembly {
            base: None,
            entrypoint_layer: None,
            layers: &made,
            entrypoint: &["/driver".to_owned()],
            env: &BTreeMap::new(),
            labels: &BTreeMap::new(),
            annotations: &facts.to_annotations(),
            architecture,
        })
        .unwrap();
        self.registry.push_bytes(&repository, &image.config).await.unwrap();
        self.put(name, tag, media_type::OCI_MANIFEST, &image.manifest).await
    }

    async fn put(&self, name: &str, tag: &str, media_type: &str, bytes: &[u8]) -> Digest {
        let repository = self.location.repository(name).unwrap();
        let version = Version::Tag(tag.parse().unwrap());
        self.registry.push_manifest(&repository, &version, media_type, bytes).await.unwrap()
    }

    /// Attaches a check report and a signature tag to an image.
    async fn refer(&self, name: &str, subject: &Digest) -> Digest {
        let repository = self.location.repository(name).unwrap();
        let image = self.manifest(name, subject.as_str()).await.unwrap();
        let report = kmod::CheckReport {
            kernel: KERNEL.to_owned(),
            architecture: "amd64".parse().unwrap(),
            verdict: kmod::Verdict::Loads,
            findings: Vec::new(),
            modules: Vec::new(),
            load_order: Vec::new(),
            boot: None,
        };
        let document = CheckReportDocument { report: &report, reused_from: None };
        let artifact = document.artifact(&image, "loads").unwrap();
        for bytes in [&artifact.content[..], oci::EMPTY] {
            self.registry.push_bytes(&repository, bytes).await.unwrap();
        }
        self.registry.push_referrer(&repository, &artifact.manifest).await.unwrap();
        self.publish(name, &format!("sha256-{}.sig", subject.hex()), &[b"signature"]).await;
        artifact.digest
    }

    async fn manifest(&self, name: &str, version: &str) -> Option<Vec<u8>> {
        let repository = self.location.repository(name).unwrap();
        let version = match version.parse::<Digest>() {
            Ok(digest) => Version::Digest(digest),
            Err(_) => Version::Tag(version.parse().unwrap()),
        };
        self.registry.manifest(&repository, &version).await.unwrap().map(|stored| stored.bytes)
    }

    async fn export(
        &self,
        contents: &[Content],
        to: &Path,
        since: Option<&PreviousBundle>,
    ) -> Result<Exported, BundleError> {
        let contents =
            bundle::with_referrers(contents.to_vec(), &self.location, self.registry.as_ref()).await?;
        let wanted: Vec<ContentRequest> = contents
            .into_iter()
            .map(|content| ContentRequest {
                repository: self.location.repository(&content.repository).unwrap(),
                registry: Arc::clone(&self.registry),
                content,
            })
            .collect();
        // A fixed name, because the registry's port differs in each run.
        let collection = bundle::collect(&wanted, "a.example/drivers", since).await?;
        bundle::export(collection, to, None, Arc::new(Silent)).await
    }
}

fn content(kind: ContentKind, repository: &str, tag: &str, digest: &Digest) -> Content {
    Content {
        kind,
        repository: repository.to_owned(),
        tag: Some(tag.parse::<Tag>().unwrap()),
        digest: digest.clone(),
    }
}

fn image(repository: &str, tag: &str, digest: &Digest) -> Content {
    content(ContentKind::Image, repository, tag, digest)
}

fn verify(path: &Path) -> Result<Verified, BundleError> {
    Bundle::open(path)?.verify(&Silent)
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..length).map(|_| next()).collect()
}

fn farrier(arguments: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_farrier"))
        .args(arguments)
        .env("XDG_CACHE_HOME", home.path())
        .env("DOCKER_CONFIG", home.path())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output =
        Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("run {program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Creates a site with two images that share a layer and an index. One image has a report and a signature.
async fn filled() -> (Site, Vec<Content>, Digest) {
    let site = Site::start();
    let shared = noise(300_000, 1);
    let one = site.publish("one", "1", &[&shared, b"one"]).await;
    let two = site.publish("two", "2", &[&shared, &noise(900_000, 2)]).await;
    let report = site.refer("one", &one).await;
    let member = site.publish("mirror/debian", "amd64", &[b"base"]).await;
    let bytes = site.manifest("mirror/debian", "amd64").await.unwrap();
    let descriptor = Descriptor::new(media_type::OCI_MANIFEST, member, bytes.len() as u64);
    let list = ImageIndex { manifests: vec![descriptor], ..ImageIndex::empty() }.to_bytes().unwrap();
    let index = site.put("mirror/debian", "12", media_type::OCI_INDEX, &list).await;
    let contents = vec![
        image("one", "1", &one),
        image("two", "2", &two),
        content(ContentKind::Mirror, "mirror/debian", "12", &index),
    ];
    (site, contents, report)
}

#[tokio::test]
async fn a_bundle_carries_everything_to_an_empty_registry_once() {
    let (from, contents, report) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    let exported = from.export(&contents, &file, None).await.unwrap();
    assert_eq!(exported.length, fs::metadata(&file).unwrap().len());
    assert!(!directory.path().join("site.bundle.partial").exists());

    let verified = verify(&file).unwrap();
    assert_eq!(*verified.bundle().id(), exported.id);
    let kinds: Vec<ContentKind> =
        verified.bundle().index().contents.iter().map(|listed| listed.content.kind).collect();
    assert_eq!(kinds, [Mirror, Image, Image, Referrer, Signature]);
    assert_eq!(verified.bundle().index().contents[1].kernel.as_ref().unwrap().as_str(), KERNEL);

    let to = Site::start();
    let imported = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
    assert!(imported.contents.iter().all(|new| new.outcome == ImportOutcome::Pushed), "{imported:?}");
    assert!(imported.sent_blobs > 5 && imported.sent_bytes > 1_200_000, "{imported:?}");
    for Content { repository, tag, .. } in &contents {
        let tag = tag.as_ref().unwrap().as_str();
        assert_eq!(to.manifest(repository, tag).await, from.manifest(repository, tag).await);
    }
    let repository = to.location.repository("one").unwrap();
    let listed = to.registry.referrers(&repository, &contents[0].digest, None).await.unwrap();
    assert_eq!(listed.iter().map(|found| &found.digest).collect::<Vec<_>>(), [&report]);
    let signature = format!("sha256-{}.sig", contents[0].digest.hex());
    assert!(to.manifest("one", &signature).await.is_some());
    run(
        "skopeo",
        &[
            "copy",
            "--src-tls-verify=false",
            &format!("docker://{repository}:1"),
            &format!("dir:{}", directory.path().join("pulled").display()),
        ],
    );

    let (posts, puts) = (to.process.requests("POST"), to.process.requests("PUT"));
    let again = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
    assert_eq!((again.sent_bytes, again.sent_blobs), (0, 0));
    assert_eq!(to.process.requests("POST"), posts, "the second import started an upload");
    assert_eq!(to.process.requests("PUT"), puts);
    assert!(again.contents.iter().all(|new| new.outcome == ImportOutcome::Present), "{again:?}");
}

/// Anyone who may push can add referrers to an image.
#[tokio::test]
async fn requests_of_an_import_grow_with_the_number_of_referrers() {
    let (from, to) = (Site::start(), Site::start());
    let one = from.publish("one", "1", &[b"one"]).await;
    let (repository, subject) =
        (from.location.repository("one").unwrap(), from.manifest("one", "1").await.unwrap());
    let count = 12;
    for number in 0..count {
        let content = number.to_string().into_bytes();
        let referrer = oci::Artifact::about(&subject, "example/report", content, &[]).unwrap();
        for bytes in [oci::EMPTY, &referrer.content] {
            from.registry.push_bytes(&repository, bytes).await.unwrap();
        }
        from.registry.push_referrer(&repository, &referrer.manifest).await.unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&[image("one", "1", &one)], &file, None).await.unwrap();
    let verified = verify(&file).unwrap();
    bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
    let before = to.process.requests("GET");
    let again = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
    assert_eq!(again.contents.len(), count + 1);
    assert!(again.contents.iter().all(|new| new.outcome == ImportOutcome::Present), "{again:?}");
    let requests = to.process.requests("GET") - before;
    assert!(requests < 3 * count, "{requests} requests");
}

/// A mirrored image is exported together with its signatures.
#[tokio::test]
async fn a_copy_goes_with_what_is_signed_about_it() {
    let from = Site::start();
    let base = from.publish("mirror/debian", "12", &[b"base"]).await;
    from.refer("mirror/debian", &base).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    let contents = [content(ContentKind::Mirror, "mirror/debian", "12", &base)];
    from.export(&contents, &file, None).await.unwrap();
    let verified = verify(&file).unwrap();
    let listed = verified.bundle().index().contents.iter();
    assert_eq!(listed.map(|listed| listed.content.kind).collect::<Vec<_>>(), [Mirror, Referrer, Signature]);
}

#[tokio::test]
async fn other_tools_find_an_oci_layout_in_it() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let layout = directory.path().join("layout");
    fs::create_dir(&layout).unwrap();
    let unpack = format!("zstd -dc {} | tar -x -C {}", file.display(), layout.display());
    run("bash", &["-o", "pipefail", "-c", &unpack]);
    let at = layout.display();
    run(
        "skopeo",
        &["copy", &format!("oci:{at}:two:2"), &format!("dir:{}/pulled", directory.path().display())],
    );
    let seen = run("skopeo", &["inspect", "--raw", &format!("oci:{at}:one:1")]);
    assert_eq!(Digest::of(seen.as_bytes()), contents[0].digest);
    run("zstd", &["--test", "--quiet", file.to_str().unwrap()]);
    // farrier reads the unpacked bundle like any other layout.
    let location: RegistryLocation = format!("oci:{at}").parse().unwrap();
    let registry = connect(&location, &RegistryOptions::default());
    let repository = "one".parse().unwrap();
    assert_eq!(registry.referrers(&repository, &contents[0].digest, None).await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_same_contents_are_the_same_bytes_and_an_interrupted_export_goes_on() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("whole");
    from.export(&contents, &file, None).await.unwrap();
    let whole = fs::read(&file).unwrap();
    let reversed: Vec<Content> = contents.iter().rev().cloned().collect();
    let second = directory.path().join("second");
    from.export(&reversed, &second, None).await.unwrap();
    assert!(fs::read(&second).unwrap() == whole, "the order of the contents changes the bundle");
    assert!(matches!(from.export(&contents, &file, None).await.unwrap_err(), BundleError::Exists(_)));

    let all = verify(&file).unwrap().bundle().index().blobs.len();
    let mut most_kept = 0;
    for (case, cut) in
        [0, 100, whole.len() / 4, whole.len() / 2, whole.len() - 3000, whole.len()].into_iter().enumerate()
    {
        let place = directory.path().join(format!("resumed-{case}"));
        let partial = directory.path().join(format!("resumed-{case}.partial"));
        fs::write(&partial, &whole[..cut]).unwrap();
        let exported = from.export(&contents, &place, None).await.unwrap();
        assert!(fs::read(&place).unwrap() == whole, "cut at {cut}");
        assert!(exported.resumed_blobs >= most_kept, "cut at {cut}: {exported:?}");
        most_kept = exported.resumed_blobs;
    }
    assert_eq!(most_kept, all);

    // Data from the earlier run is verified before reuse.
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    fs::write(directory.path().join("repaired.partial"), &damaged).unwrap();
    let repaired = directory.path().join("repaired");
    let exported = from.export(&contents, &repaired, None).await.unwrap();
    assert!(fs::read(&repaired).unwrap() == whole);
    assert!(exported.resumed_blobs < all);
}

#[tokio::test]
async fn a_delta_needs_its_base_and_says_so() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base");
    from.export(&contents, &base, None).await.unwrap();
    // The new image shares the large layer, in a repository that the base bundle lacks.
    let three = from.publish("three", "3", &[&noise(300_000, 1), b"three"]).await;
    let with_new = [contents.clone(), vec![image("three", "3", &three)]].concat();
    let since = PreviousBundle::read(&base).unwrap();
    let delta = directory.path().join("delta");
    from.export(&with_new, &delta, Some(&since)).await.unwrap();
    assert!(fs::metadata(&delta).unwrap().len() * 20 < fs::metadata(&base).unwrap().len());

    // `--since` accepts the printed index as well as the bundle.
    let printed = farrier(&["bundle", "inspect", base.to_str().unwrap(), "-o", "json"]);
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let json = directory.path().join("base.json");
    fs::write(&json, &printed.stdout).unwrap();
    let second = directory.path().join("second");
    from.export(&with_new, &second, Some(&PreviousBundle::read(&json).unwrap())).await.unwrap();
    assert!(fs::read(&second).unwrap() == fs::read(&delta).unwrap());

    let to = Site::start();
    let verified = verify(&delta).unwrap();
    let error = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap_err();
    let BundleError::BaseMissing { base: named, count, .. } = &error else { panic!("{error}") };
    assert!(*named == since.id && *count > 3, "{error}");
    assert_eq!(to.process.requests("POST"), 0, "something was pushed");

    bundle::import(&verify(&base).unwrap(), &to.target(), false, &Silent).await.unwrap();
    let imported = bundle::import(&verified, &to.target(), false, &Silent).await.unwrap();
    assert!(imported.sent_bytes < 10_000, "the shared layer was uploaded again: {imported:?}");
    assert_eq!(to.manifest("three", "3").await, from.manifest("three", "3").await);
}

#[tokio::test]
async fn definitions_are_unpacked_and_replace_nothing_unsaid() {
    let from = Site::start();
    let directory = tempfile::tempdir().unwrap();
    let digest = from.publish("definitions", "latest", &[b"kind: Site"]).await;
    let file = directory.path().join("bundle");
    let contents = [content(ContentKind::Definitions, "definitions", "latest", &digest)];
    from.export(&contents, &file, None).await.unwrap();
    let verified = verify(&file).unwrap();
    let to = directory.path().join("definitions");
    assert_eq!(bundle::write_definitions(&verified, &to, false, true).unwrap(), Some(1));
    let unpacked = to.join("driver.ko");
    assert_eq!(fs::read(&unpacked).unwrap(), b"kind: Site");
    assert_eq!(bundle::write_definitions(&verified, &to, false, true).unwrap(), Some(0));
    fs::write(&unpacked, "of the site").unwrap();
    let error = bundle::write_definitions(&verified, &to, false, true).unwrap_err();
    assert!(matches!(&error, BundleError::Differs(_, files) if *files == ["driver.ko"]), "{error}");
    assert_eq!(fs::read(&unpacked).unwrap(), b"of the site");
    assert_eq!(bundle::write_definitions(&verified, &to, true, true).unwrap(), Some(1));
    assert_eq!(fs::read(&unpacked).unwrap(), b"kind: Site");
    assert_eq!(fs::read_dir(&to).unwrap().count(), 1, "something temporary was left");
}

#[tokio::test]
async fn tags_for_what_was_kept_last_move() {
    let from = Site::start();
    let directory = tempfile::tempdir().unwrap();
    let to = Site::start();
    let mut held = None;
    for (at, layer) in [&b"older"[..], b"newer"].into_iter().enumerate() {
        let digest = from.publish("sources", "declared-1", &[layer]).await;
        let file = directory.path().join(format!("{at}.bundle"));
        let contents = [content(ContentKind::Source, "sources", "declared-1", &digest)];
        from.export(&contents, &file, None).await.unwrap();
        let imported = bundle::import(&verify(&file).unwrap(), &to.target(), false, &Silent).await.unwrap();
        let expected = held.map_or(ImportOutcome::Pushed, |held| ImportOutcome::Moved { previous: held });
        assert_eq!(imported.contents[0].outcome, expected);
        assert_eq!(Digest::of(&to.manifest("sources", "declared-1").await.unwrap()), digest);
        held = Some(digest);
    }
}

#[tokio::test]
async fn a_layout_directory_can_be_either_side() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let location: RegistryLocation =
        format!("oci:{}", directory.path().join("layout").display()).parse().unwrap();
    let registry = connect(&location, &RegistryOptions::default());
    let target = Target { location: location.clone(), registry: Arc::clone(&registry) };
    bundle::import(&verify(&file).unwrap(), &target, false, &Silent).await.unwrap();
    let wanted: Vec<ContentRequest> = bundle::with_referrers(contents, &location, registry.as_ref())
        .await
        .unwrap()
        .into_iter()
        .map(|content| ContentRequest {
            repository: location.repository(&content.repository).unwrap(),
            registry: Arc::clone(&registry),
            content,
        })
        .collect();
    let collection = bundle::collect(&wanted, "a.example/drivers", None).await.unwrap();
    let back = directory.path().join("back.bundle");
    bundle::export(collection, &back, None, Arc::new(Silent)).await.unwrap();
    let names = |path: &Path| -> BTreeSet<Content> {
        let bundle = Bundle::open(path).unwrap();
        bundle.index().contents.iter().map(|listed| listed.content.clone()).collect()
    };
    let without_signature: BTreeSet<Content> =
        names(&file).into_iter().filter(|content| content.kind != ContentKind::Signature).collect();
    assert!(names(&back).is_superset(&without_signature));
}

#[tokio::test]
async fn a_registry_that_gives_another_blob_is_found_out() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let repository = from.location.repository("two").unwrap();
    let version = Version::Digest(contents[1].digest.clone());
    let manifest = from.registry.manifest(&repository, &version).await.unwrap().unwrap();
    let manifest = oci::ImageManifest::parse(&manifest.bytes).unwrap();
    from.process.replace_blob(&manifest.layers[1].digest, b"another");
    let error = from.export(&contents, &directory.path().join("bundle"), None).await.unwrap_err();
    assert!(matches!(&error, BundleError::Registry(_)), "{error}");
    assert!(!directory.path().join("bundle").exists());
}
