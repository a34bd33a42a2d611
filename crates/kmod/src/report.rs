//! Pure: what a check found out, for people and for programs.

use std::fmt;

use schemars::JsonSchema;
use serde::Serialize;

use strum::{Display, EnumString, IntoStaticStr};

use super::{BootReport, ModuleAbout};
use crate::Architecture;

/// What the kernel's own loader would say. Ordered: the worst of several is the greatest.
#[derive(Serialize, JsonSchema, Display, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = VerdictError, parse_err_fn = VerdictError::new)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Nothing speaks against it.
    #[default]
    Loads,
    /// The header set cannot tell. Unknown is not fine.
    Unknown,
    /// The kernel would refuse it.
    Refused,
}

impl Verdict {
    /// The word of the vocabulary: `loads`, `unknown`, `refused`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A text that is no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a verdict (loads, unknown, refused)")]
pub struct VerdictError(pub String);

impl VerdictError {
    fn new(text: &str) -> Self {
        Self(text.chars().take(80).collect())
    }
}

/// The rule of the loader that a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The file is a relocatable object for this machine, whole and well-formed.
    Elf,
    /// Its signature is one that the kernel takes.
    Signature,
    /// Its `struct module` has the size of the kernel's.
    ModuleSize,
    /// Its `vermagic` is the kernel's.
    Vermagic,
    /// The symbol versions that it was built with are those of the exporters.
    SymbolVersion,
    /// Every symbol that it needs is exported.
    UndefinedSymbol,
    /// It uses `EXPORT_SYMBOL_GPL` symbols only under a licence that is compatible.
    Licence,
    /// It imports the namespaces of the symbols that it uses.
    Namespace,
    /// It exports nothing that the kernel itself exports.
    DuplicateExport,
    /// The kernel does not have a module of its name built in.
    BuiltIn,
    /// Its type information (BTF) counts on from the kernel's.
    Btf,
    /// The modules of the payload that it needs load.
    Dependency,
    /// A module that must be in the payload is there.
    RequiredModule,
    /// No two files of the payload are the same module.
    DuplicateModule,
}

/// One reason for a verdict, or a warning that the loader would print.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// What it means for the module. `loads` is a warning.
    pub verdict: Verdict,
    /// The symbol, field or module that it is about.
    pub subject: String,
    /// What is wrong, a lower-case fragment that names the subject.
    pub message: String,
    /// What the module has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// What the kernel wants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<String>,
    /// What to do about it, or what would settle it.
    pub remedy: String,
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
        Self { rule, verdict, subject, message, found: None, wanted: None, remedy }
    }

    pub(crate) fn found(self, found: impl Into<String>) -> Self {
        Self { found: Some(found.into()), ..self }
    }

    pub(crate) fn wanted(self, wanted: impl Into<String>) -> Self {
        Self { wanted: Some(wanted.into()), ..self }
    }
}

impl fmt::Display for Finding {
    /// One line without the remedy: what is wrong, what was found and what is wanted.
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

/// What was found out about one module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleReport {
    /// The file, relative to the payload.
    pub path: String,
    /// The module's name as `lsmod` shows it; from the file's name where the file cannot be read.
    pub name: String,
    /// The worst of the findings.
    pub verdict: Verdict,
    /// Reasons, in the order of the loader's checks, then by subject.
    pub findings: Vec<Finding>,
    /// What else is worth knowing about it; empty where the file cannot be read.
    #[serde(flatten)]
    pub about: ModuleAbout,
}

/// What the kernel would say about a payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CheckReport {
    /// The kernel's release.
    pub kernel: String,
    /// The kernel's architecture.
    pub architecture: Architecture,
    /// The worst of the modules' verdicts and of `findings`.
    pub verdict: Verdict,
    /// What concerns the set and no single file of it.
    pub findings: Vec<Finding>,
    /// One for each file, in the order of their paths.
    pub modules: Vec<ModuleReport>,
    /// The names of the readable modules, each after those of the payload that it needs. Modules that need
    /// each other in a circle, and their users, are not among them.
    pub load_order: Vec<String>,
    /// What a boot of the kernel showed, where one was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootReport>,
}

impl CheckReport {
    /// Adds what a boot showed. It makes no verdict better: a virtual machine is not the node, whose firmware
    /// may, for one, ask for signatures.
    #[must_use]
    pub fn with_boot(mut self, boot: BootReport) -> Self {
        self.verdict = self.verdict.max(boot.verdict());
        self.boot = Some(boot);
        self
    }

    /// Places in `modules`, each after those of the modules that it needs. What cannot be ordered is not among them.
    pub fn places_in_load_order(&self) -> Vec<usize> {
        let place = |name: &String| self.modules.iter().position(|module| module.name == *name);
        self.load_order.iter().filter_map(place).collect()
    }

    /// What settles the findings of one verdict, each once, in the report's order.
    pub fn remedies(&self, verdict: Verdict) -> Vec<String> {
        let of_modules = self.modules.iter().flat_map(|module| &module.findings);
        let mut remedies: Vec<String> = Vec::new();
        for finding in self.findings.iter().chain(of_modules).filter(|finding| finding.verdict == verdict) {
            if !remedies.contains(&finding.remedy) {
                remedies.push(finding.remedy.clone());
            }
        }
        remedies
    }

    /// The report in a few words: `5 modules: loads`.
    pub fn in_a_few_words(&self) -> String {
        let count = self.modules.len();
        let modules = if count == 1 { "module" } else { "modules" };
        let booted = if self.boot.is_some() { ", also when booted" } else { "" };
        format!("{count} {modules}: {}{booted}", self.verdict)
    }

    /// The first finding that decided the verdict, and how many more there are. Warnings decide nothing.
    pub fn summary(&self) -> String {
        if self.verdict == Verdict::Loads {
            return self.verdict.to_string();
        }
        let of_modules =
            self.modules.iter().flat_map(|module| module.findings.iter().map(move |f| (Some(module), f)));
        let all = self.findings.iter().map(|finding| (None, finding)).chain(of_modules);
        let mut decisive = all.filter(|(_, finding)| finding.verdict == self.verdict);
        let Some((module, first)) = decisive.next() else { return self.verdict.to_string() };
        let module = module.map(|module| format!("{}: ", module.name)).unwrap_or_default();
        match decisive.count() {
            0 => format!("{module}{first}"),
            more => format!("{module}{first} (and {more} more)"),
        }
    }
}
