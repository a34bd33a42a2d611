//! End-to-end test of a driver for a kernel without a package. The headers are imported, then the driver is built, signed and
//! published without a network. A bundle carries the image across the air gap, where it is verified and loaded by that kernel.
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::kernel::KernelLabel;

use crate::support::{
    netns::{LoopbackOnly, SealedRegistry},
    own_kernel::{OwnKernel, own_kernel},
    packages::run,
    site::{Run, Site, read_all},
    virtual_machine::entrypoint,
};

const IMAGE: &str = "mstflint";
const MODULE: &str = "mstflint_access";
/// Path in `site.yaml`, relative to the definitions.
const MODULE_CERTIFICATE: &str = "keys/modules.crt";
const IMAGE_KEY: &str = "keys/images.pub";

#[test]
fn a_driver_for_a_kernel_of_ones_own_crosses_the_gap() {
    let kernel = own_kernel();
    let bundle_directory = tempfile::tempdir().unwrap();
    let bundle = bundle_directory.path().join("site.bundle");

    let keys = tempfile::tempdir().unwrap();
    let mut connected = connected_side(&kernel, keys.path());
    import_headers(&connected, &kernel);
    fill_the_store(&connected, &kernel);

    // From here on only loopback is available, and the cache holds nothing that was fetched before.
    connected.registry.stop();
    let sealed = Place::new(&connected.registry.storage());
    copy(&connected.definitions(), &sealed.definitions());
    let digest = build_and_publish(&sealed, &kernel);
    verify(&sealed, &digest);
    export(&sealed, &kernel, &bundle);
    drop((sealed, connected));
    // The private keys never cross the air gap.
    drop(keys);

    let other = Place::new(&bundle_directory.path().join("storage"));
    import(&other, &bundle);
    verify(&other, &digest);
    nothing_is_missing(&other, &kernel, &digest);
    the_kernel_loads_it(&other, &kernel, &digest);
}

/// Creates a registry, the driver's definition and the site's, and a separate directory with the keys.
fn connected_side(kernel: &OwnKernel, keys: &Path) -> Site {
    let site = Site::new();
    fs::remove_dir_all(site.definitions()).unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("images/{IMAGE}.yaml"));
    site.define(&format!("images/{IMAGE}.yaml"), &fs::read_to_string(shipped).unwrap());
    let modules = keys.join("modules.pem");
    fs::copy(kernel.signing_key(), &modules).unwrap();
    let images = keys.join("images.key");
    run(Command::new("openssl")
        .args(["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"])
        .arg(&images));
    let public = run(Command::new("openssl").args(["pkey", "-pubout", "-in"]).arg(&images));
    site.define(IMAGE_KEY, &public);
    let certificate = run(Command::new("openssl").args(["x509", "-in"]).arg(&modules));
    site.define(MODULE_CERTIFICATE, &certificate);
    let text = format!(
        "apiVersion: farrier.dev/v1alpha1\n\
         kind: Site\n\
         metadata: {{name: plant}}\n\
         spec:\n  \
           moduleSigning:\n    \
             key: {{file: {modules}}}\n    \
             certificate: {MODULE_CERTIFICATE}\n  \
           imageSigning:\n    \
             key: {{file: {images}}}\n    \
             publicKey: {IMAGE_KEY}\n  \
           policy:\n    \
             requireSigned: [{IMAGE_KEY}]\n",
        modules = modules.display(),
        images = images.display(),
    );
    site.define("site.yaml", &text);
    site
}

/// Imports the headers in every form in which users have them. The first form is stored. Each other form is recognized as the
/// same content, or refused because it differs.
fn import_headers(site: &Site, kernel: &OwnKernel) {
    let import = |source: &Path| {
        let source = source.display().to_string();
        site.farrier(&["headers", "import", &source, "--kernel", kernel.release.as_str(), "-o", "json"])
    };
    let first = import(&kernel.headers_deb()).exits(0).json();
    assert_eq!((&first["release"], &first["outcome"]), (&kernel.release.as_str().into(), &"imported".into()));
    for same in [kernel.headers_deb(), kernel.headers_tarball()] {
        let again = import(&same).exits(0).json();
        assert_eq!(again["content"], first["content"], "{} holds the same", same.display());
        assert_ne!(again["outcome"], "imported");
    }
    // These trees contain files that the package omits.
    for other in [kernel.prepared_tree(), kernel.build_tree()] {
        assert_ne!(import(&other).code, Some(0), "{} must not replace the stored headers", other.display());
    }
    let listed = site.farrier(&["headers", "list", "-o", "json"]).exits(0);
    assert!(listed.stdout.contains(kernel.release.as_str()), "{listed}");
}

/// Stores the build's other inputs: sources, toolchain and runtime base.
fn fill_the_store(site: &Site, kernel: &OwnKernel) {
    site.farrier(&with_target(&["mirror", "--image", IMAGE], kernel)).exits(0);
}

/// Compiles, signs and publishes the image, and returns its digest.
fn build_and_publish(place: &Place, kernel: &OwnKernel) -> String {
    let built =
        place.farrier(&with_target(&["build", IMAGE, "--push", "-o", "json"], kernel)).exits(0).json();
    assert_eq!(built["outcome"], "built");
    let module = &built["check"]["modules"][0];
    assert_eq!(
        (&module["name"], &built["check"]["kernel"]),
        (&MODULE.into(), &kernel.release.as_str().into())
    );
    let again =
        place.farrier(&with_target(&["build", IMAGE, "--push", "-o", "json"], kernel)).exits(0).json();
    assert_eq!((&again["outcome"], &again["digest"]), (&"up-to-date".into(), &built["digest"]));
    built["digest"].as_str().unwrap().to_owned()
}

/// Verification succeeds with the site's key and fails with any other key.
fn verify(place: &Place, digest: &str) {
    let image = place.image(digest);
    place.farrier(&["verify", &image]).exits(0);
    let key = place.definitions().join(IMAGE_KEY);
    place.farrier(&["verify", &image, "--key", &key.display().to_string()]).exits(0);
    let stranger = place.path("stranger.pub");
    let private = place.path("stranger.key");
    run(Command::new("openssl")
        .args(["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"])
        .arg(&private));
    let public = run(Command::new("openssl").args(["pkey", "-pubout", "-in"]).arg(&private));
    fs::write(&stranger, public).unwrap();
    place.farrier(&["verify", &image, "--key", &stranger.display().to_string()]).exits(1);
}

/// Exports the image, its referrers and its stored inputs into one file.
fn export(place: &Place, kernel: &OwnKernel, bundle: &Path) {
    let file = bundle.display().to_string();
    place.farrier(&with_target(&["bundle", "export", "--image", IMAGE, "--to", &file], kernel)).exits(0);
    fs::copy(place.definitions().join(IMAGE_KEY), bundle.with_extension("pub")).unwrap();
    let listed = place.farrier(&["bundle", "inspect", &file, "-o", "json"]).exits(0);
    for words in [IMAGE, "headers", "sources", "rootfs", "definitions"] {
        assert!(listed.stdout.contains(words), "{words} is in the bundle: {listed}");
    }
}

/// Imports the bundle into an empty registry twice. A damaged file changes nothing.
fn import(place: &Place, bundle: &Path) {
    let damaged = place.path("damaged.bundle");
    let mut bytes = fs::read(bundle).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let damaged_file = damaged.display().to_string();
    place.farrier(&["bundle", "import", "--insecure-no-signature", &damaged_file]).exits(1);
    fs::remove_file(damaged).unwrap();
    assert_eq!(place.registry.requests("PUT"), 0, "{}", place.registry.log());

    let (file, definitions) = (bundle.display().to_string(), place.definitions().display().to_string());
    // The key arrives separately from the bundle, and an unrelated key is refused.
    let key = bundle.with_extension("pub").display().to_string();
    let stranger = place.path("no-key-of-the-site.pub");
    let private = run(Command::new("openssl").args(["ecparam", "-name", "prime256v1", "-genkey", "-noout"]));
    let path = place.path("stranger-of-bundles.key");
    fs::write(&path, private).unwrap();
    fs::write(&stranger, run(Command::new("openssl").args(["pkey", "-pubout", "-in"]).arg(&path))).unwrap();
    let refused =
        place.farrier(&["bundle", "import", &file, "--key", &stranger.display().to_string()]).exits(1);
    assert!(refused.stderr.contains("which is not among the given keys"), "{refused}");
    place.farrier(&["bundle", "import", &file]).exits(2);
    assert_eq!(place.registry.requests("PUT"), 0, "{}", place.registry.log());
    for _ in 0..2 {
        place.farrier(&["bundle", "import", &file, "--key", &key, "--definitions-to", &definitions]).exits(0);
    }
    let definitions = read_all(&place.definitions());
    assert!(definitions.keys().any(|path| path.ends_with("site.yaml")), "{:?}", definitions.keys());
    for (path, text) in &definitions {
        assert!(!text.contains("PRIVATE KEY"), "{path} holds a key");
    }
}

/// Plans on the disconnected side: the image is present and is assigned to the node that runs the kernel.
fn nothing_is_missing(place: &Place, kernel: &OwnKernel, digest: &str) {
    place.write_cluster(kernel);
    let plan = place.farrier(&["plan", "-o", "json"]).exits(0).json();
    // Checking the signature needs no private key, and none is present on this side.
    for part in ["builds", "signatures", "waiting", "conflicts", "unknown"] {
        assert_eq!(plan[part].as_array().map_or(0, Vec::len), 0, "{part}: {plan:#}");
    }
    let run = place.farrier(&["run", "--once", "-o", "json"]).exits(0).json();
    assert_eq!(run["unreachable"], false, "{run:#}");
    let daemon_set = fs::read_to_string(place.path("cluster/daemonset.yaml")).unwrap();
    assert_eq!(crate::support::site::image_of(&daemon_set), place.image(digest));
}

/// Boots the exact kernel and loads the image from the disconnected side's registry.
fn the_kernel_loads_it(place: &Place, kernel: &OwnKernel, digest: &str) {
    let (vmlinuz, entrypoint) = (kernel.vmlinuz().display().to_string(), entrypoint().display().to_string());
    let image = place.image(digest);
    let boot = ["check", &image, "--boot", "--kernel-image", &vmlinuz, "--entrypoint", &entrypoint];
    let report = place.farrier(&with_target(&[&boot[..], &["-o", "json"]].concat(), kernel)).exits(0).json();
    let module = &report["boot"]["modules"][0];
    assert_eq!(report["boot"]["kernel"], kernel.release.as_str());
    assert_eq!((&module["name"], &module["outcome"]), (&MODULE.into(), &"loaded".into()), "{report:#}");
}

/// Appends the arguments that select the kernel target.
fn with_target<'a>(args: &[&'a str], kernel: &'a OwnKernel) -> Vec<&'a str> {
    let release = kernel.release.as_str();
    [args, &["--kernel", release, "--os", "debian", "--os-version", "12", "--arch", "amd64"]].concat()
}

/// A machine without a network: a registry, definitions, a cluster and an initially empty cache.
struct Place {
    registry: SealedRegistry,
    namespace: LoopbackOnly,
    directory: tempfile::TempDir,
}

impl Place {
    /// Serves the content of a registry's storage directory.
    fn new(storage: &Path) -> Self {
        let namespace = LoopbackOnly::new();
        let registry = namespace.registry(storage);
        let directory = tempfile::tempdir().unwrap();
        let place = Self { registry, namespace, directory };
        for name in ["definitions", "cluster", "cache", "docker"] {
            fs::create_dir(place.path(name)).unwrap();
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn definitions(&self) -> PathBuf {
        self.path("definitions")
    }

    /// Value of `--registry`.
    fn location(&self) -> String {
        format!("{}/drivers", self.registry.host)
    }

    /// Returns the image reference by digest.
    fn image(&self, digest: &str) -> String {
        format!("{}/{IMAGE}@{digest}", self.location())
    }

    /// Runs `farrier --offline` in this namespace.
    fn farrier(&self, args: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farrier"));
        command
            .args(args)
            .env("FARRIER_OFFLINE", "true")
            .env("FARRIER_DEFINITIONS", self.definitions())
            .env("FARRIER_CACHE_DIR", self.path("cache"))
            .env("FARRIER_REGISTRY", self.location())
            .env("FARRIER_CLUSTER", format!("dir:{}", self.path("cluster").display()))
            .env("FARRIER_ENGINE", "sandbox")
            .env("DOCKER_CONFIG", self.path("docker"))
            .env("HOME", self.path("home"))
            .env_remove("REGISTRY_AUTH_FILE")
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("FARRIER_LOG");
        Run::of(self.namespace.moved(&command).spawn().expect("run nsenter (Debian package util-linux)"))
    }

    /// Writes a node that runs the kernel, with node feature discovery's labels, and a DaemonSet that selects it.
    fn write_cluster(&self, kernel: &OwnKernel) {
        let release = kernel.release.as_str();
        let label = KernelLabel::of(&kernel.release).unwrap();
        let node = format!(
            "apiVersion: v1\n\
             kind: Node\n\
             metadata:\n  \
               name: edge-1\n  \
               labels:\n    \
                 kubernetes.io/hostname: edge-1\n    \
                 feature.node.kubernetes.io/kernel-version.full: {label}\n    \
                 feature.node.kubernetes.io/system-os_release.ID: debian\n    \
                 feature.node.kubernetes.io/system-os_release.VERSION_ID: \"12\"\n    \
                 feature.node.kubernetes.io/pci-15b3.present: \"true\"\n\
             status:\n  \
               nodeInfo:\n    \
                 architecture: amd64\n    \
                 kernelVersion: {release}\n    \
                 operatingSystem: linux\n    \
                 osImage: Debian GNU/Linux 12 (bookworm)\n    \
                 containerRuntimeVersion: containerd://1.7.27\n"
        );
        fs::write(self.path("cluster/node.yaml"), node).unwrap();
        let daemon_set = format!(
            "apiVersion: apps/v1\n\
             kind: DaemonSet\n\
             metadata: {{name: {IMAGE}, namespace: drivers}}\n\
             spec:\n  \
               selector: {{matchLabels: {{app: {IMAGE}}}}}\n  \
               template:\n    \
                 metadata: {{labels: {{app: {IMAGE}}}}}\n    \
                 spec:\n      \
                   containers:\n        \
                     - name: driver\n          \
                       image: registry.example/none:1\n"
        );
        fs::write(self.path("cluster/daemonset.yaml"), daemon_set).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-r").arg(from.join(".")).arg(to));
}
