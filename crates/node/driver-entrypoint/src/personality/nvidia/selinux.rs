//! SELinux labels on files: on the exposed device files, so that containers may use them on hosts with SELinux.

use std::{io, path::Path};

use rustix::{
    fs::{XattrFlags, lgetxattr, lsetxattr},
    io::Errno,
};
use walkdir::WalkDir;

use super::state;
use crate::{error::Error, files, node::Node};

/// Type of container files in container-selinux.
const TYPE: &str = "container_file_t";
const ATTRIBUTE: &str = "security.selinux";

/// Maximum size of a label in bytes; policies use far shorter ones.
const MAX_LABEL: usize = 4096;

/// Whether SELinux is enabled on the host. Looks at process 1, because the container's own `/sys` does not show it.
pub(crate) fn is_enabled(node: &Node<'_>) -> bool {
    let mounts = files::text(node.paths.at("/proc/1/mounts")).unwrap_or_default();
    let is_mounted = mounts.lines().any(|line| line.split(' ').nth(2) == Some("selinuxfs"));
    is_mounted && node.paths.at("/proc/1/root/sys/fs/selinux/enforce").exists()
}

/// Labels the files of the exposed `/dev`. Returns the number of changed labels.
pub(crate) fn label_devices(node: &Node<'_>) -> Result<usize, Error> {
    let devices = node.paths.at(state::ROOT).join("dev");
    let label_error = |path: &Path| Error::on("label for SELinux", node.paths.container_path(path));
    let mut labeled = 0;
    for entry in WalkDir::new(&devices) {
        let entry = entry.map_err(|error| label_error(error.path().unwrap_or(&devices))(error.into()))?;
        // Skip symlinks; their targets have their own labels.
        if !entry.path_is_symlink() {
            labeled += usize::from(label(entry.path(), TYPE).map_err(label_error(entry.path()))?);
        }
    }
    Ok(labeled)
}

/// Sets the type in the label of a file. Returns whether that changes the label.
pub(crate) fn label(path: &Path, wanted: &str) -> io::Result<bool> {
    let mut buffer = vec![0; MAX_LABEL];
    let length = match lgetxattr(path, ATTRIBUTE, &mut buffer) {
        Ok(length) => length,
        // The file system has no labels.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    };
    let label = buffer.get(..length).unwrap_or_default();
    let new_label = std::str::from_utf8(label).ok().and_then(|label| with_type(label, wanted));
    let Some(new_label) = new_label else { return Ok(false) };
    lsetxattr(path, ATTRIBUTE, new_label.as_bytes(), XattrFlags::empty())?;
    Ok(true)
}

/// Returns the label `user:role:type:level` with the wanted type; `None` if it has that type or is not a label.
fn with_type(label: &str, wanted: &str) -> Option<String> {
    let label = label.trim_end_matches('\0');
    let mut fields = label.splitn(4, ':');
    let (user, role, kind, level) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    (kind != wanted).then(|| format!("{user}:{role}:{wanted}:{level}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn only_the_type_of_a_label_changes() {
        let new_label = "system_u:object_r:container_file_t:s0:c1,c2";
        assert_eq!(with_type("system_u:object_r:device_t:s0:c1,c2\0", TYPE).as_deref(), Some(new_label));
        assert_eq!(with_type(new_label, TYPE), None);
        assert_eq!(with_type("unlabelled", TYPE), None);
        let program = "system_u:object_r:bin_t:s0";
        assert_eq!(with_type("system_u:object_r:var_lib_t:s0", "bin_t").as_deref(), Some(program));
    }

    #[test]
    fn selinux_is_enabled_if_the_host_mounts_it() {
        let bench = Bench::new();
        assert!(!is_enabled(&bench.node()));
        bench.write("/proc/1/mounts", "selinuxfs /sys/fs/selinux selinuxfs rw 0 0\n");
        assert!(!is_enabled(&bench.node()));
        bench.write("/proc/1/root/sys/fs/selinux/enforce", "1");
        assert!(is_enabled(&bench.node()));
        bench.write("/proc/1/mounts", "tmpfs /selinuxfs tmpfs rw 0 0\n");
        assert!(!is_enabled(&bench.node()));
    }

    #[test]
    fn files_without_labels_are_not_labeled() {
        let bench = Bench::new();
        bench.write("/run/nvidia/driver/dev/nvidia0", "");
        bench.write("/run/nvidia/driver/dev/nvidia-caps/nvidia-cap1", "");
        std::os::unix::fs::symlink("/nowhere", bench.at("/run/nvidia/driver/dev/fd")).unwrap();
        // Without SELinux no file has a label. With SELinux four labels change: two files and two directories.
        let labeled = label_devices(&bench.node()).unwrap();
        assert!(matches!(labeled, 0 | 4), "{labeled}");
        let error = label_devices(&Bench::new().node()).unwrap_err();
        assert!(error.to_string().starts_with("label for SELinux /run/nvidia/driver/dev: "), "{error}");
    }
}
