//! The smallest image in which something runs: one layer with Debian's static busybox.

use std::path::Path;

use farrier::{
    oci::{Assembly, EntryKind, LayerWriter, assemble, media_type},
    registry::{Registry as _, RegistryOptions, RemoteRegistry},
};

/// Pushes it to a registry on loopback; its name by digest.
pub async fn push(host: &str, path: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let layer = directory.path().join("layer");
    let mut writer = LayerWriter::new(std::fs::File::create(&layer).unwrap(), 0);
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    let busybox = std::fs::read(busybox.expect("busybox-static is installed")).unwrap();
    let program = EntryKind::File { size: busybox.len() as u64, content: &mut &busybox[..] };
    writer.entry(Path::new("bin"), 0o755, EntryKind::Directory).unwrap();
    writer.entry(Path::new("bin/busybox"), 0o755, program).unwrap();
    for applet in
        ["cat", "dd", "false", "head", "id", "ip", "ls", "sh", "sha256sum", "sleep", "tail", "test", "true"]
    {
        let link = EntryKind::Symlink(Path::new("busybox"));
        writer.entry(&Path::new("bin").join(applet), 0o777, link).unwrap();
    }
    for name in ["tmp", "work"] {
        writer.entry(Path::new(name), 0o755, EntryKind::Directory).unwrap();
    }
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
    let tag = farrier::image::Version::Tag("1".parse().unwrap());
    let digest =
        registry.push_manifest(&repository, &tag, media_type::OCI_MANIFEST, &image.manifest).await.unwrap();
    format!("{host}/{path}@{digest}")
}
