//! Tests of layers and packages that are unpacked on top of each other.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use proptest::prelude::*;
use tempfile::TempDir;

use super::{
    tests::{Item, tarball},
    *,
};

/// Unpacks the layers into a directory nested in another one, so that the test would notice an escape.
fn image(layers: &[&[Item<'_>]], limits: Limits) -> (TempDir, Result<(), UnpackError>) {
    let outer = tempfile::tempdir().unwrap();
    let (work, dest) = (tempfile::tempdir().unwrap(), outer.path().join("a/dest"));
    std::fs::create_dir_all(&dest).unwrap();
    let files: Vec<PathBuf> = (0..layers.len()).map(|n| work.path().join(n.to_string())).collect();
    for (file, items) in files.iter().zip(layers) {
        std::fs::write(file, tarball(items)).unwrap();
    }
    let result = unpack_image(&files, &dest, &Options { limits, ..Options::default() });
    for (directory, only) in [(outer.path().to_owned(), "a"), (outer.path().join("a"), "dest")] {
        let names: Vec<_> = std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, [only]);
    }
    (outer, result)
}

fn made(layers: &[&[Item<'_>]]) -> (TempDir, PathBuf) {
    let (outer, result) = image(layers, Limits::default());
    result.unwrap();
    let dest = outer.path().join("a/dest");
    (outer, dest)
}

/// Lists every path of a tree, with each file's content and each link's target.
fn listing(dest: &Path) -> Vec<String> {
    let found = walkdir::WalkDir::new(dest).min_depth(1).sort_by_file_name();
    let line = |entry: walkdir::DirEntry| {
        let name = entry.path().strip_prefix(dest).unwrap().display().to_string();
        match entry.file_type() {
            kind if kind.is_dir() => format!("{name}/"),
            kind if kind.is_file() => format!("{name}={}", std::fs::read_to_string(entry.path()).unwrap()),
            _ => format!("{name}->{}", std::fs::read_link(entry.path()).unwrap().display()),
        }
    };
    found.into_iter().map(|entry| line(entry.unwrap())).collect()
}

#[test]
fn upper_layers_replace_and_delete() {
    let (_outer, dest) = made(&[
        &[
            Item::Dir("bin/", 0o755),
            Item::File("bin/a", 0o755, b"a1"),
            Item::File("bin/b", 0o755, b"b1"),
            Item::File("gone/deep/x", 0o644, b"x"),
            Item::File("opaque/old/x", 0o644, b"x"),
            Item::File("opaque/kept/old", 0o644, b"x"),
            Item::File("partly/old", 0o644, b"x"),
            Item::File("to-directory", 0o644, b"x"),
            Item::File("to-file/x", 0o644, b"x"),
            Item::Symlink("link-to-directory", "bin"),
        ],
        &[
            Item::File("bin/a", 0o755, b"a2"),
            Item::File("bin/.wh.b", 0o644, b""),
            Item::Hardlink("bin/same", "bin/a"),
            Item::File(".wh.gone", 0o644, b""),
            // The whiteout keeps this layer's own entries, both before and after it.
            Item::File("opaque/kept/new", 0o644, b"n"),
            Item::File("opaque/.wh..wh..opq", 0o644, b""),
            Item::File("opaque/later", 0o644, b"n"),
            Item::File("partly/new", 0o644, b"n"),
            Item::File(".wh.partly", 0o644, b""),
            Item::Dir("to-directory/", 0o755),
            Item::File("to-file", 0o644, b"f"),
            Item::Dir("link-to-directory/", 0o755),
            Item::File(".wh.absent", 0o644, b""),
            Item::File(".wh.", 0o644, b"no whiteout"),
        ],
    ]);
    assert_eq!(
        listing(&dest),
        [
            ".wh.=no whiteout",
            "bin/",
            "bin/a=a2",
            "bin/same=a2",
            "link-to-directory/",
            "opaque/",
            "opaque/kept/",
            "opaque/kept/new=n",
            "opaque/later=n",
            "partly/",
            "partly/new=n",
            "to-directory/",
            "to-file=f",
        ]
    );
}

#[test]
fn modes_stay_without_set_id_bits_and_devices_are_left_out() {
    let (_outer, dest) = made(&[
        &[Item::File("dev/null", 0o644, b"in the way"), Item::File("etc/shadow", 0o000, b"")],
        &[
            Item::Special("dev/null", EntryType::Char),
            Item::Special("pipe", EntryType::Fifo),
            Item::Dir("tmp/", 0o1777),
            Item::Dir("closed/", 0o000),
            Item::File("bin/su", 0o6755, b""),
            Item::Symlink("a", "bin/su"),
            Item::Hardlink("b", "a"),
        ],
    ]);
    assert_eq!(
        listing(&dest),
        ["a->bin/su", "b->bin/su", "bin/", "bin/su=", "closed/", "dev/", "etc/", "etc/shadow=", "tmp/"]
    );
    let mode = |name: &str| std::fs::metadata(dest.join(name)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(["bin/su", "tmp", "closed", "etc/shadow"].map(mode), [0o755, 0o1777, 0o700, 0o400]);
    let user = std::fs::metadata(dest.parent().unwrap()).unwrap().uid();
    assert_eq!(std::fs::metadata(dest.join("bin/su")).unwrap().uid(), user);
}

#[test]
fn ways_lead_through_links_and_never_out() {
    let (_outer, dest) = made(&[
        &[
            Item::Symlink("lib", "usr/lib"),
            Item::Symlink("up", "../../../.."),
            Item::Symlink("abs", "/etc/x"),
            Item::Symlink("usr/back", "../abs/./sub"),
        ],
        &[
            Item::File("lib/a", 0o644, b"1"),
            Item::File("up/b", 0o644, b"2"),
            Item::File("/abs/c", 0o644, b"3"),
            Item::File("usr/back/d", 0o644, b"4"),
            Item::File("lib/.wh.gone", 0o644, b""),
            Item::Hardlink("up/up/e", "abs/c"),
        ],
        // The directory replaces the link. Files written through the link stay where they are.
        &[Item::Dir("lib/", 0o755), Item::File("lib/f", 0o644, b"6")],
    ]);
    assert_eq!(
        listing(&dest),
        [
            "abs->/etc/x",
            "b=2",
            "e=3",
            "etc/",
            "etc/x/",
            "etc/x/c=3",
            "etc/x/sub/",
            "etc/x/sub/d=4",
            "lib/",
            "lib/f=6",
            "up->../../../..",
            "usr/",
            "usr/back->../abs/./sub",
            "usr/lib/",
            "usr/lib/a=1",
        ]
    );
    let refused: [&[Item<'_>]; 4] = [
        &[Item::File("../evil", 0o644, b"x")],
        &[Item::File("a/../../evil", 0o644, b"x")],
        &[Item::Symlink("x", "y"), Item::Symlink("y", "x"), Item::File("x/evil", 0o644, b"x")],
        &[Item::Hardlink("stolen", "../../etc/passwd")],
    ];
    for items in refused {
        image(&[items], Limits::default()).1.unwrap_err();
    }
}

#[test]
fn all_layers_have_one_budget() {
    let layer: &[Item<'_>] = &[Item::File("a", 0o644, &[0; 1000])];
    let limits = Limits { entries: 2, bytes: 2000, depth: 3 };
    image(&[layer, layer], limits).1.unwrap();
    for tight in [Limits { entries: 1, ..limits }, Limits { bytes: 1999, ..limits }] {
        let result = image(&[layer, layer], tight).1;
        assert!(matches!(result, Err(UnpackError::Limit(_))), "{result:?}");
    }
    // A path through a link is held to the same depth limit.
    let deep: &[Item<'_>] = &[Item::Symlink("l", "a/b/c"), Item::File("l/d/e", 0o644, b"")];
    assert!(matches!(image(&[deep], limits).1, Err(UnpackError::Limit(_))));
}

#[test]
fn packages_share_directories_that_are_links() {
    let outer = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("usr/lib", outer.path().join("lib")).unwrap();
    let options = Options { mode: UnpackMode::Package, ..Options::default() };
    let package = |items: &[Item<'_>]| unpack_stream(&tarball(items)[..], outer.path(), &options);
    package(&[
        Item::Dir("./lib/", 0o755),
        Item::Dir("./lib/x/", 0o750),
        Item::File("./lib/x/a", 0o644, b"1"),
    ])
    .unwrap();
    package(&[Item::Symlink("./lib", "usr/lib"), Item::File("./usr/lib/x/a", 0o644, b"2")]).unwrap();
    assert_eq!(listing(outer.path()), ["lib->usr/lib", "usr/", "usr/lib/", "usr/lib/x/", "usr/lib/x/a=2"]);
    let mode = std::fs::metadata(outer.path().join("usr/lib/x")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o750);
    assert!(matches!(package(&[Item::Special("./x", EntryType::Char)]), Err(UnpackError::Kind(..))));
    // Packages have no whiteouts.
    package(&[Item::File("./usr/.wh.lib", 0o644, b"")]).unwrap();
    assert!(outer.path().join("usr/lib/x/a").exists());
}

proptest! {
    #[test]
    fn no_layers_lead_out(steps in proptest::collection::vec((0_u8..6, 0_usize..9, 0_usize..9), 0..30)) {
        const NAMES: [&str; 9] = ["a", "a/b", "b", "b/a/c", "./a/", "b/.wh.a", "a/.wh..wh..opq", "/c", "a/b/d"];
        const TARGETS: [&str; 9] = ["a", "..", "../..", "/", "b/a", "../../../../x", "/a/b", ".", "c"];
        let items: Vec<Item<'_>> = steps
            .iter()
            .map(|(kind, name, target)| match kind {
                0 | 1 => Item::File(NAMES[*name], 0o644, b"x"),
                2 => Item::Dir(NAMES[*name], 0o755),
                3 | 4 => Item::Symlink(NAMES[*name], TARGETS[*target]),
                _ => Item::Hardlink(NAMES[*name], NAMES[*target]),
            })
            .collect();
        let (lower, upper) = items.split_at(items.len() / 2);
        // `image` asserts that nothing appeared next to the tree.
        let _ = image(&[lower, upper], Limits::default());
    }
}
