//! SELinux labels on the exposed device files, so that containers may use them on hosts with SELinux.

use std::path::Path;

use walkdir::WalkDir;

use super::state;
use crate::{error::Error, node::Node, selinux};

/// Type of container files in container-selinux.
const TYPE: &str = "container_file_t";

/// Labels the files of the exposed `/dev`. Returns the number of changed labels.
pub(crate) fn label_devices(node: &Node<'_>) -> Result<usize, Error> {
    let devices = node.paths.at(state::ROOT).join("dev");
    let label_error = |path: &Path| Error::on("label for SELinux", node.paths.container_path(path));
    let mut labeled = 0;
    for entry in WalkDir::new(&devices) {
        let entry = entry.map_err(|error| label_error(error.path().unwrap_or(&devices))(error.into()))?;
        // Skip symlinks; their targets have their own labels.
        if !entry.path_is_symlink() {
            labeled += usize::from(selinux::label(entry.path(), TYPE).map_err(label_error(entry.path()))?);
        }
    }
    Ok(labeled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

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
