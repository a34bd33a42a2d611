//! The fields of a `Module` of the Kernel Module Management operator. KMM loads a module with the image of the first kernel
//! mapping that matches a node's kernel; a mapping without an image uses the image of the container. KMM replaces
//! variables in images, so that one value names the images of all kernels.
//!
//! Facts: `internal/module/kernelmapper.go`, `internal/utils/replaceStrings.go` and `internal/webhook/module.go`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{
    super::{Context, HoldReason, reached::NodesByKernel},
    DesiredField, ResourceFacts, SPEC, field_path, record_of,
    version::{CommonVersion, VersionChoice, common_version},
};
use crate::{
    image::{DriverImageSpec, OperatorResource, Output, RuntimeBase},
    kernel::{KernelTarget, Pattern},
};

pub(super) const IMAGE: &str = "containerImage";
pub(super) const MAPPINGS: &str = "kernelMappings";
/// Sections that make KMM build or sign images itself.
const IMAGE_BUILD_SECTIONS: [&str; 2] = ["build", "sign"];

/// Returns the images for these kernels. If an image changes and the Module sets `version`, the `version` changes as
/// well, because KMM's ordered upgrades compare it.
pub(super) fn desired_fields<'a>(
    context: &Context<'a>,
    resource: &ResourceFacts,
    container: &Map<String, Value>,
    kernels: &NodesByKernel<'_>,
) -> Result<DesiredField<'a>, HoldReason> {
    let mut mappings: Vec<Value> =
        container.get(MAPPINGS).and_then(Value::as_array).cloned().unwrap_or_default();
    check_loadable(context, container, &mappings, kernels)?;
    // Kernels by the mapping that has their image; `None` stands for the container's image.
    let mut groups: BTreeMap<Option<usize>, NodesByKernel<'_>> = BTreeMap::new();
    for (kernel, nodes) in kernels {
        let Some(index) = mapping_of(&mappings, kernel)? else { continue };
        let with_image = Some(index).filter(|index| mappings[*index].get(IMAGE).is_some());
        groups.entry(with_image).or_default().insert(kernel, nodes.clone());
    }
    if groups.is_empty() {
        let kernels: Vec<String> = kernels.keys().map(|kernel| kernel.release.to_string()).collect();
        let detail = format!("no entry of {MAPPINGS} matches {}", kernels.join(", "));
        return Err(HoldReason::DriverOff { detail });
    }
    let mut fields = Map::new();
    // The record must keep comparing the fields that were written before.
    let record = record_of(resource)?;
    let written =
        record.0.get(SPEC).and_then(|record| record.set.as_object()).into_iter().flat_map(Map::keys);
    for (key, value) in written.filter_map(|key| container.get_key_value(key)) {
        fields.insert(key.clone(), value.clone());
    }
    let (mut versions, mut required_images, mut count, mut has_change) = (Vec::new(), Vec::new(), 0, false);
    for (index, kernels) in &groups {
        let current = index.map_or(container.get(IMAGE), |index| mappings[index].get(IMAGE));
        let current = current.and_then(Value::as_str);
        let common = match common_version(context, OperatorResource::Module, kernels, current)? {
            VersionChoice::Ready(common) => common,
            VersionChoice::Pending(on) => return Ok(DesiredField::Pending(on)),
        };
        let CommonVersion { version, reference, required_images: images } = common;
        let image = format!("{}:{version}", reference.repository);
        has_change |= current != Some(&image);
        match index {
            Some(index) => mappings[*index][IMAGE] = image.into(),
            None => drop(fields.insert(IMAGE.to_owned(), image.into())),
        }
        count += kernels.len();
        versions.push(version);
        required_images.extend(images);
    }
    if groups.keys().any(Option::is_some) {
        fields.insert(MAPPINGS.to_owned(), mappings.into());
    }
    if let Some(version) = container.get("version").filter(|version| *version != "") {
        let mut cells =
            kernels.keys().filter_map(|kernel| context.cells.get(context.image, kernel)?.outcome.cell());
        let next = cells.next().filter(|_| has_change).map(|cell| Value::from(label_value(&cell.version)));
        fields.insert("version".to_owned(), next.unwrap_or_else(|| version.clone()));
    }
    let version = format!("tag {}", versions.join(", "));
    Ok(DesiredField::Fields { fields: fields.into(), version, kernels: count, required_images })
}

/// Returns a driver's version as a label's value: KMM copies the Module's `version` into labels of DaemonSets, and compares it
/// with a label of the node.
fn label_value(version: &str) -> String {
    let is_kept = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let value: String = version.chars().map(|c| if is_kept(c) { c } else { '_' }).take(63).collect();
    value.trim_matches(['-', '_', '.']).to_owned()
}

/// Fails if KMM builds or signs images itself, or looks for files where farrier's images have none.
fn check_loadable(
    context: &Context<'_>,
    container: &Map<String, Value>,
    mappings: &[Value],
    kernels: &NodesByKernel<'_>,
) -> Result<(), HoldReason> {
    let path = field_path(OperatorResource::Module);
    let not_editable = |detail: String| Err(HoldReason::Fixed { detail });
    let section = IMAGE_BUILD_SECTIONS.into_iter().find(|key| {
        container
            .get(*key)
            .into_iter()
            .chain(mappings.iter().filter_map(|mapping| mapping.get(key)))
            .any(Value::is_object)
    });
    if let Some(key) = section {
        return not_editable(format!(
            "KMM would build or sign the image itself; remove `{key}` from {path} and its {MAPPINGS}"
        ));
    }
    let definitions = context.inputs.definitions();
    let spec = definitions.images.get(context.image).map(|image| &image.spec);
    let Some(spec) = spec.filter(|spec| spec.output == Output::Payload) else { return Ok(()) };
    let modprobe = |key: &str| container.get("modprobe").and_then(|modprobe| modprobe[key].as_str());
    let directory = modprobe("dirName").unwrap_or("/opt");
    if !directory.trim_end_matches('/').is_empty() {
        return not_editable(format!(
            "{path}.modprobe.dirName is {directory:?}, and farrier's images have their modules below \"/\"; set it to /"
        ));
    }
    for kernel in kernels.keys() {
        let release = kernel.release.as_str();
        let Some(directory) = release.strip_suffix('+') else { continue };
        if mapping_of(mappings, kernel)?.is_some() {
            return not_editable(format!(
                "on {release} KMM looks for modules below /lib/modules/{directory}, and farrier's image has them below \
                 /lib/modules/{release}; exclude such nodes with the Module's selector"
            ));
        }
    }
    let template = definitions.templates.get(spec.template.as_str()).map_or("", String::as_str);
    for (key, hint) in [
        ("firmwarePath", "list the files in `firmware` of the definition, and set it to /lib/firmware"),
        ("modprobedDir", "remove it, or use a template that puts the files below /out"),
    ] {
        let directory = modprobe(key).unwrap_or_default().trim_end_matches('/');
        if !directory.is_empty() && !may_have_files(spec, template, directory) {
            return not_editable(format!(
                "{path}.modprobe.{key} is {directory:?}, and farrier's image has no files there; {hint}"
            ));
        }
    }
    Ok(())
}

/// Whether the image may have files in the directory, which KMM copies before it loads modules. KMM's pod fails if the
/// directory is absent or empty.
fn may_have_files(spec: &DriverImageSpec, template: &str, directory: &str) -> bool {
    // The content of other bases is not known here.
    let in_base = !matches!(spec.runtime.base, Some(RuntimeBase::Minimal(_)) | None);
    let of_definition = directory.starts_with("/lib/firmware") && !spec.firmware.is_empty();
    in_base || of_definition || template.contains(directory) || has_other_outputs(template)
}

/// Whether a template puts anything into the image besides modules and headers. The image's root is `/out` in it.
fn has_other_outputs(template: &str) -> bool {
    let is_other = |path: &str| !["lib/modules", "usr/src"].iter().any(|known| path.starts_with(known));
    // `DESTDIR=/out` and the like.
    template.contains("=/out") || template.split("/out/").skip(1).any(is_other)
}

/// Returns the index of the first mapping for a kernel.
fn mapping_of(mappings: &[Value], kernel: &KernelTarget) -> Result<Option<usize>, HoldReason> {
    let release = kernel.release.as_str();
    let release = release.strip_suffix('+').unwrap_or(release);
    for (index, mapping) in mappings.iter().enumerate() {
        if mapping["literal"] == release {
            return Ok(Some(index));
        }
        let Some(expression) = mapping["regexp"].as_str().filter(|text| !text.is_empty()) else { continue };
        let pattern = Pattern::try_from(expression.to_owned()).map_err(|_| HoldReason::Fixed {
            detail: format!("{MAPPINGS}[{index}].regexp is not understood: {expression:?}"),
        })?;
        if pattern.is_found_in(release) {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// Formats the images, and the version.
pub(super) fn text_of(value: &Value) -> String {
    let mappings = value[MAPPINGS].as_array().into_iter().flatten().map(|mapping| &mapping[IMAGE]);
    let images = std::iter::once(&value[IMAGE]).chain(mappings).filter_map(Value::as_str);
    let images = images.collect::<Vec<_>>().join(", ");
    let images = if images.is_empty() { "(none)".to_owned() } else { images };
    value["version"].as_str().map_or(images.clone(), |version| format!("{images} version {version}"))
}
