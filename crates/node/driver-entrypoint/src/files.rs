//! Files on the node. Files that other programs may read concurrently are replaced atomically.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use crate::{
    error::Error,
    node::{Node, Paths},
};

/// Reads a file's text and trims white space; `None` if the file cannot be read.
pub(crate) fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Lists the paths in a directory, sorted; empty if the directory cannot be read.
pub(crate) fn entries(directory: impl AsRef<Path>) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Returns the last component of a path.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the last component of a symlink's target; `None` if the path is not a symlink.
pub(crate) fn link_name(path: impl AsRef<Path>) -> Option<String> {
    fs::read_link(path).ok().map(|target| name_of(&target))
}

/// Lists the names in a directory that start with the prefix, without the prefix.
pub(crate) fn names_after(directory: &Path, prefix: &str) -> Vec<String> {
    let names = entries(directory).into_iter().map(|path| name_of(&path));
    names.filter_map(|name| name.strip_prefix(prefix).map(str::to_owned)).collect()
}

/// Decodes the kernel's escapes: each is `prefix` and a byte, written as `digits` digits of the radix.
pub(crate) fn unescape(text: &[u8], prefix: &[u8], digits: usize, radix: u32) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some((&first, tail)) = rest.split_first() {
        let number = |text: &[u8]| u8::from_str_radix(str::from_utf8(text).ok()?, radix).ok();
        let escape = rest.strip_prefix(prefix).and_then(|rest| rest.split_at_checked(digits));
        let decoded = escape.and_then(|(text, tail)| Some((number(text)?, tail)));
        let (byte, tail) = decoded.unwrap_or((first, tail));
        bytes.push(byte);
        rest = tail;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Finds a program of the image by its name.
pub(crate) fn program(paths: &Paths, name: &str) -> Option<PathBuf> {
    let directories = ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin"];
    directories.iter().map(|directory| paths.at(directory).join(name)).find(|path| path.is_file())
}

/// Maps "not found" errors to `None`.
pub(crate) fn if_exists<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Writes a file below `/run` or `/host` atomically, and creates its parent directories.
pub(crate) fn write(node: &Node<'_>, path: &str, contents: &str) -> Result<(), Error> {
    let file = node.paths.at(path);
    // No other tool reads a `.new` file: modprobe.d reads `.conf`, udev reads `.rules`.
    let temp = node.paths.at(&format!("{path}.new"));
    let result = file.parent().map_or(Ok(()), fs::create_dir_all);
    let result = result.and_then(|()| fs::write(&temp, contents)).and_then(|()| fs::rename(&temp, &file));
    result.map_err(Error::on("write", path))
}

/// Returns the lines of a state file; none if it cannot be read.
pub(crate) fn lines(node: &Node<'_>, path: &str) -> Vec<String> {
    text(node.paths.at(path)).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Adds lines to a state file, unless it has them. Returns all lines.
pub(crate) fn add_lines(node: &Node<'_>, path: &str, added: Vec<String>) -> Result<Vec<String>, Error> {
    let mut all = lines(node, path);
    for line in added {
        if !all.contains(&line) {
            all.push(line);
        }
    }
    write(node, path, &all.join("\n"))?;
    Ok(all)
}

/// Creates a symlink and its parent directories. The target is a path on the node.
pub(crate) fn link(node: &Node<'_>, path: &str, target: &str) -> Result<(), Error> {
    let file = node.paths.at(path);
    let result = file.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| symlink(target, &file));
    result.map_err(Error::on("link", path))
}

/// Removes a file. Returns whether the file existed.
pub(crate) fn remove(node: &Node<'_>, path: &str) -> Result<bool, Error> {
    let file = node.paths.at(path);
    // On a read-only file system, Linux refuses to remove even a file that does not exist.
    if file.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(false);
    }
    let removed = if_exists(fs::remove_file(file)).map_err(Error::on("remove", path))?;
    Ok(removed.is_some())
}

/// Creates the ready file that a startup probe looks for.
pub(crate) fn set_ready(node: &Node<'_>, path: &str) -> Result<(), Error> {
    write(node, path, "")?;
    node.log.step(format!("ready: wrote {path}"));
    Ok(())
}

/// Removes a file, and logs that if the file existed.
pub(crate) fn remove_and_log(node: &Node<'_>, path: &str) -> Result<(), Error> {
    if remove(node, path)? {
        node.log.step(format!("removed {path}"));
    }
    Ok(())
}
