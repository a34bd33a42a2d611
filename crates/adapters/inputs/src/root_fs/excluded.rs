//! The files of packages that root file systems omit.

use std::path::Path;

use farrier_core::image::checked::matches_glob;
use oci::plain_path;

/// Patterns of files that builds do not read.
const EXCLUDED: [&str; 6] = [
    "usr/share/man/*",
    "usr/share/info/*",
    "usr/share/locale/*",
    "usr/share/lintian/*",
    "usr/share/doc/*",
    "usr/share/bug/*",
];

/// License files are kept, together with the package directories and the links between them.
const KEPT: &str = "usr/share/doc/*/copyright";
const DOCUMENTATION: &str = "usr/share/doc";

/// Files that depend on the machine or the mirror. They are omitted, so that all sites get the same layer.
pub(super) const SITE_FILES: [&str; 5] = [
    "etc/resolv.conf",
    "etc/hostname",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/apt.conf.d/99mmdebstrap",
];

/// Returns the patterns as options of dpkg. A root file system keeps them in a file, so their order affects the digest. An
/// exception follows the pattern that it restricts.
pub(super) fn dpkg_options() -> impl Iterator<Item = String> {
    EXCLUDED.iter().flat_map(|pattern| {
        let exception = matches_glob(pattern, KEPT).then(|| format!("path-include=/{KEPT}"));
        [format!("path-exclude=/{pattern}")].into_iter().chain(exception)
    })
}

/// Whether a package's entry is omitted.
pub(super) fn is_excluded(path: &Path) -> bool {
    let Some(path) = plain_path(path) else { return false };
    if SITE_FILES.iter().any(|file| path.starts_with(file)) {
        return true;
    }
    // A path that is not UTF-8 is not below the directories that all packages share.
    let Some(text) = path.to_str() else { return false };
    let is_package_directory = path.parent() == Some(Path::new(DOCUMENTATION));
    EXCLUDED.iter().any(|pattern| matches_glob(pattern, text))
        && !matches_glob(KEPT, text)
        && !is_package_directory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manuals_go_and_licences_stay() {
        for path in [
            "./usr/share/man/man1/gcc.1.gz",
            "./usr/share/locale/de/LC_MESSAGES/make.mo",
            "./usr/share/doc/make/README",
            "./usr/share/doc/make/examples/copyright.txt",
            "./etc/apt/sources.list.d/x.list",
            "./etc/hostname",
        ] {
            assert!(is_excluded(Path::new(path)), "{path}");
        }
        for path in [
            "./usr/share/doc/make/copyright",
            "./usr/share/doc/libgcc-s1",
            "./usr/share/doc/make/",
            "./usr/share/man/",
            "./usr/share/perl/5.36/man/x",
            "./etc/hostname.d/x",
        ] {
            assert!(!is_excluded(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn the_order_of_the_options_is_a_part_of_each_digest() {
        let options: Vec<String> = dpkg_options().collect();
        assert_eq!(
            options,
            [
                "path-exclude=/usr/share/man/*",
                "path-exclude=/usr/share/info/*",
                "path-exclude=/usr/share/locale/*",
                "path-exclude=/usr/share/lintian/*",
                "path-exclude=/usr/share/doc/*",
                "path-include=/usr/share/doc/*/copyright",
                "path-exclude=/usr/share/bug/*",
            ]
        );
    }
}
