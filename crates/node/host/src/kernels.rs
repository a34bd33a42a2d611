//! Kernels that are installed on the host.

use std::{path::Path, process::Command};

use crate::{Result, commands::output_of};

/// Returns the releases of the installed kernels, oldest first.
pub(crate) fn installed(root: &Path) -> Result<Vec<String>> {
    let mut releases = Vec::new();
    for entry in fs_err::read_dir(root.join("usr/lib/modules"))? {
        let entry = entry?;
        // A directory without this index is a remnant of a removed kernel.
        if entry.path().join("modules.builtin").exists() {
            releases.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    in_version_order(&releases)
}

/// Sorts kernel releases as `sort` does, which compares numbers as numbers.
pub(crate) fn in_version_order(releases: &[String]) -> Result<Vec<String>> {
    let sort = r#"printf '%s\n' "$@" | LC_ALL=C sort --version-sort"#;
    let sorted = output_of(Command::new("sh").args(["-c", sort, "sh"]).args(releases))?;
    Ok(sorted.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

/// Returns the release of the running kernel.
pub(crate) fn running() -> Result<String> {
    Ok(output_of(Command::new("uname").arg("--kernel-release"))?.trim().to_owned())
}

/// Returns the identifier of this boot.
pub(crate) fn boot_id() -> Result<String> {
    Ok(fs_err::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn kernels_are_ordered_by_version() {
        let root = tempfile::tempdir().unwrap();
        for release in ["6.1.0-10-amd64", "6.1.0-9-amd64", "6.12.1+deb12-amd64", "6.1.0-8-amd64"] {
            let directory = root.path().join("usr/lib/modules").join(release);
            fs::create_dir_all(&directory).unwrap();
            if release != "6.1.0-8-amd64" {
                fs::write(directory.join("modules.builtin"), "").unwrap();
            }
        }
        assert_eq!(
            installed(root.path()).unwrap(),
            ["6.1.0-9-amd64", "6.1.0-10-amd64", "6.12.1+deb12-amd64"]
        );
    }
}
