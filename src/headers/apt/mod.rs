//! Adapter: Debian-like package archives, through the distribution's own `apt-get` with a private
//! configuration and state, so that signatures are verified as they are on the host.

pub mod control;
pub mod sources;
pub use crate::kernel::debian_version as version;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use control::PackageRecord;
use sources::{SourceEntry, Wanted};
use tokio::process::Command;
use url::Url;

use super::{FetchError, blocking::blocking, digest, io_error, process};
use crate::{
    cache::{Cache, LockMode},
    kernel::{AptSuites, Architecture},
    net::Net,
};

/// Lists younger than this are believed when a package is not in them.
const YOUNG: Duration = Duration::from_mins(3);

const KIND: &str = "apt";

/// A set of suites with a private apt state in the cache.
#[derive(Clone, Debug)]
pub struct AptArchive {
    cache: Cache,
    key: String,
    dir: PathBuf,
    arch: Architecture,
    suites: String,
    refresh: Duration,
    net: Net,
    /// Its addresses.
    uris: Vec<String>,
    without_environment: bool,
}

/// What a header package and its like come down to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closure {
    /// Every package, in name order.
    Found(Vec<PackageRecord>),
    /// The first of the named packages that no suite has.
    Missing(String),
}

impl AptArchive {
    /// The archive for these suites, with the host's apt configuration in `apt_dir` behind the defaults, reached as
    /// `net` says.
    /// Nothing is fetched yet; lists older than `refresh` will be when they are needed.
    pub async fn open(
        cache: &Cache,
        net: &Net,
        apt_dir: &Path,
        wanted: &AptSuites,
        arch: Architecture,
        refresh: Duration,
    ) -> Result<Self, FetchError> {
        let entries = entries(net, apt_dir, wanted)?;
        let sources = sources::render(&entries);
        let key = digest::of_parts(["apt-1", arch.as_str(), &sources, &apt_dir.to_string_lossy()]);
        let dir = cache.place(KIND, &key)?;
        let uris: Vec<String> = entries.into_iter().flat_map(|entry| entry.uris).collect();
        let reach = net.apt_reach(uris.iter().map(String::as_str))?;
        let mut config = config(&dir, apt_dir, arch)?;
        for line in &reach.options {
            config.extend([line, "\n"]);
        }
        let _lock = cache.lock(KIND, &key, LockMode::Exclusive).await?;
        for part in ["lists/partial", "archives/partial"] {
            let path = dir.join(part);
            fs::create_dir_all(&path).map_err(io_error("create", &path))?;
        }
        for (name, text) in [("apt.conf", config.as_str()), ("source.sources", &sources), ("status", "")] {
            let path = dir.join(name);
            if fs::read_to_string(&path).ok().as_deref() != Some(text) {
                fs::write(&path, text).map_err(io_error("write", &path))?;
            }
        }
        let suites = wanted.suites.join(", ");
        let (cache, net) = (cache.clone(), net.clone());
        let without_environment = reach.without_environment;
        Ok(Self { cache, key, dir, arch, suites, refresh, net, uris, without_environment })
    }

    /// Its suites, for people.
    pub fn suites(&self) -> &str {
        &self.suites
    }

    /// One package: the newest version, or exactly the one asked for. Lists that are not quite new are
    /// fetched again before the answer is no.
    pub async fn find(&self, name: &str, version: Option<&str>) -> Result<Option<PackageRecord>, FetchError> {
        self.update(self.refresh).await?;
        let found = self.look_up(name, version).await?;
        if found.is_none() && self.renew().await? { self.look_up(name, version).await } else { Ok(found) }
    }

    /// The names of the packages that begin with `prefix`.
    pub async fn names(&self, prefix: &str) -> Result<Vec<String>, FetchError> {
        self.update(self.refresh).await?;
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let mut command = self.command("apt-cache");
        command.args(["pkgnames", prefix]);
        let output = process::output(command, "apt-cache").await?;
        if !output.status.success() {
            return Err(failure(format!("list packages of {}", self.suites), &output.stderr));
        }
        Ok(output.stdout.lines().filter(|name| control::is_package_name(name)).map(str::to_owned).collect())
    }

    async fn look_up(&self, name: &str, version: Option<&str>) -> Result<Option<PackageRecord>, FetchError> {
        let known = self.show([name].into()).await?;
        let wanted = |package: &PackageRecord| version.is_none_or(|version| package.version == version);
        Ok(control::newest(&known, wanted).cloned())
    }

    /// The named packages and, recursively, those that they need and that come from the same source
    /// package. Lists that are not quite new are fetched again before something is missing.
    pub async fn closure(&self, names: &[String]) -> Result<Closure, FetchError> {
        self.update(self.refresh).await?;
        let closure = self.resolve(names).await?;
        let again = matches!(closure, Closure::Missing(_)) && self.renew().await?;
        if again { self.resolve(names).await } else { Ok(closure) }
    }

    /// One package of each group: the newest version of the first name that a suite has. Lists that are not quite new
    /// are fetched again before a group has none.
    pub async fn choose(&self, groups: &[Vec<String>]) -> Result<Closure, FetchError> {
        self.update(self.refresh).await?;
        let chosen = self.choose_now(groups).await?;
        let again = matches!(chosen, Closure::Missing(_)) && self.renew().await?;
        if again { self.choose_now(groups).await } else { Ok(chosen) }
    }

    async fn choose_now(&self, groups: &[Vec<String>]) -> Result<Closure, FetchError> {
        let known = self.show(groups.iter().flatten().map(String::as_str).collect()).await?;
        let mut chosen = Vec::with_capacity(groups.len());
        for group in groups {
            let newest = |name: &String| control::newest(&known, |package| package.name == *name);
            match group.iter().find_map(newest) {
                Some(package) => chosen.push(package.clone()),
                None => return Ok(Closure::Missing(group.join(" or "))),
            }
        }
        Ok(Closure::Found(chosen))
    }

    async fn resolve(&self, names: &[String]) -> Result<Closure, FetchError> {
        let known = self.show(names.iter().map(String::as_str).collect()).await?;
        let mut level = Vec::new();
        for name in names {
            match control::newest(&known, |package| package.name == *name) {
                Some(package) => level.push(package.clone()),
                None => return Ok(Closure::Missing(name.clone())),
            }
        }
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
        Ok(Closure::Found(chosen.into_values().collect()))
    }

    /// Every version of the packages in the lists.
    async fn show(&self, names: BTreeSet<&str>) -> Result<Vec<PackageRecord>, FetchError> {
        // apt takes a name that it does not know for a pattern; one that no package can have is no question.
        let names: BTreeSet<&str> = names.into_iter().filter(|name| control::is_package_name(name)).collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let mut command = self.command("apt-cache");
        command.arg("show").args(&names);
        let output = process::output(command, "apt-cache").await?;
        if !output.status.success() && !output.stderr.contains("No packages found") {
            return Err(failure(format!("look up packages in {}", self.suites), &output.stderr));
        }
        let mut packages = control::packages(&output.stdout, self.arch);
        packages.retain(|package| names.contains(package.name.as_str()));
        Ok(packages)
    }

    /// Fetches the lists again unless they are quite new; whether they are others than before.
    pub async fn renew(&self) -> Result<bool, FetchError> {
        self.update(YOUNG).await
    }

    /// Fetches the lists unless they are younger than `max_age`; whether it did.
    async fn update(&self, max_age: Duration) -> Result<bool, FetchError> {
        let stamp = self.dir.join("updated");
        if is_younger(&stamp, max_age) {
            return Ok(false);
        }
        let _lock = self.cache.lock(KIND, &self.key, LockMode::Exclusive).await?;
        if is_younger(&stamp, max_age) {
            // Somebody else did while we waited.
            return Ok(true);
        }
        self.permit()?;
        let mut command = self.command("apt-get");
        command.args(["--quiet", "--quiet", "update"]);
        let output = process::output(command, "apt-get").await?;
        // apt's older versions only warn when a list could not be had, and go on with the old one.
        let warned = ["Failed to fetch", "Some index files failed"].iter().any(|w| output.stderr.contains(w));
        if !output.status.success() || warned {
            return Err(failure(format!("fetch the package lists of {}", self.suites), &output.stderr));
        }
        fs::write(&stamp, "").map_err(io_error("write", &stamp))?;
        Ok(true)
    }

    /// The packages' files, each in the cache under its sha256, which is verified.
    pub async fn download(&self, packages: &[PackageRecord]) -> Result<Vec<PathBuf>, FetchError> {
        let mut files = Vec::with_capacity(packages.len());
        for package in packages {
            let make = |dir| self.download_one(package, dir);
            let place = self.cache.get_or_make("debs", &package.sha256, make).await?;
            files.push(place.join(DEB));
        }
        Ok(files)
    }

    async fn download_one(&self, package: &PackageRecord, dir: PathBuf) -> Result<(), FetchError> {
        let PackageRecord { name, version, sha256, .. } = package;
        self.permit()?;
        let lock = self.cache.lock(KIND, &self.key, LockMode::Shared).await?;
        let mut command = self.command("apt-get");
        command.args(["--quiet", "--quiet", "download"]).arg(format!("{name}={version}")).current_dir(&dir);
        let output = process::output(command, "apt-get").await?;
        drop(lock);
        if !output.status.success() {
            return Err(failure(format!("download package {name}={version}"), &output.stderr));
        }
        let (wanted, what) = (sha256.clone(), format!("package {name}={version}"));
        blocking(move |stop| {
            let file = only_file(&dir)?;
            let found = digest::of_file(&file, stop)?;
            if found != wanted {
                return Err(FetchError::Checksum { what, found, wanted });
            }
            fs::rename(&file, dir.join(DEB)).map_err(io_error("rename", &file))
        })
        .await
    }

    /// May apt-get ask the archive's hosts? What is in the lists already needs no leave.
    fn permit(&self) -> Result<(), FetchError> {
        let suites = format!("suite {}", self.suites);
        Ok(self.net.permit_archives(self.uris.iter().map(String::as_str), &suites)?)
    }

    fn command(&self, program: &'static str) -> Command {
        let mut command = process::command(program);
        if self.without_environment {
            process::without_proxies(&mut command);
        }
        command.arg("--config-file").arg(self.dir.join("apt.conf"));
        command
    }
}

/// A package's name in its cache entry.
const DEB: &str = "package.deb";

/// The source entries for the suites, from the host's own, with the first of a site's mirrors in the place of what it
/// stands for: apt would want all of several addresses.
pub(super) fn entries(net: &Net, apt_dir: &Path, wanted: &AptSuites) -> Result<Vec<SourceEntry>, FetchError> {
    let AptSuites { suites, components, mirror, signed_by } = wanted;
    let signed_by = signed_by.as_ref().map(|path| path.to_string_lossy());
    let wanted = Wanted { suites, components, mirror: mirror.as_deref(), signed_by: signed_by.as_deref() };
    let mut entries = sources::select(&host_entries(apt_dir)?, &wanted)?;
    for uri in entries.iter_mut().flat_map(|entry| &mut entry.uris) {
        let Ok(url) = Url::parse(uri) else { continue };
        match net.url_candidates(&url).into_iter().next() {
            Some(mirror) if mirror != url => *uri = mirror.into(),
            _ => {}
        }
    }
    Ok(entries)
}

/// What tells one choice of suites from another.
pub(super) fn key_parts(suites: &AptSuites) -> Vec<String> {
    let AptSuites { suites, components, mirror, signed_by } = suites;
    let mut parts = vec!["suites".to_owned()];
    parts.extend(suites.iter().cloned());
    parts.push("components".to_owned());
    parts.extend(components.iter().cloned());
    parts.push(format!("mirror {}", mirror.as_deref().unwrap_or_default()));
    parts.push(format!("signed by {}", signed_by.as_deref().unwrap_or(Path::new("")).display()));
    parts
}

/// The host's source entries: `sources.list`, then `sources.list.d` in name order, as apt reads them.
fn host_entries(apt_dir: &Path) -> Result<Vec<SourceEntry>, FetchError> {
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
        match fs::read(&file) {
            Ok(bytes) => entries.extend(parse(&String::from_utf8_lossy(&bytes))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(io_error("read", &file)(e)),
        }
    }
    Ok(entries)
}

/// A configuration read after the host's own, whose proxies, credentials and keys keep applying, while
/// its sources, pins, state and hooks do not.
fn config(dir: &Path, apt_dir: &Path, arch: Architecture) -> Result<String, FetchError> {
    let quotable = |path: &Path| match path.to_str() {
        Some(text) if !text.contains(['"', '\\']) && !text.contains(char::is_control) => Ok(text.to_owned()),
        _ => Err(FetchError::Value {
            what: "a directory in apt's configuration",
            value: path.to_string_lossy().chars().take(200).collect(),
            why: "it holds a character that cannot be quoted there",
        }),
    };
    Ok(include_str!("apt.conf")
        .replace("@dir@", &quotable(dir)?)
        .replace("@host@", &quotable(apt_dir)?)
        .replace("@arch@", arch.as_str()))
}

fn is_younger(stamp: &Path, max_age: Duration) -> bool {
    // A stamp from the future (the clock was set back) proves nothing.
    let age = fs::metadata(stamp)
        .and_then(|m| m.modified())
        .ok()
        .and_then(|time| SystemTime::now().duration_since(time).ok());
    age.is_some_and(|age| age < max_age)
}

fn failure(action: String, stderr: &str) -> FetchError {
    FetchError::Program { action, message: process::last_words(stderr), transient: process::may_pass(stderr) }
}

fn only_file(dir: &Path) -> Result<PathBuf, FetchError> {
    let mut files = fs::read_dir(dir).map_err(io_error("list", dir))?;
    match files.next() {
        Some(file) => Ok(file.map_err(io_error("list", dir))?.path()),
        None => Err(io_error("list", dir)(std::io::ErrorKind::NotFound.into())),
    }
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
