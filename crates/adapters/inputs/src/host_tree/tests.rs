use farrier_local::cache::Cache;
use fs_err::os::unix::fs::symlink;

use super::*;
use crate::FetchOptions;

const K47: &str = "6.1.0-47-amd64";
const OFED: &str = "usr/src/ofa_kernel/x86_64/6.1.0-47-amd64";

struct Scene {
    dir: tempfile::TempDir,
    fetcher: Fetcher,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("cache")).unwrap();
        let root = dir.path().join("root");
        Self { dir, fetcher: Fetcher::new(cache, FetchOptions::default()).with_definitions(root) }
    }

    fn write(&self, path: &str, content: &str) {
        let path = self.dir.path().join("root/ofed-6.1.0-47-amd64").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn link(&self, link: &str, target: &str) {
        let link = self.dir.path().join("root/ofed-6.1.0-47-amd64").join(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(target, link).unwrap();
    }

    /// OFED's own layout, including the link next to the kernels' directories.
    fn ofed(&self) {
        self.write(&format!("{OFED}/Module.symvers"), "0x1\tib_register_client\tib_core\tEXPORT_SYMBOL\t\n");
        self.write(&format!("{OFED}/include/rdma/peer_mem.h"), "");
        self.link("usr/src/ofa_kernel/default", "x86_64/6.1.0-47-amd64");
    }

    async fn look(&self, tree: &str) -> Result<HostTreeLookup, FetchError> {
        let target = KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: K47.parse().unwrap(),
            arch: farrier_core::kernel::Architecture::Amd64,
        };
        self.fetcher.host_tree(&tree.parse().unwrap(), &target).await
    }

    async fn found(&self, tree: &str) -> HostTree {
        match self.look(tree).await.unwrap() {
            HostTreeLookup::Found(found) => found,
            HostTreeLookup::Missing { looked_for, .. } => panic!("{looked_for}"),
        }
    }

    /// Returns the error about the directory, without the test's directory.
    async fn refusal(&self) -> String {
        let error = self.look("ofed-{{release}}").await.unwrap_err();
        let text = format!("{}\nhint: {}", oci::error_chain(&error), error.hint().unwrap_or_default());
        text.replace(&self.dir.path().display().to_string(), "")
    }
}

#[tokio::test]
async fn a_directory_and_its_archive_are_the_same_tree() {
    let scene = Scene::new();
    scene.ofed();
    let found = scene.found("ofed-{{release}}").await;
    assert_eq!(found.symvers, [PathBuf::from(format!("{OFED}/Module.symvers"))]);
    assert!(found.root.join("usr/src/ofa_kernel/default/include/rdma/peer_mem.h").is_file());
    assert!(found.origin.starts_with("ofed-6.1.0-47-amd64 sha256:"), "{}", found.origin);

    let root = scene.dir.path().join("root");
    let mut builder = tar::Builder::new(fs::File::create(root.join("ofed.tar")).unwrap());
    builder.follow_symlinks(false);
    builder.append_dir_all("usr", root.join("ofed-6.1.0-47-amd64/usr")).unwrap();
    builder.finish().unwrap();
    let archived = scene.found("ofed.tar").await;
    assert_eq!(archived.digest, found.digest);
    // Again, from the record.
    assert_eq!(scene.found("ofed.tar").await, archived);

    // A clone's version-control data is not part of the tree.
    scene.write("usr/src/ofa_kernel/.git/config", "token");
    let cloned = scene.found("ofed-{{release}}").await;
    assert_eq!(cloned.digest, found.digest);
    assert!(!cloned.root.join("usr/src/ofa_kernel/.git").exists());

    // Other symbols give another digest, and thus other input hashes.
    scene.write(&format!("{OFED}/Module.symvers"), "0x2\tib_register_client\tib_core\tEXPORT_SYMBOL\t\n");
    assert_ne!(scene.found("ofed-{{release}}").await.digest, found.digest);
}

#[tokio::test]
async fn a_tree_that_is_not_there_says_how_to_collect_it() {
    let scene = Scene::new();
    let HostTreeLookup::Missing { looked_for, hint } = scene.look("trees/{{release}}.tar.gz").await.unwrap()
    else {
        panic!("found");
    };
    assert!(looked_for.ends_with("root/trees/6.1.0-47-amd64.tar.gz"), "{looked_for}");
    assert!(hint.contains("farrier collect --root /host --kernel 6.1.0-47-amd64"), "{hint}");
}

#[tokio::test]
async fn trees_that_are_not_fit_are_refused_with_the_reason() {
    let mut told = Vec::new();
    let scene = Scene::new();
    scene.write("usr/src/ofa_kernel/include/x.h", "");
    told.push(scene.refusal().await);

    let scene = Scene::new();
    scene.write("usr/src/ofa_kernel/x86_64/6.1.0-48-amd64/Module.symvers", "");
    scene.write("usr/src/nvidia-535.261.03/Module.symvers", "");
    told.push(scene.refusal().await);

    let scene = Scene::new();
    scene.write("usr/src/mydriver/Module.symvers", "");
    scene
        .write("usr/src/mydriver/include/generated/utsrelease.h", "#define UTS_RELEASE \"5.10.0-9-amd64\"\n");
    told.push(scene.refusal().await);

    for target in ["/usr/src/ofa_kernel/x86_64/6.1.0-47-amd64", "../../../../etc/passwd"] {
        let scene = Scene::new();
        scene.ofed();
        scene.link("usr/src/ofa_kernel/other", target);
        told.push(scene.refusal().await);
    }
    insta::assert_snapshot!(told.join("\n\n"));
}

#[tokio::test]
async fn an_archive_that_writes_elsewhere_is_not_unpacked() {
    let scene = Scene::new();
    let root = scene.dir.path().join("root");
    fs::create_dir_all(&root).unwrap();
    for name in ["../outside", "/outside"] {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(0);
        header.set_mode(0o644);
        header.set_cksum();
        let mut builder = tar::Builder::new(fs::File::create(root.join("bad.tar")).unwrap());
        builder.append(&header, std::io::empty()).unwrap();
        builder.finish().unwrap();
        let error = scene.look("bad.tar").await.unwrap_err();
        assert!(matches!(error, FetchError::Unpack(..)), "{error:?}");
        assert!(!scene.dir.path().join("outside").exists());
    }
    fs::write(root.join("no.tar.gz"), "not an archive").unwrap();
    assert!(matches!(scene.look("no.tar.gz").await, Err(FetchError::Layout(_))));
}

#[test]
fn kernels_are_found_in_paths_and_versions_are_not() {
    for (path, kernel) in [
        ("usr/src/ofa_kernel/x86_64/6.1.0-47-amd64/Module.symvers", Some("6.1.0-47-amd64")),
        ("usr/src/ofa_kernel/4.18.0-553.el8_10.x86_64/Module.symvers", Some("4.18.0-553.el8_10.x86_64")),
        ("usr/src/nvidia-535.261.03/Module.symvers", None),
        ("usr/src/ofa_kernel-dkms/Module.symvers", None),
        ("Module.symvers", None),
    ] {
        assert_eq!(kernel_in(Path::new(path)).as_deref(), kernel, "{path}");
    }
}
