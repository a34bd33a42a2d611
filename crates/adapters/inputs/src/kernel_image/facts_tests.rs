use farrier_core::kernel::Architecture;
use kmod::testing::ModuleFile;

use super::*;
use crate::Fetcher;

/// Makes a plain ELF "kernel" without sections, which only states its release.
fn image(dir: &Path, banner: &str) -> KernelImage {
    let vmlinuz = dir.join("vmlinuz-6.1.0-1-amd64");
    let mut bytes = vec![0; 64];
    bytes[56..60].copy_from_slice(b"ARM\x64");
    bytes.extend(banner.as_bytes());
    fs::write(&vmlinuz, bytes).unwrap();
    KernelImage {
        release: "6.1.0-1-amd64".parse().unwrap(),
        arch: Architecture::Amd64,
        vmlinuz,
        system_map: None,
        modules: None,
        origin: vec![],
    }
}

fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn the_module_directory_is_read_with_an_index_or_without() {
    let dir = tempfile::tempdir().unwrap();
    let mut image = image(dir.path(), "Linux version 6.1.0-1-amd64 (x)");
    let modules = dir.path().join("modules");
    write(&modules.join("kernel/b/second-one.ko"), ModuleFile::named("second_one").build());
    write(&modules.join("kernel/a/first.ko"), ModuleFile::named("first").build());
    write(&modules.join("updates/later.ko"), ModuleFile::named("later").build());
    write(&modules.join("modules.builtin"), "kernel/c/built-in.ko\n");
    image.modules = Some(modules.clone());
    let facts = image.facts().unwrap();
    let index = facts.in_tree.unwrap();
    assert_eq!(index.source, FactSource::ModuleIndex);
    assert_eq!(index.value.modules.keys().collect::<Vec<_>>(), ["first", "second_one"]);
    assert_eq!(index.value.builtin.iter().collect::<Vec<_>>(), ["built_in"]);
    let size = facts.module_size.unwrap();
    assert_eq!(size.source, FactSource::InTreeModule("first".to_owned()));
    assert!(size.value > 0 && facts.vermagic.is_some());

    write(&modules.join("modules.dep"), "updates/later.ko: kernel/a/first.ko\nkernel/a/first.ko:\n");
    let index = image.facts().unwrap().in_tree.unwrap().value;
    assert_eq!(index.modules.keys().collect::<Vec<_>>(), ["first", "later"]);
}

#[test]
fn an_image_of_another_kernel_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = image(dir.path(), "Linux version 6.1.0-2-amd64 (x)").facts().unwrap_err();
    assert!(
        error.to_string().ends_with("is the image of kernel 6.1.0-2-amd64, not of 6.1.0-1-amd64"),
        "{error}"
    );
}

#[test]
fn system_map_tells_exports_unless_it_is_a_placeholder() {
    let dir = tempfile::tempdir().unwrap();
    let mut image = image(dir.path(), "Linux version 6.1.0-1-amd64 (x)");
    let map = dir.path().join("System.map");
    write(&map, "ffffffffffffffff B The real System.map is in the linux-image-<version>-dbg package\n");
    image.system_map = Some(map.clone());
    assert!(image.facts().unwrap().exports.is_none());
    write(&map, "ffffffff826e7d60 r __ksymtab_kfree\n");
    let exports = image.facts().unwrap().exports.unwrap();
    assert_eq!((exports.value.len(), exports.source), (1, FactSource::SystemMap));
}

#[tokio::test]
async fn the_facts_are_the_same_from_the_cache_until_a_file_changes() {
    let dir = tempfile::tempdir().unwrap();
    let mut image = image(dir.path(), "Linux version 6.1.0-1-amd64 (x)");
    let (map, modules) = (dir.path().join("System.map"), dir.path().join("modules"));
    write(&map, "ffffffff826e7d60 r __ksymtab_kfree\n");
    write(&modules.join("kernel/a.ko"), ModuleFile::named("a").build());
    write(&modules.join("modules.builtin"), "kernel/b.ko\n");
    (image.system_map, image.modules) = (Some(map.clone()), Some(modules));
    let cache = Cache::open(dir.path().join("cache")).unwrap();
    let fetcher = Fetcher::new(cache.clone(), crate::FetchOptions::default());
    let plain = format!("{:?}", image.facts().unwrap());
    for _ in 0..2 {
        assert_eq!(format!("{:?}", fetcher.kernel_images().facts(&image).await.unwrap()), plain);
    }
    assert_eq!(cache.records::<serde_json::Value>(KIND).unwrap().len(), 2);
    assert_eq!(
        fetcher.kernel_images().release_of(&image.vmlinuz).await.unwrap(),
        Some(image.release.clone())
    );
    write(&map, "ffffffff826e7d60 r __ksymtab_kfree\nffffffff826e7d60 r __ksymtab_kmalloc\n");
    assert_eq!(fetcher.kernel_images().facts(&image).await.unwrap().exports.unwrap().value.len(), 2);
}

#[test]
fn the_image_itself_counts_most() {
    let image = ExtraKernelFacts {
        module_size: Some(Known { value: 896, source: FactSource::Btf }),
        exports: Some(Known { value: ["kfree".to_owned()].into(), source: FactSource::KernelImage }),
        ..ExtraKernelFacts::default()
    };
    let source = FactSource::InTreeModule("a".to_owned());
    let companions = ExtraKernelFacts {
        module_size: Some(Known { value: 1, source: source.clone() }),
        vermagic: Some(Known { value: "6.1 SMP".to_owned(), source }),
        exports: Some(Known { value: std::collections::BTreeSet::new(), source: FactSource::SystemMap }),
        ..ExtraKernelFacts::default()
    };
    let facts = combine(image, companions);
    assert_eq!(facts.module_size, Some(Known { value: 896, source: FactSource::Btf }));
    assert_eq!(facts.exports.unwrap().source, FactSource::KernelImage);
    assert_eq!(facts.vermagic.unwrap().source, FactSource::InTreeModule("a".to_owned()));
}
