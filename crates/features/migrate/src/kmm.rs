//! Drafts a definition from a `Module` of the Kernel Module Management operator
//! (`kmm.sigs.x-k8s.io/v1beta1`). Fields and variables follow its `api/v1beta1/module_types.go` and
//! `internal/utils/replaceStrings.go` of summer 2026. KMM continues to load the modules; farrier builds the
//! images under the tags that KMM expects.

use farrier_core::{
    definition::checked::{DnsLabel, DnsName},
    image::{OperatorResource, Tag},
    kernel::{KernelLabel, Pattern},
};
use farrier_yaml::Node;

use super::{
    Context, Drafted,
    fields::{self, Remark, text_at, texts_at, value_at},
    name_for,
};

/// Variable that a tag pattern contains for the kernel.
const LABEL: &str = "{{kernel_label}}";

/// Drafts the definition of a Module.
pub fn draft(drafted: &mut Drafted, module: &Node, context: &Context) {
    let own_name = text_at(module, "metadata.name").unwrap_or_default();
    let namespace = text_at(module, "metadata.namespace").unwrap_or_else(|| "default".to_owned());
    let name = name_for(&own_name);
    let origin = format!("Module {name}");
    let mut remarks = fields::remarks(&origin, "", fields::leaves(module), include_str!("forms/kmm.txt"));
    let path = |field: &str| format!("spec.moduleLoader.container.{field}");
    let mut reject = |field: &str, says: &'static str| {
        remarks.push(Remark { origin: origin.clone(), field: path(field), becomes: None, says: says.into() });
    };
    let mut draft = context.draft(&origin, name);
    (draft.loads, draft.choices) = (false, Vec::new());
    let is_valid = own_name.parse::<DnsName>().is_ok() && namespace.parse::<DnsLabel>().is_ok();
    draft.rollout =
        is_valid.then(|| context.rollout_to_resource(OperatorResource::Module, Some(&namespace), &own_name));
    "what its Dockerfile fetches".clone_into(&mut draft.hint);
    let mappings = value_at(module, &path("kernelMappings"));
    let mappings: Vec<Node> = mappings.iter().filter_map(Node::items).flatten().collect();
    // Each image gets the tags of all mappings.
    for mapping in &mappings {
        let image = text_at(mapping, "containerImage").or_else(|| text_at(module, &path("containerImage")));
        match name_and_tag(module, &image.unwrap_or_default(), text_at(mapping, "literal").as_deref()) {
            Some((name, tag)) if draft.tags.is_empty() || name == draft.name => {
                draft.name = name;
                draft.tags.extend((!draft.tags.contains(&tag)).then_some(tag));
            }
            Some(_) => {
                reject("containerImage", "another name than the first mapping's: a definition has one name");
            }
            None => reject(
                "containerImage",
                "it is not of the form NAME:...${KERNEL_FULL_VERSION}..., nor NAME:...KERNEL... for a literal kernel",
            ),
        }
    }
    draft.version = text_at(module, &path("version")).unwrap_or(draft.version);
    // KMM loads `moduleName` after its dependencies. `modulesLoadingOrder` lists each module before its
    // dependencies, so the order is reversed.
    draft.modules = texts_at(module, &path("modprobe.modulesLoadingOrder"));
    draft.modules.reverse();
    let loaded = text_at(module, &path("modprobe.moduleName")).filter(|name| !draft.modules.contains(name));
    draft.modules.extend(loaded);
    draft.nodes.clear();
    for (key, value) in value_at(module, "spec.selector").iter().filter_map(Node::entries).flatten() {
        let text = |node: &Node| node.scalar().map_or_else(String::new, |scalar| scalar.text.clone());
        draft.nodes.insert(text(key), text(value));
    }
    draft.release = release(&mappings);
    if draft.release.take_if(|release| Pattern::try_from(release.clone()).is_err()).is_some() {
        reject("regexp", "farrier does not support this expression: write `release` yourself");
    }
    drafted.remarks.extend(remarks);
    let image = |tag: &str| {
        format!("{}/{}:{}", context.registry, draft.name, tag.replace(LABEL, "${KERNEL_FULL_VERSION}"))
    };
    let images: Vec<String> = draft.tags.iter().map(|tag| image(tag)).collect();
    let images = if images.is_empty() { image("TAG") } else { images.join(" or ") };
    let (set, after) = match &draft.rollout {
        Some(rollout) if rollout.get("resource").is_some() => {
            (String::new(), "; farrier then sets its images")
        }
        _ => (format!("containerImage to {images} and "), ""),
    };
    drafted.by_hand.push(format!(
        "once images are published, in {origin}: set {set}modprobe.dirName to /, and remove build and sign{after}"
    ));
    drafted.add(draft, context);
}

/// Combines the kernels of all mappings into one expression that matches a whole release. Returns `None` if
/// the mappings cover every kernel. KMM's expressions match a part of the release.
fn release(mappings: &[Node]) -> Option<String> {
    let mut all = Vec::new();
    for mapping in mappings {
        let part = match (text_at(mapping, "literal"), text_at(mapping, "regexp")) {
            (Some(literal), _) => regex::escape(&literal),
            (None, Some(part)) if matches!(part.trim_matches(['^', '$']), ".*" | ".+") => return None,
            (None, Some(part)) => match part.strip_prefix('^').and_then(|part| part.strip_suffix('$')) {
                Some(inner) if !inner.contains('|') && !inner.ends_with('\\') => inner.to_owned(),
                _ => format!(".*({part}).*"),
            },
            (None, None) => continue,
        };
        all.push(part);
    }
    (!all.is_empty()).then(|| all.join("|"))
}

/// Returns the name and tag pattern of a `containerImage` whose tag names the kernel. The name is the last path component.
fn name_and_tag(module: &Node, image: &str, literal: Option<&str>) -> Option<(String, String)> {
    // A line feed is the temporary placeholder for the kernel, because no valid image name contains one.
    let value = |name: &str| text_at(module, name).unwrap_or_default();
    let image = [
        ("MOD_NAMESPACE", value("metadata.namespace")),
        ("MOD_NAME", value("metadata.name")),
        ("KERNEL_FULL_VERSION", "\n".to_owned()),
        ("KERNEL_VERSION", "\n".to_owned()),
    ]
    .into_iter()
    .fold(image.to_owned(), |image, (variable, value)| {
        image.replace(&format!("${{{variable}}}"), &value).replace(&format!("${variable}"), &value)
    });
    let (repository, tag) = image.rsplit_once(':')?;
    let kernel = literal.and_then(|literal| KernelLabel::of(&literal.parse().ok()?));
    let tag = kernel.map_or(tag.to_owned(), |kernel| tag.replace(kernel.as_str(), "\n"));
    tag.replace('\n', "k").parse::<Tag>().ok()?;
    let name = name_for(repository.rsplit('/').next()?);
    tag.contains('\n').then(|| (name, tag.replace('\n', LABEL)))
}
