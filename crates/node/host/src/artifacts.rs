//! Stores drivers' system extensions, each with its signatures in a layout directory for one kernel. `farrier pull` verifies an
//! extension when it is fetched, and again at each boot.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde::{Deserialize, Serialize};

use crate::{Error, Result, commands::output_of, config::HostConfig, state::write_durably};

/// The result of `farrier pull -o json`.
#[derive(Deserialize)]
struct Pulled {
    digest: String,
    verified: bool,
}

/// Record of a stored extension.
#[derive(Serialize, Deserialize)]
struct Record {
    digest: String,
    /// Public keys (PEM) with which it was verified.
    keys: Vec<String>,
}

/// Fetches and verifies system extensions.
pub(crate) struct ArtifactStore<'a> {
    pub(crate) config: &'a HostConfig,
    /// Directory of this program's data.
    pub(crate) directory: PathBuf,
}

impl ArtifactStore<'_> {
    /// Returns the digest of a driver's extension for a kernel. Fetches the extension if it is not stored.
    pub(crate) fn ensure_stored(&self, driver: &str, release: &str) -> Result<String, String> {
        match self.stored(driver, release) {
            Some(digest) => Ok(digest),
            None => self.refresh(driver, release),
        }
    }

    /// Fetches a driver's extension for a kernel, from imported bundles, else from the registry. A stored extension stays
    /// until the new one is complete.
    pub(crate) fn refresh(&self, driver: &str, release: &str) -> Result<String, String> {
        let mut reasons = Vec::new();
        for source in self.sources() {
            match self.fetch(driver, release, &source) {
                Ok(digest) => return Ok(digest),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        if reasons.is_empty() {
            reasons.push("no registry is configured, and no bundle was imported".to_owned());
        }
        Err(reasons.join("; "))
    }

    /// Returns the digest of a driver's extension if it is stored and was verified with the present keys.
    pub(crate) fn stored(&self, driver: &str, release: &str) -> Option<String> {
        let record = fs_err::read(self.record(driver, release)).ok()?;
        let record: Record = serde_json::from_slice(&record).ok()?;
        (record.keys == self.keys().ok()?).then_some(record.digest)
    }

    /// Verifies the signature and digest of a driver's stored extension, and writes it into `directory`. Returns its path and
    /// digest.
    pub(crate) fn write_verified(
        &self,
        driver: &str,
        release: &str,
        directory: &Path,
    ) -> Result<(PathBuf, String)> {
        fs_err::create_dir_all(directory)?;
        let file = directory.join(extension_file(driver, release));
        let layout = format!("oci:{}", self.layout(driver, release).display());
        let pulled = self.pull(driver, release, &layout, &file, &[]);
        if pulled.is_err() {
            // Without its record, the extension is fetched again.
            let _ = fs_err::remove_file(self.record(driver, release));
        }
        Ok((file, pulled?))
    }

    /// Removes what is stored for other kernels than these.
    pub(crate) fn keep_only(&self, releases: &[String]) -> Result<()> {
        let store = self.directory.join("store");
        if !store.exists() {
            return Ok(());
        }
        for entry in fs_err::read_dir(store)? {
            let entry = entry?;
            if !releases.iter().any(|release| entry.file_name() == **release) {
                fs_err::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    /// Imports a bundle, such as one of a USB drive, as a source of extensions. farrier verifies the bundle's signature.
    pub(crate) fn import(&self, bundle: &Path) -> Result<()> {
        let to = format!("oci:{}", self.imported().display());
        let mut command = self.farrier(&["bundle", "import", "--registry", &to]);
        output_of(command.arg(bundle)).map(drop)
    }

    fn imported(&self) -> PathBuf {
        self.directory.join("imported")
    }

    fn sources(&self) -> Vec<String> {
        let imported = self.imported();
        let bundles = imported.join("index.json").exists().then(|| format!("oci:{}", imported.display()));
        bundles.into_iter().chain(self.config.registry.clone()).collect()
    }

    fn layout(&self, driver: &str, release: &str) -> PathBuf {
        self.driver_path(driver, release, "layout")
    }

    /// Returns the file with the digest of a stored extension.
    fn record(&self, driver: &str, release: &str) -> PathBuf {
        self.driver_path(driver, release, "json")
    }

    /// Returns the path of a file or directory of one driver. Appends the extension, because a driver's name may contain dots.
    fn driver_path(&self, driver: &str, release: &str, extension: &str) -> PathBuf {
        self.directory.join("store").join(release).join(format!("{driver}.{extension}"))
    }

    /// Returns the content of the key files, because a file may get another key.
    fn keys(&self) -> Result<Vec<String>> {
        let keys = self.config.keys.iter().map(fs_err::read_to_string);
        Ok(keys.collect::<std::io::Result<_>>()?)
    }

    fn fetch(&self, driver: &str, release: &str, source: &str) -> Result<String> {
        let layout = self.layout(driver, release);
        let [new, file] = ["new", "raw"].map(|extension| self.driver_path(driver, release, extension));
        if new.exists() {
            fs_err::remove_dir_all(&new)?;
        }
        fs_err::create_dir_all(&new)?;
        let digest = self.pull(driver, release, source, &file, &["--store", &new.display().to_string()])?;
        fs_err::remove_file(&file)?;
        // The layout must be on the disk before the record that vouches for it.
        output_of(Command::new("sync").arg("--file-system").arg(&new))?;
        let record = self.record(driver, release);
        if layout.exists() {
            let _ = fs_err::remove_file(&record);
            fs_err::remove_dir_all(&layout)?;
        }
        fs_err::rename(&new, &layout)?;
        let content = serde_json::to_vec(&Record { digest: digest.clone(), keys: self.keys()? });
        write_durably(&record, &content.map_err(std::io::Error::other)?)?;
        Ok(digest)
    }

    /// Runs `farrier pull`, and returns the digest of the extension.
    fn pull(
        &self,
        driver: &str,
        release: &str,
        source: &str,
        file: &Path,
        options: &[&str],
    ) -> Result<String> {
        let mut command =
            self.farrier(&["pull", "sysext", driver, "--kernel", release, "--registry", source]);
        command.args(["-o", "json", "--to"]).arg(file).args(options);
        let printed = output_of(&mut command)?;
        let pulled: Pulled = serde_json::from_str(&printed).map_err(std::io::Error::other)?;
        if !pulled.verified {
            return Err(Error::Program {
                program: "farrier".to_owned(),
                why: "no signature was verified".to_owned(),
            });
        }
        Ok(pulled.digest)
    }

    fn farrier(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("farrier");
        command.args(arguments);
        for key in &self.config.keys {
            command.arg("--key").arg(key);
        }
        // The program runs early in the boot, without a home directory.
        command.env("FARRIER_CACHE_DIR", self.directory.join("cache")).env("HOME", &self.directory);
        command.env("FARRIER_LOG_LEVEL", "error");
        if let Some(file) = &self.config.ca_file {
            command.env("FARRIER_CA_FILE", file);
        }
        command
    }
}

/// Name of an extension's file, which is the name of the extension with `.raw`.
fn extension_file(driver: &str, release: &str) -> String {
    format!("farrier-{driver}-{release}.raw")
}
