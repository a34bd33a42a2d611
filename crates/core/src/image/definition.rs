//! The definition of a driver image (`images/*.yaml`), and the collection of all definitions.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use farrier_yaml::similar;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::{
    BuildSpec, FirmwareSpec, HostOutput, KernelVars, MinimalSpec, Need, PatchSpec, Redistribute, RolloutSpec,
    RunfileBase, SourceSpec, VersionSpec, kernel_condition::KernelCondition, tag,
};
use crate::{
    definition::{
        ApiVersion, BootstrapSpec, Metadata, NonEmpty, ParseError,
        checked::{
            Argument, EnvName, ExposedPath, ImageName, LabelKey, LabelValue, LicenseExpression, ModuleName,
            OneLine, PackageToInstall, Reference, RpmName, TemplateName, VariableName, to_strings,
        },
        is_default,
    },
    kernel::{AnnouncedKernels, HeaderText, KernelFamily, KernelRange, KernelTarget, Pattern, Toolchain},
    site::SiteSpec,
    template::TemplateContext,
};

/// One file in `images/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverImage {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `DriverImage`.
    pub kind: DriverImageKind,
    /// The image's name.
    pub metadata: Metadata,
    /// The specification.
    pub spec: DriverImageSpec,
}

impl DriverImage {
    /// Returns the template's variables for this version and kernel. Patches are not included.
    pub fn template_context(&self, toolchain: &str, version: &str, target: &KernelTarget) -> TemplateContext {
        let Self { metadata, spec, .. } = self;
        let mut context = TemplateContext::new(toolchain, (metadata.name.as_str(), version), target);
        context.modules = to_strings(&spec.modules);
        let is_firmware = |name: &ImageName| {
            spec.firmware.iter().any(|entry| entry.source == *name && entry.path.is_none())
        };
        let compiled = spec.sources.iter().filter(|source| !is_firmware(&source.name));
        context.sources = compiled.map(|source| source.name.to_string()).collect();
        context.firmware = spec.firmware.iter().map(FirmwareSpec::copy_words).collect();
        context.needs = spec.needs.iter().map(|need| need.name().to_string()).collect();
        context.vars = spec.vars.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        context
    }
}

/// The only valid value of an image's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DriverImageKind {
    /// `DriverImage`.
    DriverImage,
}

/// Build and rollout settings of a driver image.
#[serde_with::apply(Vec => #[serde(default, skip_serializing_if = "Vec::is_empty")])]
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverImageSpec {
    /// The driver's version.
    pub version: VersionSpec,
    /// The template's name: `templates/<template>.Dockerfile.hbs`.
    pub template: TemplateName,
    /// Values for the template, available as `{{vars.<name>}}`. A value may use the other variables, such as
    /// `KVER={{kernel.release}}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vars: BTreeMap<VariableName, OneLine>,
    /// Overrides of `vars` for some kernels. All entries that match a kernel apply; later entries override earlier ones.
    pub kernel_vars: Vec<KernelVars>,
    /// Inputs to compile. Each is available in the build context as `sources/<name>/`.
    pub sources: Vec<SourceSpec>,
    /// Patches, in order. Those for the kernel are available as `patches/<number>-<file name>`. Entries with the same path are
    /// one patch, which applies if any of them matches.
    pub patches: Vec<PatchSpec>,
    /// Firmware that the image brings in `/lib/firmware`, from its sources. The template must use `firmware`.
    pub firmware: Vec<FirmwareSpec>,
    /// Additional packages that the build needs, such as libraries and tools of configure scripts. They come from the same suite
    /// as the kernel family's toolchain. A toolchain that is an image cannot be extended.
    pub build_packages: Vec<PackageToInstall>,
    /// Exposed headers that the image is compiled against. Each tree is available in the build context as `needs/<name>/`, at its
    /// usual paths. Needed driver images are built first, for the same kernel. A change in what one of them exposes triggers a
    /// rebuild.
    pub needs: Vec<Need>,
    /// Paths that the payload exposes to drivers compiled against it: absolute paths, such as `/usr/src/ofa_kernel`. The last
    /// component may contain one `*`. Each path must exist.
    pub exposes: Vec<ExposedPath>,
    /// The nodes that the image is for.
    #[serde(default)]
    pub nodes: NodeSelector,
    /// The range of kernels, such as `>=4.18, <6.18`. Default: every kernel. Bounds of up to three numbers are compared with the
    /// release's `x.y.z`. Longer bounds (`>=6.1.0-56`, `<5.14.0-600`) use the version order of the node's distribution, Debian's
    /// or RPM's.
    pub kernels: Option<KernelRange>,
    /// A regular expression that must match the whole kernel release. A kernel must satisfy both `kernels` and `release`.
    pub release: Option<Pattern>,
    /// Organization that supplies the driver, such as `NVIDIA`. Changes only the bill of materials.
    pub supplier: Option<OneLine>,
    /// License of the image's content, as an SPDX expression. Changes only the bill of materials.
    pub license: Option<LicenseExpression>,
    /// Whether the licenses allow redistribution of the image. Changes only the bill of materials and what `farrier bundle export`
    /// permits.
    pub redistribute: Option<Redistribute>,
    /// Names of modules that the payload must contain and that must pass the check.
    pub modules: Vec<ModuleName>,
    /// Options of the load check.
    #[serde(default)]
    pub check: CheckSpec,
    /// Whether a payload built for another kernel may be published for this one. Not possible for images that expose something.
    #[serde(default)]
    pub reuse: Reuse,
    /// Base image, entrypoint and environment of the image.
    #[serde(default)]
    pub runtime: RuntimeSpec,
    /// Whether farrier or the engine assembles the final image.
    #[serde(default)]
    pub output: Output,
    /// Outputs that are published in addition to the image, for hosts that load the modules themselves. Each output is made from the
    /// image, so its modules are the image's, byte for byte.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub outputs: BTreeSet<HostOutput>,
    /// Resources that the build needs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub build: BuildSpec,
    /// Tags. farrier looks up the image by the first one. Variables:
    ///
    /// - `version`, `kernel_label`, `kernel_release`, `os_id`, `os_version`, `arch`
    /// - `os_tag`: the GPU Operator's form (`ubuntu22.04`, but `rhel9`)
    /// - `ostree_version`: gives a tag for each such version among the kernel's nodes
    /// - `rhel_version`: from the nodes' labels
    /// - `needs.NAME`: version of the image that this one is compiled against; a tag without it conflicts after that version
    ///   changes
    /// - `signer`: first 12 digits of the fingerprint of the certificate that signs modules, or `unsigned`
    #[serde_with(skip_apply)]
    #[serde(default = "default_tags", deserialize_with = "tag_patterns")]
    #[schemars(length(min = 1))]
    pub tags: Vec<String>,
    /// Action if the tag exists with another input hash.
    #[serde(default)]
    pub on_conflict: OnConflict,
    /// Rollout targets, which are rewritten when a kernel changes.
    #[serde(deserialize_with = "super::rollout::rollouts")]
    pub rollout: Vec<RolloutSpec>,
}

/// Entrypoint commands, with or without `/usr/bin/`, for which farrier adds `driver-entrypoint` to the image. See
/// [`RuntimeSpec::entrypoint`].
pub const DRIVER_ENTRYPOINTS: [&str; 6] = [
    "driver-entrypoint",
    // The other names of the program, sorted as the entries of a layer must be.
    "ibdev2netdev",
    "nvidia-driver",
    "nvidia-gdrcopy-driver",
    "nvidia-gds-driver",
    "ocp_dtk_entrypoint",
];

/// First arguments of `driver-entrypoint`.
const DRIVER_OPERANDS: [&str; 8] = [
    "mofed",
    "nvidia-driver",
    "nv-peer-mem",
    "nvidia-gds-driver",
    "nvidia-gdrcopy-driver",
    "ocp_dtk_entrypoint",
    "generic",
    "forecast",
];

impl RuntimeSpec {
    /// Describes an invalid argument of `driver-entrypoint`; `None` if it is not the entrypoint or its argument is valid.
    pub fn invalid_operand(&self) -> Option<String> {
        let (program, arguments) = self.entrypoint.split_first()?;
        let operand = arguments.first().map_or("", |operand| &**operand);
        if program.trim_start_matches("/usr/bin/") != DRIVER_ENTRYPOINTS[0]
            || DRIVER_OPERANDS.contains(&operand)
        {
            return None;
        }
        let known = format!("known: {}", DRIVER_OPERANDS.join(", "));
        let hint =
            similar(operand, DRIVER_OPERANDS).map_or(known, |meant| format!("did you mean {meant:?}?"));
        Some(format!("driver-entrypoint has no argument {operand:?}; {hint}"))
    }

    /// Finds a module name of `generic` that is likely a typo of one of `modules`. Returns its index in `entrypoint`, and a message.
    /// Other names are allowed: `generic` also loads the host's modules.
    pub fn mistyped_module(&self, modules: &[ModuleName]) -> Option<(usize, String)> {
        let mut arguments = self.entrypoint.iter().map(|argument| &**argument).enumerate();
        let (_, program) = arguments.next()?;
        let (_, operand) = arguments.next()?;
        if (program.trim_start_matches("/usr/bin/"), operand) != (DRIVER_ENTRYPOINTS[0], "generic") {
            return None;
        }
        let mut loaded = Vec::new();
        while let Some((index, argument)) = arguments.next() {
            if ["--replace", "--wait-for", "--ready-when", "--then"].contains(&argument) {
                arguments.next();
            } else if !argument.starts_with('-') {
                loaded.push((index, argument.replace('-', "_")));
            }
        }
        let listed: Vec<String> = modules.iter().map(|name| name.replace('-', "_")).collect();
        let not_loaded = || listed.iter().filter(|name| loaded.iter().all(|(_, loaded)| loaded != *name));
        loaded.iter().filter(|(_, name)| !listed.contains(name)).find_map(|(index, name)| {
            let meant = similar(name, not_loaded().map(String::as_str))?;
            Some((*index, format!("`modules` does not name {name:?}; did you mean {meant:?}?")))
        })
    }
}

impl DriverImageSpec {
    /// Returns the toolchain for the kernels of a family: the family's toolchain plus this image's packages. Fails with a reason
    /// if the packages cannot be added.
    pub fn toolchain(&self, family: &KernelFamily) -> Result<Toolchain, String> {
        match &family.spec.toolchain {
            Toolchain::Bootstrap(spec) => {
                let mut spec = spec.clone();
                let new = self.build_packages.iter().filter(|package| !spec.include.contains(package));
                let new: Vec<PackageToInstall> = new.cloned().collect();
                spec.include.extend(new);
                Ok(Toolchain::Bootstrap(spec))
            }
            Toolchain::Rpm(packages) => {
                let mut toolchain = packages.clone();
                if let Some(name) = self.build_packages.iter().find(|name| name.ends_with("-dev")) {
                    return Err(format!(
                        "buildPackages: {name} is a Debian package name, but the toolchain consists of RPM \
                         packages (`-devel`): define a separate image for these kernels and select them with \
                         `release`"
                    ));
                }
                let names: Result<Vec<RpmName>, ParseError> =
                    self.build_packages.iter().map(|package| package.parse()).collect();
                toolchain.packages.add(names.map_err(|error| format!("buildPackages: {error}"))?);
                toolchain.from = packages.archive(family.spec.headers.rpm_archive()).cloned();
                Ok(Toolchain::Rpm(toolchain))
            }
            image @ Toolchain::Image(_) if self.build_packages.is_empty() => Ok(image.clone()),
            Toolchain::Image(image) => Err(format!(
                "it is the image {image}, to which buildPackages ({}) cannot be added: name an image that has them",
                to_strings(&self.build_packages).join(", ")
            )),
        }
    }

    /// Whether farrier adds `driver-entrypoint` to the image. It does not if the engine makes the whole image.
    pub fn contains_entrypoint(&self) -> bool {
        let first = self.runtime.entrypoint.first();
        self.output == Output::Payload
            && first.is_some_and(|name| DRIVER_ENTRYPOINTS.contains(&name.trim_start_matches("/usr/bin/")))
    }

    /// Returns a description of the kernels that the image supports, unless `target` is one of them.
    pub fn range_excluding(&self, target: &KernelTarget) -> Option<String> {
        let range = self.kernels.as_ref().filter(|range| !range.contains(target));
        let release = self.release.as_ref().filter(|pattern| !pattern.is_match(target.release.as_str()));
        range
            .map(ToString::to_string)
            .or_else(|| release.map(|pattern| format!("whose release matches {pattern}")))
    }

    /// Returns the indexes of the entries in `patches` that apply to a kernel. Entries with the same path are one patch, which
    /// applies if any of them matches.
    pub(crate) fn patches_for<E>(
        &self,
        target: &KernelTarget,
        mut check_headers: impl FnMut(&HeaderText) -> Result<bool, E>,
    ) -> Result<Vec<usize>, E> {
        let mut chosen: Vec<usize> = Vec::new();
        for (index, PatchSpec { path, kernels, release, when }) in self.patches.iter().enumerate() {
            if !chosen.iter().any(|earlier| self.patches[*earlier].path == *path)
                && (KernelCondition { kernels, release, when }).matches(target, &mut check_headers)?
            {
                chosen.push(index);
            }
        }
        Ok(chosen)
    }

    /// Returns the variables that are set for a kernel, in addition to `vars` or overriding them.
    pub(crate) fn vars_for<E>(
        &self,
        target: &KernelTarget,
        mut check_headers: impl FnMut(&HeaderText) -> Result<bool, E>,
    ) -> Result<BTreeMap<String, String>, E> {
        let mut vars = BTreeMap::new();
        for KernelVars { kernels, release, when, set } in &self.kernel_vars {
            if (KernelCondition { kernels, release, when }).matches(target, &mut check_headers)? {
                vars.extend(set.iter().map(|(name, value)| (name.to_string(), value.to_string())));
            }
        }
        Ok(vars)
    }

    /// Header conditions that must be evaluated to choose a kernel's patches and variables.
    pub fn header_conditions(&self, target: &KernelTarget) -> Vec<HeaderText> {
        let mut conditions = Vec::new();
        if self.range_excluding(target).is_none() {
            // The callback never matches, so that each condition is evaluated.
            let mut record = |text: &HeaderText| {
                conditions.push(text.clone());
                Ok::<_, std::convert::Infallible>(false)
            };
            let (Ok(_), Ok(_)) = (self.patches_for(target, &mut record), self.vars_for(target, &mut record));
        }
        conditions
    }
}

/// The tag form of the Network Operator's precompiled drivers, see `docs/operators.md`.
fn default_tags() -> Vec<String> {
    vec!["{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}".to_owned()]
}

/// A tag pattern that was verified to give a valid tag.
struct TagPattern(String);

impl<'de> Deserialize<'de> for TagPattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pattern = String::deserialize(deserializer)?;
        tag::validate_pattern(&pattern).map_err(D::Error::custom)?;
        Ok(Self(pattern))
    }
}

fn tag_patterns<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let patterns = Vec::<TagPattern>::deserialize(deserializer)?;
    if patterns.is_empty() {
        return Err(D::Error::custom("an image needs at least one tag; remove `tags` to use the default"));
    }
    Ok(patterns.into_iter().map(|pattern| pattern.0).collect())
}

/// Options of the load check. They decide what happens to a payload and do not change it, so the input hash excludes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CheckSpec {
    /// Treatment of a payload whose verdict is `unknown`.
    #[serde(default)]
    pub unknown: UnknownPolicy,
    /// Boot the kernel in a virtual machine and load the modules there before publishing.
    #[serde(default)]
    pub boot: bool,
}

/// Treatment of a payload whose verdict is `unknown`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum UnknownPolicy {
    /// Publish and roll out the payload, with a warning.
    #[default]
    Allow,
    /// Neither publish nor roll out the payload.
    Deny,
}

/// Whether a payload built for another kernel may be published for this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Reuse {
    /// Build for every kernel.
    #[default]
    Never,
    /// Reuse a payload that was built from the same inputs except for the kernel, if the check says that this kernel loads all
    /// its modules.
    Compatible,
}

/// Selects nodes by label. An empty selector matches every node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSelector {
    /// Labels that a node must have, with these values.
    #[serde(default)]
    pub match_labels: BTreeMap<LabelKey, LabelValue>,
    /// Labels that mark nodes with their own driver. farrier skips a node if one of these labels has one of its values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(with = "BTreeMap<String, Vec<String>>")]
    pub unless_labels: BTreeMap<LabelKey, NonEmpty<LabelValue>>,
}

impl NodeSelector {
    /// Whether the labels include all of `matchLabels`.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        has_labels(labels, &self.match_labels)
    }

    /// Returns the first label, with its value, that marks the node as having its own driver.
    pub fn own_driver<'a>(&'a self, labels: &'a BTreeMap<String, String>) -> Option<(&'a str, &'a str)> {
        self.unless_labels.iter().find_map(|(key, values)| {
            let value = labels.get(key.as_str())?.as_str();
            values.iter().any(|marked| *marked == value).then_some((key.as_str(), value))
        })
    }

    /// Keys of all labels that the selector reads.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.match_labels.keys().chain(self.unless_labels.keys()).map(LabelKey::as_str)
    }
}

/// Whether `labels` include all required labels.
pub(crate) fn has_labels(
    labels: &BTreeMap<String, String>,
    required: &BTreeMap<LabelKey, LabelValue>,
) -> bool {
    required.iter().all(|(key, value)| labels.get(key.as_str()).is_some_and(|label| *value == label.as_str()))
}

/// Base image, entrypoint and environment of the image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RuntimeSpec {
    /// The image below the payload. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<RuntimeBase>,
    /// The image's entrypoint. farrier adds `driver-entrypoint` (`/usr/bin/driver-entrypoint`, and links with the other names) in
    /// a separate layer if the entrypoint starts with that program. The same applies to the names that operators call it by:
    /// `nvidia-driver`, `nvidia-gds-driver`, `nvidia-gdrcopy-driver`, `ocp_dtk_entrypoint`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<Argument>,
    /// Environment variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(with = "BTreeMap<String, String>")]
    pub env: BTreeMap<EnvName, Argument>,
}

/// The image below the payload. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum RuntimeBase {
    /// Built with mmdebstrap from packages; their scripts run. `{{version}}` in a version in `include` is replaced with the
    /// driver's version: `nvidia-smi={{version}}-*`.
    Bootstrap(BootstrapSpec),
    /// Built from packages like `bootstrap`, plus user space and firmware of NVIDIA's installer, which is one of the image's
    /// sources.
    Runfile(RunfileBase),
    /// A single static busybox.
    Minimal(MinimalSpec),
    /// A driver image that this one `needs`. The payload is added as another layer.
    Need(ImageName),
    /// Reference of an existing image, with its tag or digest.
    Image(Reference),
}

/// Builder of the final image: farrier or the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Output {
    /// farrier assembles the image from the payload that the `modules` stage leaves in `/out`.
    #[default]
    Payload,
    /// The engine makes the image: the template is a complete Dockerfile.
    Image,
}

/// Action if a tag exists with another input hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnConflict {
    /// Report the conflict and change nothing.
    #[default]
    Refuse,
    /// Move the tag to the new image.
    Overwrite,
}

/// All content of the definitions directory, combined with the built-in defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Definitions {
    /// Driver images, by name.
    pub images: BTreeMap<ImageName, DriverImage>,
    /// Kernel families in file-name order.
    pub families: Vec<KernelFamily>,
    /// Announced kernels, by name of the list.
    pub announced: BTreeMap<ImageName, AnnouncedKernels>,
    /// Settings of the whole site; the defaults if there is no `site.yaml`.
    pub site: SiteSpec,
    /// Template texts by name.
    pub templates: BTreeMap<String, String>,
    /// Contents of the built-in patches, by their path in definitions.
    pub patches: BTreeMap<PathBuf, String>,
    /// Base directory of relative paths in definitions.
    pub root: PathBuf,
    /// Positions in the definitions of the paths of sources, as `file:line:column`, by image and path.
    pub source_positions: BTreeMap<(ImageName, PathBuf), String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_images_packages_are_added_to_the_toolchain() {
        let spec: DriverImageSpec = serde_json::from_value(serde_json::json!({
            "version": "1", "template": "t", "buildPackages": ["make", "libxtables-dev"],
        }))
        .unwrap();
        let of = |toolchain: serde_json::Value| -> KernelFamily {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "farrier.dev/v1alpha1", "kind": "KernelFamily", "metadata": {"name": "f"},
                "spec": {"match": {}, "headers": {"tarball": {"path": "h"}}, "toolchain": toolchain},
            }))
            .unwrap()
        };
        let bootstrap =
            of(serde_json::json!({"bootstrap": {"suite": "bookworm", "include": ["gcc-12", "make"]}}));
        let Ok(Toolchain::Bootstrap(made)) = spec.toolchain(&bootstrap) else { panic!("no packages") };
        assert_eq!(made.include, ["gcc-12", "make", "libxtables-dev"]);

        let from =
            serde_json::json!({"repositories": [{"url": "https://acme.invalid/os/"}], "signedBy": "k.asc"});
        let mut rpm = of(serde_json::json!({"rpm": {"packages": ["gcc", "make"]}}));
        rpm.spec.headers =
            serde_json::from_value(serde_json::json!({"rpm": {"packages": ["kernel-devel"], "from": from}}))
                .unwrap();
        insta::assert_snapshot!(spec.toolchain(&rpm).unwrap_err());
        let named =
            DriverImageSpec { build_packages: vec!["iptables-devel".parse().unwrap()], ..spec.clone() };
        let Ok(Toolchain::Rpm(made)) = named.toolchain(&rpm) else { panic!("no packages") };
        assert_eq!(to_strings(&made.packages), ["gcc", "make", "iptables-devel"]);
        assert_eq!(made.from.as_ref(), rpm.spec.headers.rpm_archive(), "same repositories as the headers");
        let fixed = DriverImageSpec { build_packages: vec!["make=4.3-4".parse().unwrap()], ..spec.clone() };
        insta::assert_snapshot!(fixed.toolchain(&rpm).unwrap_err(), @r#"buildPackages: "make=4.3-4" is not an RPM package's name: letters, digits and `+._-`, starting with a letter, a digit or `_`"#);

        let image = of(serde_json::json!({"image": "registry.test/toolchain:1"}));
        insta::assert_snapshot!(spec.toolchain(&image).unwrap_err(), @"it is the image registry.test/toolchain:1, to which buildPackages (make, libxtables-dev) cannot be added: name an image that has them");
        let plain = DriverImageSpec { build_packages: Vec::new(), ..spec };
        assert_eq!(plain.toolchain(&image), Ok(image.spec.toolchain));
    }
}
