//! Pure: what is not believed of a node. Such a kernel calls for no image, and no rollout waits for it.
//! [`Claims`](super::Claims) decides.

use crate::image::Period;

/// A limit of the site that kernels of nodes passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum PassedLimit {
    /// The node named more than it may within this time.
    PerNode { most: u32, within: Period },
    /// The fleet runs more than this many, and others go before this one.
    Distinct(u32),
}

/// What is not believed of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Distrust {
    /// Why the kernel that it runs does not count.
    pub kernel: Option<PassedLimit>,
    /// Why the kernel that it announces does not count.
    pub announcement: Option<PassedLimit>,
}
