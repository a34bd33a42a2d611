//! Assembles toolchains from packages that apt or libsolv chose, fetched and verified. Runs none of their scripts and needs no
//! root.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::AtomicBool,
};

use farrier_core::kernel::{AptSuites, Architecture, BootstrapSpec};
use farrier_local::{
    archive::{self, Options, UnpackMode},
    blocking::stoppable,
    tree_removal::remove_tree,
};
use farrier_payload as payload;
use fs_err as fs;

use super::{LEVEL, MTIME, effects, excluded::is_excluded, packages::RpmRoot};
use crate::{
    FetchError, Fetcher, Result, TREE,
    apt::AptArchive,
    package_reader::{RPM_LIST, RPM_LIST_FORMAT},
    root_fs_layer as layer, rpm,
};

/// dpkg's list of installed packages, from which bills of materials are made.
const STATUS: &str = "var/lib/dpkg/status";

/// Path of a package list, and the function that creates the list from packages.
type PackageList = (&'static str, fn(&[PathBuf]) -> Result<String>);

/// Makes the layer of a toolchain from Debian packages in `dir`.
pub(super) async fn assemble(
    fetcher: &Fetcher,
    spec: &BootstrapSpec,
    suites: AptSuites,
    arch: Architecture,
    dir: PathBuf,
) -> Result<()> {
    let archive = AptArchive::open(fetcher, &suites, arch).await?;
    let packages = archive.packages_with_dependencies(&spec.include).await?;
    let files = archive.download(&packages).await?;
    stoppable(move |stop| write_layer(stop, &files, (STATUS, dpkg_status), arch, &dir)).await
}

/// Makes the layer of a toolchain from RPM packages in `dir`; `name` names their source in errors.
pub(super) async fn assemble_rpm(
    fetcher: &Fetcher,
    root: &RpmRoot,
    name: &str,
    arch: Architecture,
    dir: PathBuf,
) -> Result<()> {
    let repositories = open(fetcher, root, name, arch)?;
    let files =
        repositories.download_with_dependencies(&root.packages, &root.streams, &toolchain_of(name)).await?;
    stoppable(move |stop| write_layer(stop, &files, (RPM_LIST, rpm_list), arch, &dir)).await
}

/// Opens the repositories of RPM packages, without contacting them yet.
pub(super) fn open(
    fetcher: &Fetcher,
    root: &RpmRoot,
    name: &str,
    arch: Architecture,
) -> Result<rpm::Repositories> {
    let RpmRoot { packages: _, streams: _, from, version } = root;
    rpm::Repositories::open(fetcher, from, (version, arch), &[])?.map_err(|missing| {
        let message = format!("cannot make {}: there is no {missing}", toolchain_of(name));
        FetchError::unusable(message, rpm::HINT)
    })
}

fn toolchain_of(name: &str) -> String {
    format!("a toolchain of {name}")
}

/// Writes the layer with the files of these packages, the package list, and the effects of package scripts.
fn write_layer(
    stop: &AtomicBool,
    packages: &[PathBuf],
    (list_path, list_of): PackageList,
    arch: Architecture,
    entry: &Path,
) -> Result<()> {
    let tree = entry.join(TREE);
    fs::create_dir(&tree)?;
    let is_selected = |path: &Path| !is_excluded(path);
    let options =
        Options { is_selected: &is_selected, mode: UnpackMode::Package, stop, ..Options::default() };
    let add = |tar: Vec<u8>, what: &str| {
        archive::unpack_stream(&tar[..], &tree, &options)
            .map_err(|source| FetchError::Unpack(what.to_owned(), source))
    };
    add(effects::base_entries()?, "the directories of a root file system")?;
    for package in packages {
        archive::unpack_file(package, &tree, &options)
            .map_err(|source| FetchError::Unpack(package.display().to_string(), source))?;
    }
    let mut packages_list = effects::Entries::new();
    packages_list.file(list_path, list_of(packages)?.as_bytes())?;
    add(packages_list.finish()?, list_path)?;
    add(effects::effect_entries(&tree, arch)?, "the links of a root file system")?;
    let written = payload::write_tree_layer(&tree, MTIME, LEVEL, &entry.join(layer::FILE))?;
    layer::record(entry, &written)?;
    Ok(remove_tree(&tree)?)
}

/// Returns dpkg's list, with one paragraph per package.
fn dpkg_status(packages: &[PathBuf]) -> Result<String> {
    let paragraph = |package: &PathBuf| -> Result<String> {
        let fields = output_of("dpkg-deb", &["--field"], std::slice::from_ref(package))?;
        Ok(format!("{}\nStatus: install ok installed\n\n", fields.trim_end()))
    };
    packages.iter().map(paragraph).collect()
}

fn rpm_list(packages: &[PathBuf]) -> Result<String> {
    output_of("rpm", &["--query", "--package", "--nosignature", "--queryformat", RPM_LIST_FORMAT], packages)
}

/// Returns a program's output about packages, without the user's configuration.
fn output_of(program: &'static str, arguments: &[&str], packages: &[PathBuf]) -> Result<String> {
    let mut command = Command::new(program);
    let output = command.args(arguments).args(packages).env("HOME", "/").output();
    let output = output.map_err(|source| FetchError::Start(program, source))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(FetchError::permanent("read the package metadata", message.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, io::Read as _, os::unix::fs::PermissionsExt as _};

    use oci::LayerReader;

    use super::*;
    use crate::{PackageReader, root_fs_layer::RootFs};

    /// Makes a package with `dpkg-deb`, with a script that would leave a trace.
    fn package(dir: &Path, name: &str, files: &[(&str, u32)]) -> PathBuf {
        let root = dir.join(name);
        let control = format!(
            "Package: {name}\nVersion: 1:2-3\nArchitecture: all\nMaintainer: x <x@x.test>\nDescription: x\n"
        );
        let script = format!("#!/bin/sh\ntouch {}\n", dir.join("ran").display());
        let text = |path: &str| format!("{name} {path}");
        let own = files.iter().map(|(path, mode)| (*path, text(path), *mode));
        let made = [("DEBIAN/control", control, 0o644), ("DEBIAN/postinst", script, 0o755)];
        for (path, text, mode) in made.into_iter().chain(own) {
            let place = root.join(path);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(&place, text).unwrap();
            fs::set_permissions(place, Permissions::from_mode(mode)).unwrap();
        }
        let out = dir.join(format!("{name}.deb"));
        let made = Command::new("dpkg-deb").arg("--build").arg(&root).arg(&out).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        out
    }

    fn written(dir: &Path, entry: &str, packages: &[PathBuf]) -> RootFs {
        let entry = dir.join(entry);
        fs::create_dir(&entry).unwrap();
        write_layer(&AtomicBool::new(false), packages, (STATUS, dpkg_status), Architecture::Amd64, &entry)
            .unwrap();
        assert!(!entry.join(TREE).exists());
        layer::read(&entry).unwrap()
    }

    #[test]
    fn packages_become_one_layer_without_their_scripts() {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path();
        let packages = [
            package(
                dir,
                "aa",
                &[("bin/gcc", 0o755), ("usr/share/man/man1/gcc.1", 0o644), ("lib/a.so", 0o644)],
            ),
            package(
                dir,
                "bb",
                &[("usr/bin/mawk", 0o4755), ("usr/share/doc/bb/copyright", 0o644), ("lib64/b", 0o644)],
            ),
        ];
        let first = written(dir, "1", &packages);
        let bytes = fs::read(&first.file).unwrap();
        assert_eq!(written(dir, "2", &packages).layer, first.layer);
        assert!(!dir.join("ran").exists());

        let mut archive = tar::Archive::new(LayerReader::new(&bytes[..]).unwrap());
        let mut found = std::collections::BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = entry.link_name().unwrap().map(|to| to.display().to_string()).unwrap_or_default();
            entry.read_to_string(&mut text).unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.mtime().unwrap()), (0, MTIME));
            let mode = header.mode().unwrap();
            found.insert(entry.path().unwrap().display().to_string(), (mode, text));
        }
        for (path, mode, text) in [
            ("usr/bin/gcc", 0o755, "aa bin/gcc"),
            ("usr/bin/mawk", 0o755, "bb usr/bin/mawk"),
            ("usr/bin/awk", 0o777, "mawk"),
            ("usr/bin/cc", 0o777, "gcc"),
            ("usr/lib/a.so", 0o644, "aa lib/a.so"),
            ("usr/lib64/b", 0o644, "bb lib64/b"),
            ("bin", 0o777, "usr/bin"),
            ("tmp/", 0o1777, ""),
        ] {
            assert_eq!(found.get(path), Some(&(mode, text.to_owned())), "{path}");
        }
        assert!(found.contains_key("usr/share/doc/bb/copyright"));
        assert!(!found.contains_key("usr/share/man/man1/gcc.1"));
        let mut reader = PackageReader::default();
        reader.read_layer(&bytes[..]).unwrap();
        let packages: Vec<_> = reader.finish().packages.into_iter().map(|p| (p.name, p.version)).collect();
        assert_eq!(packages, [("aa".to_owned(), "1:2-3".to_owned()), ("bb".to_owned(), "1:2-3".to_owned())]);
    }
}
