//! Adapter: lock files. The system releases a lock even when its holder is killed.

use std::{fs::TryLockError, io, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use fs_err::{self as fs, File};

use crate::files::if_there;

/// Held while an entry is made.
#[derive(Debug)]
pub struct CacheLock {
    _file: File,
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// By one.
    Exclusive,
    /// By any number, while no one holds it exclusively.
    Shared,
}

/// Locks a file, which is made if need be; `None` while another one's lock is in the way. Who holds it alone may remove the
/// file: what is locked here is the one that has the name now.
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
    let own = file.metadata()?;
    let named = if_there(fs::metadata(path))?;
    Ok(named.is_some_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())))
}

/// Waits for a lock. Dropping the future gives up the wait.
pub(super) async fn wait(path: &Path, mode: LockMode) -> io::Result<CacheLock> {
    // Asking again and again instead of waiting in the system: a thread that waits there can be
    // neither cancelled nor abandoned when the program is told to end.
    let mut pause = Duration::from_millis(5);
    loop {
        if let Some(lock) = try_lock(path, mode)? {
            return Ok(lock);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}
