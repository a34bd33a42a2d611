//! Components of an image and of its build, independent of the format of the bill of materials.
//!
//! The bill is a function of the image and of its definition, so that two builds of one image give one bill. Facts that may differ
//! between two such builds are recorded by the provenance alone: farrier's version, the content of the toolchain, and whether the
//! headers came from the registry's store.

use std::collections::BTreeMap;

use super::{Distribution, Material, ModuleFile, Package, Provenance, Role, Subject, Terms, purl};
use crate::image::{Digest, HostOutput};

/// Property that says whether the license allows redistribution.
pub(super) const REDISTRIBUTE: &str = "redistribute";

/// Kind of a component. Scanners ignore containers and files in CycloneDX, but no package in SPDX.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Kind {
    /// The component's `type` in CycloneDX.
    pub(super) cyclonedx: &'static str,
    /// The package's purpose in SPDX; `None` if the SPDX document omits the component.
    pub(super) spdx: Option<&'static str>,
}

const APPLICATION: Kind = Kind { cyclonedx: "application", spdx: Some("APPLICATION") };
const BASE: Kind = Kind { cyclonedx: "container", spdx: None };
pub(super) const CERTIFICATE: Kind = Kind { cyclonedx: "cryptographic-asset", spdx: None };
const FILE: Kind = Kind { cyclonedx: "file", spdx: None };
const IMAGE: Kind = Kind { cyclonedx: "container", spdx: Some("CONTAINER") };
const OUTPUT: Kind = Kind { cyclonedx: "file", spdx: Some("FILE") };
const LIBRARY: Kind = Kind { cyclonedx: "library", spdx: Some("LIBRARY") };
/// Scanners use the first operating system as the distribution.
const OPERATING_SYSTEM: Kind = Kind { cyclonedx: "operating-system", spdx: Some("OPERATING-SYSTEM") };

#[derive(Default)]
pub(super) struct Component<'a> {
    pub(super) kind: Kind,
    /// Unique in the bill.
    pub(super) reference: String,
    pub(super) name: &'a str,
    pub(super) version: Option<&'a str>,
    pub(super) digest: Option<&'a Digest>,
    pub(super) purl: Option<String>,
    /// Address of the download.
    pub(super) url: Option<&'a str>,
    /// Names as the component states them. `MODULE_LICENSE` and Debian's copyright files have their own names, which are not
    /// SPDX identifiers.
    pub(super) licenses: Vec<&'a str>,
    /// License that the definition states, as an SPDX expression.
    pub(super) license: Option<&'a str>,
    pub(super) supplier: Option<&'a str>,
    pub(super) properties: Vec<(&'static str, String)>,
}

impl<'a> Component<'a> {
    /// Describes the image or output itself.
    pub(super) fn of_subject(subject: &'a Subject) -> Self {
        let Subject { name, version, output, digest, target, architecture, input_hash, terms } = subject;
        let (kind, role) = if output.is_some() { (OUTPUT, "output") } else { (IMAGE, "image") };
        let mut image = Self {
            digest: Some(digest),
            purl: Some(purl::of_image(name, digest, None)),
            ..component(kind, role, name, Some(version), role.to_owned())
        };
        image.properties.extend(output.map(|output| ("output", output.to_string())));
        image.properties.push(("input-hash", input_hash.to_string()));
        image.properties.push(("architecture", architecture.as_str().to_owned()));
        if let Some(target) = target {
            image.properties.push(("kernel-release", target.release.to_string()));
            image.properties.push(("os", format!("{} {}", target.os, target.os_version)));
        }
        image.with_terms(terms)
    }

    fn with_terms(mut self, Terms { supplier, license, redistribute }: &'a Terms) -> Self {
        self.supplier = supplier.as_deref().or(self.supplier);
        self.license = license.as_deref();
        let redistribute = redistribute.map(|value| (REDISTRIBUTE, <&str>::from(value).to_owned()));
        self.properties.extend(redistribute);
        self
    }
}

/// Components of an image or output.
#[derive(Default)]
pub(super) struct Components<'a> {
    /// The kind of the output; `None` for an image.
    output: Option<HostOutput>,
    /// Content of the image or output.
    pub(super) shipped: Vec<Component<'a>>,
    /// Inputs of the build that are not content.
    pub(super) build: Vec<Component<'a>>,
    /// Number of components for each reference without its suffix `#NUMBER`.
    reference_counts: BTreeMap<String, usize>,
}

impl<'a> Components<'a> {
    pub(super) fn of(provenance: &'a Provenance) -> Self {
        let mut components = Self { output: provenance.subject.output, ..Self::default() };
        // The base comes first: syft takes the distribution of an SPDX document from the first package URL.
        let (base, others): (Vec<_>, Vec<_>) =
            provenance.materials.iter().partition(|material| material.role == Role::Base);
        if let Some(distribution) = base.iter().find_map(|material| material.distribution.as_ref()) {
            components.add_distribution(distribution);
        }
        for material in base.into_iter().chain(others) {
            components.add_material(material);
        }
        for module in &provenance.modules {
            components.add_module(module);
        }
        components
    }

    fn add_distribution(&mut self, Distribution { id, version }: &'a Distribution) {
        let version = Some(version.as_str()).filter(|version| !version.is_empty());
        self.shipped.push(Component {
            supplier: Some(id),
            ..component(OPERATING_SYSTEM, "distribution", id, version, "distribution".to_owned())
        });
    }

    fn add_material(&mut self, material: &'a Material) {
        let Material { role, name, version, digest, commit, uri, packages, distribution, terms } = material;
        let role = *role;
        if role == Role::StoredHeaders {
            return;
        }
        let (purl, url) = match uri.as_deref() {
            Some(uri) if uri.starts_with("pkg:") => (Some(uri.to_owned()), None),
            url => (None, url),
        };
        let is_software = matches!(role, Role::Source | Role::Entrypoint);
        let purl = purl.or_else(|| is_software.then(|| purl::of_software(name, version.as_deref(), url)));
        let kind = match role {
            // The minimal base is one package.
            Role::Base if purl.is_some() => LIBRARY,
            Role::Base | Role::Toolchain => BASE,
            Role::Source | Role::Headers | Role::StoredHeaders | Role::Need => LIBRARY,
            Role::Patch | Role::Recipe => FILE,
            Role::ReusedImage | Role::Member | Role::DriverImage => IMAGE,
            Role::Entrypoint => APPLICATION,
            Role::ModuleCertificate => CERTIFICATE,
        };
        let reference = self.unique_reference(role, name, version.as_deref());
        // Two builds of a toolchain from packages may give different bytes.
        let is_content_fixed = role != Role::Toolchain || url.is_some();
        let mut component = Component {
            digest: digest.as_ref().filter(|_| is_content_fixed),
            purl,
            // The address of a base differs if the base comes from the registry's store.
            url: url.filter(|_| role != Role::Base),
            supplier: supplier(role, distribution.as_ref(), url),
            ..component(kind, role.as_str(), name, version.as_deref(), reference)
        };
        component.properties.extend(commit.clone().map(|commit| ("git-commit", commit)));
        self.list_for(role).push(component.with_terms(terms));
        if role.is_part_of(self.output) {
            for package in packages {
                self.add_package(role, package, distribution.as_ref());
            }
        }
    }

    fn add_package(&mut self, role: Role, package: &'a Package, distribution: Option<&'a Distribution>) {
        let Package { name, version, architecture, licenses } = package;
        let reference = self.unique_reference(role, name, Some(version));
        let component = Component {
            purl: Some(purl::of_package(name, version, Some(architecture), distribution)),
            licenses: licenses.iter().map(String::as_str).collect(),
            supplier: supplier(role, distribution, None),
            ..component(LIBRARY, role.as_str(), name, Some(version), reference)
        };
        self.list_for(role).push(component);
    }

    fn add_module(&mut self, module: &'a ModuleFile) {
        let ModuleFile { path, name, version, license, srcversion, digest } = module;
        let version = version.as_deref();
        let mut component = Component {
            digest: Some(digest),
            purl: Some(purl::of_software(name, version, None)),
            licenses: license.iter().map(String::as_str).collect(),
            ..component(LIBRARY, "module", name, version, format!("module:{path}"))
        };
        component.properties.push(("path", path.clone()));
        component.properties.extend(srcversion.clone().map(|value| ("srcversion", value)));
        self.shipped.push(component);
    }

    fn list_for(&mut self, role: Role) -> &mut Vec<Component<'a>> {
        if role.is_part_of(self.output) { &mut self.shipped } else { &mut self.build }
    }

    /// Returns a reference that no other component has.
    fn unique_reference(&mut self, role: Role, name: &str, version: Option<&str>) -> String {
        let version = version.map(|version| format!("@{version}")).unwrap_or_default();
        let plain = format!("{}:{name}{version}", role.as_str());
        let count = self.reference_counts.entry(plain.clone()).or_default();
        *count += 1;
        if *count == 1 { plain } else { format!("{plain}#{}", *count - 1) }
    }
}

fn component<'a>(
    kind: Kind,
    role: &str,
    name: &'a str,
    version: Option<&'a str>,
    reference: String,
) -> Component<'a> {
    let properties = vec![("role", role.to_owned())];
    Component { kind, reference, name, version, properties, ..Component::default() }
}

/// The distribution that published a package, or the host that a download came from.
fn supplier<'a>(role: Role, distribution: Option<&'a Distribution>, url: Option<&'a str>) -> Option<&'a str> {
    match (role, distribution, url) {
        (Role::Entrypoint, ..) => Some("farrier"),
        (Role::Toolchain, ..) => None,
        (_, Some(distribution), _) => Some(&distribution.id),
        (_, None, url) => url?.split_once("://")?.1.split('/').next(),
    }
}
