//! Hash trees of dm-verity (`Documentation/admin-guide/device-mapper/verity.rst`), in the form of veritysetup(8).

use sha2::{Digest as _, Sha256};

/// Size of the blocks of data and of hashes.
pub(super) const BLOCK: usize = BLOCK_SIZE as usize;
const BLOCK_SIZE: u32 = 4096;

type Hash = [u8; 32];

/// Hash tree of a file system.
pub(super) struct HashTree {
    /// The superblock, and the levels of hashes from the top down.
    pub(super) partition: Vec<u8>,
    pub(super) root_hash: Hash,
}

/// Returns the hash tree of `data`, whose length is a multiple of [`BLOCK`].
pub(super) fn hash_tree(data: &[u8], salt: &Hash) -> HashTree {
    let hash_of = |block: &[u8]| Hash::from(Sha256::new().chain_update(salt).chain_update(block).finalize());
    let mut hashes: Vec<Hash> = data.chunks(BLOCK).map(hash_of).collect();
    let mut levels = Vec::new();
    while hashes.len() > 1 {
        let mut level = hashes.concat();
        level.resize(level.len().next_multiple_of(BLOCK), 0);
        hashes = level.chunks(BLOCK).map(hash_of).collect();
        levels.push(level);
    }
    let mut partition = superblock(data, salt);
    partition.extend(levels.into_iter().rev().flatten());
    HashTree { partition, root_hash: hashes.first().copied().unwrap_or_default() }
}

/// Returns the superblock, which contains the parameters of the tree and fills one block.
fn superblock(data: &[u8], salt: &Hash) -> Vec<u8> {
    let (one, block) = (1_u32.to_le_bytes(), BLOCK_SIZE.to_le_bytes());
    let mut bytes = b"verity\0\0".to_vec();
    // Version of the superblock, and type of the hash: the salt comes first.
    bytes.extend([one, one].concat());
    bytes.extend_from_slice(&salt[..16]);
    bytes.extend(b"sha256");
    bytes.resize(64, 0);
    bytes.extend([block, block].concat());
    bytes.extend((data.len().div_ceil(BLOCK) as u64).to_le_bytes());
    bytes.extend((salt.len() as u64).to_le_bytes());
    bytes.extend(salt);
    bytes.resize(BLOCK, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use super::*;

    /// Trees with no, one and two levels of hashes.
    #[test]
    fn veritysetup_accepts_the_trees() {
        let dir = tempfile::tempdir().unwrap();
        let (data_file, tree_file) = (dir.path().join("data"), dir.path().join("tree"));
        for blocks in [1, 2, 128, 129, 300] {
            let data: Vec<u8> = (0..=u8::MAX).cycle().step_by(3).take(blocks * BLOCK).collect();
            let HashTree { partition, root_hash } = hash_tree(&data, &[7; 32]);
            fs::write(&data_file, &data).unwrap();
            fs::write(&tree_file, partition).unwrap();
            let verify = |hash: &str| {
                let mut command = Command::new("veritysetup");
                command
                    .arg("verify")
                    .args([&data_file, &tree_file])
                    .arg(hash)
                    .output()
                    .unwrap()
                    .status
                    .success()
            };
            assert!(verify(&hex::encode(root_hash)), "{blocks} blocks");
            assert!(!verify(&hex::encode([0; 32])), "{blocks} blocks");
        }
    }
}
