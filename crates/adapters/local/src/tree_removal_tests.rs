use std::{
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
};

use fs_err as fs;
use rustix::{
    fs::mkdirat,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

use super::*;

/// Nests directories, with a file in every hundredth one.
fn make_deep(directory: &Path, levels: u32) {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut here = open(directory, flags, Mode::empty()).unwrap();
    for level in 0..levels {
        mkdirat(&here, "d", Mode::RWXU).unwrap();
        if level % 100 == 0 {
            openat(&here, "f", OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR).unwrap();
        }
        here = openat(&here, "d", flags, Mode::empty()).unwrap();
    }
}

fn modes(paths: &[&Path], mode: u32) {
    for path in paths {
        fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
}

#[test]
fn depth_costs_neither_stack_nor_descriptors() {
    let place = tempfile::tempdir().unwrap();
    let tree = place.path().join("tree");
    fs::create_dir(&tree).unwrap();
    make_deep(&tree, 3_000);
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(32), ..limit }).unwrap();
    let remover = std::thread::Builder::new().stack_size(128 << 10);
    remover.spawn(move || remove_tree(&tree)).unwrap().join().unwrap().unwrap();
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
}

/// These modes make removals fail for ordinary users; root ignores them.
#[test]
fn directories_that_deny_themselves_are_opened_and_links_are_not_followed() {
    let place = tempfile::tempdir().unwrap();
    let (tree, outside) = (place.path().join("tree"), place.path().join("outside"));
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("kept"), "x").unwrap();
    modes(&[&outside], 0o500);
    let mut here = tree.clone();
    let mut made = Vec::new();
    for _ in 0..3 * MAX_OPEN {
        here.push("d");
        fs::create_dir_all(&here).unwrap();
        symlink(&outside, here.join("link")).unwrap();
        symlink("d", here.join(format!("{MOVED}0"))).unwrap();
        made.push(here.clone());
    }
    // Entries of each kind with the names that the removal itself would use.
    symlink(&outside, tree.join(format!("{MOVED}0"))).unwrap();
    fs::create_dir_all(tree.join(format!("{MOVED}1/full"))).unwrap();
    fs::write(tree.join(format!("{MOVED}2")), "").unwrap();
    fs::create_dir(tree.join(format!("{MOVED}3"))).unwrap();
    made.reverse();
    modes(&made.iter().map(PathBuf::as_path).collect::<Vec<_>>(), 0);
    modes(&[&tree], 0);
    remove_tree(&tree).unwrap();
    assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "x");
    assert_eq!(fs::metadata(&outside).unwrap().permissions().mode() & 0o777, 0o500);
    assert!(!tree.exists());
}

#[test]
fn a_link_or_file_in_the_trees_place_goes_alone() {
    let place = tempfile::tempdir().unwrap();
    let (outside, link, file) =
        (place.path().join("outside"), place.path().join("l"), place.path().join("f"));
    fs::create_dir(&outside).unwrap();
    fs::write(&file, "x").unwrap();
    symlink(&outside, &link).unwrap();
    remove_tree(&link).unwrap();
    remove_tree(&file).unwrap();
    assert!(outside.exists() && link.symlink_metadata().is_err() && !file.exists());
    assert_eq!(remove_tree(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_wide_tree_with_names_of_any_bytes_goes() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};
    let place = tempfile::tempdir().unwrap();
    let tree = place.path().join("tree");
    for first in 0..20 {
        let directory = tree.join(format!("{first}")).join(OsStr::from_bytes(b"\xff\n"));
        fs::create_dir_all(&directory).unwrap();
        for second in 0..50 {
            fs::create_dir(directory.join(format!("directory-{second}"))).unwrap();
            fs::write(directory.join(format!("file-{second}")), "").unwrap();
        }
    }
    remove_tree(&tree).unwrap();
    assert!(!tree.exists());
}
