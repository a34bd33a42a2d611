use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use super::*;
use crate::write_payload_layer;

const OFED: &str = "usr/src/ofa_kernel";

/// Creates OFED's layout: a tree for one kernel, and the link `default` to it.
fn ofed_tree(default: &str) -> tempfile::TempDir {
    let tree = tempfile::tempdir().unwrap();
    let kernel = tree.path().join(OFED).join("x86_64/6.1.0-1-amd64");
    fs::create_dir_all(kernel.join("include/rdma")).unwrap();
    fs::write(kernel.join("Module.symvers"), "0x00000001\tib_x\tdrivers/ib_core\tEXPORT_SYMBOL\t\n").unwrap();
    fs::write(kernel.join("include/rdma/peer_mem.h"), "int x;\n").unwrap();
    fs::write(kernel.join("configure"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(kernel.join("configure"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink(default, tree.path().join(OFED).join("default")).unwrap();
    fs::create_dir_all(tree.path().join("lib/modules/6.1.0-1-amd64/extra")).unwrap();
    fs::write(tree.path().join("lib/modules/6.1.0-1-amd64/extra/a.ko"), "module").unwrap();
    tree
}

fn expose_ofed(tree: &Path) -> Result<Exposed, PayloadError> {
    expose(tree, &["/usr/src/ofa_kernel"])
}

fn link_target(tree: &Path) -> PathBuf {
    fs::read_link(tree.join(OFED).join("default")).unwrap()
}

#[test]
fn absolute_links_become_relative_to_their_place() {
    for default in [
        "/usr/src/ofa_kernel/x86_64/6.1.0-1-amd64",
        "/out/usr/src/ofa_kernel/x86_64/6.1.0-1-amd64",
        "/usr/lib/../src/ofa_kernel/./x86_64/6.1.0-1-amd64",
        "x86_64/6.1.0-1-amd64",
    ] {
        let tree = ofed_tree(default);
        let found = expose_ofed(tree.path()).unwrap();
        assert_eq!(link_target(tree.path()), Path::new("x86_64/6.1.0-1-amd64"), "{default}");
        assert_eq!(found.paths, [Path::new(OFED)]);
        assert_eq!(found.tables, [Path::new(OFED).join("x86_64/6.1.0-1-amd64/Module.symvers")]);
        assert_eq!(found, read_exposed(tree.path(), &["/usr/src/ofa_*"]).unwrap());
    }
    // A link to the kernel's build tree is allowed: builds of dependents have that tree at the same path.
    let tree = ofed_tree("/lib/modules/6.1.0-1-amd64/build");
    expose_ofed(tree.path()).unwrap();
    assert_eq!(link_target(tree.path()), Path::new("../../../lib/modules/6.1.0-1-amd64/build"));
}

#[test]
fn links_out_of_the_payload_are_refused_with_their_path() {
    for default in ["/../etc/passwd", "../../../../etc/passwd"] {
        let error = expose_ofed(ofed_tree(default).path()).unwrap_err();
        let expected =
            format!("exposed link /{OFED}/default -> {default}: its target is outside the payload");
        assert_eq!(error.to_string(), expected);
        assert!(error.is_permanent() && error.hint().is_some());
    }
    let tree = ofed_tree("x86_64");
    let error = expose(tree.path(), &["/usr/src/ofa_kernel/default"]).unwrap_err();
    assert!(error.to_string().ends_with("the link is exposed, but its target is not"), "{error}");
}

/// A hole takes no disk space, but tables are read into memory.
#[test]
fn symbol_tables_that_are_too_large_are_not_exposed_or_read() {
    let tree = ofed_tree("x86_64");
    let table = Path::new(OFED).join("x86_64/6.1.0-1-amd64/Module.symvers");
    let file = fs::File::options().write(true).open(tree.path().join(&table)).unwrap();
    file.set_len(MAX_TABLES).unwrap();
    expose_ofed(tree.path()).unwrap();
    fs::write(tree.path().join(OFED).join("Module.symvers"), "x").unwrap();
    let error = expose_ofed(tree.path()).unwrap_err();
    assert!(error.to_string().ends_with("all exposed tables together are larger than 64 MiB"), "{error}");
    assert!(error.is_permanent() && error.hint().is_some());
    assert!(matches!(read_symbol_tables(tree.path()), Err(PayloadError::SymbolTables { .. })));
}

#[test]
fn missing_paths_are_reported_with_their_neighbors() {
    let tree = ofed_tree("x86_64");
    let missing = |paths: &[&str]| expose(tree.path(), paths).map_err(|error| error.to_string()).unwrap_err();
    let told = [
        missing(&["/usr/src/nvidia-*", "/usr/src/ofa_kernel"]),
        missing(&["/usr/src/ofa_kernel/include", "/opt/x"]),
        missing(&["/opt/mellanox/headers"]),
        missing(&["/lib/modules"]),
    ];
    insta::assert_snapshot!(told.join("\n"), @r"
    the payload has no /usr/src/nvidia-*, which the definition exposes; /usr/src has ofa_kernel
    the payload has no /usr/src/ofa_kernel/include, /opt/x, which the definition exposes; /usr/src/ofa_kernel has default, x86_64
    the payload has no /opt/mellanox/headers, which the definition exposes; / has lib, usr
    exposed path /lib/modules lies in a directory that is a link on usr-merged systems
    ");
}

#[test]
fn the_digest_is_that_of_the_exposed_content() {
    type Change = fn(&Path);
    let first = expose_ofed(ofed_tree("x86_64").path()).unwrap().digest;
    let same: [Change; 3] = [
        |tree| fs::write(tree.join("lib/modules/6.1.0-1-amd64/extra/a.ko"), "other").unwrap(),
        |tree| {
            let header = tree.join(OFED).join("x86_64/6.1.0-1-amd64/include/rdma/peer_mem.h");
            fs::set_permissions(header, fs::Permissions::from_mode(0o600)).unwrap();
        },
        |tree| fs::create_dir(tree.join("usr/src/other")).unwrap(),
    ];
    let other: [Change; 4] = [
        |tree| fs::write(tree.join(OFED).join("x86_64/6.1.0-1-amd64/Module.symvers"), "").unwrap(),
        |tree| {
            let script = tree.join(OFED).join("x86_64/6.1.0-1-amd64/configure");
            fs::set_permissions(script, fs::Permissions::from_mode(0o644)).unwrap();
        },
        |tree| fs::write(tree.join(OFED).join("new"), "").unwrap(),
        |tree| {
            fs::remove_file(tree.join(OFED).join("default")).unwrap();
            symlink("./x86_64", tree.join(OFED).join("default")).unwrap();
        },
    ];
    let digest_after = |change: Change| {
        let tree = ofed_tree("x86_64");
        change(tree.path());
        expose_ofed(tree.path()).unwrap().digest
    };
    for change in same {
        assert_eq!(digest_after(change), first);
    }
    for change in other {
        assert_ne!(digest_after(change), first);
    }
}

#[test]
fn a_layer_gives_the_exposed_tree_and_nothing_else() {
    for merged in [false, true] {
        let tree = ofed_tree("/usr/src/ofa_kernel/x86_64/6.1.0-1-amd64");
        let digest = expose_ofed(tree.path()).unwrap().digest;
        let work = tempfile::tempdir().unwrap();
        let (layer, headers, modules) =
            (work.path().join("layer"), work.path().join("headers"), work.path().join("modules"));
        write_payload_layer(tree.path(), merged, &layer).unwrap();
        fs::create_dir(&headers).unwrap();
        fs::create_dir(&modules).unwrap();
        let patterns = ["/usr/src/ofa_kernel"];
        unpack_exposed(&layer, &patterns, &headers).unwrap();
        assert_eq!(read_exposed(&headers, &patterns).unwrap().digest, digest);
        assert!(!headers.join("lib").exists() && !headers.join("usr/lib").exists());
        let tables = read_symbol_tables(&headers).unwrap();
        assert_eq!(tables.len(), 1);
        assert!(tables[0].1.contains("ib_x"));

        unpack_modules(&layer, "6.1.0-1-amd64", &modules).unwrap();
        let found = WalkDir::new(&modules).into_iter().filter_map(Result::ok);
        let found: Vec<_> = found.filter(|entry| entry.file_type().is_file()).collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].file_name(), "a.ko");
    }
}

#[test]
fn paths_below_a_pattern_match_it() {
    assert!(is_at_or_below(Path::new("usr/src/nvidia-1/x/y"), "/usr/src/nvidia-*"));
    assert!(!is_at_or_below(Path::new("usr/src"), "/usr/src/nvidia-*"));
}
