//! Pure: what belongs to some images and kernels: what they are made from, and what is published of them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    image::{Definitions, Digest, DriverImage, ImageName, RuntimeBase, SourceOrigin, SourceSpec, Tag},
    kernel::{KernelFamily, KernelTarget, match_family},
    machine::native,
    registry::is_joined,
    store::InputKind,
};

/// What a manifest is to the site that gets it. In the order in which a site needs them: what others name comes first.
#[derive(Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContentKind {
    /// The definitions directory.
    Definitions,
    /// A kernel's header set.
    Headers,
    /// A source.
    Source,
    /// A root file system made from packages, as an artifact of the store or as the image that bases are.
    RootFs,
    /// A copy of an image of another registry.
    Mirror,
    /// farrier's own image.
    Farrier,
    /// A published driver image.
    Image,
    /// What refers to an image: check report, bill of materials, provenance, bundles with signatures.
    Referrer,
    /// A signature, or a signed statement, under a tag made from its image's digest.
    Signature,
}

impl From<InputKind> for ContentKind {
    fn from(kind: InputKind) -> Self {
        match kind {
            InputKind::Headers => Self::Headers,
            InputKind::Source => Self::Source,
            InputKind::RootFs => Self::RootFs,
            InputKind::Definitions => Self::Definitions,
        }
    }
}

/// One manifest that a bundle holds, with all that it names: blobs, and the manifests of an index.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Content {
    /// What it is.
    pub kind: ContentKind,
    /// Its repository below the registry's prefix: `mstflint`, `sources`, `mirror/docker.io/library/debian`.
    pub repository: String,
    /// Its tag; `None` for what goes by its digest alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Tag>,
    /// Its digest.
    pub digest: Digest,
}

impl Content {
    /// Is it an image, to which others refer?
    pub(super) fn is_image(&self) -> bool {
        self.kind == ContentKind::Image
    }

    /// Does its tag hold signatures, to which others may be added?
    pub(super) fn is_joined(&self) -> bool {
        self.kind == ContentKind::Signature && self.tag.as_ref().is_some_and(is_joined)
    }

    /// Does its tag name what was kept last, and so another content in time? The store has such tags for definitions
    /// (`latest`), and for sources and bases by what definitions say of them (`declared-...`). All others never change.
    pub fn has_moving_tag(&self) -> bool {
        let tag = self.tag.as_ref().map_or("", Tag::as_str);
        match self.kind {
            ContentKind::Definitions => tag == "latest",
            ContentKind::Source | ContentKind::RootFs => tag.starts_with("declared-"),
            _ => false,
        }
    }
}

/// What images are made from for some kernels; nothing is looked up yet.
#[derive(Clone, Debug, Default)]
pub struct Needed<'a> {
    /// The images: those asked for and those they are compiled against.
    pub images: Vec<&'a DriverImage>,
    /// Their sources.
    pub sources: Vec<SourceSpec>,
    /// What they are put on, where that is not another driver image.
    pub bases: Vec<(&'a DriverImage, &'a RuntimeBase)>,
    /// The kernels that have a family, with it.
    pub kernels: Vec<(&'a KernelTarget, &'a KernelFamily)>,
    /// Kernels of which no family knows where headers come from.
    pub strangers: Vec<&'a KernelTarget>,
}

/// What the given images need for the given kernels. Names that no definition has are left out.
pub fn needed<'a>(
    definitions: &'a Definitions,
    images: &BTreeSet<ImageName>,
    kernels: &'a BTreeSet<KernelTarget>,
) -> Needed<'a> {
    let mut all: BTreeMap<&ImageName, &DriverImage> = BTreeMap::new();
    let mut waiting: Vec<&ImageName> = images.iter().collect();
    while let Some(name) = waiting.pop() {
        if let Some((name, image)) = definitions.images.get_key_value(name)
            && all.insert(name, image).is_none()
        {
            waiting.extend(image.spec.needs.iter().filter_map(|need| need.image()));
        }
    }
    let mut needed = Needed { images: all.into_values().collect(), ..Needed::default() };
    for kernel in kernels {
        let Some(family) = match_family(&definitions.families, kernel) else {
            needed.strangers.push(kernel);
            continue;
        };
        needed.kernels.push((kernel, family));
    }
    for image in needed.images.clone() {
        for source in &image.spec.sources {
            // They are copied as they are.
            if matches!(source.from, SourceOrigin::Image(_)) {
                continue;
            }
            // A plan takes the driver's version from the machine's own. A kernel for which none can be named is told in the plan.
            let own = (!source.is_of_kernel()).then(|| source.for_architecture(native()));
            let of_kernels = needed.kernels_of(image).filter_map(|kernel| source.for_kernel(kernel).ok());
            let wanted: Vec<SourceSpec> = own.into_iter().chain(of_kernels).collect();
            for source in wanted {
                let same = |other: &SourceSpec| {
                    let SourceSpec { name: _, from, unpack, subdir } = &source;
                    (&other.from, &other.unpack, &other.subdir) == (from, unpack, subdir)
                };
                if !needed.sources.iter().any(same) {
                    needed.sources.push(source);
                }
            }
        }
        match &image.spec.runtime.base {
            None | Some(RuntimeBase::Need(_)) => {}
            Some(base) => needed.bases.push((image, base)),
        }
    }
    needed
}

impl<'a> Needed<'a> {
    /// The kernels that the image is meant for: those in its range that have a family.
    pub fn kernels_of(&self, image: &DriverImage) -> impl Iterator<Item = &'a KernelTarget> {
        let kernels = self.kernels.iter().map(|(kernel, _)| *kernel);
        kernels.filter(|kernel| image.spec.range_without(kernel).is_none())
    }

    /// Images of other registries: what definitions name as base or prebuilt modules. Those with headers are not among them, since the
    /// header sets are kept; headers choose toolchains.
    pub fn foreign(&self) -> BTreeSet<String> {
        let Self { images, sources: _, bases, kernels: _, strangers: _ } = self;
        let prebuilt = images.iter().flat_map(|image| {
            let sources = image.spec.sources.iter().filter_map(|source| match &source.from {
                SourceOrigin::Image(source) => Some(source),
                _ => None,
            });
            sources
                .flat_map(|source| self.kernels_of(image).filter_map(|kernel| source.for_kernel(kernel).ok()))
        });
        let prebuilt = prebuilt.map(|(image, _)| image.to_string());
        let bases = bases.iter().filter_map(|(_, base)| match base {
            RuntimeBase::Image(reference) => Some(reference.to_string()),
            _ => None,
        });
        bases.chain(prebuilt).collect()
    }
}

/// Each once, in the order in which a site needs them.
pub fn in_order(contents: impl IntoIterator<Item = Content>) -> Vec<Content> {
    contents.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Architecture;

    fn definitions() -> Definitions {
        let image = |name: &str, source: &str, needs: &str| -> DriverImage {
            let text = format!(
                r#"{{"apiVersion": "farrier.dev/v1alpha1", "kind": "DriverImage", "metadata": {{"name": "{name}"}},
                "spec": {{"version": "1", "template": "kbuild", "modules": ["m"], "needs": [{needs}],
                "sources": [{{"name": "s", "from": {{"path": {{"path": "{source}"}}}}}}],
                "runtime": {{"base": {{"image": "debian:12"}}}}, "nodes": {{"matchLabels": {{"a": "b"}}}}, "rollout": []}}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let family: KernelFamily = serde_json::from_str(
            r#"{"apiVersion": "farrier.dev/v1alpha1", "kind": "KernelFamily", "metadata": {"name": "f"},
            "spec": {"match": {"os": ["debian"], "osVersion": "12"}, "headers": {"tarball": {"path": "x"}},
            "toolchain": {"image": "debian:12"}}}"#,
        )
        .unwrap();
        let images = [image("a", "one", ""), image("b", "one", "\"a\""), image("c", "two", "")];
        Definitions {
            images: images.into_iter().map(|image| (image.metadata.name.clone(), image)).collect(),
            families: vec![family],
            ..Definitions::default()
        }
    }

    fn kernel(os: &str) -> KernelTarget {
        KernelTarget {
            os: os.parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0".parse().unwrap(),
            arch: Architecture::Amd64,
        }
    }

    #[test]
    fn an_image_brings_what_it_needs_and_nothing_else() {
        let definitions = definitions();
        let kernels = BTreeSet::from([kernel("debian"), kernel("plan9")]);
        let images = BTreeSet::from(["b".parse().unwrap()]);
        let needed = needed(&definitions, &images, &kernels);
        let names: Vec<_> = needed.images.iter().map(|image| image.metadata.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        // The same source of two images is one.
        assert_eq!(needed.sources.len(), 1);
        assert_eq!((needed.kernels.len(), needed.strangers.len()), (1, 1));
        assert_eq!(needed.foreign(), BTreeSet::from(["debian:12".to_owned()]));
    }

    #[test]
    fn packages_and_images_with_modules_are_those_of_the_kernels() {
        let mut definitions = definitions();
        let name: ImageName = "c".parse().unwrap();
        let sources: [SourceSpec; 3] = [
            r#"{"name": "p", "from": {"apt": {"package": "modules-{{release}}", "suites": ["sid"]}}}"#,
            r#"{"name": "d", "from": {"apt": {"package": "driver", "suites": ["sid"]}}}"#,
            r#"{"name": "i", "from": {"image": {"reference": "r.test/acme:{{release}}"}}}"#,
        ]
        .map(|source| serde_json::from_str(source).unwrap());
        definitions.images.get_mut(&name).unwrap().spec.sources = sources.to_vec();
        let arm64 = KernelTarget { arch: Architecture::Arm64, ..kernel("debian") };
        let kernels = BTreeSet::from([kernel("debian"), arm64, kernel("plan9")]);
        let images = BTreeSet::from([name]);
        let needed = needed(&definitions, &images, &kernels);
        let packages = needed.sources.iter().map(|source| match &source.from {
            SourceOrigin::Apt(package) => format!("{}:{}", package.package, package.arch.unwrap()),
            other => panic!("{other:?}"),
        });
        let packages: Vec<String> = packages.collect();
        assert_eq!(packages, ["modules-6.1.0:amd64", "modules-6.1.0:arm64", "driver:amd64", "driver:arm64"]);
        assert_eq!(needed.foreign(), BTreeSet::from(["debian:12", "r.test/acme:6.1.0"].map(str::to_owned)));
    }

    #[test]
    fn an_image_is_meant_for_the_kernels_in_its_range_that_have_a_family() {
        let mut definitions = definitions();
        let name: ImageName = "b".parse().unwrap();
        definitions.images.get_mut(&name).unwrap().spec.kernels = Some(">=6.2".parse().unwrap());
        let kernels = BTreeSet::from([kernel("debian"), kernel("plan9")]);
        let images = BTreeSet::from([name]);
        let needed = needed(&definitions, &images, &kernels);
        let meant: Vec<usize> = needed.images.iter().map(|image| needed.kernels_of(image).count()).collect();
        assert_eq!(meant, [1, 0]);
    }

    #[test]
    fn contents_come_once_and_images_before_what_refers_to_them() {
        let content = |kind, tag: Option<&str>| Content {
            kind,
            repository: "x".to_owned(),
            tag: tag.map(|tag| tag.parse().unwrap()),
            digest: Digest::of(b"x"),
        };
        let referrer = content(ContentKind::Referrer, None);
        let (image, source) =
            (content(ContentKind::Image, Some("1")), content(ContentKind::Source, Some("2")));
        let list = in_order([referrer.clone(), image.clone(), image.clone(), source.clone()]);
        assert_eq!(list, [source, image, referrer]);
        let text = serde_json::to_string(&list).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Content>>(&text).unwrap(), list);
        assert!(
            text.starts_with(r#"[{"kind":"source","repository":"x","tag":"2","digest":"sha256:"#),
            "{text}"
        );
    }
}
