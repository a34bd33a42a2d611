//! Header sets that nodes upload to farrier's receiver: which ones the receiver accepts and which ones it refuses.

use std::{net::SocketAddr, sync::Arc};

use farrier::{
    collected::{Key, Receiver, SendError, send},
    net::Net,
    runtime::{Health, HttpServer, Metrics},
};
use farrier_core::{image::Digest, kernel::Architecture};
use tokio_util::sync::CancellationToken;
use url::Url;

use super::*;

/// A receiver that stores header sets in the bench's registry, and a node with the headers of [`RELEASE`].
struct Sent {
    bench: Bench,
    address: SocketAddr,
    cancel: CancellationToken,
}

impl Sent {
    async fn new() -> Self {
        let bench = Bench::new();
        bench.tree(&format!("node/usr/src/linux-headers-{RELEASE}"));
        bench
            .link(&format!("/usr/src/linux-headers-{RELEASE}"), &format!("node/lib/modules/{RELEASE}/build"));
        // The key's file name is the release's label, which is a valid key of a Secret.
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

    /// Packs and sends the node's headers with this key, like the collecting Job.
    async fn collect(&self, key: &str) -> Result<farrier::collected::Answer, SendError> {
        let node = self.bench.fetcher("node-cache");
        let (root, release) = (self.bench.path("node"), RELEASE.parse().unwrap());
        let packed = node.headers().pack(root, release, Architecture::Amd64).await.unwrap();
        send(&Net::default(), &self.url(), &self.key(key), &packed).await
    }

    /// Returns the digest of the kernel's stored header set.
    async fn stored(&self) -> Option<Digest> {
        let fetcher = self.bench.with_store("looks");
        let found = fetcher.headers().in_store(&RELEASE.parse().unwrap(), Architecture::Amd64).await.unwrap();
        found.map(|found| found.digest)
    }

    /// Sends an arbitrary request, as a malicious node could.
    async fn raw(&self, headers: &[(&str, &str)], body: Vec<u8>) -> (u16, String) {
        let mut request = reqwest_request(&self.url(), body);
        for (name, value) in headers {
            request.headers_mut().insert(http::HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        let answer = Net::default().execute(request, &farrier::net::Asker::of("test")).await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// Asserts that the receiver kept nothing of a refused upload.
    fn is_clean(&self) {
        let left = fs::read_dir(self.bench.path("farrier/work")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "the quarantine is empty");
    }
}

impl Drop for Sent {
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
async fn a_node_without_a_credential_has_its_headers_stored_by_farrier() {
    let sent = Sent::new().await;
    let taken = sent.collect("6.1.192-ACME").await.unwrap();
    assert_eq!(taken.outcome, Outcome::New);
    let stored = sent.stored().await.unwrap();
    assert!(taken.reference.unwrap().ends_with(&stored.to_string()));
    // The content is identical to a direct import on the node.
    let node = HeaderImport { sources: vec![ImportSource::Node(sent.bench.path("node"))], ..request(&[]) };
    let imported = sent.bench.fetcher("direct").headers().import(node).await.unwrap();
    assert_eq!(taken.content, imported.content.to_string());
    assert_eq!(sent.collect("6.1.192-ACME").await.unwrap().outcome, Outcome::Known);
    sent.is_clean();
}

#[tokio::test]
async fn a_node_replaces_no_headers_that_are_there() {
    let sent = Sent::new().await;
    sent.collect("6.1.192-ACME").await.unwrap();
    let before = sent.stored().await;
    sent.bench.write(
        &format!("node/usr/src/linux-headers-{RELEASE}/include/linux/module.h"),
        "struct module { int evil; };\n",
    );
    let error = sent.collect("6.1.192-ACME").await.unwrap_err();
    assert!(matches!(error, SendError::Refused(422, _)), "{error}");
    assert!(error.to_string().contains(" holds others, with content "), "{error}");
    assert_eq!(sent.stored().await, before);
    sent.is_clean();
}

#[tokio::test]
async fn a_node_has_no_say_on_a_kernel_that_no_administrator_named() {
    let sent = Sent::new().await;
    // A key for another kernel, and then no key for this kernel at all.
    let error = sent.collect("6.1.193-other").await.unwrap_err();
    assert!(matches!(error, SendError::Refused(403, _)), "{error}");
    fs::remove_file(sent.bench.path("keys/6.1.192-ACME")).unwrap();
    let error = sent.collect("6.1.193-other").await.unwrap_err();
    assert!(matches!(error, SendError::Refused(403, _)), "{error}");
    assert!(Key::read(&sent.bench.path("keys/6.1.194-short")).is_err());
    assert_eq!(sent.stored().await, None);
    for headers in [
        vec![],
        vec![("x-farrier-kernel", "../keys/x"), ("x-farrier-arch", "amd64")],
        vec![("x-farrier-kernel", "6.1.0"), ("x-farrier-arch", "amd64"), ("x-farrier-digest", "sha256:.")],
    ] {
        assert_eq!(sent.raw(&headers, b"x".to_vec()).await.0, 400, "{headers:?}");
    }
    sent.is_clean();
}

/// The receiver validates a tree sent with the right key like any other import.
#[tokio::test]
async fn what_is_no_header_set_of_the_kernel_is_not_stored() {
    let sent = Sent::new().await;
    let node = sent.bench.fetcher("node-cache");
    let pack = async || {
        let (root, release) = (sent.bench.path("node"), RELEASE.parse().unwrap());
        node.headers().pack(root, release, Architecture::Amd64).await.unwrap()
    };
    let links = format!("evil/usr/src/linux-headers-{RELEASE}");
    sent.bench.tree(&links);
    sent.bench
        .link(&format!("/usr/src/linux-headers-{RELEASE}"), &format!("evil/lib/modules/{RELEASE}/build"));
    sent.bench.link("/etc/shadow", &format!("{links}/include/linux/shadow.h"));
    let other = "other/usr/src/linux-headers-5.10.0";
    sent.bench.tree(other);
    sent.bench.write(&format!("{other}/include/generated/utsrelease.h"), "#define UTS_RELEASE \"5.10.0\"\n");
    sent.bench.link("/usr/src/linux-headers-5.10.0", "other/lib/modules/5.10.0/build");
    // A tree at the kernel's path whose headers are for another kernel.
    let disguised = format!("disguised/usr/src/linux-headers-{RELEASE}");
    sent.bench.tree(&disguised);
    sent.bench
        .write(&format!("{disguised}/include/generated/utsrelease.h"), "#define UTS_RELEASE \"5.10.0\"\n");
    sent.bench.link(
        &format!("/usr/src/linux-headers-{RELEASE}"),
        &format!("disguised/lib/modules/{RELEASE}/build"),
    );
    for tree in ["evil", "other", "disguised"] {
        let mut packed = pack().await;
        let (file, archive) = (packed.file(), sent.bench.tar(&[], &format!("{tree}.tar"), tree));
        fs::copy(&archive, &file).unwrap();
        let bytes = fs::read(&file).unwrap();
        (packed.layer.digest, packed.layer.size) = (Digest::of(&bytes), bytes.len() as u64);
        let error = send(&Net::default(), &sent.url(), &sent.key("6.1.192-ACME"), &packed).await.unwrap_err();
        assert!(matches!(error, SendError::Refused(422, _)), "{tree}: {error}");
    }
    // The upload differs from its announced digest or exceeds the size limit.
    let mut packed = pack().await;
    packed.layer.digest = Digest::of(b"others");
    let error = send(&Net::default(), &sent.url(), &sent.key("6.1.192-ACME"), &packed).await.unwrap_err();
    assert!(error.to_string().contains("does not match the announced size and digest"), "{error}");
    let mut packed = pack().await;
    packed.layer.size = (512 << 20) + 1;
    let error = send(&Net::default(), &sent.url(), &sent.key("6.1.192-ACME"), &packed).await.unwrap_err();
    assert!(error.is_transient() || error.to_string().contains("at most"), "{error}");
    assert_eq!(sent.stored().await, None);
    sent.is_clean();
}

/// The collecting Job gets no registry credential and no token, only the key for its own kernel. Earlier, every Job had push
/// credentials.
#[test]
fn the_job_has_no_credential() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    for file in
        ["kustomize/components/collect-headers/job.yaml", "chart/farrier/templates/collect-headers.yaml"]
    {
        let text = fs::read_to_string(root.join(file)).unwrap();
        for wrong in ["REGISTRY", "credentialsSecret", "farrier-registry", "serviceAccountName"] {
            assert!(!text.contains(wrong), "{file} has {wrong}");
        }
        assert!(text.contains("automountServiceAccountToken: false"), "{file}");
        assert_eq!(text.matches("secretName:").count(), 1, "{file}: the key");
        assert_eq!(text.matches("items: [{key: ").count(), 1, "{file}: of one kernel");
    }
}
