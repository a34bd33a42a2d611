//! The modules of RPM repositories (`modules.yaml`), which determine the packages that dnf would exclude.
//!
//! A module has streams, such as perl 5.26 and 5.32, and each stream has its own packages. A system has at most one stream of a
//! module: the chosen one, or else the default if the repositories name one.

use std::collections::{BTreeMap, HashSet};

use farrier_core::image::checked::StreamName;
use serde::Deserialize;

use super::package::RpmPackage;
use crate::error::MetadataError;

/// Maximum size of one repository's `modules.yaml` in bytes, four times the size of RHEL's.
pub const MAX_MODULES_SIZE: u64 = 64 << 20;
/// Maximum length of a chain of modules that need one another. An example from RHEL 8: perl-DBD-SQLite, perl-DBI, perl.
const MAX_CHAIN: usize = 100;

/// Modularity metadata of the repositories.
#[derive(Debug, Default)]
pub struct ModularMetadata {
    builds: Vec<Build>,
    /// Default stream of each module that has one.
    defaults: BTreeMap<String, String>,
}

/// One build of a stream (a document `modulemd`, version 2).
#[derive(Debug, Deserialize)]
struct Build {
    name: String,
    stream: String,
    /// Alternative sets of dependencies.
    #[serde(default)]
    dependencies: Vec<Dependencies>,
    #[serde(default)]
    artifacts: Artifacts,
}

#[derive(Debug, Deserialize)]
struct Dependencies {
    /// Streams by module. A stream with a `-` before it is excluded.
    #[serde(default)]
    requires: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
struct Artifacts {
    /// Packages as `name-epoch:version-release.arch`.
    #[serde(default)]
    rpms: Vec<String>,
}

/// A document `modulemd-defaults`.
#[derive(Debug, Deserialize)]
struct StreamDefault {
    module: String,
    #[serde(default)]
    stream: Option<String>,
}

/// A document of either kind.
#[derive(Deserialize)]
struct Document<T> {
    data: T,
}

/// Decides which packages the system's streams exclude.
#[derive(Debug, Default)]
pub struct ModuleFilter {
    /// Packages of the streams that the system has.
    enabled: HashSet<String>,
    /// Packages of all streams.
    modular: HashSet<String>,
    /// Names of the packages in `enabled`. They exclude other packages of the same names.
    enabled_names: HashSet<String>,
    /// Names of the packages in `modular`.
    modular_names: HashSet<String>,
}

impl ModularMetadata {
    /// Adds one repository's `modules.yaml`. If several repositories name a module's default stream, the first one counts.
    pub fn add(&mut self, text: &str) -> Result<(), MetadataError> {
        // Other kinds of documents, such as translations, are the majority and do not concern packages.
        for document in text.split("\n---").map(|document| document.strip_prefix("---").unwrap_or(document)) {
            let has = |line: &str| document.lines().any(|other| other.trim_end() == line);
            if has("document: modulemd") && has("version: 2") {
                self.builds.push(read(document)?);
            } else if has("document: modulemd-defaults") {
                let StreamDefault { module, stream } = read(document)?;
                if let Some(stream) = stream {
                    self.defaults.entry(module).or_insert(stream);
                }
            }
        }
        Ok(())
    }

    /// Returns the filter for a system with these streams and the default streams.
    ///
    /// # Errors
    /// The reason: a stream that no repository has, or a chain of modules that is too long.
    pub fn filter(&self, selected: &BTreeMap<StreamName, StreamName>) -> Result<ModuleFilter, String> {
        let selected: BTreeMap<&str, &str> =
            selected.iter().map(|(module, stream)| (module.as_str(), stream.as_str())).collect();
        let exists = |module: &str, stream: &str| {
            self.builds.iter().any(|build| build.name == module && build.stream == stream)
        };
        if let Some((module, stream)) = selected.iter().find(|(module, stream)| !exists(module, stream)) {
            return Err(format!("no repository has module stream {module}:{stream}"));
        }
        let stream_of = |module: &str| {
            selected.get(module).copied().or_else(|| self.defaults.get(module).map(String::as_str))
        };
        let mut active: Vec<&Build> =
            self.builds.iter().filter(|build| stream_of(&build.name) == Some(&build.stream)).collect();
        // A build that needs a stream of another module is only available together with that stream.
        let mut rounds = 0;
        loop {
            let streams: BTreeMap<&str, &str> =
                active.iter().map(|build| (build.name.as_str(), build.stream.as_str())).collect();
            let previous_count = active.len();
            active.retain(|build| build.is_met(&streams));
            if active.len() == previous_count {
                break;
            }
            rounds += 1;
            if rounds > MAX_CHAIN {
                return Err(format!("more than {MAX_CHAIN} modules need one another in a chain"));
            }
        }
        let packages = |builds: &mut dyn Iterator<Item = &Build>| -> HashSet<String> {
            builds.flat_map(|build| build.artifacts.rpms.iter().cloned()).collect()
        };
        let enabled = packages(&mut active.iter().copied());
        let modular = packages(&mut self.builds.iter());
        let (enabled_names, modular_names) = (names(&enabled), names(&modular));
        Ok(ModuleFilter { enabled, modular, enabled_names, modular_names })
    }
}

fn names(packages: &HashSet<String>) -> HashSet<String> {
    let binary = packages.iter().filter(|package| !package.ends_with("src"));
    binary.filter_map(|package| package.rsplitn(3, '-').nth(2)).map(str::to_owned).collect()
}

impl Build {
    /// Whether the system has what the build needs. `streams` are its streams, by module.
    fn is_met(&self, streams: &BTreeMap<&str, &str>) -> bool {
        let is_met = |(module, allowed): (&String, &Vec<String>)| {
            // A repository is for one version of the distribution, so its platform always matches.
            module == "platform" || streams.get(module.as_str()).is_some_and(|stream| allows(allowed, stream))
        };
        self.dependencies.is_empty()
            || self.dependencies.iter().any(|alternative| alternative.requires.iter().all(is_met))
    }
}

/// Whether a list of streams allows `stream`. An empty list, or one with only exclusions, allows every other stream.
fn allows(list: &[String], stream: &str) -> bool {
    let mut names = list.iter().filter(|name| !name.starts_with('-')).peekable();
    let is_refused = list.iter().any(|name| name.strip_prefix('-') == Some(stream));
    !is_refused && (names.peek().is_none() || names.any(|name| name == stream))
}

impl ModuleFilter {
    /// Whether a package must not be installed.
    pub fn excludes(&self, package: &RpmPackage) -> bool {
        let RpmPackage { name, epoch, version, arch, .. } = package;
        let id = format!("{name}-{epoch}:{version}.{arch}");
        !self.enabled.contains(&id) && (self.modular.contains(&id) || self.enabled_names.contains(name))
    }

    /// Whether packages of this name belong to modules.
    pub(crate) fn is_modular_name(&self, name: &str) -> bool {
        self.modular_names.contains(name)
    }
}

fn read<T: for<'de> Deserialize<'de>>(document: &str) -> Result<T, MetadataError> {
    let read: Document<T> =
        serde_saphyr::from_str(document).map_err(|error| MetadataError(error.to_string()))?;
    Ok(read.data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::Checksum;

    /// Modules in the form of RHEL 8: two streams of perl, packages built for either of them, and a module without a default.
    const MODULES: &str = r#"---
document: modulemd
version: 2
data:
  name: perl
  stream: 5.30
  version: 8040020200923213406
  context: 466ea64f
  arch: x86_64
  summary: Practical Extraction and Report Language
  description: >-
    Perl is a high-level programming language
    --- with a line of its own.
  license: {module: [MIT]}
  dependencies:
  - buildrequires: {platform: [el8.4.0]}
    requires: {platform: [el8]}
  artifacts:
    rpms:
    - perl-4:5.30.1-452.x86_64
    - perl-4:5.30.1-452.src
...
---
document: modulemd
version: 2
data:
  name: perl
  stream: "5.26"
  dependencies: [{requires: {platform: [el8]}}]
  artifacts: {rpms: [perl-4:5.26.3-416.x86_64]}
...
---
document: modulemd
version: 2
data:
  name: perl-DBI
  stream: '1.641'
  context: one
  dependencies: [{requires: {platform: [el8], perl: ['5.26']}}]
  artifacts: {rpms: [perl-DBI-0:1.641-3.one.x86_64]}
---
document: modulemd
version: 2
data:
  name: perl-DBI
  stream: '1.641'
  context: two
  dependencies: [{requires: {platform: [el8], perl: [-5.26]}}]
  artifacts: {rpms: [perl-DBI-0:1.641-3.two.x86_64]}
---
document: modulemd
version: 2
data: {name: python, stream: "3.9", artifacts: {rpms: [make-0:9-1.x86_64]}}
---
document: modulemd-translations
version: 1
data: [not, looked, at]
---
document: modulemd-defaults
version: 1
data: {module: perl, stream: "5.26", profiles: {"5.26": [common]}}
---
document: modulemd-defaults
version: 1
data: {module: perl-DBI, stream: '1.641'}
---
document: modulemd-defaults
version: 1
data: {module: python}
"#;

    fn package(name: &str, epoch: u64, version: &str) -> RpmPackage {
        RpmPackage {
            name: name.to_owned(),
            epoch,
            version: version.to_owned(),
            arch: "x86_64".to_owned(),
            checksum: Checksum::sha256(&"0".repeat(64)),
            location: String::new(),
            base: None,
            releases: Vec::new(),
        }
    }

    /// Returns the packages that may be installed with these streams.
    fn allowed(streams: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let mut modules = ModularMetadata::default();
        modules.add(MODULES).unwrap();
        let named = streams.iter().map(|(module, stream)| (module.parse().unwrap(), stream.parse().unwrap()));
        let filter = modules.filter(&named.collect())?;
        let all = [
            package("perl", 4, "5.30.1-452"),
            package("perl", 4, "5.26.3-416"),
            // A package without a module.
            package("perl", 4, "5.36-1"),
            package("perl-DBI", 0, "1.641-3.one"),
            package("perl-DBI", 0, "1.641-3.two"),
            package("make", 0, "9-1"),
            package("make", 0, "4.2-11"),
        ];
        assert!(
            all.iter().all(|package| filter.is_modular_name(&package.name)) && !filter.is_modular_name("gcc")
        );
        let allowed = all.iter().filter(|package| !filter.excludes(package));
        Ok(allowed.map(|package| format!("{}-{}", package.name, package.version)).collect())
    }

    #[test]
    fn default_streams_and_non_modular_packages_are_allowed() {
        assert_eq!(allowed(&[]).unwrap(), ["perl-5.26.3-416", "perl-DBI-1.641-3.one", "make-4.2-11"]);
    }

    #[test]
    fn a_named_stream_replaces_the_default_stream() {
        let found = allowed(&[("perl", "5.30")]).unwrap();
        assert_eq!(found, ["perl-5.30.1-452", "perl-DBI-1.641-3.two", "make-4.2-11"]);
        let found = allowed(&[("python", "3.9")]).unwrap();
        assert_eq!(found, ["perl-5.26.3-416", "perl-DBI-1.641-3.one", "make-9-1"]);
        let error = allowed(&[("perl", "5.99")]).unwrap_err();
        assert_eq!(error, "no repository has module stream perl:5.99");
    }

    /// Each round removes one module.
    #[test]
    fn a_long_chain_of_modules_is_refused() {
        let mut modules = ModularMetadata::default();
        for number in 0..=MAX_CHAIN {
            let next = number + 1;
            let text = format!(
                "document: modulemd\nversion: 2\ndata: {{name: m{number}, stream: \"1\", dependencies: [{{requires: {{m{next}: []}}}}]}}\n\
                 ---\ndocument: modulemd-defaults\nversion: 1\ndata: {{module: m{number}, stream: \"1\"}}\n"
            );
            modules.add(&text).unwrap();
        }
        let error = modules.filter(&BTreeMap::new()).unwrap_err();
        assert_eq!(error, "more than 100 modules need one another in a chain");
    }

    #[test]
    fn without_modules_nothing_is_excluded() {
        let filter = ModularMetadata::default().filter(&BTreeMap::new()).unwrap();
        assert!(!filter.is_modular_name("perl") && !filter.excludes(&package("perl", 4, "5.30.1-452")));
        let damaged = "---\ndocument: modulemd\nversion: 2\ndata: {name: [}\n";
        assert!(ModularMetadata::default().add(damaged).is_err());
    }
}
