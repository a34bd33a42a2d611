//! SELinux labels on files.

use std::{io, path::Path};

use rustix::{
    fs::{XattrFlags, lgetxattr, lsetxattr},
    io::Errno,
};

use crate::node::Node;

const ATTRIBUTE: &str = "security.selinux";

/// Maximum size of a label in bytes; policies use far shorter ones.
const MAX_LABEL: usize = 4096;

/// Whether SELinux is enabled on the host whose root is at `root`. A container's own `/sys` does not show it.
pub(crate) fn is_enabled(node: &Node<'_>, root: &str) -> bool {
    node.paths.at(&format!("{root}/sys/fs/selinux/enforce")).exists()
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
        let device = "system_u:object_r:device_t:s0:c1,c2\0";
        assert_eq!(with_type(device, "container_file_t").as_deref(), Some(new_label));
        assert_eq!(with_type(new_label, "container_file_t"), None);
        assert_eq!(with_type("unlabelled", "container_file_t"), None);
        let program = "system_u:object_r:bin_t:s0";
        assert_eq!(with_type("system_u:object_r:var_lib_t:s0", "bin_t").as_deref(), Some(program));
    }

    #[test]
    fn selinux_is_enabled_if_the_host_mounts_it() {
        let bench = Bench::new();
        assert!(!is_enabled(&bench.node(), "/proc/1/root"));
        bench.write("/proc/1/root/sys/fs/selinux/enforce", "1");
        assert!(is_enabled(&bench.node(), "/proc/1/root"));
        assert!(!is_enabled(&bench.node(), "/host"));
    }
}
