//! Pure: which files of packages no root file system has.

use std::path::Path;

use crate::{image::checked::fits, oci::plain_path};

/// What is not read in a build container.
const EXCLUDED: [&str; 6] = [
    "usr/share/man/*",
    "usr/share/info/*",
    "usr/share/locale/*",
    "usr/share/lintian/*",
    "usr/share/doc/*",
    "usr/share/bug/*",
];

/// Licences stay, and where they are: the directories, and the links from one package's to another's.
const KEPT: &str = "usr/share/doc/*/copyright";
const DOCUMENTATION: &str = "usr/share/doc";

/// Files that tell which machine or mirror made it: two sites must get the same layer.
pub(super) const FORGET: [&str; 5] = [
    "etc/resolv.conf",
    "etc/hostname",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/apt.conf.d/99mmdebstrap",
];

/// The same as options of dpkg. A root file system keeps them in a file, so another order is another digest: what is kept
/// stands behind what it is an exception to.
pub(super) fn dpkg_options() -> impl Iterator<Item = String> {
    EXCLUDED.iter().flat_map(|pattern| {
        let kept = fits(pattern, KEPT).then(|| format!("path-include=/{KEPT}"));
        [format!("path-exclude=/{pattern}")].into_iter().chain(kept)
    })
}

/// Is the entry of a package left out?
pub(super) fn is_left_out(path: &Path) -> bool {
    let Some(path) = plain_path(path) else { return false };
    if FORGET.iter().any(|forgotten| path.starts_with(forgotten)) {
        return true;
    }
    // What is no text is not below the directories that all packages share.
    let Some(text) = path.to_str() else { return false };
    let is_place_of_a_package = path.parent() == Some(Path::new(DOCUMENTATION));
    EXCLUDED.iter().any(|pattern| fits(pattern, text)) && !fits(KEPT, text) && !is_place_of_a_package
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
            assert!(is_left_out(Path::new(path)), "{path}");
        }
        for path in [
            "./usr/share/doc/make/copyright",
            "./usr/share/doc/libgcc-s1",
            "./usr/share/doc/make/",
            "./usr/share/man/",
            "./usr/share/perl/5.36/man/x",
            "./etc/hostname.d/x",
        ] {
            assert!(!is_left_out(Path::new(path)), "{path}");
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
