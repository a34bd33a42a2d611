//! Reloads definitions when their files change.
//!
//! The files' content is compared every few seconds instead of watched. A ConfigMap's mount swaps symbolic
//! links, and not every file system reports such changes.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use farrier_core::image::{Definitions, Digest};
use farrier_definitions as definitions;
use farrier_definitions::DefinitionErrors;
use tokio::{sync::watch, task::spawn_blocking};
use tokio_util::sync::CancellationToken;

/// Directories of definitions, as [`definitions::load`] reads them.
const PARTS: [&str; 5] = ["images", "kernels", "templates", "announced", "site"];
/// File of definitions beside those directories.
const SITE: &str = "site.yaml";
/// Size limit of a file's fingerprint. The content of a larger file is not compared, because the loader
/// rejects the file anyway.
const MAX_FILE: u64 = 1 << 20;

/// The definitions in use, and the error of newer ones that could not be loaded.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// The last valid definitions.
    pub definitions: Arc<Definitions>,
    /// All mistakes of the definitions on disk, while these differ from the ones in use.
    pub error: Option<String>,
}

/// Reloads the directory whenever its content changes, and sends the resulting configuration. Ends on
/// cancellation, or when there is no receiver.
pub async fn watch_configuration(
    directory: PathBuf,
    every: Duration,
    current: watch::Sender<Configuration>,
    cancel: CancellationToken,
) {
    // The first iteration also loads, because files may have changed since startup read them.
    let mut seen: Option<Digest> = None;
    loop {
        let (at, before) = (directory.clone(), seen.clone());
        // A panic of the loader must not end the watch.
        if let Ok(Some((fingerprint, loaded))) =
            spawn_blocking(move || load_if_changed(&at, before.as_ref())).await
        {
            seen = Some(fingerprint);
            take_over(&current, loaded);
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            () = current.closed() => return,
            () = tokio::time::sleep(every) => {}
        }
    }
}

/// Loads the definitions if their content changed since `before`.
fn load_if_changed(
    directory: &Path,
    before: Option<&Digest>,
) -> Option<(Digest, Result<Definitions, DefinitionErrors>)> {
    let fingerprint = fingerprint(directory);
    if before == Some(&fingerprint) {
        return None;
    }
    let loaded = definitions::load(Some(directory));
    // A mount that is swapped during the load would yield a mix of both versions.
    let after = self::fingerprint(directory);
    (after == fingerprint).then_some((fingerprint, loaded))
}

fn take_over(current: &watch::Sender<Configuration>, loaded: Result<Definitions, DefinitionErrors>) {
    match loaded {
        Ok(definitions) => {
            let changed = *current.borrow().definitions != definitions;
            let recovered = current.borrow().error.is_some();
            if current.borrow().definitions.site.network() != definitions.site.network() {
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
                current.send_replace(Configuration { definitions: Arc::new(definitions), error: None });
            }
        }
        Err(errors) => {
            let text = errors.render();
            tracing::error!(mistakes = errors.0.len(), detail = %text, "definitions are invalid; the last good ones stay in use");
            current.send_modify(|configuration| configuration.error = Some(text));
        }
    }
}

/// Digest of the names and contents of all definition files.
fn fingerprint(directory: &Path) -> Digest {
    let listings = PARTS.iter().filter_map(|part| fs::read_dir(directory.join(part)).ok());
    let mut files: Vec<PathBuf> = listings.flatten().flatten().map(|entry| entry.path()).collect();
    files.push(directory.join(SITE));
    files.sort();
    let mut text = Vec::new();
    for path in files {
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let Ok(metadata) = fs::metadata(&path) else { continue };
        if hidden || !metadata.is_file() {
            continue;
        }
        let content = if metadata.len() > MAX_FILE {
            metadata.len().to_string()
        } else {
            // The loader reports unreadable files. Here an unreadable file only has to differ from a readable
            // one.
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
        let every = Duration::from_millis(5);
        let task =
            tokio::spawn(watch_configuration(mount.0.path().to_owned(), every, sender, cancel.clone()));

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
