//! Pure: ranges of kernels, such as `>=4.18, <6.18` or `>=6.1.0-56, <6.2`.

use std::{borrow::Cow, cmp::Ordering, fmt, str::FromStr};

use schemars::json_schema;
use semver::{Comparator, VersionReq};
use serde_with::{DeserializeFromStr, SerializeDisplay};

use super::{KernelTarget, OsId, debian_version, rpm_version};
use crate::definition::{ParseError, text_schema};

/// Bounds that a kernel must all satisfy. Bounds of up to three numbers compare the release's `x.y.z`, as in semver. If more text
/// follows the three numbers, the version order of the target's distribution applies: `>=6.1.0-56` includes Debian's
/// `6.1.0-56-amd64`, but not its `6.1.0-47-amd64`.
#[derive(Clone, Debug, PartialEq, Eq, DeserializeFromStr, SerializeDisplay)]
pub struct KernelRange(Vec<Bound>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Bound {
    /// Bound on `x.y.z`.
    Numbers(Comparator),
    /// Inclusive lower bound: a distribution's version.
    From(String),
    /// Exclusive upper bound: a distribution's version.
    Below(String),
}

impl KernelRange {
    /// Whether the range includes the kernel.
    pub fn holds(&self, target: &KernelTarget) -> bool {
        let KernelTarget { os, os_version: _, release, arch: _ } = target;
        let compare = order_of(os, release.as_str());
        let version = ordered(release.as_str());
        self.0.iter().all(|bound| match bound {
            Bound::Numbers(comparator) => comparator.matches(&release.version()),
            Bound::From(least) => compare(&version, least).is_ge(),
            Bound::Below(end) => compare(&version, end).is_lt(),
        })
    }
}

/// Version order of a kernel's distribution: RPM's order if the distribution uses RPM packages, else Debian's.
pub fn order_of(os: &OsId, release: &str) -> fn(&str, &str) -> Ordering {
    // `ID` in os-release of each distribution; SUSE's are recognized by their prefix. Most releases contain RPM's name of the
    // architecture, which identifies them. Releases of SUSE, Azure Linux and Photon do not, and custom kernels may not.
    const RPM: [&str; 14] = [
        "rhel",
        "rhcos",
        "scos",
        "centos",
        "rocky",
        "almalinux",
        "ol",
        "fedora",
        "amzn",
        "azurelinux",
        "mariner",
        "openEuler",
        "photon",
        "sl-micro",
    ];
    let is_suse = ["sle", "suse", "opensuse"].iter().any(|start| os.as_str().starts_with(start));
    let is_rpm = is_suse || RPM.contains(&os.as_str()) || architecture_at(release).is_some();
    if is_rpm { rpm_version::compare } else { debian_version::compare }
}

/// Index of RPM's architecture in the release, including the dot before it.
fn architecture_at(release: &str) -> Option<usize> {
    [".x86_64", ".aarch64"].iter().filter_map(|arch| release.find(arch)).min()
}

/// The part of a release that orders versions. A pre-release is written as distributions do: `6.12.0~rc1`, which sorts before
/// `6.12.0` in both orders.
fn ordered(release: &str) -> Cow<'_, str> {
    let version = version_part(release);
    let behind = release.get(version.len()..).and_then(|behind| behind.strip_prefix("-rc"));
    match behind.map(|behind| debian_version::leading_digits(behind).0) {
        Some(number) if !number.is_empty() => format!("{version}~rc{number}").into(),
        _ => version.into(),
    }
}

/// The part of a release that identifies a version. It excludes the flavor, which starts with a letter after a `-`
/// (`6.8.0-45-generic`), and RPM's architecture with all that follows it (`5.14.0-503.11.1.el9_5.x86_64`).
fn version_part(release: &str) -> &str {
    let end = flavour_at(release).into_iter().chain(architecture_at(release)).min();
    release.get(..end.unwrap_or(release.len())).unwrap_or(release)
}

fn flavour_at(release: &str) -> Option<usize> {
    let behind = |at: usize| release.as_bytes().get(at + 1);
    release.match_indices('-').map(|(at, _)| at).find(|at| behind(*at).is_some_and(u8::is_ascii_alphabetic))
}

impl FromStr for KernelRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = |why: &dyn fmt::Display| {
            format!(
                "{}: {why}",
                ParseError::new(text, "a range of kernels such as `>=4.18, <6.18` or `>=6.1.0-56, <6.2`")
            )
        };
        // A text of numbers alone has semver's meaning, and its error messages.
        if !text.contains(['-', '+', '_']) {
            match text.parse::<VersionReq>() {
                Ok(numbers) => {
                    return Ok(Self(numbers.comparators.into_iter().map(Bound::Numbers).collect()));
                }
                Err(error) if !text.split(',').any(is_longer) => return Err(refused(&error)),
                Err(_) => {}
            }
        }
        text.split(',')
            .map(|bound| Bound::read(bound.trim()))
            .collect::<Result<_, _>>()
            .map(Self)
            .map_err(|why| refused(&why))
    }
}

/// Whether a bound has more than three numbers, or other text after them.
fn is_longer(bound: &str) -> bool {
    let (_, version) = operator(bound.trim());
    let numbers = numbers_of(version);
    numbers.len() < version.len() && numbers.split('.').count() == 3
}

fn operator(bound: &str) -> (&str, &str) {
    let (operator, version) =
        bound.split_at(bound.find(|c: char| !"<>=^~ ".contains(c)).unwrap_or(bound.len()));
    (operator.trim_end(), version)
}

/// The first three numbers of a version, with the dots between them.
fn numbers_of(version: &str) -> &str {
    let mut dots = 0;
    let end = version.char_indices().find(|(at, c)| {
        let followed = version.as_bytes().get(at + 1).is_some_and(u8::is_ascii_digit);
        dots += usize::from(*c == '.');
        !(c.is_ascii_digit() || *c == '.' && dots < 3 && followed)
    });
    &version[..end.map_or(version.len(), |(at, _)| at)]
}

impl Bound {
    fn read(bound: &str) -> Result<Self, String> {
        let (operator, version) = operator(bound);
        let numbers = numbers_of(version);
        let behind = &version[numbers.len()..];
        if behind.is_empty() {
            return bound.parse().map(Self::Numbers).map_err(|error: semver::Error| error.to_string());
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "._+~-".contains(c);
        let is_plain = behind.starts_with(['-', '.', '+', '~']) && behind.chars().all(plain);
        if !is_plain || !behind.ends_with(|c: char| c.is_ascii_alphanumeric()) {
            return Err(format!("{version:?} is not the beginning of a kernel release"));
        }
        if numbers.split('.').count() < 3 {
            return Err(format!(
                "the part of {version:?} after its numbers is compared by the distribution's rules: write all three numbers before it"
            ));
        }
        let written = ordered(version);
        if written.contains('~') && !version.contains('~') {
            return Err(format!(
                "{version:?} names a pre-release, which sorts before its version: write {written:?}"
            ));
        }
        if let Some(at) = flavour_at(version) {
            return Err(format!(
                "{version:?} holds a flavour, {:?}, which is not part of the order of versions: remove it, \
                 and select flavours with `release`, a regular expression",
                &version[at..]
            ));
        }
        if version_part(version) != version {
            return Err(format!(
                "{version:?} contains an architecture, which is not part of a version: remove it"
            ));
        }
        match operator {
            ">=" => Ok(Self::From(version.to_owned())),
            "<" => Ok(Self::Below(version.to_owned())),
            other => Err(format!(
                "`{other}{version}` is ambiguous, because releases that begin with {version} follow it in the distribution's order: \
                 write `>=` or `<`, or name releases with `release`, a regular expression"
            )),
        }
    }
}

impl fmt::Display for KernelRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("*");
        }
        for (at, bound) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            match bound {
                Bound::Numbers(comparator) => write!(f, "{comma}{comparator}")?,
                Bound::From(least) => write!(f, "{comma}>={least}")?,
                Bound::Below(end) => write!(f, "{comma}<{end}")?,
            }
        }
        Ok(())
    }
}

text_schema!(KernelRange, true, json_schema!({"type": "string"}));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernel::Architecture;

    fn target(os: &str, release: &str) -> KernelTarget {
        KernelTarget {
            os: os.parse().unwrap(),
            os_version: "1".parse().unwrap(),
            release: release.parse().unwrap(),
            arch: Architecture::Amd64,
        }
    }

    #[test]
    fn releases_of_one_version_are_told_apart() {
        for (os, range, holds, leaves_out) in [
            (
                "debian",
                ">=6.1.0-56",
                "6.1.0-56-amd64 6.1.0-100-cloud-amd64 6.12.117+deb12-amd64 6.6.1",
                "6.1.0-47-amd64 6.1.0 5.10.0-99-amd64",
            ),
            (
                "debian",
                ">=6.1.0-53, <6.2",
                "6.1.0-53-rt-amd64 6.1.192-acme+",
                "6.1.0-50-amd64 6.12.1+deb12-amd64",
            ),
            (
                "debian",
                "<6.12.100+deb12",
                "6.12.99+deb12-amd64 6.12.1",
                "6.12.100+deb12-amd64 6.12.107+deb12-amd64",
            ),
            (
                "ubuntu",
                ">=6.8.0-45, <6.8.0-50",
                "6.8.0-45-generic 6.8.0-49.49-nvidia-64k",
                "6.8.0-44-generic 6.8.0-1012-aws 6.8.0-50-generic",
            ),
            (
                "rhel",
                ">=5.14.0-503, <5.14.0-600",
                "5.14.0-503.11.1.el9_5.x86_64 5.14.0-570.el9.aarch64+64k",
                "5.14.0-427.13.1.el9_4.x86_64 5.14.0-600.1.el9.x86_64",
            ),
            (
                "rhel",
                ">=5.14.0-503.11.1.el9_5",
                "5.14.0-503.11.1.el9_5.x86_64 5.14.0-503.15.1.el9_5.x86_64",
                "5.14.0-503.2.1.el9_5.x86_64",
            ),
            (
                "azurelinux",
                ">=6.6.57.1-2",
                "6.6.57.1-2.azl3 6.6.64.1-1.azl3",
                "6.6.57.1-1.azl3 6.6.51.1-5.azl3",
            ),
            (
                "opensuse-leap",
                ">=5.14.21-150400.24.100",
                "5.14.21-150400.24.111-default",
                "5.14.21-150400.24.9-default",
            ),
            // Numbers alone keep semver's meaning.
            ("debian", ">=4.18, <6.18", "4.18.0-553.el8_10.x86_64 6.17.9", "6.18.0-1-amd64 4.17.99"),
            ("debian", "=6.1", "6.1.0-47-amd64 6.1.192-acme+", "6.2.0"),
            ("debian", "~6.1.190", "6.1.191-acme", "6.1.189-acme 6.2.0"),
            ("debian", "*", "3.10.0-1160.el7.custom", ""),
            ("debian", "6.*", "6.1.0-47-amd64", "5.10.0-1-amd64"),
            // A pre-release sorts before its version in both orders.
            (
                "debian",
                ">=6.12.0~rc2, <6.12.0+a",
                "6.12.0-rc2-amd64 6.12.0-rc10-amd64 6.12.0-amd64",
                "6.12.0-rc1 6.12.0+deb13",
            ),
            (
                "fedora",
                ">=6.12.0~rc2, <6.12.0-1",
                "6.12.0-rc2+ 6.12.0-rc10 6.12.0",
                "6.12.0-rc1 6.12.0-1.fc42.x86_64",
            ),
            // A distribution missing from the list still gets RPM's order, in which `_` only separates. In Debian's, `_` sorts
            // after letters.
            ("eurolinux", ">=5.14.0-503.el9_5", "5.14.0-503.el9.5.x86_64", "5.14.0-503.el9_4.x86_64"),
            ("sled", ">=5.14.21-150400.24_9", "5.14.21-150400.24.9-default", "5.14.21-150400.24.8-default"),
        ] {
            let range: KernelRange = range.parse().unwrap();
            for release in holds.split_whitespace() {
                assert!(range.holds(&target(os, release)), "{range} of {os} leaves out {release}");
            }
            for release in leaves_out.split_whitespace() {
                assert!(!range.holds(&target(os, release)), "{range} of {os} holds {release}");
            }
        }
    }

    #[test]
    fn ambiguous_bounds_are_refused_with_the_reason() {
        let told = |text: &str| text.parse::<KernelRange>().unwrap_err();
        let mistakes = [
            ">6.1.0-56",
            "<=5.14.0-503",
            "=6.1.0-56",
            "6.1.0-56",
            "^6.1.0-56",
            ">=6.1-56",
            ">=6.1.0-56-amd64",
            "<6.11.0-rc1",
            ">=5.14.0-503.el9.x86_64",
            ">=6.1.0-",
            ">=6.1.0-5 6",
            ">=6.1.0-56;",
            ">=6.1.0-56,",
            ">=6.1,,<7",
            "",
            "six",
            ">=6.1.2.3.4-",
        ];
        insta::assert_snapshot!(mistakes.map(told).join("\n"));
    }

    proptest! {
        /// Debian's order applies, whatever the flavor.
        #[test]
        fn debian_s_abi_numbers_are_numbers(a in 1..2000_u32, b in 1..2000_u32, flavour in "(cloud-|rt-)?(amd64|arm64)") {
            let range: KernelRange = format!(">=6.1.0-{a}").parse().unwrap();
            prop_assert_eq!(range.holds(&target("debian", &format!("6.1.0-{b}-{flavour}"))), b >= a);
            let range: KernelRange = format!("<6.1.0-{a}").parse().unwrap();
            prop_assert_eq!(range.holds(&target("rhel", &format!("6.1.0-{b}.el9.x86_64"))), b < a);
        }

        #[test]
        fn what_is_written_is_read_again(text in "(>=|<|=|~)?[0-9]{1,2}(\\.[0-9]{1,3}){0,3}([-+.][0-9a-z.]{1,6})?(, ?<[0-9]\\.[0-9]+)?") {
            if let Ok(range) = text.parse::<KernelRange>() {
                prop_assert_eq!(range.to_string().parse(), Ok(range));
            }
        }

        #[test]
        fn nothing_panics(text in "\\PC{0,20}|[<>=~^*0-9a-z.,+ -]{0,24}") {
            if let Ok(range) = text.parse::<KernelRange>() {
                range.holds(&target("debian", "6.1.0-47-amd64"));
            }
        }
    }
}
