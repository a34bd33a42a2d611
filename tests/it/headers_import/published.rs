//! Stand-ins for header sets that distributions publish: images in a real registry and archives on a loopback server.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    http::{StatusCode, Uri},
};
use farrier_core::{
    facts::media_type,
    image::{Repository, Version},
    kernel::HeaderSource,
};
use farrier_inputs::{Fetcher, HeaderIdentity, Lookup};
use farrier_net::{Net, NetOptions};
use farrier_store::registry::{Registry as _, RemoteRegistry};
use oci::{Assembly, Layer, assemble, compress};
use serde_json::json;

use super::*;
use crate::support::{
    packages::run,
    registry_process::{RegistryProcess, Wants},
    rpm_repository::SigningKey,
    site::Site,
};

/// [`RELEASE`] with only the characters that a tag allows.
const LABEL: &str = "6.1.192-ACME";

fn source(json: serde_json::Value) -> HeaderSource {
    serde_json::from_value(json).unwrap()
}

/// Packs a directory of the bench as a layer's tar.
fn layer(bench: &Bench, directory: &str) -> PathBuf {
    let tar = bench.path(&format!("{directory}.tar"));
    run(Command::new("tar").arg("-cf").arg(&tar).arg("-C").arg(bench.path(directory)).arg("."));
    tar
}

/// Compresses the layers, pushes an image of them, and returns its digest.
pub async fn push(repository: &str, tag: &str, layers: &[PathBuf]) -> Digest {
    let mut files = Vec::new();
    let compressed = layers.iter().map(|tar| {
        let file = tempfile::NamedTempFile::new().unwrap();
        let layer = compress(fs::File::open(tar).unwrap(), file.as_file()).unwrap();
        files.push(file);
        layer
    });
    let compressed: Vec<Layer> = compressed.collect();
    let paths = files.iter().map(|file| file.path().to_owned());
    push_layers(repository, tag, &compressed.into_iter().zip(paths).collect::<Vec<_>>()).await
}

/// Pushes an image of compressed layers with their blobs, and returns its digest.
pub async fn push_layers(repository: &str, tag: &str, layers: &[(Layer, PathBuf)]) -> Digest {
    let registry = RemoteRegistry::new("test".to_owned(), &RegistryOptions::default());
    let repository: Repository = repository.parse().unwrap();
    for (layer, blob) in layers {
        registry.push_blob(&repository, &layer.digest, blob).await.unwrap();
    }
    let described: Vec<Layer> = layers.iter().map(|(layer, _)| layer.clone()).collect();
    let none = BTreeMap::new();
    let image = assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: &described,
        entrypoint: &[],
        env: &none,
        labels: &none,
        annotations: &none,
        architecture: "amd64",
    })
    .unwrap();
    registry.push_bytes(&repository, &image.config).await.unwrap();
    let tag = Version::Tag(tag.parse().unwrap());
    registry.push_manifest(&repository, &tag, media_type::OCI_MANIFEST, &image.manifest).await.unwrap()
}

async fn find(fetcher: &Fetcher, bench: &Bench, source: &HeaderSource) -> Result<HeaderLookup, FetchError> {
    fetcher.clone().with_definitions(bench.path("definitions")).headers().find(source, &target()).await
}

async fn identity(fetcher: &Fetcher, bench: &Bench, source: &HeaderSource) -> HeaderIdentity {
    fetcher
        .clone()
        .with_definitions(bench.path("definitions"))
        .headers()
        .identity(source, &target())
        .await
        .unwrap()
}

#[track_caller]
fn found(found: Result<HeaderLookup, FetchError>) -> Box<farrier_inputs::HeaderSet> {
    match found.map_err(|error| oci::error_chain(&error)) {
        Ok(Lookup::Found(set)) => set,
        Ok(Lookup::Missing { looked_for, .. }) => panic!("missing: {looked_for}"),
        Err(error) => panic!("{error}"),
    }
}

/// Stand-ins for Talos and Bottlerocket: an image tagged with the system's version contains a directory or an archive.
#[tokio::test]
async fn an_image_has_the_headers_at_a_path_and_counts_by_its_digest() {
    let (bench, server) = (Bench::new(), RegistryProcess::start(Wants::default()));
    bench.tree("image/src");
    bench.write("image/boot/vmlinuz", "");
    bench.write("image/src/certs/signing_key.pem", "PRIVATE KEY");
    let repository = format!("{}/talos/kernel", server.host);
    let source_at = |path: &str| {
        let image = format!("{repository}:{{{{os_version}}}}-{{{{kernel_label}}}}");
        source(json!({"oci": {"image": image, "path": path}}))
    };
    let (fetcher, talos) = (bench.fetcher("cache"), source_at("/src"));
    let absent = identity(&fetcher, &bench, &talos).await;
    assert_eq!(absent.missing, Some(format!("image {repository}:1-{LABEL}")));

    let digest = push(&repository, &format!("1-{LABEL}"), &[layer(&bench, "image")]).await;
    assert_eq!(identity(&fetcher, &bench, &talos).await.identity.as_deref(), Some(digest.hex()));
    let looked = fetcher.headers().look(&talos, &target()).await.unwrap();
    assert_eq!(looked, Lookup::Found(None));
    assert_eq!(server.requests_to("GET", "talos/kernel/blobs/"), 0, "the lookup fetched no blob");

    let set = found(find(&fetcher, &bench, &talos).await);
    assert_eq!(set.identity.as_deref(), Some(digest.hex()));
    assert_eq!(set.origin, [format!("{repository} {digest}")]);
    assert!(set.root.join(format!("usr/lib/modules/{RELEASE}/build/Module.symvers")).is_file());
    assert!(!set.root.join("boot").exists());
    let key = format!("usr/src/linux-headers-{RELEASE}/certs/signing_key.pem");
    assert!(!set.root.join(key).exists(), "the module signing key was kept");

    // A copy in the store has the same identity, and farrier no longer contacts the image's registry.
    let store = bench.with_store("mirror");
    let kept = store.headers().keep(&talos, &target()).await.unwrap();
    assert!(matches!(kept, Lookup::Found(_)));
    drop(server);
    let there = identity(&bench.with_store("other"), &bench, &talos).await;
    assert_eq!(there.identity.as_deref(), Some(digest.hex()));
}

/// The plan names the missing image, and the build runs once the image exists.
#[tokio::test]
async fn a_plan_says_which_image_is_missing() {
    const KERNEL: &str = "6.1.0-901-amd64";
    let (site, bench) = (Site::new(), Bench::new());
    let repository = format!("{}/acme/kernel", site.registry.host);
    site.define(
        "kernels/05-image.yaml",
        &format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {{name: image}}\nspec:\n  \
             match: {{release: '6\\.1\\.0-901-amd64'}}\n  \
             headers: {{oci: {{image: \"{repository}:{{{{release}}}}\", path: /src}}}}\n  \
             toolchain: {{bootstrap: {{suite: bookworm, include: [gcc-12, make]}}}}\n"
        ),
    );
    site.canary(KERNEL);
    let run = site.farrier(&["plan"]);
    let missing = format!("there is no image {repository}:{KERNEL}");
    assert!(run.stdout.contains(&missing), "{}{}", run.stdout, run.stderr);

    bench.write("image/src/Makefile", "");
    bench.write("image/src/.config", "CONFIG_X86_64=y\nCONFIG_MODULES=y\n");
    bench.write("image/src/include/generated/utsrelease.h", format!("#define UTS_RELEASE \"{KERNEL}\"\n"));
    push(&repository, KERNEL, &[layer(&bench, "image")]).await;
    site.farrier(&["plan"]).exits(0).line("1 to build");
    let target = ["headers", "fetch", "--kernel", KERNEL, "--os", "debian", "--os-version", "12"];
    let fetched = site.farrier(&target).exits(0);
    assert!(fetched.stdout.contains(KERNEL), "{}", fetched.stdout);
}

#[tokio::test]
async fn another_image_under_the_tag_is_another_input() {
    let (bench, server) = (Bench::new(), RegistryProcess::start(Wants::default()));
    bench.tree("linux");
    bench.write("image/toolchain/readme", "");
    bench.tar(&["--xz"], "image/kernel-devel.tar.xz", "linux");
    let repository = format!("{}/kit", server.host);
    let kit =
        source(json!({"oci": {"image": format!("{repository}:latest"), "path": "/kernel-devel.tar.xz"}}));
    let fetcher = bench.fetcher("cache");
    let first = push(&repository, "latest", &[layer(&bench, "image")]).await;
    assert_eq!(found(find(&fetcher, &bench, &kit).await).identity.as_deref(), Some(first.hex()));
    bench.write("image/readme", "");
    let second = push(&repository, "latest", &[layer(&bench, "image")]).await;
    assert_ne!(first, second);
    assert_eq!(identity(&fetcher, &bench, &kit).await.identity.as_deref(), Some(second.hex()));
}

/// OKD 4.16.0-okd-scos.1 shipped kernel 5.14.0-531 with a driver toolkit for 5.14.0-460.
#[tokio::test]
async fn a_driver_toolkit_of_another_kernel_is_told() {
    let (bench, server) = (Bench::new(), RegistryProcess::start(Wants::default()));
    bench.tree("image/usr/src/kernels/6.1.190-ACME+");
    let repository = format!("{}/toolkit", server.host);
    let digest = push(&repository, "1", &[layer(&bench, "image")]).await;
    let at = |path: &str| source(json!({"oci": {"image": format!("{repository}@{digest}"), "path": path}}));
    let fetcher = bench.fetcher("cache");
    let error = find(&fetcher, &bench, &at("/usr/src/kernels/{{release}}")).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "cannot find /usr/src/kernels/{RELEASE} in image {repository}@{digest}: /usr/src/kernels has 6.1.190-ACME+"
        )
    );
    assert!(error.hint().unwrap().contains("another kernel") && !error.is_transient());

    // A tree whose directory has the wanted name but whose headers are for another kernel.
    let header = "image/usr/src/kernels/6.1.190-ACME+/include/generated/utsrelease.h";
    bench.write(header, "#define UTS_RELEASE \"6.1.190-ACME+\"\n");
    let digest = push(&repository, "2", &[layer(&bench, "image")]).await;
    let lying = source(
        json!({"oci": {"image": format!("{repository}@{digest}"), "path": "/usr/src/kernels/6.1.190-ACME+"}}),
    );
    let error = find(&fetcher, &bench, &lying).await.unwrap_err();
    assert!(matches!(&error, FetchError::Tree(TreeError::Release { .. })), "{error}");
    assert_eq!(
        fs::read_dir(bench.path("cache/headers")).unwrap().count(),
        0,
        "nothing of the tree is cached"
    );
}

/// A stand-in for Flatcar: `build` and `source` in `lib/modules`, and a later layer that deletes a file.
#[tokio::test]
async fn a_root_gives_its_headers_and_nothing_else() {
    let (bench, server) = (Bench::new(), RegistryProcess::start(Wants::default()));
    let modules = format!("usr/lib/modules/{RELEASE}");
    bench.tree(&format!("low/{modules}/build"));
    bench.write(&format!("low/{modules}/source/Makefile"), "");
    bench.write(&format!("low/{modules}/gone"), "");
    bench.write(&format!("low/{modules}/build/certs/signing_key.pem"), "PRIVATE KEY");
    bench.link("../source", &format!("low/{modules}/build/source"));
    bench.link("usr/lib", "low/lib");
    bench.write("low/etc/passwd", "root");
    bench.write(&format!("high/{modules}/.wh.gone"), "");
    let repository = format!("{}/flatcar", server.host);
    push(&repository, "1", &[layer(&bench, "low"), layer(&bench, "high")]).await;
    let flatcar = source(json!({"oci": {"image": format!("{repository}:{{{{os_version}}}}")}}));
    let root = found(find(&bench.fetcher("cache"), &bench, &flatcar).await).root;
    assert!(root.join(&modules).join("build/source/Makefile").is_file());
    assert!(!root.join(&modules).join("build/certs/signing_key.pem").exists());
    assert!(!root.join(&modules).join("gone").exists() && !root.join("etc").exists());
    assert!(!root.join("lib").exists(), "a lib directory would replace the toolchain's link");
}

#[tokio::test]
async fn nothing_leaves_an_image_through_its_links() {
    let (bench, server) = (Bench::new(), RegistryProcess::start(Wants::default()));
    bench.tree("outside");
    let outside = bench.path("outside").display().to_string();
    bench.link(&outside, "image/absolute");
    bench.link(&format!("{}{outside}", "../".repeat(40)), "image/climbing");
    let repository = format!("{}/hostile", server.host);
    push(&repository, "1", &[layer(&bench, "image")]).await;
    for path in ["/absolute", "/climbing"] {
        let hostile = source(json!({"oci": {"image": format!("{repository}:1"), "path": path}}));
        let error = find(&bench.fetcher("cache"), &bench, &hostile).await.unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot find {path} in image ")), "{error}");
    }
}

#[tokio::test]
async fn offline_only_the_store_is_asked() {
    let bench = Bench::new();
    let net = Net::new(NetOptions { offline: true, ..NetOptions::default() }).unwrap();
    let fetcher = bench.with_store("cache").with_net(net);
    let place = "https://mirror.test/headers.tgz";
    for json in [
        json!({"oci": {"image": "registry.test/kernel:1", "path": "/src"}}),
        json!({"url": {"url": place, "verify": {"checksums": "https://mirror.test/SHA256SUMS"}}}),
    ] {
        let error = find(&fetcher, &bench, &source(json)).await.unwrap_err();
        assert!(matches!(&error, FetchError::UnavailableOffline { .. }), "{error}");
        assert!(
            error.to_string().starts_with(&format!("cannot find headers of {RELEASE} (amd64)")),
            "{error}"
        );
    }
}

/// Serves a directory on loopback, and returns the address and a request counter.
async fn serve(directory: PathBuf) -> (String, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let answer = move |uri: Uri| {
        let file = directory.join(uri.path().trim_start_matches('/'));
        count.fetch_add(1, Ordering::Relaxed);
        async move { fs::read(file).map_or((StatusCode::NOT_FOUND, Vec::new()), |bytes| (StatusCode::OK, bytes)) }
    };
    let router = Router::new().fallback(answer);
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, asked)
}

/// A stand-in for Container-Optimized OS: an archive with a separate checksum file.
#[tokio::test]
async fn an_archive_with_a_checksum_beside_it() {
    let bench = Bench::new();
    bench.tree(&format!("headers/usr/src/linux-headers-{RELEASE}"));
    fs::create_dir_all(bench.path("served/1")).unwrap();
    let (address, asked) = serve(bench.path("served")).await;
    let place = format!("{address}/{{{{os_version}}}}");
    let cos = source(json!({"url": {
        "url": format!("{place}/kernel-headers.tgz"), "verify": {"checksums": format!("{place}/SHA256SUMS")},
    }}));
    let fetcher = bench.fetcher("cache");
    let absent = identity(&fetcher, &bench, &cos).await;
    assert_eq!(absent.missing, Some(format!("file {address}/1/SHA256SUMS")));

    bench.write("served/1/SHA256SUMS", "");
    let absent = identity(&fetcher, &bench, &cos).await;
    assert_eq!(absent.missing, Some(format!("checksum of kernel-headers.tgz in {address}/1/SHA256SUMS")));

    let archive = bench.path("served/1/kernel-headers.tgz");
    run(Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(bench.path("headers")).arg("usr"));
    let sums = run(Command::new("sha256sum").arg("kernel-headers.tgz").current_dir(bench.path("served/1")));
    bench.write("served/1/SHA256SUMS", &sums);
    let set = found(find(&fetcher, &bench, &cos).await);
    let sha256 = sums.split(' ').next().unwrap();
    assert_eq!(set.identity.as_deref(), Some(sha256));
    assert_eq!(set.origin, [format!("kernel-headers.tgz sha256:{sha256}")]);
    let before = asked.load(Ordering::Relaxed);
    assert_eq!(found(find(&fetcher, &bench, &cos).await).root, set.root);
    assert_eq!(asked.load(Ordering::Relaxed), before, "cached headers cause no request");

    // farrier refuses content that differs from the listed checksum.
    bench.write("served/1/kernel-headers.tgz", "other");
    let error = find(&bench.fetcher("fresh"), &bench, &cos).await.unwrap_err();
    assert!(matches!(&error, FetchError::Checksum { .. }), "{error}");
}

/// A stand-in for Bottlerocket: a nested archive with a detached signature.
#[tokio::test]
async fn an_archive_with_a_signature_beside_it() {
    let (bench, key, other) = (Bench::new(), SigningKey::new("acme"), SigningKey::new("other"));
    bench.tree("linux");
    fs::create_dir_all(bench.path("served")).unwrap();
    bench.write("kit/toolchain/readme", "");
    bench.tar(&["--xz"], "kit/kernel-devel.tar.xz", "linux");
    let archive = bench.tar(&["--xz"], "served/kit-1.tar.xz", "kit");
    key.sign_file(&archive);
    bench.write("definitions/keys/acme.asc", key.armored());
    let (address, _) = serve(bench.path("served")).await;
    let place = format!("{address}/kit-{{{{os_version}}}}.tar.xz");
    let signed_by = |file: &str| {
        source(json!({"url": {
            "url": place, "path": "/kit/kernel-devel.tar.xz",
            "verify": {"signature": {"url": format!("{place}.asc"), "signedBy": file}},
        }}))
    };
    let kit = signed_by("keys/acme.asc");
    let fetcher = bench.fetcher("cache");
    let set = found(find(&fetcher, &bench, &kit).await);
    assert_eq!(identity(&fetcher, &bench, &kit).await.identity, set.identity);
    assert!(set.root.join(format!("usr/lib/modules/{RELEASE}/build/Module.symvers")).is_file());

    // The checksum is cached, but a signature by an unlisted key is still refused.
    bench.write("definitions/keys/other.asc", other.armored());
    let error = find(&fetcher, &bench, &signed_by("keys/other.asc")).await.unwrap_err();
    assert!(matches!(&error, FetchError::Signature { .. }), "{error}");
    bench.write("definitions/keys/acme.asc", other.armored());
    let error = find(&fetcher, &bench, &kit).await.unwrap_err();
    assert!(matches!(&error, FetchError::Signature { .. }), "{error}");
    let missing = identity(&fetcher, &bench, &signed_by("keys/none.asc")).await.missing.unwrap();
    assert!(missing.ends_with("keys/none.asc with the keys of the distribution"), "{missing}");
}
