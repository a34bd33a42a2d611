//! Tags of stored inputs.

use std::fmt::Write as _;

use farrier_core::{
    image::Tag,
    kernel::{Architecture, KernelRelease},
};

use super::StoreError;

/// Returns the tag of a kernel's header set: `<release>-<architecture>`. Characters that a tag cannot contain become `_` and
/// two hexadecimal digits (`+` is `_2b`), and `_` becomes `__`. No two releases share a tag, unlike a kernel label.
pub fn header_tag(release: &KernelRelease, arch: Architecture) -> Result<Tag, StoreError> {
    let mut text = String::new();
    for byte in release.as_str().bytes() {
        match byte {
            b'_' => text.push_str("__"),
            b'.' | b'-' if !text.is_empty() => text.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => text.push(char::from(byte)),
            // Writing to a string cannot fail.
            byte => drop(write!(text, "_{byte:02x}")),
        }
    }
    let text = format!("{text}-{arch}");
    text.parse().map_err(|_| StoreError::Tag(text))
}

/// Returns the tag of a stored input with a key of 64 hexadecimal digits.
pub fn key_tag(key: &str) -> Result<Tag, StoreError> {
    key.parse().map_err(|_| StoreError::Tag(key.chars().take(80).collect()))
}
