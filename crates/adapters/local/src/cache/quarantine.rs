//! Moves files and directories away that cannot be removed or must not be reused, so that no later build uses them.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use fs_err::{self as fs, File};

use crate::{files::if_there, tree_removal::remove_tree};

/// Name prefix of trees that must not be reused; kept for a person to inspect.
const CHANGED: &str = "changed-";
/// Name prefix of files and directories that could not be removed.
const STUCK: &str = "stuck-";
/// Retention of trees that must not be reused.
const RETENTION: Duration = Duration::from_hours(7 * 24);

/// The quarantine directory of a cache.
#[derive(Clone, Debug)]
pub struct Quarantine(PathBuf);

impl Quarantine {
    pub(super) fn in_directory(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Removes a file or directory of the cache, if it exists. Moves it to the quarantine, with a warning, if it cannot be
    /// removed. Blocks.
    ///
    /// # Errors
    /// The path can neither be removed nor moved.
    pub fn remove(&self, path: &Path) -> io::Result<()> {
        let Err(error) = if_there(remove_tree(path)) else { return Ok(()) };
        match self.move_here(path, STUCK) {
            Ok(new_path) => {
                tracing::warn!(
                    path = %path.display(),
                    quarantine = %new_path.display(),
                    %error,
                    "cannot remove a cache entry: moved to the quarantine; farrier retries before each \
                     build; remove it by hand if it remains"
                );
                Ok(())
            }
            Err(moving) => {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    %moving,
                    "cannot remove a cache entry or move it to the quarantine; remove it by hand"
                );
                Err(error)
            }
        }
    }

    /// Moves a directory that must not be reused to the quarantine for a week, and returns its new path. Blocks.
    pub(super) fn set_aside(&self, path: &Path) -> io::Result<PathBuf> {
        self.move_here(path, CHANGED)
    }

    fn move_here(&self, path: &Path, kind: &str) -> io::Result<PathBuf> {
        fs::create_dir_all(&self.0)?;
        let name: String = path.file_name().unwrap_or_default().to_string_lossy().chars().take(80).collect();
        let dest = self.0.join(format!("{kind}{}-{:016x}", name.trim_start_matches('.'), fastrand::u64(..)));
        fs::rename(path, &dest)?;
        // Records the start of the retention. The mtime of another user's directory cannot be set, so it expires sooner.
        let _ = File::open(&dest).and_then(|moved| moved.file().set_modified(SystemTime::now()));
        Ok(dest)
    }

    /// Retries all removals, except of directories still within their retention.
    pub(super) fn sweep(&self) -> io::Result<()> {
        let Some(listing) = if_there(fs::read_dir(&self.0))? else { return Ok(()) };
        let (mut left, mut last) = (0_u32, None);
        for entry in listing {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(CHANGED.as_bytes())
                && !super::room::is_older(&entry.path(), RETENTION)
            {
                continue;
            }
            if let Err(error) = if_there(remove_tree(&entry.path())) {
                left += 1;
                last = Some(error);
            }
        }
        if let Some(error) = last {
            tracing::warn!(
                quarantine = %self.0.display(),
                left,
                %error,
                "cannot remove directories in the cache's quarantine; remove them by hand, as root if \
                 necessary"
            );
        }
        Ok(())
    }
}
