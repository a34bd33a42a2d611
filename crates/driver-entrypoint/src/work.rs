//! The work list: what init does in the virtual machine, in postcard's form.

use serde::{Deserialize, Serialize};

/// Where the initramfs holds the work list.
pub const WORK_PATH: &str = "/farrier/work";
/// Where the initramfs holds the [key](crate::report::Key).
pub const KEY_PATH: &str = "/farrier/key";

/// What init does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The device that the report goes to, such as `/dev/ttyS1`.
    pub report: String,
    /// Each of the payload's modules is unloaded before the next one is loaded; else all are loaded first.
    pub alone: bool,
    /// In order.
    pub steps: Vec<Step>,
}

/// A module to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// A module of the payload, whose unloading is tried too; else one of the kernel's own.
    pub payload: bool,
    /// Its name as `lsmod` shows it.
    pub name: String,
    /// The file, not compressed.
    pub path: String,
    /// Its parameters, as `insmod` takes them.
    pub parameters: String,
}

impl Work {
    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        // Writing to memory does not fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// Reads [`Work::encode`], with nothing behind it.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (work, rest) = postcard::take_from_bytes(bytes).ok()?;
        rest.is_empty().then_some(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_list_comes_back() {
        let step = |payload, name: &str, parameters: &str| Step {
            payload,
            name: name.into(),
            path: format!("/modules/{name}.ko"),
            parameters: parameters.into(),
        };
        let steps = vec![step(false, "crc16", ""), step(true, "m", "a=1 b=\"x y\"\n\t")];
        let work = Work { report: "/dev/ttyS1".into(), alone: true, steps };
        let bytes = work.encode();
        assert_eq!(Work::decode(&bytes), Some(work));
        for length in 0..bytes.len() {
            assert_eq!(Work::decode(&bytes[..length]), None, "{length}");
        }
        assert_eq!(Work::decode(&[bytes, vec![0]].concat()), None);
    }
}
