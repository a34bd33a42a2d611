//! Errors that end a driver container, with the meaning of the kernel's error codes and hints for the user.

use std::{fmt, io};

use rustix::io::Errno;

use crate::modules::{users::DeviceUser, with_parameters};

/// The kernel's refusal to load a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadRefusal {
    pub(crate) errno: Errno,
    /// Whether the kernel is locked down: it then loads signed modules only.
    pub(crate) locked_down: bool,
    /// Last lines of the kernel log during the load, oldest first.
    pub(crate) messages: Vec<String>,
}

/// Error of a step on the node.
#[derive(Debug)]
pub(crate) enum Error {
    /// The kernel refused to load a module.
    Refused { name: String, path: String, parameters: String, refusal: LoadRefusal },
    /// Other modules use the module to be unloaded.
    Held { name: String, users: Vec<String> },
    /// Processes or unknown users hold references to the module. `users` lists the processes that this container can see.
    InUse { name: String, references: usize, users: Vec<DeviceUser> },
    /// An operation on a file, a directory or a mount failed.
    Io { action: &'static str, object: String, source: io::Error },
    /// The guard on the host refused a swap, undid it, or is missing. `state` describes how the node differs from before the
    /// swap, until a later container changes that. `transient` is whether the same swap may succeed later.
    Guard { state: Option<String>, message: String, hint: &'static str, transient: bool },
    /// A signal ended the start.
    Interrupted(&'static str),
    /// Any other error; the hint is empty where there is nothing to do.
    Other { message: String, hint: String },
}

impl Error {
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Other { message: message.into(), hint: hint.into() }
    }

    /// Returns a function that wraps an I/O error; `action` is a verb such as `write`, `object` a path in the container.
    pub(crate) fn on(action: &'static str, object: impl Into<String>) -> impl Fn(io::Error) -> Self {
        let object = object.into();
        move |source| Self::Io { action, object: object.clone(), source }
    }

    /// Whether the same step may succeed later, because only the current state of the node prevents it.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Held { .. }
                | Self::InUse { .. }
                | Self::Interrupted(_)
                | Self::Guard { transient: true, .. }
        )
    }

    /// Returns the error without [`state`](Self::Guard), which no longer applies.
    pub(crate) fn without_state(mut self) -> Self {
        if let Self::Guard { state, .. } = &mut self {
            *state = None;
        }
        self
    }

    /// Describes the error without [`state`](Self::Guard), which may change later.
    pub(crate) fn cause(&self) -> String {
        match self {
            Self::Guard { message, .. } => message.clone(),
            other => other.to_string(),
        }
    }

    /// The kernel refused to unload a module that has no known users.
    pub(crate) fn unload_refused(name: &str, errno: Errno) -> Self {
        Self::new(format!("unload {name}: {}", meaning(errno, false)), remedy(errno, false))
    }

    /// Hint on how to fix the error; empty if there is none.
    pub(crate) fn hint(&self) -> &str {
        match self {
            Self::Refused { refusal, .. } => remedy(refusal.errno, refusal.locked_down),
            Self::Held { .. } => "unload those modules first, or drain the node",
            Self::InUse { .. } => {
                "stop the processes that use the devices (find them with lsof on the node), or drain the node; then restart the pod"
            }
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied => "run the container privileged, with SELinux level s0",
                io::ErrorKind::ReadOnlyFilesystem => "the volume of that path must be writable",
                io::ErrorKind::NotFound => {
                    "mount the host's directory there, as the operator's DaemonSet does"
                }
                _ => "check the image and the volumes of the pod",
            },
            Self::Guard { hint, .. } => hint,
            Self::Interrupted(_) => "",
            Self::Other { hint, .. } => hint,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { name, path, parameters, refusal } => {
                let options = with_parameters(parameters);
                let meaning = meaning(refusal.errno, refusal.locked_down);
                write!(f, "load {name} from {path}{options}: {meaning}{refusal}")
            }
            Self::Held { name, users } => write!(f, "unload {name}: used by {}", users.join(", ")),
            Self::InUse { name, references, users } => {
                let users = match users.as_slice() {
                    [] => "an unknown user (no process that this container can see)".to_owned(),
                    users => users.iter().map(DeviceUser::to_string).collect::<Vec<_>>().join(", "),
                };
                write!(f, "unload {name}: {references} reference(s) that no module holds; in use by {users}")
            }
            Self::Io { action, object, source } => write!(f, "{action} {object}: {source}"),
            Self::Interrupted(signal) => write!(f, "received {signal} before the drivers were ready"),
            Self::Guard { state: Some(state), message, .. } => write!(f, "{state}; {message}"),
            Self::Guard { message, .. } | Self::Other { message, .. } => f.write_str(message),
        }
    }
}

/// Prints each kernel message on a separate line.
impl fmt::Display for LoadRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.messages.iter().try_for_each(|message| write!(f, "\n    kernel: {message}"))
    }
}

/// Error code in words (`kernel/module/main.c`); modprobe prints `strerror`, which misleads.
fn meaning(errno: Errno, locked_down: bool) -> String {
    let words = match errno {
        // Lockdown refuses with `EPERM`, the enforcement of signatures with `EKEYREJECTED` (`kernel/module/signing.c`,
        // `module_sig_check`).
        Errno::PERM if locked_down => {
            "it is not signed with a key that this kernel trusts, and the kernel is locked down"
        }
        Errno::NOEXEC => "it does not fit this kernel (vermagic or format)",
        Errno::NOENT => "it needs a symbol or a parameter that does not exist",
        Errno::INVAL => "it was built against other symbol versions, or a parameter has no such value",
        Errno::NODEV | Errno::NXIO => "the hardware is absent, or does not answer",
        Errno::NOKEY => "it is not signed, and this kernel requires signatures (Secure Boot)",
        Errno::KEYREJECTED => {
            "it is not signed with a key that this kernel trusts, and this kernel enforces signatures"
        }
        Errno::KEYEXPIRED | Errno::KEYREVOKED => "it is signed with a key that has expired or was revoked",
        Errno::BADMSG => "its signature does not match it",
        Errno::PERM | Errno::ACCESS => {
            "not allowed: the container is not privileged, or the loading of modules is disabled on this node"
        }
        Errno::AGAIN => "in use",
        Errno::BUSY => "it is being loaded or unloaded by something else, or cannot be unloaded",
        Errno::NOMEM => "no memory",
        _ => return format!("{errno}"),
    };
    format!("{words} ({errno})")
}

fn remedy(errno: Errno, locked_down: bool) -> &'static str {
    let errno = if locked_down && errno == Errno::PERM { Errno::KEYREJECTED } else { errno };
    match errno {
        Errno::NOEXEC | Errno::NOENT | Errno::INVAL => {
            "compare the image's kernel with uname -r; dmesg on the node has the kernel's messages; farrier \
             check finds this before a rollout"
        }
        Errno::NODEV | Errno::NXIO => "the node has no device that this driver supports: check its labels",
        Errno::NOKEY | Errno::KEYREJECTED | Errno::KEYEXPIRED | Errno::KEYREVOKED | Errno::BADMSG => {
            "sign the modules with a key that is enrolled on this node (mokutil --list-enrolled)"
        }
        Errno::PERM | Errno::ACCESS => {
            "run the container privileged; check /proc/sys/kernel/modules_disabled and the node's security modules"
        }
        _ => "dmesg on the node has the kernel's messages",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: Errno, locked_down: bool) -> (String, &'static str) {
        (meaning(errno, locked_down), remedy(errno, locked_down))
    }

    /// As `module_sig_check` of Linux answers for an unsigned module, or one with an unknown key.
    #[test]
    fn lockdown_and_enforced_signatures_have_separate_messages() {
        let trusted = "it is not signed with a key that this kernel trusts, and";
        let (meaning, remedy) = refused(Errno::PERM, true);
        assert!(meaning.starts_with(&format!("{trusted} the kernel is locked down (")), "{meaning}");
        assert!(remedy.starts_with("sign the modules"), "{remedy}");
        let (meaning, remedy) = refused(Errno::KEYREJECTED, false);
        assert!(meaning.starts_with(&format!("{trusted} this kernel enforces signatures (")), "{meaning}");
        assert!(remedy.starts_with("sign the modules"), "{remedy}");
        let (meaning, remedy) = refused(Errno::PERM, false);
        assert!(meaning.starts_with("not allowed: the container is not privileged"), "{meaning}");
        assert!(remedy.starts_with("run the container privileged"), "{remedy}");
    }
}
