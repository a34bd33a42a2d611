//! Tar entries of a bundle. Each entry has exactly one valid form, so a reader verifies it by comparison.

use std::io;

use farrier_core::image::Digest;

/// Size of a tar block in bytes.
pub(super) const TAR_BLOCK: usize = 512;
/// End of a tar.
pub(super) const TAR_END: [u8; 1024] = [0; 1024];

/// Header of a file with this name and size, without owner and time.
pub(super) fn header(name: &str, size: u64) -> io::Result<[u8; TAR_BLOCK]> {
    let mut header = tar::Header::new_gnu();
    header.set_path(name)?;
    header.set_size(size);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    Ok(*header.as_bytes())
}

/// Zeros that follow a file of this size.
pub(super) fn padding(size: u64) -> &'static [u8] {
    let block = TAR_BLOCK as u64;
    &TAR_END[..usize::try_from((block - size % block) % block).unwrap_or_default()]
}

/// Size of a file with its header and padding.
pub(super) fn entry_size(size: u64) -> u64 {
    TAR_BLOCK as u64 + size + padding(size).len() as u64
}

/// A complete entry.
pub(super) fn entry(name: &str, content: &[u8]) -> io::Result<Vec<u8>> {
    let size = content.len() as u64;
    Ok([&header(name, size)?[..], content, padding(size)].concat())
}

/// Path of a blob in a layout.
pub(super) fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}
