use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;
use crate::cache::tests::cache;

/// Makes a tree in the cache in the way header sets and toolchains are made.
async fn made(cache: &Cache, text: &'static str) -> PathBuf {
    let make = |entry: PathBuf| async move {
        let tree = entry.join(TREE);
        fs::create_dir_all(tree.join("usr/bin"))?;
        fs::write(tree.join("usr/bin/depmod"), text)?;
        fs::set_permissions(tree.join("usr/bin/depmod"), std::fs::Permissions::from_mode(0o755))?;
        symlink("usr/bin", tree.join("bin"))?;
        Ok(())
    };
    cache.get_or_make::<_, _, CacheError>("trees", "key", make).await.unwrap().join(TREE)
}

fn record_of(tree: &Path) -> TreeRecord {
    serde_json::from_slice(&fs::read(tree.parent().unwrap().join(RECORD)).unwrap()).unwrap()
}

fn quarantined(cache: &Cache) -> usize {
    fs::read_dir(cache.root().join("quarantine")).map_or(0, Iterator::count)
}

/// Changes a file and restores its content, as a step could do to hide a change.
fn touch(tree: &Path) {
    let file = tree.join("usr/bin/depmod");
    let (text, time) = (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().modified().unwrap());
    fs::write(&file, "evil").unwrap();
    fs::write(&file, text).unwrap();
    std::fs::File::open(&file).unwrap().set_modified(time).unwrap();
}

#[tokio::test]
async fn a_tree_is_intact_until_its_content_is_another() {
    let (_directory, cache) = cache();
    let tree = made(&cache, "good").await;
    let first = record_of(&tree);
    assert!(cache.is_tree_intact(&tree).await.unwrap());
    assert_eq!(record_of(&tree), first);
    touch(&tree);
    assert!(cache.is_tree_intact(&tree).await.unwrap());
    let second = record_of(&tree);
    assert!(second.metadata != first.metadata && second.content == first.content);
    // Restoring size and modification time does not hide changed content.
    let file = tree.join("usr/bin/depmod");
    let time = fs::metadata(&file).unwrap().modified().unwrap();
    fs::write(&file, "evil").unwrap();
    std::fs::File::open(&file).unwrap().set_modified(time).unwrap();
    assert!(!cache.is_tree_intact(&tree).await.unwrap());
    assert!(!tree.exists() && quarantined(&cache) == 1);
    // The tree is made again and gets a new record.
    let again = made(&cache, "good").await;
    assert_eq!((again.as_path(), fs::read_to_string(&file).unwrap()), (tree.as_path(), "good".to_owned()));
    assert!(cache.is_tree_intact(&tree).await.unwrap());
}

#[tokio::test]
async fn every_kind_of_change_is_seen() {
    let changes: [fn(&Path); 9] = [
        |tree| fs::write(tree.join("usr/bin/new"), "").unwrap(),
        |tree| fs::create_dir(tree.join("empty")).unwrap(),
        |tree| fs::remove_file(tree.join("usr/bin/depmod")).unwrap(),
        |tree| fs::rename(tree.join("usr/bin/depmod"), tree.join("usr/bin/modprobe")).unwrap(),
        |tree| {
            fs::set_permissions(tree.join("usr/bin/depmod"), std::fs::Permissions::from_mode(0o4755))
                .unwrap();
        },
        |tree| {
            fs::remove_file(tree.join("bin")).unwrap();
            symlink("usr/evil", tree.join("bin")).unwrap();
        },
        |tree| {
            fs::rename(tree.join("usr"), tree.join("real")).unwrap();
            symlink("real", tree.join("usr")).unwrap();
        },
        |tree| {
            rustix::fs::mkfifoat(rustix::fs::CWD, tree.join("usr/bin/fifo"), Mode::RUSR).unwrap();
        },
        |tree| {
            let elsewhere = tree.with_extension("elsewhere");
            fs::rename(tree, &elsewhere).unwrap();
            symlink(&elsewhere, tree).unwrap();
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let (_directory, cache) = cache();
        let tree = made(&cache, "good").await;
        change(&tree);
        assert!(!cache.is_tree_intact(&tree).await.unwrap(), "change {number} was not seen");
        assert!(!tree.exists() && quarantined(&cache) == 1, "change {number}");
    }
}

#[tokio::test]
async fn a_tree_without_a_record_is_made_anew() {
    let (_directory, cache) = cache();
    let tree = made(&cache, "good").await;
    for damage in ["", "{}", r#"{"metadata": 1}"#] {
        fs::write(tree.parent().unwrap().join(RECORD), damage).unwrap();
        assert!(!cache.is_tree_intact(&tree).await.unwrap(), "{damage}");
        made(&cache, "good").await;
    }
    fs::remove_file(tree.parent().unwrap().join(RECORD)).unwrap();
    assert!(!cache.is_tree_intact(&tree).await.unwrap());
    assert_eq!(quarantined(&cache), 4);
}

#[tokio::test]
async fn trees_elsewhere_and_of_other_kinds_are_not_compared() {
    let (directory, cache) = cache();
    let make = |entry: PathBuf| async move { Ok(fs::create_dir(entry.join(TREE))?) };
    let other = cache.get_or_make::<_, _, CacheError>("sources", "key", make).await.unwrap();
    assert!(!other.join(RECORD).exists());
    for tree in [other.join(TREE), directory.path().join("headers/key/tree")] {
        assert!(cache.is_tree_intact(&tree).await.unwrap());
    }
}

/// A copy of a whole cache has other inodes and change times.
#[tokio::test]
async fn a_copied_cache_is_intact() {
    let (directory, cache) = cache();
    let tree = made(&cache, "good").await;
    let copy = directory.path().join("copy");
    let copied = std::process::Command::new("cp").arg("-a").args([cache.root(), &copy]).status().unwrap();
    assert!(copied.success());
    let other = Cache::open(copy.clone()).unwrap();
    let other_tree = copy.join(tree.strip_prefix(cache.root()).unwrap());
    assert!(other.is_tree_intact(&other_tree).await.unwrap());
    assert_ne!(record_of(&other_tree).metadata, record_of(&tree).metadata);
}
