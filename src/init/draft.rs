//! Pure: the text of a definition, with what a newcomer should know of each field.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use handlebars::Handlebars;
use serde::Serialize;
use serde_json::{Value, json};

use super::Context;
use crate::{plan::DaemonSetFacts, yaml::is_other_type};

/// Every value is quoted as YAML wants it.
static TEMPLATES: LazyLock<Handlebars<'_>> = LazyLock::new(|| {
    let mut templates = Handlebars::new();
    templates.register_escape_fn(quoted);
    // Text of this program, which tests render.
    let _ = templates.register_template_string("image", include_str!("forms/image.yaml.hbs"));
    let _ = templates.register_template_string("rollout", include_str!("forms/rollout.hbs"));
    templates
});

/// What a definition is to say. Its texts are as other tools have them: the whole is read back before it is written anywhere.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Draft {
    /// From what it was made.
    pub origin: String,
    pub name: String,
    pub version: String,
    pub template: &'static str,
    pub vars: BTreeMap<&'static str, String>,
    /// Where its source is, if it is known: the field `from` of a definition.
    pub from: Option<Value>,
    /// Where its source is known to be, for those who are asked for it.
    pub hint: String,
    pub build_packages: &'static [&'static str],
    /// Labels of the nodes that it is for; empty for all.
    pub nodes: BTreeMap<String, String>,
    pub kernels: Option<String>,
    pub release: Option<String>,
    /// In the order in which they are loaded.
    pub modules: Vec<String>,
    /// Does the container load the modules itself?
    pub loads: bool,
    /// The pattern of the tag, where it is not the default one.
    pub tag: Option<String>,
    /// One of those of `forms/rollout.hbs`; nothing where the image is only published.
    pub rollout: Option<Value>,
}

impl Draft {
    /// The file's text.
    pub fn text(&self) -> Result<String, String> {
        TEMPLATES.render("image", self).map_err(|error| error.to_string())
    }
}

/// What `apt:PACKAGE@SUITE`, `https://...#sha256=HEX`, or a path becomes in the field `from`.
pub fn source(text: &str) -> Result<Value, String> {
    if let Some(package) = text.strip_prefix("apt:") {
        let parts = package.split_once('@');
        let (package, suite) = parts.ok_or_else(|| format!("{text:?} names no suite: apt:PACKAGE@SUITE"))?;
        return Ok(json!({"apt": {"package": package, "suites": [suite]}}));
    }
    if !text.starts_with("https://") && !text.starts_with("http://") {
        return Ok(json!({"path": {"path": text}}));
    }
    let says = "has no checksum, as sha256sum prints it";
    let parts = text.split_once("#sha256=");
    let (url, sha256) = parts.ok_or_else(|| format!("{text:?} {says}: {text}#sha256=HEX"))?;
    Ok(json!({"url": {"url": url, "sha256": sha256}}))
}

impl Context {
    /// What holds for every draft, unless its form says otherwise.
    pub fn draft(&self, origin: &str, name: String) -> Draft {
        Draft {
            origin: origin.to_owned(),
            version: "1.0".to_owned(),
            template: "kbuild",
            vars: [("directory", ".".to_owned()), ("makeArgs", String::new())].into(),
            rollout: self.rollout(&name),
            loads: true,
            name,
            ..Draft::default()
        }
    }

    /// The rollout to the one DaemonSet without an owner that runs this image, by the last part of its name or by its own; nothing
    /// where there are several, or none.
    pub fn rollout(&self, name: &str) -> Option<Value> {
        let is_last = |image: &str| {
            let last = image.rsplit('/').next().unwrap_or_default();
            last.split(['@', ':']).next() == Some(name)
        };
        let container = |found: &DaemonSetFacts| {
            let own = found.containers.iter().find(|container| is_last(&container.image));
            let own = own.or_else(|| found.containers.last().filter(|_| found.name == name))?;
            Some(own.name.clone())
        };
        let free = self.daemon_sets.iter().filter(|found| found.owner.is_none());
        let mut fitting = free.filter_map(|found| Some((found, container(found)?)));
        let (Some((found, container)), None) = (fitting.next(), fitting.next()) else { return None };
        let reached = self.nodes.iter().filter(|node| found.reaches(node) == Some(true));
        let kernels: BTreeSet<&str> = reached.map(|node| node.kernel_version.as_str()).collect();
        let strategy = if kernels.len() > 1 { "per-kernel" } else { "image" };
        let DaemonSetFacts { namespace, name, .. } = found;
        Some(json!({"daemonSet": {
            "strategy": strategy, "namespace": namespace, "name": name, "container": container,
        }}))
    }
}

/// The field `rollout`, with a comment.
pub fn rollout_text(rollout: Option<&Value>) -> Result<String, String> {
    TEMPLATES.render("rollout", &json!({"rollout": rollout})).map_err(|error| error.to_string())
}

/// A text as YAML: bare where nothing could take it for something else.
pub fn quoted(text: &str) -> String {
    let is_bare = text.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '.' | '/'))
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
        && !is_other_type(text);
    // JSON's strings are YAML's.
    if is_bare { text.to_owned() } else { json!(text).to_string() }
}
