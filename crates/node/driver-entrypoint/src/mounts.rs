//! Exposes directories of the container to the host and to other containers. Uses bind mounts below a volume that the
//! manifest mounts with `mountPropagation: Bidirectional`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::mount::MountPropagationFlags;

use crate::{
    error::Error,
    mountinfo::{self, Mount},
    node::Node,
};

/// Maximum number of stacked mounts to unmount. Killed containers do not leave more; more means a loop.
const MAX_DEPTH: usize = 64;

/// Volumes at which the first generation of the operators exposes the container's root.
const VOLUMES: [&str; 3] = ["/run/mellanox/drivers", "/run/nvidia/driver", "/run/nvidia/drivers"];

/// Bind-mounts a directory recursively. Mounts that a killed container left at the target are removed first, because
/// they show another image.
pub(crate) fn expose(node: &Node<'_>, from: &str, to: &str) -> Result<(), Error> {
    conceal(node, to)?;
    let (source, target) = (node.paths.at(from), node.paths.at(to));
    fs::create_dir_all(&target).map_err(Error::on("create", to))?;
    if from == "/" {
        // Mounts below `/sys` must not be bound along with the root: they would keep the container's cgroups alive.
        // Make the whole subtree unbindable, then `/sys` itself private, so that `/sys` alone can be bound.
        set_propagation(node, "/sys", MountPropagationFlags::UNBINDABLE | MountPropagationFlags::REC)?;
        set_propagation(node, "/sys", MountPropagationFlags::PRIVATE)?;
        // Runtimes make the container's root shared if one of its volumes is bidirectional. A bind mount of a shared
        // mount becomes its peer. Unmounting `/proc` and `/dev` of the copy would then unmount the container's own.
        set_propagation(node, "/", MountPropagationFlags::PRIVATE)?;
    }
    let result = node.kernel.bind(&source, &target);
    result.map_err(Error::on("bind-mount", format!("{from} onto {to}")))?;
    node.log.step(format!("exposed {from} at {to}"));
    let (mounts, point) = (read_mounts(node)?, mount_point(node, to));
    if !mounts.iter().rev().find(|mount| mount.point == point).is_some_and(|mount| mount.shared) {
        node.log.warn(format!(
            "{to} is not shared: neither the host nor other pods see it. Give its volume mountPropagation: Bidirectional"
        ));
    }
    Ok(())
}

/// Undoes all earlier [`expose`] calls for the target. A mount made by the container runtime is kept.
pub(crate) fn conceal(node: &Node<'_>, to: &str) -> Result<(), Error> {
    let (target, point) = (node.paths.at(to), mount_point(node, to));
    for _ in 0..MAX_DEPTH {
        let mounts = read_mounts(node)?;
        let Some(top) = mounts.iter().rev().find(|mount| mount.point == point) else { break };
        let parent = mounts.iter().find(|mount| mount.id == top.parent);
        // Volumes are mounted directly on the container's root.
        let is_volume = VOLUMES.iter().any(|volume| point == Path::new(volume));
        if parent.is_some_and(|parent| parent.point == Path::new("/")) && is_volume {
            break;
        }
        node.kernel.unmount(&target).map_err(Error::on("unmount", to))?;
        node.log.step(format!("unmounted {to}"));
    }
    Ok(())
}

/// Resolves symlinks in a path, because the kernel shows the resolved path in mountinfo: `/var/run` is a symlink to `/run`.
fn mount_point(node: &Node<'_>, path: &str) -> PathBuf {
    let resolved = fs::canonicalize(node.paths.at(path));
    resolved.map_or_else(|_| path.into(), |resolved| node.paths.container_path(&resolved).into())
}

fn set_propagation(node: &Node<'_>, path: &str, flags: MountPropagationFlags) -> Result<(), Error> {
    let result = node.kernel.propagation(&node.paths.at(path), flags);
    result.map_err(Error::on("change the propagation of", path))
}

fn read_mounts(node: &Node<'_>) -> Result<Vec<Mount>, Error> {
    mountinfo::read(&node.paths.at("/proc/self")).map_err(Error::on("read", "/proc/self/mountinfo"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn exposing_again_leaves_one_mount_and_concealing_removes_it() {
        let bench = Bench::new();
        let node = bench.node();
        let to = "/run/mellanox/drivers/usr/src";
        let count =
            || read_mounts(&node).unwrap().iter().filter(|mount| mount.point == Path::new(to)).count();
        for _ in 0..3 {
            expose(&node, "/usr/src", to).unwrap();
            assert_eq!(count(), 1);
        }
        conceal(&node, to).unwrap();
        conceal(&node, to).unwrap();
        assert_eq!(count(), 0);
    }

    #[test]
    fn a_mount_behind_a_symlink_is_found() {
        let bench = Bench::new();
        fs::create_dir_all(bench.at("/run")).unwrap();
        fs::create_dir(bench.at("/var")).unwrap();
        std::os::unix::fs::symlink(bench.at("/run"), bench.at("/var/run")).unwrap();
        let (node, to) = (bench.node(), "/var/run/mellanox/drivers/usr/src");
        for _ in 0..2 {
            expose(&node, "/usr/src", to).unwrap();
            assert_eq!(read_mounts(&node).unwrap().len(), 3);
        }
        conceal(&node, to).unwrap();
        assert_eq!(read_mounts(&node).unwrap().len(), 2);
        assert_eq!(bench.log().matches("WARN").count(), 0, "{}", bench.log());
    }

    #[test]
    fn the_volume_itself_stays() {
        let bench = Bench::new();
        conceal(&bench.node(), "/run/mellanox/drivers").unwrap();
        assert_eq!(bench.calls(), Vec::<String>::new());
    }

    #[test]
    fn a_volume_without_propagation_is_logged() {
        let bench = Bench::new();
        bench.write("/proc/self/mountinfo", "1 0 0:1 / / rw - overlay overlay rw\n");
        bench.kernel.private_mounts.set(true);
        expose(&bench.node(), "/usr/src", "/run/x").unwrap();
        assert!(bench.log().contains("WARN  /run/x is not shared: neither the host nor other pods see it."));
    }
}
