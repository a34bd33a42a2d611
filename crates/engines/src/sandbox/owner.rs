//! Ownership of the files that a sandbox reads and writes.

use std::{
    io,
    os::unix::fs::{MetadataExt as _, lchown},
    path::Path,
};

use fs_err as fs;
use rustix::process::{getegid, geteuid};
use walkdir::WalkDir;

/// User ID of sandboxes if farrier is root. The ID is above the ranges that systemd and container engines assign (see
/// "Users, Groups, UIDs and GIDs" in systemd's documentation).
const SANDBOX_UID: u32 = 2_100_000_015;

/// The only user of a sandbox, and thus the owner of the lower trees. Inside the sandbox, this user is root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    user: u32,
    group: u32,
    maps_trees: bool,
}

impl Owner {
    /// Returns the user that runs farrier. If farrier runs as root, returns a dedicated user instead. The trees belong to the
    /// returned user.
    pub(crate) fn of_this_process() -> Self {
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        if user != 0 {
            return Self { user, group, maps_trees: false };
        }
        let uid_map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let user = least_privileged(&uid_map);
        Self { user, group: user, maps_trees: false }
    }

    /// Returns the same user, but with trees that belong to root. Idmapped mounts show such trees to the sandbox as its own.
    /// `None` if farrier is not root or no other user is available.
    pub(super) fn with_mapped_trees(self) -> Option<Self> {
        (geteuid().is_root() && self.user != 0).then_some(Self { maps_trees: true, ..self })
    }

    /// Whether the trees belong to root and are shown to the sandbox through idmapped mounts.
    pub(super) fn maps_trees(self) -> bool {
        self.maps_trees
    }

    /// Whether the trees belong to the user of the build steps. If so, a step that escaped its sandbox could write to them.
    pub fn owns_cache(self) -> bool {
        !self.maps_trees
    }

    /// Names and contents of the `/proc/<pid>/` files that map the sandbox's root to this user (user_namespaces(7)).
    pub(super) fn id_map_files(self) -> [(&'static str, String); 3] {
        let Self { user, group, maps_trees: _ } = self;
        let line = |id| format!("0 {id} 1");
        [("setgroups", "deny".to_owned()), ("uid_map", line(user)), ("gid_map", line(group))]
    }

    /// Changes the owner of a tree that sandboxes start from, unless the tree already has the right owner. Blocks.
    pub fn chown_tree(self, tree: &Path) -> io::Result<()> {
        let owner = if self.maps_trees { (0, 0) } else { (self.user, self.group) };
        if is_owned(tree, owner)? {
            return Ok(());
        }
        // The root of the tree comes last: if it has the right owner, the whole tree has.
        for entry in WalkDir::new(tree).contents_first(true) {
            lchown(entry?.path(), Some(owner.0), Some(owner.1))?;
        }
        Ok(())
    }

    /// Makes the sandbox's user the owner of a directory, so that the sandbox can write there.
    pub(super) fn chown_directory(self, directory: &Path) -> io::Result<()> {
        lchown(directory, Some(self.user), Some(self.group))
    }
}

fn is_owned(path: &Path, owner: (u32, u32)) -> io::Result<bool> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.uid(), metadata.gid()) == owner)
}

/// Chooses the sandbox's user ID from root's `uid_map`: [`SANDBOX_UID`], or the highest mapped ID if a container does not map
/// that one.
fn least_privileged(uid_map: &str) -> u32 {
    let ranges = uid_map.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().map(|field| field.parse::<u32>().ok());
        let (first, _, count) = (fields.next()??, fields.next()??, fields.next()??);
        Some((first, first.checked_add(count.checked_sub(1)?)?))
    });
    let ranges: Vec<(u32, u32)> = ranges.collect();
    if ranges.iter().any(|(first, last)| (*first..=*last).contains(&SANDBOX_UID)) {
        return SANDBOX_UID;
    }
    ranges.iter().map(|(_, last)| *last).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_gets_a_mapped_sandbox_user() {
        assert_eq!(least_privileged("         0          0 4294967295\n"), SANDBOX_UID);
        assert_eq!(least_privileged("0 100000 65536\n"), 65_535);
        assert_eq!(least_privileged("0 1000 1\n1 100000 65536\n"), 65_536);
        assert_eq!(least_privileged("0 1000 1\n"), 0);
    }

    #[test]
    fn build_steps_own_the_cache_unless_trees_are_mapped() {
        let owner = Owner::of_this_process();
        assert!(owner.owns_cache());
        if let Some(mapped) = owner.with_mapped_trees() {
            assert!(!mapped.owns_cache());
        }
    }

    #[test]
    fn a_tree_is_owned_as_a_whole() {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir(tree.path().join("sub")).unwrap();
        fs_err::os::unix::fs::symlink("/nowhere", tree.path().join("sub/link")).unwrap();
        let owner = Owner::of_this_process();
        owner.chown_tree(tree.path()).unwrap();
        for path in ["", "sub", "sub/link"] {
            assert!(is_owned(&tree.path().join(path), (owner.user, owner.group)).unwrap(), "{path}");
        }
        owner.chown_tree(tree.path()).unwrap();
        if let Some(mapped) = owner.with_mapped_trees() {
            mapped.chown_tree(tree.path()).unwrap();
            assert!(is_owned(&tree.path().join("sub/link"), (0, 0)).unwrap());
        }
    }
}
