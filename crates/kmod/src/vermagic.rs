//! The `vermagic` string of a module, and the one that the kernel expects.

mod header;

use std::fmt;

pub use header::VermagicHeaders;

use super::KernelConfig;
use crate::{Architecture, KernelRelease};

/// Prefix of the hash of the structure layout seed (`CONFIG_RANDSTRUCT`).
const RANDSTRUCT: &str = "RANDSTRUCT_";

/// A kernel's `VERMAGIC_STRING` (`include/linux/vermagic.h`), as far as its header set determines it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vermagic {
    /// Text including a trailing space, because the loader compares every byte.
    text: String,
    /// Whether the hash of the layout seed follows, which only the kernel's own build directory contains.
    randstruct: bool,
}

/// Difference between a module's vermagic and the kernel's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants document their fields")]
pub enum Difference {
    /// No difference, or only one that the loader ignores.
    None,
    /// No difference, except possibly in the hash of the layout seed, which no header set reveals.
    Undecidable,
    /// Words that only the module has, and words that only the kernel has.
    Words { module: Vec<String>, kernel: Vec<String> },
}

impl Vermagic {
    /// Derives the string from a configuration, as `include/linux/vermagic.h` does.
    ///
    /// `preempt` depends on `CONFIG_PREEMPT` until Linux 5.15, and on `CONFIG_PREEMPT_BUILD` since. Commit c597bfddc9e9
    /// introduced the latter, and vendors backported both together, so either option counts.
    ///
    /// Before Linux 6.14 `preempt` takes precedence over `preempt_rt`, as seen in Debian's modules: real-time kernels of 6.12 set
    /// `PREEMPT_BUILD` and have `preempt`, those of 6.1 do not set it and have `preempt_rt`. In the headers of 6.14 and 7.2
    /// `preempt_rt` takes precedence.
    pub fn expected(release: &KernelRelease, arch: Architecture, config: &KernelConfig) -> Self {
        let mut text = format!("{release} ");
        if config.is_set("SMP") {
            text.push_str("SMP ");
        }
        let is_preemptible = config.is_set("PREEMPT_BUILD") || config.is_set("PREEMPT");
        let version = release.version();
        let rt_takes_precedence = (version.major, version.minor) >= (6, 14);
        if config.is_set("PREEMPT_RT") && (rt_takes_precedence || !is_preemptible) {
            text.push_str("preempt_rt ");
        } else if is_preemptible {
            text.push_str("preempt ");
        }
        if config.is_set("MODULE_UNLOAD") {
            text.push_str("mod_unload ");
        }
        if config.is_set("MODVERSIONS") {
            text.push_str("modversions ");
        }
        // MODULE_ARCH_VERMAGIC of arch/*/include/asm/vermagic.h: empty on x86-64, without a space on arm64.
        text.push_str(match arch {
            Architecture::Amd64 => "",
            Architecture::Arm64 => "aarch64",
        });
        // GCC_PLUGIN_RANDSTRUCT until 5.18, RANDSTRUCT since.
        let randstruct = config.is_set("RANDSTRUCT") || config.is_set("GCC_PLUGIN_RANDSTRUCT");
        Self { text, randstruct }
    }

    /// Takes the exact `vermagic` of one of the kernel's own modules.
    pub fn exact(text: &str) -> Self {
        Self { text: text.to_owned(), randstruct: false }
    }

    /// Compares as the loader's `same_magic` does (`kernel/module/version.c`): byte by byte, but without the release if
    /// the module has symbol versions.
    pub fn compare(&self, module: &str, has_versions: bool) -> Difference {
        let without_release = |text: &str| text.find(' ').map_or("", |at| &text[at..]).to_owned();
        let (module, kernel) = if has_versions {
            (without_release(module), without_release(&self.text))
        } else {
            (module.to_owned(), self.text.clone())
        };
        let seed = module.find(RANDSTRUCT);
        let same =
            if self.randstruct { seed.is_some_and(|at| module[..at] == kernel) } else { module == kernel };
        match (same, self.randstruct) {
            (true, false) => Difference::None,
            (true, true) => Difference::Undecidable,
            (false, _) => self.differing_words(&module, &kernel),
        }
    }

    /// Lists the words that only one of the two texts has.
    fn differing_words(&self, module: &str, kernel: &str) -> Difference {
        let is_kernels = |word: &str| {
            kernel.split_whitespace().any(|w| w == word) || (self.randstruct && word.starts_with(RANDSTRUCT))
        };
        let mut missing: Vec<String> = kernel
            .split_whitespace()
            .filter(|word| !module.split_whitespace().any(|w| w == *word))
            .map(str::to_owned)
            .collect();
        if self.randstruct && !module.contains(RANDSTRUCT) {
            missing.push(format!("{RANDSTRUCT}<hash>"));
        }
        Difference::Words {
            module: module.split_whitespace().filter(|word| !is_kernels(word)).map(str::to_owned).collect(),
            kernel: missing,
        }
    }
}

impl fmt::Display for Vermagic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text.trim_end())?;
        if self.randstruct { write!(f, " {RANDSTRUCT}<hash>") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(release: &str, arch: Architecture, options: &[&str]) -> Vermagic {
        let lines: Vec<String> = options.iter().map(|option| format!("CONFIG_{option}=y\n")).collect();
        let config = KernelConfig::parse(&lines.concat()).unwrap();
        Vermagic::expected(&release.parse().unwrap(), arch, &config)
    }

    /// The options are from the kernels' own `auto.conf`, the strings from their in-tree modules.
    #[test]
    fn the_expected_vermagic_matches_distribution_kernels() {
        use Architecture::{Amd64, Arm64};
        let base = ["SMP", "MODULE_UNLOAD", "MODVERSIONS"];
        let with = |more: &[&'static str]| [&base[..], more].concat();
        let cases = [
            (
                "6.1.0-56-amd64",
                Amd64,
                with(&["PREEMPT_DYNAMIC", "PREEMPT_BUILD", "PREEMPT_VOLUNTARY"]),
                "preempt mod_unload modversions ",
            ),
            (
                "6.1.0-56-rt-amd64",
                Amd64,
                with(&["PREEMPT_RT", "PREEMPT_LAZY"]),
                "preempt_rt mod_unload modversions ",
            ),
            (
                "6.12.117+deb12-rt-amd64",
                Amd64,
                with(&["PREEMPT_RT", "PREEMPT_BUILD", "PREEMPT_LAZY"]),
                "preempt mod_unload modversions ",
            ),
            ("7.2.13+deb14-amd64", Amd64, with(&["PREEMPT_BUILD"]), "preempt mod_unload modversions "),
            (
                "5.4.0-1-lowlatency",
                Amd64,
                with(&["PREEMPT", "PREEMPTION"]),
                "preempt mod_unload modversions ",
            ),
            ("5.15.0-1-generic", Amd64, with(&["PREEMPT_VOLUNTARY"]), "mod_unload modversions "),
            ("6.1.0-56-arm64", Arm64, with(&["PREEMPT_BUILD"]), "preempt mod_unload modversions aarch64"),
        ];
        for (release, arch, options, rest) in cases {
            let magic = expected(release, arch, &options);
            assert_eq!(magic.compare(&format!("{release} SMP {rest}"), false), Difference::None, "{release}");
        }
    }

    #[test]
    fn the_release_counts_only_without_symbol_versions() {
        let magic = expected("6.1.0-2-amd64", Architecture::Amd64, &["SMP"]);
        assert_eq!(magic.compare("6.1.0-1-amd64 SMP ", true), Difference::None);
        assert_eq!(
            magic.compare("6.1.0-1-amd64 SMP ", false),
            Difference::Words { module: vec!["6.1.0-1-amd64".into()], kernel: vec!["6.1.0-2-amd64".into()] }
        );
    }

    #[test]
    fn a_missing_last_space_is_a_difference() {
        let magic = expected("6.1.0-2-amd64", Architecture::Amd64, &["SMP"]);
        assert_eq!(
            magic.compare("6.1.0-2-amd64 SMP", false),
            Difference::Words { module: vec![], kernel: vec![] }
        );
        assert_ne!(magic.compare("", true), Difference::None);
    }

    #[test]
    fn the_hash_of_the_layout_seed_is_undecidable_but_required() {
        let magic = expected("6.1.1", Architecture::Amd64, &["SMP", "RANDSTRUCT"]);
        assert_eq!(magic.compare("6.1.1 SMP RANDSTRUCT_0123", false), Difference::Undecidable);
        assert_eq!(
            magic.compare("6.1.1 SMP ", false),
            Difference::Words { module: vec![], kernel: vec!["RANDSTRUCT_<hash>".into()] }
        );
        let plain = expected("6.1.1", Architecture::Amd64, &["SMP"]);
        assert_eq!(
            plain.compare("6.1.1 SMP RANDSTRUCT_0123", false),
            Difference::Words { module: vec!["RANDSTRUCT_0123".into()], kernel: vec![] }
        );
        assert_eq!(magic.to_string(), "6.1.1 SMP RANDSTRUCT_<hash>");
    }
}
