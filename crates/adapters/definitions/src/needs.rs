//! Validates the needs of images across all images.

use farrier_core::image::{
    Definitions, DriverImage, ImageName, Need, Output, Reuse, RuntimeBase, find_cycle, needs_in,
};
use farrier_yaml::Node;

use super::{DefinitionError, File, builtin, error::Report};

/// An image with its file and its YAML document.
pub(super) struct ParsedImage<'a> {
    pub file: &'a File,
    pub document: Node,
    pub image: DriverImage,
}

/// Reports mistakes in one image that do not depend on other images.
pub(super) fn check_image(report: &mut Report<'_>, image: &DriverImage) {
    let spec = &image.spec;
    for (index, need) in spec.needs.iter().enumerate() {
        let path = ["spec", "needs", &index.to_string()];
        if spec.needs[..index].iter().any(|earlier| earlier.name() == need.name()) {
            report.add(&path, format!("{:?} is already listed in `needs`", need.name().as_str()));
        } else if need.image() == Some(&image.metadata.name) {
            report.add(&path, format!("{:?} needs itself", image.metadata.name.as_str()));
        }
    }
    let is_need = |name: &str| spec.needs.iter().any(|need| need.name().as_str() == name);
    for (index, pattern) in spec.tags.iter().enumerate() {
        if let Some(name) = needs_in(pattern).into_iter().find(|name| !is_need(name)) {
            report.add(&["spec", "tags", &index.to_string()], format!("{name:?} is not among `needs`"));
        }
    }
    if let Some(RuntimeBase::Need(base)) = &spec.runtime.base
        && !spec.needs.iter().any(|need| need.image() == Some(base))
    {
        let message = format!("{:?} is not among the driver images of `needs`", base.as_str());
        report.add(&["spec", "runtime", "base", "need"], message);
    }
    for (index, path) in spec.exposes.iter().enumerate() {
        if spec.exposes[..index].contains(path) {
            let message = format!("{path:?} is already listed in `exposes`");
            report.add(&["spec", "exposes", &index.to_string()], message);
        }
    }
    if spec.check.boot && spec.needs.iter().any(|need| need.image().is_none()) {
        let message = "a boot check cannot be combined with a need from a host: its virtual machine lacks the modules of the host's tree";
        report.add(&["spec", "check", "boot"], message);
    }
    if spec.output == Output::Image && !spec.exposes.is_empty() {
        let message =
            "an image that the engine makes (output: image) has no payload and cannot expose anything";
        report.add(&["spec", "exposes"], message);
    }
    if spec.reuse == Reuse::Compatible && !spec.exposes.is_empty() {
        let message = "exposed headers contain the symbol versions of one kernel, so the payload cannot be reused for another kernel";
        report.add(&["spec", "reuse"], message);
    }
}

/// Reports needs that no image satisfies, and cycles.
pub(super) fn check_all(
    images: &[ParsedImage<'_>],
    definitions: &Definitions,
    errors: &mut Vec<DefinitionError>,
) {
    for ParsedImage { file, document, image } in images {
        let mut report = Report { file, document, errors };
        for (index, need) in image.spec.needs.iter().enumerate() {
            if let Some(message) = mistake_in_need(image, need, definitions) {
                report.add(&["spec", "needs", &index.to_string()], message);
            }
        }
    }
}

fn mistake_in_need(image: &DriverImage, need: &Need, definitions: &Definitions) -> Option<String> {
    let name = need.image().filter(|name| **name != image.metadata.name)?;
    let Some(needed) = definitions.images.get(name) else {
        let known: Vec<&str> = definitions.images.keys().map(ImageName::as_str).collect();
        let file = format!("{name}.yaml");
        let built_in_hint = builtin::IMAGES.get_file(&file).map(|_| {
            format!(
                " (farrier's built-in images/{file} is ignored because the definitions have an `images/`: copy it there)"
            )
        });
        return Some(format!(
            "there is no driver image {:?}; known: {}{}",
            name.as_str(),
            known.join(", "),
            built_in_hint.unwrap_or_default()
        ));
    };
    if let Some(cycle) = find_cycle(&definitions.images, &image.metadata.name)
        && cycle.get(1) == Some(name)
        // Report the cycle for only one of its images.
        && cycle.iter().min() == Some(&image.metadata.name)
    {
        let cycle: Vec<&str> = cycle.iter().map(ImageName::as_str).collect();
        return Some(format!("images need each other in a cycle: {}", cycle.join(" -> ")));
    }
    needed.spec.exposes.is_empty().then(|| {
        let why = match needed.spec.output {
            Output::Image => "the engine makes it (output: image)",
            Output::Payload => "it has no `exposes`",
        };
        format!("driver image {:?} exposes nothing that another image could need: {why}", name.as_str())
    })
}
