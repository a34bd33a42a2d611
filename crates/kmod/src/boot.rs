//! Results of a boot check.

use schemars::JsonSchema;
use serde::Serialize;

use super::Verdict;

/// Outcome for one module in a virtual machine that booted the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", tag = "outcome")]
pub enum BootOutcome {
    /// The module was loaded, read back, and unloaded again if it can be unloaded.
    Loaded,
    /// The module's symbols were resolved, but its initialization found no hardware (`ENODEV`, `ENXIO` and the like).
    NotPresent {
        /// Error of the system call, for example `ENODEV`.
        error: String,
        /// Kernel messages during the load.
        messages: Vec<String>,
    },
    /// The kernel refused the module.
    Refused {
        /// Error of the system call, for example `ENOEXEC`.
        error: String,
        /// Kernel messages during the load, for example `disagrees about version of symbol module_layout`.
        messages: Vec<String>,
    },
    /// The module's symbols were resolved, but its initialization failed for a reason other than absent hardware. A
    /// virtual machine cannot judge such a failure.
    Failed {
        /// Error of the system call, for example `EINVAL`.
        error: String,
        /// Kernel messages during the load.
        messages: Vec<String>,
    },
    /// The kernel oopsed or panicked while the module was loaded or unloaded.
    Crashed {
        /// Last kernel messages.
        messages: Vec<String>,
    },
    /// The virtual machine sent nothing more until the timeout.
    Hung {
        /// Last kernel messages.
        messages: Vec<String>,
    },
    /// The module was not tried: the kernel crashed or hung before, or a module that it needs found no hardware or was
    /// missing.
    NotReached,
}

/// Result of a boot check for one module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModuleBoot {
    /// Path of the file, relative to the payload.
    pub path: String,
    /// Module name as `lsmod` shows it.
    pub name: String,
    /// Outcome of the boot check.
    #[serde(flatten)]
    pub outcome: BootOutcome,
}

/// Report of a boot check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BootReport {
    /// Release of the booted kernel, as the kernel itself reports it.
    pub kernel: String,
    /// Accelerator of the virtual machine: `kvm` or `tcg`.
    pub accelerator: String,
    /// Run time of the virtual machine in milliseconds.
    pub milliseconds: u64,
    /// Modules in the order in which they were tried.
    pub modules: Vec<ModuleBoot>,
}

impl BootOutcome {
    /// Verdict that follows from the outcome.
    pub fn verdict(&self) -> Verdict {
        match self {
            // After a crash or hang, the verdict falls on the module that caused it. Absent hardware or absent modules
            // do not count against this module.
            Self::Loaded | Self::NotPresent { .. } | Self::NotReached => Verdict::Loads,
            Self::Refused { .. } | Self::Crashed { .. } | Self::Hung { .. } => Verdict::Refused,
            Self::Failed { .. } => Verdict::Unknown,
        }
    }

    /// Error of the system call, if it failed.
    pub fn error(&self) -> Option<&str> {
        match self {
            Self::NotPresent { error, .. } | Self::Refused { error, .. } | Self::Failed { error, .. } => {
                Some(error)
            }
            _ => None,
        }
    }

    /// Kernel messages that the outcome contains.
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
    /// Describes the first module that was refused or that crashed or hung the kernel, with the last kernel message;
    /// `None` if there is none.
    pub fn failure(&self) -> Option<String> {
        self.modules.iter().find_map(|ModuleBoot { name, outcome, .. }| {
            let failed = match outcome {
                BootOutcome::Refused { error, .. } => format!("was refused with {error}"),
                BootOutcome::Crashed { .. } => "crashed the kernel".to_owned(),
                BootOutcome::Hung { .. } => "hung the kernel".to_owned(),
                _ => return None,
            };
            let message = outcome.messages().last().map(|last| format!(": {last}")).unwrap_or_default();
            Some(format!("{name} {failed}{message}"))
        })
    }

    /// Worst verdict of all modules.
    pub fn verdict(&self) -> Verdict {
        self.modules.iter().map(|module| module.outcome.verdict()).max().unwrap_or_default()
    }
}
