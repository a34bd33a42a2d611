//! Why a module does not come in, or does not go. Pure: what the kernel's answers mean.

use std::{fmt, io};

use rustix::io::Errno;

use super::users::Process;
use crate::kernel::LoadRefusal;

/// What went wrong with a module.
#[derive(Debug)]
pub(crate) enum ModuleError {
    /// No tree has it.
    Missing { name: String, release: String, places: Vec<String>, needed_by: Option<String> },
    /// Its file, or one that describes modules, cannot be read.
    Unreadable { path: String, source: io::Error },
    /// Its file is no module.
    Malformed { path: String, why: &'static str },
    /// Modules that need each other.
    Cycle { names: Vec<String> },
    /// The kernel did not take it.
    Refused { name: String, path: String, parameters: String, refusal: LoadRefusal },
    /// Other modules use it.
    Held { name: String, by: Vec<String> },
    /// Something else than a module uses it.
    InUse { name: String, references: usize, by: Vec<Process> },
    /// The kernel did not let it go, for another reason.
    Kept { name: String, errno: Errno },
}

impl fmt::Display for ModuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name, release, places, needed_by } => {
                write!(f, "module {name}")?;
                if let Some(by) = needed_by {
                    write!(f, ", which {by} needs,")?;
                }
                write!(f, " is not there for kernel {release}: looked in {}", places.join(" and "))
            }
            Self::Unreadable { path, source } => write!(f, "read {path}: {source}"),
            Self::Malformed { path, why } => write!(f, "{path} is no kernel module: {why}"),
            Self::Cycle { names } => write!(f, "modules need each other: {}", names.join(" -> ")),
            Self::Refused { name, path, parameters, refusal } => {
                write!(f, "load {name} from {path}")?;
                if !parameters.is_empty() {
                    write!(f, " with \"{parameters}\"")?;
                }
                write!(f, ": {}", meaning(refusal.errno))?;
                for message in &refusal.messages {
                    write!(f, "\n    kernel: {message}")?;
                }
                Ok(())
            }
            Self::Held { name, by } => write!(f, "unload {name}: used by {}", by.join(", ")),
            Self::InUse { name, references, by } => {
                write!(f, "unload {name}: {references} reference(s) that no module holds, by ")?;
                if by.is_empty() {
                    return f.write_str("an unknown user (no process that this container can see)");
                }
                let by: Vec<String> = by.iter().map(Process::to_string).collect();
                f.write_str(&by.join(", "))
            }
            Self::Kept { name, errno } => write!(f, "unload {name}: {}", meaning(*errno)),
        }
    }
}

impl std::error::Error for ModuleError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreadable { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl ModuleError {
    /// What to do about it.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::Missing { .. } => {
                "this image was not built for the running kernel, or the host's /lib/modules is not mounted at \
                 /host/lib/modules"
            }
            Self::Unreadable { .. } => "look at the image, and at the volumes of the pod",
            Self::Malformed { .. } | Self::Cycle { .. } => {
                "rebuild the image; farrier check names what is wrong with its modules"
            }
            Self::Refused { refusal, .. } => remedy(refusal.errno),
            Self::Held { .. } => "unload those modules first, or drain the node",
            Self::InUse { .. } => {
                "end what uses the devices (lsof on the node tells), or drain the node, then let the pod start again"
            }
            Self::Kept { errno, .. } => remedy(*errno),
        }
    }
}

/// The kernel's answer in words. (`kernel/module/main.c`; modprobe prints `strerror`, which misleads.)
fn meaning(errno: Errno) -> String {
    let words = match errno {
        Errno::NOEXEC => "it does not fit this kernel (vermagic or format)",
        Errno::NOENT => "it needs a symbol or a parameter that is not there",
        Errno::INVAL => "it was built against other symbol versions, or a parameter has no such value",
        Errno::NODEV | Errno::NXIO => "there is no such hardware, or it does not answer",
        Errno::NOKEY => "it is not signed, and this kernel demands signatures (Secure Boot)",
        Errno::KEYREJECTED | Errno::KEYEXPIRED | Errno::KEYREVOKED => {
            "its signature's key is not one that this kernel trusts"
        }
        Errno::BADMSG => "its signature does not belong to it",
        Errno::PERM | Errno::ACCESS => {
            "not allowed: the container is not privileged, or modules are locked on this node"
        }
        Errno::AGAIN => "in use",
        Errno::BUSY => "it is being loaded or unloaded by something else, or cannot be unloaded",
        Errno::NOMEM => "no memory",
        _ => return format!("{errno}"),
    };
    format!("{words} ({errno})")
}

fn remedy(errno: Errno) -> &'static str {
    match errno {
        Errno::NOEXEC | Errno::NOENT | Errno::INVAL => {
            "compare the image's kernel with uname -r; dmesg on the node has the kernel's words; farrier check tells \
             beforehand"
        }
        Errno::NODEV | Errno::NXIO => "the node has no device that this driver knows: check its labels",
        Errno::NOKEY | Errno::KEYREJECTED | Errno::KEYEXPIRED | Errno::KEYREVOKED | Errno::BADMSG => {
            "sign the modules with a key that is enrolled on this node (mokutil --list-enrolled)"
        }
        Errno::PERM | Errno::ACCESS => {
            "run the container privileged; look at /proc/sys/kernel/modules_disabled"
        }
        _ => "dmesg on the node has the kernel's words",
    }
}
