//! Renders the tags of a driver image for one kernel target.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Tag;
use crate::{
    kernel::{KernelLabel, KernelTarget, NodeSystem},
    template::Templates,
};

/// Value of `{{signer}}` if modules are not signed.
const UNSIGNED: &str = "unsigned";

/// Values for the variables of tag patterns.
#[derive(Clone, Debug)]
pub struct TagInputs<'a> {
    /// The driver's version. Characters that are not allowed in a tag become `_`.
    pub version: &'a str,
    /// The kernel target.
    pub target: &'a KernelTarget,
    /// System of the kernel's nodes, as they report it. An image has a tag for each `ostree_version`.
    pub system: &'a NodeSystem,
    /// Versions of the images that this one is compiled against, by name of the need. Invalid characters become `_`.
    pub needs: BTreeMap<&'a str, &'a str>,
    /// Commits of the sources from Git, by name of the source.
    pub commits: BTreeMap<&'a str, &'a str>,
    /// First digits of the fingerprint of the certificate that signs the modules; `None` if modules are not signed.
    pub signer: Option<&'a str>,
}

/// Template values for rendering a pattern.
#[derive(Serialize)]
struct Values<'a> {
    #[serde(flatten)]
    plain: BTreeMap<&'a str, String>,
    needs: BTreeMap<&'a str, String>,
    sources: BTreeMap<&'a str, BTreeMap<&'a str, &'a str>>,
}

/// Reason why a tag pattern gives no valid tag. It names the pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TagError(String);

/// Renders the patterns in order, without duplicates.
pub fn render_tags(
    templates: &mut Templates,
    patterns: &[String],
    inputs: &TagInputs<'_>,
) -> Result<Vec<Tag>, TagError> {
    let TagInputs { version, target, system, needs, commits, signer } = inputs;
    let KernelTarget { os, os_version, release, arch } = target;
    let label = KernelLabel::of(release);
    let mut plain = BTreeMap::from([
        ("version", tag_safe(version)),
        ("kernel_release", tag_safe(release.as_str())),
        ("os_id", os.to_string()),
        ("os_version", os_version.to_string()),
        ("os_tag", target.os_tag()),
        ("arch", arch.to_string()),
        ("signer", signer.unwrap_or(UNSIGNED).to_owned()),
    ]);
    if let Some(label) = &label {
        plain.insert("kernel_label", label.to_string());
    }
    if let Some(version) = &system.rhel_version {
        plain.insert("rhel_version", version.to_string());
    }
    let needs = needs.iter().map(|(name, version)| (*name, tag_safe(version))).collect();
    let sources =
        commits.iter().map(|(name, commit)| (*name, BTreeMap::from([("commit", *commit)]))).collect();
    let mut values = Values { plain, needs, sources };
    let mut tags = Vec::new();
    for pattern in patterns {
        if label.is_none() && pattern.contains("kernel_label") {
            let release = release.as_str();
            let reason = format!("kernel release {release:?} has no label form (more than 63 characters)");
            return Err(TagError(reason));
        }
        if let Some(label) = system.missing_label(pattern) {
            return Err(TagError(format!(
                "tag pattern {pattern:?}: no node that runs {release} has the label {label}"
            )));
        }
        // Without a known version, the pattern is rendered once, without the variable.
        let versions = system.ostree_versions.iter().map(Some);
        let versions = versions.chain(system.ostree_versions.is_empty().then_some(None));
        for version in versions {
            values.plain.extend(version.map(|version| ("ostree_version", version.to_string())));
            let tag = render_one(templates, pattern, &values)?;
            if !tags.contains(&tag) {
                tags.push(tag);
            }
        }
    }
    Ok(tags)
}

/// Renders a pattern with sample values, to verify that it can give a valid tag. An invalid pattern is a mistake in the
/// definition, so it is reported when the definition is loaded, not when a kernel first needs the tag.
pub(super) fn validate_pattern(pattern: &str) -> Result<(), TagError> {
    let samples =
        "version kernel_label kernel_release os_id os_version os_tag ostree_version rhel_version arch signer";
    let plain = samples.split(' ').map(|name| (name, "1".to_owned())).collect();
    let needs = needs_in(pattern).into_iter().map(|name| (name, "1".to_owned())).collect();
    let sources =
        sources_in(pattern).into_iter().map(|name| (name, BTreeMap::from([("commit", "1")]))).collect();
    let values = Values { plain, needs, sources };
    render_one(&mut Templates::default(), pattern, &values).map(|_| ())
}

/// Whether images for several architectures may have the same tag.
pub fn share_tags(patterns: &[String]) -> bool {
    patterns.iter().any(|pattern| !pattern.replace(' ', "").contains("{{arch}}"))
}

/// Names of the needs whose versions a pattern uses: `mofed` in `{{needs.mofed}}`.
pub fn needs_in(pattern: &str) -> Vec<&str> {
    names_after(pattern, "needs.")
}

/// Names of the sources whose commits a pattern uses: `driver` in `{{sources.driver.commit}}`.
pub fn sources_in(pattern: &str) -> Vec<&str> {
    names_after(pattern, "sources.")
}

fn names_after<'a>(pattern: &'a str, field: &str) -> Vec<&'a str> {
    let ends_name = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
    pattern.split(field).skip(1).filter_map(|text| text.split(ends_name).next()).collect()
}

fn render_one(templates: &mut Templates, pattern: &str, values: &Values<'_>) -> Result<Tag, TagError> {
    let text = templates
        .render_line(pattern, values)
        .map_err(|reason| TagError(format!("tag pattern {pattern:?}: {reason}")))?;
    let syntax = "1 to 128 of `A-Za-z0-9_.-`, not starting with `.` or `-`";
    text.parse().map_err(|_| {
        TagError(format!("tag pattern {pattern:?} gives {text:?}, which is not a tag ({syntax})"))
    })
}

/// Replaces each character that is not allowed in a tag with `_`.
fn tag_safe(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::UNKNOWN_SYSTEM;

    fn tags(patterns: &[&str], version: &str, release: &str) -> Result<Vec<String>, TagError> {
        let target = KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: release.parse().unwrap(),
            arch: crate::kernel::Architecture::Amd64,
        };
        let patterns: Vec<_> = patterns.iter().map(|p| (*p).to_owned()).collect();
        let needs = [("mofed", "25.10~1"), ("nvidia-gpu", "535.1")].into();
        let inputs = TagInputs {
            version,
            target: &target,
            system: &UNKNOWN_SYSTEM,
            needs,
            commits: [("driver", "0a1b")].into(),
            signer: None,
        };
        let tags = render_tags(&mut Templates::default(), &patterns, &inputs)?;
        Ok(tags.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_tag_names_the_commit_of_a_source() {
        let pattern = "{{version}}-{{ sources.driver.commit }}";
        assert_eq!(tags(&[pattern], "1", "6.1.0").unwrap(), ["1-0a1b"]);
        assert_eq!(sources_in(pattern), ["driver"]);
        assert!(validate_pattern(pattern).is_ok() && validate_pattern("{{sources.driver.ref}}").is_err());
    }

    #[test]
    fn tags_are_those_that_the_operators_compute() {
        let network = "{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}";
        let gpu = "{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}";
        assert_eq!(
            tags(&[network, gpu, network], "25.10-1.2.8.0-0", "6.1.192-acme+").unwrap(),
            ["25.10-1.2.8.0-0-6.1.192-acme-debian12-amd64", "25.10-1.2.8.0-0-6.1.192-acme-debian12"]
        );
        assert_eq!(tags(&["{{version}}"], "4.33.0+1", "6.1.0").unwrap(), ["4.33.0_1"]);
    }

    #[test]
    fn bad_patterns_say_what_is_wrong() {
        let message = |pattern: &str| tags(&[pattern], "1", "6.1.0").unwrap_err().to_string();
        assert!(message("{{kernel}}").contains("kernel"), "{}", message("{{kernel}}"));
        assert!(message("-{{version}}").contains("not a tag"));
        assert!(message("{{version").contains("{{version"));
        let long = tags(&["{{kernel_label}}"], "1", &format!("6.1.0-{}", "9".repeat(58))).unwrap_err();
        assert!(long.to_string().ends_with("has no label form (more than 63 characters)"), "{long}");
        let longer_than_a_tag =
            tags(&["{{version}}-{{kernel_label}}"], &"9".repeat(100), "6.1.0-47-amd64-and-more-of-it");
        assert!(longer_than_a_tag.unwrap_err().to_string().contains("which is not a tag"));
    }

    #[test]
    fn a_tag_may_follow_what_the_image_is_compiled_against() {
        let pattern = "{{version}}-{{needs.mofed}}-{{needs.nvidia-gpu}}";
        assert_eq!(tags(&[pattern], "1.3", "6.1.0").unwrap(), ["1.3-25.10_1-535.1"]);
        assert_eq!(needs_in(pattern), ["mofed", "nvidia-gpu"]);
        assert!(validate_pattern(pattern).is_ok() && validate_pattern("{{needs}}").is_err());
        let unknown = tags(&["{{needs.other}}"], "1", "6.1.0").unwrap_err().to_string();
        assert!(unknown.contains("needs.other"), "{unknown}");
    }

    #[test]
    fn a_tag_may_name_the_certificate() {
        let target = KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0".parse().unwrap(),
            arch: crate::kernel::Architecture::Amd64,
        };
        let tag = |signer| {
            let (system, needs) = (&UNKNOWN_SYSTEM, BTreeMap::new());
            let inputs =
                TagInputs { version: "1", target: &target, system, needs, commits: BTreeMap::new(), signer };
            render_tags(&mut Templates::default(), &["{{version}}-{{signer}}".to_owned()], &inputs).unwrap()
                [0]
            .to_string()
        };
        assert_eq!(
            (tag(Some("0123456789ab")), tag(None)),
            ("1-0123456789ab".to_owned(), "1-unsigned".to_owned())
        );
        assert!(validate_pattern("{{version}}-{{signer}}").is_ok());
    }

    /// Network Operator `pkg/state/state_ofed.go` and GPU Operator `internal/state/nodepool.go` (`getOSTag`) compute the first
    /// two tags from NFD's labels. RHEL CoreOS 4.19 and later report the ID `rhel`. The third tag names the image that the nodes
    /// booted, as in the operators' DaemonSets with the driver toolkit.
    #[test]
    fn rhel_coreos_has_the_tags_that_the_operators_compute() {
        let tags = |os: &str, os_version: &str, images: &[&str]| {
            let target = KernelTarget {
                os: os.parse().unwrap(),
                os_version: os_version.parse().unwrap(),
                release: "5.14.0-427.50.1.el9_4.x86_64".parse().unwrap(),
                arch: crate::kernel::Architecture::Amd64,
            };
            let mut system = NodeSystem::default();
            for image in images {
                system.add_labels(Some(image), Some("9.4"));
            }
            let patterns = [
                "{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}",
                "{{version}}-{{kernel_label}}-{{os_tag}}",
                "{{version}}-{{ostree_version}}-{{rhel_version}}",
            ]
            .map(str::to_owned);
            let (version, system, needs) = ("25.10", &system, BTreeMap::new());
            let inputs =
                TagInputs { version, target: &target, system, needs, commits: BTreeMap::new(), signer: None };
            let tags = render_tags(&mut Templates::default(), &patterns, &inputs);
            tags.map(|tags| tags.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(
            tags("rhcos", "4.16", &["416.94.202410151600-0", "416.94.202412170927-0"]).unwrap(),
            [
                "25.10-5.14.0-427.50.1.el9_4.x86_64-rhcos4.16-amd64",
                "25.10-5.14.0-427.50.1.el9_4.x86_64-rhcos4.16",
                "25.10-416.94.202412170927-0-9.4",
                "25.10-416.94.202410151600-0-9.4",
            ]
        );
        assert_eq!(
            tags("rhel", "9.6", &["9.6.20250909-0"]).unwrap()[..2],
            ["25.10-5.14.0-427.50.1.el9_4.x86_64-rhel9.6-amd64", "25.10-5.14.0-427.50.1.el9_4.x86_64-rhel9"]
        );
        insta::assert_snapshot!(tags("rhcos", "4.16", &[]).unwrap_err(), @r#"tag pattern "{{version}}-{{ostree_version}}-{{rhel_version}}": no node that runs 5.14.0-427.50.1.el9_4.x86_64 has the label feature.node.kubernetes.io/system-os_release.OSTREE_VERSION"#);
    }

    #[test]
    fn kernels_with_one_label_share_a_tag() {
        let pattern = ["{{kernel_label}}"];
        assert_eq!(tags(&pattern, "1", "6.1.0+acme"), tags(&pattern, "1", "6.1.0~acme"));
    }

    proptest::proptest! {
        #[test]
        fn whatever_the_version_holds_the_result_is_a_tag(version in "\\PC{1,40}") {
            if let Ok(tags) = tags(&["v{{version}}"], &version, "6.1.0") {
                proptest::prop_assert!(tags[0].parse::<Tag>().is_ok());
            }
        }

        #[test]
        fn no_pattern_panics(pattern in "[{}a-z_. -]{0,30}") {
            let _ = tags(&[&pattern], "1", "6.1.0");
        }
    }
}
