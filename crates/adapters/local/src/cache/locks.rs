//! Lock files of the cache. The kernel releases a lock even when its holder is killed.

use std::{fs::TryLockError, io, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use fs_err::{self as fs, File};

use crate::files::if_there;

/// A held lock, released on drop.
#[derive(Debug)]
pub struct CacheLock {
    _file: File,
}

/// Mode in which a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// By one holder.
    Exclusive,
    /// By any number of holders, while there is no exclusive one.
    Shared,
}

/// Tries to lock a file, creating it if needed; returns `None` while a conflicting lock is held. An exclusive holder may remove
/// the file: if the locked file no longer has this name, the function locks a new file.
pub(super) fn try_lock(path: &Path, mode: LockMode) -> io::Result<Option<CacheLock>> {
    loop {
        let file = File::options().create(true).truncate(false).write(true).open(path)?;
        let locked = match mode {
            LockMode::Exclusive => file.try_lock(),
            LockMode::Shared => file.try_lock_shared(),
        };
        match locked {
            Ok(()) if has_name(&file, path)? => return Ok(Some(CacheLock { _file: file })),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

fn has_name(file: &File, path: &Path) -> io::Result<bool> {
    let locked = file.metadata()?;
    let current = if_there(fs::metadata(path))?;
    Ok(current.is_some_and(|current| (current.dev(), current.ino()) == (locked.dev(), locked.ino())))
}

/// Waits for a lock. Dropping the future cancels the wait.
pub(super) async fn wait(path: &Path, mode: LockMode) -> io::Result<CacheLock> {
    // Polls instead of blocking in the kernel: a blocked thread can be neither canceled nor abandoned at shutdown.
    let mut pause = Duration::from_millis(5);
    loop {
        if let Some(lock) = try_lock(path, mode)? {
            return Ok(lock);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}
