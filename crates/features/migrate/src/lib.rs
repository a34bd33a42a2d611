//! Drafts a definitions directory for `farrier init`, from other tools' files ("forms") and a cluster.
//!
//! Also reports the counterpart of each field of a form.
#![forbid(unsafe_code)]

mod dkms;
mod draft;
mod driverkit;
mod fields;
mod kmm;
mod operators;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde_json::Value;

use draft::rollout_text;
pub use draft::{Draft, source};
use farrier_core::{
    image::OperatorResource,
    plan::{DaemonSetFacts, NodeFacts},
};
use farrier_definitions::shipped_image;
use farrier_yaml as yaml;
use farrier_yaml::{Node, YamlError};
pub use fields::Remark;
use fields::{text_at, value_at};

/// Size limit of a form, in bytes. Real forms have a few KiB.
pub const MAX_FORM: u64 = 1 << 20;

/// The site that the definitions are drafted for.
#[derive(Debug, Default)]
pub struct Context {
    /// Registry and path that images are published to.
    pub registry: String,
    /// The cluster's nodes.
    pub nodes: Vec<NodeFacts>,
    /// The cluster's DaemonSets.
    pub daemon_sets: Vec<DaemonSetFacts>,
    /// Whether the operators' resources were read from the cluster (live or a directory of manifests), so that a rollout can
    /// write them.
    pub in_cluster: bool,
}

/// The result of reading forms.
#[derive(Debug, Default)]
pub struct Drafted {
    /// Definitions that are rendered from a template.
    pub drafts: Vec<Draft>,
    /// Texts of the other files, by their paths below the directory.
    files: BTreeMap<String, String>,
    /// Images whose definition comes from an operator's resource.
    from_resources: BTreeSet<String>,
    /// Counterparts of the forms' fields.
    pub remarks: Vec<Remark>,
    /// Manual steps, each with the time when it has to be done.
    pub by_hand: Vec<String>,
}

impl Drafted {
    /// Drafts definitions of the drivers that a file describes. A `dkms.conf` is recognized by its
    /// assignments; any other file must be YAML. Unrelated documents are skipped. Returns whether the file
    /// describes a driver.
    pub fn read(&mut self, text: &str, path: &Path, context: &Context) -> Result<bool, String> {
        if dkms::is_conf(text) {
            self.add_dkms(None, text, path.parent().unwrap_or(path), context);
            return Ok(true);
        }
        let with_position = |YamlError { position, message }| {
            format!("line {}, column {}: {message}", position.line, position.column)
        };
        let mut describes_driver = false;
        for document in yaml::documents(text).map_err(with_position)? {
            // `kubectl get -o yaml` prints several objects as one list.
            let items = value_at(&document, "items").as_ref().and_then(Node::items).map(Iterator::collect);
            for object in items.unwrap_or_else(|| vec![document]) {
                describes_driver |= self.read_object(&object, context)?;
            }
        }
        Ok(describes_driver)
    }

    fn read_object(&mut self, object: &Node, context: &Context) -> Result<bool, String> {
        let version = text_at(object, "apiVersion").unwrap_or_default();
        let group = version.split('/').next().unwrap_or_default();
        let kind = text_at(object, "kind").unwrap_or_default();
        let has_kind =
            |resource: &OperatorResource| (resource.group(), resource.kind()) == (group, kind.as_str());
        let resource = OperatorResource::TARGETS.into_iter().find(has_kind);
        if resource.is_none() && !driverkit::is_configuration(object) {
            return Ok(false);
        }
        match resource {
            Some(OperatorResource::Module) => kmm::draft(self, object, context),
            Some(resource) => return operators::draft(self, resource, object, context),
            None => driverkit::draft(self, object, context),
        }
        Ok(true)
    }

    /// Drafts the definition of a source tree whose `directory` has kbuild files with the text `kbuild`. Without `name`, the
    /// image is named as [`Context::image_name`] says.
    pub fn add_kbuild(
        &mut self,
        name: Option<&str>,
        top: &Path,
        directory: String,
        kbuild: &str,
        context: &Context,
    ) -> Result<(), String> {
        let kbuild = kbuild.replace("\\\n", " ");
        let assigned = kbuild.lines().filter_map(|line| {
            let value = line.trim_start().strip_prefix("obj-m")?.trim_start();
            value.trim_start_matches([':', '+']).strip_prefix('=')
        });
        let objects =
            assigned.flat_map(|value| value.split('#').next().unwrap_or_default().split_whitespace());
        let modules: BTreeSet<&str> = objects.filter_map(|object| object.strip_suffix(".o")).collect();
        let modules: Vec<String> =
            modules.into_iter().filter(|name| !name.contains('$')).map(str::to_owned).collect();
        if modules.is_empty() {
            return Err("obj-m names no module".to_owned());
        }
        let tree = top.file_name().unwrap_or_default().to_string_lossy();
        let image = name.map_or_else(|| context.image_name(&tree, &modules), name_for);
        let origin = format!("the kbuild directory of {}", name.unwrap_or(&tree));
        let mut draft = context.draft(&origin, image);
        draft.vars.insert("directory", directory);
        draft.from = Some(source(&top.display().to_string())?);
        draft.modules = modules;
        self.add(draft, context);
        Ok(())
    }

    /// Drafts the definition of a `dkms.conf` in a directory of sources. Without `name`, the image is named after the package.
    pub fn add_dkms(&mut self, name: Option<&str>, conf: &str, directory: &Path, context: &Context) {
        dkms::draft(self, name, conf, directory, context);
    }

    /// Adds a draft, with remarks if its container loads the modules, but no DaemonSet for a rollout is known.
    fn add(&mut self, draft: Draft, context: &Context) {
        if draft.loads && draft.rollout.is_none() {
            let says = "set the labels of the nodes that need the driver".to_owned();
            self.remarks.push(context.without_daemon_set(&draft.name));
            self.remarks.push(Remark::of_image(&draft.name, "nodes", "every node", says));
        }
        self.drafts.push(draft);
    }

    /// Adds the shipped definition of an image, and the definitions of the images that it needs.
    pub fn add_shipped(&mut self, name: &str, context: &Context) -> Result<(), String> {
        let rollout = context.rollout(name);
        self.remarks.extend(rollout.is_none().then(|| context.without_daemon_set(name)));
        self.add_image(name, shipped_image(name).unwrap_or_default(), rollout.as_ref(), context)
    }

    /// Adds a definition with its rollout replaced, and the definitions of the images that it needs.
    fn add_image(
        &mut self,
        name: &str,
        text: &str,
        rollout: Option<&Value>,
        context: &Context,
    ) -> Result<(), String> {
        let needs = text.lines().find_map(|line| line.strip_prefix("  needs: [")?.strip_suffix(']'));
        for need in needs.into_iter().flat_map(|needs| needs.split(", ")) {
            // Keep a definition from an operator's resource, because it is more specific than the shipped one.
            if !self.files.contains_key(&format!("images/{need}.yaml")) {
                let text = shipped_image(need).unwrap_or_default();
                self.add_image(need, text, context.rollout(need).as_ref(), context)?;
            }
        }
        // `rollout` is the last field of each shipped definition.
        let body = text.split("  rollout:\n").next().unwrap_or_default().to_owned();
        self.files
            .insert(format!("images/{name}.yaml"), body + &rollout_text(rollout, &context.choices(name))?);
        Ok(())
    }

    /// Adds the definition of an operator's resource. If another resource has the same definition, adds only the rollout.
    fn add_resource(
        &mut self,
        name: &str,
        text: &str,
        rollout: &Value,
        context: &Context,
    ) -> Result<(), String> {
        let path = format!("images/{name}.yaml");
        let is_first = self.from_resources.insert(name.to_owned());
        let earlier = self.files.get(&path).cloned().filter(|_| !is_first);
        self.add_image(name, text, Some(rollout), context)?;
        let (Some(mut joined), Some(new)) = (earlier, self.files.get_mut(&path)) else { return Ok(()) };
        if joined.split("  rollout:\n").next() != new.split("  rollout:\n").next() {
            return Err(two_drivers(name));
        }
        let line = new.lines().last().unwrap_or_default();
        if !joined.lines().any(|other| other == line) {
            joined.extend([line, "\n"]);
        }
        *new = joined;
        Ok(())
    }

    /// Returns the texts of all files, by their paths below the directory.
    pub fn files(&self) -> Result<BTreeMap<String, String>, String> {
        let mut files = self.files.clone();
        files.insert("site.yaml".to_owned(), include_str!("forms/site.yaml").to_owned());
        for draft in &self.drafts {
            if files.insert(format!("images/{}.yaml", draft.name), draft.text()?).is_some() {
                return Err(two_drivers(&draft.name));
            }
        }
        Ok(files)
    }
}

fn two_drivers(image: &str) -> String {
    format!("two drivers would be the image {image}: pass them with --from, each to a separate directory")
}

/// Derives a valid image name from any text.
fn name_for(text: &str) -> String {
    let letters = text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' });
    let name: String = letters.skip_while(|c| *c == '-').take(63).collect();
    let name = name.trim_end_matches('-');
    if name.is_empty() { "driver".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests;
