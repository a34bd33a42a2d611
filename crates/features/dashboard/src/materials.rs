//! Components of images, and the differences between the components of two images.

use std::collections::BTreeMap;

use farrier_core::{
    image::{Digest, ImageReference, Version},
    kernel::{KernelTarget, version_order},
    plan::{BuildReason, Cell, FetchedInputs, Outcome, Plan, PlannedCell},
    provenance::{Material, Role},
};
use serde::Serialize;
use serde_json::Value;

/// Maximum number of components read from a bill of materials. A toolchain has about two hundred packages.
const MAX_COMPONENTS: usize = 2000;
/// Maximum number of characters read from each text of a component.
const MAX_TEXT_CHARS: usize = 200;
/// Role of a component that is a module of the payload.
const MODULE_ROLE: &str = "module";
/// Roles of the components that a plan knows before the image is built. The components of headers and toolchain are known only
/// after the fetch.
const PLANNED_ROLES: [Role; 4] = [Role::Source, Role::Patch, Role::Need, Role::Recipe];

/// A component of an image, or an input of its build.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Component {
    pub role: String,
    pub name: String,
    pub version: String,
    pub digest: String,
}

impl Component {
    /// Returns the key by which components of two images are matched. Names of header packages contain the kernel release, so the
    /// key omits their digits.
    fn key(&self) -> (&str, String) {
        let is_headers = self.role == Role::Headers.as_str();
        (&self.role, self.name.replace(|c: char| is_headers && c.is_ascii_digit(), ""))
    }

    fn summary(&self) -> String {
        let digest = self.digest.get(..12).unwrap_or_default();
        let parts = [&self.name, self.version.as_str(), digest];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }
}

impl From<Material> for Component {
    fn from(material: Material) -> Self {
        let Material { role, name, version, digest, .. } = material;
        let digest = digest.map(|digest| digest.hex().to_owned()).unwrap_or_default();
        Self { role: role.as_str().to_owned(), name, version: version.unwrap_or_default(), digest }
    }
}

/// Returns the components in a bill of materials, including inputs of the build that are not part of the image.
pub fn components_of(bill: &Value) -> Vec<Component> {
    let text =
        |value: &Value| value.as_str().unwrap_or_default().chars().take(MAX_TEXT_CHARS).collect::<String>();
    let formulas = bill["formulation"].as_array().into_iter().flatten();
    let lists = std::iter::once(bill).chain(formulas).filter_map(|list| list["components"].as_array());
    lists
        .flatten()
        .take(MAX_COMPONENTS)
        .map(|component| {
            let mut properties = component["properties"].as_array().into_iter().flatten();
            let role = properties.find(|property| property["name"] == "farrier:role");
            Component {
                role: role.map(|role| text(&role["value"])).unwrap_or_default(),
                name: text(&component["name"]),
                version: text(&component["version"]),
                digest: text(&component["hashes"][0]["content"]),
            }
        })
        .collect()
}

/// Returns the packages of the toolchain in a provenance. A bill of materials does not contain them.
pub fn toolchain_of(predicate: &Value) -> Vec<Component> {
    let inputs = predicate["buildDefinition"]["resolvedDependencies"].as_array().into_iter().flatten();
    let annotations = inputs.map(|input| &input["annotations"]);
    let toolchain = annotations.filter(|annotations| annotations["role"] == Role::Toolchain.as_str());
    let packages = toolchain.filter_map(|annotations| annotations["packages"].as_array()).flatten();
    // `pkg:deb/debian/NAME@VERSION?arch=...`
    let component = |package: &Value| {
        let path = package.as_str()?.split('?').next()?;
        let (name, version) = path.rsplit('/').next()?.split_once('@')?;
        let text = |text: &str| text.replace("%2B", "+").chars().take(MAX_TEXT_CHARS).collect();
        let (role, digest) = (Role::Toolchain.as_str().to_owned(), String::new());
        Some(Component { role, name: text(name), version: text(version), digest })
    };
    packages.filter_map(component).take(MAX_COMPONENTS).collect()
}

/// Returns the components that a plan knows before the image is built.
pub fn planned_components(cell: &Cell) -> Vec<Component> {
    let FetchedInputs { sources, .. } = &cell.fetched;
    let sources = sources.iter().map(|(name, identity)| {
        let material = Material::of_origin(Role::Source, identity, name, None);
        Material { version: material.version.or_else(|| Some(cell.version.clone())), ..material }
    });
    let patches = cell.patches.iter().map(|patch| Material {
        digest: format!("sha256:{}", patch.sha256).parse().ok(),
        ..Material::new(Role::Patch, &patch.name)
    });
    let needs = cell.needs.iter().map(|need| Material {
        version: Some(need.version.clone()),
        digest: Some(need.exposed.clone()),
        ..Material::new(Role::Need, need.name.as_str())
    });
    let recipe = Material {
        digest: Some(Digest::of(cell.dockerfile.as_bytes())),
        ..Material::new(Role::Recipe, "Dockerfile")
    };
    sources.chain(patches).chain(needs).chain([recipe]).map(Component::from).collect()
}

/// The image with which a cell's image is compared.
#[derive(Clone, Debug)]
pub struct ComparedImage {
    pub image: ImageReference,
    /// Cell of the image, if the image is for another kernel.
    pub cell: Option<PlannedCell>,
}

impl ComparedImage {
    /// Returns the image with which to compare a cell's image, by the first rule that applies:
    ///
    /// 1. the image under the cell's tag, if it was built from other inputs,
    /// 2. the image for the nearest older kernel of the same platform,
    /// 3. the image for the nearest newer kernel of the same platform.
    pub fn of(plan: &Plan, planned: &PlannedCell) -> Option<Self> {
        if let Outcome::Conflict { cell, .. }
        | Outcome::Build { cell, why: BuildReason::Overwrite { .. }, .. } = &planned.outcome
        {
            return Some(Self { image: cell.reference.clone(), cell: None });
        }
        let KernelTarget { os, os_version, release, arch } = &planned.target;
        let order = version_order(os, release.as_str());
        let others = plan.cells.iter().filter(|other| {
            let KernelTarget { os: other_os, os_version: other_version, release: _, arch: other_arch } =
                &other.target;
            other.image == planned.image
                && (other_os, other_version, other_arch) == (os, os_version, arch)
                && matches!(other.outcome, Outcome::UpToDate { .. })
        });
        let compare =
            |a: &PlannedCell, b: &PlannedCell| order(a.target.release.as_str(), b.target.release.as_str());
        let next_older =
            others.clone().filter(|other| compare(other, planned).is_lt()).max_by(|a, b| compare(a, b));
        let next_newer =
            || others.filter(|other| compare(other, planned).is_gt()).min_by(|a, b| compare(a, b));
        let nearest = next_older.or_else(next_newer)?;
        Some(Self { image: image_of(&nearest.outcome)?, cell: Some(nearest.clone()) })
    }
}

/// Returns the published image of a cell, by digest.
pub fn image_of(outcome: &Outcome) -> Option<ImageReference> {
    let Outcome::UpToDate { cell, published, .. } = outcome else { return None };
    let version = Version::Digest(published.digest.clone());
    Some(ImageReference { repository: cell.reference.repository.clone(), version })
}

/// A component that differs between two images.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub what: String,
    pub before: String,
    pub now: String,
}

/// Returns the differences between the components of two images. Without `same_kernel`, ignores Dockerfiles and the digests of
/// modules, which differ for each kernel.
pub fn differences(before: &[Component], now: &[Component], same_kernel: bool) -> Vec<Difference> {
    let mut pairs: BTreeMap<(&str, String), [Option<Component>; 2]> = BTreeMap::new();
    for (side, components) in [before, now].into_iter().enumerate() {
        let is_compared = |component: &&Component| same_kernel || component.role != Role::Recipe.as_str();
        for component in components.iter().filter(is_compared) {
            let mut compared = component.clone();
            if component.role == MODULE_ROLE && !same_kernel {
                compared.digest.clear();
            }
            pairs.entry(component.key()).or_default()[side] = Some(compared);
        }
    }
    let differing = pairs.into_iter().filter(|(_, [before, now])| before != now);
    let summary =
        |component: &Option<Component>| component.as_ref().map_or_else(|| "–".to_owned(), Component::summary);
    differing
        .map(|((what, _), [before, now])| Difference {
            what: what.to_owned(),
            before: summary(&before),
            now: summary(&now),
        })
        .collect()
}

/// Returns the components whose roles a plan knows, for a comparison with [`planned_components`].
pub fn only_planned(components: &[Component]) -> Vec<Component> {
    let is_planned =
        |component: &&Component| PLANNED_ROLES.iter().any(|role| component.role == role.as_str());
    components.iter().filter(is_planned).cloned().collect()
}

#[cfg(test)]
#[path = "materials_tests.rs"]
mod tests;
