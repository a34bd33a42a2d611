//! Work list for init in the virtual machine, in postcard's encoding.

use serde::{Deserialize, Serialize};

/// Path of the work list in the initramfs.
pub const WORK_PATH: &str = "/farrier/work";
/// Path of the [key](crate::report::Key) in the initramfs.
pub const KEY_PATH: &str = "/farrier/key";

/// Work for init in the virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Device that the report goes to, for example `/dev/ttyS1`.
    pub report: String,
    /// Whether each of the payload's modules is unloaded before the next one is loaded; otherwise all are loaded first.
    pub unload_each: bool,
    /// Modules to load, in order.
    pub steps: Vec<Step>,
}

/// A module to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Whether the module is part of the payload, and is to be unloaded again; otherwise it is one of the kernel's own.
    pub payload: bool,
    /// Module name as `lsmod` shows it.
    pub name: String,
    /// Path of the module's file, uncompressed.
    pub path: String,
    /// Parameters as for `insmod`.
    pub parameters: String,
}

impl Work {
    /// Encodes the work list.
    pub fn encode(&self) -> Vec<u8> {
        // Writing to memory does not fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// Decodes the output of [`Work::encode`]; `None` if it is damaged or followed by other bytes.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (work, rest) = postcard::take_from_bytes(bytes).ok()?;
        rest.is_empty().then_some(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_list_round_trips() {
        let step = |payload, name: &str, parameters: &str| Step {
            payload,
            name: name.into(),
            path: format!("/modules/{name}.ko"),
            parameters: parameters.into(),
        };
        let steps = vec![step(false, "crc16", ""), step(true, "m", "a=1 b=\"x y\"\n\t")];
        let work = Work { report: "/dev/ttyS1".into(), unload_each: true, steps };
        let bytes = work.encode();
        assert_eq!(Work::decode(&bytes), Some(work));
        for length in 0..bytes.len() {
            assert_eq!(Work::decode(&bytes[..length]), None, "{length}");
        }
        assert_eq!(Work::decode(&[bytes, vec![0]].concat()), None);
    }
}
