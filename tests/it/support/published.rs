//! Images as farrier publishes them, but without a compilation, for tests of rollouts.

use std::{collections::BTreeMap, path::Path};

use farrier_core::{
    facts::{ImageFacts, media_type},
    image::{ImageReference, Version},
};
use farrier_store::registry::{Registry, RegistryOptions, RemoteRegistry};
use kmod::Verdict;
use oci::{Assembly, EntryKind, LayerWriter, assemble};
use serde_json::Value;

/// Publishes every image that a plan (`farrier plan -o json`) would build: one small layer, farrier's annotations and the
/// planned input hash. Returns the images with digests by image and kernel release.
pub fn publish_planned(plan: &Value) -> BTreeMap<(String, String), String> {
    publish_planned_as(plan, &RegistryOptions::default())
}

/// Publishes like [`publish_planned`], with credentials.
pub fn publish_planned_as(plan: &Value, options: &RegistryOptions) -> BTreeMap<(String, String), String> {
    let facts = ImageFacts { verdict: Some(Verdict::Loads), ..ImageFacts::default() };
    let builds = plan["builds"].as_array().expect("a plan").iter().map(|build| &build["cell"]);
    builds.map(|cell| (key(cell), publish_as(cell, facts.clone(), options))).collect()
}

fn key(cell: &Value) -> (String, String) {
    (text(&cell["image"]).to_owned(), text(&cell["target"]["release"]).to_owned())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Publishes one cell of a plan with this verdict, and returns its reference by digest.
pub fn publish(cell: &Value, verdict: Verdict) -> String {
    publish_with(cell, ImageFacts { verdict: Some(verdict), ..ImageFacts::default() })
}

/// Publishes one cell of a plan with these facts in addition to the planned input hash and kernel. All other content is
/// fictional.
pub fn publish_with(cell: &Value, facts: ImageFacts) -> String {
    publish_as(cell, facts, &RegistryOptions::default())
}

fn publish_as(cell: &Value, facts: ImageFacts, options: &RegistryOptions) -> String {
    let release = text(&cell["target"]["release"]);
    let reference: ImageReference = text(&cell["reference"]).parse().unwrap();
    let mut writer = LayerWriter::new(Vec::new(), 0);
    for directory in ["lib", "lib/modules", &format!("lib/modules/{release}")] {
        writer.entry(Path::new(directory), 0o755, EntryKind::Directory).unwrap();
    }
    let mut content = text(&cell["inputHash"]).as_bytes();
    let kind = EntryKind::File { size: content.len() as u64, content: &mut content };
    writer.entry(&Path::new("lib/modules").join(release).join("driver.ko"), 0o644, kind).unwrap();
    let (layer, blob) = writer.finish().unwrap();
    let facts = ImageFacts {
        input_hash: Some(text(&cell["inputHash"]).parse().unwrap()),
        kernel_release: Some(release.parse().unwrap()),
        os: Some(format!("{} {}", text(&cell["target"]["os"]), text(&cell["target"]["osVersion"]))),
        ..facts
    };
    let assembled = assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: &[layer],
        entrypoint: &["/driver".to_owned()],
        env: &BTreeMap::new(),
        labels: &BTreeMap::new(),
        annotations: &facts.to_annotations(),
        architecture: text(&cell["target"]["arch"]),
    })
    .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let registry = RemoteRegistry::new("registry".to_owned(), options);
        let repository = &reference.repository;
        registry.push_bytes(repository, &blob).await.unwrap();
        registry.push_bytes(repository, &assembled.config).await.unwrap();
        for version in [&Version::Digest(assembled.digest.clone()), &reference.version] {
            registry
                .push_manifest(repository, version, media_type::OCI_MANIFEST, &assembled.manifest)
                .await
                .unwrap();
        }
    });
    format!("{}@{}", reference.repository, assembled.digest)
}
