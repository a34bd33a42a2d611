//! Adapter: files on the node that others read while they are written: they are there in full, or not at all.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{fault::Fault, node::Node};

/// Writes a file below `/run` or `/host`, and the directories above it.
pub(crate) fn write(node: &Node<'_>, path: &str, contents: &str) -> Result<(), Fault> {
    let path = node.paths.at(path);
    let fault = Fault::on(node, "write", &path);
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(&fault)?;
    }
    let beside = beside(&path);
    fs::write(&beside, contents).and_then(|()| fs::rename(&beside, &path)).map_err(&fault)
}

/// Removes a file. Returns whether it was there.
pub(crate) fn remove(node: &Node<'_>, path: &str) -> Result<bool, Fault> {
    let path = node.paths.at(path);
    match fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(Fault::on(node, "remove", &path)(error)),
    }
}

/// Says that the drivers are ready: the file that a startup probe looks for.
pub(crate) fn set_ready(node: &Node<'_>, path: &str) -> Result<(), Fault> {
    write(node, path, "")?;
    node.log.step(format!("ready: wrote {path}"));
    Ok(())
}

/// Takes that back; nothing to do where nobody said it.
pub(crate) fn clear_ready(node: &Node<'_>, path: &str) -> Result<(), Fault> {
    if remove(node, path)? {
        node.log.step(format!("removed {path}"));
    }
    Ok(())
}

/// A name that no other tool takes for its own: those of modprobe.d end in `.conf`, those of udev in `.rules`.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}
