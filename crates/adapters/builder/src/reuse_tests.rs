use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use farrier_engines::EngineError;
use kmod::{BootOutcome, BootReport, ModuleBoot, testing::ModuleFile};
use serde_json::json;

use super::*;
use crate::{
    images::{CHECK_REPORT, StoredImage},
    testing::{Bench, K9, K10, K11, SYMBOLS, module},
};

fn compatible() -> Bench {
    Bench::new(&json!({"reuse": "compatible"}))
}

/// Asserts that a compilation was attempted: it fails, because there is no engine.
#[track_caller]
fn assert_compiles(outcome: Result<crate::Built, BuildError>) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, BuildError::Engine(EngineError::Unavailable(_))), "{error}");
}

/// Returns every file in the payload layer of a kernel's image, with the digest of its content.
async fn files(bench: &Bench, release: &str) -> BTreeMap<PathBuf, Digest> {
    let reference = bench.cell(release).await.reference;
    let registry = &bench.services.images.registry;
    let stored = registry.manifest(&reference.repository, &reference.version).await.unwrap().unwrap();
    let manifest = ImageManifest::parse(&stored.bytes).unwrap();
    let work = tempfile::tempdir().unwrap();
    let (blob, tree) = (work.path().join("blob"), work.path().join("tree"));
    let layer = manifest.payload_layer().unwrap();
    registry.fetch_blob(&reference.repository, &layer.digest, layer.size, &blob).await.unwrap();
    fs::create_dir(&tree).unwrap();
    payload::unpack_layer(&blob, &tree).unwrap();
    let files = walkdir::WalkDir::new(&tree).into_iter().map(Result::unwrap);
    files
        .filter(|entry| entry.file_type().is_file())
        .map(|entry| {
            let path: &Path = entry.path().strip_prefix(&tree).unwrap();
            (path.to_owned(), Digest::of(&fs::read(entry.path()).unwrap()))
        })
        .collect()
}

#[tokio::test]
async fn a_kernel_with_the_same_symbols_gets_the_same_modules() {
    let bench = compatible();
    let first = bench.publish(K9, &[&module()]).await.unwrap();
    // No engine is available, so the image cannot have been compiled.
    let built = bench.build(K10).await.unwrap();
    assert_eq!(built.report.verdict, Verdict::Loads);
    assert_eq!(built.report.kernel, K10);
    let from = ReusedFrom { kernel: K9.parse().unwrap(), digest: first.digest.clone() };
    assert_eq!(built.reused_from, Some(from));

    // The files are identical, in the new kernel's directory.
    let moved: BTreeMap<PathBuf, Digest> = files(&bench, K9)
        .await
        .into_iter()
        .map(|(path, digest)| (path.display().to_string().replace(K9, K10).into(), digest))
        .collect();
    assert_eq!(files(&bench, K10).await, moved);
    assert!(moved.contains_key(Path::new(&format!("lib/modules/{K10}/extra/m.ko"))));

    let (notes, theirs) = (bench.annotations(K10).await, bench.annotations(K9).await);
    assert_eq!(notes[annotations::REUSED_FROM], first.digest.to_string());
    assert_eq!(notes[annotations::KERNEL_RELEASE], K10);
    assert_eq!(notes[annotations::CHECK_SUMMARY], "1 module: loads");
    assert_eq!(notes[annotations::SOURCES], "src: here");
    assert_eq!(notes[annotations::RECIPE], theirs[annotations::RECIPE]);
    for key in [annotations::INPUT_HASH, annotations::PAYLOAD_DIGEST, annotations::HEADERS] {
        assert_ne!(notes[key], theirs[key], "{key}");
    }
    // The check report names the kernel that the payload was built for.
    let reference = bench.cell(K10).await.reference;
    let image = bench.services.images.manifest(&reference).await.unwrap().unwrap().digest;
    let stored = StoredImage { services: &bench.services, repository: &reference.repository, digest: &image };
    let stored = stored.find_document(&CHECK_REPORT).await.unwrap();
    let document: serde_json::Value = serde_json::from_slice(&stored.unwrap()).unwrap();
    assert_eq!(document["reusedFrom"]["kernel"], K9);
    assert_eq!(document["reusedFrom"]["digest"], first.digest.as_str());
    assert_eq!(document["report"]["kernel"], K10);
    assert_eq!(document["report"]["verdict"], "loads");
}

#[tokio::test]
async fn nothing_is_reused_unless_the_definition_says_so() {
    let bench = Bench::new(&json!({}));
    bench.publish(K9, &[&module()]).await.unwrap();
    assert_compiles(bench.build(K10).await);
    assert!(!bench.heard().contains(&Stage::Reuse.to_string()));
}

#[tokio::test]
async fn a_forced_build_compiles() {
    let bench = compatible();
    bench.publish(K9, &[&module()]).await.unwrap();
    let cell = bench.cell(K10).await;
    let options = crate::BuildOptions { push: true, compile: true };
    assert_compiles(crate::build(&bench.services, &cell, options).await);
}

/// Each reason is reported, and a compilation follows.
#[tokio::test]
async fn what_does_not_fit_is_told_and_compiled() {
    let told = async |bench: &Bench| {
        bench.heard();
        assert_compiles(bench.build(K10).await);
        let heard = bench.heard();
        let reason = heard.iter().find_map(|line| line.strip_prefix("nothing to reuse: "));
        reason.unwrap_or_else(|| panic!("{heard:?}")).to_owned()
    };
    let bench = compatible();
    let none = told(&bench).await;
    insta::assert_snapshot!(none, @"no image of the same recipe is published for another kernel");

    // A symbol with another version.
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.headers(K10, &SYMBOLS.replace("0x00000001", "0x00000002"));
    let versions = told(&bench).await;
    assert!(versions.starts_with(&format!("the payload of {K9}: the check says refused: ")), "{versions}");
    assert!(versions.contains("printk"), "{versions}");

    // Without a symbol table the verdict is unknown.
    let bench = compatible();
    bench.publish(K9, &[&module()]).await.unwrap();
    fs::remove_file(bench.services.definitions.root.join(format!("headers-{K10}/Module.symvers"))).unwrap();
    assert!(told(&bench).await.starts_with(&format!("the payload of {K9}: the check says unknown")));

    // Without symbol versions nothing confirms the layout of structures. The published image has the verdict `unknown`,
    // so it does not qualify for reuse.
    let bench = compatible();
    let mut unversioned = module();
    unversioned.versions = None;
    for kernel in [K9, K10] {
        let config =
            bench.services.definitions.root.join(format!("headers-{kernel}/include/config/auto.conf"));
        let text = fs::read_to_string(&config).unwrap().replace("CONFIG_MODVERSIONS=y\n", "");
        fs::write(config, text).unwrap();
    }
    let vermagic = format!("{K9} SMP preempt mod_unload ");
    bench.publish(K9, &[&unversioned.info("vermagic", &vermagic)]).await.unwrap();
    assert!(told(&bench).await.starts_with("no image of the same recipe"));

    // Another recipe: the entrypoint differs.
    let mut bench = compatible();
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.image().spec.runtime.entrypoint.push("/x".parse().unwrap());
    assert!(told(&bench).await.starts_with("no image of the same recipe"));
}

#[tokio::test]
async fn an_image_of_which_it_is_unknown_whether_it_loads_does_not_lend() {
    let bench = compatible();
    fs::remove_file(bench.services.definitions.root.join(format!("headers-{K9}/Module.symvers"))).unwrap();
    let candidate = bench.publish(K9, &[&module()]).await.unwrap();
    assert_eq!(candidate.report.verdict, Verdict::Unknown);
    assert_compiles(bench.build(K10).await);
}

/// The newest image that fits is reused.
#[tokio::test]
async fn the_newest_kernel_is_asked_first() {
    let bench = compatible();
    let other = module().info("description", "another build");
    bench.publish(K9, &[&module()]).await.unwrap();
    let newer = bench.publish(K10, &[&other]).await.unwrap();
    let built = bench.build(K11).await.unwrap();
    assert_eq!(built.reused_from.unwrap().digest, newer.digest);

    // The newest image does not fit (another symbol version), but the older one does.
    let bench = compatible();
    let older = bench.publish(K9, &[&module()]).await.unwrap();
    bench.headers(K10, &SYMBOLS.replace("0x00000001", "0x00000002"));
    bench.publish(K10, &[&ModuleFile::named("m").needs("printk", 2)]).await.unwrap();
    let built = bench.build(K11).await.unwrap();
    assert_eq!(built.reused_from.unwrap().digest, older.digest);
}

fn boot_report(outcome: BootOutcome) -> BootReport {
    BootReport {
        kernel: K10.to_owned(),
        accelerator: "kvm".to_owned(),
        milliseconds: 900,
        modules: vec![ModuleBoot { path: "m.ko".to_owned(), name: "m".to_owned(), outcome }],
    }
}

#[tokio::test]
async fn reused_payloads_are_booted_when_boot_checks_are_on() {
    let spec = json!({"reuse": "compatible", "check": {"boot": true}});
    let (bench, scripted) = Bench::new(&spec).with_boot(|| Ok(boot_report(BootOutcome::Loaded)));
    bench.publish(K9, &[&module()]).await.unwrap();
    let built = bench.build(K10).await.unwrap();
    assert!(built.reused_from.is_some() && built.report.boot.is_some());
    let asked = scripted.asked.lock().unwrap().clone();
    assert_eq!(asked, [K9, K10].map(|kernel| vec![format!("lib/modules/{kernel}/extra/m.ko")]));

    // After a failed boot check the image is compiled: modules built for this kernel may load.
    let (bench, _) = Bench::new(&spec).with_boot(|| {
        let messages = vec!["m: Unknown symbol".to_owned()];
        Ok(boot_report(BootOutcome::Refused { error: "ENOENT".to_owned(), messages }))
    });
    let mut bench = bench;
    bench.image().spec.check.boot = false;
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.image().spec.check.boot = true;
    bench.heard();
    assert_compiles(bench.build(K10).await);
    let heard = bench.heard().join("\n");
    let wanted = format!(
        "nothing to reuse: the payload of {K9}: boot check: m was refused with ENOENT: m: Unknown symbol"
    );
    assert!(heard.contains(&wanted), "{heard}");
}
