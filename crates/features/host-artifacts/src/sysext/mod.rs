//! Writes system extensions (systemd-sysext(8)): disk images with a squashfs of `/usr`, its dm-verity hash tree and, if the
//! modules are signed, a signature of the root hash by the same key. The same payload and key give the same bytes.

mod disk;
mod verity;

use std::{io::Cursor, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc};

use backhand::{FilesystemCompressor, FilesystemWriter, NodeHeader, compression::Compressor};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use farrier_builder::services::{BuildTools, Result};
use farrier_core::kernel::Architecture;
use farrier_local::blocking::blocking;
use farrier_payload::PayloadError;
use farrier_signing::ModuleSigner;
use fs_err as fs;
use kmod::SignatureHash;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::{
    deb,
    entries::{Entries, Entry, with_directories},
    payload::HostPayload,
};
use verity::{BLOCK, hash_tree};

/// Returns the extension and its file name. The file must keep its name, which is the extension's name with `.raw`.
pub(super) async fn write(tools: &BuildTools, payload: Arc<HostPayload>) -> Result<(String, Vec<u8>)> {
    let (name, arch, is_signed) = (name(&payload), payload.arch, payload.certificate.is_some());
    let (file_system, tree) = blocking(move || {
        let file_system = squashfs(entries(&payload))?;
        // Each image has its own salt, so that blocks with equal digests cannot be prepared for all images.
        let tree = hash_tree(&file_system, &Sha256::digest(payload.image.as_str()).into());
        Ok::<_, PayloadError>((file_system, tree))
    })
    .await?;
    let signature = match &tools.module_signer {
        Some(signer) if is_signed => Some(signature_partition(signer.clone(), tree.root_hash).await?),
        _ => None,
    };
    Ok((
        format!("{name}.raw"),
        blocking(move || disk::image(&file_system, &tree, signature.as_deref(), arch)).await?,
    ))
}

/// Name of the extension, by which systemd finds its `extension-release` file.
fn name(payload: &HostPayload) -> String {
    format!("farrier-{}-{}", payload.name, payload.release)
}

/// Returns the content of `/usr`, by paths relative to `/`.
fn entries(payload: &HostPayload) -> Entries {
    let in_usr =
        |path: &Path| if path.starts_with("usr") { path.to_owned() } else { Path::new("usr").join(path) };
    let of_package = deb::entries(payload).into_iter();
    let mut entries: Entries = of_package.map(|(path, entry)| (in_usr(&path), entry)).collect();
    let user_space = payload.user_space.iter();
    entries.extend(user_space.map(|(path, file)| (path.clone(), Entry::Payload(file.clone()))));
    let release =
        Path::new("usr/lib/extension-release.d").join(format!("extension-release.{}", name(payload)));
    entries.insert(release, Entry::Text(extension_release(payload).into_bytes()));
    with_directories(entries)
}

/// Returns what the host's `os-release` must say for systemd to merge the extension.
fn extension_release(payload: &HostPayload) -> String {
    let arch = match payload.arch {
        Architecture::Amd64 => "x86-64",
        Architecture::Arm64 => "arm64",
    };
    let (id, version) = &payload.os;
    format!("ID={id}\nVERSION_ID={version}\nARCHITECTURE={arch}\n")
}

/// Returns a squashfs with the entries. Blocks.
fn squashfs(entries: Entries) -> Result<Vec<u8>, PayloadError> {
    let header = |permissions| NodeHeader { permissions, ..NodeHeader::default() };
    let mut writer = FilesystemWriter::default();
    writer.set_time(0);
    writer.set_root_mode(0o755);
    // All kernels with squashfs decompress zlib.
    writer.set_compressor(FilesystemCompressor::new(Compressor::Gzip, None).map_err(std::io::Error::from)?);
    for (path, entry) in entries {
        match entry {
            Entry::Directory => writer.push_dir(&path, header(0o755)),
            Entry::Text(text) => writer.push_file(Cursor::new(text), &path, header(0o644)),
            Entry::Payload(file) => {
                let metadata = fs::symlink_metadata(&file)?;
                if metadata.is_symlink() {
                    writer.push_symlink(fs::read_link(&file)?, &path, header(0o777))
                } else {
                    let mode = if metadata.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
                    // The writer opens one file at a time, and only while it writes.
                    writer.push_file_from_path(file, &path, header(mode))
                }
            }
        }
        .map_err(std::io::Error::from)?;
    }
    let mut image = Cursor::new(Vec::new());
    writer.write(&mut image).map_err(std::io::Error::from)?;
    let mut image = image.into_inner();
    image.resize(image.len().next_multiple_of(BLOCK), 0);
    Ok(image)
}

/// Returns the content of the partition with the root hash's signature. Kernels and systemd verify the hash in hexadecimal form.
async fn signature_partition(module_signer: Arc<ModuleSigner>, root_hash: [u8; 32]) -> Result<Vec<u8>> {
    let key = module_signer.load().await?;
    let root_hash = hex::encode(root_hash);
    let fingerprint = hex::encode(Sha256::digest(&module_signer.certificate().der));
    let content = root_hash.clone();
    let signature =
        blocking(move || module_signer.message(&key, SignatureHash::Sha256, content.as_bytes())).await?;
    let signature = BASE64_STANDARD.encode(signature);
    let object =
        json!({"rootHash": root_hash, "certificateFingerprint": fingerprint, "signature": signature});
    let mut content = object.to_string().into_bytes();
    content.resize(content.len().next_multiple_of(BLOCK), 0);
    Ok(content)
}

#[cfg(test)]
mod tests;
