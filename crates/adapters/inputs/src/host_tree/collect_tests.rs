use farrier_core::kernel::{Architecture, KernelTarget};
use farrier_local::cache::Cache;
use fs_err as fs;

use super::*;
use crate::{FetchOptions, Fetcher, HostTreeLookup};

const K47: &str = "6.1.0-47-amd64";

/// A host with OFED as its packages install it: `default` goes through `/etc/alternatives`, and all links are absolute.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        let ofed = "host/usr/src/ofa_kernel/x86_64/6.1.0-47-amd64";
        host.write(&format!("{ofed}/Module.symvers"), "0x1\tib_x\tib_core\tEXPORT_SYMBOL\t\n");
        host.write(&format!("{ofed}/include/rdma/ib.h"), "");
        host.link("host/usr/src/ofa_kernel/default", "/etc/alternatives/ofa_kernel_headers");
        host.link("host/etc/alternatives/ofa_kernel_headers", "/usr/src/ofa_kernel/x86_64/6.1.0-47-amd64");
        host
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, content: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), content).unwrap();
    }

    fn link(&self, link: &str, target: &str) {
        fs::create_dir_all(self.at(link).parent().unwrap()).unwrap();
        symlink(target, self.at(link)).unwrap();
    }

    async fn collect(&self, paths: &[&str], to: &str) -> Result<Collected, FetchError> {
        let paths = paths.iter().map(PathBuf::from).collect();
        let collection = Collection { root: self.at("host"), release: K47.parse().unwrap(), paths };
        collect(collection, self.at(to)).await
    }

    /// Returns the error without the test's directory; asserts that no files are left.
    async fn refusal(&self, paths: &[&str]) -> String {
        let error = self.collect(paths, "out.tar.gz").await.unwrap_err();
        let left: Vec<_> =
            fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["host"]);
        let text = format!("{}\nhint: {}", oci::error_chain(&error), error.hint().unwrap_or_default());
        text.replace(&self.0.path().display().to_string(), "")
    }
}

#[tokio::test]
async fn what_is_collected_can_be_compiled_against() {
    let host = Host::new();
    host.link("host/usr/src/ofa_kernel/gone", "/usr/src/nothing");
    host.link("host/usr/src/ofa_kernel/circle", "circle");
    host.write("host/usr/src/ofa_kernel/.git/config", "token");
    let collected = host.collect(&["/usr/src/ofa_kernel"], "trees-6.1.0-47-amd64.tar.gz").await.unwrap();
    assert_eq!(collected.symvers, [Path::new("usr/src/ofa_kernel/x86_64/6.1.0-47-amd64/Module.symvers")]);
    assert_eq!(
        collected.omitted_links,
        [Path::new("/usr/src/ofa_kernel/circle"), Path::new("/usr/src/ofa_kernel/gone")]
    );
    assert_eq!(fs::metadata(host.at("trees-6.1.0-47-amd64.tar.gz")).unwrap().len(), collected.size);

    let cache = Cache::open(host.at("cache")).unwrap();
    let fetcher = Fetcher::new(cache, FetchOptions::default()).with_definitions(host.0.path().to_owned());
    let target = KernelTarget {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        release: K47.parse().unwrap(),
        arch: Architecture::Amd64,
    };
    let found = fetcher.host_tree(&"trees-{{release}}.tar.gz".parse().unwrap(), &target).await.unwrap();
    let HostTreeLookup::Found(tree) = found else { panic!("{found:?}") };
    assert_eq!(tree.symvers, collected.symvers);
    let default = tree.root.join("usr/src/ofa_kernel/default");
    assert_eq!(fs::read_link(&default).unwrap(), Path::new("x86_64/6.1.0-47-amd64"));
    assert!(default.join("include/rdma/ib.h").is_file());
    assert!(!tree.root.join("usr/src/ofa_kernel/.git").exists());
}

#[tokio::test]
async fn the_same_content_gives_the_same_archive() {
    let (one, other) = (Host::new(), Host::new());
    let file = other.at("host/usr/src/ofa_kernel/x86_64/6.1.0-47-amd64/Module.symvers");
    fs::File::open(&file).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    let first = one.collect(&["/usr/src/ofa_kernel"], "a.tar.gz").await.unwrap();
    // A directory named twice, and a part of it named again.
    let again = ["/usr/src/ofa_kernel", "usr/src/ofa_kernel", "/usr/src/ofa_kernel/x86_64"];
    let second = other.collect(&again, "b.tar.gz").await.unwrap();
    assert_eq!(first.digest, second.digest);
    assert_eq!(fs::read(one.at("a.tar.gz")).unwrap(), fs::read(other.at("b.tar.gz")).unwrap());
}

#[tokio::test]
async fn links_of_the_host_do_not_lead_into_the_pod() {
    let host = Host::new();
    // Resolved from the pod's root, this link would lead to a file of the pod.
    host.link("host/usr/src/ofa_kernel/hosts", "/../../../../../../../../etc/hostname");
    host.write("host/etc/hostname", "node");
    let said = host.refusal(&["/usr/src/ofa_kernel"]).await;
    assert_eq!(
        said,
        "cannot collect /usr/src/ofa_kernel/hosts: it is a link to /etc/hostname, which was not named\n\
         hint: name /etc/hostname as well"
    );
}

#[tokio::test]
async fn what_cannot_be_collected_is_said() {
    let host = Host::new();
    host.write("host/usr/src/other/6.1.0-48-amd64/Module.symvers", "");
    host.write("host/usr/src/bare/x.h", "");
    let mut told = Vec::new();
    for path in ["/usr/src/mlnx", "/usr/../etc", "/", "/usr/src/bare", "/usr/src/other"] {
        told.push(host.refusal(&[path]).await);
    }
    insta::assert_snapshot!(told.join("\n\n"));
}
