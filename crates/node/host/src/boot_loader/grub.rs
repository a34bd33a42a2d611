//! GRUB, with `GRUB_DEFAULT=saved`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::BootLoader;
use crate::{Error, Result, commands::output_of};

/// The installed GRUB.
pub(super) struct Grub {
    /// `grub.cfg`.
    config: PathBuf,
}

impl Grub {
    /// Returns GRUB if it is installed.
    pub(super) fn find(root: &Path) -> Option<Self> {
        let config = root.join("boot/grub/grub.cfg");
        config.exists().then_some(Self { config })
    }

    fn tool(name: &str) -> Command {
        Command::new(format!("grub-{name}"))
    }

    /// Returns the kernel of the entry that a variable of GRUB's environment names.
    fn kernel_of(&self, variable: &str) -> Result<Option<String>> {
        let value = Self::value_of(variable)?;
        let known = self.entries()?.into_iter().find(|(_, entry)| value.as_ref() == Some(entry));
        Ok(known.map(|(release, _)| release))
    }

    fn value_of(variable: &str) -> Result<Option<String>> {
        let environment = output_of(Self::tool("editenv").arg("list"))?;
        let value = environment.lines().find_map(|line| line.strip_prefix(variable)?.strip_prefix('='));
        Ok(value.filter(|value| !value.is_empty()).map(str::to_owned))
    }

    fn entries(&self) -> Result<Vec<(String, String)>> {
        Ok(entries(&fs_err::read_to_string(&self.config)?, None))
    }

    /// Fails if GRUB itself cannot write to the directory of its environment.
    fn ensure_writable(&self) -> Result<()> {
        let directory = self.config.parent().unwrap_or(Path::new("/"));
        let probe =
            |target: &str| output_of(Self::tool("probe").arg(format!("--target={target}")).arg(directory));
        if is_read_only(&probe("fs")?, &probe("abstraction")?) {
            return Err(Error::ReadOnlyEnvironment { directory: directory.to_owned() });
        }
        Ok(())
    }

    fn entry(&self, release: &str) -> Result<String> {
        let found = self.entries()?.into_iter().find(|(kernel, _)| kernel == release);
        found
            .map(|(_, entry)| entry)
            .ok_or_else(|| Error::NoEntry { release: release.to_owned(), command: "update-grub".to_owned() })
    }
}

impl BootLoader for Grub {
    fn default_kernel(&self) -> Result<Option<String>> {
        // With another default in its configuration, GRUB ignores the saved entry.
        let is_used = fs_err::read_to_string(&self.config)?.contains("set default=\"${saved_entry}\"");
        if is_used { self.kernel_of("saved_entry") } else { Ok(None) }
    }

    fn kernels(&self) -> Result<Vec<String>> {
        let (config, default) = (fs_err::read_to_string(&self.config)?, Self::value_of("saved_entry")?);
        Ok(entries(&config, default.as_deref()).into_iter().map(|(release, _)| release).collect())
    }

    fn set_default(&self, release: &str) -> Result<()> {
        output_of(Self::tool("set-default").arg(self.entry(release)?)).map(drop)
    }

    fn next_kernel(&self) -> Result<Option<String>> {
        self.kernel_of("next_entry")
    }

    fn boot_once(&self, release: &str) -> Result<()> {
        let entry = self.entry(release)?;
        self.ensure_writable()?;
        output_of(Self::tool("reboot").arg(entry)).map(drop)
    }

    fn clear_next(&self) -> Result<()> {
        output_of(Self::tool("editenv").args(["-", "unset", "next_entry"])).map(drop)
    }

    /// The saved entry stays the default by itself. Disarms GRUB if the kernel that it is to boot once was removed: GRUB would boot
    /// its first entry instead, which is the newest kernel. Leaves other entries that an administrator chose.
    fn keep_default(&self, _default: Option<&str>) -> Result<()> {
        if let Some(next) = Self::value_of("next_entry")?
            && is_removed_kernel(&next, &self.entries()?)
        {
            self.clear_next()?;
        }
        Ok(())
    }
}

/// Whether a value of GRUB's environment names a kernel's entry that is not in `grub.cfg`. The identifier of a submenu precedes the
/// entry's.
fn is_removed_kernel(value: &str, entries: &[(String, String)]) -> bool {
    let is_kernel = value.rsplit('>').next().is_some_and(|entry| entry.contains("-advanced-"));
    is_kernel && entries.iter().all(|(_, entry)| entry != value)
}

/// Whether GRUB cannot write to this file system, or to this kind of device. GRUB then cannot clear `next_entry` and boots it
/// every time (`00_header` of GRUB has the same lists).
fn is_read_only(file_system: &str, abstractions: &str) -> bool {
    let read_only = ["btrfs", "cpiofs", "newc", "odc", "romfs", "squash4", "tarfs", "zfs"];
    read_only.contains(&file_system.trim())
        || abstractions
            .split_whitespace()
            .any(|name| name == "lvm" || name == "diskfilter" || name.starts_with("mdraid"))
}

/// Returns the kernels of a `grub.cfg` that `grub-mkconfig` wrote, each with the name of its entry. Skips entries for recovery. If
/// the entry `default` has an initramfs, skips those without one: the installation of their kernels has failed.
/// `10_linux` gives entries in the submenu the identifier `gnulinux-RELEASE-advanced-UUID`.
fn entries(config: &str, default: Option<&str>) -> Vec<(String, String)> {
    let identifier = |line: &str| {
        let (_, identifier) = line.split_once("$menuentry_id_option '")?;
        Some(identifier.split_once('\'')?.0.to_owned())
    };
    let (mut submenu, mut current, mut all, mut with_initramfs) = (None, None, Vec::new(), Vec::new());
    for line in config.lines() {
        let command = line.trim_start();
        if command.starts_with("submenu ") {
            submenu = identifier(command);
        } else if line.starts_with('}') {
            submenu = None;
        } else if command.starts_with("menuentry ") {
            current = identifier(command).and_then(|entry| {
                let (release, _) = entry.strip_prefix("gnulinux-")?.rsplit_once("-advanced-")?;
                let name = submenu.iter().chain([&entry]).map(String::as_str).collect::<Vec<_>>().join(">");
                Some((release.to_owned(), name))
            });
            all.extend(current.clone());
        } else if command.split_whitespace().next() == Some("initrd") {
            with_initramfs.extend(current.take());
        }
    }
    let is_needed = with_initramfs.iter().any(|(_, name)| default == Some(name.as_str()));
    if is_needed { with_initramfs } else { all }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "\
menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple-UUID' {
	linux	/boot/vmlinuz-6.1.0-10-amd64 root=UUID=x ro quiet
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-UUID' {
	menuentry 'Debian GNU/Linux, with Linux 6.1.0-10-amd64' --class os $menuentry_id_option 'gnulinux-6.1.0-10-amd64-advanced-UUID' {
	}
	menuentry 'Debian, with Linux 6.1.0-10-amd64 (recovery mode)' $menuentry_id_option 'gnulinux-6.1.0-10-amd64-recovery-UUID' {
	}
	menuentry 'Debian GNU/Linux, with Linux 6.1.0-9-amd64' --class os $menuentry_id_option 'gnulinux-6.1.0-9-amd64-advanced-UUID' {
	}
}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
}
";

    #[test]
    fn entries_are_named_with_their_submenu() {
        let wanted = ["6.1.0-10-amd64", "6.1.0-9-amd64"].map(|release| {
            (release.to_owned(), format!("gnulinux-advanced-UUID>gnulinux-{release}-advanced-UUID"))
        });
        assert_eq!(entries(CONFIG, None), wanted);
        let flat = "menuentry 'x' $menuentry_id_option 'gnulinux-5.14.0-advanced-U' {\n}\n";
        assert_eq!(entries(flat, None), [("5.14.0".to_owned(), "gnulinux-5.14.0-advanced-U".to_owned())]);
    }

    /// GRUB also lists a kernel whose initramfs did not fit into `/boot`.
    #[test]
    fn a_kernel_without_its_initramfs_does_not_boot_unless_the_default_has_none() {
        let entry = |release: &str, line: &str| {
            format!(
                "menuentry 'x' $menuentry_id_option 'gnulinux-{release}-advanced-U' {{\n\tlinux\t/x\n\t{line}\n}}\n"
            )
        };
        let config = [
            entry("6.1.0-10-amd64", "echo 'Loading ...'"),
            entry("6.1.0-9-amd64", "initrd\t/boot/initrd.img-6.1.0-9-amd64"),
            "menuentry 'other' $menuentry_id_option 'osprober-gnulinux-/boot' {\n\tinitrd /other\n}\n"
                .to_owned(),
        ];
        let (incomplete, complete) =
            ("gnulinux-6.1.0-10-amd64-advanced-U", "gnulinux-6.1.0-9-amd64-advanced-U");
        let found = entries(&config.concat(), Some(complete));
        assert_eq!(found, [("6.1.0-9-amd64".to_owned(), complete.to_owned())]);
        for default in [Some(incomplete), None] {
            assert_eq!(entries(&config.concat(), default).len(), 2, "{default:?}");
        }
    }

    #[test]
    fn an_entry_that_is_no_kernels_or_exists_is_not_a_removed_kernel() {
        let entries = entries(CONFIG, None);
        for (value, expected) in [
            ("gnulinux-advanced-UUID>gnulinux-6.1.0-10-amd64-advanced-UUID", false),
            ("gnulinux-advanced-UUID>gnulinux-6.1.0-11-amd64-advanced-UUID", true),
            ("gnulinux-advanced-UUID>gnulinux-6.1.0-10-amd64-recovery-UUID", false),
            ("uefi-firmware", false),
            ("2", false),
        ] {
            assert_eq!(is_removed_kernel(value, &entries), expected, "{value}");
        }
    }

    #[test]
    fn grub_writes_to_plain_partitions_only() {
        for (file_system, abstractions, expected) in [
            ("ext2\n", "\n", false),
            ("xfs", "", false),
            ("btrfs\n", "", true),
            ("ext2", "lvm\n", true),
            ("ext2", "diskfilter mdraid1x\n", true),
        ] {
            assert_eq!(is_read_only(file_system, abstractions), expected, "{file_system} {abstractions}");
        }
    }
}
