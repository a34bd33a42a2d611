//! Extracts the modules of any image, to check images that farrier did not build.

use std::{collections::BTreeSet, path::Path};

use farrier_core::kernel::KernelRelease;

use super::{
    archive_image::{ImageLayers, Keep, apply_layers, below, has_module_name},
    error::Result,
};

/// Kernel-related content of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageTree {
    /// Kernel releases with modules, sorted: the directories below `lib/modules`.
    pub releases: Vec<String>,
    /// Files below `lib/firmware`, relative to it, sorted.
    pub firmware: Vec<String>,
}

/// Writes the modules of `release` into `dest`, at their paths in the image, as the stacked layers show them. `usr/lib/modules`
/// becomes `lib/modules`. Without a release, only lists the content. `lib/modules` may be anywhere in the image, as in driver
/// containers. Blocks.
pub fn unpack_image(layers: &ImageLayers, dest: &Path, release: Option<&KernelRelease>) -> Result<ImageTree> {
    let keep = |path: &Path| {
        if let Some(inner) = below(path, ["lib", "modules"]).filter(|_| has_module_name(path)) {
            let is_of_release = release.is_some_and(|release| inner.starts_with(release.as_str()));
            return if is_of_release { Keep::Content } else { Keep::Name };
        }
        if below(path, ["lib", "firmware"]).is_some() { Keep::Name } else { Keep::Nothing }
    };
    apply_layers(layers, dest, &keep)?;
    list_tree(dest)
}

/// Lists the kernel-related content of an unpacked image or payload. Blocks.
pub fn list_tree(dest: &Path) -> Result<ImageTree> {
    let (mut releases, mut firmware) = (BTreeSet::new(), BTreeSet::new());
    for entry in walkdir::WalkDir::new(dest) {
        let entry = entry?;
        if !entry.file_type().is_file() {
            continue;
        }
        let path = entry.path().strip_prefix(dest).unwrap_or(entry.path());
        if let Some(inner) = below(path, ["lib", "modules"]) {
            let release = inner.iter().next().filter(|_| inner.iter().count() > 1);
            releases.extend(release.map(|release| release.to_string_lossy().into_owned()));
        } else if let Some(inner) = below(path, ["lib", "firmware"]) {
            firmware.insert(inner.to_string_lossy().into_owned());
        }
    }
    Ok(ImageTree { releases: releases.into_iter().collect(), firmware: firmware.into_iter().collect() })
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        path::PathBuf,
    };

    use super::*;

    fn layer(dir: &Path, name: &str, files: &[&str]) -> PathBuf {
        let path = dir.join(name);
        let mut builder = tar::Builder::new(File::create(&path).unwrap());
        for file in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(file.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, file, file.as_bytes()).unwrap();
        }
        builder.finish().unwrap();
        path
    }

    #[test]
    fn the_modules_of_one_release_as_the_layers_leave_them() {
        let dir = tempfile::tempdir().unwrap();
        let layers = ImageLayers::Files(vec![
            layer(
                dir.path(),
                "low",
                &[
                    "usr/lib/modules/6.1.0-1-amd64/updates/a.ko",
                    "usr/lib/modules/6.1.0-1-amd64/updates/gone.ko",
                    "usr/lib/modules/6.1.0-10-amd64/other.ko.xz",
                    "lib/modules/6.1.0-1-amd64/modules.dep",
                    "usr/lib/firmware/acme/a.bin",
                    "lib/firmware/gone.bin",
                    "etc/passwd",
                ],
            ),
            layer(
                dir.path(),
                "high",
                &[
                    "lib/modules/6.1.0-1-amd64/updates/.wh.gone.ko",
                    "lib/firmware/.wh.gone.bin",
                    "opt/lib/modules/6.1.0-1-amd64/b.ko.zst",
                ],
            ),
        ]);
        let dest = dir.path().join("dest");
        fs::create_dir(&dest).unwrap();
        let release = "6.1.0-1-amd64".parse().unwrap();
        let tree = unpack_image(&layers, &dest, Some(&release)).unwrap();
        assert_eq!(tree.releases, ["6.1.0-1-amd64", "6.1.0-10-amd64"]);
        assert_eq!(tree.firmware, ["acme/a.bin"]);
        let read = |path: &str| fs::read_to_string(dest.join(path)).ok();
        let own = "usr/lib/modules/6.1.0-1-amd64/updates/a.ko";
        assert_eq!(read("lib/modules/6.1.0-1-amd64/updates/a.ko").as_deref(), Some(own));
        assert_eq!(read("lib/modules/6.1.0-1-amd64/updates/gone.ko"), None);
        let elsewhere = "opt/lib/modules/6.1.0-1-amd64/b.ko.zst";
        assert_eq!(read(elsewhere).as_deref(), Some(elsewhere));
        // Of another kernel's module, only the name is kept.
        assert_eq!(read("lib/modules/6.1.0-10-amd64/other.ko.xz").as_deref(), Some(""));
        assert_eq!(read("etc/passwd"), None);
    }

    #[test]
    fn without_a_release_nothing_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let layers = ImageLayers::Files(vec![layer(dir.path(), "l", &["lib/modules/6.1.0-1-amd64/a.ko"])]);
        let dest = dir.path().join("dest");
        fs::create_dir(&dest).unwrap();
        let tree = unpack_image(&layers, &dest, None).unwrap();
        assert_eq!(tree, ImageTree { releases: vec!["6.1.0-1-amd64".to_owned()], firmware: vec![] });
        assert_eq!(fs::metadata(dest.join("lib/modules/6.1.0-1-amd64/a.ko")).unwrap().len(), 0);
    }
}
