//! Renders the text of a definition, with comments that explain each field to a newcomer.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use farrier_core::{
    image::OperatorResource,
    plan::{DaemonSetFacts, NodeFacts, NodeReach},
    text::is_deceptive,
};
use farrier_yaml::is_other_type;
use handlebars::Handlebars;
use serde::Serialize;
use serde_json::{Value, json};

use super::{Context, Remark, name_for};

/// Maximum number of DaemonSets that a draft offers for its rollout.
const MAX_CHOICES: usize = 8;

/// Templates that quote every value as YAML requires.
static TEMPLATES: LazyLock<Handlebars<'_>> = LazyLock::new(|| {
    let mut templates = Handlebars::new();
    templates.register_escape_fn(quoted);
    // The templates are constants of this program, and tests render them.
    let _ = templates.register_template_string("image", include_str!("forms/image.yaml.hbs"));
    let _ = templates.register_template_string("rollout", include_str!("forms/rollout.hbs"));
    let _ = templates.register_template_string("daemon-set", include_str!("forms/daemon-set.hbs").trim_end());
    templates
});

/// Content of a definition to write. Texts are taken from other tools unchecked; the rendered definition is
/// parsed before anything is written.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Draft {
    /// The object or file that the definition is made from.
    pub origin: String,
    pub name: String,
    pub version: String,
    pub template: &'static str,
    pub vars: BTreeMap<&'static str, String>,
    /// Source of the driver, if known: the field `from` of a definition.
    pub from: Option<Value>,
    /// Hint about the source, shown when the user has to name it.
    pub hint: String,
    pub build_packages: &'static [&'static str],
    /// Labels of the nodes that need the image; empty for all nodes.
    pub nodes: BTreeMap<String, String>,
    pub kernels: Option<String>,
    pub release: Option<String>,
    /// Modules in load order.
    pub modules: Vec<String>,
    /// Names of the modules' files without extension, if they may differ.
    pub files: Vec<String>,
    /// Comments about values that a definition cannot have.
    pub undecided: Vec<String>,
    /// Whether the container itself loads the modules.
    pub loads: bool,
    /// Tag pattern, if it is not the default one.
    pub tags: Vec<String>,
    /// A variant that `forms/rollout.hbs` knows; `None` if the image is only published.
    pub rollout: Option<Value>,
    /// Rollouts to choose from if `rollout` is `None`.
    pub choices: Vec<Value>,
}

/// A field of a draft, and the function that resets it.
type Reset = (&'static str, fn(&mut Draft));

/// Fields whose values come from other tools unchecked, and without which a definition is valid. `nodes` is not among them: a
/// definition without `nodes` would select every node.
const RESETS: [Reset; 5] = [
    ("kernels", |draft| draft.kernels = None),
    ("release", |draft| draft.release = None),
    ("modules", |draft| (draft.modules, draft.files) = (Vec::new(), Vec::new())),
    ("tags", |draft| draft.tags.clear()),
    ("version", |draft| "1.0".clone_into(&mut draft.version)),
];

impl Draft {
    /// Resets the fields that `check` rejects, and leaves a comment about each. Fails with the last reason if the text stays
    /// invalid. The reasons of `check` must not contain positions in the text, because a reset moves these.
    pub fn reset_invalid_fields(&mut self, check: impl Fn(&str) -> Result<(), String>) -> Result<(), String> {
        // Two rounds: a reset can reveal the mistake in a field that was tried earlier.
        for (field, reset) in RESETS.into_iter().chain(RESETS) {
            let Err(reason) = check(&self.text()?) else { return Ok(()) };
            let mut changed = self.clone();
            reset(&mut changed);
            // A reset of the invalid field removes this reason, but another reason may follow.
            if check(&changed.text()?).err().as_ref() != Some(&reason) {
                let reason: String = reason.chars().filter(|c| !is_deceptive(*c)).collect();
                changed.undecided.push(format!("{field}: {reason}"));
                *self = changed;
            }
        }
        check(&self.text()?)
    }

    /// Renders the file's text.
    pub fn text(&self) -> Result<String, String> {
        TEMPLATES.render("image", self).map_err(|error| error.to_string())
    }
}

/// Converts `apt:PACKAGE@SUITE`, `https://...#sha256=HEX`, or a path to the value of the field `from`.
pub fn source(text: &str) -> Result<Value, String> {
    if let Some(package) = text.strip_prefix("apt:") {
        let parts = package.split_once('@');
        let (package, suite) =
            parts.ok_or_else(|| format!("{text:?} has no suite: write apt:PACKAGE@SUITE"))?;
        return Ok(json!({"apt": {"package": package, "suites": [suite]}}));
    }
    if !text.starts_with("https://") && !text.starts_with("http://") {
        return Ok(json!({"path": {"path": text}}));
    }
    let parts = text.split_once("#sha256=");
    let (url, sha256) = parts
        .ok_or_else(|| format!("{text:?} has no checksum, as printed by sha256sum: {text}#sha256=HEX"))?;
    Ok(json!({"url": {"url": url, "sha256": sha256}}))
}

impl Context {
    /// Returns a draft with the defaults of all forms.
    pub fn draft(&self, origin: &str, name: String) -> Draft {
        Draft {
            origin: origin.to_owned(),
            version: "1.0".to_owned(),
            template: "kbuild",
            vars: [("directory", ".".to_owned()), ("makeArgs", String::new())].into(),
            rollout: self.rollout(&name),
            choices: self.choices(&name),
            nodes: self
                .daemon_set(&name)
                .map_or_else(BTreeMap::new, |(facts, _)| facts.placement.node_selector.clone()),
            loads: true,
            name,
            ..Draft::default()
        }
    }

    /// Returns the DaemonSets without an owner that run the image, and their containers with the image. A DaemonSet matches if
    /// one of its images has `name` as last path component, or else if the DaemonSet itself has this name.
    fn daemon_sets(&self, name: &str) -> Vec<(&DaemonSetFacts, Vec<String>)> {
        let is_last = |image: &str| {
            let last = image.rsplit('/').next().unwrap_or_default();
            last.split(['@', ':']).next() == Some(name)
        };
        let containers = |facts: &DaemonSetFacts| -> Option<Vec<String>> {
            let by_image = facts.containers.iter().find(|container| is_last(&container.image));
            let chosen = by_image.or_else(|| facts.containers.last().filter(|_| facts.name == name))?;
            let same_image = facts.containers.iter().filter(|container| container.image == chosen.image);
            Some(same_image.map(|container| container.name.clone()).collect())
        };
        self.unowned().filter_map(|facts| Some((facts, containers(facts)?))).collect()
    }

    /// Returns the DaemonSets that no operator owns.
    fn unowned(&self) -> impl Iterator<Item = &DaemonSetFacts> {
        self.daemon_sets.iter().filter(|facts| facts.owner.is_none())
    }

    /// Returns the only DaemonSet that runs the image; `None` if none or several do.
    fn daemon_set(&self, name: &str) -> Option<(&DaemonSetFacts, Vec<String>)> {
        <[_; 1]>::try_from(self.daemon_sets(name)).ok().map(|[daemon_set]| daemon_set)
    }

    /// Returns the image's name for a source tree: the tree's name, or the name of its only module if only that name has a
    /// `daemon_set`.
    pub fn image_name(&self, tree: &str, modules: &[String]) -> String {
        let by_tree = name_for(tree);
        match modules {
            [module] if self.daemon_set(&by_tree).is_none() => {
                let by_module = name_for(module);
                if self.daemon_set(&by_module).is_some() { by_module } else { by_tree }
            }
            _ => by_tree,
        }
    }

    /// Returns a rollout to the DaemonSet that runs the image.
    pub fn rollout(&self, name: &str) -> Option<Value> {
        let (facts, containers) = self.daemon_set(name)?;
        Some(json!({"daemonSet": self.rollout_to(facts, &containers)}))
    }

    /// Returns a rollout to an operator's resource, if the cluster has it.
    pub fn rollout_to_resource(&self, kind: OperatorResource, namespace: Option<&str>, name: &str) -> Value {
        if self.in_cluster {
            json!({"resource": {"kind": kind, "namespace": namespace, "name": name}})
        } else {
            json!({"tag": kind})
        }
    }

    /// Returns the DaemonSets from which a user has to choose: the matching ones, or all if none matches, with similar names first.
    /// farrier never chooses by a similar name, because the rollout could replace another program.
    fn candidates(&self, name: &str) -> Vec<(&DaemonSetFacts, Vec<String>)> {
        let mut candidates = self.daemon_sets(name);
        if candidates.is_empty() {
            let container = |facts: &DaemonSetFacts| Some(vec![facts.containers.last()?.name.clone()]);
            candidates.extend(self.unowned().filter_map(|facts| Some((facts, container(facts)?))));
            let is_similar = |facts: &DaemonSetFacts| {
                name.split('-').any(|word| word.len() > 2 && facts.name.contains(word))
            };
            candidates.sort_by_key(|(facts, _)| !is_similar(facts));
        }
        candidates.truncate(MAX_CHOICES);
        candidates
    }

    /// Returns the rollouts to choose from if the DaemonSet that runs the image is not known.
    pub fn choices(&self, name: &str) -> Vec<Value> {
        let candidates = self.candidates(name).into_iter();
        candidates.map(|(facts, containers)| self.rollout_to(facts, &containers)).collect()
    }

    /// Returns a remark about an image without a rollout to a DaemonSet.
    pub fn without_daemon_set(&self, name: &str) -> Remark {
        let mut says = format!("no single DaemonSet is named {name} or runs an image of this name");
        for (index, (facts, containers)) in self.candidates(name).iter().enumerate() {
            says += if index == 0 { "; choose one, such as " } else { ", " };
            says.extend([&facts.namespace, "/", &facts.name, " (container ", &containers.join(", "), ")"]);
        }
        Remark::of_image(name, "rollout", "publish-only", says)
    }

    /// Returns a rollout to a DaemonSet, with a copy for each kernel if its nodes run several kernels.
    fn rollout_to(&self, facts: &DaemonSetFacts, containers: &[String]) -> Value {
        let is_reached = |node: &&NodeFacts| facts.placement.reach(node, false) == NodeReach::Reached;
        let reached = self.nodes.iter().filter(is_reached);
        let kernels: BTreeSet<&str> = reached.map(|node| node.kernel_version.as_str()).collect();
        let strategy = if kernels.len() > 1 { "per-kernel" } else { "image" };
        let DaemonSetFacts { namespace, name, .. } = facts;
        let mut rollout = json!({"strategy": strategy, "namespace": namespace, "name": name});
        match containers {
            [container] => rollout["container"] = container.as_str().into(),
            _ => rollout["containers"] = containers.into(),
        }
        rollout
    }
}

/// Renders the field `rollout`, with a comment.
pub fn rollout_text(rollout: Option<&Value>, choices: &[Value]) -> Result<String, String> {
    let fields = json!({"rollout": rollout, "choices": choices});
    TEMPLATES.render("rollout", &fields).map_err(|error| error.to_string())
}

/// Formats a text as a YAML scalar, unquoted only if no reader could take it for another type.
pub fn quoted(text: &str) -> String {
    let is_bare = text.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '.' | '/'))
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
        && !is_other_type(text);
    // A JSON string is also a YAML string.
    if is_bare { text.to_owned() } else { json!(text).to_string() }
}
