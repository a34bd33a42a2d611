//! Adapter: chance, for delays that should not fall together.

use std::hash::{BuildHasher, RandomState};

/// A number in 0..1 that differs between processes and calls; it needs no quality beyond that.
pub(crate) fn jitter() -> f64 {
    let bits = RandomState::new().hash_one(std::process::id()) >> 11;
    #[expect(clippy::cast_precision_loss, reason = "53 bits are left")]
    let fraction = bits as f64 / (1_u64 << 53) as f64;
    fraction
}
