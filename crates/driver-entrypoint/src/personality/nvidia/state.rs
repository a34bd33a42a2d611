//! Adapter: what the GPU driver's container tells the operator's other containers, below `/run/nvidia`, and what
//! OFED's tells at `/run/mellanox/drivers`.

use crate::{error::Error, files, modules::loaded::Loaded, node::Node};

/// Locked while the container lives, and its process id.
pub(crate) const PID_FILE: &str = "/run/nvidia/nvidia-driver.pid";
/// Where the container's root is exposed.
pub(crate) const ROOT: &str = "/run/nvidia/driver";
/// The digest of the configuration that the loaded driver was loaded with. The operator's driver manager reads it.
pub(crate) const DIGEST: &str = "/run/nvidia/nvidia-driver.state";
/// `Ready`, or something else: the operator's startup probe waits for that word where the file is.
pub(crate) const DAEMONS: &str = "/run/nvidia/validations/.driver-daemons-status";
/// Written by the operator's startup probe, once `nvidia-smi` works.
pub(crate) const PROBED: &str = "/run/nvidia/validations/.driver-ctr-ready";
/// Written by OFED's container.
pub(crate) const OFED_READY: &str = "/run/mellanox/drivers/.driver-ready";

/// Says that the driver is not to be relied upon: at the start, and before it is unloaded.
pub(crate) fn set_not_ready(node: &Node<'_>) -> Result<(), Error> {
    files::write(node, DAEMONS, "NotReady\n")?;
    files::clear_ready(node, PROBED)
}

/// Says that the driver is there, and with which configuration.
pub(crate) fn set_ready(node: &Node<'_>, digest: Option<&str>) -> Result<(), Error> {
    if let Some(digest) = digest {
        files::write(node, DIGEST, &format!("{digest}\n"))?;
    }
    files::write(node, DAEMONS, "Ready\n")
}

/// Says nothing any more.
pub(crate) fn clear(node: &Node<'_>) -> Result<(), Error> {
    [DIGEST, DAEMONS, PID_FILE].iter().try_for_each(|path| files::remove(node, path).map(drop))
}

/// May peer memory stand upon the GPU driver? `probed` for a pod whose driver container has the operator's startup
/// probe; others only say whether the modules are there.
pub(crate) fn is_gpu_ready(node: &Node<'_>, loaded: &Loaded, probed: bool) -> bool {
    let says_so = match files::text(node.paths.at(DAEMONS)) {
        Some(word) => word == "Ready",
        None => !probed || node.paths.at(PROBED).exists(),
    };
    says_so && loaded.contains("nvidia")
}

/// Is OFED there? The host's own counts from when its modules are loaded.
pub(crate) fn is_ofed_ready(node: &Node<'_>, loaded: &Loaded, of_host: bool) -> bool {
    if of_host { loaded.contains("mlx5_core") } else { node.paths.at(OFED_READY).exists() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    fn with_modules(names: &[&str]) -> Bench {
        let bench = Bench::new();
        bench.loaded_lines(names);
        bench
    }

    #[test]
    fn the_gpu_driver_is_ready_when_it_says_so_and_is_loaded() {
        let bench = with_modules(&["nvidia"]);
        let ready = |probed| is_gpu_ready(&bench.node(), &Loaded::read(&bench.node().paths).unwrap(), probed);
        assert!(!ready(true));
        assert!(ready(false), "who has no probe has no ready file");
        bench.file(PROBED, "");
        assert!(ready(true));
        bench.file(DAEMONS, "NotReady\n");
        assert!(!ready(true) && !ready(false));
        bench.file(DAEMONS, "Ready\n");
        assert!(ready(true) && ready(false));
        bench.file("/proc/modules", "");
        assert!(!ready(true) && !ready(false));
    }

    #[test]
    fn ofed_of_a_container_says_so_and_that_of_the_host_is_loaded() {
        let bench = with_modules(&["mlx5_core"]);
        let ready =
            |of_host| is_ofed_ready(&bench.node(), &Loaded::read(&bench.node().paths).unwrap(), of_host);
        assert!(ready(true) && !ready(false));
        bench.file(OFED_READY, "");
        bench.file("/proc/modules", "");
        assert!(!ready(true) && ready(false));
    }
}
