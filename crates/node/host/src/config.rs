//! The file in which the host's administrator names the drivers.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::{Error, Result};

/// What the host needs, and where to get it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct HostConfig {
    /// Images whose drivers each kernel needs.
    pub(crate) drivers: Vec<String>,
    /// Registry of the images: host[:port]/path. Without a registry, images come from bundles only.
    #[serde(default)]
    pub(crate) registry: Option<String>,
    /// Public keys (PEM); one of them must have signed each output.
    pub(crate) keys: Vec<PathBuf>,
    /// Certificates (PEM) of the registry's certificate authority.
    #[serde(default)]
    pub(crate) ca_file: Option<PathBuf>,
    /// Modules that must be loaded. By default all modules of the drivers are loaded.
    #[serde(default)]
    pub(crate) modules: Vec<String>,
}

impl HostConfig {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs_err::read_to_string(path)?;
        let invalid = |why: String| Error::Config { path: path.to_owned(), why };
        let mut config: Self = serde_saphyr::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        if config.drivers.is_empty() {
            return Err(invalid("drivers: name at least one image".to_owned()));
        }
        if config.keys.is_empty() {
            return Err(invalid("keys: name the public key that signs the images".to_owned()));
        }
        // The names become parts of paths.
        let is_name =
            |name: &&String| !name.contains('/') && !name.starts_with('.') && !name.starts_with('-');
        if let Some(name) = config.drivers.iter().find(|name| !is_name(name)) {
            return Err(invalid(format!("drivers: {name:?} is not the name of an image")));
        }
        config.drivers.sort();
        config.drivers.dedup();
        for module in &mut config.modules {
            // The kernel's names of modules have no hyphens.
            *module = module.replace('-', "_");
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<HostConfig> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host.yaml");
        std::fs::write(&path, text).unwrap();
        HostConfig::read(&path)
    }

    #[test]
    fn modules_and_drivers_are_named_as_the_kernel_and_the_registry_name_them() {
        let config =
            read("drivers: [nvidia, hello, nvidia]\nkeys: [k]\nmodules: [nvidia-uvm, a_b]\n").unwrap();
        assert_eq!(
            (config.drivers, config.modules),
            (names(&["hello", "nvidia"]), names(&["nvidia_uvm", "a_b"]))
        );
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_host_names_drivers_and_keys() {
        let config =
            read("drivers: [hello]\nregistry: r.example/drivers\nkeys: [/etc/farrier/site.pub]\n").unwrap();
        assert_eq!(
            (config.drivers, config.registry.as_deref()),
            (vec!["hello".to_owned()], Some("r.example/drivers"))
        );
        for (text, mistake) in [
            ("drivers: []\nkeys: [k]\n", "drivers: name at least one image"),
            ("drivers: [hello]\nkeys: []\n", "keys: name the public key"),
            ("drivers: [../x]\nkeys: [k]\n", "is not the name of an image"),
            ("drivers: [hello]\nkeys: [k]\nregistri: r\n", "registri"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(mistake), "{error}");
        }
    }
}
