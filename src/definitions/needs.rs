//! Adapter: what is wrong with the needs of images, among all of them.

use super::{DefinitionError, File, builtin, decode::Mistake, node::Node};
use crate::image::{Definitions, DriverImage, ImageName, Need, Output, Reuse, RuntimeBase, cycle, needs_in};

/// An image with the file and tree that it was read from.
pub(super) struct Read<'a> {
    pub file: &'a File,
    pub document: Node,
    pub image: DriverImage,
}

/// Reports what one image says that cannot be, whatever the others are.
pub(super) fn own(document: &Node, image: &DriverImage) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    let mut wrong = |path: &[&str], message: String| {
        mistakes.push(Mistake { place: document.place_of(path), message });
    };
    let spec = &image.spec;
    for (index, need) in spec.needs.iter().enumerate() {
        let place = ["spec", "needs", &index.to_string()];
        if spec.needs[..index].iter().any(|earlier| earlier.name() == need.name()) {
            wrong(&place, format!("{:?} is needed already", need.name().as_str()));
        } else if need.image() == Some(&image.metadata.name) {
            wrong(&place, format!("{:?} needs itself", image.metadata.name.as_str()));
        }
    }
    let is_need = |name: &str| spec.needs.iter().any(|need| need.name().as_str() == name);
    for (index, pattern) in spec.tags.iter().enumerate() {
        if let Some(name) = needs_in(pattern).into_iter().find(|name| !is_need(name)) {
            wrong(&["spec", "tags", &index.to_string()], format!("{name:?} is not among `needs`"));
        }
    }
    if let Some(RuntimeBase::Need(base)) = &spec.runtime.base
        && !spec.needs.iter().any(|need| need.image() == Some(base))
    {
        let message = format!("{:?} is not among the driver images of `needs`", base.as_str());
        wrong(&["spec", "runtime", "base", "need"], message);
    }
    for (index, path) in spec.exposes.iter().enumerate() {
        if spec.exposes[..index].contains(path) {
            wrong(&["spec", "exposes", &index.to_string()], format!("{path:?} is exposed already"));
        }
    }
    if spec.check.boot && spec.needs.iter().any(|need| need.image().is_none()) {
        let message = "the virtual machine of the boot check would not have the modules of a host's tree";
        wrong(&["spec", "check", "boot"], message.to_owned());
    }
    if spec.output == Output::Image && !spec.exposes.is_empty() {
        let message =
            "an image that the engine makes (output: image) has no payload that could expose something";
        wrong(&["spec", "exposes"], message.to_owned());
    }
    if spec.reuse == Reuse::Compatible && !spec.exposes.is_empty() {
        let message = "what is exposed has the symbol versions of one kernel in it, so that its payload cannot be \
                       reused for another";
        wrong(&["spec", "reuse"], message.to_owned());
    }
    mistakes
}

/// Reports needs that no image covers, or only in a circle.
pub(super) fn among(images: &[Read<'_>], definitions: &Definitions) -> Vec<DefinitionError> {
    let of_image = |read: &Read<'_>| -> Vec<DefinitionError> {
        let Read { file, document, image } = read;
        let needs = image.spec.needs.iter().enumerate();
        let mistakes = needs.filter_map(|(index, need)| {
            let message = mistake(image, need, definitions)?;
            let place = document.place_of(&["spec", "needs", &index.to_string()]);
            Some(DefinitionError::at(file, Mistake { place, message }))
        });
        mistakes.collect()
    };
    images.iter().flat_map(of_image).collect()
}

fn mistake(image: &DriverImage, need: &Need, definitions: &Definitions) -> Option<String> {
    let name = need.image().filter(|name| **name != image.metadata.name)?;
    let Some(needed) = definitions.images.get(name) else {
        let known: Vec<&str> = definitions.images.keys().map(ImageName::as_str).collect();
        let hidden = format!("{name}.yaml");
        let hidden = builtin::IMAGES.get_file(&hidden).map(|_| {
            format!(
                " (farrier's own images/{hidden} does not count beside an `images/` of yours: copy it there)"
            )
        });
        return Some(format!(
            "there is no driver image {:?}; there is {}{}",
            name.as_str(),
            known.join(", "),
            hidden.unwrap_or_default()
        ));
    };
    if let Some(way) = cycle(&definitions.images, &image.metadata.name)
        && way.get(1) == Some(name)
        // One of the circle's images is enough to tell it.
        && way.iter().min() == Some(&image.metadata.name)
    {
        let way: Vec<&str> = way.iter().map(ImageName::as_str).collect();
        return Some(format!("images need one another in a circle: {}", way.join(" -> ")));
    }
    needed.spec.exposes.is_empty().then(|| {
        let why = match needed.spec.output {
            Output::Image => "the engine makes it (output: image)",
            Output::Payload => "it has no `exposes`",
        };
        format!("driver image {:?} exposes nothing that could be needed: {why}", name.as_str())
    })
}
