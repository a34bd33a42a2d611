//! Report of a check, for people and programs.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
};

use schemars::JsonSchema;
use serde::Serialize;

use strum::{Display, EnumString, IntoStaticStr, VariantArray};

use super::{BootReport, ModuleAbout};
use crate::Architecture;

/// Reference of the loader's checks, with a section about each rule.
const LOADER: &str = include_str!("../LOADER.md");
/// Maximum length in characters of a value that a module has. A long field would otherwise be repeated for each symbol.
const MAX_FOUND: usize = 512;

/// Predicted answer of the kernel's module loader. Ordered from best to worst, so the maximum of several verdicts is
/// the worst.
#[derive(Serialize, JsonSchema, Display, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = VerdictError, parse_err_fn = VerdictError::new)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// No rule objects to the module.
    #[default]
    Loads,
    /// The available sources cannot tell. Unknown does not count as a pass.
    Unknown,
    /// The kernel would refuse the module.
    Refused,
}

impl Verdict {
    /// Name of the verdict: `loads`, `unknown`, `refused`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Error for a text that is not a verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a verdict (loads, unknown, refused)")]
pub struct VerdictError(pub String);

impl VerdictError {
    fn new(text: &str) -> Self {
        Self(text.chars().take(80).collect())
    }
}

/// Rule of the loader that a finding refers to.
#[derive(Serialize, JsonSchema, Display, EnumString, IntoStaticStr, VariantArray)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case", parse_err_ty = RuleError, parse_err_fn = RuleError::new)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// The file must be a complete and well-formed relocatable object for this machine.
    Elf,
    /// The kernel must accept the module's signature.
    Signature,
    /// The module's `struct module` must have the size of the kernel's.
    ModuleSize,
    /// The module's `vermagic` must be the kernel's.
    Vermagic,
    /// The module's symbol versions must match the exporters' versions.
    SymbolVersion,
    /// Every symbol that the module needs must be exported.
    UndefinedSymbol,
    /// The module may use `EXPORT_SYMBOL_GPL` symbols only under a compatible license.
    License,
    /// The module must import the namespaces of the symbols that it uses.
    Namespace,
    /// The module must not export a symbol of the kernel, or of a module that is loaded before it.
    DuplicateExport,
    /// The kernel must not have a module of the same name built in.
    BuiltIn,
    /// The module's type information (BTF) must continue the kernel's.
    Btf,
    /// The kernel must load modules, and modules of this kind.
    Kernel,
    /// The kernel must be able to apply the module's relocations.
    Relocation,
    /// The module's per-CPU variables must fit into the memory that the kernel reserves for them.
    PerCpu,
    /// The modules of the payload that the module needs must load.
    Dependency,
    /// A required module must be in the payload.
    RequiredModule,
    /// No two files of the payload may contain the same module.
    DuplicateModule,
}

impl Rule {
    /// Name of the rule: `symbol-version`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Explains the kernel's requirement, in the Markdown of `LOADER.md`.
    pub fn explanation(self) -> &'static str {
        let rules = LOADER.split_once("\n## Rules\n").map_or("", |(_, rules)| rules);
        let section =
            rules.split("\n### ").find_map(|section| section.strip_prefix(self.as_str())?.strip_prefix('\n'));
        section.unwrap_or_default().split("\n## ").next().unwrap_or_default().trim()
    }
}

/// Error for a text that names no rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a rule ({names})", names = Rule::VARIANTS.iter().map(|rule| rule.as_str()).collect::<Vec<_>>().join(", "))]
pub struct RuleError(pub String);

impl RuleError {
    fn new(text: &str) -> Self {
        Self(text.chars().take(80).collect())
    }
}

/// One reason for a verdict, or a warning that the loader would print.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// Rule that the finding refers to.
    pub rule: Rule,
    /// Consequence for the module; `loads` marks a warning.
    pub verdict: Verdict,
    /// Symbol, field or module that the finding is about.
    pub subject: String,
    /// Description of the problem: a lower-case fragment that names the subject.
    pub message: String,
    /// Value that the module has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// Value that the kernel requires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<String>,
    /// Advice on how to fix or settle the finding.
    pub remedy: String,
    /// Message in the kernel's log, without the module's name in front.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_message: Option<String>,
    /// Name of the error number that the system call returns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<&'static str>,
    /// Whether the kernel skips a protection, so that nothing proves that the module fits the kernel.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unproven: bool,
}

impl Finding {
    pub(crate) fn new(
        rule: Rule,
        verdict: Verdict,
        subject: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (subject, message, remedy) = (subject.into(), message.into(), remedy.into());
        let (found, wanted, kernel_message, errno) = (None, None, None, None);
        Self {
            rule,
            verdict,
            subject,
            message,
            found,
            wanted,
            remedy,
            kernel_message,
            errno,
            unproven: false,
        }
    }

    /// Adds the kernel's own answer.
    pub(crate) fn with_kernel_message(self, errno: &'static str, message: impl Into<String>) -> Self {
        Self { errno: Some(errno), kernel_message: Some(message.into()), ..self }
    }

    /// Marks a warning about a protection that the kernel skips.
    pub(crate) fn unproven(self) -> Self {
        Self { unproven: true, ..self }
    }

    pub(crate) fn found(self, found: impl AsRef<str>) -> Self {
        Self { found: Some(found.as_ref().chars().take(MAX_FOUND).collect()), ..self }
    }

    pub(crate) fn wanted(self, wanted: impl Into<String>) -> Self {
        Self { wanted: Some(wanted.into()), ..self }
    }
}

impl fmt::Display for Finding {
    /// Formats one line without the remedy: the problem, the found value and the required value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match (&self.found, &self.wanted) {
            (Some(found), Some(wanted)) => write!(f, ": found {found}, wanted {wanted}"),
            (Some(found), None) => write!(f, ": found {found}"),
            (None, Some(wanted)) => write!(f, ": wanted {wanted}"),
            (None, None) => Ok(()),
        }
    }
}

/// Result of a check for one module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleReport {
    /// Path of the file, relative to the payload.
    pub path: String,
    /// Module name as `lsmod` shows it; derived from the file's name if the file cannot be read.
    pub name: String,
    /// Worst verdict of the findings.
    pub verdict: Verdict,
    /// Reasons, in the order of the loader's checks, then by subject.
    pub findings: Vec<Finding>,
    /// Descriptive facts about the module; empty if the file cannot be read.
    #[serde(flatten)]
    pub about: ModuleAbout,
}

/// Predicted answer of the kernel for a payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CheckReport {
    /// Release of the kernel.
    pub kernel: String,
    /// Architecture of the kernel.
    pub architecture: Architecture,
    /// Worst verdict of `modules` and `findings`.
    pub verdict: Verdict,
    /// Findings about the payload as a whole.
    pub findings: Vec<Finding>,
    /// Report of each file, sorted by path.
    pub modules: Vec<ModuleReport>,
    /// Names of the readable modules in load order: each follows the modules of the payload that it needs. Modules in a
    /// dependency cycle, and their users, are omitted.
    pub load_order: Vec<String>,
    /// Report of a boot check, if one was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootReport>,
}

impl CheckReport {
    /// Adds a boot report. A boot report never improves a verdict: a virtual machine is not the node, whose firmware
    /// may, for example, require signatures.
    #[must_use]
    pub fn with_boot(mut self, boot: BootReport) -> Self {
        self.verdict = self.verdict.max(boot.verdict());
        self.boot = Some(boot);
        self
    }

    /// Number of findings about protections that the kernel skips.
    pub fn unproven(&self) -> usize {
        self.all_findings().filter(|finding| finding.unproven).count()
    }

    /// Turns the warnings about protections that the kernel skips into the verdict `unknown`.
    #[must_use]
    pub fn deny_unproven(mut self) -> Self {
        for module in &mut self.modules {
            for finding in module.findings.iter_mut().filter(|finding| finding.unproven) {
                finding.verdict = finding.verdict.max(Verdict::Unknown);
                module.verdict = module.verdict.max(finding.verdict);
            }
            self.verdict = self.verdict.max(module.verdict);
        }
        self
    }

    /// Tells where the rules of the findings are explained, for a program such as `farrier check`. `None` without findings.
    pub fn explain_hint(&self, program: &str) -> Option<String> {
        let rules: BTreeSet<Rule> = self.all_findings().map(|finding| finding.rule).collect();
        let names: Vec<&str> = rules.into_iter().map(Rule::as_str).collect();
        match names[..] {
            [] => None,
            [only] => Some(format!("for more information: {program} --explain {only}")),
            _ => Some(format!("for more information: {program} --explain RULE ({})", names.join(", "))),
        }
    }

    /// Findings about the payload, then those about its modules.
    fn all_findings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().chain(self.modules.iter().flat_map(|module| &module.findings))
    }

    /// Indexes into `modules` in load order. Modules that cannot be ordered are omitted.
    pub fn load_order_indices(&self) -> Vec<usize> {
        let mut indices = HashMap::new();
        for (index, module) in self.modules.iter().enumerate() {
            indices.entry(&module.name).or_insert(index);
        }
        self.load_order.iter().filter_map(|name| indices.get(name).copied()).collect()
    }

    /// Remedies for the findings of one verdict, without duplicates, in the report's order.
    pub fn remedies(&self, verdict: Verdict) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let findings = self.all_findings().filter(|finding| finding.verdict == verdict);
        findings.map(|finding| &finding.remedy).filter(|remedy| seen.insert(*remedy)).cloned().collect()
    }

    /// Shortest form of the report: `5 modules: loads`.
    pub fn short_summary(&self) -> String {
        let count = self.modules.len();
        let modules = if count == 1 { "module" } else { "modules" };
        let booted = if self.boot.is_some() { ", also when booted" } else { "" };
        let unproven = if self.unproven() > 0 { ", unproven" } else { "" };
        format!("{count} {modules}: {}{unproven}{booted}", self.verdict)
    }

    /// The first finding that decided the verdict, and the number of further such findings. Warnings do not count.
    pub fn summary(&self) -> String {
        if self.verdict == Verdict::Loads {
            return self.verdict.to_string();
        }
        let module_findings =
            self.modules.iter().flat_map(|module| module.findings.iter().map(move |f| (Some(module), f)));
        let all = self.findings.iter().map(|finding| (None, finding)).chain(module_findings);
        let mut decisive = all.filter(|(_, finding)| finding.verdict == self.verdict);
        let Some((module, first)) = decisive.next() else { return self.verdict.to_string() };
        let module = module.map(|module| format!("{}: ", module.name)).unwrap_or_default();
        match decisive.count() {
            0 => format!("{module}{first}"),
            more => format!("{module}{first} (and {more} more)"),
        }
    }
}
