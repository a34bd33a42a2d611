use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
};

use farrier_core::{facts::media_type, image::Digest};

use super::*;

fn index(names: &[&str]) -> ImageIndex {
    let manifests = names.iter().map(|name| Descriptor {
        artifact_type: None,
        media_type: media_type::OCI_MANIFEST.to_owned(),
        digest: Digest::of(name.as_bytes()),
        size: 1,
        platform: None,
        annotations: BTreeMap::from([(annotations::REF_NAME.to_owned(), (*name).to_owned())]),
    });
    ImageIndex { manifests: manifests.collect(), ..ImageIndex::empty() }
}

fn chosen(index: &ImageIndex, wanted: Option<&str>) -> Result<String, String> {
    let message = |error: CliError| error.render().lines().next().unwrap()["error: ".len()..].to_owned();
    let descriptor = choose(index, wanted).map_err(message)?;
    Ok(descriptor.annotations[annotations::REF_NAME].clone())
}

#[test]
fn an_image_of_a_layout_goes_by_its_name_its_tag_or_its_digest() {
    let two = index(&["hello:1.0", "mofed:25.10"]);
    assert_eq!(chosen(&two, Some("hello:1.0")).unwrap(), "hello:1.0");
    assert_eq!(chosen(&two, Some("25.10")).unwrap(), "mofed:25.10");
    let digest = Digest::of(b"mofed:25.10").to_string();
    assert_eq!(chosen(&two, Some(&digest)).unwrap(), "mofed:25.10");
    assert_eq!(chosen(&index(&["latest"]), None).unwrap(), "latest");
    let mut with_report = index(&["latest", "report"]);
    with_report.manifests[1].artifact_type = Some("application/vnd.acme.report".to_owned());
    assert_eq!(chosen(&with_report, None).unwrap(), "latest");
    insta::assert_snapshot!(chosen(&two, None).unwrap_err(), @"2 images in the layout match: hello:1.0, mofed:25.10");
    insta::assert_snapshot!(chosen(&two, Some("0.9")).unwrap_err(), @r#"the layout has no "0.9"; it has hello:1.0, mofed:25.10"#);
}

#[test]
fn the_path_ends_where_a_directory_does() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("images");
    fs::create_dir(&root).unwrap();
    let text = root.display().to_string();
    let digest = format!("sha256:{}", "0".repeat(64));
    for (place, wanted) in [
        (text.clone(), None),
        (format!("{text}:1.0"), Some("1.0")),
        (format!("{text}:hello:1.0"), Some("hello:1.0")),
        (format!("{text}@{digest}"), Some(digest.as_str())),
    ] {
        assert_eq!(split_location(&place), (root.clone(), wanted), "{place}");
    }
    assert_eq!(split_location("/nonexistent:1"), (PathBuf::from("/nonexistent:1"), None));
}

/// Images are untrusted: decompressing their modules is limited as for a build.
#[test]
fn compressed_modules_of_an_image_are_read_within_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let bomb = zstd::encode_all(io::repeat(0).take(1 << 20), 1).unwrap();
    let path = dir.path().join("layer.tar");
    let mut layer = tar::Builder::new(fs::File::create(&path).unwrap());
    for number in 0..10 {
        let mut header = tar::Header::new_ustar();
        header.set_size(bomb.len() as u64);
        header.set_mode(0o644);
        let name = format!("lib/modules/6.1.0-9-amd64/extra/{number}.ko.zst");
        layer.append_data(&mut header, name, &bomb[..]).unwrap();
    }
    layer.finish().unwrap();
    let layers = ImageLayers::Files(vec![path]);
    let image = OpenImage { name: "evil:1".to_owned(), layers, kernel: None, _scratch: None };
    let release = "6.1.0-9-amd64".parse().unwrap();
    let all = image.read(&release, &DecompressionBudget::of_bytes(10 << 20)).unwrap();
    assert_eq!(all.modules.len(), 10);
    let error = image.read(&release, &DecompressionBudget::of_bytes(9 << 20)).err().unwrap();
    let (message, hint) = error.message_and_hint();
    for wanted in ["evil:1", "cannot decompress module lib/modules/6.1.0-9-amd64/extra/", "is 9437184 bytes"]
    {
        assert!(message.contains(wanted), "{message}");
    }
    assert!(hint.contains("strip --strip-debug"), "{hint}");
}
