//! Sources of facts about the distribution's real kernels, and `farrier check` on every kind of subject.
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::kernel::{Architecture, KernelFamily, KernelTarget, match_family};
use farrier_inputs::{
    FetchOptions, Fetcher, HeaderLookup, HeaderSet, KernelImage, KernelImageLookup, read_host,
};
use farrier_local::cache::Cache;
use farrier_payload::{DecompressionBudget, read_module};

use crate::support::{
    docker::docker,
    kernels::{self, shared_cache},
    packages::apt_cache,
    registry_process::{RegistryProcess, Wants},
    site::skopeo,
};
use kmod::{FactSource, Method, locate};

/// A Debian 12 kernel, with everything that its built-in family finds.
struct Kernel {
    target: KernelTarget,
    image: KernelImage,
    headers: HeaderSet,
    fetcher: Fetcher,
}

fn families() -> (Vec<KernelFamily>, PathBuf) {
    let definitions = farrier_definitions::load(None).unwrap();
    (definitions.families, definitions.root)
}

fn target(release: &str) -> KernelTarget {
    KernelTarget {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: Architecture::Amd64,
    }
}

async fn kernel(release: &str) -> Kernel {
    let (families, root) = families();
    let fetcher = Fetcher::new(Cache::open(shared_cache()).unwrap(), FetchOptions::default());
    let fetcher = fetcher.with_definitions(root);
    let target = target(release);
    let family = match_family(&families, &target).unwrap();
    let image = match fetcher.kernel_images().find(family, &target).await.unwrap() {
        KernelImageLookup::Found(image) => *image,
        KernelImageLookup::Missing { looked_for, hint } => panic!("no {looked_for}: {hint}"),
    };
    let headers = match fetcher.headers().find(&family.spec.headers, &target).await.unwrap() {
        HeaderLookup::Found(headers) => *headers,
        HeaderLookup::Missing { looked_for, hint } => panic!("no {looked_for}: {hint}"),
    };
    let again = fetcher.kernel_images().find_local(family, &target).await.unwrap();
    assert_eq!(again.as_ref(), Some(&image), "the cache lacks the fetched image");
    Kernel { target, image, headers, fetcher }
}

/// Returns the newest 6.12 kernel of Debian 12's security suite.
fn newest_long_term() -> String {
    let names = apt_cache(&["pkgnames", "linux-image-6.12."]);
    let number = |name: &&str| -> Option<u32> {
        name.strip_prefix("linux-image-6.12.")?.strip_suffix("+deb12-amd64")?.parse().ok()
    };
    let newest = names.lines().filter_map(|name| number(&name)).max();
    format!("6.12.{}+deb12-amd64", newest.expect("the security suite has a 6.12 kernel"))
}

/// Asserts that the sources of a kernel's facts agree: the size of `struct module` in BTF and in modules, the exports in the
/// image and in `Module.symvers`, and the release.
async fn agrees(release: &str, method: Method) {
    let Kernel { target, image, headers, fetcher } = kernel(release).await;
    let payload = locate(&mut fs::File::open(&image.vmlinuz).unwrap()).unwrap();
    assert_eq!(payload.method, method);
    let facts = fetcher.kernel_images().facts(&image).await.unwrap();
    let size = facts.module_size.as_ref().unwrap();
    assert_eq!(size.source, FactSource::Btf);
    let modules = image.modules.as_ref().unwrap();
    let index = &facts.in_tree.as_ref().unwrap().value;
    assert!(index.modules.len() > 3000, "{} modules", index.modules.len());
    for file in index.modules.values().step_by(100) {
        let module = read_module(&modules.join(file), &DecompressionBudget::without_build())
            .unwrap()
            .unwrap()
            .module
            .unwrap();
        assert_eq!(module.this_module_size, size.value, "{file}");
        assert_eq!(module.vermagic(), facts.vermagic.as_ref().map(|known| known.value.as_str()), "{file}");
    }
    let builtin = fs::read_to_string(modules.join("modules.builtin")).unwrap();
    assert_eq!(index.builtin.len(), builtin.lines().collect::<BTreeSet<_>>().len());
    let vermagic = &facts.vermagic.as_ref().unwrap().value;
    assert!(vermagic.starts_with(&format!("{} SMP", target.release)), "{vermagic}");

    let exports = facts.exports.as_ref().unwrap();
    assert_eq!(exports.source, FactSource::KernelImage);
    let symbols = headers.facts.symbols.as_ref().unwrap();
    let wanted: BTreeSet<&str> =
        symbols.iter().filter(|symbol| symbol.module == "vmlinux").map(|symbol| symbol.name).collect();
    let found: BTreeSet<&str> = exports.value.iter().map(String::as_str).collect();
    let differ: Vec<_> = wanted.symmetric_difference(&found).take(20).collect();
    assert!(differ.is_empty() && wanted.len() > 5000, "{} and {}: {differ:?}", wanted.len(), found.len());
    let base = facts.btf_base.as_ref().unwrap().value;
    assert!(base.types > 50_000 && base.strings > 500_000, "{base:?}");
    println!(
        "{release}: {method:?}, struct module {} bytes, {} types, {} bytes of strings, {} exports, {} modules",
        size.value,
        base.types,
        base.strings,
        found.len(),
        index.modules.len()
    );
    // The facts are the same without the cache.
    assert_eq!(format!("{:?}", image.facts().unwrap()), format!("{facts:?}"));

    let mut other = image.clone();
    other.release = "6.1.0-0-amd64".parse().unwrap();
    let error = other.facts().unwrap_err().to_string();
    assert!(error.ends_with(&format!("is the image of kernel {release}, not of 6.1.0-0-amd64")), "{error}");
}

#[tokio::test]
async fn the_sources_of_6_1_agree() {
    agrees(&kernels::newest().newer, Method::Xz).await;
}

#[tokio::test]
async fn the_sources_of_6_12_agree() {
    agrees(&newest_long_term(), Method::Zstd).await;
}

/// A file tree that imitates a running machine with Debian's kernel, made from its packages.
#[tokio::test]
async fn a_running_machine_tells_the_same() {
    let Kernel { target, image, headers, fetcher } = kernel(&kernels::newest().newer).await;
    let release = target.release.as_str();
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let write = |name: &str, bytes: &[u8]| {
        fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        fs::write(path(name), bytes).unwrap();
    };
    write("proc/sys/kernel/osrelease", format!("{release}\n").as_bytes());
    write("sys/module/module/parameters/sig_enforce", b"N\n");
    write("sys/kernel/security/lockdown", b"none [integrity] confidentiality\n");
    let config = image.vmlinuz.with_file_name(format!("config-{release}"));
    write(&format!("boot/config-{release}"), &fs::read(config).unwrap());
    fs::create_dir_all(path("lib/modules")).unwrap();
    std::os::unix::fs::symlink(image.modules.as_ref().unwrap(), path(&format!("lib/modules/{release}")))
        .unwrap();

    let facts = read_host(root.path(), Architecture::Amd64).unwrap();
    assert_eq!(facts.release, target.release);
    assert!(facts.symbols.is_none(), "the machine has no headers");
    assert_eq!(facts.config.get("CC_VERSION_TEXT"), headers.facts.config.get("CC_VERSION_TEXT"));
    assert_eq!(facts.expected_vermagic(), headers.facts.expected_vermagic());
    let known = fetcher.kernel_images().facts(&image).await.unwrap();
    let (found, wanted) = (facts.beyond_headers.module_size.unwrap(), known.module_size.unwrap());
    assert_eq!(found.value, wanted.value);
    assert!(matches!(found.source, FactSource::InTreeModule(_)), "{:?}", found.source);
    assert!(facts.beyond_headers.enforces_signatures.unwrap().value);
    assert_eq!(facts.beyond_headers.in_tree.unwrap().value, known.in_tree.unwrap().value);
}

/// Runs `farrier check` for Debian 12 with the shared cache, and returns exit code, standard output and standard error.
fn check(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_farrier"))
        .arg("check")
        .args(args)
        .args(["--os", "debian", "--os-version", "12", "--arch", "amd64", "--cache-dir"])
        .arg(shared_cache())
        .env_remove("FARRIER_LOG")
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Returns the report as JSON and asserts the exit code.
#[track_caller]
fn report(args: &[&str], code: i32) -> serde_json::Value {
    let (found, stdout, stderr) = check(&[args, &["-o", "json"]].concat());
    assert_eq!(found, Some(code), "{args:?}: {stdout}{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

#[track_caller]
fn refuses(args: &[&str], code: i32, words: &[&str]) {
    let (found, stdout, stderr) = check(args);
    assert_eq!(found, Some(code), "{args:?}: {stdout}{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{args:?}: no {word:?} in {stderr}");
    }
}

fn module_paths(report: &serde_json::Value) -> Vec<String> {
    let modules = report["modules"].as_array().unwrap();
    let mut paths: Vec<String> =
        modules.iter().map(|module| module["path"].as_str().unwrap().to_owned()).collect();
    paths.sort();
    paths
}

/// Writes an image of two layers: two real modules of one kernel, a module of a fictional kernel, and firmware. The upper layer
/// deletes one module.
fn layout_image(dir: &Path, kernel: &Kernel) -> String {
    let release = kernel.target.release.as_str();
    let modules = kernel.image.modules.as_ref().unwrap();
    let bytes = |name: &str| {
        let index = kernel.image.facts().unwrap().in_tree.unwrap().value;
        fs::read(modules.join(&index.modules[name])).unwrap()
    };
    let (low, high) = (dir.join("low.tar"), dir.join("high.tar"));
    let write = |path: &Path, files: &[(String, &[u8])]| {
        let mut tar = tar::Builder::new(fs::File::create(path).unwrap());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, *content).unwrap();
        }
        tar.finish().unwrap();
    };
    let place = |name: &str| format!("usr/lib/modules/{release}/updates/{name}.ko");
    let (nbd, loop_module) = (bytes("nbd"), bytes("loop"));
    write(
        &low,
        &[
            (place("nbd"), &nbd),
            (place("loop"), &loop_module),
            ("lib/modules/6.1.0-1-amd64/other.ko".to_owned(), b"no module"),
            ("lib/firmware/acme/a.bin".to_owned(), b"x"),
        ],
    );
    write(&high, &[(format!("usr/lib/modules/{release}/updates/.wh.loop.ko"), b"")]);
    let layout = dir.join("layout");
    fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    let blob = |bytes: &[u8]| {
        let digest = farrier_core::image::Digest::of(bytes);
        fs::write(layout.join("blobs/sha256").join(digest.hex()), bytes).unwrap();
        serde_json::json!({"digest": digest.as_str(), "size": bytes.len()})
    };
    let described = |mut blob: serde_json::Value, kind: &str| {
        blob["mediaType"] = format!("application/vnd.oci.image.{kind}").into();
        blob
    };
    let layers = [fs::read(low).unwrap(), fs::read(high).unwrap()];
    let ids: Vec<String> =
        layers.iter().map(|bytes| farrier_core::image::Digest::of(bytes).to_string()).collect();
    let config = serde_json::json!({"architecture": "amd64", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": ids}});
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described(blob(config.to_string().as_bytes()), "config.v1+json"),
        "layers": layers.iter().map(|bytes| described(blob(bytes), "layer.v1.tar")).collect::<Vec<_>>(),
        "annotations": {"farrier.dev/kernel-release": release},
    });
    let mut entry = described(blob(manifest.to_string().as_bytes()), "manifest.v1+json");
    entry["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": "acme/nbd:1.0"});
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [entry]});
    fs::write(layout.join("index.json"), index.to_string()).unwrap();
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    layout.display().to_string()
}

#[tokio::test]
async fn images_of_every_kind_are_checked() {
    let kernel = kernel(&kernels::newest().newer).await;
    let release = kernel.target.release.to_string();
    let dir = tempfile::tempdir().unwrap();
    let layout = layout_image(dir.path(), &kernel);
    let wanted = [format!("lib/modules/{release}/updates/nbd.ko")];

    // The annotation names the kernel.
    for subject in
        [format!("oci:{layout}"), format!("oci:{layout}:1.0"), format!("oci:{layout}:acme/nbd:1.0")]
    {
        let report = report(&[&subject], 0);
        assert_eq!((module_paths(&report), &report["kernel"]), (wanted.to_vec(), &release.as_str().into()));
    }
    let (_, table, _) = check(&[&format!("oci:{layout}")]);
    assert!(table.contains("replaces the kernel's own: nbd"), "{table}");
    let has = format!("it has modules for 6.1.0-1-amd64, {release}");
    let older = kernels::newest().older;
    refuses(&[&format!("oci:{layout}"), "--kernel", &older], 1, &["has no modules for", &has]);
    refuses(&[&format!("oci:{layout}:2.0")], 2, &[r#"has no "2.0"; it has acme/nbd:1.0"#, "hint: "]);

    // The image in a registry, pushed by skopeo.
    let registry = RegistryProcess::start(Wants::default());
    let reference = format!("{}/acme/nbd:1.0", registry.host);
    let copied = skopeo(&[
        "copy",
        "--dest-tls-verify=false",
        &format!("oci:{layout}:acme/nbd:1.0"),
        &format!("docker://{reference}"),
    ]);
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    assert_eq!(module_paths(&report(&[&reference], 0)), wanted);
    refuses(&[&format!("{}/acme/nbd:2.0", registry.host)], 2, &["the registry does not have it"]);

    // The image in an engine, loaded from an archive. The archive lacks the annotation, and this test checks only the modules'
    // names.
    let name = format!("localhost/farrier-check-test:{}", std::process::id());
    let archive = dir.path().join("image.tar");
    let copied = skopeo(&[
        "copy",
        &format!("oci:{layout}:acme/nbd:1.0"),
        &format!("docker-archive:{}:{name}", archive.display()),
    ]);
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    docker(&["load", "-i", archive.to_str().unwrap()]);
    let subject = format!("docker:{name}");
    let (code, stdout, stderr) = check(&[&subject, "--kernel", &release, "-o", "json"]);
    let unnamed = check(&[&subject]);
    docker(&["rmi", &name]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert_eq!(module_paths(&serde_json::from_str(&stdout).unwrap()), wanted);
    assert_eq!(unnamed.0, Some(2), "{}", unnamed.2);
    assert!(unnamed.2.contains("choose one with --kernel"), "{}", unnamed.2);
    refuses(&[&subject, "--kernel", &release], 2, &["has no image", "pull it first"]);
}

#[tokio::test]
async fn files_are_checked_against_headers_an_image_and_needed_tables() {
    let kernel = kernel(&kernels::newest().newer).await;
    let release = kernel.target.release.as_str();
    let modules = kernel.image.modules.as_ref().unwrap();
    let index = kernel.image.facts().unwrap().in_tree.unwrap().value;
    let module = modules.join(&index.modules["nbd"]).display().to_string();
    let headers = kernel.headers.root.display().to_string();
    let vmlinuz = kernel.image.vmlinuz.display().to_string();

    for args in [
        vec!["--kernel", release],
        vec!["--headers", &headers],
        vec!["--kernel-image", &vmlinuz],
        vec!["--headers", &headers, "--kernel-image", &vmlinuz],
    ] {
        let report = report(&[&[module.as_str()], &args[..]].concat(), 0);
        assert_eq!((&report["kernel"], &report["verdict"]), (&release.into(), &"loads".into()), "{args:?}");
    }
    let dependent = modules.join(&index.modules["nvme_tcp"]).display().to_string();
    let table = kernel.headers.root.join(format!("usr/src/linux-headers-{release}/Module.symvers"));
    let needed = report(&[&dependent, "--kernel", release, "--needs", table.to_str().unwrap()], 0);
    assert_eq!(needed["verdict"], "loads");
    refuses(&[&module, "--kernel", release, "--needs", "/nonexistent"], 2, &["--needs /nonexistent: "]);
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().display().to_string();
    refuses(&[&module, "--kernel", release, "--needs", &empty], 2, &["there is no Module.symvers in it"]);

    // Headers without Module.symvers leave most results unknown, and the user decides whether that is acceptable.
    let bare = tempfile::tempdir().unwrap();
    let build = bare.path().join("lib/modules").join(release).join("build");
    for file in ["include/generated/utsrelease.h", "include/config/auto.conf"] {
        fs::create_dir_all(build.join(file).parent().unwrap()).unwrap();
        // Debian keeps the files common to all flavors in a separate tree; these files belong to the flavor.
        fs::copy(table.parent().unwrap().join(file), build.join(file)).unwrap();
    }
    let bare = bare.path().display().to_string();
    assert_eq!(report(&[&module, "--headers", &bare], 0)["verdict"], "unknown");
    assert_eq!(report(&[&module, "--headers", &bare, "--deny-unknown"], 1)["verdict"], "unknown");

    refuses(&[&module], 2, &["no kernel given", "--kernel RELEASE", "--host"]);
    refuses(&[&module, "--kernel-image", "/nonexistent"], 2, &["there is no such file"]);
    refuses(&[&module, "--kernel-image", &module], 2, &["read ", "neither a bzImage"]);
    refuses(
        &["nonesuch.ko", "--kernel", release],
        2,
        &["nonesuch.ko: no such file or directory", "docker:REF"],
    );
    refuses(&[&empty, "--kernel", release], 2, &["there is no module (.ko"]);
    let gone = "6.1.0-0-amd64";
    refuses(
        &[&module, "--kernel", gone],
        1,
        &["find the headers of the kernel: there is no package", "hint: "],
    );
    refuses(&["127.0.0.1:1/a/b:1", "--kernel", release], 3, &["127.0.0.1:1"]);
    let other = kernels::newest().older;
    refuses(
        &[&module, "--kernel", &other, "--kernel-image", &vmlinuz],
        2,
        &[
            &format!("is the image of kernel {release}, not of {other}"),
            "hint: pass the image of exactly this kernel",
        ],
    );
}
