//! The complete GPUDirect stack: OFED, GPU driver, peer memory, nvidia-fs and gdrdrv from farrier's definitions. The commands of
//! docs/gpu.md and docs/peer-memory.md build the first three. The drivers are compiled against each other, published under the operators' names, and started on a node. The GPU driver is Debian's
//! real one; OFED and the drivers without a package archive are small trees in the layout of the real ones.
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use farrier_core::kernel::KernelRelease;
use k8s_openapi::api::core::v1::Node;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{
    kernels,
    node_vm::{self, ContainerSpec, NodeTree, files},
    packages::{kernel_image, run},
    pages::{blocks, page, play},
    site::{Run, Site, unpacked},
    virtual_machine::entrypoint,
};

const IMAGES: [&str; 6] = ["mofed", "nvidia-gpu", "nvidia-peermem", "nv-peer-mem", "nvidia-fs", "gdrdrv"];
const OFED: &str = "25.10-1.2.8.0";
/// Time limit for a container to become ready in an emulated machine on a busy host.
const LIMIT: Duration = Duration::from_mins(3);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/fixtures/gpudirect").join(name)
}

/// Returns the images that a reconcile built, in order of publication.
fn built(run: &Run) -> Vec<String> {
    let lines = run.stdout.lines().filter_map(|line| line.strip_prefix("built "));
    lines.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
}

/// A site with this repository's definitions and two nodes that have both cards.
struct Chain {
    site: Site,
    kernel: String,
    entrypoint: String,
}

impl Chain {
    fn new() -> Self {
        let (site, entrypoint, kernel) = (Site::new(), entrypoint(), kernels::newest().newer);
        fs::remove_dir_all(site.definitions()).unwrap();
        let chain = Self { site, kernel, entrypoint: entrypoint.display().to_string() };
        chain.play_the_tutorials(&entrypoint);
        let site = &chain.site;
        for image in ["nv-peer-mem", "nvidia-fs", "gdrdrv"] {
            let template = if matches!(image, "nvidia-fs" | "gdrdrv") { "nvidia-companion" } else { image };
            for file in [format!("images/{image}.yaml"), format!("templates/{template}.Dockerfile.hbs")] {
                site.define(&file, &fs::read_to_string(root().join(&file)).unwrap());
            }
        }
        // Copies of DaemonSets follow pods, and a directory of manifests has no pods.
        site.edit("images/nv-peer-mem.yaml", "strategy: per-kernel", "strategy: image");
        for image in ["nvidia-fs", "gdrdrv"] {
            let bootstrap = "{bootstrap: {suite: bookworm, include: [kmod]}}";
            site.edit(&format!("images/{image}.yaml"), bootstrap, "{minimal: {suites: [bookworm]}}");
        }
        chain.pack("nv_peer_memory-1.3.tar.gz", &fixture("nv_peer_memory"), "nv_peer_memory-1.3");
        chain.pack("gds-nvidia-fs-2.26.6.tar.gz", &fixture("nvidia_fs"), "gds-nvidia-fs-2.26.6");
        chain.pack("gdrcopy-2.5.1.tar.gz", &fixture("gdrcopy"), "gdrcopy-2.5.1");
        let sets = fixture("cluster/daemonsets.yaml");
        fs::copy(sets, chain.site.cluster().join("daemonsets.yaml")).unwrap();
        for node in ["gpu-1", "gpu-2"] {
            chain.node(node);
        }
        chain
    }

    /// Runs the commands of both tutorials, which make the cluster's and the definitions' directories.
    fn play_the_tutorials(&self, entrypoint: &Path) {
        let site = &self.site;
        fs::remove_dir_all(site.cluster()).unwrap();
        // The tutorials work in the directory `gpu`.
        symlink(".", site.path("gpu")).unwrap();
        let (downloads, archive) = (site.path("home/Downloads"), format!("MLNX_OFED_SRC-debian-{OFED}.tgz"));
        fs::create_dir_all(&downloads).unwrap();
        self.pack_ofed(OFED, &root().join("tests/fixtures/ofed"));
        fs::rename(site.definitions().join("sources").join(&archive), downloads.join(&archive)).unwrap();
        fs::remove_dir_all(site.definitions()).unwrap();
        let here = |text: &str| {
            text.replace("127.0.0.1:5000", &site.registry.host).replace("6.1.0-56-amd64", &self.kernel)
        };
        let played =
            ["docs/gpu.md", "docs/peer-memory.md"].map(|name| blocks(&page(name))).into_iter().flatten();
        assert_eq!(play(site, Some(entrypoint), played, here), 4, "outputs to compare");
    }

    fn node(&self, name: &str) {
        let text = fs::read_to_string(fixture("cluster/node.yaml")).unwrap();
        let text = text.replace("NAME", name).replace("KERNEL", &self.kernel);
        fs::write(self.site.cluster().join(format!("{name}.yaml")), text).unwrap();
    }

    /// Packs a tree as the definition's source of this name, below a top-level directory.
    fn pack(&self, name: &str, tree: &Path, top: &str) {
        let archive = self.site.definitions().join("sources").join(name);
        fs::create_dir_all(archive.parent().unwrap()).unwrap();
        let parent = tempfile::tempdir().unwrap();
        run(Command::new("cp").arg("-r").arg(tree).arg(parent.path().join(top)));
        run(Command::new("tar").arg("-czf").arg(archive).arg("-C").args([parent.path(), Path::new(top)]));
    }

    /// Packs an OFED tree in the layout of DOCA's source archive.
    fn pack_ofed(&self, version: &str, tree: &Path) {
        let (short, _) = version.split_once('-').unwrap();
        let inner = format!("mlnx-ofed-kernel_{short}.orig.tar.gz");
        self.pack(&inner, tree, &format!("mlnx-ofed-kernel-{short}"));
        let sources = self.site.path("SOURCES");
        fs::create_dir_all(&sources).unwrap();
        fs::rename(self.site.definitions().join("sources").join(&inner), sources.join(&inner)).unwrap();
        let archive = format!("MLNX_OFED_SRC-debian-{version}.tgz");
        let top = self.site.path(format!("MLNX_OFED_SRC-{version}"));
        fs::create_dir(&top).unwrap();
        fs::rename(sources, top.join("SOURCES")).unwrap();
        self.pack(&archive, &top, top.file_name().unwrap().to_str().unwrap());
    }

    fn farrier(&self, args: &[&str]) -> Run {
        self.site.farrier(&[&["--entrypoint", &self.entrypoint], args].concat())
    }

    /// Runs one reconcile.
    fn reconcile(&self) -> Run {
        self.farrier(&["run", "--once", "--build-cpus", "2", "--build-memory", "4Gi"])
    }

    fn labels(&self) -> BTreeMap<String, String> {
        let text = fs::read_to_string(self.site.cluster().join("gpu-1.yaml")).unwrap();
        let node: Node = serde_saphyr::from_str(&text).unwrap();
        node.metadata.labels.unwrap()
    }

    /// Returns the image's row in `farrier status`, which shows its latest reference by tag.
    fn row(&self, image: &str) -> Value {
        let rows = self.farrier(&["status", "-o", "json"]).exits(0).json();
        let row = rows.as_array().unwrap().iter().find(|row| row["image"] == image);
        row.unwrap_or_else(|| panic!("no {image} in {rows}")).clone()
    }

    fn reference(&self, image: &str) -> String {
        self.row(image)["reference"].as_str().unwrap().to_owned()
    }

    /// Returns the image's version annotation.
    fn version(&self, image: &str) -> String {
        let reference = self.reference(image);
        let manifest = self.site.inspect_raw(reference.rsplit('/').next().unwrap());
        manifest["annotations"]["org.opencontainers.image.version"].as_str().unwrap().to_owned()
    }
}

/// `<version>-<kernel label>-<os><os version>-<arch>`, from the Network Operator's precompiled drivers (state_ofed.go).
fn network_operators_tag(version: &str, labels: &BTreeMap<String, String>) -> String {
    let [kernel, os, os_version] = nfd(labels);
    format!("{version}-{kernel}-{os}{os_version}-amd64")
}

/// `<version>-<kernel label>-<os tag>`, from the GPU Operator's precompiled drivers (object_controls.go).
fn gpu_operators_tag(version: &str, labels: &BTreeMap<String, String>) -> String {
    let [kernel, os, os_version] = nfd(labels);
    format!("{version}-{kernel}-{os}{os_version}")
}

/// Returns the node labels from which both operators derive a tag.
fn nfd(labels: &BTreeMap<String, String>) -> [&str; 3] {
    ["kernel-version.full", "system-os_release.ID", "system-os_release.VERSION_ID"]
        .map(|label| labels[&format!("feature.node.kubernetes.io/{label}")].as_str())
}

/// Returns a symbol's version in a `Module.symvers`.
fn version_in(table: &Path, symbol: &str) -> String {
    let text = fs::read_to_string(table).unwrap();
    let line = text.lines().find(|line| line.split('\t').nth(1) == Some(symbol));
    let line = line.unwrap_or_else(|| panic!("no {symbol} in {}", table.display()));
    line.split('\t').next().unwrap().to_owned()
}

/// Returns the symbol version that a module requires, according to `modprobe --dump-modversions`.
fn version_wanted(module: &Path, symbol: &str) -> String {
    let dump = run(Command::new("modprobe").arg("--dump-modversions").arg(module));
    let line = dump.lines().find(|line| line.split('\t').nth(1) == Some(symbol));
    line.unwrap_or_else(|| panic!("no {symbol}: {dump}")).split('\t').next().unwrap().to_owned()
}

#[test]
fn gpu_direct_from_sources_to_a_node() {
    let chain = Chain::new();
    builds_the_rest(&chain);
    is_published_under_the_operators_names(&chain);
    chain.reconcile().exits(0).line("nothing to do");
    let trees: BTreeMap<&str, TempDir> =
        IMAGES.map(|image| (image, unpacked(&chain.reference(image)))).into();
    let tree = |image: &str| trees[image].path().join("tree");
    loads_across(&chain, tree);
    lives_on_a_node(&chain.kernel, tree);
    another_ofed_builds_peer_memory_anew_and_nothing_else(&chain);
}

fn builds_the_rest(chain: &Chain) {
    // The tutorials built the others.
    let mut built = built(&chain.reconcile().exits(0));
    built.sort();
    assert_eq!(built, ["gdrdrv", "nv-peer-mem", "nvidia-fs"]);
}

fn is_published_under_the_operators_names(chain: &Chain) {
    let labels = chain.labels();
    let ofed = format!("{OFED}-0");
    let gpu = chain.version("nvidia-gpu");
    // For the GPU Operator, OFED's version is part of the driver's version.
    let expected = [
        ("mofed", network_operators_tag(&ofed, &labels)),
        ("nvidia-gpu", gpu_operators_tag(&gpu, &labels)),
        ("nvidia-peermem", gpu_operators_tag(&format!("{gpu}-{ofed}"), &labels)),
        ("nv-peer-mem", network_operators_tag(&format!("1.3-{ofed}-{gpu}"), &labels)),
        // The operator appends the OS tag to the configured version.
        ("nvidia-fs", gpu_operators_tag(&format!("2.26.6-{gpu}"), &labels)),
        ("gdrdrv", gpu_operators_tag(&format!("2.5.1-{gpu}"), &labels)),
    ];
    for (image, tag) in expected {
        assert_eq!(chain.site.tags(image), [tag]);
    }
    for peer in ["nvidia-peermem", "nv-peer-mem"] {
        let against = chain.row(peer)["needs"].to_string();
        assert!(against.contains("mofed@sha256:") && against.contains("nvidia-gpu@sha256:"), "{against}");
    }
}

/// Asserts the check's verdict on the whole set, and compares the shared symbols with modprobe's output.
fn loads_across(chain: &Chain, image: impl Fn(&str) -> PathBuf) {
    // The images that a node runs, where the GPU driver's image includes peer memory.
    let references =
        ["mofed", "nvidia-peermem", "nv-peer-mem", "nvidia-fs", "gdrdrv"].map(|image| chain.reference(image));
    let subjects: Vec<&str> = references.iter().map(String::as_str).collect();
    let report = chain.farrier(&[&["check", "-o", "json"], subjects.as_slice()].concat()).exits(0).json();
    assert_eq!(report["verdict"], "loads", "{report}");
    let order: Vec<&str> = report["loadOrder"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let place = |name: &str| order.iter().position(|module| *module == name).unwrap();
    for peer in ["nvidia_peermem", "nv_peer_mem"] {
        assert!(place("ib_core").max(place("nvidia")) < place(peer), "{order:?}");
    }
    assert!(place("nvidia") < place("nvidia_fs").min(place("gdrdrv")), "{order:?}");

    let ofed = image("mofed").join("usr/src/ofa_kernel/default/Module.symvers");
    let gpu = files(&image("nvidia-gpu").join("usr/src"), "/Module.symvers").pop().unwrap();
    for (name, module) in [("nvidia-peermem", "nvidia-peermem.ko"), ("nv-peer-mem", "nv_peer_mem.ko")] {
        let module = image(name).join("lib/modules").join(&chain.kernel).join("extra").join(module);
        for (table, symbol) in [(&ofed, "ib_register_peer_memory_client"), (&gpu, "nvidia_p2p_get_pages")] {
            assert_eq!(version_wanted(&module, symbol), version_in(table, symbol), "{symbol} in {name}");
        }
    }
}

/// Starts the published images like their DaemonSets, on a node that has the network card's drivers but no cards.
fn lives_on_a_node(kernel: &str, image: impl Fn(&str) -> PathBuf) {
    let release: KernelRelease = kernel.parse().unwrap();
    let kernel = kernel_image(&release);
    let modules = image("nvidia-gpu").join("lib/modules").join(release.as_str()).join("extra");
    // The in-tree modules that the GPU driver needs.
    let needed = run(Command::new("modinfo").args(["-F", "depends"]).args(files(&modules, ".ko")));
    let ours: Vec<String> = files(&modules, ".ko").iter().map(|file| name_of(file)).collect();
    let needed =
        needed.split(['\n', ',']).filter(|name| !name.is_empty() && !ours.contains(&name.replace('-', "_")));
    let host: Vec<&str> =
        ["mlx5_core", "mlx5_ib", "rdma_ucm", "ipmi_devintf"].into_iter().chain(needed).collect();
    let tree = NodeTree::new(&kernel, &host);
    for name in IMAGES {
        tree.image(name, &image(name));
    }
    let mut node = node_vm::Node::boot(&kernel, tree);
    node.sh("modprobe mlx5_ib && modprobe rdma_ucm");
    let in_tree = sorted(node.loaded());

    // OFED replaces the in-tree drivers and exposes its headers.
    let spec = ContainerSpec::read("mofed.yaml", "mofed-container")
        .with_env("RESTORE_DRIVER_ON_POD_TERMINATION", "true");
    let mofed = node.start(&spec, "mofed", &["driver-entrypoint", "mofed"]);
    node.await_startup(&mofed, LIMIT);
    node.assert_probes_pass(&mofed);
    let updates = image("mofed").join("lib/modules").join(release.as_str()).join("updates");
    for module in ["mlx5_core", "ib_core"] {
        let file = updates.join(format!("{module}.ko"));
        let built = run(Command::new("modinfo").args(["-F", "srcversion"]).arg(file));
        assert_eq!(node.source_version(module).as_deref(), Some(built.trim()));
    }
    node.sh("ls /run/mellanox/drivers/usr/src/ofa_kernel/default/Module.symvers");

    // The GPU Operator's image includes peer memory. All symbols of the real driver resolve, but it finds no GPU.
    // The container leaves nothing behind.
    let spec = ContainerSpec::read("nvidia-driver.yaml", "nvidia-driver-ctr");
    let gpu = node.start(&spec, "nvidia-peermem", &["nvidia-driver", "init"]);
    let status = node.await_end(&gpu);
    let log = node.log(&gpu);
    assert_eq!(status, 1, "{log}");
    assert!(log.contains("no NVIDIA GPU was found by the driver (ENODEV)"), "{log}");
    assert!(log.contains("NVRM: No NVIDIA GPU found."), "{log}");
    assert!(!node.loaded().iter().any(|name| name.starts_with("nvidia")), "{log}");

    // Both kinds of peer memory containers wait for the GPU driver: they stay alive and unready until termination.
    let peers = [
        (
            "nvidia-driver.yaml",
            "nvidia-peermem-ctr",
            "nvidia-peermem",
            ["nvidia-driver", "reload_nvidia_peermem"],
        ),
        ("nv-peer-mem.yaml", "nv-peer-mem-container", "nv-peer-mem", ["driver-entrypoint", "nv-peer-mem"]),
    ];
    for (manifest, container, image, entrypoint) in peers {
        let spec = ContainerSpec::read(manifest, container);
        let peer = node.start(&spec, image, &entrypoint);
        let log = format!("/containers/{container}/log");
        assert!(
            node.await_that(&format!("grep -q 'waiting for the GPU driver' {log}"), LIMIT),
            "{}",
            node.log(&peer)
        );
        assert_ne!(node.probe(&peer, spec.startup.as_ref()).status, 0);
        assert_eq!(node.terminate(&peer), 0, "{}", node.log(&peer));
    }

    // Without the GPU driver, the kernel misses only the GPU driver's symbols in peer memory. OFED's symbols resolve with
    // matching versions.
    for (image, module) in [
        ("nvidia-peermem", "nvidia-peermem"),
        ("nv-peer-mem", "nv_peer_mem"),
        ("nvidia-fs", "nvidia-fs"),
        ("gdrdrv", "gdrdrv"),
    ] {
        let file = format!("/images/{image}/lib/modules/{release}/extra/{module}.ko");
        node.sh("dmesg -c > /dev/null");
        assert!(!node.succeeds(&format!("insmod {file}")), "{module} needs nvidia");
        let words = node.sh("dmesg");
        assert!(words.contains("Unknown symbol nvidia_p2p_get_pages (err -2)"), "{words}");
        assert!(!words.contains("ib_register_peer_memory_client") && !words.contains("disagrees"), "{words}");
    }

    let status = node.terminate(&mofed);
    let log = node.log(&mofed);
    assert_eq!(status, 0, "{log}");
    let left: Vec<String> = sorted(node.loaded());
    assert!(in_tree.iter().all(|name| left.contains(name)), "{left:?}: {log}");
    assert!(!left.iter().any(|name| name == "mlx_compat"), "{left:?}: {log}");
    assert_eq!(node.source_version("mlx5_core"), None, "Debian's own modules have no srcversion");
    assert!(!node.succeeds("ls /run/mellanox/drivers/.driver-ready"));
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

fn name_of(module: &Path) -> String {
    module.file_stem().unwrap().to_str().unwrap().replace('-', "_")
}

fn another_ofed_builds_peer_memory_anew_and_nothing_else(chain: &Chain) {
    let newer = "25.10-1.2.9.0";
    let tree = tempfile::tempdir().unwrap();
    let tree = tree.path().join("ofed");
    run(Command::new("cp").arg("-r").args([root().join("tests/fixtures/ofed"), tree.clone()]));
    let header = tree.join("include/rdma/peer_mem.h");
    let text = fs::read_to_string(&header).unwrap();
    let changed = text.replace("IB_PEER_MEMORY_VER_MAX 16", "IB_PEER_MEMORY_VER_MAX 32");
    assert_ne!(changed, text);
    fs::write(header, changed).unwrap();
    chain.pack_ofed(newer, &tree);
    chain.site.edit("images/mofed.yaml", OFED, newer);
    let second = chain.reconcile().exits(0);
    let mut images = built(&second);
    images.sort();
    assert_eq!(images, ["mofed", "nv-peer-mem", "nvidia-peermem"], "{second}");
    assert_eq!(IMAGES.map(|image| chain.site.tags(image).len()), [2, 1, 2, 2, 1, 1]);
    chain.reconcile().exits(0).line("nothing to do");
}
