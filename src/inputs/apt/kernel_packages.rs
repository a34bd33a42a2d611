//! Adapter: a kernel's packages, unpacked in the cache: its headers, its image.

use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::{AptArchive, Packages, control, key_parts};
use crate::{
    blocking::stoppable,
    inputs::{FetchError, Fetcher, Lookup, TREE, digest, unpack, with_release},
    kernel::{AptSuites, Architecture, KernelTarget},
};

/// What is looked for.
pub struct Search<'a> {
    /// The kind of the cache's entries and records.
    pub kind: &'static str,
    /// Changes when the same packages are laid out differently.
    pub format: &'static str,
    pub from: &'a AptSuites,
    /// One package of each group, the first that a suite has; `{{release}}` is the kernel's.
    pub groups: Vec<Vec<String>>,
    /// Are those that they need and that come from the same source package taken as well?
    pub with_dependencies: bool,
    /// What to do where there are none.
    pub hint: &'static str,
}

/// Remembers what a search came to. It holds for as long as the tree is in the cache: what belongs to a kernel release
/// does not change in what it means, and the input hash should not change with the day.
#[derive(Debug, Serialize, Deserialize)]
pub struct Found {
    pub release: String,
    pub arch: Architecture,
    /// Of the cache's entry.
    pub key: String,
    pub origin: Vec<String>,
}

impl Found {
    /// What is made of this content for a kernel.
    pub fn new(format: &str, target: &KernelTarget, content: &[String], origin: Vec<String>) -> Self {
        let key = key(format, target, content.iter());
        Self { release: target.release.to_string(), arch: target.arch, key, origin }
    }
}

fn key<'a>(format: &'a str, target: &'a KernelTarget, parts: impl Iterator<Item = &'a String>) -> String {
    let head = [format, target.release.as_str(), target.arch.as_str()];
    digest::of_parts(head.into_iter().chain(parts.map(String::as_str)))
}

impl Search<'_> {
    /// What an earlier search came to, while its tree is in the cache.
    pub fn known(&self, fetcher: &Fetcher, target: &KernelTarget) -> Result<Option<Found>, FetchError> {
        let Some(found) = fetcher.cache.read_record::<Found>(self.kind, &self.key(target))? else {
            return Ok(None);
        };
        Ok(fetcher.cache.get(self.kind, &found.key)?.map(|_| found))
    }

    /// The packages' tree, from the cache or from the archive. `finish` is given the unpacked tree before it becomes an
    /// entry.
    pub async fn run<F>(
        &self,
        fetcher: &Fetcher,
        target: &KernelTarget,
        finish: F,
    ) -> Result<Lookup<Found>, FetchError>
    where
        F: FnOnce(&Path) -> Result<(), FetchError> + Send + 'static,
    {
        if let Some(found) = self.known(fetcher, target)? {
            return Ok(Lookup::Found(found));
        }
        let archive = AptArchive::open(fetcher, self.from, target.arch).await?;
        let groups = self.names(target);
        let found = loop {
            let chosen = if self.with_dependencies {
                archive.closure(&groups).await?
            } else {
                archive.choose(&groups, None).await?
            };
            let packages = match chosen {
                Packages::Found(packages) => packages,
                Packages::Missing(names) => return Ok(self.missing(target, &names)),
            };
            let origin: Vec<String> = packages.iter().map(control::PackageRecord::identity).collect();
            let found = Found::new(self.format, target, &origin.clone(), origin);
            if fetcher.cache.get(self.kind, &found.key)?.is_some() {
                break found;
            }
            let files = match archive.download(&packages).await {
                Ok(files) => files,
                // A mirror drops a package when a newer one replaces it: the lists may be too old. New
                // ones are not fetched twice, so this ends.
                Err(_) if archive.renew().await? => continue,
                Err(error) => return Err(error),
            };
            let make = |dir: std::path::PathBuf| {
                stoppable(move |stop| {
                    let root = dir.join(TREE);
                    fs::create_dir(&root)?;
                    for (file, package) in files.iter().zip(&packages) {
                        let what = format!("package {}={}", package.name, package.version);
                        unpack(stop, file, &root, &what)?;
                    }
                    finish(&root)
                })
            };
            fetcher.cache.get_or_make(self.kind, &found.key, make).await?;
            break found;
        };
        fetcher.cache.write_record(self.kind, &self.key(target), &found)?;
        Ok(Lookup::Found(found))
    }

    /// The finding that a suite lacks packages.
    pub fn missing<T>(&self, target: &KernelTarget, names: &str) -> Lookup<T> {
        let suites = self.from.suites.join(", ");
        let looked_for = format!("package {names} ({}) in {suites}", target.arch);
        Lookup::Missing { looked_for, hint: self.hint.to_owned() }
    }

    /// The packages' names.
    pub fn names(&self, target: &KernelTarget) -> Vec<Vec<String>> {
        let names = |group: &Vec<String>| group.iter().map(|name| with_release(name, target)).collect();
        self.groups.iter().map(names).collect()
    }

    fn key(&self, target: &KernelTarget) -> String {
        let groups: Vec<String> = self.names(target).iter().map(|group| group.join(" | ")).collect();
        key(self.format, target, groups.iter().chain(&key_parts(self.from)))
    }
}
