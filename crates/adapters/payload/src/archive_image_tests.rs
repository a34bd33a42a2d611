use std::io::Cursor;

use farrier_core::image::Digest;

use super::*;

enum Is<'a> {
    File(&'a str),
    Link(&'a str),
    Symlink(&'a str),
}

fn layer(entries: &[(&str, Is<'_>)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, is) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(0);
        // Write the name directly: `append_data` refuses hostile names.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        match is {
            Is::File(content) => {
                header.set_size(content.len() as u64);
                header.set_cksum();
                builder.append(&header, content.as_bytes()).unwrap();
            }
            Is::Link(target) | Is::Symlink(target) => {
                let symbolic = matches!(is, Is::Symlink(_));
                header.set_entry_type(if symbolic { EntryType::Symlink } else { EntryType::Link });
                header.set_link_name_literal(target).unwrap();
                header.set_cksum();
                builder.append(&header, io::empty()).unwrap();
            }
        }
    }
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    compress(Cursor::new(bytes), &mut out).unwrap();
    out
}

/// Makes a `docker save` archive of these layers, the second one compressed as in containerd's store.
fn archive(directory: &Path, layers: &[Vec<u8>]) -> PathBuf {
    let ids: Vec<_> = layers.iter().map(|tar| Digest::of(tar).to_string()).collect();
    let config = serde_json::json!({"rootfs": {"type": "layers", "diff_ids": ids}}).to_string();
    let names: Vec<_> = (0..layers.len()).map(|number| format!("{number}/layer.tar")).collect();
    let list = serde_json::json!([{"Config": "c.json", "RepoTags": null, "Layers": names}]).to_string();
    let path = directory.join("image.tar");
    let mut builder = tar::Builder::new(File::create(&path).unwrap());
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        builder.append_data(&mut header, name, bytes).unwrap();
    };
    for (number, (name, tar)) in names.iter().zip(layers).enumerate() {
        if number == 1 { add(name, &gzip(tar)) } else { add(name, tar) }
    }
    add("c.json", config.as_bytes());
    add("manifest.json", list.as_bytes());
    path
}

fn modules(layers: &[Vec<u8>]) -> Vec<(String, String)> {
    let directory = tempfile::tempdir().unwrap();
    let image = archive(directory.path(), layers);
    let dest = directory.path().join("dest");
    fs::create_dir(&dest).unwrap();
    let count = extract_modules(&image, &dest).unwrap();
    let mut found: Vec<_> = walkdir::WalkDir::new(&dest)
        .into_iter()
        .map(Result::unwrap)
        .filter(|entry| entry.file_type().is_file())
        .map(|entry| {
            let path = entry.path().strip_prefix(&dest).unwrap().display().to_string();
            (path, fs::read_to_string(entry.path()).unwrap())
        })
        .collect();
    found.sort();
    assert_eq!(found.len(), count);
    // Only the archive and the destination exist: nothing was written elsewhere.
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    found
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
}

#[test]
fn layers_are_compressed_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let layers = [layer(&[("a", Is::File("1"))]), layer(&[("b", Is::File("2"))])];
    let image = archive(directory.path(), &layers);
    let work = directory.path().join("work");
    fs::create_dir(&work).unwrap();
    let imported = import_docker_archive(&image, &work).unwrap();
    assert_eq!(imported.layers.len(), 2);
    for ((path, layer), tar) in imported.layers.iter().zip(&layers) {
        let bytes = fs::read(path).unwrap();
        assert_eq!(bytes, gzip(tar));
        assert_eq!((Digest::of(&bytes), Digest::of(tar)), (layer.digest.clone(), layer.diff_id.clone()));
    }
    assert_eq!(fs::read_dir(&work).unwrap().count(), 2);

    // Change one byte in a layer.
    let mut bytes = fs::read(&image).unwrap();
    let at = bytes.windows(1).position(|w| w == b"1").unwrap();
    bytes[600.max(at)] ^= 1;
    fs::write(&image, bytes).unwrap();
    assert!(import_docker_archive(&image, &work).is_err());
}

#[test]
fn upper_layers_replace_and_delete() {
    let found = modules(&[
        layer(&[
            ("usr/lib/modules/6.1/a.ko", Is::File("a1")),
            ("usr/lib/modules/6.1/b.ko.xz", Is::File("b1")),
            ("usr/lib/modules/6.1/notes.txt", Is::File("no module")),
            ("lib", Is::Symlink("usr/lib")),
            ("opt/x/lib/modules/6.1/c.ko", Is::File("c1")),
            ("usr/lib/modules/6.0/old.ko", Is::File("old")),
            ("home/d.ko", Is::File("elsewhere")),
        ]),
        layer(&[
            ("lib/modules/6.1/a.ko", Is::File("a2")),
            ("lib/modules/6.1/.wh.b.ko.xz", Is::File("")),
            ("lib/modules/.wh.6.0", Is::File("")),
            ("lib/modules/6.1/e.ko", Is::Link("lib/modules/6.1/a.ko")),
            ("lib/modules/6.1/f.ko", Is::Symlink("a.ko")),
            // The whiteout comes after the directory's own content, which it must not delete.
            ("opt/x/lib/modules/6.1/g.ko", Is::File("g2")),
            ("opt/x/lib/modules/6.1/.wh..wh..opq", Is::File("")),
        ]),
    ]);
    let expected = [
        ("lib/modules/6.1/a.ko", "a2"),
        ("lib/modules/6.1/e.ko", "a2"),
        ("opt/x/lib/modules/6.1/g.ko", "g2"),
    ];
    assert_eq!(found, pairs(&expected));
}

#[test]
fn hostile_paths_stay_inside() {
    let found = modules(&[layer(&[
        ("../../lib/modules/x.ko", Is::File("out")),
        ("lib/modules/6.1/a.ko", Is::File("a")),
        (".wh...", Is::File("")),
        (".wh..", Is::File("")),
        (".wh.", Is::File("")),
        ("lib/modules/6.1/b.ko", Is::Link("../../../../etc/passwd")),
        ("lib/modules/6.1/c.ko", Is::Link("/etc/passwd")),
        ("lib/modules/6.2", Is::Symlink("/etc")),
        ("lib/modules/6.2/d.ko", Is::File("d")),
    ])]);
    assert_eq!(found, pairs(&[("lib/modules/6.1/a.ko", "a"), ("lib/modules/6.2/d.ko", "d")]));
}

#[test]
fn a_file_in_the_way_of_a_directory() {
    let found = modules(&[
        layer(&[("lib/modules/x.ko", Is::File("file"))]),
        layer(&[("lib/modules/x.ko/y.ko", Is::File("inside"))]),
    ]);
    assert_eq!(found, pairs(&[("lib/modules/x.ko/y.ko", "inside")]));
}

/// A layer of a few megabytes can have millions of empty files.
#[test]
fn the_number_of_files_is_limited() {
    let dest = tempfile::tempdir().unwrap();
    let keep = |path: &Path| if has_module_name(path) { Keep::Name } else { Keep::Nothing };
    let mut stack = Stack { dest: dest.path(), keep: &keep, budget: 0, files: 2, written: HashSet::new() };
    let [a, b, c] = ["a.ko", "b.ko", "c.ko"].map(|name| (name, Is::File("")));
    stack.apply(&layer(&[a, ("readme", Is::File("")), b])[..]).unwrap();
    let error = stack.apply(&layer(&[c])[..]).unwrap_err().to_string();
    assert_eq!(error, "the image has more than 500000 modules and firmware files");
}
