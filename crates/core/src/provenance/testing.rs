//! A sample provenance that fills every field, and test keys.

use super::{Confinement, Distribution, Material, ModuleFile, Package, Provenance, Role, Subject, Terms};
use crate::{
    image::{Digest, Redistribute},
    kernel::{Architecture, KernelTarget},
};

/// Created with `openssl genpkey` and `openssl pkey -pubout`.
pub(super) const P256_KEY: &str = include_str!("testdata/p256.pem");
pub(super) const P256_COMPRESSED_KEY: &str = include_str!("testdata/p256-compressed.pem");
pub(super) const RSA_KEY: &str = include_str!("testdata/rsa.pem");
/// Created with `cosign generate-key-pair` and `cosign sign` of Debian's cosign 3.1.1.
pub(super) const COSIGN_3_KEY: &str = include_str!("testdata/cosign3.pem");
pub(super) const COSIGN_3_BUNDLE: &[u8] = include_bytes!("testdata/cosign3-bundle.json");

pub(super) fn provenance() -> Provenance {
    let digest = |text: &str| Digest::of(text.as_bytes());
    let package = |name: &str, licenses: &[&str]| Package {
        name: name.to_owned(),
        version: "1.0-1".to_owned(),
        architecture: "amd64".to_owned(),
        licenses: licenses.iter().map(ToString::to_string).collect(),
    };
    let debian = Distribution::of_suite("bookworm", None);
    let with = |role, name: &str| Material { digest: Some(digest(name)), ..Material::new(role, name) };
    Provenance {
        subject: Subject {
            name: "mft".to_owned(),
            version: "4.22".to_owned(),
            output: None,
            digest: digest("image"),
            target: Some(KernelTarget {
                os: "debian".parse().unwrap(),
                os_version: "12".parse().unwrap(),
                release: "6.1.0-56-acme+".parse().unwrap(),
                arch: Architecture::Amd64,
            }),
            architecture: Architecture::Amd64,
            terms: Terms {
                supplier: Some("Acme".to_owned()),
                license: Some("GPL-2.0-only AND LicenseRef-Acme".to_owned()),
                redistribute: Some(Redistribute::Terms),
            },
            input_hash: "ab".repeat(32).parse().unwrap(),
        },
        farrier: "0.1.0".to_owned(),
        build_format: "farrier.dev/build/1".to_owned(),
        inputs: [("version".to_owned(), "4.22".to_owned())].into(),
        materials: vec![
            Material::of_origin(
                Role::Source,
                &format!("mft-dkms=4.22+1-1 {}", digest("source")),
                "mft",
                None,
            ),
            Material {
                uri: Some("https://example.test/mft.tgz".to_owned()),
                terms: Terms {
                    supplier: Some("Acme".to_owned()),
                    license: Some("LicenseRef-Acme".to_owned()),
                    redistribute: Some(Redistribute::Forbidden),
                },
                ..with(Role::Source, "mft-extra")
            },
            Material::of_git(
                "mft-tools",
                &serde_json::from_str(r#"{"url": "https://example.test/mft.git", "ref": "refs/tags/v1"}"#)
                    .unwrap(),
                &"01".repeat(20),
            ),
            with(Role::Patch, "001-fix.patch"),
            with(Role::Recipe, "Dockerfile"),
            Material::of_origin(
                Role::Headers,
                &format!("linux-headers-6.1.0-56-acme=6.1.1-1 {}", digest("headers")),
                "kernel headers",
                debian.clone(),
            ),
            with(Role::StoredHeaders, "header set"),
            Material {
                distribution: debian.clone(),
                packages: vec![package("gcc-12", &["GPL-3+", "LGPL-2+"]), package("make", &[])],
                ..with(Role::Toolchain, "bookworm")
            },
            Material { version: Some("6A:0F".to_owned()), ..with(Role::ModuleCertificate, "Acme modules") },
            Material {
                distribution: debian,
                packages: vec![package("busybox", &["GPL-2"])],
                ..with(Role::Base, "bookworm")
            },
            Material { version: Some("0.1.0".to_owned()), ..with(Role::Entrypoint, "driver-entrypoint") },
        ],
        modules: vec![ModuleFile {
            path: "lib/modules/6.1.0-56-acme+/extra/mst.ko".to_owned(),
            name: "mst".to_owned(),
            version: Some("4.22".to_owned()),
            license: Some("Dual BSD/GPL".to_owned()),
            srcversion: Some("0123456789ABCDEF".to_owned()),
            digest: digest("mst.ko"),
        }],
        confinement: Confinement::default(),
    }
}
