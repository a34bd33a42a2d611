//! The packages of a whole root file system, chosen by libsolv, the solver of dnf and zypper. Its tools only read metadata that
//! farrier has verified.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, BufRead, Read as _},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::image::checked::{RpmName, StreamName};
use farrier_local::{archive, blocking::stoppable, tree_removal::remove_tree};
use fs_err::{self as fs, File};

use super::{
    ListedPackage, Repomd, Repositories, RpmPackage,
    metadata::{self, MAX_METADATA_SIZE, Part},
    modules::{MAX_MODULES_SIZE, ModularMetadata, ModuleFilter},
    split_errors,
};
use crate::{FetchError, Result, error::MetadataError, process};

/// Maximum number of excluded packages. Fedora has about 70,000 packages in total.
const MAX_EXCLUDED: usize = 200_000;
/// Maximum memory of a libsolv program in bytes. It needs about 1.2 times the size of the metadata.
const MEMORY: u64 = 4 << 30;
/// `repomd.xml` for the solver, with only the two metadata files in use. The locations in a repository's own `repomd.xml` are
/// arbitrary.
const REPOMD: &str = r#"<repomd><data type="primary"><location href="primary.xml"/></data><data type="filelists"><location href="filelists.xml"/></data></repomd>"#;
/// Solver flags: ignore recommendations; the others as in dnf.
const RULES: &str = "solverflags ignorerecommended yumobsoletes bestobeypolicy urpmreorder";

/// Metadata of one repository, for the solver.
struct SolverRepository {
    urls: Vec<String>,
    primary: PathBuf,
    filelists: Option<Part>,
    modules: Option<Part>,
}

impl Repositories {
    /// Downloads these packages and all their dependencies, without recommendations. Returns the files in name order. Of modules,
    /// only packages of the default streams or of `streams` are used. `what` describes the purpose in errors.
    pub async fn download_with_dependencies(
        &self,
        packages: &[RpmName],
        streams: &BTreeMap<StreamName, StreamName>,
        what: &str,
    ) -> Result<Vec<PathBuf>> {
        let download = || async { self.download(&self.resolve(packages, streams, what).await?).await };
        match download().await {
            // A retry does not change the signature.
            Err(error @ FetchError::Signature { .. }) => Err(error),
            // A package may have appeared, or been replaced by a newer one.
            Err(_) if self.renew().await? => download().await,
            outcome => outcome,
        }
    }

    async fn resolve(
        &self,
        packages: &[RpmName],
        streams: &BTreeMap<StreamName, StreamName>,
        what: &str,
    ) -> Result<Vec<ListedPackage>> {
        let (listings, errors) = self.listings(self.fetcher.options.refresh).await;
        // Without an unreachable repository, the solver could choose other packages. A repository that always refuses this site
        // does not change the choice.
        let (refused, error) = split_errors(errors, listings.is_empty());
        if let Some(error) = error {
            return Err(error);
        }
        let note = self.missing_note(&listings, &refused);
        let mut repositories = Vec::new();
        for listing in listings {
            let Some(parts) = listing.parts else { continue };
            let primary = self.fetch_part(&listing.urls, &parts.primary).await?;
            let Repomd { primary: _, filelists, modules } = parts;
            repositories.push(SolverRepository { urls: listing.urls, primary, filelists, modules });
        }
        let filter = self.modular_metadata(&repositories).await?.filter(streams).map_err(|reason| {
            FetchError::unusable(
                format!("choose the packages of {what}: {reason}{note}"),
                "name in `moduleStreams` streams that the repositories have",
            )
        })?;
        let primaries: Vec<PathBuf> = repositories.iter().map(|known| known.primary.clone()).collect();
        let excluded = self.excluded(primaries, filter).await?;
        // Most distributions require only files listed in `primary`. The complete lists of files are many times larger.
        let chosen = match self.solve(&repositories, &excluded, packages, false).await? {
            Ok(chosen) => Ok(chosen),
            Err(_) => self.solve(&repositories, &excluded, packages, true).await?,
        };
        let chosen = chosen.map_err(|reason| {
            FetchError::permanent(format!("choose the packages of {what}"), format!("{reason}{note}"))
        })?;
        let listed = self.chosen_packages(repositories, chosen).await?;
        let is_listed = |name: &&RpmName| listed.iter().any(|listed| listed.package.name == name.as_str());
        match packages.iter().find(|name| !is_listed(name)) {
            Some(name) => Err(FetchError::NoPackage(name.to_string(), what.to_owned())),
            None => Ok(listed),
        }
    }

    async fn fetch_part(&self, urls: &[String], part: &Part) -> Result<PathBuf> {
        let what = format!("the metadata of {}", urls.first().map_or("", String::as_str));
        self.fetch(urls, &what, &part.location, &part.checksum).await
    }

    /// Returns the repositories' modularity metadata.
    async fn modular_metadata(&self, repositories: &[SolverRepository]) -> Result<ModularMetadata> {
        let mut modules = ModularMetadata::default();
        for SolverRepository { urls, modules: part, .. } in repositories {
            let Some(part) = part else { continue };
            let file = self.fetch_part(urls, part).await?;
            let text = stoppable(move |stop| {
                let mut text = String::new();
                open_metadata(&file, stop)?.take(MAX_MODULES_SIZE).read_to_string(&mut text)?;
                Ok::<_, FetchError>(text)
            });
            let unreadable = |source| FetchError::Metadata(urls.join(", "), source);
            modules.add(&text.await?).map_err(unreadable)?;
        }
        Ok(modules)
    }

    /// Returns the excluded packages, by the solver's names.
    async fn excluded(&self, primaries: Vec<PathBuf>, filter: ModuleFilter) -> Result<Vec<String>> {
        let arch = self.arch;
        stoppable(move |stop| {
            let mut ids = Vec::new();
            for (number, primary) in primaries.iter().enumerate() {
                let read = metadata::each_package(
                    open_metadata(primary, stop)?,
                    arch,
                    &|name| filter.is_modular_name(name),
                    |package| {
                        ids.extend(filter.excludes(&package).then(|| solver_id(&package, number)));
                        if ids.len() > MAX_EXCLUDED {
                            return Err(MetadataError(format!(
                                "it excludes more than {MAX_EXCLUDED} packages"
                            )));
                        }
                        Ok(())
                    },
                );
                read.map_err(|source| FetchError::Metadata(primary.display().to_string(), source))?;
            }
            Ok(ids)
        })
        .await
    }

    /// Returns the packages that libsolv chooses, each as `name-version.arch@number of the repository`. The inner error is the
    /// reason why libsolv finds no solution.
    async fn solve(
        &self,
        repositories: &[SolverRepository],
        excluded: &[String],
        packages: &[RpmName],
        with_files: bool,
    ) -> Result<Result<BTreeSet<String>, String>> {
        let scratch = self.fetcher.cache.scratch()?;
        for (number, repository) in repositories.iter().enumerate() {
            let directory = scratch.path().join(number.to_string());
            self.convert(repository, with_files, &directory).await?;
        }
        let lines = (0..repositories.len()).map(|number| format!("repo {number} 0 solv {number}.solv"));
        // The colon restricts the system to this architecture and `noarch`.
        let rules = [format!("system :{} rpm", self.arch.gnu_name()), RULES.to_owned()];
        let excluded = excluded.iter().map(|package| format!("disable pkg {package}"));
        let jobs = packages.iter().map(|name| format!("job install name {name}"));
        let case: Vec<String> = lines.chain(rules).chain(excluded).chain(jobs).collect();
        let file = scratch.path().join("case.t");
        fs::write(&file, case.join("\n") + "\n")?;
        let mut solve = process::command("testsolv");
        solve.arg("-r").arg(&file);
        let output = process::run_limited(MEMORY, solve, "testsolv", || "choose packages".to_owned()).await?;
        Ok(parse_solution(&output.stdout))
    }

    /// Converts a repository to libsolv's format, in a file next to `directory`. The directory is temporary.
    async fn convert(&self, repository: &SolverRepository, with_files: bool, directory: &Path) -> Result<()> {
        let SolverRepository { urls, primary, filelists, modules: _ } = repository;
        let mut parts = vec![(primary.clone(), "primary.xml")];
        if let Some(filelists) = filelists.as_ref().filter(|_| with_files) {
            parts.push((self.fetch_part(urls, filelists).await?, "filelists.xml"));
        }
        let dir = directory.to_owned();
        stoppable(move |stop| {
            fs::create_dir(&dir)?;
            fs::write(dir.join("repomd.xml"), REPOMD)?;
            parts.iter().try_for_each(|(from, name)| copy(&mut *open_metadata(from, stop)?, &dir.join(name)))
        })
        .await?;
        let mut convert = process::command("repo2solv");
        convert.arg("-F").arg("-o").arg(directory.with_extension("solv")).arg(directory);
        let action = || format!("read the metadata of {}", urls.join(", "));
        process::run_limited(MEMORY, convert, "repo2solv", action).await?;
        Ok(remove_tree(directory)?)
    }

    /// Returns the chosen packages from the repositories' metadata.
    async fn chosen_packages(
        &self,
        repositories: Vec<SolverRepository>,
        chosen: BTreeSet<String>,
    ) -> Result<Vec<ListedPackage>> {
        let arch = self.arch;
        stoppable(move |stop| {
            let names: BTreeSet<&str> = chosen.iter().filter_map(|id| id.rsplitn(3, '-').nth(2)).collect();
            let mut list = Vec::with_capacity(chosen.len());
            for (number, SolverRepository { urls, primary, .. }) in repositories.into_iter().enumerate() {
                let packages =
                    metadata::primary(open_metadata(&primary, stop)?, arch, &|name| names.contains(name));
                let packages =
                    packages.map_err(|source| FetchError::Metadata(primary.display().to_string(), source))?;
                let chosen_here =
                    packages.into_iter().filter(|package| chosen.contains(&solver_id(package, number)));
                list.extend(chosen_here.map(|package| ListedPackage { package, urls: urls.clone() }));
            }
            // `filesystem` comes first: its links must exist before other packages put files behind them.
            list.sort_by_key(|listed| (listed.package.name != "filesystem", listed.package.identity()));
            // A repository may list a package twice.
            list.dedup_by(|a, b| a.package.name == b.package.name && a.package.version == b.package.version);
            Ok(list)
        })
        .await
    }
}

/// Returns the solver's name for a package of a repository.
fn solver_id(package: &RpmPackage, repository: usize) -> String {
    let RpmPackage { name, epoch, version, arch, .. } = package;
    let epoch = if *epoch == 0 { String::new() } else { format!("{epoch}:") };
    format!("{name}-{epoch}{version}.{arch}@{repository}")
}

fn open_metadata<'a>(part: &Path, stop: &'a AtomicBool) -> Result<Box<dyn BufRead + 'a>> {
    let unreadable = |source| FetchError::Unpack(format!("the metadata {}", part.display()), source);
    archive::decompressed(part, stop).map_err(unreadable)
}

fn copy(from: &mut dyn BufRead, to: &Path) -> Result<()> {
    if io::copy(&mut from.take(MAX_METADATA_SIZE), &mut File::create(to)?)? == MAX_METADATA_SIZE {
        let larger = io::Error::new(io::ErrorKind::FileTooLarge, format!("{} is too large", to.display()));
        return Err(larger.into());
    }
    Ok(())
}

/// Parses the output of `testsolv -r`: `install make-1:4.3-8.el9.x86_64@0`, or `problem 1a2b info package x does not exist`.
fn parse_solution(output: &str) -> Result<BTreeSet<String>, String> {
    let problems = output.lines().filter(|line| line.starts_with("problem "));
    let problems = problems.filter_map(|line| Some(line.split_once(" info ")?.1));
    let problems: BTreeSet<&str> = problems.collect();
    if !problems.is_empty() {
        return Err(problems.into_iter().take(5).collect::<Vec<_>>().join("; "));
    }
    Ok(output.lines().filter_map(|line| line.strip_prefix("install ")).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_solution_or_its_problems_are_parsed() {
        let output = "install bash-5.1.8-9.el9.x86_64@0\ninstall perl-4:5.32.1-1.noarch@1\n";
        let found = parse_solution(output).unwrap();
        let found: Vec<&str> = found.iter().map(String::as_str).collect();
        assert_eq!(found, ["bash-5.1.8-9.el9.x86_64@0", "perl-4:5.32.1-1.noarch@1"]);
        let output = "problem c1 info package gcc99 does not exist\nproblem c1 solution s1 deljob install name gcc99\n\
            install bash-5.1.8-9.el9.x86_64@0\nproblem d1 info nothing provides libx.so.1()(64bit) needed by gcc-11-1.x86_64\n";
        assert_eq!(
            parse_solution(output).unwrap_err(),
            "nothing provides libx.so.1()(64bit) needed by gcc-11-1.x86_64; package gcc99 does not exist"
        );
    }
}
