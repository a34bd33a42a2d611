//! Extensions of images that the pipeline published, as unsquashfs, veritysetup, sfdisk and openssl read them. `ci/host` merges
//! one with systemd.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use farrier_builder::testing::{Bench, K9, module};
use farrier_core::{
    image::{Digest, HostOutput},
    kernel::Architecture,
};
use serde_json::{Value, json};

use super::{disk, squashfs, verity::hash_tree};
use crate::{
    entries::{Entries, Entry},
    testing::{bench_that_signs_modules, make, run},
};

/// An extension, and the content of its partitions in files.
struct Extension {
    dir: tempfile::TempDir,
    table: Value,
}

impl Extension {
    fn new(content: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("x.raw"), content).unwrap();
        let table = run(Command::new("sfdisk").arg("--json").arg(dir.path().join("x.raw")));
        let table: Value = serde_json::from_str(&table).unwrap();
        let this = Self { dir, table: table["partitiontable"].clone() };
        run(Command::new("sfdisk").arg("--verify").arg(this.path("x.raw")));
        for partition in this.partitions() {
            let sectors = |field: &str| usize::try_from(partition[field].as_u64().unwrap()).unwrap();
            let range = sectors("start") * 512..(sectors("start") + sectors("size")) * 512;
            fs::write(this.path(partition["name"].as_str().unwrap()), &content[range]).unwrap();
        }
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn partitions(&self) -> &[Value] {
        self.table["partitions"].as_array().unwrap()
    }

    /// Root hash that the identifiers of the first two partitions contain.
    fn root_hash(&self) -> String {
        let ids = self.partitions()[..2].iter().map(|partition| partition["uuid"].as_str().unwrap());
        ids.collect::<String>().replace('-', "").to_ascii_lowercase()
    }

    fn unpack(&self) -> PathBuf {
        run(Command::new("unsquashfs").arg("-dest").args([self.path("tree"), self.path("root")]));
        self.path("tree")
    }
}

async fn extension(bench: &Bench, image: &Digest) -> Extension {
    Extension::new(&make(bench, image, HostOutput::Sysext).await.unwrap().content)
}

fn verify_tree(extension: &Extension) {
    let mut verify = Command::new("veritysetup");
    run(verify
        .arg("verify")
        .args(["root", "root-verity"].map(|name| extension.path(name)))
        .arg(extension.root_hash()));
}

fn files(tree: &Path) -> Vec<String> {
    run(Command::new("find").args([".", "-type", "f"]).current_dir(tree)).lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn squashfs_tools_and_veritysetup_read_the_extension() {
    let bench = Bench::new(&json!({}));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    let made = make(&bench, &built.digest, HostOutput::Sysext).await.unwrap();
    let manifest = String::from_utf8(made.manifest).unwrap();
    assert!(manifest.contains("\"farrier-x-6.1.0-9-amd64.raw\""), "{manifest}");
    let extension = Extension::new(&made.content);
    let names: Vec<_> = extension.partitions().iter().map(|partition| &partition["name"]).collect();
    assert_eq!(names, ["root", "root-verity"], "without a key, the root hash has no signature");
    verify_tree(&extension);
    let tree = extension.unpack();
    let kernel = "usr/lib/modules/6.1.0-9-amd64";
    let mut found = files(&tree);
    found.sort();
    let wanted = [
        "./usr/lib/depmod.d/farrier-x-6.1.0-9-amd64.conf".to_owned(),
        "./usr/lib/extension-release.d/extension-release.farrier-x-6.1.0-9-amd64".to_owned(),
        format!("./{kernel}/updates/farrier-x/extra/m.ko"),
    ];
    assert_eq!(found, wanted, "the kernel's indexes of modules stay visible");
    assert!(fs::read(tree.join(&wanted[2])).unwrap() == module().build(), "the image's module");
    let release = fs::read_to_string(tree.join(&wanted[1])).unwrap();
    assert_eq!(release, "ID=debian\nVERSION_ID=12\nARCHITECTURE=x86-64\n");
}

#[tokio::test]
async fn the_same_image_gives_the_same_extension_on_two_machines() {
    let (bench, mut other) = (Bench::new(&json!({})), Bench::new(&json!({})));
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    other.services.images.registry = Arc::clone(&bench.services.images.registry);
    let [here, there] = [
        make(&bench, &built.digest, HostOutput::Sysext).await,
        make(&other, &built.digest, HostOutput::Sysext).await,
    ];
    assert!(here.unwrap() == there.unwrap());
}

/// systemd verifies the signature as openssl does, with certificates in `/etc/verity.d`.
#[tokio::test]
async fn the_key_of_the_modules_signs_the_root_hash() {
    let (mut bench, keys) = bench_that_signs_modules();
    let built = bench.publish(K9, &[&module()]).await.unwrap();
    let extension = extension(&bench, &built.digest).await;
    verify_tree(&extension);
    let content = fs::read(extension.path("root-verity-sig")).unwrap();
    let object: Value =
        serde_json::from_str(str::from_utf8(&content).unwrap().trim_end_matches('\0')).unwrap();
    assert_eq!(object["rootHash"], extension.root_hash());
    let signature = BASE64_STANDARD.decode(object["signature"].as_str().unwrap()).unwrap();
    fs::write(extension.path("signature"), signature).unwrap();
    fs::write(extension.path("hash"), extension.root_hash()).unwrap();
    let verify = |hash: &str| {
        let mut command = Command::new("openssl");
        command.args(["smime", "-verify", "-inform", "DER", "-noverify", "-nointern", "-in"]);
        command.arg(extension.path("signature")).arg("-certfile").arg(keys.path("c.pem"));
        command.arg("-content").arg(extension.path(hash)).output().unwrap().status.success()
    };
    assert!(verify("hash"));
    fs::write(extension.path("other"), "0".repeat(64)).unwrap();
    assert!(!verify("other"));
    assert!(extension.unpack().join("usr/share/farrier/x/6.1.0-9-amd64/module-signing.der").exists());

    // Without the key, an extension of the same name would have no signature.
    bench.services.tools.module_signer = None;
    let error = make(&bench, &built.digest, HostOutput::Sysext).await.unwrap_err().to_string();
    assert!(error.contains("has modules signed with unknown certificate sha256:"), "{error}");
}

#[test]
fn a_payload_has_more_files_than_a_process_may_open() {
    let limit = |files: &str| {
        let process = std::process::id().to_string();
        run(Command::new("prlimit").args(["--pid", &process, &format!("--nofile={files}:")]));
    };
    let dir = tempfile::tempdir().unwrap();
    let mut entries = Entries::new();
    for number in 0..600 {
        let file = dir.path().join(number.to_string());
        fs::write(&file, [0_u8; 16]).unwrap();
        entries.insert(PathBuf::from(number.to_string()), Entry::Payload(file));
    }
    limit("512");
    let image = squashfs(entries);
    limit("1024");
    assert!(image.is_ok());
}

/// The second partition table needs 33 sectors behind the last partition.
#[test]
fn the_second_partition_table_overwrites_no_partition() {
    let file_system = vec![1; 8192];
    let tree = hash_tree(&file_system, &[0; 32]);
    for sectors_to_boundary in [0, 1, 32, 33, 34] {
        let content = vec![2; (1 << 20) - sectors_to_boundary * 512];
        let disk = disk::image(&file_system, &tree, Some(&content), Architecture::Amd64).unwrap();
        let extension = Extension::new(&disk);
        let last = fs::read(extension.path("root-verity-sig")).unwrap();
        assert!(last == content, "a partition that ends {sectors_to_boundary} sectors before a boundary");
    }
}
