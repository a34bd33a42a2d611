//! Header sets that nodes upload to farrier's receiver: which ones the receiver accepts and which ones it refuses.

use std::{net::SocketAddr, sync::Arc};

use farrier_controller::runtime::{Health, HttpServer, Metrics};
use farrier_core::{image::Digest, kernel::Architecture};
use farrier_header_collection::{Key, Receiver, SendError, send};
use farrier_net::Net;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::*;

/// A receiver that stores header sets in the bench's registry, and a node with the headers of [`RELEASE`].
struct UploadBench {
    bench: Bench,
    address: SocketAddr,
    cancel: CancellationToken,
}

impl UploadBench {
    async fn new() -> Self {
        let bench = Bench::new();
        bench.tree(&format!("node/usr/src/linux-headers-{RELEASE}"));
        bench
            .link(&format!("/usr/src/linux-headers-{RELEASE}"), &format!("node/lib/modules/{RELEASE}/build"));
        // A Secret's keys may not contain the release's `+`, so the file name is the release's label.
        bench.write("keys/6.1.192-ACME", "1".repeat(64));
        bench.write("keys/6.1.193-other", "2".repeat(64));
        bench.write("keys/6.1.194-short", "secret");
        let receiver = Receiver::new(bench.with_store("farrier"), bench.path("keys"));
        let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
        let any = ([127, 0, 0, 1], 0).into();
        let server = HttpServer::bind(any, health, metrics, receiver.router()).await.unwrap();
        let (address, cancel) = (server.address().unwrap(), CancellationToken::new());
        tokio::spawn(server.serve(cancel.clone()));
        Self { bench, address, cancel }
    }

    fn url(&self) -> Url {
        format!("http://{}", self.address).parse().unwrap()
    }

    fn key(&self, name: &str) -> Key {
        Key::read(&self.bench.path(&format!("keys/{name}"))).unwrap()
    }

    /// Packs the node's headers and uploads them with this key, like the Job that collects headers.
    async fn collect(&self, key: &str) -> Result<farrier_header_collection::Receipt, SendError> {
        let node = self.bench.fetcher("node-cache");
        let (root, release) = (self.bench.path("node"), RELEASE.parse().unwrap());
        let packed = node.headers().pack(root, release, Architecture::Amd64).await.unwrap();
        send(&Net::default(), &self.url(), &self.key(key), &packed).await
    }

    /// Returns the digest of the kernel's stored header set.
    async fn stored(&self) -> Option<Digest> {
        let fetcher = self.bench.with_store("lookup-cache");
        let found = fetcher.headers().in_store(&RELEASE.parse().unwrap(), Architecture::Amd64).await.unwrap();
        found.map(|found| found.digest)
    }

    /// Sends an arbitrary request, as a malicious node could.
    async fn raw(&self, headers: &[(&str, &str)], body: Vec<u8>) -> (u16, String) {
        let mut request = reqwest_request(&self.url(), body);
        for (name, value) in headers {
            request.headers_mut().insert(http::HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        let answer = Net::default().execute(request, &farrier_net::AccessPurpose::of("test")).await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// Asserts that the receiver has no temporary directory left.
    fn assert_scratch_is_empty(&self) {
        let left = fs::read_dir(self.bench.path("farrier/work")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "temporary directories are left in the receiver's cache");
    }
}

impl Drop for UploadBench {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

fn reqwest_request(to: &Url, body: Vec<u8>) -> reqwest::Request {
    let mut request = Net::request(reqwest::Method::POST, to.join("/headers").unwrap());
    *request.body_mut() = Some(body.into());
    request
}

#[tokio::test]
async fn farrier_stores_the_headers_of_a_node_without_a_credential() {
    let upload = UploadBench::new().await;
    let answer = upload.collect("6.1.192-ACME").await.unwrap();
    assert_eq!(answer.outcome, Outcome::New);
    let stored = upload.stored().await.unwrap();
    assert!(answer.reference.unwrap().ends_with(&stored.to_string()));
    // The content is identical to a direct import on the node.
    let node = HeaderImport { sources: vec![ImportSource::Node(upload.bench.path("node"))], ..request(&[]) };
    let imported = upload.bench.fetcher("direct").headers().import(node).await.unwrap();
    assert_eq!(answer.content, imported.content.to_string());
    assert_eq!(upload.collect("6.1.192-ACME").await.unwrap().outcome, Outcome::Known);
    upload.assert_scratch_is_empty();
}

#[tokio::test]
async fn a_node_cannot_replace_stored_headers() {
    let upload = UploadBench::new().await;
    upload.collect("6.1.192-ACME").await.unwrap();
    let before = upload.stored().await;
    upload.bench.write(
        &format!("node/usr/src/linux-headers-{RELEASE}/include/linux/module.h"),
        "struct module { int evil; };\n",
    );
    let error = upload.collect("6.1.192-ACME").await.unwrap_err();
    assert!(matches!(error, SendError::Refused(422, _)), "{error}");
    assert!(error.to_string().contains(" has other headers, with content "), "{error}");
    assert_eq!(upload.stored().await, before);
    upload.assert_scratch_is_empty();
}

#[tokio::test]
async fn a_node_needs_an_administrators_key_for_the_kernel() {
    let upload = UploadBench::new().await;
    // farrier refuses another kernel's key, both while this kernel has a key and without one.
    let error = upload.collect("6.1.193-other").await.unwrap_err();
    assert!(matches!(error, SendError::Refused(403, _)), "{error}");
    fs::remove_file(upload.bench.path("keys/6.1.192-ACME")).unwrap();
    let error = upload.collect("6.1.193-other").await.unwrap_err();
    assert!(matches!(error, SendError::Refused(403, _)), "{error}");
    assert!(Key::read(&upload.bench.path("keys/6.1.194-short")).is_err());
    assert_eq!(upload.stored().await, None);
    for headers in [
        vec![],
        vec![("x-farrier-kernel", "../keys/x"), ("x-farrier-arch", "amd64")],
        vec![("x-farrier-kernel", "6.1.0"), ("x-farrier-arch", "amd64"), ("x-farrier-digest", "sha256:.")],
    ] {
        assert_eq!(upload.raw(&headers, b"x".to_vec()).await.0, 400, "{headers:?}");
    }
    upload.assert_scratch_is_empty();
}

/// The receiver validates a tree sent with the right key like any other import.
#[tokio::test]
async fn an_upload_that_is_no_header_set_of_the_kernel_is_refused() {
    let upload = UploadBench::new().await;
    let node = upload.bench.fetcher("node-cache");
    let pack = async || {
        let (root, release) = (upload.bench.path("node"), RELEASE.parse().unwrap());
        node.headers().pack(root, release, Architecture::Amd64).await.unwrap()
    };
    let links = format!("evil/usr/src/linux-headers-{RELEASE}");
    upload.bench.tree(&links);
    upload
        .bench
        .link(&format!("/usr/src/linux-headers-{RELEASE}"), &format!("evil/lib/modules/{RELEASE}/build"));
    upload.bench.link("/etc/shadow", &format!("{links}/include/linux/shadow.h"));
    let other = "other/usr/src/linux-headers-5.10.0";
    upload.bench.tree(other);
    upload
        .bench
        .write(&format!("{other}/include/generated/utsrelease.h"), "#define UTS_RELEASE \"5.10.0\"\n");
    upload.bench.link("/usr/src/linux-headers-5.10.0", "other/lib/modules/5.10.0/build");
    // A tree at the kernel's path whose headers are for another kernel.
    let disguised = format!("disguised/usr/src/linux-headers-{RELEASE}");
    upload.bench.tree(&disguised);
    upload
        .bench
        .write(&format!("{disguised}/include/generated/utsrelease.h"), "#define UTS_RELEASE \"5.10.0\"\n");
    upload.bench.link(
        &format!("/usr/src/linux-headers-{RELEASE}"),
        &format!("disguised/lib/modules/{RELEASE}/build"),
    );
    for tree in ["evil", "other", "disguised"] {
        let mut packed = pack().await;
        let (file, archive) = (packed.file(), upload.bench.tar(&[], &format!("{tree}.tar"), tree));
        fs::copy(&archive, &file).unwrap();
        let bytes = fs::read(&file).unwrap();
        (packed.layer.digest, packed.layer.size) = (Digest::of(&bytes), bytes.len() as u64);
        let error =
            send(&Net::default(), &upload.url(), &upload.key("6.1.192-ACME"), &packed).await.unwrap_err();
        assert!(matches!(error, SendError::Refused(422, _)), "{tree}: {error}");
    }
    // The upload differs from its announced digest or exceeds the size limit.
    let mut packed = pack().await;
    packed.layer.digest = Digest::of(b"others");
    let error = send(&Net::default(), &upload.url(), &upload.key("6.1.192-ACME"), &packed).await.unwrap_err();
    assert!(error.to_string().contains("does not match the announced size and digest"), "{error}");
    let mut packed = pack().await;
    packed.layer.size = (512 << 20) + 1;
    let error = send(&Net::default(), &upload.url(), &upload.key("6.1.192-ACME"), &packed).await.unwrap_err();
    assert!(error.is_transient() || error.to_string().contains("; the limit is"), "{error}");
    assert_eq!(upload.stored().await, None);
    upload.assert_scratch_is_empty();
}

/// The Job that collects headers gets no registry credential and no token, only the key for its own kernel.
#[test]
fn the_job_has_no_credential() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    for file in
        ["kustomize/components/collect-headers/job.yaml", "chart/farrier/templates/collect-headers.yaml"]
    {
        let text = fs::read_to_string(root.join(file)).unwrap();
        for forbidden in ["REGISTRY", "credentialsSecret", "farrier-registry", "serviceAccountName"] {
            assert!(!text.contains(forbidden), "{file} has {forbidden}");
        }
        assert!(text.contains("automountServiceAccountToken: false"), "{file}");
        assert_eq!(text.matches("secretName:").count(), 1, "{file}: one Secret, which has the key");
        assert_eq!(text.matches("items: [{key: ").count(), 1, "{file}: one kernel's key of that Secret");
    }
}
