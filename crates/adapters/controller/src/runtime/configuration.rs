//! Reloads definitions when their files change.
//!
//! Compares the content of the files every few seconds instead of watching them. A ConfigMap's mount swaps symbolic links, and
//! not every file system reports such changes.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use farrier_core::image::{Definitions, Digest};
use farrier_definitions::{self as definitions, DefinitionErrors};
use tokio::{sync::watch, task::spawn_blocking};
use tokio_util::sync::CancellationToken;

/// Directories that [`definitions::load`] reads.
const DEFINITION_DIRECTORIES: [&str; 5] = ["images", "kernels", "templates", "announced", "site"];
/// File of definitions beside the directories.
const SITE_FILE: &str = "site.yaml";
/// Maximum size of a file whose content is compared. The loader rejects larger files anyway.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The definitions in use, and the error of newer definitions that could not be loaded.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// The last valid definitions.
    pub definitions: Arc<Definitions>,
    /// All mistakes in the definitions on disk, if these could not be loaded.
    pub error: Option<String>,
}

/// Reloads the definitions whenever the directory's content changes, and sends the resulting configuration. Ends on
/// cancellation, or when all receivers are dropped.
pub async fn watch_configuration(
    directory: PathBuf,
    interval: Duration,
    sender: watch::Sender<Configuration>,
    cancel: CancellationToken,
) {
    // The first iteration always loads, because files may have changed since startup.
    let mut last_fingerprint: Option<Digest> = None;
    loop {
        let (path, before) = (directory.clone(), last_fingerprint.clone());
        // A panic of the loader must not end the watch.
        if let Ok(Some((fingerprint, loaded))) =
            spawn_blocking(move || load_if_changed(&path, before.as_ref())).await
        {
            last_fingerprint = Some(fingerprint);
            publish(&sender, loaded);
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            () = sender.closed() => return,
            () = tokio::time::sleep(interval) => {}
        }
    }
}

/// Loads the definitions if their content no longer has the fingerprint `before`. Returns the new fingerprint.
fn load_if_changed(
    directory: &Path,
    before: Option<&Digest>,
) -> Option<(Digest, Result<Definitions, DefinitionErrors>)> {
    let fingerprint = fingerprint(directory);
    if before == Some(&fingerprint) {
        return None;
    }
    let loaded = definitions::load(Some(directory));
    // If the mount was swapped during the load, the result may be a mix of both versions.
    let after = self::fingerprint(directory);
    (after == fingerprint).then_some((fingerprint, loaded))
}

fn publish(sender: &watch::Sender<Configuration>, loaded: Result<Definitions, DefinitionErrors>) {
    match loaded {
        Ok(definitions) => {
            let changed = *sender.borrow().definitions != definitions;
            let recovered = sender.borrow().error.is_some();
            if sender.borrow().definitions.site.network() != definitions.site.network() {
                tracing::warn!(
                    "mirrors, proxy, hosts and credentials of site.yaml are only read at startup: restart farrier"
                );
            }
            if changed || recovered {
                tracing::info!(
                    images = definitions.images.len(),
                    families = definitions.families.len(),
                    "definitions reloaded"
                );
                sender.send_replace(Configuration { definitions: Arc::new(definitions), error: None });
            }
        }
        Err(errors) => {
            let text = errors.render();
            tracing::error!(mistakes = errors.0.len(), detail = %text, "definitions are invalid; the last good ones stay in use");
            sender.send_modify(|configuration| configuration.error = Some(text));
        }
    }
}

/// Returns a digest of the names and contents of all definition files.
fn fingerprint(directory: &Path) -> Digest {
    let listings = DEFINITION_DIRECTORIES.iter().filter_map(|part| fs::read_dir(directory.join(part)).ok());
    let mut files: Vec<PathBuf> = listings.flatten().flatten().map(|entry| entry.path()).collect();
    files.push(directory.join(SITE_FILE));
    files.sort();
    let mut text = Vec::new();
    for path in files {
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let Ok(metadata) = fs::metadata(&path) else { continue };
        if hidden || !metadata.is_file() {
            continue;
        }
        let content = if metadata.len() > MAX_FILE_BYTES {
            metadata.len().to_string()
        } else {
            // The loader reports unreadable files. The fingerprint only has to change when a file becomes readable.
            fs::read(&path).map_or_else(|error| error.to_string(), |bytes| Digest::of(&bytes).to_string())
        };
        text.extend([path.as_os_str().as_encoded_bytes(), b"\0", content.as_bytes(), b"\0"].concat());
    }
    Digest::of(&text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const FAMILY: &str = "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {name: own}\nspec:\n  match: {os: own}\n  headers: {tarball: {path: headers.tar}}\n  toolchain: {image: 'registry.test/toolchain:1'}\n";

    /// A ConfigMap's mount: `..data` links to the current version, and the directories are links into
    /// `..data`.
    struct Mount(tempfile::TempDir);

    impl Mount {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            symlink("..data/kernels", directory.path().join("kernels")).unwrap();
            Self(directory)
        }

        /// Replaces the current version atomically, like the kubelet.
        fn swap(&self, version: &str, text: &str) {
            let kernels = self.0.path().join(version).join("kernels");
            fs::create_dir_all(&kernels).unwrap();
            fs::write(kernels.join("own.yaml"), text).unwrap();
            symlink(version, self.0.path().join("..next")).unwrap();
            fs::rename(self.0.path().join("..next"), self.0.path().join("..data")).unwrap();
        }
    }

    #[tokio::test]
    async fn a_bad_file_keeps_the_last_good_definitions() {
        let mount = Mount::new();
        mount.swap("..1", FAMILY);
        let first =
            definitions::load(Some(mount.0.path())).unwrap_or_else(|errors| panic!("{}", errors.render()));
        let (sender, mut receiver) =
            watch::channel(Configuration { definitions: Arc::new(first.clone()), error: None });
        let cancel = CancellationToken::new();
        let interval = Duration::from_millis(5);
        let task =
            tokio::spawn(watch_configuration(mount.0.path().to_owned(), interval, sender, cancel.clone()));

        mount.swap("..2", &FAMILY.replace("kind: KernelFamily", "kind: Nonsense"));
        receiver.changed().await.unwrap();
        let broken = receiver.borrow_and_update().clone();
        assert_eq!(*broken.definitions, first);
        assert!(broken.error.as_deref().unwrap().contains("kernels/own.yaml"), "{:?}", broken.error);

        mount.swap("..3", &FAMILY.replace("name: own", "name: other"));
        receiver.changed().await.unwrap();
        let good = receiver.borrow_and_update().clone();
        assert_eq!(good.error, None);
        assert!(good.definitions.families.iter().any(|family| family.metadata.name.as_str() == "other"));

        cancel.cancel();
        task.await.unwrap();
    }
}
