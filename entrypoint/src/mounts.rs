//! Adapter: exposes directories of the container to the host and to other containers, by bind mounts below a
//! volume that the manifest mounts with `mountPropagation: Bidirectional`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::mount::MountPropagationFlags;

use crate::{fault::Fault, node::Node};

/// Mounts on top of each other that are undone at most: more is no container that died but a loop.
const MAX_DEPTH: usize = 64;

/// A line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    parent: u64,
    point: PathBuf,
    shared: bool,
}

/// Binds a directory, with all that is mounted below it, onto a place. What a container that was killed left there
/// goes first: it is of another image.
pub(crate) fn expose(node: &Node<'_>, from: &str, to: &str) -> Result<(), Fault> {
    conceal(node, to)?;
    let (source, target) = (node.paths.at(from), node.paths.at(to));
    fs::create_dir_all(&target).map_err(Fault::on(node, "create", &target))?;
    if from == "/" {
        leave_out_sysfs(node)?;
    }
    let bound = node.kernel.bind(&source, &target);
    bound.map_err(|errno| Fault::on(node, "bind-mount onto", &target)(errno.into()))?;
    node.log.step(format!("exposed {from} at {to}"));
    if !mounts(node)?
        .iter()
        .rev()
        .find(|mount| mount.point == Path::new(to))
        .is_some_and(|mount| mount.shared)
    {
        node.log.warn(format!(
            "{to} is not shared: neither the host nor other pods see it. Give its volume mountPropagation: Bidirectional"
        ));
    }
    Ok(())
}

/// Undoes [`expose`], as often as it was done. A place that the container runtime itself mounted is left alone.
pub(crate) fn conceal(node: &Node<'_>, to: &str) -> Result<(), Fault> {
    let target = node.paths.at(to);
    for _ in 0..MAX_DEPTH {
        let mounts = mounts(node)?;
        let Some(top) = mounts.iter().rev().find(|mount| mount.point == Path::new(to)) else { break };
        let parent = mounts.iter().find(|mount| mount.id == top.parent);
        // Volumes are mounted on the container's root.
        if parent.is_some_and(|parent| parent.point == Path::new("/")) && is_volume(to) {
            break;
        }
        node.kernel.unmount(&target).map_err(|errno| Fault::on(node, "unmount", &target)(errno.into()))?;
        node.log.step(format!("unmounted {to}"));
    }
    Ok(())
}

/// Only these are both a volume and a place to expose the root at (first generation of the operators).
fn is_volume(place: &str) -> bool {
    matches!(place, "/run/mellanox/drivers" | "/run/nvidia/driver" | "/run/nvidia/drivers")
}

/// What is mounted below `/sys` must not come along with the root: it would keep the container's cgroups alive. The
/// known order: all of it unbindable, then `/sys` itself private again, which lets that one be bound.
fn leave_out_sysfs(node: &Node<'_>) -> Result<(), Fault> {
    let sys = node.paths.at("/sys");
    let change = |flags| {
        let changed = node.kernel.propagation(&sys, flags);
        changed.map_err(|errno| Fault::on(node, "change the propagation of", &sys)(errno.into()))
    };
    change(MountPropagationFlags::UNBINDABLE | MountPropagationFlags::REC)?;
    change(MountPropagationFlags::PRIVATE)
}

fn mounts(node: &Node<'_>) -> Result<Vec<Mount>, Fault> {
    let path = node.paths.at("/proc/self/mountinfo");
    let text = fs::read(&path).map_err(Fault::on(node, "read", &path))?;
    Ok(String::from_utf8_lossy(&text).lines().filter_map(mount).collect())
}

/// `id parent major:minor root point options [shared:N ...] - type source options`
fn mount(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ');
    let (id, parent) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let point = PathBuf::from(unescape(fields.nth(2)?));
    let shared = fields.skip(1).take_while(|field| *field != "-").any(|field| field.starts_with("shared:"));
    Some(Mount { id, parent, point, shared })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut path = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                path.push(char::from(byte));
                path.push_str(part.get(3..).unwrap_or_default());
            }
            None => path.extend(["\\", part]),
        }
    }
    path
}
