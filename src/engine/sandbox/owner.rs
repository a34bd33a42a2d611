//! Adapter: ownership of the files that a sandbox reads and writes.

use std::{
    io,
    os::unix::fs::{MetadataExt as _, lchown},
    path::Path,
};

use fs_err as fs;
use rustix::process::{getegid, geteuid};
use walkdir::WalkDir;

/// User ID of sandboxes if farrier is root. It is above the ranges that systemd and container engines assign (systemd's
/// "Users, Groups, UIDs and GIDs").
const USER: u32 = 2_100_000_015;

/// The only user of a sandbox, who is root inside it, and the ownership of the trees that the sandbox starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    user: u32,
    group: u32,
    maps_trees: bool,
}

impl Owner {
    /// Returns the user that runs farrier or, if that is root, a user that owns nothing else. The trees belong to that user.
    pub fn of_this_process() -> Self {
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        if user != 0 {
            return Self { user, group, maps_trees: false };
        }
        let maps = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let user = least_privileged(&maps);
        Self { user, group: user, maps_trees: false }
    }

    /// Returns the same user for trees that belong to root, which idmapped mounts show to the sandbox as its own. `None` if
    /// farrier is not root or no other user is available.
    pub(super) fn with_mapped_trees(self) -> Option<Self> {
        (geteuid().is_root() && self.user != 0).then_some(Self { maps_trees: true, ..self })
    }

    /// Whether idmapped mounts show the trees to the sandbox.
    pub(super) fn maps_trees(self) -> bool {
        self.maps_trees
    }

    /// Whether the user of build steps owns the trees. If so, a step that escaped its sandbox could write to them.
    pub fn owns_cache(self) -> bool {
        !self.maps_trees
    }

    /// Contents of the `setgroups`, `uid_map` and `gid_map` files that map the sandbox's root to this user
    /// (user_namespaces(7)).
    pub(super) fn maps(self) -> [(&'static str, String); 3] {
        let Self { user, group, maps_trees: _ } = self;
        let line = |id| format!("0 {id} 1");
        [("setgroups", "deny".to_owned()), ("uid_map", line(user)), ("gid_map", line(group))]
    }

    /// Changes the owner of a tree that sandboxes start from. Skips a tree that already has the right owner. Blocks.
    pub fn own(self, tree: &Path) -> io::Result<()> {
        let owner = if self.maps_trees { (0, 0) } else { (self.user, self.group) };
        if is_owned(tree, owner)? {
            return Ok(());
        }
        // The top directory comes last: its owner marks the whole tree as done.
        for entry in WalkDir::new(tree).contents_first(true) {
            lchown(entry?.path(), Some(owner.0), Some(owner.1))?;
        }
        Ok(())
    }

    /// Makes the sandbox's user the owner of a directory, so that the sandbox can write there.
    pub(super) fn hand_over(self, directory: &Path) -> io::Result<()> {
        lchown(directory, Some(self.user), Some(self.group))
    }
}

fn is_owned(path: &Path, owner: (u32, u32)) -> io::Result<bool> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.uid(), found.gid()) == owner)
}

/// Chooses the sandbox user for a root user with these maps. In a container, only a few users may be mapped.
fn least_privileged(maps: &str) -> u32 {
    let ranges = maps.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().map(|field| field.parse::<u32>().ok());
        let (first, _, count) = (fields.next()??, fields.next()??, fields.next()??);
        Some((first, first.checked_add(count.checked_sub(1)?)?))
    });
    let ranges: Vec<(u32, u32)> = ranges.collect();
    if ranges.iter().any(|(first, last)| (*first..=*last).contains(&USER)) {
        return USER;
    }
    ranges.iter().map(|(_, last)| *last).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_gives_builds_a_user_that_is_mapped() {
        assert_eq!(least_privileged("         0          0 4294967295\n"), USER);
        assert_eq!(least_privileged("0 100000 65536\n"), 65_535);
        assert_eq!(least_privileged("0 1000 1\n1 100000 65536\n"), 65_536);
        assert_eq!(least_privileged("0 1000 1\n"), 0);
    }

    #[test]
    fn only_mapped_trees_are_out_of_reach_of_the_user_of_steps() {
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
        owner.own(tree.path()).unwrap();
        for path in ["", "sub", "sub/link"] {
            assert!(is_owned(&tree.path().join(path), (owner.user, owner.group)).unwrap(), "{path}");
        }
        owner.own(tree.path()).unwrap();
        if let Some(mapped) = owner.with_mapped_trees() {
            mapped.own(tree.path()).unwrap();
            assert!(is_owned(&tree.path().join("sub/link"), (0, 0)).unwrap());
        }
    }
}
