//! Pure: `images/*.yaml`.

use std::{collections::BTreeMap, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::{
    BuildSpec, KernelVars, MinimalSpec, Need, PatchSpec, RolloutSpec, RunfileBase, SourceSpec, VersionSpec,
    kernel_choice::Choice, tag,
};
use crate::{
    definition::{
        ApiVersion, BootstrapSpec, Metadata, NonEmpty, NotA,
        checked::{
            Argument, EnvName, ExposedPath, ImageName, LabelKey, LabelValue, ModuleName, OneLine,
            PackageToInstall, Reference, RpmName, TemplateName, VariableName, texts,
        },
        is_default,
    },
    kernel::{AnnouncedKernels, HeaderText, KernelFamily, KernelRange, KernelTarget, Pattern, Toolchain},
    site::SiteSpec,
    template::TemplateContext,
};

/// One file of `images/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverImage {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `DriverImage`.
    pub kind: DriverImageKind,
    /// The image's name.
    pub metadata: Metadata,
    /// What it says.
    pub spec: DriverImageSpec,
}

impl DriverImage {
    /// What the template may name for this version and kernel; patches are left out.
    pub fn template_context(&self, toolchain: &str, version: &str, target: &KernelTarget) -> TemplateContext {
        let Self { metadata, spec, .. } = self;
        let mut context = TemplateContext::new(toolchain, (metadata.name.as_str(), version), target);
        context.modules = texts(&spec.modules);
        context.sources = spec.sources.iter().map(|source| source.name.to_string()).collect();
        context.needs = spec.needs.iter().map(|need| need.name().to_string()).collect();
        context.vars = spec.vars.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        context
    }
}

/// The one value of an image's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DriverImageKind {
    /// `DriverImage`.
    DriverImage,
}

/// How a driver image is built and where it goes.
#[serde_with::apply(Vec => #[serde(default, skip_serializing_if = "Vec::is_empty")])]
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverImageSpec {
    /// The driver's version.
    pub version: VersionSpec,
    /// The template's name: `templates/<template>.Dockerfile.hbs`.
    pub template: TemplateName,
    /// Values for the template, as `{{vars.<name>}}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vars: BTreeMap<VariableName, OneLine>,
    /// Other values of these for some kernels; all entries that fit a kernel count, a later one before an earlier one.
    pub kernel_vars: Vec<KernelVars>,
    /// What is compiled; each arrives in the build context as `sources/<name>/`.
    pub sources: Vec<SourceSpec>,
    /// Patches, in order; those for the kernel arrive as `patches/<number>-<file name>`. Entries with the same path are one
    /// patch, which applies where one of them does.
    pub patches: Vec<PatchSpec>,
    /// Packages that its build needs beside the kernel family's toolchain, of the same suite: libraries, configure scripts'
    /// tools. Where the toolchain is an image nothing can be added to it.
    pub build_packages: Vec<PackageToInstall>,
    /// Exposed headers that it is compiled against; each arrives in the build context as `needs/<name>/`, with its
    /// natural paths below. Those of driver images are built first, for the same kernel, and an image is built again when
    /// what a needed one exposes has changed.
    pub needs: Vec<Need>,
    /// What the payload offers to the drivers that are compiled against it: absolute paths, such as
    /// `/usr/src/ofa_kernel`, whose last component may hold one `*`. Each must be there.
    pub exposes: Vec<ExposedPath>,
    /// The nodes that the image is for.
    #[serde(default)]
    pub nodes: NodeSelector,
    /// The range of kernels, such as `>=4.18, <6.18`; every kernel when absent. Bounds of numbers alone are over the release's
    /// `x.y.z`; those with more behind three numbers (`>=6.1.0-56`, `<5.14.0-600`) are in the order of the node's
    /// distribution, Debian's or RPM's.
    pub kernels: Option<KernelRange>,
    /// A regular expression over the kernel release, whole; kernels must fit both.
    pub release: Option<Pattern>,
    /// Module names that must be in the payload and must pass the check.
    pub modules: Vec<ModuleName>,
    /// What the load check does and accepts.
    #[serde(default)]
    pub check: CheckSpec,
    /// May a payload that was built for another kernel be published for this one? Not one that exposes something.
    #[serde(default)]
    pub reuse: Reuse,
    /// What surrounds the payload.
    #[serde(default)]
    pub runtime: RuntimeSpec,
    /// Who makes the final image.
    #[serde(default)]
    pub output: Output,
    /// What its build takes of the machine.
    #[serde(default, skip_serializing_if = "is_default")]
    pub build: BuildSpec,
    /// Tags, the first one being the name that is looked up. Variables: `version`, `kernel_label`,
    /// `kernel_release`, `os_id`, `os_version`, `os_tag` (the GPU Operator's: `ubuntu22.04`, but `rhel9`), `arch`,
    /// `ostree_version` (a tag for each that nodes with the kernel have) and `rhel_version` (of the nodes' labels),
    /// `needs.NAME` (the version of the image that it is compiled against: a tag without it is taken when that is another),
    /// `signer` (the first 12 digits of the fingerprint of the certificate that modules are signed with, else `unsigned`).
    #[serde_with(skip_apply)]
    #[serde(default = "default_tags", deserialize_with = "tag_patterns")]
    #[schemars(length(min = 1))]
    pub tags: Vec<String>,
    /// What to do when the tag exists with another input hash.
    #[serde(default)]
    pub on_conflict: OnConflict,
    /// What is rewritten when a kernel changes.
    pub rollout: Vec<RolloutSpec>,
}

/// What [`RuntimeSpec::entrypoint`] starts with, with or without `/usr/bin/`, where farrier puts `driver-entrypoint` into the image.
pub const DRIVER_ENTRYPOINTS: [&str; 6] = [
    "driver-entrypoint",
    // The others by name, as layers want their entries.
    "ibdev2netdev",
    "nvidia-driver",
    "nvidia-gdrcopy-driver",
    "nvidia-gds-driver",
    "ocp_dtk_entrypoint",
];

impl DriverImageSpec {
    /// What it is compiled with for the kernels of a family: the family's toolchain and its own packages, or why these cannot be
    /// added.
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
                let mut made = packages.clone();
                if let Some(name) = self.build_packages.iter().find(|name| name.ends_with("-dev")) {
                    return Err(format!(
                        "buildPackages: {name} is a name that Debian's packages have, and the toolchain is of RPM packages (`-devel`): \
                         define an image of its own for these kernels, told apart by `release`"
                    ));
                }
                let named: Result<Vec<RpmName>, NotA> =
                    self.build_packages.iter().map(|package| package.parse()).collect();
                made.packages.add(named.map_err(|error| format!("buildPackages: {error}"))?);
                made.from = packages.archive(family.spec.headers.rpm_archive()).cloned();
                Ok(Toolchain::Rpm(made))
            }
            image @ Toolchain::Image(_) if self.build_packages.is_empty() => Ok(image.clone()),
            Toolchain::Image(image) => Err(format!(
                "it is the image {image}, to which buildPackages ({}) cannot be added: name an image that has them",
                texts(&self.build_packages).join(", ")
            )),
        }
    }

    /// Does farrier add `driver-entrypoint` to the image? Not where the engine makes all of it.
    pub fn holds_entrypoint(&self) -> bool {
        let first = self.runtime.entrypoint.first();
        self.output == Output::Payload
            && first.is_some_and(|name| DRIVER_ENTRYPOINTS.contains(&name.trim_start_matches("/usr/bin/")))
    }

    /// The kernels that the image is for, if this one is not among them.
    pub fn range_without(&self, target: &KernelTarget) -> Option<String> {
        let range = self.kernels.as_ref().filter(|range| !range.holds(target));
        let release = self.release.as_ref().filter(|pattern| !pattern.is_match(target.release.as_str()));
        range
            .map(ToString::to_string)
            .or_else(|| release.map(|pattern| format!("whose release matches {pattern}")))
    }

    /// The places in `patches` of those that apply to a kernel. Entries with the same path are one patch: it applies where
    /// one of them does.
    pub fn patches_for<E>(
        &self,
        target: &KernelTarget,
        mut says: impl FnMut(&HeaderText) -> Result<bool, E>,
    ) -> Result<Vec<usize>, E> {
        let mut chosen: Vec<usize> = Vec::new();
        for (index, PatchSpec { path, kernels, release, when }) in self.patches.iter().enumerate() {
            let is_there = |index: &usize| self.patches.get(*index).is_some_and(|patch| patch.path == *path);
            if !chosen.iter().any(is_there) && (Choice { kernels, release, when }).holds(target, &mut says)? {
                chosen.push(index);
            }
        }
        Ok(chosen)
    }

    /// The variables that are set for a kernel beside `vars`, or in their place.
    pub fn vars_for<E>(
        &self,
        target: &KernelTarget,
        mut says: impl FnMut(&HeaderText) -> Result<bool, E>,
    ) -> Result<BTreeMap<String, String>, E> {
        let mut vars = BTreeMap::new();
        for KernelVars { kernels, release, when, set } in &self.kernel_vars {
            if (Choice { kernels, release, when }).holds(target, &mut says)? {
                vars.extend(set.iter().map(|(name, value)| (name.to_string(), value.to_string())));
            }
        }
        Ok(vars)
    }

    /// What must be known of a kernel's headers before its patches and variables are.
    pub fn asked_of_headers(&self, target: &KernelTarget) -> Vec<HeaderText> {
        let mut asked = Vec::new();
        if self.range_without(target).is_none() {
            let mut note = |text: &HeaderText| {
                asked.push(text.clone());
                Ok::<_, std::convert::Infallible>(false)
            };
            let (Ok(_), Ok(_)) = (self.patches_for(target, &mut note), self.vars_for(target, &mut note));
        }
        asked
    }
}

/// The Network Operator's precompiled form, see `contracts.md` section 3.
fn default_tags() -> Vec<String> {
    vec!["{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}".to_owned()]
}

/// A tag pattern that gives tags.
struct TagPattern(String);

impl<'de> Deserialize<'de> for TagPattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pattern = String::deserialize(deserializer)?;
        tag::try_pattern(&pattern).map_err(D::Error::custom)?;
        Ok(Self(pattern))
    }
}

fn tag_patterns<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let patterns = Vec::<TagPattern>::deserialize(deserializer)?;
    if patterns.is_empty() {
        return Err(D::Error::custom(
            "an image without tags cannot be found again; leave them out for the default",
        ));
    }
    Ok(patterns.into_iter().map(|pattern| pattern.0).collect())
}

/// What the load check does and accepts. It decides what becomes of a payload and changes none, so it is no
/// part of the input hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CheckSpec {
    /// What becomes of a payload of which it is not known whether it loads.
    #[serde(default)]
    pub unknown: UnknownPolicy,
    /// Boot the kernel in a virtual machine and load the modules there, before anything is published.
    #[serde(default)]
    pub boot: bool,
}

/// What becomes of a payload of which it is not known whether it loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum UnknownPolicy {
    /// It is published and rolled out, with a warning.
    #[default]
    Allow,
    /// It is neither published nor rolled out.
    Deny,
}

/// May a payload that was built for another kernel be published for this one?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Reuse {
    /// No: every kernel gets its own build.
    #[default]
    Never,
    /// Yes, if it was built from the same inputs but for the kernel, and the check says that this kernel loads
    /// every module of it.
    Compatible,
}

/// Nodes by label; an empty selector matches every node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSelector {
    /// Every one of these labels must be there with this value.
    #[serde(default)]
    pub match_labels: BTreeMap<LabelKey, LabelValue>,
    /// Nodes that have a driver of their own, and are left alone: those of which one of these labels has one of its
    /// values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(with = "BTreeMap<String, Vec<String>>")]
    pub unless_labels: BTreeMap<LabelKey, NonEmpty<LabelValue>>,
}

impl NodeSelector {
    /// Are all of `matchLabels` among these labels?
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        has_labels(labels, &self.match_labels)
    }

    /// The first of these labels that says that the node has its own driver, with its value.
    pub fn own_driver<'a>(&'a self, labels: &'a BTreeMap<String, String>) -> Option<(&'a str, &'a str)> {
        self.unless_labels.iter().find_map(|(key, values)| {
            let found = labels
                .get(key.as_str())
                .filter(|found| values.iter().any(|value| *value == found.as_str()))?;
            Some((key.as_str(), found.as_str()))
        })
    }

    /// The labels that it looks at.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.match_labels.keys().chain(self.unless_labels.keys()).map(LabelKey::as_str)
    }
}

/// Are all that are wanted among these labels?
pub(super) fn has_labels(labels: &BTreeMap<String, String>, wanted: &BTreeMap<LabelKey, LabelValue>) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key.as_str()).is_some_and(|found| *value == found.as_str()))
}

/// What surrounds the payload in the image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RuntimeSpec {
    /// The image below the payload; nothing when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<RuntimeBase>,
    /// The image's entrypoint. Where it starts with `driver-entrypoint`, or a name by which operators call it (`nvidia-driver`,
    /// `nvidia-gds-driver`, `nvidia-gdrcopy-driver`, `ocp_dtk_entrypoint`), farrier adds that program (`/usr/bin/driver-entrypoint`,
    /// and links to it of the other names) as a layer of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<Argument>,
    /// Environment variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(with = "BTreeMap<String, String>")]
    pub env: BTreeMap<EnvName, Argument>,
}

/// The image below the payload: exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum RuntimeBase {
    /// Made with mmdebstrap from packages, whose scripts run. In a version that `include` names, `{{version}}` stands for the driver's:
    /// `nvidia-smi={{version}}-*`.
    Bootstrap(BootstrapSpec),
    /// The same with the user space and the firmware in NVIDIA's installer, which is one of the image's sources.
    Runfile(RunfileBase),
    /// One static busybox.
    Minimal(MinimalSpec),
    /// One of the driver images that it `needs`: the payload is one more layer on it.
    Need(ImageName),
    /// A reference to an image that exists, with its tag or digest.
    Image(Reference),
}

/// Who makes the final image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Output {
    /// farrier, from the payload that the `modules` stage leaves in `/out`.
    #[default]
    Payload,
    /// The engine: the template is a complete Dockerfile.
    Image,
}

/// What to do when a tag exists with another input hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnConflict {
    /// Report it and change nothing.
    #[default]
    Refuse,
    /// Replace it.
    Overwrite,
}

/// Everything that the definitions directory holds, beside the built-in defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Definitions {
    /// Driver images, by name.
    pub images: BTreeMap<ImageName, DriverImage>,
    /// Kernel families in file-name order.
    pub families: Vec<KernelFamily>,
    /// Announced kernels, by the list's name.
    pub announced: BTreeMap<ImageName, AnnouncedKernels>,
    /// What holds for the whole site; nothing where there is no `site.yaml`.
    pub site: SiteSpec,
    /// Template texts by name.
    pub templates: BTreeMap<String, String>,
    /// Texts of the patches that farrier brings, by their path in definitions.
    pub patches: BTreeMap<PathBuf, String>,
    /// Where relative paths in definitions start.
    pub root: PathBuf,
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
        assert_eq!(texts(&made.packages), ["gcc", "make", "iptables-devel"]);
        assert_eq!(made.from.as_ref(), rpm.spec.headers.rpm_archive(), "they are where the headers are");
        let fixed = DriverImageSpec { build_packages: vec!["make=4.3-4".parse().unwrap()], ..spec.clone() };
        insta::assert_snapshot!(fixed.toolchain(&rpm).unwrap_err(), @r#"buildPackages: "make=4.3-4" is not an RPM package's name: letters, digits and `+._-`, starting with a letter, a digit or `_`"#);

        let image = of(serde_json::json!({"image": "registry.test/toolchain:1"}));
        insta::assert_snapshot!(spec.toolchain(&image).unwrap_err(), @"it is the image registry.test/toolchain:1, to which buildPackages (make, libxtables-dev) cannot be added: name an image that has them");
        let plain = DriverImageSpec { build_packages: Vec::new(), ..spec };
        assert_eq!(plain.toolchain(&image), Ok(image.spec.toolchain));
    }
}
