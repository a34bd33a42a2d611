//! Conditions that limit patches and variables to some kernels.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    definition::checked::{OneLine, VariableName},
    kernel::{HeaderText, KernelRange, KernelTarget, Pattern},
};

/// Values of variables for some kernels. Later entries override earlier ones.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelVars {
    /// The range of kernels, as in the image's `kernels`.
    pub kernels: Option<KernelRange>,
    /// A regular expression that must match the whole kernel release.
    pub release: Option<Pattern>,
    /// Condition on the kernel's headers.
    pub when: Option<HeaderText>,
    /// Values to set.
    pub set: BTreeMap<VariableName, OneLine>,
}

/// A condition on kernels. Every field that is set must match.
pub(super) struct KernelCondition<'a> {
    pub(super) kernels: &'a Option<KernelRange>,
    pub(super) release: &'a Option<Pattern>,
    pub(super) when: &'a Option<HeaderText>,
}

impl KernelCondition<'_> {
    /// Whether the condition matches the kernel. The headers are read last, and only if the result depends on them.
    pub(super) fn matches<E>(
        &self,
        target: &KernelTarget,
        check_headers: &mut impl FnMut(&HeaderText) -> Result<bool, E>,
    ) -> Result<bool, E> {
        let Self { kernels, release, when } = self;
        let target_matches = kernels.as_ref().is_none_or(|range| range.contains(target))
            && release.as_ref().is_none_or(|pattern| pattern.is_match(target.release.as_str()));
        match when {
            Some(text) if target_matches => check_headers(text),
            _ => Ok(target_matches),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{image::DriverImageSpec, kernel::Architecture};

    fn spec() -> DriverImageSpec {
        serde_json::from_value(serde_json::json!({
            "version": "1", "template": "t", "kernels": ">=4.18", "release": r".*-amd64",
            "patches": [
                {"path": "a.patch", "kernels": ">=6.1.0-53, <6.2", "release": r"6\.1\.0-.*"},
                {"path": "b.patch"},
                {"path": "a.patch", "kernels": ">=6.2", "when": {"header": "include/linux/pci.h", "matches": "bars"}},
            ],
            "vars": {"x": "0"},
            "kernelVars": [
                {"kernels": "<6.2", "set": {"x": "1", "y": "1"}},
                {"release": r"6\.1\.0-56-.*", "set": {"x": "2"}},
                {"when": {"header": "include/linux/mm.h", "matches": "folio"}, "kernels": ">=6.12", "set": {"x": "3"}},
            ],
        }))
        .unwrap()
    }

    fn target(release: &str) -> KernelTarget {
        KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: release.parse().unwrap(),
            arch: Architecture::Amd64,
        }
    }

    #[test]
    fn patches_and_variables_follow_the_release_then_the_headers() {
        let chosen = |release: &str, headers_match: bool| {
            let (spec, target) = (spec(), target(release));
            let patches = spec.patches_for(&target, |_| Ok::<_, ()>(headers_match)).unwrap();
            let vars = spec.vars_for(&target, |_| Ok::<_, ()>(headers_match)).unwrap();
            (patches, vars.into_iter().flat_map(|(name, value)| [name, value]).collect::<String>())
        };
        let expect = |patches: &[usize], vars: &str| (patches.to_vec(), vars.to_owned());
        assert_eq!(chosen("6.1.0-47-amd64", true), expect(&[1], "x1y1"));
        assert_eq!(chosen("6.1.0-53-amd64", false), expect(&[0, 1], "x1y1"));
        assert_eq!(chosen("6.1.0-56-amd64", false), expect(&[0, 1], "x2y1"));
        assert_eq!(chosen("6.12.117+deb12-amd64", true), expect(&[1, 2], "x3"));
        assert_eq!(chosen("6.12.117+deb12-amd64", false), expect(&[1], ""));
    }

    #[test]
    fn headers_are_read_only_if_the_result_depends_on_them() {
        let asked = |release: &str| -> Vec<String> {
            spec().header_conditions(&target(release)).iter().map(ToString::to_string).collect()
        };
        assert_eq!(asked("6.1.0-56-amd64"), [""; 0]);
        assert_eq!(asked("6.6.1-amd64"), ["include/linux/pci.h matches bars"]);
        assert_eq!(
            asked("6.12.1-amd64"),
            ["include/linux/pci.h matches bars", "include/linux/mm.h matches folio"]
        );
        assert_eq!(asked("6.12.1-cloud-arm64"), [""; 0], "the image does not support the kernel");
        let unknown = spec().patches_for(&target("6.12.1-amd64"), |_| Err("out of reach"));
        assert_eq!(unknown, Err("out of reach"));
    }

    #[test]
    fn an_image_supports_kernels_that_match_its_range_and_its_release() {
        let range_excluding = |release: &str| spec().range_excluding(&target(release));
        assert_eq!(range_excluding("6.1.0-47-amd64"), None);
        assert_eq!(range_excluding("4.9.0-1-amd64").as_deref(), Some(">=4.18"));
        assert_eq!(range_excluding("6.1.0-47-arm64").as_deref(), Some("whose release matches .*-amd64"));
    }
}
