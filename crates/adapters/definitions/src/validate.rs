//! Validates definitions beyond single values: existing and unique names, and references between fields.

use std::collections::BTreeMap;

use farrier_core::{
    image::{
        DriverImage, ImageName, OnConflict, Output, Reuse, RunfileSpec, RuntimeBase, SourceOrigin,
        SourceSpec, VersionSpec, sources_in,
    },
    kernel::{Architecture, KernelFamily, KernelImageSource, KernelTarget, KernelTrack, Toolchain},
    template,
};
use farrier_store as store;
use farrier_yaml::{Position, YamlError};

use super::{DefinitionError, File, error::Report, needs};

/// Reports mistakes in an image.
pub(super) fn image(report: &mut Report<'_>, image: &DriverImage, templates: &BTreeMap<String, String>) {
    let spec = &image.spec;
    if store::is_reserved(image.metadata.name.as_str()) {
        let message = format!(
            "{:?} is reserved for one of farrier's repositories: choose another name",
            image.metadata.name.as_str()
        );
        report.add(&["metadata", "name"], message);
    }
    if !templates.contains_key(spec.template.as_str()) {
        let known: Vec<&str> = templates.keys().map(String::as_str).collect();
        let message = format!("there is no template {:?}; known: {}", spec.template, known.join(", "));
        report.add(&["spec", "template"], message);
    }
    if let VersionSpec::FromSource { source } = &spec.version {
        let is_apt = |s: &SourceSpec| {
            s.name.as_str() == source && matches!(s.from, SourceOrigin::Apt(_)) && !s.differs_by_kernel()
        };
        if !spec.sources.iter().any(is_apt) {
            let message = format!(
                "there is no `apt` source {source:?} that is the same for all kernels to take the version from"
            );
            report.add(&["spec", "version", "source"], message);
        }
    }
    for (index, source) in spec.sources.iter().enumerate() {
        if spec.sources[..index].iter().any(|earlier| earlier.name == source.name) {
            let message = format!("source {:?} is already listed", source.name.as_str());
            report.add(&["spec", "sources", &index.to_string(), "name"], message);
        }
        if matches!(source.from, SourceOrigin::Image(_))
            && (source.unpack.is_some() || source.subdir.is_some())
        {
            let message = "for a source from an image, `from.image.path` selects the part to use";
            report.add(&["spec", "sources", &index.to_string()], message);
        }
    }
    if let Some(message) = spec.runtime.invalid_operand() {
        report.add(&["spec", "runtime", "entrypoint"], message);
    }
    if let Some((index, message)) = spec.runtime.mistyped_module(&spec.modules) {
        report.add(&["spec", "runtime", "entrypoint", &index.to_string()], message);
    }
    git_sources(report, image);
    firmware(report, image, templates);
    if let Some(RuntimeBase::Runfile(runfile)) = &spec.runtime.base {
        let RunfileSpec { source, archives, .. } = runfile.spec();
        for name in [source].into_iter().chain(archives) {
            if spec.sources.iter().all(|known| known.name != name || known.differs_by_kernel()) {
                let message =
                    format!("{:?} is not among `sources` that are the same for all kernels", name.as_str());
                report.add(&["spec", "runtime", "base", "runfile"], message);
            }
        }
    }
    for (index, module) in spec.modules.iter().enumerate() {
        if spec.modules[..index].contains(module) {
            let message = format!("module {module:?} is already listed");
            report.add(&["spec", "modules", &index.to_string()], message);
        }
    }
    if let Some(index) = spec.build_packages.iter().position(|package| package.contains("{{")) {
        report.add(&["spec", "buildPackages", &index.to_string()], NO_VERSION);
    }
    if spec.output == Output::Image && spec.reuse == Reuse::Compatible {
        let message = "an image that the engine makes (output: image) has its kernel's name in its layers; only a payload can be reused";
        report.add(&["spec", "reuse"], message);
    }
    if spec.output == Output::Image && !spec.outputs.is_empty() {
        let message = "an image that the engine makes (output: image) has no payload to make outputs from";
        report.add(&["spec", "outputs"], message);
    }
    for (index, patch) in spec.patches.iter().enumerate() {
        if patch.path.file_name().is_none() {
            let message = format!("{:?} has no file name", patch.path.display().to_string());
            report.add(&["spec", "patches", &index.to_string(), "path"], message);
        }
    }
    needs::check_image(report, image);
}

/// Reports firmware from unknown sources, and firmware that the template would not copy.
fn firmware(report: &mut Report<'_>, image: &DriverImage, templates: &BTreeMap<String, String>) {
    let spec = &image.spec;
    for (index, entry) in spec.firmware.iter().enumerate() {
        if spec.sources.iter().all(|source| source.name != entry.source) {
            let message = format!("{:?} is not among `sources`", entry.source.as_str());
            report.add(&["spec", "firmware", &index.to_string(), "source"], message);
        }
    }
    let template = templates.get(spec.template.as_str()).filter(|text| !text.contains("firmware"));
    if template.is_some() && !spec.firmware.is_empty() {
        let message = format!(
            "template {} copies no firmware: add `{{{{#each firmware}}}}`, `COPY {{{{this}}}}` and `{{{{/each}}}}` to it",
            spec.template
        );
        report.add(&["spec", "firmware"], message);
    }
}

/// Reports sources from Git without a commit, and tags that the next commit of a branch would conflict with.
fn git_sources(report: &mut Report<'_>, image: &DriverImage) {
    let spec = &image.spec;
    let git = |source: &SourceSpec| match &source.from {
        SourceOrigin::Git(git) => Some(git.clone()),
        _ => None,
    };
    for (index, source) in spec.sources.iter().enumerate() {
        if git(source).is_some_and(|git| git.reference.is_none() && git.commit.is_none()) {
            let path = ["spec", "sources", &index.to_string(), "from", "git"];
            report.add(&path, "set `ref` (`refs/tags/v1.0`, `refs/heads/main`), `commit`, or both");
        }
    }
    let follows_branch = |source: &&SourceSpec| git(source).is_some_and(|git| git.follows_branch());
    let moving =
        spec.sources.iter().filter(follows_branch).filter(|_| spec.on_conflict == OnConflict::Refuse);
    let moving: Vec<&str> = moving.map(|source| source.name.as_str()).collect();
    for (index, pattern) in spec.tags.iter().enumerate() {
        let path = ["spec", "tags", &index.to_string()];
        let used = sources_in(pattern);
        let is_git =
            |name: &str| spec.sources.iter().any(|source| source.name == name && git(source).is_some());
        if let Some(name) = used.iter().find(|name| !is_git(name)) {
            report.add(&path, format!("{name:?} is not a `git` source of `sources`"));
        }
        if let Some(name) = moving.iter().find(|name| !used.contains(name)) {
            let message = format!(
                "source {name:?} follows a branch, so the next commit would conflict with this tag: add \
                 `{{{{sources.{name}.commit}}}}` to it, or set `commit` of the source, or `onConflict: overwrite`"
            );
            report.add(&path, message);
        }
    }
}

/// A toolchain cannot depend on an image's version, because images share toolchains.
const NO_VERSION: &str = "a toolchain has no driver version to substitute for {{version}}";

/// Reports mistakes in a family.
pub(super) fn family(report: &mut Report<'_>, family: &KernelFamily) {
    if let Toolchain::Bootstrap(spec) = &family.spec.toolchain
        && let Some(index) = spec.versioned_package_index()
    {
        let path = ["spec", "toolchain", "bootstrap", "include", &index.to_string()];
        report.add(&path, NO_VERSION);
    }
    let headers = family.spec.headers.rpm_archive();
    let mut archives = Vec::new();
    if let Some(KernelImageSource::Rpm(packages)) = &family.spec.kernel_image {
        archives.push((packages.archive(headers), "kernelImage"));
    }
    if let Some(KernelTrack::Rpm(packages)) = &family.spec.track {
        archives.push((packages.archive(headers), "track"));
    }
    if let Toolchain::Rpm(packages) = &family.spec.toolchain {
        archives.push((packages.archive(headers), "toolchain"));
    }
    for (_, field) in archives.into_iter().filter(|(archive, _)| archive.is_none()) {
        let message = "the headers are not RPM packages: set `from` to the location of these packages";
        report.add(&["spec", field, "rpm"], message);
    }
}

/// Reports a template that is not valid Handlebars.
pub(super) fn template(file: &File, name: &str) -> Option<DefinitionError> {
    let error = template::parse(name, &file.text).err()?;
    Some(in_template(file, error.line, error.reason))
}

/// Creates the mistake. `line` is 0 if unknown.
fn in_template(file: &File, line: usize, message: String) -> DefinitionError {
    if line == 0 {
        return DefinitionError::of_file(&file.name, message);
    }
    DefinitionError::at(file, YamlError { position: Position { line, column: 1 }, message })
}

/// Reports variables of a template that the image does not define, by rendering the template for an example kernel.
pub(super) fn rendering(report: &mut Report<'_>, image: &DriverImage, templates: &BTreeMap<String, String>) {
    let spec = &image.spec;
    let (Some(text), Some(target)) = (templates.get(spec.template.as_str()), example_kernel()) else {
        return;
    };
    let mut context = image.template_context("toolchain", "1.0", &target);
    context.patches = spec.patches.iter().map(|patch| patch.path.display().to_string()).collect();
    if let Err(reason) = template::Templates::default().render_vars(&mut context) {
        report.add(&["spec", "vars"], reason);
        return;
    }
    while let Err(error) = template::render(&spec.template, text, &context) {
        let Some(name) = error.missing_var.filter(|name| !context.vars.contains_key(name)) else {
            let image = image.metadata.name.as_str();
            let file =
                File { name: format!("templates/{}.Dockerfile.hbs", spec.template), text: text.clone() };
            let message = format!("{} for driver image {image:?}", error.reason);
            report.errors.push(in_template(&file, error.line, message));
            return;
        };
        let message = format!("template {} needs {name}; add `{name}: \"\"`, or its value", spec.template);
        report.add(&["spec", "vars"], message);
        context.vars.insert(name, String::new());
    }
}

fn example_kernel() -> Option<KernelTarget> {
    Some(KernelTarget {
        os: "debian".parse().ok()?,
        os_version: "12".parse().ok()?,
        release: "6.1.0-1-amd64".parse().ok()?,
        arch: Architecture::Amd64,
    })
}

/// The names in use, with the file that defines each.
#[derive(Default)]
pub(super) struct Names(BTreeMap<(&'static str, ImageName), String>);

impl Names {
    /// Adds a name, or reports the file that already defines it.
    pub fn claim(&mut self, report: &mut Report<'_>, kind: &'static str, name: &ImageName) {
        if let Some(first) = self.0.insert((kind, name.clone()), report.file.name.clone()) {
            let message = format!("{kind} {:?} is already defined in {first}", name.as_str());
            report.add(&["metadata", "name"], message);
        }
    }
}
