//! Status files through which containers coordinate. The GPU driver's container writes below `/run/nvidia` for the
//! operator's other containers; OFED's container writes at `/run/mellanox/drivers`.

use crate::{error::Error, files, modules::loaded::Loaded, node::Node};

/// Lock file of the container; holds its process ID.
pub(crate) const PID_FILE: &str = "/run/nvidia/nvidia-driver.pid";
/// Directory at which the container's root is exposed.
pub(crate) const ROOT: &str = "/run/nvidia/driver";
/// Digest of the configuration with which the loaded driver was loaded. The operator's driver manager reads it.
pub(crate) const DIGEST_FILE: &str = "/run/nvidia/nvidia-driver.state";
/// Holds `Ready` or another word. The operator's startup probe waits for `Ready` if the file exists.
pub(crate) const DAEMONS_STATUS_FILE: &str = "/run/nvidia/validations/.driver-daemons-status";
/// Written by the operator's startup probe once `nvidia-smi` works.
pub(crate) const PROBE_FILE: &str = "/run/nvidia/validations/.driver-ctr-ready";
/// Written by OFED's container.
pub(crate) const OFED_READY: &str = "/run/mellanox/drivers/.driver-ready";

/// Marks the driver as not ready: at the start, and before it is unloaded.
pub(crate) fn set_not_ready(node: &Node<'_>) -> Result<(), Error> {
    files::write(node, DAEMONS_STATUS_FILE, "NotReady\n")?;
    files::remove_and_log(node, PROBE_FILE)
}

/// Marks the driver as ready, and records its configuration's digest.
pub(crate) fn set_ready(node: &Node<'_>, digest: Option<&str>) -> Result<(), Error> {
    if let Some(digest) = digest {
        files::write(node, DIGEST_FILE, &format!("{digest}\n"))?;
    }
    files::write(node, DAEMONS_STATUS_FILE, "Ready\n")
}

/// Removes all status files of this container.
pub(crate) fn clear(node: &Node<'_>) -> Result<(), Error> {
    [DIGEST_FILE, DAEMONS_STATUS_FILE, PID_FILE]
        .iter()
        .try_for_each(|path| files::remove(node, path).map(drop))
}

/// Whether the GPU driver is ready for modules that depend on it. The status file decides if it exists. Without it,
/// and if the driver's container has the operator's startup probe (`has_probe`), that probe's file must exist.
pub(crate) fn is_gpu_ready(node: &Node<'_>, loaded: &Loaded, has_probe: bool) -> bool {
    let is_marked_ready = match files::text(node.paths.at(DAEMONS_STATUS_FILE)) {
        Some(word) => word == "Ready",
        None => !has_probe || node.paths.at(PROBE_FILE).exists(),
    };
    is_marked_ready && loaded.contains("nvidia")
}

/// Whether OFED is ready. The host's own OFED is ready once its modules are loaded.
pub(crate) fn is_ofed_ready(node: &Node<'_>, loaded: &Loaded, is_host_ofed: bool) -> bool {
    if is_host_ofed { loaded.contains("mlx5_core") } else { node.paths.at(OFED_READY).exists() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    fn with_modules(names: &[&str]) -> Bench {
        let bench = Bench::new();
        bench.set_loaded_modules(names);
        bench
    }

    #[test]
    fn the_gpu_driver_is_ready_if_its_status_file_and_module_exist() {
        let bench = with_modules(&["nvidia"]);
        let ready = |probe| is_gpu_ready(&bench.node(), &Loaded::read(&bench.node().paths).unwrap(), probe);
        assert!(!ready(true));
        assert!(ready(false), "without a startup probe there is no file to wait for");
        bench.write(PROBE_FILE, "");
        assert!(ready(true));
        bench.write(DAEMONS_STATUS_FILE, "NotReady\n");
        assert!(!ready(true) && !ready(false));
        bench.write(DAEMONS_STATUS_FILE, "Ready\n");
        assert!(ready(true) && ready(false));
        bench.write("/proc/modules", "");
        assert!(!ready(true) && !ready(false));
    }

    #[test]
    fn ofed_is_ready_by_its_file_and_the_hosts_by_its_module() {
        let bench = with_modules(&["mlx5_core"]);
        let ready = |host| is_ofed_ready(&bench.node(), &Loaded::read(&bench.node().paths).unwrap(), host);
        assert!(ready(true) && !ready(false));
        bench.write(OFED_READY, "");
        bench.write("/proc/modules", "");
        assert!(!ready(true) && ready(false));
    }
}
