use std::{collections::BTreeMap, fs};

use farrier_core::plan::{Cell, CellNeed};
use serde_json::json;

use super::*;
use crate::{
    resolve::resolve_trees,
    testing::{Bench, K9, K10},
};

const TABLE: &str = "usr/src/ofa_kernel/x86_64/6.1.0-9-amd64/Module.symvers";

/// An image that is compiled against the OFED of the nodes' hosts.
fn bench() -> Bench {
    Bench::new(&json!({"needs": [{"name": "mofed", "tree": "trees/ofed-{{release}}"}]}))
}

fn name() -> ImageName {
    "mofed".parse().unwrap()
}

fn write(bench: &Bench, crc: &str) {
    let path = bench.services.definitions.root.join("trees/ofed-6.1.0-9-amd64").join(TABLE);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("{crc}\tib_register_peer_memory_client\tib_core\tEXPORT_SYMBOL\t\n")).unwrap();
}

async fn look(bench: &Bench, release: &str) -> Result<Digest, String> {
    let (image, _) = bench.definition();
    let target = Bench::target(release);
    let mut trees = BTreeMap::new();
    resolve_trees(&bench.services, &[image], &[target.clone()].into(), &mut trees).await;
    trees.remove(&(image.metadata.name.clone(), name(), target)).unwrap()
}

/// Returns the cell as planned with a tree of this digest.
async fn cell(bench: &Bench, exposed: Digest) -> Cell {
    let needs = vec![CellNeed { name: name(), version: "1".to_owned(), exposed, image: None }];
    Cell { needs, ..bench.cell(K9).await }
}

#[tokio::test]
async fn a_tree_that_is_missing_or_not_fit_is_a_reason_with_a_way_out() {
    let bench = bench();
    let missing = look(&bench, K9).await.unwrap_err();
    assert!(missing.starts_with("there is no ") && missing.contains("trees/ofed-6.1.0-9-amd64"), "{missing}");
    assert!(missing.contains("farrier collect --root /host --kernel 6.1.0-9-amd64"), "{missing}");

    write(&bench, "0x00000001");
    let root = &bench.services.definitions.root;
    let digest = look(&bench, K9).await.unwrap();
    fs::rename(root.join("trees/ofed-6.1.0-9-amd64"), root.join("trees/ofed-6.1.0-10-amd64")).unwrap();
    let other = look(&bench, K10).await.unwrap_err();
    assert!(other.contains("for kernel 6.1.0-10-amd64: it was built for 6.1.0-9-amd64: collect"), "{other}");

    write(&bench, "0x00000002");
    assert_ne!(look(&bench, K9).await.unwrap(), digest);
}

#[tokio::test]
async fn a_tree_goes_into_the_build_and_into_the_check() {
    let bench = bench();
    write(&bench, "0x0000abcd");
    let digest = look(&bench, K9).await.unwrap();
    let cell = cell(&bench, digest).await;
    let build = CellBuild::of(&bench.services, &cell).unwrap();
    let needed = fetch(&build).await.unwrap();
    let [entry] = needed.context.as_slice() else { panic!("{:?}", needed.context) };
    assert_eq!(entry.dest, "needs/mofed");
    assert!(entry.from.join(TABLE).is_file());
    let [table] = needed.tables.as_slice() else { panic!("{} tables", needed.tables.len()) };
    assert_eq!((table.image.as_str(), table.symbols.len()), ("mofed", 1));

    // The tree is collected again between plan and build.
    write(&bench, "0x0000ffff");
    let error = fetch(&build).await.err().unwrap();
    assert!(error.to_string().contains(" changed after the build was planned"), "{error}");
    assert!(!error.is_permanent());
}
