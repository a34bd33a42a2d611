//! Stores drivers' system extensions, each with its signatures in a layout directory for one kernel. `farrier pull` verifies an
//! extension when it is fetched, and again at each boot.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde::{Deserialize, Serialize};

use crate::{
    Error, Result,
    commands::output_of,
    config::HostConfig,
    log::print_error,
    state::{read_json, remove_if_exists, write_json},
};

/// The result of `farrier pull -o json`.
#[derive(Deserialize)]
struct Pulled {
    digest: String,
}

/// Record of a stored extension. Written after the extension's layout directory is complete and verified.
#[derive(Serialize, Deserialize)]
struct Record {
    digest: String,
    /// Public keys (PEM) with which it was verified.
    keys: Vec<String>,
    /// Whether the second of the driver's two layout directories has the extension. A new extension goes into the other one, so
    /// that the present one stays usable until the record changes.
    #[serde(default)]
    second: bool,
}

/// Cache of farrier while it verifies a stored extension. It is emptied first, so that nothing counts as verified before.
const EMPTY_CACHE: &str = "/run/farrier-host/cache";

/// Fetches and verifies system extensions.
pub(crate) struct ArtifactStore<'a> {
    pub(crate) config: &'a HostConfig,
    /// Directory of this program's data.
    pub(crate) directory: PathBuf,
    /// The program farrier.
    pub(crate) farrier: PathBuf,
}

impl ArtifactStore<'_> {
    /// Returns the digest of a driver's extension for a kernel. Fetches the extension if it is not stored. After a change of the keys,
    /// the stored extension stays if one of the present keys signed it, too.
    pub(crate) fn ensure_stored(&self, driver: &str, release: &str) -> Result<String, String> {
        let Some(record) = self.read_record(driver, release) else { return self.refresh(driver, release) };
        if self.keys().is_ok_and(|keys| keys == record.keys) {
            return Ok(record.digest);
        }
        let verified = self.record_verified(driver, release, record.second, &record.digest);
        verified.or_else(|_| self.refresh(driver, release))
    }

    /// Fetches a driver's extension for a kernel, from the registry, else from imported bundles. A stored extension stays
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

    /// Links a driver's stored extension into `directory`, and verifies its signature and digest there. Returns its path and digest.
    pub(crate) fn write_verified(
        &self,
        driver: &str,
        release: &str,
        directory: &Path,
    ) -> Result<(PathBuf, String)> {
        let mut record = self.read_record(driver, release).ok_or(Error::NotStored)?;
        let file = directory.join(extension_file(driver, release));
        let layout = self.layout(driver, release, record.second);
        let verified = self.verify(driver, release, &layout, &record.digest, &file);
        if verified.is_err() {
            // Without keys in its record, the extension is verified again, and else fetched.
            record.keys.clear();
            let _ = self.write_record(driver, release, &record);
        }
        Ok((file, verified?))
    }

    /// Removes what is stored for other kernels than these.
    pub(crate) fn keep_only(&self, releases: &[String]) -> Result<()> {
        for entry in fs_err::read_dir(self.directory.join("store")).into_iter().flatten().flatten() {
            if !releases.iter().any(|release| entry.file_name() == **release) {
                fs_err::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    /// Imports a bundle, such as one of a USB drive, as a source of extensions. farrier verifies the bundle's signature.
    pub(crate) fn import(&self, bundle: &Path) -> Result<()> {
        let to = format!("oci:{}", self.imported().display());
        let mut command =
            self.farrier(&["bundle", "import", "--registry", &to], &self.directory.join("cache"));
        output_of(command.arg(bundle)).map(drop)
    }

    fn imported(&self) -> PathBuf {
        self.directory.join("imported")
    }

    fn sources(&self) -> Vec<String> {
        let imported = self.imported();
        let bundles = imported.join("index.json").exists().then(|| format!("oci:{}", imported.display()));
        self.config.registry.iter().cloned().chain(bundles).collect()
    }

    fn layout(&self, driver: &str, release: &str, second: bool) -> PathBuf {
        self.driver_path(driver, release, if second { "layout-2" } else { "layout" })
    }

    fn read_record(&self, driver: &str, release: &str) -> Option<Record> {
        read_json(&self.driver_path(driver, release, "json")).ok().flatten()
    }

    fn write_record(&self, driver: &str, release: &str, record: &Record) -> Result<()> {
        write_json(&self.driver_path(driver, release, "json"), record)
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
        let layout = |second| self.layout(driver, release, second);
        let present = self.read_record(driver, release).map(|record| record.second);
        // Without a readable record, keep what is there until the new extension is verified.
        let second = present.map_or_else(|| layout(false).exists(), |second| !second);
        let (new, file) = (layout(second), self.driver_path(driver, release, "raw"));
        let _ = fs_err::remove_dir_all(&new);
        fs_err::create_dir_all(&new)?;
        let (cache, store) = (self.directory.join("cache"), new.display().to_string());
        let digest = self.pull(driver, release, source, &file, &["--store", &store], &cache)?;
        // A boot has only the layout: verify now that it is enough.
        let digest = self.record_verified(driver, release, second, &digest)?;
        let _ = fs_err::remove_dir_all(layout(!second));
        Ok(digest)
    }

    /// Verifies an extension in one of the layout directories, and records it as stored.
    fn record_verified(&self, driver: &str, release: &str, second: bool, digest: &str) -> Result<String> {
        let (layout, file) = (self.layout(driver, release, second), self.driver_path(driver, release, "raw"));
        let digest = self.verify(driver, release, &layout, digest, &file)?;
        fs_err::remove_file(&file)?;
        // The layout must be on the disk before the record that vouches for it.
        output_of(Command::new("sync").arg("--file-system").arg(&layout))?;
        let record = Record { digest: digest.clone(), keys: self.keys()?, second };
        self.write_record(driver, release, &record)?;
        Ok(digest)
    }

    /// Links a stored extension to `file`, and verifies it without a network, as each boot does.
    fn verify(
        &self,
        driver: &str,
        release: &str,
        layout: &Path,
        digest: &str,
        file: &Path,
    ) -> Result<String> {
        let blob = layout.join("blobs/sha256").join(digest.trim_start_matches("sha256:"));
        // A link needs no disk space. Without one, farrier copies the extension, or verifies the link of an earlier boot.
        let linked = fs_err::create_dir_all(file.parent().unwrap_or(layout))
            .and_then(|()| remove_if_exists(file))
            .and_then(|()| fs_err::hard_link(&blob, file));
        if let Err(error) = linked {
            print_error(format!("warning: {error}"));
        }
        let _ = fs_err::remove_dir_all(EMPTY_CACHE);
        let source = format!("oci:{}", layout.display());
        self.pull(driver, release, &source, file, &[], Path::new(EMPTY_CACHE))
    }

    /// Runs `farrier pull`, and returns the digest of the extension.
    fn pull(
        &self,
        driver: &str,
        release: &str,
        source: &str,
        file: &Path,
        options: &[&str],
        cache: &Path,
    ) -> Result<String> {
        let words = ["pull", "sysext", driver, "--kernel", release, "--registry", source];
        let mut command = self.farrier(&words, cache);
        // systemd merges no extension for another operating system.
        let os = r#". /etc/os-release; [ -z "$VERSION_ID" ] || echo --os "$ID" --os-version "$VERSION_ID""#;
        let os = output_of(Command::new("sh").args(["-c", os]))?;
        let printed = output_of(
            command.args(os.split_whitespace()).args(["-o", "json", "--to"]).arg(file).args(options),
        )?;
        Ok(serde_json::from_str::<Pulled>(&printed)?.digest)
    }

    fn farrier(&self, arguments: &[&str], cache: &Path) -> Command {
        let mut command = Command::new(&self.farrier);
        // The working directory may be a USB drive.
        command.arg("--no-config").args(arguments);
        for key in &self.config.keys {
            command.arg("--key").arg(key);
        }
        // The program runs early in the boot, without a home directory.
        command.env("FARRIER_CACHE_DIR", cache).env("HOME", &self.directory);
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

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    /// A host with a program in farrier's place, which records its arguments.
    struct Bench {
        directory: tempfile::TempDir,
        config: HostConfig,
    }

    impl Bench {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let key = directory.path().join("site.pub");
            fs::write(&key, "old").unwrap();
            let config = HostConfig {
                drivers: vec!["hello".to_owned()],
                registry: Some("r.example/drivers".to_owned()),
                keys: vec![key],
                ca_file: None,
                modules: Vec::new(),
            };
            let this = Self { directory, config };
            this.set_program("printf '{\"digest\": \"sha256:1\"}'");
            this
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        /// Replaces the program. It writes the requested file.
        fn set_program(&self, last: &str) {
            let calls = self.path("calls").display().to_string();
            let script = format!(
                "#!/bin/sh\necho \"$*\" >> {calls}\nwhile [ $# -gt 0 ]; do\n\
                 if [ \"$1\" = --to ]; then echo x > \"$2\"; fi\nshift\ndone\n{last}\n"
            );
            fs::write(self.path("farrier"), script).unwrap();
            fs::set_permissions(self.path("farrier"), fs::Permissions::from_mode(0o755)).unwrap();
        }

        /// Returns the digest, and the registries that the program was asked to read.
        fn ensure_stored(&self) -> (Result<String, String>, Vec<String>) {
            let _ = fs::remove_file(self.path("calls"));
            let store = ArtifactStore {
                config: &self.config,
                directory: self.path("data"),
                farrier: self.path("farrier"),
            };
            let result = store.ensure_stored("hello", "6.1");
            let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
            let registry = |line: &str| {
                let mut words = line.split(' ').skip_while(|word| *word != "--registry");
                words.nth(1).unwrap().replace(&self.path("data").display().to_string(), "")
            };
            (result, calls.lines().map(registry).collect())
        }
    }

    const LAYOUT: &str = "oci:/store/6.1/hello.layout";

    #[test]
    fn a_changed_key_keeps_the_stored_driver_version() {
        let bench = Bench::new();
        let digest = Ok("sha256:1".to_owned());
        let fetched = ["r.example/drivers", LAYOUT].map(str::to_owned).to_vec();
        assert_eq!(bench.ensure_stored(), (digest.clone(), fetched));
        assert_eq!(bench.ensure_stored(), (digest.clone(), vec![]));
        fs::write(bench.path("site.pub"), "new").unwrap();
        assert_eq!(bench.ensure_stored(), (digest.clone(), vec![LAYOUT.to_owned()]));
        assert_eq!(bench.ensure_stored(), (digest, vec![]), "the new key is recorded");
        fs::write(bench.path("site.pub"), "another").unwrap();
        bench.set_program("echo 'error: no accepted signature' >&2; exit 1");
        let (result, registries) = bench.ensure_stored();
        assert!(result.unwrap_err().ends_with(": no accepted signature"));
        assert_eq!(registries, [LAYOUT, "r.example/drivers"]);
    }

    #[test]
    fn the_registry_precedes_imported_bundles() {
        let bench = Bench::new();
        fs::create_dir_all(bench.path("data/imported")).unwrap();
        fs::write(bench.path("data/imported/index.json"), "{}").unwrap();
        bench.set_program("echo 'error: no image' >&2; exit 1");
        assert_eq!(bench.ensure_stored().1, ["r.example/drivers", "oci:/imported"]);
    }

    /// `farrier-host import` may run in a directory that an untrusted drive contains.
    #[test]
    fn a_configuration_in_the_working_directory_has_no_effect() {
        let bench = Bench::new();
        bench.ensure_stored().0.unwrap();
        let calls = fs::read_to_string(bench.path("calls")).unwrap();
        assert!(calls.lines().all(|call| call.starts_with("--no-config pull ")), "{calls}");
    }

    /// Debian testing has no version.
    #[test]
    fn extensions_for_other_systems_are_refused() {
        let bench = Bench::new();
        bench.ensure_stored().0.unwrap();
        let has_version = fs::read_to_string("/etc/os-release").unwrap().contains("\nVERSION_ID=");
        let calls = fs::read_to_string(bench.path("calls")).unwrap();
        assert!(calls.lines().all(|call| call.contains(" --os-version ") == has_version), "{calls}");
    }
}
