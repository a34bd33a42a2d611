//! Evaluates a header set's `vermagic.h`, because vendors add words to the vermagic.

use std::collections::HashMap;

use super::Vermagic;
use crate::{KernelConfig, KernelRelease};

/// Maximum number of macro expansions, nested or in sequence. The headers of Linux need eight.
const MAX_EXPANSIONS: u32 = 64;
/// Maximum length of the result in bytes. The strings of Linux kernels have fewer than 200 bytes.
const MAX_LENGTH: usize = 4096;

/// Texts of the headers that define `VERMAGIC_STRING`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VermagicHeaders {
    /// `include/linux/vermagic.h`.
    pub vermagic: String,
    /// `arch/*/include/asm/vermagic.h`.
    pub arch: String,
    /// `include/generated/randstruct_hash.h`, or `randomize_layout_hash.h` before Linux 5.19; empty if the header set has
    /// neither.
    pub layout_seed: String,
}

impl VermagicHeaders {
    /// Evaluates the headers as the preprocessor does. Returns `None` for headers with constructs that are not supported.
    pub(crate) fn evaluate(&self, release: &KernelRelease, config: &KernelConfig) -> Option<Vermagic> {
        let mut macros = HashMap::from([("UTS_RELEASE", format!("\"{release}\""))]);
        // Macros that the makefiles define.
        for (name, option) in [("RANDSTRUCT", "RANDSTRUCT"), ("RANDSTRUCT_PLUGIN", "GCC_PLUGIN_RANDSTRUCT")] {
            if config.is_set(option) {
                macros.insert(name, String::new());
            }
        }
        let texts = [&self.arch, &self.layout_seed, &self.vermagic].map(|text| logical_lines(text));
        for text in &texts {
            define(text, config, &mut macros)?;
        }
        let (mut text, mut budget) = (String::new(), MAX_EXPANSIONS);
        let randstruct = !expand("VERMAGIC_STRING", &macros, &mut text, &mut budget)?;
        Some(Vermagic { text, randstruct })
    }
}

/// Joins continued lines, and removes comments.
fn logical_lines(text: &str) -> String {
    let mut uncommented = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        uncommented.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    uncommented.push_str(rest);
    uncommented.replace("\\\r\n", " ").replace("\\\n", " ")
}

/// Open conditional of the preprocessor.
struct Conditional {
    /// Whether the current branch is included.
    is_included: bool,
    /// Whether the current or an earlier branch of the conditional is included.
    was_included: bool,
}

impl Conditional {
    fn new(is_included: bool) -> Self {
        Self { is_included, was_included: is_included }
    }
}

/// Adds the definitions of a header in branches that are included. Returns `None` for conditions that are not supported.
fn define<'t>(text: &'t str, config: &KernelConfig, macros: &mut HashMap<&'t str, String>) -> Option<()> {
    let mut conditionals: Vec<Conditional> = Vec::new();
    for line in text.lines() {
        let Some(directive) = line.trim_start().strip_prefix('#') else { continue };
        let directive = directive.trim_start();
        let (word, rest) =
            directive.split_once(|c: char| !c.is_ascii_alphabetic()).unwrap_or((directive, ""));
        match word {
            "if" | "ifdef" => conditionals.push(Conditional::new(evaluate(rest, config, macros)?)),
            "ifndef" => conditionals.push(Conditional::new(!evaluate(rest, config, macros)?)),
            "elif" => {
                let conditional = conditionals.last_mut()?;
                conditional.is_included = !conditional.was_included && evaluate(rest, config, macros)?;
                conditional.was_included |= conditional.is_included;
            }
            "else" => {
                let conditional = conditionals.last_mut()?;
                *conditional = Conditional { is_included: !conditional.was_included, was_included: true };
            }
            "endif" => {
                conditionals.pop()?;
            }
            "define" if conditionals.iter().all(|conditional| conditional.is_included) => {
                let rest = rest.trim_start();
                let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                macros.insert(name, value.trim().to_owned());
            }
            _ => {}
        }
    }
    conditionals.is_empty().then_some(())
}

/// Evaluates a condition of names and `defined`, joined by `||` and `&&`. Returns `None` for any other form.
fn evaluate(condition: &str, config: &KernelConfig, macros: &HashMap<&str, String>) -> Option<bool> {
    let mut is_true = false;
    for part in condition.split("||") {
        let terms = part.split("&&").map(|term| evaluate_term(term, config, macros));
        is_true |= terms.collect::<Option<Vec<bool>>>()?.into_iter().all(|term| term);
    }
    Some(is_true)
}

fn evaluate_term(term: &str, config: &KernelConfig, macros: &HashMap<&str, String>) -> Option<bool> {
    let term = term.split("//").next().unwrap_or(term).trim();
    // Grouping parentheses are not supported, nor is `IS_ENABLED`, which is also true for modules.
    if term.matches('(').count() != term.matches(')').count() || term.contains("IS_") {
        return None;
    }
    let (term, expected) = term.strip_prefix('!').map_or((term, true), |rest| (rest.trim(), false));
    let name = term.strip_prefix("defined").unwrap_or(term);
    let name = name.trim_matches(|c: char| c.is_whitespace() || matches!(c, '(' | ')'));
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_name.then(|| is_defined(name, config, macros) == expected)
}

fn is_defined(name: &str, config: &KernelConfig, macros: &HashMap<&str, String>) -> bool {
    match name.strip_prefix("CONFIG_") {
        // An option with the value `m` defines `CONFIG_NAME_MODULE` instead.
        Some(option) => config.get(option).is_some_and(|value| value != "m"),
        // `kernel/module` and `modpost` define `INCLUDE_VERMAGIC` before they include the header.
        None => name == "INCLUDE_VERMAGIC" || macros.contains_key(name),
    }
}

/// Appends the string literals of a definition. Returns `Some(false)` if only the hash of the layout seed is undefined, at the end
/// of the text, and `None` if another name is undefined.
fn expand(name: &str, macros: &HashMap<&str, String>, text: &mut String, budget: &mut u32) -> Option<bool> {
    *budget = budget.checked_sub(1)?;
    let Some(value) = macros.get(name) else {
        let is_seed = name == "RANDSTRUCT_HASHED_SEED";
        // `Vermagic` adds the prefix itself.
        let prefix =
            ["RANDSTRUCT_PLUGIN_", "RANDSTRUCT_"].iter().find(|prefix| is_seed && text.ends_with(*prefix))?;
        text.truncate(text.len() - prefix.len());
        return Some(false);
    };
    let mut is_complete = true;
    let mut rest = value.trim_start();
    while !rest.is_empty() {
        if !is_complete {
            // Nothing follows the hash in any kernel.
            return None;
        }
        if let Some(literal) = rest.strip_prefix('"') {
            let (literal, after) = literal.split_once('"').filter(|(literal, _)| !literal.contains('\\'))?;
            text.push_str(literal);
            if text.len() > MAX_LENGTH {
                return None;
            }
            rest = after.trim_start();
        } else {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let (word, after) = rest.split_at_checked(end).filter(|(word, _)| !word.is_empty())?;
            is_complete = expand(word, macros, text, budget)?;
            rest = after.trim_start();
        }
    }
    Some(is_complete)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINUX: &str = r#"/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _LINUX_VERMAGIC_H
#define _LINUX_VERMAGIC_H

#ifndef INCLUDE_VERMAGIC
#error "for kernel/module.c"
#endif
#include <generated/utsrelease.h>
#ifdef CONFIG_SMP
#define MODULE_VERMAGIC_SMP "SMP "
#else
#define MODULE_VERMAGIC_SMP ""
#endif
#if defined(CONFIG_PREEMPT_RT) && !defined(CONFIG_NONE)
#define MODULE_VERMAGIC_PREEMPT "preempt_rt "
#elif defined(CONFIG_PREEMPT_BUILD) || defined(CONFIG_PREEMPT)
#define MODULE_VERMAGIC_PREEMPT "preempt "
#else
#define MODULE_VERMAGIC_PREEMPT ""
#endif
#ifdef RANDSTRUCT
#define MODULE_RANDSTRUCT "RANDSTRUCT_" RANDSTRUCT_HASHED_SEED
#else
#define MODULE_RANDSTRUCT
#endif
#define VERMAGIC_STRING 	\
	UTS_RELEASE " " MODULE_VERMAGIC_SMP MODULE_VERMAGIC_PREEMPT /* all */ \
	MODULE_ARCH_VERMAGIC	\
	MODULE_RANDSTRUCT
#endif
"#;

    fn vermagic(text: &str, seed: &str, options: &[&str]) -> Option<String> {
        let lines: Vec<String> = options.iter().map(|option| format!("CONFIG_{option}\n")).collect();
        let config = KernelConfig::parse(&lines.concat()).unwrap();
        let arch = "#ifndef A\n#define A\n#define MODULE_ARCH_VERMAGIC \"aarch64\"\n#endif\n";
        let headers = VermagicHeaders { vermagic: text.into(), arch: arch.into(), layout_seed: seed.into() };
        headers.evaluate(&"6.1.1".parse().unwrap(), &config).map(|vermagic| format!("{vermagic:?}"))
    }

    #[test]
    fn conditions_follow_the_configuration() {
        let is = |text: &str, randstruct: bool| {
            Some(format!("{:?}", Vermagic { text: text.to_owned(), randstruct }))
        };
        assert_eq!(vermagic(LINUX, "", &["SMP=y"]), is("6.1.1 SMP aarch64", false));
        assert_eq!(vermagic(LINUX, "", &["X=y", "PREEMPT_BUILD=y"]), is("6.1.1 preempt aarch64", false));
        assert_eq!(
            vermagic(LINUX, "", &["PREEMPT_RT=y", "PREEMPT_BUILD=y"]),
            is("6.1.1 preempt_rt aarch64", false)
        );
        assert_eq!(vermagic(LINUX, "", &["PREEMPT=m"]), is("6.1.1 aarch64", false));
        assert_eq!(vermagic(LINUX, "", &["RANDSTRUCT=y"]), is("6.1.1 aarch64", true));
        let seed = "#define RANDSTRUCT_HASHED_SEED \"0123\"\n";
        assert_eq!(vermagic(LINUX, seed, &["RANDSTRUCT=y"]), is("6.1.1 aarch64RANDSTRUCT_0123", false));
    }

    #[test]
    fn words_of_vendors_are_included() {
        let vendor = LINUX.replace("UTS_RELEASE \" \"", "UTS_RELEASE \" \" VENDOR");
        assert_eq!(vermagic(&vendor, "", &["SMP=y"]), None, "the word is not defined");
        let vendor = format!("#define VENDOR \"acme \"\n{vendor}");
        assert!(vermagic(&vendor, "", &["SMP=y"]).unwrap().contains("6.1.1 acme SMP aarch64"));
    }

    #[test]
    fn expansion_of_a_hostile_header_is_limited() {
        let twice = |n: u32| format!("#define A{n} A{0} A{0}\n", n + 1);
        let nested: String = (0..60).map(twice).collect();
        for last in ["", "\"a\""] {
            let text = format!("#define VERMAGIC_STRING A0\n{nested}#define A60 {last}\n");
            assert_eq!(vermagic(&text, "", &["SMP=y"]), None);
        }
        let long = format!("#define VERMAGIC_STRING \"{}\"", "a".repeat(MAX_LENGTH + 1));
        assert_eq!(vermagic(&long, "", &["SMP=y"]), None);
    }

    #[test]
    fn unsupported_constructs_give_no_vermagic() {
        for text in [
            "",
            "#define VERMAGIC_STRING VERMAGIC_STRING",
            "#define VERMAGIC_STRING concat(a)",
            "#define VERMAGIC_STRING \"a\\n\"",
            "#if LINUX > 5\n#define VERMAGIC_STRING \"a\"\n#endif",
            "#ifdef X\n#define VERMAGIC_STRING \"a\"",
            "#endif",
            "#if (defined(X) || defined(CONFIG_SMP)) && defined(Y)\n#define VERMAGIC_STRING \"a\"\n#endif",
            "#if IS_ENABLED(CONFIG_SMP)\n#define VERMAGIC_STRING \"a\"\n#endif",
        ] {
            assert_eq!(vermagic(text, "", &["SMP=y"]), None, "{text}");
        }
    }
}
