//! Lock that allows one driver container of a kind per node. The kernel releases the lock when the process ends,
//! however it ends.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Seek, Write},
};

use rustix::fs::{FlockOperation, flock};

use crate::{error::Error, files, node::Node};

/// Takes the lock and writes our process ID into the file, as in `/run/nvidia/nvidia-driver.pid`. The returned file holds the
/// lock until it is dropped.
pub(crate) fn take(node: &Node<'_>, path: &str) -> Result<File, Error> {
    let lock_path = node.paths.at(path);
    let directory = lock_path.parent().map_or(Ok(()), fs::create_dir_all);
    let mut options = OpenOptions::new();
    let open = |()| options.read(true).write(true).create(true).truncate(false).open(&lock_path);
    let mut file = directory.and_then(open).map_err(Error::on("lock", path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let holder = describe_holder(node, &mut file);
            let changing = describe_changing_modules(node);
            return Err(Error::new(
                format!(
                    "the driver container is already running on this node: {path} is locked by {holder}{changing}"
                ),
                "wait until the other pod has ended; the kubelet restarts this one",
            ));
        }
        result => result.map_err(Error::on("lock", path))?,
    }
    let result = file.set_len(0).and_then(|()| file.rewind());
    result.and_then(|()| writeln!(file, "{}", std::process::id())).map_err(Error::on("lock", path))?;
    Ok(file)
}

/// Describes the holder by the process ID in the lock file. The ID is from the PID namespace of the holder's container.
fn describe_holder(node: &Node<'_>, file: &mut File) -> String {
    let text = io::read_to_string(file).unwrap_or_default();
    let Ok(id) = text.trim().parse::<u32>() else { return "another process".to_owned() };
    match files::text(node.paths.at(&format!("/proc/{id}/comm"))) {
        Some(command) if id != std::process::id() => format!("process {id} ({command})"),
        _ => format!("process {id} of another container"),
    }
}

/// Lists modules that the kernel is loading or unloading. A container that is killed during such a call keeps its lock
/// until the kernel has finished.
fn describe_changing_modules(node: &Node<'_>) -> String {
    let modules = files::text(node.paths.at("/proc/modules")).unwrap_or_default();
    // Fields: name size references users state address.
    let changing = modules.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (name, state) = (fields.first()?, fields.get(4)?);
        (*state != "Live").then(|| format!("; module {name} is {}", state.to_lowercase()))
    });
    changing.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn a_second_lock_fails_and_names_the_holder() {
        let bench = Bench::new();
        let node = bench.node();
        let lock = take(&node, "/run/x/.lock").unwrap();
        let error = take(&node, "/run/x/.lock").unwrap_err();
        let ours = std::process::id();
        assert_eq!(
            error.to_string(),
            format!(
                "the driver container is already running on this node: /run/x/.lock is locked by process {ours} of \
                 another container"
            )
        );
        bench.write("/proc/modules", "ib_core 1 0 - Live 0x0\nmlx5_core 1 0 - Unloading 0x0\n");
        let error = take(&node, "/run/x/.lock").unwrap_err().to_string();
        assert!(error.ends_with("of another container; module mlx5_core is unloading"), "{error}");
        drop(lock);
        take(&node, "/run/x/.lock").unwrap();
    }
}
