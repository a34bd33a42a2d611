//! Facts about a node's system that are not part of the kernel target, such as the booted RHEL CoreOS image.

use std::{cmp::Ordering, collections::BTreeMap};

use super::{OsVersion, rpm_version};
use crate::definition::checked::{ImageDigest, ImageStream};

/// NFD's label for the version of the system's image (`OSTREE_VERSION` of RHEL CoreOS' os-release).
pub const OSTREE_VERSION_LABEL: &str = "feature.node.kubernetes.io/system-os_release.OSTREE_VERSION";
/// NFD's label for the version of RHEL that the system is based on.
pub const RHEL_VERSION_LABEL: &str = "feature.node.kubernetes.io/system-os_release.RHEL_VERSION";

/// Maximum number of system images recorded for one kernel. During a system upgrade, two are usual.
const MAX_SYSTEM_IMAGES: usize = 8;

/// Digests of ImageStreams by tag, or why an ImageStream could not be read.
pub type ImageStreams = BTreeMap<ImageStream, Result<BTreeMap<String, ImageDigest>, String>>;

/// Facts about the system that the nodes of a kernel target report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSystem {
    /// Versions of the system image, the newest first. Several system images may have the same kernel.
    pub ostree_versions: Vec<OsVersion>,
    /// The newest version of RHEL.
    pub rhel_version: Option<OsVersion>,
    /// Digest of the newest of [`ostree_versions`](Self::ostree_versions) that the family's ImageStream has a tag for, or
    /// why there is no digest. `None` without a lookup.
    pub digest: Option<Result<ImageDigest, String>>,
}

/// The system of a kernel that no node runs.
pub static UNKNOWN_SYSTEM: NodeSystem =
    NodeSystem { ostree_versions: Vec::new(), rhel_version: None, digest: None };

impl NodeSystem {
    /// Adds the versions in the labels of one node. Ignores invalid versions.
    pub fn add_labels(&mut self, ostree_version: Option<&str>, rhel_version: Option<&str>) {
        let parse = |text: Option<&str>| text.and_then(|text| text.parse::<OsVersion>().ok());
        if let Some(version) = parse(ostree_version).filter(|version| !self.ostree_versions.contains(version))
        {
            self.ostree_versions.push(version);
            self.ostree_versions.sort_by(|a, b| compare(b, a));
            self.ostree_versions.truncate(MAX_SYSTEM_IMAGES);
        }
        self.rhel_version = self.rhel_version.take().into_iter().chain(parse(rhel_version)).max_by(compare);
    }

    /// Looks up the digest of the newest version among the tags of the family's ImageStream.
    pub fn look_up_digest(&mut self, stream: &ImageStream, streams: &ImageStreams) {
        let versions = &self.ostree_versions;
        self.digest = Some(match streams.get(stream) {
            None => Err(format!("ImageStream {stream} was not looked up: it exists only in a live cluster")),
            Some(Err(why)) => Err(why.clone()),
            Some(Ok(tags)) => {
                versions.iter().find_map(|version| tags.get(version.as_str())).cloned().ok_or_else(|| {
                    let versions: Vec<&str> = versions.iter().map(OsVersion::as_str).collect();
                    format!("ImageStream {stream} has no tag {}", versions.join(" or "))
                })
            }
        });
    }

    /// Name, node label and known value of each placeholder.
    fn placeholders(&self) -> [(&'static str, &'static str, Option<&OsVersion>); 2] {
        [
            ("ostree_version", OSTREE_VERSION_LABEL, self.ostree_versions.first()),
            ("rhel_version", RHEL_VERSION_LABEL, self.rhel_version.as_ref()),
        ]
    }

    /// Returns the node label that a placeholder in the text needs but no node has.
    pub(crate) fn missing_label(&self, text: &str) -> Option<&'static str> {
        let mut missing = self.placeholders().into_iter().filter(|(_, _, version)| version.is_none());
        missing.find(|(name, ..)| text.contains(name)).map(|(_, label, _)| label)
    }

    /// Fills in the placeholders of known versions.
    pub(super) fn fill(&self, text: &str) -> String {
        self.placeholders().into_iter().fold(text.to_owned(), |text, (name, _, version)| match version {
            Some(version) => text.replace(&format!("{{{{{name}}}}}"), version.as_str()),
            None => text,
        })
    }
}

fn compare(a: &OsVersion, b: &OsVersion) -> Ordering {
    rpm_version::compare(a.as_str(), b.as_str()).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(versions: &[&str]) -> NodeSystem {
        let mut system = NodeSystem::default();
        for version in versions {
            system.add_labels(Some(version), Some("9.4"));
        }
        system
    }

    #[test]
    fn the_newest_image_comes_first() {
        let system =
            system(&["416.94.202407081958-0", "416.94.202412170927-0", "$(id)", "416.94.202407081958-0"]);
        assert_eq!(system.ostree_versions, ["416.94.202412170927-0", "416.94.202407081958-0"]);
        assert_eq!(
            system.fill("r.test/a:{{rhel_version}}-{{ostree_version}}-{{release}}"),
            "r.test/a:9.4-416.94.202412170927-0-{{release}}"
        );
        assert_eq!(system.missing_label("{{ostree_version}}{{rhel_version}}"), None);
        assert_eq!(UNKNOWN_SYSTEM.missing_label("{{ rhel_version }}"), Some(RHEL_VERSION_LABEL));
        let many: Vec<String> = (0..100).map(|number| format!("416.94.{number}-0")).collect();
        let many = self::system(&many.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(many.ostree_versions.len(), MAX_SYSTEM_IMAGES);
        assert_eq!(many.ostree_versions[0].as_str(), "416.94.99-0");
    }

    #[test]
    fn the_digest_is_of_the_newest_version_with_a_tag() {
        let stream: ImageStream = "openshift/driver-toolkit".parse().unwrap();
        let digest: ImageDigest = format!("sha256:{:064}", 1).parse().unwrap();
        let found = |streams: ImageStreams| {
            let mut system = system(&["416.94.1-0", "416.94.2-0"]);
            system.look_up_digest(&stream, &streams);
            system.digest.unwrap()
        };
        let tags = BTreeMap::from([("416.94.1-0".to_owned(), digest.clone())]);
        assert_eq!(found([(stream.clone(), Ok(tags))].into()), Ok(digest));
        let none = "ImageStream openshift/driver-toolkit has no tag 416.94.2-0 or 416.94.1-0";
        assert_eq!(found([(stream.clone(), Ok(BTreeMap::new()))].into()), Err(none.to_owned()));
        assert_eq!(found([(stream.clone(), Err("why".to_owned()))].into()), Err("why".to_owned()));
        assert!(found(ImageStreams::new()).unwrap_err().contains("a live cluster"));
    }
}
