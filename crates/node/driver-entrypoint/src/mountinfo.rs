//! Mounts of a process, from `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::files::unescape;

/// A mount of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) id: u64,
    pub(crate) parent: u64,
    /// Device number of the file system, `major:minor`.
    pub(crate) device: String,
    pub(crate) point: PathBuf,
    pub(crate) shared: bool,
    pub(crate) file_system: String,
    /// Options of the file system.
    pub(crate) options: String,
}

/// Reads the mounts of a process, given by its directory in `/proc`, in the order in which they were mounted.
pub(crate) fn read(process: &Path) -> io::Result<Vec<Mount>> {
    let text = fs::read(process.join("mountinfo"))?;
    Ok(String::from_utf8_lossy(&text).lines().filter_map(parse).collect())
}

/// Parses `id parent major:minor root point options [shared:N ...] - type source options`.
fn parse(line: &str) -> Option<Mount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let (mut fields, mut file_system) = (mount.split(' '), file_system.split(' '));
    Some(Mount {
        id: fields.next()?.parse().ok()?,
        parent: fields.next()?.parse().ok()?,
        device: fields.next()?.to_owned(),
        // The kernel writes space, tab, newline and backslash as three octal digits.
        point: unescape(fields.nth(1)?.as_bytes(), br"\", 3, 8).into(),
        shared: fields.skip(1).any(|field| field.starts_with("shared:")),
        file_system: file_system.next()?.to_owned(),
        options: file_system.nth(1).unwrap_or_default().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mountinfo_are_understood() {
        let line =
            r"36 35 98:0 /mnt1 /run/a\040b rw,noatime shared:7 master:1 - ext3 /dev/root rw,errors=continue";
        let expected = Mount {
            id: 36,
            parent: 35,
            device: "98:0".to_owned(),
            point: "/run/a b".into(),
            shared: true,
            file_system: "ext3".to_owned(),
            options: "rw,errors=continue".to_owned(),
        };
        assert_eq!(parse(line), Some(expected));
        let private = "36 35 98:0 / /x rw - tmpfs shared:9 rw";
        assert_eq!(parse(private).map(|mount| mount.shared), Some(false));
        assert_eq!(parse("36"), None);
        assert_eq!(unescape(br"a\134b\x", br"\", 3, 8), r"a\b\x");
    }
}
