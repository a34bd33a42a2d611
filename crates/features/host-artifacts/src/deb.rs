//! Writes Debian packages (deb(5)). The same payload gives the same bytes: all times are 0, all owners root.

use std::path::{Path, PathBuf};

use farrier_payload::Result;
use fs_err as fs;
use oci::{EntryKind, LayerWriter};

use super::{
    entries::{Entries, Entry, with_directories},
    payload::{HostPayload, module_dir},
};

/// Returns the package and its file name. Blocks.
pub(super) fn write(payload: &HostPayload) -> Result<(String, Vec<u8>)> {
    let names = Names::of(payload);
    let data = with_directories(entries(payload));
    let mut size = 0;
    for entry in data.values() {
        size += match entry {
            Entry::Payload(file) => fs::symlink_metadata(file)?.len(),
            Entry::Text(text) => text.len() as u64,
            Entry::Directory => 0,
        };
    }
    let script = |action: &str| Entry::Text(script(payload.release.as_str(), action).into_bytes());
    let control = Entries::from([
        ("control".into(), Entry::Text(control(payload, &names, size.div_ceil(1024)).into_bytes())),
        ("postinst".into(), script("configure")),
        ("postrm".into(), script("remove")),
    ]);
    let file = format!("{}_{}_{}.deb", names.package, names.version, payload.arch);
    Ok((file, package(&control, &data)?))
}

/// Returns the package that depends on the modules for the newest kernel, and its file name. An upper bound for the version of the
/// kernel's meta package keeps newer kernels back. Returns `None` if the meta package or the kernel's version is unknown.
pub(super) fn write_meta(payload: &HostPayload) -> Result<Option<(String, Vec<u8>)>> {
    let HostPayload { name, release, arch, image, debian_version, .. } = payload;
    let Names { package: modules, version, kernel } = Names::of(payload);
    let (Some(kernel_version), Some((numbers, flavor))) = (debian_version, numbers_and_flavor(&kernel))
    else {
        return Ok(None);
    };
    let (meta, meta_version) = (format!("{name}-modules-{flavor}"), format!("{numbers}+{version}"));
    let control = format!(
        "Package: {meta}\n\
         Version: {meta_version}\n\
         Architecture: {arch}\n\
         Maintainer: farrier\n\
         Depends: {modules} (= {version}), linux-image-{flavor} (<= {kernel_version})\n\
         Section: kernel\n\
         Priority: optional\n\
         Description: modules of {name} for the newest Linux of linux-image-{flavor}\n \
         Keeps linux-image-{flavor} back until there are modules for the kernel that it brings.\n \
         This version needs the modules for Linux {release} of the driver image {image}.\n"
    );
    let control = Entries::from([("control".into(), Entry::Text(control.into_bytes()))]);
    Ok(Some((format!("{meta}_{meta_version}_{arch}.deb"), package(&control, &Entries::new())?)))
}

/// Splits a kernel release at its flavor, as in `linux-image-<flavor>`: `6.1.0-56-cloud-amd64` has the numbers `6.1.0.56`.
fn numbers_and_flavor(release: &str) -> Option<(String, String)> {
    let parts: Vec<&str> = release.split('-').collect();
    let flavor = parts.iter().position(|part| !part.starts_with(|c: char| c.is_ascii_digit()))?;
    let (numbers, flavor) = parts.split_at_checked(flavor)?;
    (!numbers.is_empty()).then(|| (numbers.join("."), flavor.join("-")))
}

/// Returns a package of these entries.
fn package(control: &Entries, data: &Entries) -> Result<Vec<u8>> {
    let (control, data) = (archive(control)?, archive(data)?);
    Ok(ar(&[("debian-binary", b"2.0\n"), ("control.tar.gz", &control), ("data.tar.gz", &data)]))
}

/// Names in the forms that Debian's policy permits (5.6.1 and 5.6.12).
pub(super) struct Names {
    pub(super) package: String,
    pub(super) version: String,
    /// The kernel release in names of packages.
    kernel: String,
}

impl Names {
    pub(super) fn of(payload: &HostPayload) -> Self {
        let allowed = |c: char| if c.is_ascii_alphanumeric() || "+.".contains(c) { c } else { '-' };
        let kernel: String = payload.release.as_str().to_ascii_lowercase().chars().map(allowed).collect();
        let package = format!("{}-modules-{kernel}", payload.name);
        Self { package, version: version(&payload.version), kernel }
    }
}

/// Returns a driver's version as a Debian version, which starts with a digit.
fn version(driver: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "+.~-".contains(c) { c } else { '.' };
    let version: String = driver.chars().map(allowed).collect();
    // After the last hyphen comes the revision, which is not empty.
    let version = version.trim_end_matches('-');
    if version.starts_with(|c: char| c.is_ascii_digit()) {
        version.to_owned()
    } else {
        format!("0.{version}")
    }
}

fn control(payload: &HostPayload, names: &Names, kibibytes: u64) -> String {
    let HostPayload { name, release, arch, image, .. } = payload;
    let Names { package, version, kernel } = names;
    format!(
        "Package: {package}\n\
         Version: {version}\n\
         Architecture: {arch}\n\
         Maintainer: farrier\n\
         Installed-Size: {kibibytes}\n\
         Depends: kmod, linux-image-{kernel} | linux-image-unsigned-{kernel} | linux-image-{kernel}-unsigned\n\
         Provides: {name}-modules (= {version})\n\
         Section: kernel\n\
         Priority: optional\n\
         Description: modules of {name} for Linux {release}\n \
         The same files as in the driver image {image}.\n"
    )
}

/// Returns a script that updates the indexes of modules, and the initramfs. systemd-boot reads a copy of the initramfs, which a hook of
/// `update-initramfs` replaces; dracut has no such hooks. If the kernel is not installed, the
/// script does nothing: after the removal of a kernel, depmod would create new files.
fn script(release: &str, action: &str) -> String {
    format!(
        "#!/bin/sh\n\
         set -e\n\
         if [ \"$1\" = {action} ] && [ -e /lib/modules/{release}/modules.builtin ]; then\n    \
             depmod {release}\n    \
             if [ -e /boot/initrd.img-{release} ] && command -v update-initramfs >/dev/null; then\n        \
                 update-initramfs -u -k {release}\n    \
             elif [ -e /boot/initrd.img-{release} ] && command -v dracut >/dev/null; then\n        \
                 dracut --quiet --force /boot/initrd.img-{release} {release}\n        \
                 if command -v bootctl >/dev/null && bootctl is-installed --quiet; then\n            \
                     kernel-install add {release} /boot/vmlinuz-{release} /boot/initrd.img-{release}\n        \
                 fi\n    \
             fi\n\
         fi\n"
    )
}

/// Returns the files for a host: modules, firmware, depmod's configuration, and the certificate of the modules' signatures.
pub(super) fn entries(payload: &HostPayload) -> Entries {
    let HostPayload { name, release, certificate, .. } = payload;
    let mut entries = payload.entries();
    let overrides = Path::new("lib/depmod.d").join(format!("farrier-{name}-{release}.conf"));
    entries.insert(overrides, Entry::Text(overrides_of(payload).into_bytes()));
    if let Some(certificate) = certificate {
        let dir = Path::new("usr/share/farrier").join(name.as_str()).join(release.as_str());
        entries.insert(dir.join("module-signing.der"), Entry::Text(certificate.der.clone()));
    }
    entries
}

/// Returns depmod's configuration that prefers each module of the payload to other modules of its name below `updates`, such as
/// those of DKMS.
fn overrides_of(payload: &HostPayload) -> String {
    let kernel = Path::new("lib/modules").join(payload.release.as_str());
    let line = |path: &PathBuf| {
        let inner =
            path.strip_prefix(&kernel).ok().filter(|inner| inner.starts_with(module_dir(&payload.name)))?;
        let (stem, _) = inner.file_name()?.to_str()?.split_once(".ko")?;
        Some(format!("override {stem} * {}\n", inner.parent()?.display()))
    };
    payload.files.keys().filter_map(line).collect()
}

/// Returns the entries as a compressed tar.
fn archive(entries: &Entries) -> Result<Vec<u8>> {
    let mut tar = LayerWriter::new(Vec::new(), 0);
    for (path, entry) in entries {
        match entry {
            Entry::Directory => tar.entry(path, 0o755, EntryKind::Directory)?,
            Entry::Text(bytes) => {
                let mode = if bytes.starts_with(b"#!") { 0o755 } else { 0o644 };
                let size = bytes.len() as u64;
                tar.entry(path, mode, EntryKind::File { size, content: &mut bytes.as_slice() })?;
            }
            Entry::Payload(file) => {
                let metadata = fs::symlink_metadata(file)?;
                if metadata.is_symlink() {
                    tar.entry(path, 0o777, EntryKind::Symlink(&fs::read_link(file)?))?;
                } else {
                    let mut content = fs::File::open(file)?;
                    tar.entry(path, 0o644, EntryKind::File { size: metadata.len(), content: &mut content })?;
                }
            }
        }
    }
    Ok(tar.finish()?.1)
}

/// Returns an `ar` archive of these members.
fn ar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = b"!<arch>\n".to_vec();
    for (name, content) in members {
        let header = format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 0, "100644", content.len());
        archive.extend_from_slice(header.as_bytes());
        archive.extend_from_slice(content);
        if content.len() % 2 == 1 {
            archive.push(b'\n');
        }
    }
    archive
}

#[cfg(test)]
#[path = "deb_tests.rs"]
mod tests;
