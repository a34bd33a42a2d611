//! Kernel families (`kernels/*.yaml`): the targets they match, and the origin of headers, toolchain and kernel image.

use std::{borrow::Cow, collections::BTreeMap};

use oci::ImageReference;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Unexpected};

use super::{
    Architecture, DetachedSignature, DownloadedHeaders, FileProof, ImageHeaders, KernelImageSource,
    KernelRelease, KernelTarget, NodeSystem, OSTREE_VERSION_LABEL, OsId, OsVersion, Pattern, image_for,
};
use crate::definition::{
    ApiVersion, AptPackages, BootstrapSpec, FurtherRpmPackages, Metadata, NonEmpty, OneOf, RpmArchive,
    RpmPackages, RpmToolchain, TEXT,
    checked::{
        CompilerName, Flavor, HeadersPath, ImageDigest, ImagePattern, ImageStream, PackagePattern,
        PathInside, Suite,
    },
    one_of,
};

/// One file in `kernels/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelFamily {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `KernelFamily`.
    pub kind: KernelFamilyKind,
    /// The family's name.
    pub metadata: Metadata,
    /// The specification.
    pub spec: KernelFamilySpec,
    /// File that contains the definition, for display.
    #[serde(skip)]
    pub file: String,
}

/// The only valid value of a family's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KernelFamilyKind {
    /// `KernelFamily`.
    KernelFamily,
}

/// Targets that a family matches, and the origin of their headers and toolchain.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelFamilySpec {
    /// Targets of the family.
    #[serde(rename = "match")]
    pub matches: FamilyMatch,
    /// Origin of the header sets.
    pub headers: HeaderSource,
    /// Base of the build stage.
    pub toolchain: Toolchain,
    /// Digest of the image for each kernel release, for `{{digest}}` in `headers` and `toolchain`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub digests: BTreeMap<KernelRelease, ImageDigest>,
    /// ImageStream of a live OpenShift cluster that provides `{{digest}}` for releases not listed in `digests`, such as
    /// `openshift/driver-toolkit`. The tag is the `OSTREE_VERSION` of the nodes that run the release.
    pub image_stream: Option<ImageStream>,
    /// Compilers that these kernels were built with, such as `gcc-12`, each with its major version. If the toolchain has none of
    /// them, the plan says so. The compiler named by a kernel's headers takes precedence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub built_with: Vec<CompilerName>,
    /// Origin of the kernel images, for facts that headers do not contain and for boot checks.
    pub kernel_image: Option<KernelImageSource>,
    /// Whether modules get type information (BTF). It requires a `vmlinux` with BTF among the kernel's headers, and pahole in the
    /// toolchain. Only modules that offer functions to BPF programs need BTF.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub btf: bool,
    /// Source for the family's newest kernel. farrier builds images for that kernel before any node runs it.
    pub track: Option<KernelTrack>,
}

/// Source for a family's newest kernel. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum KernelTrack {
    /// Packages `linux-headers-<release>` of a Debian-like distribution.
    Apt(TrackedSuites),
    /// RPM packages. The newest kernel of each name in each repository is announced.
    Rpm(FurtherRpmPackages),
}

/// Tracked suites. Archive and keyring are the ones in the family's `headers`, or the host's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TrackedSuites {
    /// Suites, such as `bookworm-security`.
    pub suites: NonEmpty<Suite>,
    /// Suffixes of releases, after their last number and a `-`: `amd64`, `cloud-amd64`. The newest kernel of each is announced.
    pub flavors: NonEmpty<Flavor>,
}

/// Match conditions. All given fields must match; without fields, the family matches every target.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FamilyMatch {
    /// Operating system ids (`ID` of os-release). Default: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_many")]
    #[schemars(with = "OneOrMany")]
    pub os: Vec<OsId>,
    /// A regular expression that must match the whole operating system version.
    pub os_version: Option<Pattern>,
    /// A regular expression that must match the whole kernel release.
    pub release: Option<Pattern>,
    /// Processor architecture.
    pub arch: Option<Architecture>,
    /// Compilers, such as `gcc-14`. With them, the family is only a fallback for kernels with user-provided headers. It supplies
    /// the toolchain if one of these compilers built the kernel and the regular family's toolchain lacks that compiler.
    #[serde(rename = "builtWith", default, skip_serializing_if = "Vec::is_empty")]
    pub fallback_for_compilers: Vec<CompilerName>,
}

/// Origin of a family's header sets. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum HeaderSource {
    /// Header packages of a Debian-like distribution. Their dependencies from the same source package are included.
    Apt(AptHeaders),
    /// RPM packages for the kernel's release.
    Rpm(RpmPackages),
    /// A tarball for each release. `path` may contain `{{release}}`.
    Tarball(TarballHeaders),
    /// A directory or an archive in an image.
    Oci(ImageHeaders),
    /// An archive at a URL, with a checksum or a signature beside it.
    Url(DownloadedHeaders),
}

impl HeaderSource {
    /// Repositories of headers in RPM packages; `None` for other headers.
    pub fn rpm_archive(&self) -> Option<&RpmArchive> {
        match self {
            Self::Rpm(packages) => Some(&packages.from),
            Self::Apt(_) | Self::Tarball(_) | Self::Oci(_) | Self::Url(_) => None,
        }
    }
}

impl KernelFamilySpec {
    /// Returns the origin of a kernel's header set. Placeholders are replaced with facts known about the nodes that run it.
    pub fn headers_for(&self, target: &KernelTarget, system: &NodeSystem) -> Cow<'_, HeaderSource> {
        let fill = |text: &str| self.fill(text, target, system);
        let fill_path = |path: &Option<PathInside>| path.as_ref().map(|path| path.filled(fill));
        match &self.headers {
            HeaderSource::Oci(ImageHeaders { image, path }) => {
                let headers = ImageHeaders { image: image.filled(fill), path: fill_path(path) };
                Cow::Owned(HeaderSource::Oci(headers))
            }
            HeaderSource::Url(DownloadedHeaders { url, verify, path }) => {
                let verify = match verify {
                    FileProof::Checksums(list) => FileProof::Checksums(list.filled(fill)),
                    FileProof::Signature(DetachedSignature { url, signed_by }) => {
                        let signed_by = signed_by.clone();
                        FileProof::Signature(DetachedSignature { url: url.filled(fill), signed_by })
                    }
                };
                let headers = DownloadedHeaders { url: url.filled(fill), verify, path: fill_path(path) };
                Cow::Owned(HeaderSource::Url(headers))
            }
            headers @ (HeaderSource::Apt(_) | HeaderSource::Rpm(_) | HeaderSource::Tarball(_)) => {
                Cow::Borrowed(headers)
            }
        }
    }

    /// Returns the reference of one of the family's images, with placeholders replaced as in [`Self::headers_for`].
    pub fn image_for(
        &self,
        image: &ImagePattern,
        target: &KernelTarget,
        system: &NodeSystem,
    ) -> Result<ImageReference, String> {
        image_for(&image.filled(|text| self.fill(text, target, system)), target)
    }

    fn fill(&self, text: &str, target: &KernelTarget, system: &NodeSystem) -> String {
        let text = system.fill(text);
        match self.digest(target, system) {
            Some(digest) => text.replace("{{digest}}", digest),
            None => text,
        }
    }

    fn digest<'a>(&'a self, target: &KernelTarget, system: &'a NodeSystem) -> Option<&'a ImageDigest> {
        self.digests.get(&target.release).or_else(|| system.digest.as_ref()?.as_ref().ok())
    }

    /// Describes the first placeholder in `texts` whose value is unknown; `None` if all values are known.
    pub fn unresolved(&self, texts: &[&str], target: &KernelTarget, system: &NodeSystem) -> Option<String> {
        let release = &target.release;
        let no_label = |label| format!("no node that runs {release} has the label {label}");
        if let Some(label) = texts.iter().find_map(|text| system.missing_label(text)) {
            return Some(no_label(label));
        }
        let needs_digest = texts.iter().any(|text| text.contains("{{digest}}"));
        if !needs_digest || self.digest(target, system).is_some() {
            return None;
        }
        let not_in_digests = format!("its kernel family has no image digest for {release} in `digests`");
        if self.image_stream.is_none() {
            return Some(not_in_digests);
        }
        // `system.digest` is what the ImageStream answered for the versions in the nodes' labels.
        if !system.ostree_versions.is_empty()
            && let Some(Err(why)) = &system.digest
        {
            return Some(format!("{not_in_digests}, and {why}"));
        }
        Some(format!("{not_in_digests}, and {}", no_label(OSTREE_VERSION_LABEL)))
    }
}

/// Header packages of one kernel.
pub type AptHeaders = AptPackages<PackagePattern>;

/// User-provided header files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TarballHeaders {
    /// File or directory, relative to the definitions directory. `{{release}}` is replaced with the kernel release. The root of
    /// the tree is either `/` (`usr/src/...`, `lib/modules/<release>/build`) or the build tree (`Makefile`, `include/`,
    /// `Module.symvers` at the top, or one directory down).
    pub path: HeadersPath,
}

/// Base of the build stage. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Toolchain {
    /// Built from packages. Their scripts are not run.
    Bootstrap(BootstrapSpec),
    /// Built from RPM packages. Their scripts are not run.
    Rpm(RpmToolchain),
    /// Reference of an existing image, with its tag or digest. Placeholders: as in `headers.oci`.
    Image(ImagePattern),
}

/// Returns the target's regular family: the first one, in file-name order, that matches the target and is not only a fallback
/// (`match.builtWith`).
pub fn match_family<'a>(families: &'a [KernelFamily], target: &KernelTarget) -> Option<&'a KernelFamily> {
    families.iter().find(|family| {
        let matches = &family.spec.matches;
        matches.fallback_for_compilers.is_empty() && matches.is_match(target)
    })
}

impl FamilyMatch {
    /// Whether all given fields match, ignoring the release.
    pub fn may_match(&self, os: &OsId, os_version: &OsVersion, arch: Architecture) -> bool {
        let Self {
            os: ids,
            os_version: versions,
            release: _,
            arch: required_arch,
            fallback_for_compilers: _,
        } = self;
        (ids.is_empty() || ids.contains(os))
            && versions.as_ref().is_none_or(|pattern| pattern.is_match(os_version.as_str()))
            && required_arch.is_none_or(|required| required == arch)
    }

    /// Whether all given fields match.
    pub fn is_match(&self, target: &KernelTarget) -> bool {
        self.may_match(&target.os, &target.os_version, target.arch)
            && self.release.as_ref().is_none_or(|pattern| pattern.is_match(target.release.as_str()))
    }
}

/// One name or a list of names, for the schema only.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "only the schema is generated from the type")]
enum OneOrMany {
    One(OsId),
    Many(Vec<OsId>),
}

fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<OsId>, D::Error> {
    let expected = "an operating system's id, or a list of them";
    Ok(match one_of(deserializer, [TEXT, Unexpected::Seq], expected)? {
        OneOf::First(id) => vec![id],
        OneOf::Second(ids) => ids,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(name: &str, matches: FamilyMatch) -> KernelFamily {
        KernelFamily {
            api_version: ApiVersion::V1Alpha1,
            kind: KernelFamilyKind::KernelFamily,
            metadata: Metadata { name: name.parse().unwrap() },
            spec: KernelFamilySpec {
                matches,
                headers: HeaderSource::Tarball(TarballHeaders {
                    path: "headers/{{release}}.tar".parse().unwrap(),
                }),
                toolchain: Toolchain::Image("registry.example/toolchain:1".parse().unwrap()),
                digests: BTreeMap::new(),
                image_stream: None,
                built_with: Vec::new(),
                kernel_image: None,
                btf: false,
                track: None,
            },
            file: String::new(),
        }
    }

    fn target(os: &str, release: &str, arch: Architecture) -> KernelTarget {
        KernelTarget {
            os: os.parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: release.parse().unwrap(),
            arch,
        }
    }

    #[test]
    fn the_first_family_that_matches_wins() {
        let debian = || FamilyMatch { os: vec!["debian".parse().unwrap()], ..FamilyMatch::default() };
        let cloud = FamilyMatch { release: Some(".*-cloud-.*".to_owned().try_into().unwrap()), ..debian() };
        let arm = FamilyMatch { arch: Some(Architecture::Arm64), ..debian() };
        let families = [
            family("cloud", cloud),
            family("arm", arm),
            family("old", FamilyMatch { os_version: Some("11".to_owned().try_into().unwrap()), ..debian() }),
            family("debian", debian()),
            family("later", debian()),
        ];
        let name = |os, release, arch| {
            match_family(&families, &target(os, release, arch)).map(|family| family.metadata.name.as_str())
        };
        assert_eq!(name("debian", "6.1.0-47-cloud-arm64", Architecture::Arm64), Some("cloud"));
        assert_eq!(name("debian", "6.1.0-47-arm64", Architecture::Arm64), Some("arm"));
        assert_eq!(name("debian", "6.1.0-47-amd64", Architecture::Amd64), Some("debian"));
        assert_eq!(name("ubuntu", "6.8.0-45-generic", Architecture::Amd64), None);
    }

    #[test]
    fn a_release_has_its_digest() {
        const LISTED: &str = "5.14.0-427.el9_4.x86_64";
        let json = serde_json::json!({
            "match": {},
            "headers": {"oci": {"image": "r.test/toolkit@{{digest}}", "path": "/usr/src/kernels/{{release}}"}},
            "toolchain": {"image": "r.test/toolkit@{{digest}}"},
            "digests": {LISTED: format!("sha256:{:064}", 1)},
        });
        let mut spec: KernelFamilySpec = serde_json::from_value(json).unwrap();
        let image = |spec: &KernelFamilySpec, release, system: &NodeSystem| {
            let target = target("rhcos", release, Architecture::Amd64);
            let headers = spec.headers_for(&target, system);
            let HeaderSource::Oci(headers) = headers.as_ref() else { panic!("another source") };
            let Toolchain::Image(toolchain) = &spec.toolchain else { panic!("no image") };
            let found = spec.image_for(toolchain, &target, system);
            assert_eq!(image_for(&headers.image, &target), found);
            let lacks = spec.unresolved(&[toolchain.as_str(), ""], &target, system);
            assert_eq!(found.is_err(), lacks.is_some());
            found.map(|image| image.to_string()).map_err(|_| lacks.unwrap())
        };
        let mut system = NodeSystem::default();
        assert_eq!(image(&spec, LISTED, &system), Ok(format!("r.test/toolkit@sha256:{:064}", 1)));
        let other = "5.14.0-503.el9_5.x86_64";
        insta::assert_snapshot!(image(&spec, other, &system).unwrap_err(), @"its kernel family has no image digest for 5.14.0-503.el9_5.x86_64 in `digests`");

        let stream: ImageStream = "openshift/driver-toolkit".parse().unwrap();
        spec.image_stream = Some(stream.clone());
        insta::assert_snapshot!(image(&spec, other, &system).unwrap_err(), @"its kernel family has no image digest for 5.14.0-503.el9_5.x86_64 in `digests`, and no node that runs 5.14.0-503.el9_5.x86_64 has the label feature.node.kubernetes.io/system-os_release.OSTREE_VERSION");
        system.add_labels(Some("418.94.1-0"), None);
        system.digest = Some(Err("ImageStream openshift/driver-toolkit has no tag 418.94.1-0".to_owned()));
        insta::assert_snapshot!(image(&spec, other, &system).unwrap_err(), @"its kernel family has no image digest for 5.14.0-503.el9_5.x86_64 in `digests`, and ImageStream openshift/driver-toolkit has no tag 418.94.1-0");
        let digest: ImageDigest = format!("sha256:{:064}", 2).parse().unwrap();
        system.digest = Some(Ok(digest.clone()));
        assert_eq!(image(&spec, other, &system), Ok(format!("r.test/toolkit@{digest}")));
        assert_eq!(image(&spec, LISTED, &system), Ok(format!("r.test/toolkit@sha256:{:064}", 1)));
    }

    #[test]
    fn systems_stand_in_addresses_and_images() {
        let spec: KernelFamilySpec = serde_json::from_value(serde_json::json!({
            "match": {},
            "headers": {"url": {
                "url": "https://h.test/{{ostree_version}}/h.tgz", "path": "/{{rhel_version}}/{{release}}",
                "verify": {"signature": {"url": "https://h.test/{{ostree_version}}/h.asc", "signedBy": "keys/h.asc"}},
            }},
            "toolchain": {"image": "r.test/toolkit:{{ostree_version}}"},
        }))
        .unwrap();
        let target = target("rhcos", "5.14.0-427.el9_4.x86_64", Architecture::Amd64);
        let mut system = NodeSystem::default();
        let headers = serde_json::to_string(&spec.headers).unwrap();
        let lacks = |system: &NodeSystem| spec.unresolved(&["", &headers], &target, system);
        insta::assert_snapshot!(lacks(&system).unwrap(), @"no node that runs 5.14.0-427.el9_4.x86_64 has the label feature.node.kubernetes.io/system-os_release.OSTREE_VERSION");
        system.add_labels(Some("416.94.1-0"), Some("9.4"));
        assert_eq!(lacks(&system), None);
        let filled = serde_json::to_value(&*spec.headers_for(&target, &system)).unwrap();
        assert_eq!(
            filled,
            serde_json::json!({"url": {
                "url": "https://h.test/416.94.1-0/h.tgz", "path": "/9.4/{{release}}",
                "verify": {"signature": {"url": "https://h.test/416.94.1-0/h.asc", "signedBy": "keys/h.asc"}},
            }})
        );
        let Toolchain::Image(toolchain) = &spec.toolchain else { panic!("no image") };
        let image = spec.image_for(toolchain, &target, &system).unwrap();
        assert_eq!(image.to_string(), "r.test/toolkit:416.94.1-0");
    }

    #[test]
    fn a_family_without_fields_matches_every_target() {
        assert!(FamilyMatch::default().is_match(&target("acme", "6.1.192-acme+", Architecture::Amd64)));
    }
}
