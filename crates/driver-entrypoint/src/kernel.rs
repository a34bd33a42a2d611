//! The kernel's calls that change something, behind one trait; and the adapter that makes them. What the kernel
//! tells in `/proc` and `/sys` is read below [`Paths`](crate::node::Paths), so that tests give it as files.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    path::Path,
    thread,
    time::Duration,
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, chmod, makedev, mknodat},
    io::Errno,
    mount::{MountPropagationFlags, UnmountFlags, mount_bind_recursive, mount_change, unmount},
    system::{delete_module, finit_module, init_module, uname},
};

use crate::{
    error::LoadRefusal,
    kmsg::KernelLog,
    module_file::{Compression, ModuleFile},
};

/// `MODULE_INIT_COMPRESSED_FILE` (`include/uapi/linux/module.h`, from Linux 5.17 on).
const COMPRESSED_FILE: i32 = 4;

/// Lines of the kernel's log that an error shows at most.
const MAX_MESSAGES: usize = 8;

/// What this program asks of the kernel. All of it can be undone or done again.
pub(crate) trait Kernel {
    /// `uname -r`.
    fn release(&self) -> String;
    /// Loads a module's file.
    fn load(&self, file: &ModuleFile, parameters: &str) -> Result<(), LoadRefusal>;
    /// Unloads a module; one that is in use is left alone (`EAGAIN`).
    fn unload(&self, name: &str) -> Result<(), Errno>;
    /// `mount --rbind`.
    fn bind(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// `umount --lazy`, with everything mounted below.
    fn unmount(&self, place: &Path) -> io::Result<()>;
    /// `mount --make-rprivate` and the like.
    fn propagation(&self, place: &Path, flags: MountPropagationFlags) -> io::Result<()>;
    /// Makes the file of a character device with this major number, for everybody to use.
    fn make_device(&self, path: &Path, major: u32) -> io::Result<()>;
    /// Waits: for devices to come up, for a reference to be given back.
    fn pause(&self, time: Duration);
}

/// The running kernel.
pub(crate) struct Linux;

impl Kernel for Linux {
    fn release(&self) -> String {
        uname().release().to_string_lossy().into_owned()
    }

    fn load(&self, file: &ModuleFile, parameters: &str) -> Result<(), LoadRefusal> {
        let mut log = KernelLog::open().ok();
        let loaded = insert(file, parameters);
        loaded.map_err(|errno| {
            let mut messages = log.as_mut().map(KernelLog::read).unwrap_or_default();
            let last = messages.split_off(messages.len().saturating_sub(MAX_MESSAGES));
            LoadRefusal { errno, messages: last }
        })
    }

    fn unload(&self, name: &str) -> Result<(), Errno> {
        remove(name)
    }

    fn bind(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(mount_bind_recursive(from, to)?)
    }

    fn unmount(&self, place: &Path) -> io::Result<()> {
        Ok(unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
    }

    fn propagation(&self, place: &Path, flags: MountPropagationFlags) -> io::Result<()> {
        Ok(mount_change(place, flags)?)
    }

    fn make_device(&self, path: &Path, major: u32) -> io::Result<()> {
        let everybody = Mode::from_raw_mode(0o666);
        mknodat(CWD, path, FileType::CharacterDevice, everybody, makedev(major, 0))?;
        // The process's umask has taken some of it away.
        Ok(chmod(path, everybody)?)
    }

    fn pause(&self, time: Duration) {
        thread::sleep(time);
    }
}

/// By its file where the kernel reads that form: it alone can then tell where the module is from, as some kernels
/// want to know (LoadPin, IMA).
fn insert(file: &ModuleFile, parameters: &str) -> Result<(), Errno> {
    let flags = match file.compression {
        Compression::None => Some(0),
        compression => kernel_decompresses(compression).then_some(COMPRESSED_FILE),
    };
    if let Some(flags) = flags {
        match insert_file(&file.path, parameters, flags) {
            // Built without the decompressor after all.
            Err(Errno::OPNOTSUPP | Errno::INVAL) if flags == COMPRESSED_FILE => {}
            answer => return answer,
        }
    }
    let bytes = file.read().map_err(|_| Errno::IO)?;
    init_module(&bytes, &CString::new(parameters).map_err(|_| Errno::INVAL)?)
}

fn kernel_decompresses(compression: Compression) -> bool {
    fs::read_to_string("/sys/module/compression").is_ok_and(|name| name.trim() == compression.name())
}

/// Loads a module by its file.
pub(crate) fn insert_file(path: &Path, parameters: &str, flags: i32) -> Result<(), Errno> {
    let parameters = CString::new(parameters).map_err(|_| Errno::INVAL)?;
    let file = File::open(path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    finit_module(file, &parameters, flags)
}

/// Unloads a module; one that is in use, or that has no exit function, is left alone.
pub(crate) fn remove(name: &str) -> Result<(), Errno> {
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    // What the flag means is in kernel/module/main.c: try_stop_module() does not wait, and says EWOULDBLOCK.
    delete_module(&name, OFlags::NONBLOCK.bits().cast_signed())
}
