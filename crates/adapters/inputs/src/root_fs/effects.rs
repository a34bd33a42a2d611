//! Reproduces the effects of package scripts that a compilation needs, without running the scripts.
//!
//! A toolchain runs no package scripts, so it needs neither root nor the ability to run another architecture's programs. Effects
//! that a compilation does not need are omitted: `ld.so.cache` (the dynamic linker finds all of a compiler's libraries without
//! it), users beyond the base system's, debconf's and systemd's state, and compiled Python.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
};

use farrier_core::kernel::Architecture;
use farrier_local::archive::links;
use fs_err as fs;
use tar::{EntryType, Header};

/// Top-level directories that are links into `/usr` (`usrmerge`, `base-files`, RPM's `filesystem`). They exist before the first
/// package, so that `/bin/x` of one package and `/usr/bin/y` of another end up in the same directory.
const MERGED: [&str; 6] = ["bin", "lib", "lib32", "lib64", "libx32", "sbin"];

/// Mount points of a sandbox or an engine, and directories that every user may write.
const DIRECTORIES: [(&str, u32); 7] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("proc", 0o755),
    ("run", 0o755),
    ("sys", 0o755),
    ("tmp", 0o1777),
    ("var/tmp", 0o1777),
];

/// Links made by `update-alternatives` and by `dash`: a name and its possible targets, in the order of Debian's priorities. The
/// first existing target counts. A name that a package contains is not replaced. In RPM distributions, only `ld` is missing from
/// its package.
const LINKS: [(&str, &[&str]); 14] = [
    ("usr/bin/aclocal", &["usr/bin/aclocal-1.17", "usr/bin/aclocal-1.16"]),
    ("usr/bin/automake", &["usr/bin/automake-1.17", "usr/bin/automake-1.16"]),
    ("usr/bin/awk", &["usr/bin/gawk", "usr/bin/mawk", "usr/bin/original-awk"]),
    ("usr/bin/c++", &["usr/bin/g++", "usr/bin/clang++"]),
    ("usr/bin/c89", &["usr/bin/c89-gcc"]),
    ("usr/bin/c99", &["usr/bin/c99-gcc"]),
    ("usr/bin/cc", &["usr/bin/gcc", "usr/bin/clang"]),
    ("usr/bin/ld", &["usr/bin/ld.bfd"]),
    ("usr/bin/lzma", &["usr/bin/xz"]),
    ("usr/bin/nawk", &["usr/bin/gawk", "usr/bin/mawk", "usr/bin/original-awk"]),
    ("usr/bin/sh", &["usr/bin/dash", "usr/bin/bash"]),
    ("usr/bin/which", &["usr/bin/which.debianutils"]),
    ("usr/bin/yacc", &["usr/bin/bison.yacc", "usr/bin/byacc"]),
    ("usr/lib/cpp", &["usr/bin/cpp"]),
];

/// Effect of `base-passwd`: the system's users and groups, copied from the lists in that package.
const COPIES: [(&str, &str); 2] = [
    ("etc/group", "usr/share/base-passwd/group.master"),
    ("etc/passwd", "usr/share/base-passwd/passwd.master"),
];

/// Users and groups if no package has a list (on SUSE, a script creates them).
const USERS: [(&str, &str); 2] =
    [("etc/group", "root:x:0:\n"), ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")];

/// Directory of RHEL's later compilers, each in a separate directory that `scl enable` adds to `PATH` and `LD_LIBRARY_PATH`.
/// Links from standard directories have the same effect.
const TOOLSETS: &str = "opt/rh";
const TOOLSET_LINKS: [(&str, &str); 2] = [("root/usr/bin", "usr/local/bin"), ("root/usr/lib64", "usr/lib64")];

/// Returns a tar of the entries that precede the packages.
pub(super) fn base_entries() -> io::Result<Vec<u8>> {
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

/// Returns a tar of the entries that follow the packages in `tree`, for this architecture. Only reads the tree, and never follows
/// links out of it.
pub(super) fn effect_entries(tree: &Path, arch: Architecture) -> io::Result<Vec<u8>> {
    let mut tar = Entries::new();
    let existing_file = |path: &str| -> io::Result<Option<PathBuf>> {
        let path = links::resolve(tree, Path::new(path))?.map(|path| tree.join(path));
        Ok(path.filter(|path| path.is_file()))
    };
    for (name, targets) in LINKS {
        if existing_file(name)?.is_some() {
            continue;
        }
        for target in targets {
            if existing_file(target)?.is_some() {
                let directory = Path::new(name).parent().unwrap_or(Path::new(""));
                tar.link(name, &links::relative(directory, Path::new(target)))?;
                break;
            }
        }
    }
    for (name, tool) in cross_tools(tree, arch)? {
        if existing_file(&name)?.is_none() {
            tar.link(&name, Path::new(&tool))?;
        }
    }
    for ((path, source), (_, users)) in COPIES.into_iter().zip(USERS) {
        match (existing_file(path)?, existing_file(source)?) {
            (None, Some(source)) => tar.file(path, &fs::read(source)?)?,
            (None, None) => tar.file(path, users.as_bytes())?,
            (Some(_), _) => {}
        }
    }
    link_newest_toolset(tree, &mut tar)?;
    tar.finish()
}

/// Returns links from plain tool names to the tools of a cross compiler, because makefiles and templates call the plain names. Each
/// pair is a path in `usr/bin` and the tool's name in the same directory.
fn cross_tools(tree: &Path, arch: Architecture) -> io::Result<Vec<(String, String)>> {
    let others = [Architecture::Amd64, Architecture::Arm64].into_iter().filter(|other| *other != arch);
    let prefixes: Vec<String> = others.map(|other| format!("{}-linux-gnu-", other.gnu_name())).collect();
    let plain_name =
        |tool: &String| prefixes.iter().find_map(|prefix| tool.strip_prefix(prefix)).map(str::to_owned);
    let tools = names_in(tree, "usr/bin")?.into_iter();
    Ok(tools.filter_map(|tool| Some((format!("usr/bin/{}", plain_name(&tool)?), tool))).collect())
}

/// Adds the links to the newest toolset. Libraries of the system itself are not replaced.
fn link_newest_toolset(tree: &Path, tar: &mut Entries) -> io::Result<()> {
    let number = |name: &String| name.strip_prefix("gcc-toolset-")?.parse::<u32>().ok();
    let names = names_in(tree, TOOLSETS)?.into_iter().filter(|name| number(name).is_some());
    let Some(newest) = names.max_by_key(number) else { return Ok(()) };
    for (from, to) in TOOLSET_LINKS {
        let (from, existing) = (format!("{TOOLSETS}/{newest}/{from}"), names_in(tree, to)?);
        for name in names_in(tree, &from)? {
            if !existing.contains(&name) && (to == "usr/local/bin" || name.contains(".so.")) {
                let target = links::relative(Path::new(to), &Path::new(&from).join(&name));
                tar.link(&format!("{to}/{name}"), &target)?;
            }
        }
    }
    Ok(())
}

/// Returns the names in a directory of the tree, sorted; empty if there is no such directory.
fn names_in(tree: &Path, directory: &str) -> io::Result<BTreeSet<String>> {
    let Some(resolved) = links::resolve(tree, Path::new(directory))? else { return Ok(BTreeSet::new()) };
    fs::read_dir(tree.join(resolved))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Builds a tar that is unpacked like a package.
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

    /// Returns the tar.
    pub(super) fn finish(self) -> io::Result<Vec<u8>> {
        self.0.into_inner()
    }
}

pub(super) fn header(kind: EntryType, mode: u32, size: usize) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size as u64);
    header
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use farrier_local::archive::{Options, UnpackMode, unpack_stream};

    use super::*;

    /// Makes a tree with these files and all effects.
    fn tree(files: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let options = Options { mode: UnpackMode::Package, ..Options::default() };
        let unpack = |tar: Vec<u8>| unpack_stream(&tar[..], directory.path(), &options).unwrap();
        unpack(base_entries().unwrap());
        let mut package = Entries::new();
        for path in files {
            package.file(path, path.as_bytes()).unwrap();
        }
        unpack(package.finish().unwrap());
        unpack(effect_entries(directory.path(), Architecture::Amd64).unwrap());
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
            // A name in a package stays, and without any target there is no link.
            let own = tree_with_own(name, targets);
            assert_eq!(leads_to(own.path(), name).as_deref(), Some(name));
            assert!(!tree(&[]).path().join(name).is_symlink(), "{name}");
        }
    }

    fn tree_with_own(name: &str, targets: &[&str]) -> tempfile::TempDir {
        tree(&[&[name], targets].concat())
    }

    #[test]
    fn a_cross_compiler_alone_has_the_plain_names() {
        let tree = tree(&[
            "usr/bin/aarch64-linux-gnu-gcc-12",
            "usr/bin/aarch64-linux-gnu-nm",
            "usr/bin/nm",
            "usr/bin/x86_64-linux-gnu-ld",
        ]);
        assert_eq!(
            leads_to(tree.path(), "usr/bin/gcc-12").as_deref(),
            Some("usr/bin/aarch64-linux-gnu-gcc-12")
        );
        assert_eq!(
            leads_to(tree.path(), "usr/bin/nm").as_deref(),
            Some("usr/bin/nm"),
            "a package's own stays"
        );
        assert!(
            !tree.path().join("usr/bin/ld").is_symlink(),
            "this architecture's tools have separate names"
        );
    }

    #[test]
    fn users_and_groups_are_the_base_system_s() {
        let with_lists = tree(&COPIES.map(|(_, source)| source));
        for (path, source) in COPIES {
            assert_eq!(leads_to(with_lists.path(), path).as_deref(), Some(source));
        }
        let without = tree(&["etc/group"]);
        assert_eq!(leads_to(without.path(), "etc/group").unwrap(), "etc/group");
        assert_eq!(leads_to(without.path(), "etc/passwd").unwrap(), "root:x:0:0:root:/root:/bin/sh\n");
    }

    #[test]
    fn the_newest_toolset_is_what_is_found_first() {
        let of = |number: &str, file: &str| format!("opt/rh/gcc-toolset-{number}/root/usr/{file}");
        let files = [
            of("9", "bin/gcc"),
            of("13", "bin/gcc"),
            of("13", "lib64/libbfd-2.40.so.1"),
            of("13", "lib64/libc.so.6"),
            of("13", "lib64/x.o"),
            "usr/bin/gcc".to_owned(),
            "usr/lib64/libc.so.6".to_owned(),
        ];
        let tree = tree(&files.each_ref().map(String::as_str));
        for (path, wanted) in [
            ("usr/local/bin/gcc", Some(&files[1])),
            ("usr/bin/gcc", Some(&files[5])),
            ("usr/lib64/libbfd-2.40.so.1", Some(&files[2])),
            ("usr/lib64/libc.so.6", Some(&files[6])),
            ("usr/lib64/x.o", None),
        ] {
            assert_eq!(leads_to(tree.path(), path).as_ref(), wanted, "{path}");
        }
    }

    /// Fedora's `filesystem` has `/usr/sbin` as a link.
    #[test]
    fn a_link_takes_the_place_of_an_empty_directory_alone() {
        let directory = tempfile::tempdir().unwrap();
        let options = Options { mode: UnpackMode::Package, ..Options::default() };
        unpack_stream(&base_entries().unwrap()[..], directory.path(), &options).unwrap();
        let mut package = Entries::new();
        package.file("usr/lib64/x", b"x").unwrap();
        for (name, target) in [("usr/sbin", "bin"), ("usr/lib64", "lib")] {
            package.link(name, Path::new(target)).unwrap();
        }
        package.file("usr/sbin/y", b"y").unwrap();
        unpack_stream(&package.finish().unwrap()[..], directory.path(), &options).unwrap();
        for path in ["usr/lib64/x", "usr/bin/y", "sbin/y"] {
            assert!(directory.path().join(path).is_file(), "{path}");
        }
        assert!(!directory.path().join("usr/lib64").is_symlink());
    }

    #[test]
    fn links_of_a_package_lead_nowhere_else() {
        let outside = tempfile::tempdir().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let options = Options { mode: UnpackMode::Package, ..Options::default() };
        let mut package = Entries::new();
        package.link("etc", outside.path()).unwrap();
        package.file("usr/share/base-passwd/passwd.master", b"x").unwrap();
        unpack_stream(&package.finish().unwrap()[..], directory.path(), &options).unwrap();
        unpack_stream(
            &effect_entries(directory.path(), Architecture::Amd64).unwrap()[..],
            directory.path(),
            &options,
        )
        .unwrap();
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}
