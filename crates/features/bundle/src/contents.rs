//! Determines the build inputs and published content that a site needs for some images and kernels.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::{Definitions, Digest, DriverImage, ImageName, RuntimeBase, SourceOrigin, SourceSpec, Tag},
    kernel::{KernelFamily, KernelTarget, match_family},
};
use farrier_local::machine::native;
use farrier_store::{InputKind, is_moving_tag, registry::is_joined};
use serde::{Deserialize, Serialize};

use super::License;

/// Kind of a manifest in a bundle. The variants are in the order in which a site needs them: content comes before the
/// content that refers to it.
#[derive(Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContentKind {
    /// The definitions directory.
    Definitions,
    /// A kernel's header set.
    Headers,
    Source,
    /// A root file system made from packages, either as an artifact of the store or as the image that serves as a base.
    RootFs,
    /// A copy of another registry's image.
    Mirror,
    /// farrier's own image.
    Farrier,
    /// A published driver image.
    Image,
    /// A referrer of an image: check report, bill of materials, provenance, signature bundle.
    Referrer,
    /// A signature or a signed statement under a tag made from the image's digest.
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

/// A manifest in a bundle, with everything that it names: blobs, and the manifests of an index.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Content {
    /// Kind of the manifest.
    pub kind: ContentKind,
    /// Repository below the registry's prefix: `mstflint`, `sources`, `mirror/docker.io/library/debian`.
    pub repository: String,
    /// Tag; `None` for content that is addressed by digest only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Tag>,
    /// Digest of the manifest.
    pub digest: Digest,
}

impl Content {
    /// Whether the content is a driver image, which has referrers.
    pub(super) fn is_image(&self) -> bool {
        self.kind == ContentKind::Image
    }

    /// Whether its tag holds signatures, to which more can be added.
    pub(super) fn is_joined(&self) -> bool {
        self.kind == ContentKind::Signature && self.tag.as_ref().is_some_and(is_joined)
    }

    /// Whether its tag moves to newer content over time.
    pub(crate) fn has_moving_tag(&self) -> bool {
        self.tag.as_ref().is_some_and(|tag| is_moving_tag(&self.repository, tag))
    }
}

/// Build inputs of images for some kernels, before any lookup.
#[derive(Clone, Debug, Default)]
pub struct Needed<'a> {
    /// The requested images and, recursively, their needs.
    pub images: Vec<&'a DriverImage>,
    /// Sources of the images.
    pub sources: Vec<SourceSpec>,
    /// Runtime bases of the images, except bases that are driver images.
    pub bases: Vec<(&'a DriverImage, &'a RuntimeBase)>,
    /// Kernels that match a kernel family, with the family.
    pub kernels: Vec<(&'a KernelTarget, &'a KernelFamily)>,
    /// Kernels that match no kernel family, so that the source of their headers is unknown.
    pub unmatched_kernels: Vec<&'a KernelTarget>,
    /// Kernels of each image, where the selection names them.
    kernels_by_image: Option<&'a BTreeMap<ImageName, BTreeSet<KernelTarget>>>,
}

/// Images and kernels for another site.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// The driver images, without their dependencies.
    pub images: BTreeSet<ImageName>,
    pub kernels: BTreeSet<KernelTarget>,
    /// Kernels of each image, also of dependencies; `None` for all kernels.
    pub kernels_by_image: Option<BTreeMap<ImageName, BTreeSet<KernelTarget>>>,
}

/// Determines what the images need for the kernels. Skips names without a definition.
pub fn needed<'a>(definitions: &'a Definitions, selection: &'a Selection) -> Needed<'a> {
    let Selection { images, kernels, kernels_by_image } = selection;
    let mut all: BTreeMap<&ImageName, &DriverImage> = BTreeMap::new();
    let mut queue: Vec<&ImageName> = images.iter().collect();
    while let Some(name) = queue.pop() {
        if let Some((name, image)) = definitions.images.get_key_value(name)
            && all.insert(name, image).is_none()
        {
            queue.extend(image.spec.needs.iter().filter_map(|need| need.image()));
        }
    }
    let images = all.into_values().collect();
    let mut needed = Needed { images, kernels_by_image: kernels_by_image.as_ref(), ..Needed::default() };
    for kernel in kernels {
        match match_family(&definitions.families, kernel) {
            Some(family) => needed.kernels.push((kernel, family)),
            None => needed.unmatched_kernels.push(kernel),
        }
    }
    for image in needed.images.clone() {
        for source in &image.spec.sources {
            // Prebuilt images are copied unchanged.
            if matches!(source.from, SourceOrigin::Image(_)) {
                continue;
            }
            for source in needed.variants(image, source) {
                if !needed.sources.iter().any(|other| has_same_content(other, &source)) {
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

/// Whether two sources have the same content, whatever their names and licenses.
pub(super) fn has_same_content(one: &SourceSpec, other: &SourceSpec) -> bool {
    let SourceSpec { name: _, from, unpack, subdir, license: _, redistribute: _ } = one;
    (from, unpack, subdir) == (&other.from, &other.unpack, &other.subdir)
}

impl<'a> Needed<'a> {
    /// Returns the source in each form in which it is looked up for the kernels of its image.
    fn variants(&self, image: &DriverImage, source: &SourceSpec) -> Vec<SourceSpec> {
        // The plan takes the driver's version from the package for the machine's own architecture. The plan also
        // reports kernels for which the source has no package.
        let for_this_machine = (!source.differs_by_kernel()).then(|| source.for_architecture(native()));
        let for_kernels = self.kernels_of(image).filter_map(|kernel| source.for_kernel(kernel).ok());
        for_this_machine.into_iter().chain(for_kernels).collect()
    }

    /// Licenses of the images' sources that `is_carried` accepts.
    pub(super) fn licenses(&self, is_carried: impl Fn(&SourceSpec) -> bool) -> BTreeSet<License> {
        let mut licenses = BTreeSet::new();
        for image in &self.images {
            for source in &image.spec.sources {
                if self.variants(image, source).iter().any(&is_carried) {
                    licenses.insert(License::of_source(image, source));
                }
            }
        }
        licenses
    }

    /// Kernels that the image is meant for: selected kernels with a family and in the image's range.
    pub fn kernels_of(&self, image: &DriverImage) -> impl Iterator<Item = &'a KernelTarget> {
        let selected = self.kernels_by_image.map(|kernels| kernels.get(&image.metadata.name));
        let is_selected = move |kernel: &&KernelTarget| match selected {
            Some(Some(kernels)) => kernels.contains(*kernel),
            Some(None) => false,
            None => true,
        };
        let kernels = self.kernels.iter().map(|(kernel, _)| *kernel).filter(is_selected);
        kernels.filter(|kernel| image.spec.range_excluding(kernel).is_none())
    }

    /// Images of other registries that definitions name as runtime bases or prebuilt modules. Excludes images with
    /// headers, because the store keeps header sets, and toolchains, because the headers select them.
    pub(crate) fn foreign_images(&self) -> BTreeSet<String> {
        let Self { images, bases, .. } = self;
        let mut references = BTreeSet::new();
        for image in images {
            for source in &image.spec.sources {
                let SourceOrigin::Image(source) = &source.from else { continue };
                let prebuilt = self.kernels_of(image).filter_map(|kernel| source.for_kernel(kernel).ok());
                references.extend(prebuilt.map(|(reference, _)| reference.to_string()));
            }
        }
        for (_, base) in bases {
            if let RuntimeBase::Image(reference) = base {
                references.insert(reference.to_string());
            }
        }
        references
    }
}

/// Sorts contents in the order in which a site needs them, without duplicates.
pub fn sort_contents(contents: impl IntoIterator<Item = Content>) -> Vec<Content> {
    contents.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use farrier_core::kernel::Architecture;

    use super::*;

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
        let selection =
            Selection { images: BTreeSet::from(["b".parse().unwrap()]), kernels, kernels_by_image: None };
        let needed = needed(&definitions, &selection);
        let names: Vec<_> = needed.images.iter().map(|image| image.metadata.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        // Two images share one source.
        assert_eq!(needed.sources.len(), 1);
        assert_eq!((needed.kernels.len(), needed.unmatched_kernels.len()), (1, 1));
        assert_eq!(needed.foreign_images(), BTreeSet::from(["debian:12".to_owned()]));
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
        let selection = Selection { images: BTreeSet::from([name]), kernels, kernels_by_image: None };
        let needed = needed(&definitions, &selection);
        let packages = needed.sources.iter().map(|source| match &source.from {
            SourceOrigin::Apt(package) => format!("{}:{}", package.package, package.arch.unwrap()),
            other => panic!("{other:?}"),
        });
        let packages: Vec<String> = packages.collect();
        assert_eq!(packages, ["modules-6.1.0:amd64", "modules-6.1.0:arm64", "driver:amd64", "driver:arm64"]);
        assert_eq!(
            needed.foreign_images(),
            BTreeSet::from(["debian:12", "r.test/acme:6.1.0"].map(str::to_owned))
        );
    }

    #[test]
    fn a_carried_source_has_the_licenses_of_each_image_that_it_is_for() {
        let definitions = definitions();
        let images = ["b", "c"].map(|name| name.parse().unwrap()).into();
        let selection =
            Selection { images, kernels: BTreeSet::from([kernel("debian")]), kernels_by_image: None };
        let needed = needed(&definitions, &selection);
        let is_carried = |source: &SourceSpec| has_same_content(source, &needed.sources[0]);
        let found = needed.licenses(is_carried);
        let named: Vec<_> =
            found.iter().map(|license| (&*license.image, license.source.as_deref())).collect();
        assert_eq!(named, [("a", Some("s")), ("b", Some("s"))]);
    }

    #[test]
    fn an_image_is_meant_for_the_kernels_in_its_range_that_have_a_family() {
        let mut definitions = definitions();
        let name: ImageName = "b".parse().unwrap();
        definitions.images.get_mut(&name).unwrap().spec.kernels = Some(">=6.2".parse().unwrap());
        let kernels = BTreeSet::from([kernel("debian"), kernel("plan9")]);
        let mut selection =
            Selection { images: BTreeSet::from([name.clone()]), kernels, kernels_by_image: None };
        let meant = |selection: &Selection| -> Vec<usize> {
            let needed = needed(&definitions, selection);
            needed.images.iter().map(|image| needed.kernels_of(image).count()).collect()
        };
        assert_eq!(meant(&selection), [1, 0]);
        // A fleet whose nodes call for `a` on no kernel.
        selection.kernels_by_image = Some(BTreeMap::from([(name, selection.kernels.clone())]));
        assert_eq!(meant(&selection), [0, 0]);
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
        let list = sort_contents([referrer.clone(), image.clone(), image.clone(), source.clone()]);
        assert_eq!(list, [source, image, referrer]);
        let text = serde_json::to_string(&list).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Content>>(&text).unwrap(), list);
        assert!(
            text.starts_with(r#"[{"kind":"source","repository":"x","tag":"2","digest":"sha256:"#),
            "{text}"
        );
    }
}
