//! Pure: what packages' scripts would do that a compilation needs, done without them.
//!
//! No script of a package runs in a toolchain, so that neither root nor a file system of another architecture's programs is
//! needed. Not needed either, and so not here: `ld.so.cache` (all libraries of a compiler are where the dynamic linker
//! looks by itself), users beyond the base system's, debconf's and systemd's state, compiled Python.

use std::{
    io,
    path::{Path, PathBuf},
};

use fs_err as fs;
use tar::{EntryType, Header};

use crate::archive::links;

/// Directories of the root that lead into `/usr` (`usrmerge`, `base-files`). They are there before the first package, so that
/// `/bin/x` of one package and `/usr/bin/y` of another come to one place.
const MERGED: [&str; 6] = ["bin", "lib", "lib32", "lib64", "libx32", "sbin"];

/// Where a sandbox or an engine mounts something, or every user may write.
const DIRECTORIES: [(&str, u32); 7] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("proc", 0o755),
    ("run", 0o755),
    ("sys", 0o755),
    ("tmp", 0o1777),
    ("var/tmp", 0o1777),
];

/// `update-alternatives`, and the links that `dash` makes: a name, and what it leads to: the first that is there, in the order of
/// Debian's priorities. A name that a package brings itself stays.
const LINKS: [(&str, &[&str]); 13] = [
    ("usr/bin/aclocal", &["usr/bin/aclocal-1.17", "usr/bin/aclocal-1.16"]),
    ("usr/bin/automake", &["usr/bin/automake-1.17", "usr/bin/automake-1.16"]),
    ("usr/bin/awk", &["usr/bin/gawk", "usr/bin/mawk", "usr/bin/original-awk"]),
    ("usr/bin/c++", &["usr/bin/g++", "usr/bin/clang++"]),
    ("usr/bin/c89", &["usr/bin/c89-gcc"]),
    ("usr/bin/c99", &["usr/bin/c99-gcc"]),
    ("usr/bin/cc", &["usr/bin/gcc", "usr/bin/clang"]),
    ("usr/bin/lzma", &["usr/bin/xz"]),
    ("usr/bin/nawk", &["usr/bin/gawk", "usr/bin/mawk", "usr/bin/original-awk"]),
    ("usr/bin/sh", &["usr/bin/dash", "usr/bin/bash"]),
    ("usr/bin/which", &["usr/bin/which.debianutils"]),
    ("usr/bin/yacc", &["usr/bin/bison.yacc", "usr/bin/byacc"]),
    ("usr/lib/cpp", &["usr/bin/cpp"]),
];

/// `base-passwd`: the system's users and groups, from the lists that the package has.
const COPIES: [(&str, &str); 2] = [
    ("etc/group", "usr/share/base-passwd/group.master"),
    ("etc/passwd", "usr/share/base-passwd/passwd.master"),
];

/// What comes before the packages, as a tar.
pub(super) fn before() -> io::Result<Vec<u8>> {
    let mut tar = Entries::new();
    for name in MERGED {
        tar.directory(&format!("usr/{name}"), 0o755)?;
        tar.link(name, &Path::new("usr").join(name))?;
    }
    for (path, mode) in DIRECTORIES {
        tar.directory(path, mode)?;
    }
    tar.finish()
}

/// What comes after the packages in `tree`, as a tar. It only looks at the tree: links in it lead nowhere else.
pub(super) fn after(tree: &Path) -> io::Result<Vec<u8>> {
    let mut tar = Entries::new();
    let there = |path: &str| -> io::Result<Option<PathBuf>> {
        let found = links::resolve(tree, Path::new(path))?.map(|found| tree.join(found));
        Ok(found.filter(|found| found.is_file()))
    };
    for (name, targets) in LINKS {
        if there(name)?.is_some() {
            continue;
        }
        for target in targets {
            if there(target)?.is_some() {
                let directory = Path::new(name).parent().unwrap_or(Path::new(""));
                tar.link(name, &links::relative(directory, Path::new(target)))?;
                break;
            }
        }
    }
    for (path, source) in COPIES {
        if let (None, Some(source)) = (there(path)?, there(source)?) {
            tar.file(path, &fs::read(source)?)?;
        }
    }
    tar.finish()
}

/// Entries for a tree, which are unpacked as a package's are.
pub(super) struct Entries(tar::Builder<Vec<u8>>);

impl Entries {
    pub(super) fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    fn directory(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.0.append_data(&mut header(EntryType::Directory, mode, 0), Path::new(path).join(""), io::empty())
    }

    fn link(&mut self, path: &str, target: &Path) -> io::Result<()> {
        self.0.append_link(&mut header(EntryType::Symlink, 0o777, 0), path, target)
    }

    pub(super) fn file(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.0.append_data(&mut header(EntryType::Regular, 0o644, bytes.len()), path, bytes)
    }

    /// The tar.
    pub(super) fn finish(self) -> io::Result<Vec<u8>> {
        self.0.into_inner()
    }
}

fn header(kind: EntryType, mode: u32, size: usize) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size as u64);
    header
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::archive::{Manner, Options, unpack_stream};

    /// A tree with these files, after all that is done for one.
    fn tree(files: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let options = Options { manner: Manner::Package, ..Options::default() };
        let unpack = |tar: Vec<u8>| unpack_stream(&tar[..], directory.path(), &options).unwrap();
        unpack(before().unwrap());
        let mut package = Entries::new();
        for path in files {
            package.file(path, path.as_bytes()).unwrap();
        }
        unpack(package.finish().unwrap());
        unpack(after(directory.path()).unwrap());
        directory
    }

    fn leads_to(tree: &Path, path: &str) -> Option<String> {
        fs::read_to_string(tree.join(path)).ok()
    }

    #[test]
    fn directories_of_the_root_lead_into_usr() {
        let tree = tree(&["bin/a", "usr/bin/b", "lib64/ld-linux-x86-64.so.2", "sbin/c", "lib/x/y"]);
        for name in MERGED {
            assert_eq!(fs::read_link(tree.path().join(name)).unwrap(), Path::new("usr").join(name));
            assert!(tree.path().join("usr").join(name).is_dir());
        }
        for path in ["usr/bin/a", "usr/bin/b", "usr/lib64/ld-linux-x86-64.so.2", "usr/sbin/c", "usr/lib/x/y"]
        {
            assert!(tree.path().join(path).is_file(), "{path}");
        }
    }

    #[test]
    fn places_to_mount_and_to_write() {
        let tree = tree(&[]);
        for (path, wanted) in DIRECTORIES {
            let mode = fs::metadata(tree.path().join(path)).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, wanted, "{path}");
        }
    }

    #[test]
    fn a_name_leads_to_the_best_that_is_there() {
        for (name, targets) in LINKS {
            for from in 0..targets.len() {
                let tree = tree(&targets[from..]);
                assert_eq!(leads_to(tree.path(), name).as_deref(), Some(targets[from]), "{name}");
            }
            // A package's own stays, and without any there is none.
            let own = tree_with_own(name, targets);
            assert_eq!(leads_to(own.path(), name).as_deref(), Some(name));
            assert!(!tree(&[]).path().join(name).is_symlink(), "{name}");
        }
    }

    fn tree_with_own(name: &str, targets: &[&str]) -> tempfile::TempDir {
        tree(&[&[name], targets].concat())
    }

    #[test]
    fn users_and_groups_are_the_base_system_s() {
        let tree = tree(&COPIES.map(|(_, source)| source));
        for (path, source) in COPIES {
            assert_eq!(leads_to(tree.path(), path).as_deref(), Some(source));
        }
    }

    #[test]
    fn links_of_a_package_lead_nowhere_else() {
        let outside = tempfile::tempdir().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let options = Options { manner: Manner::Package, ..Options::default() };
        let mut package = Entries::new();
        package.link("etc", outside.path()).unwrap();
        package.file("usr/share/base-passwd/passwd.master", b"x").unwrap();
        unpack_stream(&package.finish().unwrap()[..], directory.path(), &options).unwrap();
        unpack_stream(&after(directory.path()).unwrap()[..], directory.path(), &options).unwrap();
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}
