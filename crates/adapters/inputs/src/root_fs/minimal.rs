//! The minimal base, one layer with the static busybox from its package.

use std::{
    collections::BTreeMap,
    io::BufWriter,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{facts::annotations, image::MinimalSpec, kernel::Architecture};
use farrier_local::{blocking::stoppable, machine::native, tree_removal::remove_tree};
use farrier_store::InputKind;
use fs_err::{self as fs, File};
use oci::{EntryKind, LayerWriter};

use super::RootFileSystems;
use crate::{
    FetchError, Result, StoredUnder,
    apt::package::{self, Package},
    digest, minimal_tag,
    root_fs_layer::{self as layer, RootFs},
    unpack,
};

/// Format version; change it when the same package gives another base.
const FORMAT: &str = "minimal-1";
/// Kind of the cache entries. The older kind "minimal" used the same keys for bases from a registry.
pub(super) const KIND: &str = "minimal-root";
const MTIME: u64 = 0;

/// Locations of the binary in the packages of Debian 12 and 13.
const BUSYBOX: [&str; 2] = ["bin/busybox", "usr/bin/busybox"];

/// Tools for probes, interactive shells and small scripts; no network clients.
const TOOLS: &str = "[ ash awk base64 basename cat chmod chown chroot cmp cp cut date dd depmod df diff dirname dmesg du \
    echo egrep env expr false fgrep find free getopt grep gunzip gzip head hexdump hostname id insmod \
    kill less ln ls lsmod md5sum mkdir mknod mktemp modinfo modprobe more mount mv nproc nsenter od \
    pidof printf ps pwd readlink realpath rm rmdir rmmod sed seq sh sha256sum sleep sort stat sync \
    sysctl tail tar tee test timeout top touch tr true umount uname uniq wc";

/// Mount points of the kernel's file systems, and directories that payloads and operators' mounts require.
const DIRECTORIES: &str = "bin dev etc etc/modprobe.d host lib lib/firmware lib/modules mnt proc root run sys tmp usr \
    usr/bin usr/src var var/log var/tmp";

/// Small files for programs that look up a user or the system's name.
const FILES: [(&str, &str); 3] = [
    ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    (
        "etc/os-release",
        "ID=farrier-minimal\nNAME=\"farrier minimal base\"\nPRETTY_NAME=\"farrier minimal base\"\n",
    ),
    ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
];

enum Entry {
    Directory(u32),
    File(Vec<u8>, u32),
    Link(&'static str),
}

impl RootFileSystems<'_> {
    /// Returns the current identity of the base, for input hashes. The identity is computed from the package for this machine's
    /// architecture, which has the same version on other architectures.
    pub async fn minimal_identity(self, spec: &MinimalSpec) -> Result<String> {
        self.minimal_key(spec, native()).await
    }

    /// Returns a hash of everything that determines the content of an architecture's base: 64 hexadecimal digits. If the archive
    /// is unreachable, the last known package counts, because a base does not become invalid.
    pub async fn minimal_key(self, spec: &MinimalSpec, arch: Architecture) -> Result<String> {
        if let Some(key) = self.annotation(spec, arch, annotations::IDENTITY).await? {
            return Ok(key);
        }
        let package = self.busybox(spec, arch).await?;
        let Package { name, version, sha256, .. } = &package;
        Ok(digest::of_parts([FORMAT, arch.as_str(), name, version, sha256]))
    }

    /// Returns the package of an architecture's base, as `name=version sha256:...`.
    pub async fn minimal_package(self, spec: &MinimalSpec, arch: Architecture) -> Result<String> {
        match self.annotation(spec, arch, annotations::PACKAGES).await? {
            Some(package) => Ok(package),
            None => Ok(self.busybox(spec, arch).await?.identity()),
        }
    }

    /// Returns the base, making it if needed.
    pub async fn minimal(self, spec: &MinimalSpec, arch: Architecture) -> Result<RootFs> {
        let key = self.minimal_key(spec, arch).await?;
        let make = |dir: PathBuf| async move {
            let package = self.busybox(spec, arch).await?;
            let file = package::file(self.0, &spec.source(), &package, arch).await?;
            stoppable(move |stop| write(stop, &file, &dir)).await
        };
        layer::read(&self.0.obtain_root_fs(KIND, &key, make).await?)
    }

    /// Puts the base into the store, unless the store already has it.
    pub async fn keep_minimal(self, spec: &MinimalSpec, arch: Architecture) -> Result<StoredUnder> {
        let key = self.minimal_key(spec, arch).await?;
        let what = format!("minimal base of {} ({arch})", spec.package);
        let root_fs =
            async { Ok((self.minimal(spec, arch).await?, self.minimal_package(spec, arch).await?)) };
        Box::pin(self.keep(what, &key, arch, Some(minimal_tag(spec, arch)?), root_fs)).await
    }

    /// Returns an annotation of the stored base if the package is not looked up upstream.
    async fn annotation(self, spec: &MinimalSpec, arch: Architecture, key: &str) -> Result<Option<String>> {
        if !package::needs_store_lookup(self.0, &spec.source(), arch)? {
            return Ok(None);
        }
        let stored = self.0.stored_package(InputKind::RootFs, &minimal_tag(spec, arch)?).await?;
        let Some(stored) = stored else { return Ok(None) };
        // Another signed root file system may have been stored under the tag.
        if !stored.annotation(annotations::PACKAGES)?.starts_with(&format!("{}=", spec.package)) {
            return Err(stored.invalid("its annotations name another root file system").into());
        }
        Ok(Some(stored.annotation(key)?.to_owned()))
    }

    async fn busybox(self, spec: &MinimalSpec, arch: Architecture) -> Result<Package> {
        let source = spec.source();
        match package::find(self.0, &source, arch).await {
            Err(error) if error.is_transient() => {
                let known = package::known(self.0, &source, arch)?;
                if known.is_some() {
                    tracing::warn!(package = %source.package, %error, "cannot reach the package archive, using its last known state");
                }
                known.ok_or(error)
            }
            outcome => outcome,
        }
    }
}

/// Makes the layer in `dir` from the package's file.
fn write(stop: &AtomicBool, package: &Path, dir: &Path) -> Result<()> {
    let raw = dir.join("raw");
    fs::create_dir(&raw)?;
    unpack(stop, package, &raw, &package.display().to_string())?;
    let is_file = |path: &Path| fs::symlink_metadata(raw.join(path)).is_ok_and(|metadata| metadata.is_file());
    let busybox = BUSYBOX.iter().find(|path| is_file(Path::new(path))).ok_or_else(|| {
        FetchError::Layout(format!("bin/busybox in {}: the package has none", package.display()))
    })?;
    let mut entries: BTreeMap<PathBuf, Entry> = BTreeMap::new();
    let mode = |path| match path {
        "root" => 0o700,
        "tmp" | "var/tmp" => 0o1777,
        _ => 0o755,
    };
    let directories = DIRECTORIES.split_whitespace();
    entries.extend(directories.map(|path| (path.into(), Entry::Directory(mode(path)))));
    entries.extend(FILES.map(|(path, text)| (path.into(), Entry::File(text.into(), 0o644))));
    let tools = TOOLS.split_whitespace();
    entries.extend(tools.map(|tool| (Path::new("bin").join(tool), Entry::Link("busybox"))));
    entries.insert("bin/busybox".into(), Entry::File(fs::read(raw.join(busybox))?, 0o755));
    // The license requires that its text accompanies the program.
    let copyright = Path::new("usr/share/doc/busybox-static/copyright");
    if is_file(copyright) {
        for parent in copyright.ancestors().skip(1).filter(|path| path.components().count() > 1) {
            entries.insert(parent.to_owned(), Entry::Directory(0o755));
        }
        entries.insert(copyright.to_owned(), Entry::File(fs::read(raw.join(copyright))?, 0o644));
    }
    let mut writer = LayerWriter::new(BufWriter::new(File::create(dir.join(layer::FILE))?), MTIME);
    for (path, entry) in &entries {
        match entry {
            Entry::Directory(mode) => writer.entry(path, *mode, EntryKind::Directory),
            Entry::Link(target) => writer.entry(path, 0o777, EntryKind::Symlink(Path::new(target))),
            Entry::File(bytes, mode) => {
                let mut content = bytes.as_slice();
                let kind = EntryKind::File { size: content.len() as u64, content: &mut content };
                writer.entry(path, *mode, kind)
            }
        }?;
    }
    let (layer, _) = writer.finish()?;
    layer::record(dir, &layer)?;
    Ok(remove_tree(&raw)?)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        io::{Read as _, Write as _},
        process::Command,
    };

    use oci::LayerReader;

    use super::*;

    /// Makes a package with `dpkg-deb`.
    fn package(dir: &Path, path: &str) -> PathBuf {
        let root = dir.join("package");
        for (file, text) in [
            (path, "#!/bin/true\n"),
            ("usr/share/doc/busybox-static/copyright", "GPL-2\n"),
            (
                "DEBIAN/control",
                "Package: busybox-static\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x.test>\nDescription: x\n",
            ),
        ] {
            let place = root.join(file);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            File::create(place).unwrap().write_all(text.as_bytes()).unwrap();
        }
        let out = dir.join("busybox.deb");
        let made = Command::new("dpkg-deb").arg("--build").arg(&root).arg(&out).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        out
    }

    fn made(path: &str) -> Result<(RootFs, tempfile::TempDir), FetchError> {
        let dir = tempfile::tempdir().unwrap();
        let package = package(dir.path(), path);
        let out = dir.path().join("out");
        fs::create_dir(&out).unwrap();
        write(&AtomicBool::new(false), &package, &out)?;
        assert!(!out.join("raw").exists());
        Ok((layer::read(&out)?, dir))
    }

    #[test]
    fn the_base_has_its_tools_and_the_same_bytes_each_time() {
        let (root_fs, _dir) = made("bin/busybox").unwrap();
        assert_eq!(made("bin/busybox").unwrap().0.layer, root_fs.layer);
        // The location in the package makes no difference.
        assert_eq!(made("usr/bin/busybox").unwrap().0.layer, root_fs.layer);
        let bytes = fs::read(&root_fs.file).unwrap();
        assert_eq!(root_fs.layer.digest, farrier_core::image::Digest::of(&bytes));
        let mut archive = tar::Archive::new(LayerReader::new(&bytes[..]).unwrap());
        let mut found = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = entry.link_name().unwrap().map(|to| to.display().to_string()).unwrap_or_default();
            entry.read_to_string(&mut text).unwrap();
            let mode = entry.header().mode().unwrap();
            found.insert(entry.path().unwrap().display().to_string(), (mode, text));
        }
        for tool in ["sh", "ls", "lsmod", "grep", "cat", "ps", "dmesg", "mount"] {
            assert_eq!(found[&format!("bin/{tool}")], (0o777, "busybox".to_owned()));
        }
        assert_eq!(found["bin/busybox"], (0o755, "#!/bin/true\n".to_owned()));
        assert_eq!(found["tmp/"].0, 0o1777);
        assert_eq!(found["usr/share/doc/busybox-static/copyright"], (0o644, "GPL-2\n".to_owned()));
        assert!(found["etc/passwd"].1.starts_with("root:x:0:0:"));
        assert!(found.contains_key("var/log/") && found.contains_key("lib/modules/"));
    }

    #[test]
    fn a_package_without_busybox_is_told() {
        let error = made("bin/toybox").unwrap_err().to_string();
        assert!(
            error.starts_with("cannot find bin/busybox in ") && error.ends_with("the package has none"),
            "{error}"
        );
    }

    #[test]
    fn tools_are_named_once() {
        let tools = || TOOLS.split_whitespace();
        assert_eq!(tools().collect::<BTreeSet<_>>().len(), tools().count());
    }
}
