use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read as _, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::{
    facts::media_type,
    image::{Digest, Version},
};
use farrier_store::registry::{LayoutRegistry, Registry, RegistryLocation};
use oci::{AnyManifest, ImageIndex, ImageManifest};
use proptest::prelude::*;

use super::{
    entry,
    frame::{FrameWriter, Packing, write_frame},
    import::manifests_of,
    received::store_stream,
    trailer::Trailer,
    verify::Manifest,
    *,
};

/// Ignores the progress.
struct Silent;

impl Meter for Silent {
    fn begin(&self, _: Phase, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}

/// Creates a layout with one artifact of one layer. Returns the artifact as content for a bundle.
async fn layout(root: &Path, layer: &[u8]) -> ContentRequest {
    let registry: Arc<dyn Registry> = Arc::new(LayoutRegistry::new(root.join("layout")));
    let repository = "sources".parse().unwrap();
    for bytes in [layer, oci::EMPTY] {
        registry.push_bytes(&repository, bytes).await.unwrap();
    }
    let descriptor = |kind, bytes: &[u8]| oci::Descriptor::new(kind, Digest::of(bytes), bytes.len() as u64);
    let manifest = ImageManifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: Some(media_type::SOURCE.to_owned()),
        config: descriptor(media_type::OCI_EMPTY, oci::EMPTY),
        layers: vec![descriptor(media_type::OCI_LAYER, layer)],
        subject: None,
        annotations: [].into(),
    }
    .to_bytes()
    .unwrap();
    let tag: farrier_core::image::Tag = "a".parse().unwrap();
    let version = Version::Tag(tag.clone());
    let digest =
        registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &manifest).await.unwrap();
    let content =
        Content { kind: ContentKind::Source, repository: "sources".to_owned(), tag: Some(tag), digest };
    ContentRequest { content, repository, registry }
}

/// Bytes and index of a small bundle.
fn small() -> (Vec<u8>, BundleIndex) {
    bundle_of(b"the driver's source")
}

/// Bytes and index of a bundle with this layer.
fn bundle_of(layer: &[u8]) -> (Vec<u8>, BundleIndex) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle");
    runtime.block_on(async {
        let wanted = layout(directory.path(), layer).await;
        let collection = collect(&[wanted], "a.example/drivers", None).await.unwrap();
        export(collection, &file, None, Arc::new(Silent)).await.unwrap();
    });
    (fs::read(&file).unwrap(), Bundle::open(&file).unwrap().index().clone())
}

fn read(bytes: &[u8]) -> Result<Verified, BundleError> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle");
    fs::write(&file, bytes).unwrap();
    Bundle::open(&file)?.verify(&Silent)
}

fn refused(bytes: &[u8]) -> String {
    let error = read(bytes).err().expect("the bundle is refused");
    assert!(error.hint().is_some(), "{error}");
    let text = error.to_string();
    text.split_once("bundle ").map(|(_, rest)| rest.to_owned()).unwrap_or(text)
}

/// Bundle with this index and these frames after the head. The end of the file is valid.
fn made(index: &BundleIndex, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut head = index.head().unwrap();
    head[2].1 = index.to_bytes().unwrap();
    let id = Digest::of(&head[2].1);
    let mut all: Vec<Vec<u8>> = Vec::new();
    for (name, content) in head {
        let mut frame = Vec::new();
        write_frame(&mut frame, &entry::entry(name, &content).unwrap()).unwrap();
        all.push(frame);
    }
    all.extend_from_slice(frames);
    let mut end = Vec::new();
    write_frame(&mut end, &entry::TAR_END).unwrap();
    all.push(end);
    let trailer = Trailer { frames: all.iter().map(|frame| frame.len() as u64).collect(), index: id };
    [all.concat(), trailer.to_bytes()].concat()
}

fn frame(name: &str, content: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    write_frame(&mut frame, &entry::entry(name, content).unwrap()).unwrap();
    frame
}

/// Index of a bundle with these contents and these blobs, which are sorted into the order of the file.
fn index_of(blobs: &[(&[u8], Option<&str>)], contents: Vec<Listed>) -> BundleIndex {
    let mut blobs: Vec<Blob> = blobs
        .iter()
        .map(|(bytes, manifest)| Blob {
            digest: Digest::of(bytes),
            size: bytes.len() as u64,
            manifest: manifest.map(str::to_owned),
            repositories: BTreeSet::from(["x".to_owned()]),
            base: BTreeSet::new(),
        })
        .collect();
    blobs.sort_by_key(|blob| (blob.manifest.is_none(), blob.digest.clone()));
    BundleIndex {
        licenses: BTreeSet::new(),
        format_version: FORMAT,
        made_by: "farrier 0".to_owned(),
        from: "a.example".to_owned(),
        order: None,
        signer: None,
        base: None,
        contents,
        blobs,
    }
}

#[test]
fn what_is_made_for_tests_is_read() {
    let index = index_of(&[(b"content", None)], Vec::new());
    let name = entry::blob_name(&Digest::of(b"content"));
    assert!(read(&made(&index, &[frame(&name, b"content")])).is_ok());
}

#[test]
fn every_flipped_byte_is_refused_or_harmless() {
    let (bytes, index) = small();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle");
    let mut harmless = 0;
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        fs::write(&file, &flipped).unwrap();
        if let Ok(verified) = Bundle::open(&file).and_then(|bundle| bundle.verify(&Silent)) {
            harmless += 1;
            assert_eq!(*verified.bundle().index(), index, "byte {at}");
        }
    }
    assert!(harmless < bytes.len() / 50, "{harmless} of {} flipped bytes went undetected", bytes.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn changed_bundles_are_refused_or_the_same(at in 0_usize..1 << 20, mask in 1_u8.., cut in any::<bool>()) {
        let (mut bytes, index) = small();
        let at = at % bytes.len();
        if cut { bytes.truncate(at) } else { bytes[at] ^= mask }
        if let Ok(verified) = read(&bytes) {
            prop_assert!(!cut);
            prop_assert_eq!(verified.bundle().index(), &index);
        }
    }

    #[test]
    fn any_bytes_are_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(read(&bytes).is_err());
        prop_assert!(read(&[&[0x28, 0xb5, 0x2f, 0xfd], &bytes[..]].concat()).is_err());
    }
}

/// Anyone may write to a pipe, and forever.
#[test]
fn a_stream_is_stored_as_far_as_its_verified_index_reaches() {
    const MAX_HEAD: u64 = 64 << 10;
    let layer: String =
        (0_u32..4096).map(|number| Digest::of(&number.to_le_bytes()).hex().to_owned()).collect();
    let (bundle, index) = bundle_of(layer.as_bytes());
    assert!(bundle.len() as u64 > MAX_HEAD);
    let tar = zstd::stream::decode_all(&bundle[..]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("received");
    let store = |from: &mut dyn io::Read, is_signed: bool| {
        let verify = |found: &BundleIndex| {
            assert_eq!(*found, index);
            let unsigned = BundleError::Unsigned(PathBuf::new(), String::new());
            if is_signed { Ok(()) } else { Err(unsigned) }
        };
        let outcome = store_stream(from, Path::new("-"), &file, MAX_HEAD, verify);
        (outcome, fs::metadata(&file).unwrap().len())
    };
    for bytes in [&bundle[..], &tar[..]] {
        assert!(store(&mut &*bytes, true).0.is_ok());
        assert!(fs::read(&file).unwrap() == bytes);
        let endless = || bytes.chain(io::repeat(0));
        let (outcome, stored) = store(&mut endless(), false);
        assert!(matches!(outcome, Err(BundleError::Unsigned(..))), "{outcome:?}");
        assert_eq!(stored, MAX_HEAD);
        let (outcome, stored) = store(&mut endless(), true);
        assert!(outcome.unwrap_err().to_string().contains("it is longer than the "), "{stored}");
        assert!(stored < 4 << 20, "{stored}");
    }
    let late = entry::entry("first", &vec![0; 1 << 20]).unwrap();
    let error = store(&mut late.as_slice().chain(&tar[..]), true).0.unwrap_err().to_string();
    assert!(error.contains("the tar has no farrier-bundle.json in its first 65536 bytes"), "{error}");
}

#[test]
fn repeated_entries_of_nested_indexes_count_once() {
    let mut verified = read(&small().0).unwrap();
    let mut digest = verified.manifests.keys().next().unwrap().clone();
    for _ in 0..2 {
        let mut index = ImageIndex::empty();
        index.manifests = vec![oci::Descriptor::new(media_type::OCI_INDEX, digest, 1); 2000];
        let bytes = index.to_bytes().unwrap();
        digest = Digest::of(&bytes);
        let (media_type, parsed) = (media_type::OCI_INDEX.to_owned(), AnyManifest::Index(index));
        verified.manifests.insert(digest.clone(), Manifest { bytes, media_type, parsed });
    }
    assert_eq!(manifests_of(&verified, &digest).len(), 3);
}

#[test]
fn an_export_without_a_record_keeps_the_order_of_its_interrupted_run() {
    let (_, mut index) = small();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bundle");
    let order = |counter: u64| {
        let time = "2026-11-21T00:00:00Z".parse().unwrap();
        Some(Order { origin: "a.example".to_owned(), counter, time })
    };
    index.order = order(5);
    fs::write(directory.path().join("bundle.partial"), made(&index, &[])).unwrap();
    index.order = order(7);
    assert_eq!(earlier_order(&index, &file), order(5));
    // Anyone who wrote to the medium may have chosen the order there.
    index.order = order(4);
    assert_eq!(earlier_order(&index, &file), None);
    index.order = order(7);
    index.contents.clear();
    assert_eq!(earlier_order(&index, &file), None);
}

/// Each export reads the record before the other one writes its order.
#[tokio::test]
async fn two_exports_at_one_moment_take_different_counters() {
    let directory = tempfile::tempdir().unwrap();
    let [mut one, mut two] = {
        let first = layout(directory.path(), b"one").await;
        let first = collect(&[first], "a.example", None).await.unwrap();
        let second = layout(directory.path(), b"two").await;
        [first, collect(&[second], "a.example", None).await.unwrap()]
    };
    let root = directory.path().join("layout");
    let registry: Arc<dyn Registry> = Arc::new(LayoutRegistry::new(root.clone()));
    let target = Target { location: RegistryLocation::Layout(root), registry };
    // Both counters come after the base's, whatever the clock says.
    let time = "2026-11-21T00:00:00Z".parse().unwrap();
    let order = Some(Order { origin: "a.example".to_owned(), counter: 1 << 40, time });
    let since = PreviousBundle { id: Digest::of(b"base"), index: BundleIndex { order, ..one.index.clone() } };
    let (first, second) = tokio::join!(
        one.assign_order(&target, "a.example", Some(&since)),
        two.assign_order(&target, "a.example", Some(&since))
    );
    assert!(first.unwrap().is_none() && second.unwrap().is_none());
    let counter = |collection: &Collection| collection.index.order.as_ref().unwrap().counter;
    assert_ne!(counter(&one), counter(&two));
}

/// A medium can give other bytes when it is read again.
#[tokio::test]
async fn definitions_that_change_after_the_verification_are_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let (file, to) = (directory.path().join("bundle"), directory.path().join("definitions"));
    let tar =
        |text: &str| [&entry::entry("site.yaml", text.as_bytes()).unwrap()[..], &entry::TAR_END].concat();
    let text: String = (0_u8..50).map(|number| Digest::of(&[number]).hex().to_owned()).collect();
    let old = tar(&text);
    let mut wanted = layout(directory.path(), &old).await;
    wanted.content.kind = ContentKind::Definitions;
    let collection = collect(&[wanted], "a.example/drivers", None).await.unwrap();
    export(collection, &file, None, Arc::new(Silent)).await.unwrap();
    let verified = Bundle::open(&file).unwrap().verify(&Silent).unwrap();

    let digest = Digest::of(&old);
    let start = verified.bundle.offsets[verified.frames[&digest]];
    let changed = frame(&entry::blob_name(&digest), &tar(&"#".repeat(text.len())));
    fs::OpenOptions::new().write(true).open(&file).unwrap().write_all_at(&changed, start).unwrap();
    let error = write_definitions(&verified, &to, false, true).unwrap_err().to_string();
    assert!(error.contains("it changed after its verification"), "{error}");
    assert_eq!(fs::read_dir(&to).unwrap().count(), 0);
}

#[test]
fn a_newer_format_is_told_from_damage() {
    let (_, mut index) = small();
    index.format_version = 3;
    index.made_by = "farrier 9.1.0".to_owned();
    insta::assert_snapshot!(
        refused(&made(&index, &[])).split_once("has ").unwrap().1,
        @"format 3, made by farrier 9.1.0; this farrier reads formats up to 2"
    );
}

#[test]
fn a_blob_that_is_not_what_its_digest_says() {
    let index = index_of(&[(b"content", None)], Vec::new());
    let name = entry::blob_name(&Digest::of(b"content"));
    let text = refused(&made(&index, &[frame(&name, b"CONTENT")]));
    assert!(text.contains("its sha256 is sha256:"), "{text}");
}

#[test]
fn names_in_the_tar_are_those_of_the_index() {
    let index = index_of(&[(b"content", None)], Vec::new());
    for name in ["../../etc/passwd", "blobs/sha256/../x", "etc/passwd", "blobs/sha256/00"] {
        // The tar crate rejects some of these names, so the test writes them into the header itself.
        let mut entry = entry::entry("x", b"content").unwrap();
        entry[..100].fill(0);
        entry[..name.len()].copy_from_slice(name.as_bytes());
        let mut frame = Vec::new();
        write_frame(&mut frame, &entry).unwrap();
        let text = refused(&made(&index, &[frame]));
        assert!(text.contains("its tar header does not match the blob"), "{name}: {text}");
    }
}

#[test]
fn a_manifest_without_its_blob() {
    let manifest = format!(
        r#"{{"schemaVersion":2,"config":{{"mediaType":"a/b","digest":"{}","size":7}},"layers":[]}}"#,
        Digest::of(b"missing")
    );
    let bytes = manifest.as_bytes();
    let digest = Digest::of(bytes);
    let content =
        Content { kind: ContentKind::Image, repository: "x".to_owned(), tag: None, digest: digest.clone() };
    let listed = Listed { content, artifact_type: None, kernel: None, size: 1 };
    let index = index_of(&[(bytes, Some(media_type::OCI_MANIFEST))], vec![listed.clone()]);
    let text = refused(&made(&index, &[frame(&entry::blob_name(&digest), bytes)]));
    assert!(text.contains("of 7 bytes, which is missing"), "{text}");

    let absent = index_of(&[], vec![listed]);
    let text = refused(&made(&absent, &[]));
    assert!(text.contains("of x is missing"), "{text}");
}

#[test]
fn hostile_indexes_are_refused() {
    let names = ["../x", "evil.example/x", "X", "", "a//b"];
    for name in names {
        let mut index = index_of(&[(b"content", None)], Vec::new());
        index.blobs[0].repositories = BTreeSet::from([name.to_owned()]);
        let text = refused(&made(&index, &[frame(&entry::blob_name(&index.blobs[0].digest), b"content")]));
        assert!(text.contains("with an invalid name"), "{name:?}: {text}");
    }
    let mut index = index_of(&[(b"content", None)], Vec::new());
    index.blobs[0].size = u64::MAX - 100;
    assert!(refused(&made(&index, &[vec![0; 16]])).contains("larger than the limit for blobs"));
}

#[test]
fn manifests_that_do_not_fit_into_memory_are_refused() {
    let names: Vec<String> = (0..257).map(|number| number.to_string()).collect();
    let manifests: Vec<_> =
        names.iter().map(|name| (name.as_bytes(), Some(media_type::OCI_MANIFEST))).collect();
    let mut index = index_of(&manifests, Vec::new());
    for blob in &mut index.blobs {
        blob.size = oci::MAX_MANIFEST as u64;
    }
    let text = refused(&made(&index, &[]));
    assert!(text.contains("its manifests have 1077936128 bytes in total"), "{text}");
}

#[test]
fn bombs_are_refused_after_what_was_announced() {
    let index = index_of(&[(b"content", None)], Vec::new());
    let name = entry::blob_name(&Digest::of(b"content"));
    let mut entry = entry::entry(&name, b"content").unwrap();
    entry.resize(64 << 20, 0);
    let mut bomb = Vec::new();
    write_frame(&mut bomb, &entry).unwrap();
    assert!(bomb.len() < 1 << 20);
    let text = refused(&made(&index, &[bomb]));
    assert!(text.contains("it has more content than expected"), "{text}");

    // A window of 128 GiB, for which a reader would have to allocate memory.
    let wide = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 27 << 3, 1, 0, 0].to_vec();
    let text = refused(&made(&index, &[wide]));
    assert!(text.contains("too much memory"), "{text}");

    // In the head, before the index is read.
    let mut header = *<&[u8; 512]>::try_from(&entry::entry("oci-layout", b"").unwrap()[..512]).unwrap();
    header[124..136].copy_from_slice(b"77777777777\0");
    let mut writer = FrameWriter::new(Vec::new(), Packing::Compressed, 512).unwrap();
    writer.write_all(&header).unwrap();
    let text = refused(&writer.finish().unwrap());
    assert!(text.contains("an entry at its head has"), "{text}");
}
