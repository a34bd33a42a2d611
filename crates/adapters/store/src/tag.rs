//! Tags of stored inputs.

use std::fmt::Write as _;

use farrier_core::{
    image::Tag,
    kernel::{Architecture, KernelRelease, KernelTarget},
};

use super::StoreError;

/// Returns the tag of an imported header set: `<release>-<architecture>`. Characters that a tag cannot contain become `_` and
/// two hexadecimal digits (`+` is `_2b`), and `_` becomes `__`. No two releases share a tag, unlike a kernel label.
pub fn header_tag(release: &KernelRelease, arch: Architecture) -> Result<Tag, StoreError> {
    parse(format!("{}-{arch}", escaped(release.as_str())))
}

/// Returns the tag of the header set from a kernel family's own source: `<release>-<architecture>-<system>-<version>`, escaped
/// like [`header_tag`]. Kernels of different systems can have the same release and different headers.
pub fn platform_header_tag(target: &KernelTarget) -> Result<Tag, StoreError> {
    let KernelTarget { os, os_version, release, arch } = target;
    let [release, os, os_version] = [release.as_str(), os.as_str(), os_version.as_str()].map(escaped);
    parse(format!("{release}-{arch}-{os}-{os_version}"))
}

fn escaped(value: &str) -> String {
    let mut text = String::new();
    for byte in value.bytes() {
        match byte {
            b'_' => text.push_str("__"),
            b'.' | b'-' if !text.is_empty() => text.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => text.push(char::from(byte)),
            // Writing to a string cannot fail.
            byte => drop(write!(text, "_{byte:02x}")),
        }
    }
    text
}

fn parse(text: String) -> Result<Tag, StoreError> {
    text.parse().map_err(|_| StoreError::Tag(text))
}

/// Returns the tag of a stored input with a key of 64 hexadecimal digits.
pub fn key_tag(key: &str) -> Result<Tag, StoreError> {
    key.parse().map_err(|_| StoreError::Tag(key.chars().take(80).collect()))
}
