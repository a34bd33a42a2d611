//! Bills of materials and provenance of a real image: the formats' validators accept them, and syft lists what ships.
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_builder::{images::Documents, source_material, terms};
use farrier_core::{
    facts::media_type,
    image::{Digest, DriverImage, SourceOrigin, Version},
    kernel::{Architecture, KernelTarget},
    plan::{BUILD_FORMAT, NamedInputs},
    provenance::{Confinement, Distribution, Material, ModuleFile, Package, Provenance, Role, Subject},
};
use farrier_store::registry::{Registry as _, RegistryOptions, RemoteRegistry};
use oci::{Artifact, Descriptor, ImageManifest};
use serde_json::{Value, json};

use crate::{
    offline::MSTFLINT,
    signatures::{P256, SIGNING, key, site_yaml},
    support::{kept, kernels, packages::run, site::Site, tiny_image},
};

const CYCLONEDX: &str = "application/vnd.cyclonedx+json";
const SPDX: &str = "application/spdx+json";
const STATEMENT: &str = "application/vnd.in-toto+json";

/// Builds the image, publishes it, and returns its digest.
fn publish(site: &Site, kernel: &str, args: &[&str]) -> String {
    let built =
        site.build("mstflint", kernel, &[&["--engine", "sandbox", "--push", "-o", "json"], args].concat());
    built.exits(0).json()["digest"].as_str().unwrap().to_owned()
}

/// Returns the contents of an image's documents of one type.
fn documents(site: &Site, image: &str, kind: &str) -> Vec<Vec<u8>> {
    let beside = site.inspect_raw(&format!("mstflint:{}", image.replace(':', "-")));
    let of_kind = beside["manifests"].as_array().unwrap().iter().filter(|one| one["artifactType"] == kind);
    let content = |one: &Value| {
        let manifest = site.inspect_raw(&format!("mstflint@{}", one["digest"].as_str().unwrap()));
        site.registry.blob(manifest["layers"][0]["digest"].as_str().unwrap())
    };
    of_kind.map(content).collect()
}

/// Validates the documents of images, and returns what syft reads from the CycloneDX and the SPDX bill of each.
fn checked(files: &[PathBuf]) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let state = kept("bills");
    let script = "set -eu; state=$1; root=$2; . \"$root/ci/lib.sh\"; bill_tools";
    let python = run(Command::new("bash").args(["-c", script, "bash"]).arg(&state).arg(root));
    let mut command = Command::new(python.trim());
    command.arg(root.join("tests/it/support/check_bills.py")).args(files);
    serde_json::from_str(&run(&mut command)).unwrap()
}

/// Writes the documents of a published image to files.
fn written(site: &Site, image: &str) -> Vec<PathBuf> {
    let write = |(name, kind)| {
        let found = documents(site, image, kind);
        assert_eq!(found.len(), 1, "{kind}");
        fs::write(site.path(name), &found[0]).unwrap();
        site.path(name)
    };
    [("bill.json", CYCLONEDX), ("spdx.json", SPDX), ("statement.json", STATEMENT)].map(write).to_vec()
}

#[test]
fn syft_lists_what_ships_and_nothing_else() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.define("images/mstflint.yaml", MSTFLINT);
    let image = publish(&site, &kernel, &[]);
    let bill: Value = serde_json::from_slice(&documents(&site, &image, CYCLONEDX)[0]).unwrap();
    let version = |role: &str| {
        let mut components = bill["components"].as_array().unwrap().iter();
        let found = components.find(|one| one["bom-ref"].as_str().unwrap().starts_with(role));
        found.unwrap_or_else(|| panic!("no {role} in {bill:#}"))["version"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let listed = json!({
        "distribution": "debian 12",
        "packages": [
            format!("busybox-static {}", version("runtime-base:")),
            format!("mstflint-dkms {}", version("source:")),
            format!("mstflint_access {}", version("module:")),
        ],
    });
    assert_eq!(checked(&written(&site, &image)), json!([[listed, listed]]));
    let purls = bill["components"].as_array().unwrap().iter().filter_map(|one| one["purl"].as_str());
    let debian: Vec<&str> = purls.filter(|purl| purl.starts_with("pkg:deb/debian/")).collect();
    assert!(debian.len() == 2 && debian.iter().all(|purl| purl.contains("distro=debian-")), "{debian:?}");
}

/// An output has documents of its own, which name the image.
#[test]
fn the_documents_of_outputs_are_valid_and_list_what_ships() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.define(
        "images/mstflint.yaml",
        &format!("{MSTFLINT}  outputs: [deb, deb-meta, initramfs, sysext]\n"),
    );
    let options =
        "req -x509 -newkey rsa:2048 -nodes -keyout modules.key -out modules.crt -subj /CN=acme -days 1";
    run(Command::new("openssl").args(options.split(' ')).current_dir(site.definitions()));
    key(&site, "site", P256);
    let modules = "  moduleSigning: {key: {file: modules.key}, certificate: modules.crt}\n";
    site_yaml(&site, &format!("{SIGNING}{modules}"));
    let image = publish(&site, &kernel, &[]);
    let image_bill: Value = serde_json::from_slice(&documents(&site, &image, CYCLONEDX)[0]).unwrap();
    let components = |bill: &Value| bill["components"].as_array().unwrap().clone();
    let module_in = |bill: &Value| {
        let mut found = components(bill).into_iter().filter(|one| one["name"] == "mstflint_access");
        let module = found.next().unwrap();
        (module["hashes"].clone(), module["version"].as_str().unwrap().to_owned())
    };
    let beside = site.inspect_raw(&format!("mstflint:{}", image.replace(':', "-")));
    let listed_module = format!("mstflint_access {}", module_in(&image_bill).1);
    for (output, module, certificates) in [
        ("deb", Some(&listed_module), 1),
        ("deb-meta", None, 0),
        ("initramfs", Some(&listed_module), 0),
        ("sysext", Some(&listed_module), 1),
    ] {
        let kind = format!("application/vnd.farrier.{output}.v1");
        let mut published = beside["manifests"].as_array().unwrap().iter();
        let digest = published.find(|one| one["artifactType"] == *kind).unwrap()["digest"].as_str().unwrap();
        let files = written(&site, digest);
        let [bill, _, statement] = &files[..] else { panic!("{files:?}") };
        let read = |file: &PathBuf| -> Value { serde_json::from_slice(&fs::read(file).unwrap()).unwrap() };
        let (bill, statement) = (read(bill), read(statement));
        if module.is_some() {
            assert_eq!(
                module_in(&bill),
                module_in(&image_bill),
                "{output}: another module than in the image"
            );
        }
        let found = components(&bill).into_iter().filter(|one| one["type"] == "cryptographic-asset");
        assert_eq!(found.count(), certificates, "{output}: {bill:#}");
        let hex = digest.trim_start_matches("sha256:");
        assert_eq!(statement["subject"][0]["digest"]["sha256"], hex);
        let definition = &statement["predicate"]["buildDefinition"];
        assert_eq!(definition["externalParameters"]["output"], output);
        let made_from = &definition["resolvedDependencies"][0];
        assert_eq!(made_from["digest"]["sha256"], image.trim_start_matches("sha256:"), "{statement:#}");
        let listed = json!({
            // An output has no distribution.
            "distribution": " ",
            "packages": Vec::from_iter(module),
        });
        assert_eq!(checked(&files), json!([[listed, listed]]), "{output}");
    }
}

/// Returns an image's origin of a source in the notation of resolved inputs.
fn identity(from: &SourceOrigin) -> String {
    let digest = Digest::of(b"source");
    match from {
        SourceOrigin::Apt(source) => format!("{}=535.261.03-1+deb12u1 {digest}", source.package),
        SourceOrigin::Rpm(_) => format!("kmod=535.261.03-1.el9.x86_64 {digest}"),
        SourceOrigin::Image(_) => format!("registry.example/driver {digest}"),
        SourceOrigin::Git(_) => format!("{} {digest}", "0".repeat(40)),
        SourceOrigin::Path { .. } | SourceOrigin::Url { .. } => digest.to_string(),
    }
}

/// Returns the provenance that a build of the definition records, with sample content where only a build knows it.
fn planned(image: &DriverImage) -> Provenance {
    let digest = |text: &str| Some(Digest::of(text.as_bytes()));
    let target = KernelTarget {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        release: "6.1.0-47-amd64".parse().unwrap(),
        arch: Architecture::Amd64,
    };
    let version = "535.261.03";
    let sources = image.spec.sources.iter();
    let mut materials: Vec<Material> =
        sources.map(|it| source_material(image, it, &identity(&it.from), version, &target)).collect();
    let patches = image.spec.patches.iter().map(|patch| patch.path.display().to_string());
    materials
        .extend(patches.map(|name| Material { digest: digest(&name), ..Material::new(Role::Patch, name) }));
    let headers = format!("linux-headers-6.1.0-47-amd64=6.1.170-1 {}", Digest::of(b"headers"));
    let debian = Distribution::of_suite("bookworm", None);
    materials.push(Material::of_origin(Role::Headers, &headers, "kernel headers", debian.clone()));
    let needs = image.spec.needs.iter().filter_map(|need| need.image());
    materials.extend(needs.map(|name| Material {
        version: Some(version.to_owned()),
        digest: digest(name.as_str()),
        ..Material::new(Role::Need, name.as_str())
    }));
    let package = |name: &str, licenses: &[&str]| Package {
        name: name.to_owned(),
        version: "1:2.36-9+deb12u10~x".to_owned(),
        architecture: "amd64".to_owned(),
        licenses: licenses.iter().map(ToString::to_string).collect(),
    };
    let packages = vec![package("libc6", &["LGPL-2.1+", "GPL-2"]), package("libstdc++6", &[])];
    let of_base = |role| Material {
        distribution: debian.clone(),
        digest: digest("base"),
        packages: packages.clone(),
        ..Material::new(role, "bookworm")
    };
    materials.extend([of_base(Role::Toolchain), of_base(Role::Base)]);
    let module = |name: &str| ModuleFile {
        path: format!("lib/modules/6.1.0-47-amd64/extra/{name}.ko"),
        name: name.to_owned(),
        version: Some(version.to_owned()),
        license: Some("Dual MIT/GPL".to_owned()),
        srcversion: Some("0123456789ABCDEF".to_owned()),
        digest: Digest::of(name.as_bytes()),
    };
    Provenance {
        subject: Subject {
            name: image.metadata.name.to_string(),
            version: version.to_owned(),
            output: None,
            digest: Digest::of(image.metadata.name.as_str().as_bytes()),
            target: Some(target),
            architecture: Architecture::Amd64,
            input_hash: "ab".repeat(32).parse().unwrap(),
            terms: terms(image, image.spec.license.as_ref(), image.spec.redistribute),
        },
        farrier: "0.1.0".to_owned(),
        build_format: BUILD_FORMAT.to_owned(),
        inputs: NamedInputs::new(),
        materials,
        modules: image.spec.modules.iter().map(|name| module(name.as_str())).collect(),
        confinement: Confinement::default(),
    }
}

/// Most shipped images take minutes to compile. Their documents follow from the definition and the build's inputs, so this test makes them
/// without a build.
#[test]
fn the_documents_of_every_shipped_image_are_valid_and_list_what_ships() {
    let definitions = farrier_definitions::load(None).unwrap();
    let files = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("images")).unwrap();
    let shipped = files.filter(|file| file.as_ref().unwrap().path().is_file()).count();
    assert_eq!(definitions.images.len(), shipped);
    let (directory, mut files) = (tempfile::tempdir().unwrap(), Vec::new());
    for (name, image) in &definitions.images {
        let empty = || Descriptor::of(media_type::OCI_EMPTY, oci::EMPTY);
        let manifest = ImageManifest::new(empty(), vec![empty()]).to_bytes().unwrap();
        let made = Documents::of(&planned(image), &manifest).unwrap().artifacts;
        assert_eq!(made.len(), 3);
        for (artifact, kind) in made.into_iter().zip(["bill", "spdx", "statement"]) {
            let file = directory.path().join(format!("{name}.{kind}.json"));
            fs::write(&file, artifact.content).unwrap();
            files.push(file);
        }
    }
    let found = checked(&files);
    for (image, found) in definitions.images.values().zip(found.as_array().unwrap()) {
        let name = &image.metadata.name;
        assert_eq!(found[0], found[1], "{name}: CycloneDX and SPDX differ");
        let packages = found[0]["packages"].as_array().unwrap();
        assert_eq!(found[0]["distribution"], "debian 12", "{name}");
        let ships = 2 + image.spec.sources.len() + image.spec.modules.len();
        assert_eq!(packages.len(), ships, "{name}: {packages:?}");
    }
}

/// After `farrier mirror`, a build takes its inputs from the store. Its image is the same, and so are its bills.
#[test]
fn a_forced_build_after_mirror_adds_no_second_bill() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.define("images/mstflint.yaml", MSTFLINT);
    key(&site, "site", P256);
    site_yaml(&site, SIGNING);
    let image = publish(&site, &kernel, &[]);
    let bills = [CYCLONEDX, SPDX].map(|kind| documents(&site, &image, kind));
    assert!(bills.iter().all(|of_kind| of_kind.len() == 1));
    let target = ["--kernel", &kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    site.farrier(&[&["mirror", "--image", "mstflint"][..], &target].concat()).exits(0);
    assert_eq!(publish(&site, &kernel, &["--force"]), image);
    assert_eq!([CYCLONEDX, SPDX].map(|kind| documents(&site, &image, kind)), bills);
}

/// Attaches an OpenVEX document to an image, as `oras attach` does.
#[tokio::test]
async fn a_vex_statement_travels_with_its_image() {
    const OPENVEX: &str = "application/vnd.openvex+json";
    let (from, to) = (Site::new(), Site::new());
    let files = [("etc/hello".to_owned(), b"hello".to_vec())];
    let image = tiny_image::push_files(&from.registry.host, "drivers/mstflint", "1", &files).await;
    let (repository, digest) = image.split_once('@').unwrap();
    let document = json!({
        "@context": "https://openvex.dev/ns/v0.2.0",
        "@id": "https://example.test/vex/1",
        "author": "Acme",
        "timestamp": "2026-01-01T00:00:00Z",
        "version": 1,
        "statements": [{
            "vulnerability": {"name": "CVE-2026-0001"},
            "products": [{"@id": format!("pkg:oci/mstflint@{digest}")}],
            "status": "not_affected",
            "justification": "vulnerable_code_not_present",
        }],
    });
    let repository = repository.parse().unwrap();
    let registry = RemoteRegistry::new("test".to_owned(), &RegistryOptions::default());
    let version = Version::Digest(digest.parse().unwrap());
    let manifest = registry.manifest(&repository, &version).await.unwrap().unwrap();
    let vex = Artifact::about(&manifest.bytes, OPENVEX, document.to_string().into_bytes(), &[]).unwrap();
    registry.push_bytes(&repository, oci::EMPTY).await.unwrap();
    registry.push_bytes(&repository, &vex.content).await.unwrap();
    registry.push_referrer(&repository, &vex.manifest).await.unwrap();

    let bundle = from.path("vex.bundle").display().to_string();
    from.farrier(&["bundle", "export", "--reference", "mstflint:1", "--to", &bundle]).exits(0);
    to.farrier(&["bundle", "import", "--insecure-no-signature", &bundle]).exits(0);
    assert_eq!(documents(&to, digest, OPENVEX), [vex.content]);
}
