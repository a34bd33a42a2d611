//! Pure: what a boot check found out.

use schemars::JsonSchema;
use serde::Serialize;

use super::Verdict;

/// What became of a module in a virtual machine that booted the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "outcome")]
pub enum BootOutcome {
    /// It was loaded, read back, and unloaded again where it lets itself be unloaded.
    Loaded,
    /// Its symbols were resolved and its initialisation found no hardware (`ENODEV`, `ENXIO` and the like).
    NotPresent {
        /// The system's answer, such as `ENODEV`.
        error: String,
        /// What the kernel logged meanwhile.
        messages: Vec<String>,
    },
    /// The kernel refused it.
    Refused {
        /// The system's answer, such as `ENOEXEC`.
        error: String,
        /// What the kernel logged meanwhile, such as `disagrees about version of symbol module_layout`.
        messages: Vec<String>,
    },
    /// Its symbols were resolved and its initialisation failed for another reason than absent hardware, which a
    /// virtual machine cannot judge.
    Failed {
        /// The system's answer, such as `EINVAL`.
        error: String,
        /// What the kernel logged meanwhile.
        messages: Vec<String>,
    },
    /// The kernel oopsed or panicked while it was loaded or unloaded.
    Crashed {
        /// The kernel's last lines.
        messages: Vec<String>,
    },
    /// Nothing was heard until the time was over.
    Hung {
        /// The kernel's last lines.
        messages: Vec<String>,
    },
    /// Nothing is known of it: the kernel crashed or hung before, or a module that it needs found no hardware or was not there.
    NotReached,
}

/// One module of a boot check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleBoot {
    /// The file, relative to the payload.
    pub path: String,
    /// The module's name as `lsmod` shows it.
    pub name: String,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: BootOutcome,
}

/// What a boot check found out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BootReport {
    /// The release of the kernel that booted, as it says itself.
    pub kernel: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// From the start of the virtual machine to its end.
    pub milliseconds: u64,
    /// In the order in which they were tried.
    pub modules: Vec<ModuleBoot>,
}

impl BootOutcome {
    /// What the outcome says about the module.
    pub fn verdict(&self) -> Verdict {
        match self {
            // What crashed or hung before it is refused; absent hardware and absent modules say nothing against it.
            Self::Loaded | Self::NotPresent { .. } | Self::NotReached => Verdict::Loads,
            Self::Refused { .. } | Self::Crashed { .. } | Self::Hung { .. } => Verdict::Refused,
            Self::Failed { .. } => Verdict::Unknown,
        }
    }

    /// The system's answer, where it was no yes.
    pub fn error(&self) -> Option<&str> {
        match self {
            Self::NotPresent { error, .. } | Self::Refused { error, .. } | Self::Failed { error, .. } => {
                Some(error)
            }
            _ => None,
        }
    }

    /// What the kernel said meanwhile.
    pub fn messages(&self) -> &[String] {
        match self {
            Self::NotPresent { messages, .. }
            | Self::Refused { messages, .. }
            | Self::Failed { messages, .. }
            | Self::Crashed { messages }
            | Self::Hung { messages } => messages,
            Self::Loaded | Self::NotReached => &[],
        }
    }
}

impl BootReport {
    /// The first module that a boot did not load, and what the kernel said; `None` where there is none.
    pub fn failure(&self) -> Option<String> {
        self.modules.iter().find_map(|ModuleBoot { name, outcome, .. }| {
            let failed = match outcome {
                BootOutcome::Refused { error, .. } => format!("was refused with {error}"),
                BootOutcome::Crashed { .. } => "crashed the kernel".to_owned(),
                BootOutcome::Hung { .. } => "hung the kernel".to_owned(),
                _ => return None,
            };
            let said = outcome.messages().last().map(|last| format!(": {last}")).unwrap_or_default();
            Some(format!("{name} {failed}{said}"))
        })
    }

    /// The worst of the modules' verdicts.
    pub fn verdict(&self) -> Verdict {
        self.modules.iter().map(|module| module.outcome.verdict()).max().unwrap_or_default()
    }
}
