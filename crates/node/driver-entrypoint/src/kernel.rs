//! The kernel calls that change state, behind a trait, and the adapter for the running kernel. State in `/proc` and
//! `/sys` is read below [`Paths`](crate::node::Paths), so that tests can provide it as files.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    net::{SocketAddr, TcpStream},
    panic::resume_unwind,
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, chmod, makedev, mknodat},
    io::Errno,
    mount::{MountPropagationFlags, UnmountFlags, mount_bind_recursive, mount_change, unmount},
    system::{delete_module, finit_module, init_module, uname},
};

use driver_entrypoint::report::SyscallResult;

use crate::{
    error::LoadRefusal,
    isolated,
    kmsg::KernelLog,
    module_file::{Compression, ModuleFile},
};

/// `MODULE_INIT_COMPRESSED_FILE` (`include/uapi/linux/module.h`, Linux 5.17 and later).
const COMPRESSED_FILE: i32 = 4;

/// Maximum number of kernel log lines in an error.
const MAX_MESSAGES: usize = 8;

/// Interval of the reports while a call takes long.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Callback with the elapsed time, called repeatedly while a kernel call blocks.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(Duration);

/// The kernel calls of this program that change state, and those that wait. Each change can be undone or repeated.
pub(crate) trait Kernel {
    /// Returns the kernel release (`uname -r`).
    fn release(&self) -> String;
    /// Loads a module from its file. Returns the warnings and errors that the kernel logged during the load.
    fn load(
        &self,
        file: &ModuleFile,
        parameters: &str,
        progress: Progress<'_>,
    ) -> Result<Vec<String>, LoadRefusal>;
    /// Loads an uncompressed module from its file in a separate process, which a crash of the driver kills instead of
    /// this one. Kills the process at the time limit.
    fn load_within(&self, file: &ModuleFile, parameters: &str, limit: Duration) -> Result<(), LoadError>;
    /// Unloads a module; fails with `EAGAIN` if the module is in use.
    fn unload(&self, name: &str, progress: Progress<'_>) -> Result<(), Errno>;
    /// Bind-mounts recursively (`mount --rbind`).
    fn bind(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Unmounts lazily, including all mounts below (`umount --lazy`).
    fn unmount(&self, path: &Path) -> io::Result<()>;
    /// Sets mount propagation (`mount --make-rprivate` and the like).
    fn propagation(&self, path: &Path, flags: MountPropagationFlags) -> io::Result<()>;
    /// Creates a character device node with this major number and minor 0, readable and writable by everyone.
    fn make_device(&self, path: &Path, major: u32) -> io::Result<()>;
    /// Whether a host answers at a TCP port. A refused connection is also an answer.
    fn connects(&self, to: SocketAddr, timeout: Duration) -> bool;
    /// Sleeps, for example until devices come up or a reference is dropped.
    fn pause(&self, time: Duration);
}

/// Failure of a load in a separate process.
pub(crate) enum LoadError {
    /// The kernel refused the module.
    Refused(LoadRefusal),
    /// The process was killed by the kernel, could not be started, or did not end within the time limit.
    Failed(String),
}

/// The running kernel.
pub(crate) struct Linux;

impl Kernel for Linux {
    fn release(&self) -> String {
        uname().release().to_string_lossy().into_owned()
    }

    fn load(
        &self,
        file: &ModuleFile,
        parameters: &str,
        progress: Progress<'_>,
    ) -> Result<Vec<String>, LoadRefusal> {
        let mut log = KernelLog::open().ok();
        match with_progress(|| insert(file, parameters), progress) {
            Ok(()) => Ok(last_messages(log.as_mut().map(KernelLog::read_warnings).unwrap_or_default())),
            Err(errno) => Err(refusal(errno, log)),
        }
    }

    fn load_within(&self, file: &ModuleFile, parameters: &str, limit: Duration) -> Result<(), LoadError> {
        let log = KernelLog::open().ok();
        let path = file.path.to_string_lossy();
        match isolated::run_child_within(&[isolated::LOAD, &path, parameters], limit) {
            Ok(SyscallResult::Success) => Ok(()),
            Ok(SyscallResult::Errno(number)) => {
                Err(LoadError::Refused(refusal(Errno::from_raw_os_error(number), log)))
            }
            Ok(SyscallResult::Killed(signal)) => {
                Err(LoadError::Failed(format!("the kernel killed the process with signal {signal}")))
            }
            Err(error) => Err(LoadError::Failed(error.to_string())),
        }
    }

    fn unload(&self, name: &str, progress: Progress<'_>) -> Result<(), Errno> {
        with_progress(|| remove(name), progress)
    }

    fn bind(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(mount_bind_recursive(from, to)?)
    }

    fn unmount(&self, path: &Path) -> io::Result<()> {
        Ok(unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
    }

    fn propagation(&self, path: &Path, flags: MountPropagationFlags) -> io::Result<()> {
        Ok(mount_change(path, flags)?)
    }

    fn make_device(&self, path: &Path, major: u32) -> io::Result<()> {
        let mode = Mode::from_raw_mode(0o666);
        mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, 0))?;
        // The umask has cleared some mode bits.
        Ok(chmod(path, mode)?)
    }

    fn connects(&self, to: SocketAddr, timeout: Duration) -> bool {
        match TcpStream::connect_timeout(&to, timeout) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
        }
    }

    fn pause(&self, time: Duration) {
        thread::sleep(time);
    }
}

fn refusal(errno: Errno, log: Option<KernelLog>) -> LoadRefusal {
    let messages = last_messages(log.map(|mut log| log.read()).unwrap_or_default());
    LoadRefusal { errno, locked_down: false, messages }
}

fn last_messages(mut messages: Vec<String>) -> Vec<String> {
    messages.split_off(messages.len().saturating_sub(MAX_MESSAGES))
}

/// Makes a call in another thread, and reports progress while it blocks: the kernel may wait forever for a device or a
/// reference.
fn with_progress<T: Send>(call: impl FnOnce() -> T + Send, progress: Progress<'_>) -> T {
    let (sender, receiver) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let call = scope.spawn(move || {
            let result = call();
            drop(sender);
            result
        });
        let start = Instant::now();
        while let Err(RecvTimeoutError::Timeout) = receiver.recv_timeout(REPORT_INTERVAL) {
            progress(start.elapsed());
        }
        call.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Loads a module by file descriptor if the kernel can decompress the file, and from memory otherwise. LoadPin and IMA check
/// the file that a module comes from, which the kernel knows only from a file descriptor.
fn insert(file: &ModuleFile, parameters: &str) -> Result<(), Errno> {
    let flags = match file.compression {
        Compression::None => Some(0),
        compression => kernel_decompresses(compression).then_some(COMPRESSED_FILE),
    };
    if let Some(flags) = flags {
        match insert_file(&file.path, parameters, flags) {
            // The kernel was built without this decompressor after all.
            Err(Errno::OPNOTSUPP | Errno::INVAL) if flags == COMPRESSED_FILE => {}
            result => return result,
        }
    }
    let bytes = file.read().map_err(|_| Errno::IO)?;
    init_module(&bytes, &CString::new(parameters).map_err(|_| Errno::INVAL)?)
}

fn kernel_decompresses(compression: Compression) -> bool {
    fs::read_to_string("/sys/module/compression").is_ok_and(|name| name.trim() == compression.name())
}

/// Loads a module by file descriptor.
pub(crate) fn insert_file(path: &Path, parameters: &str, flags: i32) -> Result<(), Errno> {
    let parameters = CString::new(parameters).map_err(|_| Errno::INVAL)?;
    let file = File::open(path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    finit_module(file, &parameters, flags)
}

/// Unloads a module; fails if the module is in use or has no exit function.
pub(crate) fn remove(name: &str) -> Result<(), Errno> {
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    // With O_NONBLOCK, try_stop_module() in kernel/module/main.c returns EWOULDBLOCK instead of waiting.
    delete_module(&name, OFlags::NONBLOCK.bits().cast_signed())
}
