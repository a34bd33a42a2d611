//! Disk images in the form of the Discoverable Partitions Specification, which systemd dissects: a read-only file system, its
//! hash tree, and the signature of the root hash.

use std::{
    collections::BTreeMap,
    io::{self, Cursor},
};

use farrier_core::kernel::Architecture;
use gpt::{
    GptConfig,
    mbr::ProtectiveMBR,
    partition::Partition,
    partition_types::{OperatingSystem, Type},
};
use sha2::{Digest as _, Sha256};
use uuid::{Uuid, uuid};

use super::verity::HashTree;

const SECTOR: usize = 512;
/// Size of the second partition table at the end of the disk: 128 entries and a header.
const SECOND_TABLE: usize = 33 * SECTOR;
/// Partitions start at multiples of this size, as sfdisk and systemd-repart align them.
const ALIGNMENT: usize = 1 << 20;
/// Attribute of partitions that are mounted read-only.
const READ_ONLY: u64 = 1 << 60;

/// Returns the disk image. `signature` is the content of the partition that has the signature of the root hash.
pub(super) fn image(
    file_system: &[u8],
    tree: &HashTree,
    signature: Option<&[u8]>,
    arch: Architecture,
) -> io::Result<Vec<u8>> {
    let [root, verity, verity_signature] = partition_types(arch);
    // systemd finds the file system and its hash tree by the halves of the root hash.
    let (root_id, verity_id) = tree.root_hash.split_at(16);
    let mut contents = vec![
        ("root", root, id(root_id), file_system),
        ("root-verity", verity, id(verity_id), &tree.partition[..]),
    ];
    if let Some(signature) = signature {
        contents.push(("root-verity-sig", verity_signature, derived_id(tree, "signature"), signature));
    }
    let mut disk = Vec::new();
    let mut partitions = BTreeMap::new();
    for ((name, kind, part_guid, content), number) in contents.into_iter().zip(1..) {
        let first = (disk.len() + 1).next_multiple_of(ALIGNMENT);
        disk.resize(first, 0);
        disk.extend(content);
        let last = disk.len().div_ceil(SECTOR) - 1;
        let part_type_guid = Type { guid: kind, os: OperatingSystem::Linux };
        let (first_lba, last_lba) = ((first / SECTOR) as u64, last as u64);
        let name = name.to_owned();
        partitions.insert(
            number,
            Partition { part_type_guid, part_guid, first_lba, last_lba, flags: READ_ONLY, name },
        );
    }
    disk.resize((disk.len() + SECOND_TABLE).next_multiple_of(ALIGNMENT), 0);
    let mut disk = Cursor::new(disk);
    let sectors = u32::try_from(disk.get_ref().len() / SECTOR - 1).unwrap_or(u32::MAX);
    ProtectiveMBR::with_lb_size(sectors).overwrite_lba0(&mut disk).map_err(io::Error::other)?;
    let table = GptConfig::new().writable(true);
    let mut table =
        table.create_from_device(disk, Some(derived_id(tree, "disk"))).map_err(io::Error::other)?;
    table.update_partitions(partitions).map_err(io::Error::other)?;
    Ok(table.write().map_err(io::Error::other)?.into_inner())
}

/// Returns the types of the file system, its hash tree and the signature
/// (<https://uapi-group.org/specifications/specs/discoverable_partitions_specification/>).
fn partition_types(arch: Architecture) -> [Uuid; 3] {
    match arch {
        Architecture::Amd64 => [
            uuid!("4f68bce3-e8cd-4db1-96e7-fbcaf984b709"),
            uuid!("2c7357ed-ebd2-46d9-aec1-23d437ec2bf5"),
            uuid!("41092b05-9fc8-4523-994f-2def0408b176"),
        ],
        Architecture::Arm64 => [
            uuid!("b921b045-1df0-41c3-af44-4c6f280d3fae"),
            uuid!("df3300ce-d69f-4c92-978c-9bfb0f38d820"),
            uuid!("6db69de6-29f4-4758-a7a5-962190f00ce3"),
        ],
    }
}

fn id(bytes: &[u8]) -> Uuid {
    Uuid::from_slice(bytes).unwrap_or_default()
}

/// Returns an identifier that depends on the content only.
fn derived_id(tree: &HashTree, purpose: &str) -> Uuid {
    let digest = Sha256::new().chain_update(tree.root_hash).chain_update(purpose).finalize();
    uuid::Builder::from_random_bytes(digest[..16].try_into().unwrap_or_default()).into_uuid()
}
