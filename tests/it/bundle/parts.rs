//! Bundles in parts, from pipes, and after others unpacked them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use farrier_bundle as bundle;
use farrier_bundle::{Bundle, BundleError, Content, ContentRequest};

use super::{Silent, Site, farrier, filled, run, text};

/// Size of a part: the bundle of `filled` has five of them.
const SIZE: u64 = 300_000;

async fn export(
    site: &Site,
    contents: &[Content],
    to: &Path,
    part_size: u64,
) -> Result<bundle::Exported, BundleError> {
    let contents = bundle::with_referrers(contents.to_vec(), &site.location, site.registry.as_ref());
    let wanted = |content: Content| ContentRequest {
        repository: site.location.repository(&content.repository).unwrap(),
        registry: Arc::clone(&site.registry),
        content,
    };
    let wanted: Vec<ContentRequest> = contents.await.unwrap().into_iter().map(wanted).collect();
    let collection = bundle::collect(&wanted, "a.example/drivers", None).await.unwrap();
    bundle::export(collection, to, Some(part_size), Arc::new(Silent)).await
}

#[tokio::test]
async fn parts_join_to_the_bundle_and_import_in_any_order() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let (whole, split) = (directory.path().join("whole"), directory.path().join("parts/site.bundle"));
    fs::create_dir(split.parent().unwrap()).unwrap();
    from.export(&contents, &whole, None).await.unwrap();
    let whole = fs::read(&whole).unwrap();
    export(&from, &contents, &split, SIZE).await.unwrap();
    let mut parts: Vec<PathBuf> =
        fs::read_dir(split.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect();
    parts.sort();
    assert!(parts.len() > 3 && parts[0].ends_with("site.bundle.001"), "{parts:?}");
    assert!(parts.iter().all(|part| fs::metadata(part).unwrap().len() <= SIZE));
    let joined: Vec<u8> = parts.iter().flat_map(|part| fs::read(part).unwrap()).collect();
    assert!(joined == whole);

    let opened =
        |paths: &[PathBuf]| Bundle::receive(paths, &[], None).and_then(|(bundle, _)| bundle.verify(&Silent));
    let reversed: Vec<PathBuf> = parts.iter().rev().cloned().collect();
    let folder = split.parent().unwrap().to_owned();
    for given in [&reversed[..], &parts[2..3], std::slice::from_ref(&split), std::slice::from_ref(&folder)] {
        assert!(opened(given).is_ok(), "{given:?}: {:?}", opened(given).err());
    }
    let error = opened(&[parts[0].clone(), parts[2].clone()]).err().unwrap();
    assert!(error.to_string().contains("part 2 is missing"), "{error}");
    let error = opened(&parts[..2]).err().unwrap();
    assert!(error.to_string().contains("is truncated"), "{error}");

    let to = Site::start();
    let registry = to.location.to_string();
    let names: Vec<&str> = reversed.iter().map(|part| part.to_str().unwrap()).collect();
    let words = ["bundle", "import", "--insecure-no-signature", "--registry", &registry];
    for _ in 0..2 {
        let output = farrier(&[&words[..], &names].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert!(to.manifest("two", "2").await.is_some());

    // An interrupted export goes on in the part that it wrote.
    let again = directory.path().join("again");
    let partial = |number: usize| directory.path().join(format!("again.partial.{number:03}"));
    fs::copy(&parts[0], partial(1)).unwrap();
    fs::copy(&parts[1], partial(2)).unwrap();
    fs::write(partial(3), &fs::read(&parts[2]).unwrap()[..1000]).unwrap();
    let exported = export(&from, &contents, &again, SIZE).await.unwrap();
    assert!(exported.resumed_blobs > 0, "{exported:?}");
    for (number, part) in (1..).zip(&parts) {
        let resumed = directory.path().join(format!("again.{number:03}"));
        assert!(fs::read(&resumed).unwrap() == fs::read(part).unwrap(), "part {number}");
    }
    assert!(!partial(1).exists());
}

/// An export that fails between two renames continues, because the first part is renamed last.
#[tokio::test]
async fn an_export_goes_on_that_had_renamed_some_parts() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    let obstacle = directory.path().join("site.bundle.002");
    fs::create_dir(&obstacle).unwrap();
    assert!(export(&from, &contents, &file, SIZE).await.is_err());
    assert!(directory.path().join("site.bundle.003").exists());
    fs::remove_dir(&obstacle).unwrap();
    let exported = export(&from, &contents, &file, SIZE).await.unwrap();
    assert!(exported.resumed_blobs > 0, "{exported:?}");
    assert_eq!(*Bundle::open(&file).unwrap().verify(&Silent).unwrap().bundle().id(), exported.id);

    let error = export(&from, &contents, &directory.path().join("tiny"), 500).await.unwrap_err();
    assert!(error.to_string().contains("make more than 999 parts"), "{error}");
}

#[tokio::test]
async fn a_pipe_a_plain_tar_and_an_unpacked_layout_are_the_same_bundle() {
    let (from, contents, _) = filled().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.bundle");
    from.export(&contents, &file, None).await.unwrap();
    let id = Bundle::open(&file).unwrap().id().clone();
    let (tar, layout) = (directory.path().join("site.tar"), directory.path().join("layout"));
    fs::create_dir(&layout).unwrap();
    run("zstd", &["--quiet", "-d", file.to_str().unwrap(), "-o", tar.to_str().unwrap()]);
    run("tar", &["-xf", tar.to_str().unwrap(), "-C", layout.to_str().unwrap()]);
    let sorted = directory.path().join("sorted.tar");
    run("tar", &["-cf", sorted.to_str().unwrap(), "--sort=name", "-C", layout.to_str().unwrap(), "."]);
    for path in [&tar, &sorted, &layout] {
        let (received, _) = Bundle::receive(std::slice::from_ref(path), &[], None).unwrap();
        assert_eq!(*received.verify(&Silent).unwrap().bundle().id(), id, "{}", path.display());
    }
    for path in [&file, &tar] {
        let to = Site::start();
        let mut import = Command::new(env!("CARGO_BIN_EXE_farrier"));
        import.args(["bundle", "import", "-", "--insecure-no-signature", "--registry"]);
        import.arg(to.location.to_string()).env("XDG_CACHE_HOME", directory.path());
        import.env("DOCKER_CONFIG", directory.path());
        let output = import.stdin(Stdio::from(fs::File::open(path).unwrap())).output().unwrap();
        assert!(output.status.success(), "{}: {}", path.display(), text(&output.stderr));
        assert!(to.manifest("two", "2").await.is_some());
    }

    // A scanner that repairs or cuts a file is found out.
    let blob = layout.join("blobs/sha256").join(contents[0].digest.hex());
    fs::write(&blob, "cleaned").unwrap();
    let error = Bundle::receive(&[layout], &[], None).unwrap_err();
    assert!(
        matches!(&error, BundleError::NotABundle(_, why) if why.contains(contents[0].digest.hex())),
        "{error}"
    );
}
