//! Reads Debian-like package archives through the distribution's own `apt-get`, with a private configuration and state. So apt
//! verifies signatures in the same way as on the host.

pub mod control;
pub(super) mod package;
pub mod sources;
mod system;
pub use farrier_core::kernel::debian_version as version;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use control::PackageRecord;
use farrier_core::{
    image::checked::{Mirror, Suite, to_strings},
    kernel::{AptSuites, Architecture},
};
use farrier_local::{
    blocking::stoppable,
    cache::{Cache, LockMode, has_content},
    files::if_there,
};
use farrier_net::Net;
use fs_err as fs;
use sources::{SignedBy, SourceEntry};
use tokio::process::Command;
use url::Url;

use super::{
    FetchError, Fetcher, MISSING_PACKAGE_MAX_AGE, Result, digest, download::is_placeholder, process,
};

const KIND: &str = "apt";

/// A set of suites with a private apt state in the cache.
#[derive(Clone, Debug)]
pub struct AptArchive {
    cache: Cache,
    key: String,
    dir: PathBuf,
    arch: Architecture,
    suites: String,
    /// Number of suites, summed over all addresses.
    suite_count: usize,
    max_list_age: Duration,
    net: Net,
    uris: Vec<String>,
    ignores_environment: bool,
}

/// Result of a package lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packages<P = PackageRecord> {
    /// All packages were found.
    Found(Vec<P>),
    /// The first of the named packages that no suite has.
    Missing(String),
}

impl AptArchive {
    /// Opens the archive for these suites, with the host's apt configuration as defaults and the fetcher's network settings.
    /// Nothing is fetched yet: outdated lists are refreshed on first use.
    pub async fn open(fetcher: &Fetcher, suites: &AptSuites, arch: Architecture) -> Result<Self> {
        let (cache, net, apt_dir) = (&fetcher.cache, &fetcher.net, &fetcher.options.apt_dir);
        let mut entries = entries(net, apt_dir, suites)?;
        if let Some(file) = &suites.signed_by {
            let keyring = sources::keyring(&fetcher.root.join(file), suites)?;
            for entry in &mut entries {
                entry.signed_by = SignedBy::Named(keyring.clone());
            }
        }
        let sources = sources::render(&entries);
        let keys = fetcher.keys_digest(suites.signed_by.as_ref())?;
        let key = digest::of_parts(
            ["apt-1", arch.as_str(), &sources, &apt_dir.to_string_lossy()].into_iter().chain(keys.as_deref()),
        );
        let dir = cache.entry_path(KIND, &key)?;
        let suite_count = entries.iter().map(|entry| entry.uris.len() * entry.suites.len()).sum();
        let uris: Vec<String> = entries.into_iter().flat_map(|entry| entry.uris).collect();
        let apt_options = net.apt_options(uris.iter().map(String::as_str)).await?;
        let _lock = cache.lock(KIND, &key, LockMode::Exclusive).await?;
        for part in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(dir.join(part))?;
        }
        // apt's package cache is valid for one path of the lists only, and caches can share lists through symbolic links.
        let dir = fs::canonicalize(dir)?;
        let mut config = config(&dir, apt_dir, arch)?;
        for line in &apt_options.options {
            config.extend([line, "\n"]);
        }
        cache.hold(KIND, &key)?;
        for (name, text) in [("apt.conf", config.as_str()), ("source.sources", &sources), ("status", "")] {
            let path = dir.join(name);
            if fs::read_to_string(&path).ok().as_deref() != Some(text) {
                // Replace the file instead of writing to it, so that it is readable by this user only: it can contain a proxy
                // password.
                let mut file = tempfile::NamedTempFile::new_in(&dir)?;
                file.write_all(text.as_bytes())?;
                file.persist(&path).map_err(|error| error.error)?;
            }
        }
        Ok(Self {
            cache: cache.clone(),
            key,
            dir,
            arch,
            suites: suites.suites.join(", "),
            suite_count,
            max_list_age: fetcher.options.refresh,
            net: net.clone(),
            uris,
            ignores_environment: apt_options.ignores_environment,
        })
    }

    /// Returns the names of all packages that begin with `prefix`.
    pub async fn names(&self, prefix: &str) -> Result<Vec<String>> {
        self.update(self.max_list_age).await?;
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let mut command = self.command("apt-cache");
        command.args(["pkgnames", prefix]);
        let action = || format!("list packages of {}", self.suites);
        let output = process::run(command, "apt-cache", action).await?;
        Ok(output.stdout.lines().filter(|name| control::is_package_name(name)).map(str::to_owned).collect())
    }

    /// Chooses one package per group, in the order of the groups: the newest version of the first name that a suite has, or
    /// exactly `version`. Before reporting a group as missing, refreshes the lists unless they are very recent.
    pub async fn choose(&self, groups: &[Vec<String>], version: Option<&str>) -> Result<Packages> {
        self.update(self.max_list_age).await?;
        let chosen = self.choose_from_lists(groups, version).await?;
        let is_renewed = matches!(chosen, Packages::Missing(_)) && self.renew().await?;
        if is_renewed { self.choose_from_lists(groups, version).await } else { Ok(chosen) }
    }

    async fn choose_from_lists(&self, groups: &[Vec<String>], version: Option<&str>) -> Result<Packages> {
        let candidates = self.show(groups.iter().flatten().map(String::as_str).collect()).await?;
        let mut chosen = Vec::with_capacity(groups.len());
        for group in groups {
            let newest = |name: &String| {
                control::newest(&candidates, |package| {
                    package.name == *name && version.is_none_or(|version| package.version == version)
                })
            };
            match group.iter().find_map(newest) {
                Some(package) => chosen.push(package.clone()),
                None => return Ok(Packages::Missing(group.join(" or ") + &self.missing_note()?)),
            }
        }
        Ok(Packages::Found(chosen))
    }

    /// Chooses packages like [`Self::choose`] and adds, recursively, their dependencies from the same source package. Returns
    /// them in name order.
    pub async fn closure(&self, groups: &[Vec<String>]) -> Result<Packages> {
        let mut level = match self.choose(groups, None).await? {
            Packages::Found(packages) => packages,
            missing @ Packages::Missing(_) => return Ok(missing),
        };
        let mut chosen = BTreeMap::new();
        while !level.is_empty() {
            let needed: BTreeSet<&str> =
                level.iter().flat_map(|p| p.depends.iter().flatten()).map(|d| d.name.as_str()).collect();
            let known = self.show(needed).await?;
            let next = level.iter().flat_map(|package| control::same_source(package, &known)).cloned();
            let next: Vec<PackageRecord> = next.collect();
            chosen.extend(level.into_iter().map(|package| (package.name.clone(), package)));
            level = next.into_iter().filter(|package| !chosen.contains_key(&package.name)).collect();
        }
        Ok(Packages::Found(chosen.into_values().collect()))
    }

    /// Returns every version of the packages in the lists.
    async fn show(&self, names: BTreeSet<&str>) -> Result<Vec<PackageRecord>> {
        // apt treats an unknown name as a pattern. Skip names that no package can have.
        let names: BTreeSet<&str> = names.into_iter().filter(|name| control::is_package_name(name)).collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let mut command = self.command("apt-cache");
        command.arg("show").args(&names);
        let output = process::output(command, "apt-cache").await?;
        if !output.status.success() && !output.stderr.contains("No packages found") {
            return Err(process::failure(format!("look up packages in {}", self.suites), &output.stderr));
        }
        let mut packages = control::packages(&output.stdout, self.arch);
        packages.retain(|package| names.contains(package.name.as_str()));
        Ok(packages)
    }

    /// Refreshes the package lists unless they are very recent; returns whether they were refreshed.
    pub async fn renew(&self) -> Result<bool> {
        self.update(MISSING_PACKAGE_MAX_AGE).await
    }

    /// Returns a note for messages about missing suites.
    fn missing_note(&self) -> Result<String> {
        let missing = fs::read_to_string(self.stamp())?;
        let missing: Vec<String> = missing.lines().map(|suite| format!("{suite} (missing)")).collect();
        Ok(if missing.is_empty() { String::new() } else { format!(", without {}", missing.join(", ")) })
    }

    /// Fails if the archives lack a suite, which may have the newest version of a package. Before that, refreshes the lists unless
    /// they are very recent.
    async fn ensure_no_suite_is_missing(&self, action: &str) -> Result<()> {
        self.update(self.max_list_age).await?;
        let mut missing = self.missing_note()?;
        if !missing.is_empty() && self.renew().await? {
            missing = self.missing_note()?;
        }
        if missing.is_empty() {
            return Ok(());
        }
        let message = format!("not all suites are available{missing}");
        Err(FetchError::permanent(format!("{action} of {}", self.suites), message))
    }

    /// Path of the stamp file. Its age is the age of the lists, and it contains the suites that the archives do not have.
    fn stamp(&self) -> PathBuf {
        self.dir.join("updated")
    }

    /// Refreshes the lists unless they are younger than `max_age`; returns whether they were refreshed. A missing suite is an
    /// error only if all suites are missing, because apt has fetched the lists of the others.
    async fn update(&self, max_age: Duration) -> Result<bool> {
        let stamp = self.stamp();
        if is_younger(&stamp, max_age) {
            return Ok(false);
        }
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Exclusive).await?;
        if is_younger(&stamp, max_age) {
            // Another farrier refreshed the lists while this one waited.
            return Ok(true);
        }
        self.permit()?;
        let mut command = self.command("apt-get");
        command.args(["--quiet", "--quiet", "update"]);
        let output = process::output(command, "apt-get").await?;
        // Older versions of apt only warn when a list cannot be fetched, and continue with the old one.
        let warned = ["Failed to fetch", "Some index files failed"].iter().any(|w| output.stderr.contains(w));
        let failed = !output.status.success() || warned;
        let absent = if failed { absent(&output.stderr) } else { Vec::new() };
        if failed && (absent.is_empty() || absent.len() >= self.suite_count) {
            let action = format!("fetch the package lists of {}", self.suites);
            return Err(process::failure(action, &output.stderr));
        }
        if failed {
            tracing::warn!(suites = absent.join(", "), "some suites are missing in the archives");
        }
        fs::write(&stamp, absent.join("\n"))?;
        Ok(true)
    }

    /// Returns the packages' files, each in the cache under its verified SHA-256. Missing files are downloaded together.
    pub async fn download(&self, packages: &[PackageRecord]) -> Result<Vec<PathBuf>> {
        let mut missing = Vec::new();
        for package in packages {
            let known = self.cache.get(DEBS, &package.sha256)?.filter(|entry| has_content(entry));
            if known.is_none() {
                missing.push(package);
            }
        }
        let scratch = self.cache.scratch()?;
        if !missing.is_empty() {
            self.download_into(scratch.path(), &missing).await?;
        }
        let mut files = Vec::with_capacity(packages.len());
        for package in packages {
            let file = scratch.path().join(&package.sha256);
            let make = |dir: PathBuf| async move {
                let path = dir.join(DEB);
                // A part of the cache may be on a separate disk.
                Ok::<_, FetchError>(fs::rename(&file, &path).or_else(|_| fs::copy(&file, &path).map(drop))?)
            };
            let entry = self.cache.get_or_make_intact(DEBS, &package.sha256, has_content, make).await?;
            files.push(entry.join(DEB));
        }
        Ok(files)
    }

    /// Downloads the packages' files and names each one by its SHA-256.
    async fn download_into(&self, dir: &Path, packages: &[&PackageRecord]) -> Result<()> {
        self.permit()?;
        let lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let names = packages.iter().map(|PackageRecord { name, version, .. }| format!("{name}={version}"));
        let names: Vec<String> = names.collect();
        let mut command = self.command("apt-get");
        command.args(["--quiet", "--quiet", "download"]).args(&names).current_dir(dir);
        let action = || match &names[..] {
            [one] => format!("download package {one}"),
            all => format!("download {} packages of {}", all.len(), self.suites),
        };
        process::run(command, "apt-get", action).await?;
        drop(lock);
        let expected: Vec<(String, String)> =
            packages.iter().map(|package| (package.name.clone(), package.sha256.clone())).collect();
        let dir = dir.to_owned();
        stoppable(move |stop| {
            let files = files_by_package(&dir)?;
            for ((name, sha256), name_and_version) in expected.into_iter().zip(names) {
                let file = files.get(&name).ok_or_else(|| {
                    io::Error::other(format!("apt-get left no file of {name} in {}", dir.display()))
                })?;
                let actual = digest::of_file(file, stop)?;
                if actual != sha256 {
                    let what = format!("package {name_and_version}");
                    return Err(FetchError::sha256(what, &actual, &sha256));
                }
                fs::rename(file, dir.join(sha256))?;
            }
            Ok(())
        })
        .await
    }

    /// Checks that apt-get may contact the archive's hosts. Reading the existing lists needs no permission.
    fn permit(&self) -> Result<()> {
        let suites = format!("suite {}", self.suites);
        Ok(self.net.check_archives_allowed(self.uris.iter().map(String::as_str), &suites)?)
    }

    fn command(&self, program: &'static str) -> Command {
        let mut command = process::command(program);
        if self.ignores_environment {
            process::without_proxies(&mut command);
        }
        command.arg("--config-file").arg(self.dir.join("apt.conf"));
        command
    }
}

/// Checks that the archive has these suites and returns the hosts that answered. apt's helper fetches each suite's `InRelease`,
/// using apt's proxies, credentials and certificates.
pub(super) async fn probe(fetcher: &Fetcher, suites: &[Suite], mirror: Option<&Mirror>) -> Result<String> {
    let selection = AptSuites { suites: suites.to_vec(), mirror: mirror.cloned(), ..AptSuites::default() };
    // `InRelease` is the same for all architectures.
    let arch = std::env::consts::ARCH.parse().unwrap_or(Architecture::Amd64);
    let archive = AptArchive::open(fetcher, &selection, arch).await?;
    archive.permit()?;
    let scratch = fetcher.cache.scratch()?;
    let mut hosts = BTreeSet::new();
    for SourceEntry { uris, suites, .. } in entries(&fetcher.net, &fetcher.options.apt_dir, &selection)? {
        for uri in &uris {
            let base = uri.trim_end_matches('/');
            for suite in &suites {
                let mut command = archive.command("/usr/lib/apt/apt-helper");
                let path = if sources::is_flat(suite) { suite.clone() } else { format!("dists/{suite}/") };
                command.args(["download-file", &format!("{base}/{path}InRelease")]);
                command.arg(scratch.path().join("InRelease"));
                process::run(command, "apt-helper", || format!("look for suite {suite} at {uri}")).await?;
            }
            hosts.extend(Url::parse(uri).ok().and_then(|url| url.host_str().map(str::to_owned)));
        }
    }
    Ok(hosts.into_iter().collect::<Vec<_>>().join(", "))
}

/// Kind of the cache entries that hold packages.
const DEBS: &str = "debs";
/// File name of a package in its cache entry.
const DEB: &str = "package.deb";

/// Returns the source entries for the suites, derived from the host's. The first of the site's mirrors replaces an address: with
/// several addresses, apt would require all of them.
pub(super) fn entries(net: &Net, apt_dir: &Path, selection: &AptSuites) -> Result<Vec<SourceEntry>> {
    let mut entries = sources::select(&host_entries(apt_dir)?, selection)?;
    for uri in entries.iter_mut().flat_map(|entry| &mut entry.uris) {
        let Ok(url) = Url::parse(uri) else { continue };
        match net.url_candidates(&url).into_iter().next() {
            Some(mirror) if mirror != url => *uri = mirror.into(),
            _ => {}
        }
    }
    let has_no_mirror = |uri: &String| Url::parse(uri).is_ok_and(|url| is_placeholder(&url));
    if let Some(entry) = entries.iter().find(|entry| entry.uris.iter().any(has_no_mirror)) {
        return Err(FetchError::NoMirror(entry.uris.join(" "), entry.suites.join(", ")));
    }
    Ok(entries)
}

/// Returns the parts that identify a choice of suites.
pub(super) fn key_parts(suites: &AptSuites) -> Vec<String> {
    let AptSuites { suites, components, mirror, signed_by } = suites;
    let mut parts = vec!["suites".to_owned()];
    parts.extend(to_strings(suites));
    parts.push("components".to_owned());
    parts.extend(to_strings(components));
    parts.push(format!("mirror {}", mirror.as_deref().unwrap_or_default()));
    parts.push(format!("signed by {}", signed_by.as_deref().unwrap_or(Path::new("")).display()));
    parts
}

/// Reads the host's source entries like apt: `sources.list`, then `sources.list.d` in name order.
fn host_entries(apt_dir: &Path) -> Result<Vec<SourceEntry>> {
    let mut files = vec![apt_dir.join("sources.list")];
    if let Ok(parts) = fs::read_dir(apt_dir.join("sources.list.d")) {
        let mut parts: Vec<PathBuf> = parts.filter_map(|entry| Some(entry.ok()?.path())).collect();
        parts.sort();
        files.extend(parts);
    }
    let mut entries = Vec::new();
    for file in files {
        let parse = match file.extension().and_then(|e| e.to_str()) {
            Some("list") => sources::parse_one_line,
            Some("sources") => sources::parse_deb822,
            _ => continue,
        };
        if let Some(bytes) = if_there(fs::read(&file))? {
            entries.extend(parse(&String::from_utf8_lossy(&bytes)));
        }
    }
    Ok(entries)
}

/// Renders a configuration that apt reads after the host's. The host's proxies, credentials and keys still apply. The host's
/// sources, pins, state and hooks are ignored.
fn config(dir: &Path, apt_dir: &Path, arch: Architecture) -> Result<String> {
    let check_quotable = |path: &Path| match path.to_str() {
        Some(text) if !text.contains(['"', '\\']) && !text.contains(char::is_control) => Ok(text.to_owned()),
        _ => Err(FetchError::value(
            "a directory in apt's configuration",
            &path.to_string_lossy(),
            "it contains a character that cannot be quoted there",
        )),
    };
    Ok(include_str!("apt.conf")
        .replace("@dir@", &check_quotable(dir)?)
        .replace("@host@", &check_quotable(apt_dir)?)
        .replace("@arch@", arch.as_str()))
}

/// Returns the suites that their archives do not have, if apt reports no other error.
fn absent(stderr: &str) -> Vec<String> {
    let missing_suite = |line: &str| {
        let (suite, problem) = line.strip_prefix("E: The repository '")?.split_once("' ")?;
        let is_absent = ["does not have", "no longer has"].iter().any(|start| problem.starts_with(start));
        suite.strip_suffix(" Release").filter(|_| is_absent).map(str::to_owned)
    };
    let problems = stderr.lines().filter(|line| line.starts_with("E: ") || line.contains("Failed to fetch"));
    problems.map(missing_suite).collect::<Option<_>>().unwrap_or_default()
}

fn is_younger(stamp: &Path, max_age: Duration) -> bool {
    // Ignore a stamp from the future: the clock was set back.
    let age = fs::metadata(stamp)
        .and_then(|m| m.modified())
        .ok()
        .and_then(|time| SystemTime::now().duration_since(time).ok());
    age.is_some_and(|age| age < max_age)
}

/// Maps the files that `apt-get download` left (`<name>_<version>_<architecture>.deb`) to package names, which contain no
/// underscore.
fn files_by_package(dir: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if let Some((name, _)) = entry.file_name().to_string_lossy().split_once('_') {
            files.insert(name.to_owned(), entry.path());
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_takes_no_hostile_path() {
        for dir in ["/cache\"; Evil \"", "/cache\nx", "/cache\\x"] {
            assert!(config(Path::new(dir), Path::new("/etc/apt"), Architecture::Amd64).is_err());
        }
        let text = config(Path::new("/c"), Path::new("/etc/apt"), Architecture::Arm64).unwrap();
        assert!(text.contains("APT::Architecture \"arm64\";"));
        assert!(!text.contains('@'));
    }

    #[tokio::test]
    async fn caches_that_share_package_lists_share_apts_cache_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let fetcher = |name: &str| {
            let cache = Cache::open(dir.path().join(name)).unwrap();
            Fetcher::new(cache, super::super::FetchOptions::default())
        };
        let wanted = AptSuites {
            suites: vec!["sid".parse().unwrap()],
            components: vec!["main".parse().unwrap()],
            mirror: Some("http://archive.test/debian".parse().unwrap()),
            signed_by: None,
        };
        let first = AptArchive::open(&fetcher("first"), &wanted, Architecture::Amd64).await.unwrap();
        let text = fs::read_to_string(first.dir.join("apt.conf")).unwrap();
        fs::create_dir(dir.path().join("second")).unwrap();
        fs::os::unix::fs::symlink(dir.path().join("first/apt"), dir.path().join("second/apt")).unwrap();
        let second = AptArchive::open(&fetcher("second"), &wanted, Architecture::Amd64).await.unwrap();
        assert_eq!(fs::read_to_string(second.dir.join("apt.conf")).unwrap(), text);
    }

    #[tokio::test]
    async fn a_suite_that_was_missing_is_looked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().to_owned()).unwrap();
        let fetcher = Fetcher::new(cache, super::super::FetchOptions::default());
        let wanted = AptSuites {
            suites: vec!["sid".parse().unwrap()],
            components: vec!["main".parse().unwrap()],
            mirror: Some("http://127.0.0.1:1/debian".parse().unwrap()),
            signed_by: None,
        };
        let archive = AptArchive::open(&fetcher, &wanted, Architecture::Amd64).await.unwrap();
        fs::write(archive.stamp(), "http://127.0.0.1:1/debian sid").unwrap();
        let error = archive.ensure_no_suite_is_missing("choose").await.unwrap_err();
        assert!(error.to_string().contains("not all suites are available"), "{error}");
        let long_ago = SystemTime::now() - 2 * MISSING_PACKAGE_MAX_AGE;
        fs::File::open(archive.stamp()).unwrap().set_modified(long_ago).unwrap();
        let error = archive.ensure_no_suite_is_missing("choose").await.unwrap_err();
        assert!(error.to_string().contains("fetch the package lists"), "{error}");
    }

    #[test]
    fn suites_that_are_not_there_are_told_from_other_faults() {
        let gone = "E: The repository 'http://a.test/debian noble Release' does not have a Release file.\n\
                    E: The repository 'http://a.test/debian sid Release' no longer has a Release file.\n\
                    W: Key is stored in legacy trusted.gpg keyring\n";
        assert_eq!(absent(gone), ["http://a.test/debian noble", "http://a.test/debian sid"]);
        for other in [
            "E: Failed to fetch http://a.test/InRelease  403  Forbidden",
            "E: The repository 'http://a.test/debian sid InRelease' is not signed.",
            "W: Failed to fetch http://a.test/debian/dists/sid/InRelease  Could not connect",
        ] {
            assert!(absent(&format!("{gone}{other}\n")).is_empty(), "{other}");
        }
        assert!(absent("").is_empty());
    }

    #[test]
    fn host_files_in_apts_order() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(host_entries(dir.path()).unwrap(), []);
        let parts = dir.path().join("sources.list.d");
        fs::create_dir(&parts).unwrap();
        fs::write(dir.path().join("sources.list"), "deb http://a.test/debian sid main").unwrap();
        fs::write(parts.join("b.list"), "deb http://b.test/debian sid main").unwrap();
        fs::write(parts.join("a.sources"), "Types: deb\nURIs: http://c.test/debian\nSuites: sid\n").unwrap();
        fs::write(parts.join("d.list.disabled"), "deb http://d.test/debian sid main").unwrap();
        let uris: Vec<String> = host_entries(dir.path()).unwrap().into_iter().flat_map(|e| e.uris).collect();
        assert_eq!(uris, ["http://a.test/debian", "http://c.test/debian", "http://b.test/debian"]);
    }
}
