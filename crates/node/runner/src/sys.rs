//! System calls that neither rustix nor nix wraps.
#![expect(unsafe_code, reason = "raw system calls; each block states why it is sound")]

use std::{
    io,
    mem::size_of,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    ptr,
};

/// Closes every inherited descriptor except standard input, output and error, and the descriptors in `kept`, which must be
/// in ascending order.
pub fn close_inherited(kept: impl IntoIterator<Item = RawFd>) -> io::Result<()> {
    let mut first = 3;
    for kept in kept {
        close_range(first, kept - 1)?;
        first = kept + 1;
    }
    close_range(first, RawFd::MAX)
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    if first > last {
        return Ok(());
    }
    // SAFETY: callers run before this process has opened any file in that range.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })
}

/// Takes ownership of a descriptor that this program was started with.
pub fn inherited(number: RawFd) -> OwnedFd {
    // SAFETY: the parent opened this descriptor for this process, and nothing else here owns it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Turns a detached mount into an idmapped mount with the maps of a user namespace (`mount_setattr(2)`, `MOUNT_ATTR_IDMAP`).
pub fn idmap_mount(mount: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::try_from(user_namespace.as_raw_fd()).map_err(io::Error::other)?,
    };
    // SAFETY: both pointers are valid for the call, and the size matches the structure.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    })
}

/// Replaces the caller's session keyring with an empty one. No namespace isolates keyrings, and a process can read the keys of an
/// inherited keyring.
pub fn replace_session_keyring() -> io::Result<()> {
    // SAFETY: the name is a null pointer, so the kernel reads no memory.
    let joined = check(unsafe {
        libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, ptr::null::<libc::c_char>())
    });
    match joined {
        // Ignore a refusal: a container's seccomp filter also keeps steps from reading keys, and a kernel without keyrings has no
        // keys.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => Ok(()),
        other => other,
    }
}

/// Restores the default action of SIGSEGV and SIGBUS, for which Rust's runtime installs handlers that report stack overflows.
///
/// From inside a PID namespace, process 1 receives only signals for which it has a handler. With these handlers, a step could
/// kill process 1 with SIGSEGV.
pub fn remove_signal_handlers() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the default action runs no code of this program.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
