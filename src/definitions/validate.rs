//! Adapter: what a definition's form cannot say: names that must exist, patterns that must render.

use std::{
    collections::BTreeMap,
    path::{Component, Path},
};

use super::{DefinitionError, File};
use crate::{
    image::{DriverImage, PatchSpec, RolloutSpec, RuntimeBase, SourceOrigin, SourceSpec, TagInputs, VersionSpec, render_tags},
    kernel::{Architecture, KernelFamily, KernelTarget, Toolchain},
};

/// Reports what is wrong with an image.
pub(super) fn image(file: &File, image: &DriverImage, templates: &BTreeMap<String, String>, errors: &mut Vec<DefinitionError>) {
    let mut wrong = |value: &str, message: String| errors.push(DefinitionError::at_text(file, value, message));
    let spec = &image.spec;
    if !templates.contains_key(&spec.template) {
        let known: Vec<&str> = templates.keys().map(String::as_str).collect();
        wrong(&spec.template, format!("there is no template {:?}; there is {}", spec.template, known.join(", ")));
    }
    if let VersionSpec::FromSource { source } = &spec.version {
        let is_apt = |s: &SourceSpec| s.name.as_str() == source && matches!(s.from, SourceOrigin::Apt(_));
        if !spec.sources.iter().any(is_apt) {
            wrong(source, format!("version: there is no apt source {source:?}"));
        }
    }
    for (index, source) in spec.sources.iter().enumerate() {
        if spec.sources[..index].iter().any(|earlier| earlier.name == source.name) {
            wrong(source.name.as_str(), format!("source {} is named twice", source.name));
        }
        for inner in [&source.unpack, &source.subdir].into_iter().flatten() {
            if !is_inner_path(Path::new(inner)) {
                wrong(inner, format!("{inner:?} is no path inside the source's tree"));
            }
        }
        let is_sha256 = |digest: &&str| digest.len() == 64 && digest.chars().all(|c| c.is_ascii_hexdigit());
        if let Some(digest) = source_digest(&source.from).filter(|digest| !is_sha256(digest)) {
            wrong(digest, format!("{digest:?} is no sha256 (64 hexadecimal digits)"));
        }
    }
    for PatchSpec { path, .. } in &spec.patches {
        if path.file_name().is_none() {
            wrong(&path.display().to_string(), format!("patch {}: that is no file name", path.display()));
        }
    }
    for module in &spec.modules {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        if module.is_empty() || !module.chars().all(is_name) {
            wrong(module, format!("{module:?} is no module name (letters, digits, _ and -, without .ko)"));
        }
    }
    for name in spec.runtime.env.keys() {
        if name.is_empty() || name.contains(['=', '\0']) {
            wrong(name, format!("{name:?} is no environment variable's name"));
        }
    }
    if let Some(RuntimeBase::Image(reference)) = &spec.runtime.base {
        image_reference(reference, &mut wrong);
    }
    tags(&spec.tags, &mut wrong);
    for rollout in &spec.rollout {
        let (RolloutSpec::Image { namespace, daemon_set, container } | RolloutSpec::File { namespace, daemon_set, container, .. }) = rollout;
        for name in [namespace, daemon_set, container] {
            if !is_dns_name(name) {
                wrong(name, format!("{name:?} is no Kubernetes name (1 to 253 of a-z, 0-9, - and .)"));
            }
        }
    }
}

/// Reports what is wrong with a family.
pub(super) fn family(file: &File, family: &KernelFamily, earlier: &[KernelFamily], errors: &mut Vec<DefinitionError>) {
    let mut wrong = |value: &str, message: String| errors.push(DefinitionError::at_text(file, value, message));
    let name = &family.metadata.name;
    if earlier.iter().any(|other| other.metadata.name == *name) {
        wrong(name.as_str(), format!("kernel family {name} is defined already"));
    }
    if let Toolchain::Image(reference) = &family.spec.toolchain {
        image_reference(reference, &mut wrong);
    }
}

fn image_reference(reference: &str, wrong: &mut impl FnMut(&str, String)) {
    if let Err(error) = reference.parse::<crate::image::ImageReference>() {
        wrong(reference, error.to_string());
    }
}

/// Renders the patterns for a kernel that every pattern must be able to name.
fn tags(patterns: &[String], wrong: &mut impl FnMut(&str, String)) {
    let sample = || {
        Some(KernelTarget {
            os: "debian".parse().ok()?,
            os_version: "12".parse().ok()?,
            release: "6.1.0-1-amd64".parse().ok()?,
            arch: Architecture::Amd64,
        })
    };
    let Some(target) = sample() else { return };
    for pattern in patterns {
        if let Err(error) = render_tags(std::slice::from_ref(pattern), &TagInputs { version: "1.0", target: &target }) {
            wrong(pattern, error.to_string());
        }
    }
    if patterns.is_empty() {
        wrong("tags", "tags is empty; an image needs at least one".to_owned());
    }
}

fn source_digest(origin: &SourceOrigin) -> Option<&str> {
    match origin {
        SourceOrigin::Path { sha256, .. } => sha256.as_deref(),
        SourceOrigin::Url { sha256, .. } => Some(sha256),
        SourceOrigin::Apt(_) => None,
    }
}

fn is_inner_path(path: &Path) -> bool {
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

fn is_dns_name(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    (1..=253).contains(&name.len()) && name.chars().all(inner) && !name.starts_with(['-', '.']) && !name.ends_with(['-', '.'])
}
