//! User space of published GPU images: farrier's bases, built from Debian's real driver packages, and the same driver from an
//! installer. The driver's libraries run in the images, without a GPU.
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::image::Digest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{
    kernels,
    packages::run,
    site::{Site, unpacked},
};

/// Programs that the driver container's processes and the operators' pods call.
const PROGRAMS: [&str; 5] = [
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-modprobe",
    "nvidia-persistenced",
    "nvidia-smi",
];
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// `CUDA_ERROR_NO_DEVICE` of cuda.h.
const NO_DEVICE: &str = "cuInit: 100";

/// Compiles the fixtures' module, so that building an image costs little more than its base.
const TEMPLATE: &str = "FROM {{toolchain}} AS modules
COPY sources/hello/ /build/
RUN make -C /lib/modules/{{kernel.release}}/build M=/build modules && \\
    mkdir -p /out/lib/modules/{{kernel.release}}/extra && cp /build/*.ko /out/lib/modules/{{kernel.release}}/extra/
FROM scratch
COPY --from=modules /out /
";

/// The unpacked root file system of a driver container.
struct Root {
    directory: TempDir,
    /// Version of the driver.
    version: String,
}

impl Root {
    /// Builds, publishes and unpacks an image.
    fn published(site: &Site, image: &str) -> Self {
        let built = site.build(image, &kernels::newest().newer, &["--push", "-o", "json"]).exits(0).json();
        let digest = built["digest"].as_str().unwrap();
        let manifest = site.inspect_raw(&format!("{image}@{digest}"));
        let version = manifest["annotations"]["org.opencontainers.image.version"].as_str().unwrap();
        let directory = unpacked(&format!("{}/{image}@{digest}", site.location));
        Self { directory, version: version.to_owned() }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("tree")
    }

    /// Runs a program in the root and returns its exit code and output.
    fn runs(&self, argv: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new("chroot");
        let output = command
            .arg(self.path())
            .args(argv)
            .env("LC_ALL", "C")
            .env("PATH", PATH)
            .output()
            .expect("run chroot");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    }

    fn says(&self, argv: &[&str]) -> String {
        let (code, text) = self.runs(argv);
        assert_eq!(code, Some(0), "{argv:?}: {text}");
        text
    }

    /// Returns the driver's libraries in the loader's cache: the name that programs load, and the file relative to `path`.
    fn libraries(&self) -> BTreeMap<String, PathBuf> {
        let script = "ldconfig -p | sed -n 's/^\\t\\([^ ]*\\) .* => /\\1 /p' | \
                      while read -r name path; do echo \"$name $(realpath \"$path\")\"; done";
        let text = self.says(&["sh", "-c", script]);
        let pairs = text.lines().map(|line| line.split_once(' ').unwrap());
        pairs
            .filter(|(name, path)| name.contains(".so.") && path.ends_with(&format!(".so.{}", self.version)))
            .map(|(name, path)| (name.to_owned(), PathBuf::from(path.trim_start_matches('/'))))
            .collect()
    }

    /// Returns the driver's libraries with the digests of their content.
    fn contents(&self) -> BTreeMap<String, Digest> {
        let digest = |(name, path)| (name, self.digest(path));
        self.libraries().into_iter().map(digest).collect()
    }

    fn digest(&self, path: impl AsRef<Path>) -> Digest {
        Digest::of(&fs::read(self.path().join(path)).unwrap())
    }

    fn program(&self, name: &str) -> PathBuf {
        // One of these programs is in /usr/sbin on Debian.
        let real = self.says(&["sh", "-c", &format!("realpath \"$(command -v {name})\"")]);
        PathBuf::from(real.trim().trim_start_matches('/'))
    }

    /// Returns the names and digests of the GPU's files in `/lib/firmware`.
    fn firmware(&self) -> BTreeMap<String, Digest> {
        let place = format!("usr/lib/firmware/nvidia/{}", self.version);
        let names = fs::read_dir(self.path().join(&place)).unwrap();
        names
            .map(|entry| {
                let name = entry.unwrap().file_name().into_string().unwrap();
                (name.clone(), self.digest(format!("{place}/{name}")))
            })
            .collect()
    }

    /// Asserts that CUDA's libraries load and find no device, that the driver's tools report no device, and that no program
    /// lacks a library.
    #[track_caller]
    fn computes(&self) {
        let program = self.path().join("cuda");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gpu/cuda.c");
        run(Command::new("gcc").args(["-Wall", "-Werror", "-o"]).arg(&program).arg(source));
        let libraries = self.libraries();
        let names: Vec<&str> = libraries.keys().map(String::as_str).collect();
        for name in ["libcuda.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1"]
        {
            assert!(names.contains(&name), "{names:?}");
        }
        let loaded = names.iter().filter(|name| kind(name) != DRAWS);
        let argv: Vec<&str> = ["/cuda", "libcuda.so.1"].into_iter().chain(loaded.copied()).collect();
        // The program also prints its attempt to load the module.
        let said = self.says(&argv);
        assert!(said.lines().any(|line| line == NO_DEVICE), "{said}");
        let (code, said) = self.runs(&["nvidia-smi"]);
        assert_eq!(code, Some(9), "{said}");
        assert!(said.contains("couldn't communicate with the NVIDIA driver"), "{said}");
        for name in PROGRAMS {
            let linked = self.says(&["ldd", &format!("/{}", self.program(name).display())]);
            assert!(!linked.contains("not found"), "{name}: {linked}");
        }
        self.says(&["nvidia-persistenced", "--version"]);
        // The GPU Operator's validator resolves these links from its own root.
        let root = fs::canonicalize(self.path()).unwrap();
        for name in ["usr/bin/nvidia-smi", "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"] {
            let found = fs::canonicalize(root.join(name)).unwrap();
            assert!(found.starts_with(&root), "{}", found.display());
        }
        assert!(self.firmware().keys().any(|name| name.starts_with("gsp")));
    }
}

/// Creates a definition from a shipped GPU definition, with its base unchanged and the fixtures' module instead of the
/// driver's.
fn with_shipped_base(site: &Site, image: &str) {
    let file = format!("{}/images/{image}.yaml", env!("CARGO_MANIFEST_DIR"));
    let mut definition: Value = serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let spec = definition["spec"].as_object_mut().unwrap();
    for field in ["patches", "exposes", "vars", "rollout"] {
        spec.remove(field);
    }
    let hello = json!({"name": "hello", "from": {"path": {"path": "sources/hello"}}});
    spec["sources"].as_array_mut().unwrap().push(hello);
    spec.insert("template".to_owned(), json!("base-alone"));
    spec.insert("modules".to_owned(), json!(["farrier_hello"]));
    spec["runtime"]["entrypoint"] = json!(["sleep", "infinity"]);
    site.define(&format!("images/{image}.yaml"), &definition.to_string());
    site.define("templates/base-alone.Dockerfile.hbs", TEMPLATE);
}

/// Type of graphics libraries in an installer's manifest.
const DRAWS: &str = "OPENGL_LIB NATIVE";

/// Returns a library's type and path as in an installer's manifest.
fn kind(name: &str) -> &'static str {
    let kinds = [
        ("libcuda.", "CUDA_LIB NATIVE /"),
        ("libcudadebugger.", "CUDA_LIB NATIVE /"),
        ("libnvidia-ptxjitcompiler.", "CUDA_LIB NATIVE /"),
        ("libnvidia-nvvm.", "CUDA_LIB NATIVE /"),
        ("libnvidia-opencl.", "OPENCL_LIB NATIVE /"),
        ("libnvcuvid.", "NVCUVID_LIB NATIVE"),
        ("libnvidia-encode.", "ENCODEAPI_LIB NATIVE"),
        ("libnvidia-ml.", "UTILITY_LIB NATIVE"),
        ("libnvidia-opticalflow.", "UTILITY_LIB NATIVE"),
    ];
    kinds.iter().find(|(start, _)| name.starts_with(start)).map_or(DRAWS, |(_, kind)| kind)
}

/// Packs the driver of a root in the format of NVIDIA's installers.
fn pack(root: &Root, out: &Path) {
    let Root { version, .. } = root;
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path();
    let mut manifest = format!(
        "NVIDIA Accelerated Graphics Driver for Linux-x86_64\n{version}\nfalse\nnvidia\n\n\nkernel\n\n"
    );
    let take = |from: &Path, name: &str| {
        fs::create_dir_all(tree.join(name).parent().unwrap()).unwrap();
        fs::copy(root.path().join(from), tree.join(name)).unwrap();
    };
    for (soname, path) in root.libraries() {
        let name = path.file_name().unwrap().to_str().unwrap();
        take(&path, name);
        let kind = kind(name);
        writeln!(manifest, "{name} 0755 {kind} MODULE:x").unwrap();
        if soname != name {
            let is_short = ["CUDA", "OPENGL"].iter().any(|start| kind.starts_with(start));
            let link = kind.replace("_LIB", if is_short { "_SYMLINK" } else { "_LIB_SYMLINK" });
            writeln!(manifest, "{soname} 0000 {link} {name} MODULE:x").unwrap();
        }
    }
    for name in PROGRAMS {
        take(&root.program(name), name);
        let kind =
            if name == "nvidia-modprobe" { "4755 NVIDIA_MODPROBE /usr/bin" } else { "0755 UTILITY_BINARY" };
        writeln!(manifest, "{name} {kind} MODULE:x").unwrap();
    }
    for name in root.firmware().into_keys() {
        let place = format!("usr/lib/firmware/nvidia/{version}/{name}");
        take(Path::new(&place), &format!("firmware/{name}"));
        writeln!(manifest, "firmware/{name} 0644 FIRMWARE INHERIT_PATH_DEPTH:1 MODULE:x").unwrap();
    }
    fs::write(tree.join(".manifest"), manifest).unwrap();
    // An installer that runs would leave this file.
    let script = tree.join("nvidia-installer");
    fs::write(&script, format!("#!/bin/sh\ntouch {}\n", out.with_extension("ran").display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    run(Command::new("makeself")
        .args(["--nocomp", "--nox11"])
        .arg(tree)
        .arg(out)
        .args(["x", "./nvidia-installer"]));
}

/// Writes a definition whose base comes from an installer of this version.
fn with_installer(site: &Site, image: &str, version: &str, runfile: &Value) {
    let definition = json!({
        "apiVersion": "farrier.dev/v1alpha1", "kind": "DriverImage", "metadata": {"name": image},
        "spec": {
            "version": version, "template": "base-alone", "modules": ["farrier_hello"],
            "sources": [
                {"name": "hello", "from": {"path": {"path": "sources/hello"}}},
                {"name": "nvidia", "from": {"path": {"path": "sources/driver.run"}}},
                {"name": "fabric", "from": {"path": {"path": "sources/fabric"}}},
            ],
            "runtime": {"base": {"runfile": runfile}, "entrypoint": ["sleep", "infinity"]},
        },
    });
    site.define(&format!("images/{image}.yaml"), &definition.to_string());
}

#[test]
fn the_shipped_gpu_bases_run_cuda_and_an_installer_gives_the_same_driver() {
    let site = Site::new();
    for image in ["nvidia-gpu", "nvidia-gpu-graphics"] {
        with_shipped_base(&site, image);
    }
    let debian = Root::published(&site, "nvidia-gpu");
    debian.computes();
    let debian_graphics = Root::published(&site, "nvidia-gpu-graphics");
    debian_graphics.computes();
    let (computing_of_debian, drawing) = (debian.contents(), debian_graphics.contents());
    for (name, content) in &computing_of_debian {
        assert_eq!(drawing.get(name), Some(content), "{name}");
    }
    for name in ["libGLX_nvidia.so.0", "libEGL_nvidia.so.0", "libnvoptix.so.1", "libnvidia-fbc.so.1"] {
        assert!(drawing.contains_key(name) && !computing_of_debian.contains_key(name), "{name}");
    }
    let icd = debian_graphics.says(&["sh", "-c", "cat /usr/share/vulkan/icd.d/nvidia_icd.json"]);
    assert!(icd.contains("libGLX_nvidia.so.0"), "{icd}");

    // Repack the same files as an installer.
    let version = debian.version.clone();
    let installer = site.definitions().join("sources/driver.run");
    pack(&debian_graphics, &installer);
    let archive = site.definitions().join("sources/fabric");
    fs::create_dir_all(archive.join("lib")).unwrap();
    fs::create_dir_all(archive.join("etc")).unwrap();
    let nscq = archive.join(format!("lib/libnvidia-nscq.so.{version}"));
    let mut compiler = Command::new("gcc");
    compiler.args(["-shared", "-Wl,-soname,libnvidia-nscq.so.2", "-x", "c", "/dev/null", "-o"]);
    run(compiler.arg(&nscq));
    symlink(nscq.file_name().unwrap(), archive.join("lib/libnvidia-nscq.so.2")).unwrap();
    fs::write(archive.join("etc/fabricmanager.cfg"), "LOG_LEVEL=4\n").unwrap();

    // Debian's persistence daemon requires libtirpc.
    let below = |packages: &[&str]| json!({"suite": "bookworm", "include": packages});
    let computing = json!({"source": "nvidia", "bootstrap": below(&["kmod", "libtirpc3"])});
    with_installer(&site, "compute", &version, &computing);
    let compute = Root::published(&site, "compute");
    compute.computes();
    assert_eq!(compute.contents(), computing_of_debian);
    assert_eq!(compute.firmware(), debian.firmware());
    for name in PROGRAMS {
        assert_eq!(compute.digest(compute.program(name)), debian.digest(debian.program(name)), "{name}");
    }
    assert!(!installer.with_extension("ran").exists(), "the installer was executed");

    let all = json!({"source": "nvidia", "graphics": true, "archives": ["fabric"],
                     "bootstrap": below(&["kmod", "libssl3", "libtirpc3"])});
    with_installer(&site, "all", &version, &all);
    let graphics = Root::published(&site, "all");
    graphics.computes();
    let mut contents = graphics.contents();
    assert!(contents.remove("libnvidia-nscq.so.2").is_some(), "{contents:?}");
    assert_eq!(contents, drawing);
    assert!(graphics.path().join("usr/share/nvidia/nvswitch/fabricmanager.cfg").is_file());

    with_installer(&site, "other", "1.2.3", &json!("nvidia"));
    let refused = site.build("other", &kernels::newest().newer, &["--push"]);
    assert_ne!(refused.code, Some(0), "{refused}");
    refused.line(&format!("the installer has version {version:?}, the driver image \"1.2.3\""));
    assert_eq!(site.tags("other"), [""; 0]);
}
