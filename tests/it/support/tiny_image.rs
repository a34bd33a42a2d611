//! Images of one layer: the smallest runnable one, with Debian's static busybox, and one with arbitrary files.

use std::{fs::File, path::Path};

use farrier_core::facts::media_type;
use farrier_store::registry::{Registry as _, RegistryOptions, RemoteRegistry};
use oci::{Assembly, EntryKind, LayerWriter, assemble};

/// Pushes the busybox image to a loopback registry, and returns its reference by digest.
pub async fn push(host: &str, path: &str) -> String {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    let busybox = std::fs::read(busybox.expect("busybox-static is installed")).unwrap();
    let program = EntryKind::File { size: busybox.len() as u64, content: &mut &busybox[..] };
    let write = |writer: &mut LayerWriter<File>| {
        writer.entry(Path::new("bin"), 0o755, EntryKind::Directory).unwrap();
        writer.entry(Path::new("bin/busybox"), 0o755, program).unwrap();
        for applet in [
            "cat",
            "dd",
            "false",
            "head",
            "id",
            "ip",
            "ls",
            "sh",
            "sha256sum",
            "sleep",
            "tail",
            "test",
            "true",
        ] {
            let link = EntryKind::Symlink(Path::new("busybox"));
            writer.entry(&Path::new("bin").join(applet), 0o777, link).unwrap();
        }
        for name in ["tmp", "work"] {
            writer.entry(Path::new(name), 0o755, EntryKind::Directory).unwrap();
        }
    };
    push_layer(host, path, "1", write).await
}

/// Pushes an image with these files. The layer contains no entries for their directories.
pub async fn push_files(host: &str, path: &str, tag: &str, files: &[(String, Vec<u8>)]) -> String {
    let write = |writer: &mut LayerWriter<File>| {
        for (name, content) in files {
            let file = EntryKind::File { size: content.len() as u64, content: &mut content.as_slice() };
            writer.entry(Path::new(name), 0o644, file).unwrap();
        }
    };
    push_layer(host, path, tag, write).await
}

async fn push_layer(host: &str, path: &str, tag: &str, write: impl FnOnce(&mut LayerWriter<File>)) -> String {
    let directory = tempfile::tempdir().unwrap();
    let layer = directory.path().join("layer");
    let mut writer = LayerWriter::new(File::create(&layer).unwrap(), 0);
    write(&mut writer);
    let (described, _) = writer.finish().unwrap();
    let image = assemble(&Assembly {
        base: None,
        entrypoint_layer: None,
        layers: std::slice::from_ref(&described),
        entrypoint: &["/bin/sh".to_owned()],
        env: &std::collections::BTreeMap::new(),
        labels: &std::collections::BTreeMap::new(),
        annotations: &std::collections::BTreeMap::new(),
        architecture: if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
    })
    .unwrap();
    let registry = RemoteRegistry::new("test".to_owned(), &RegistryOptions::default());
    let repository = format!("{host}/{path}").parse().unwrap();
    registry.push_blob(&repository, &described.digest, &layer).await.unwrap();
    registry.push_bytes(&repository, &image.config).await.unwrap();
    let tag = farrier_core::image::Version::Tag(tag.parse().unwrap());
    let digest =
        registry.push_manifest(&repository, &tag, media_type::OCI_MANIFEST, &image.manifest).await.unwrap();
    format!("{host}/{path}@{digest}")
}
