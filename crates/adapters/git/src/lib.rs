//! Reads and changes rollout targets in Git repositories, for the controller and garbage collection.
//!
//! The crate runs the git program. The cache holds each repository as a shallow bare clone. Every use checks
//! out the tip into a temporary working tree. Hooks and the Git configuration of this machine and
//! its users are ignored.
#![forbid(unsafe_code)]

use std::{
    collections::BTreeSet,
    mem,
    path::PathBuf,
    time::{Duration, Instant},
};

use farrier_builder::services::{BuildServices, Result};
use farrier_cluster::{Cluster, Directory};
use farrier_core::{
    image::GitLocation,
    plan::{Candidates, Change, ClusterSnapshot, GitCommit, ManifestFacts},
};
use farrier_inputs::{
    FetchError,
    git::{Environment, environment, write_key},
    process,
};
use farrier_local::cache::{CacheLock, LockMode, Scratch};
use farrier_net::git_access;
use fs_err as fs;
use sha2::{Digest as _, Sha256};
use tokio::process::Command;
use url::Url;

/// Cache entry kind of the repositories.
const KIND: &str = "git";
/// Timeout of one git command, so that a server that does not answer cannot delay a reconcile for longer.
const COMMAND_TIMEOUT: Duration = Duration::from_mins(2);
/// Maximum number of attempts to commit and push. A further attempt follows only if the branch moved.
const MAX_ATTEMPTS: u32 = 5;

/// Reads the rollout targets at a location, or the image in its chart value. Also lists the branches whose names begin with one
/// of `proposals`. Reads only these if the branch still has the commit of `known`.
pub async fn read(
    services: &BuildServices,
    location: &GitLocation,
    proposals: &[&str],
    known: Option<ManifestFacts>,
) -> Result<ManifestFacts> {
    let mut repository = Repository::open(services, location).await?;
    let known_commit = known.as_ref().map(|known| known.commit.as_str());
    let commit = repository.fetch(known_commit).await?;
    let proposals = repository.branches(proposals).await?;
    if let Some(known) = known.filter(|known| known.commit == commit) {
        return Ok(ManifestFacts { proposals, ..known });
    }
    let ClusterSnapshot { daemon_sets, resources, skipped, .. } = repository.directory()?.snapshot().await?;
    Ok(ManifestFacts { daemon_sets, resources, skipped, proposals, commit })
}

/// Returns which of `images` the manifests at a location mention.
pub async fn mentions(
    services: &BuildServices,
    location: &GitLocation,
    images: &Candidates,
) -> Result<BTreeSet<String>> {
    let mut repository = Repository::open(services, location).await?;
    repository.fetch(None).await?;
    Ok(repository.directory()?.mentions(images).await?)
}

/// Commits a change on top of the branch's current tip and pushes the commit without force. Does nothing when
/// the branch already contains the change.
pub async fn write(
    services: &BuildServices,
    location: &GitLocation,
    change: &Change,
    commit: &GitCommit,
) -> Result<()> {
    let mut repository = Repository::open(services, location).await?;
    for _ in 0..MAX_ATTEMPTS {
        let tip = repository.fetch(None).await?;
        repository.directory()?.apply(change).await?;
        let Some(new_commit) = repository.commit(&tip, &commit.message).await? else { return Ok(()) };
        services.process.ensure_may_write()?;
        if repository.push(&new_commit, &commit.branch).await? {
            return Ok(());
        }
    }
    let action = format!("push to {}, branch {}", location.repository, commit.branch);
    let message = format!("the branch moved during {MAX_ATTEMPTS} attempts: other writers push to it");
    Err(FetchError::Program { action, message, transient: true }.into())
}

/// A cached repository, locked for exclusive use.
struct Repository<'a> {
    services: &'a BuildServices,
    location: &'a GitLocation,
    git_directory: PathBuf,
    /// Holds the working tree, the index and the keys of this use.
    scratch: Scratch,
    environment: Environment,
    _lock: CacheLock,
}

impl<'a> Repository<'a> {
    async fn open(services: &'a BuildServices, location: &'a GitLocation) -> Result<Self> {
        let address: &str = &location.repository;
        let url = Url::parse(address).map_err(|error| FetchError::Program {
            action: format!("parse repository address {address}"),
            message: error.to_string(),
            transient: false,
        })?;
        let access = git_access(services.fetcher.net(), &url).await.map_err(FetchError::from)?;
        let key = hex::encode(&Sha256::digest(address)[..16]);
        let lock = services.cache.lock(KIND, &key, LockMode::Exclusive).await?;
        let (git_directory, scratch) = (services.cache.entry_path(KIND, &key)?, services.cache.scratch()?);
        let environment = environment(&access, scratch.path(), "https:http:ssh:file", &[])?;
        services.cache.hold(KIND, &key)?;
        Ok(Self { services, location, git_directory, scratch, environment, _lock: lock })
    }

    /// Fetches the tip of the branch, checks it out unless it is `known`, and returns its commit. A kill or a power failure can
    /// damage the cached repository. After a failure other than a timeout, a new repository is tried, and replaces the cached one
    /// if it works.
    async fn fetch(&mut self, known: Option<&str>) -> Result<String> {
        let started = Instant::now();
        if self.git_directory.exists() {
            let fetched = self.fetch_and_check_out(known).await;
            if fetched.is_ok() || started.elapsed() >= COMMAND_TIMEOUT {
                return fetched;
            }
        }
        let (new, quarantine) = (self.scratch.path().join("repository"), self.services.cache.quarantine());
        quarantine.remove(&new)?;
        // `git init --bare` refuses a working tree.
        quarantine.remove(&self.tree())?;
        fs::create_dir(&new)?;
        let cached = mem::replace(&mut self.git_directory, new);
        let fetched = self.initialize_and_fetch(known).await;
        let new = mem::replace(&mut self.git_directory, cached);
        if fetched.is_ok() {
            quarantine.remove(&self.git_directory)?;
            fs::create_dir_all(self.git_directory.parent().unwrap_or(&new))?;
            fs::rename(new, &self.git_directory)?;
        }
        fetched
    }

    async fn initialize_and_fetch(&self, known: Option<&str>) -> Result<String> {
        self.run(&["init", "--quiet", "--bare", "."], "prepare").await?;
        self.fetch_and_check_out(known).await
    }

    async fn fetch_and_check_out(&self, known: Option<&str>) -> Result<String> {
        let branch = format!("+refs/heads/{}:refs/farrier/tip", self.location.branch);
        let arguments = ["fetch", "--quiet", "--depth=1", "--no-tags", "--no-write-fetch-head", "--"];
        let arguments: Vec<&str> =
            arguments.into_iter().chain([&*self.location.repository, &branch]).collect();
        self.run(&arguments, "fetch").await?;
        let tip = self.run(&["rev-parse", "refs/farrier/tip"], "read").await?.trim().to_owned();
        if known == Some(tip.as_str()) {
            return Ok(tip);
        }
        let tree = self.tree();
        self.services.cache.quarantine().remove(&tree)?;
        fs::create_dir(&tree)?;
        self.run(&["read-tree", &tip], "read").await?;
        self.run(&["checkout", "--quiet", "--force", &tip, "--", "."], "check out").await?;
        Ok(tip)
    }

    /// Opens the rollout's path in the working tree. A kustomization may name any file of the repository.
    fn directory(&self) -> Result<Directory> {
        let directory = Directory::within(&self.tree(), &self.tree().join(self.path()))?;
        Ok(directory.with_chart(self.location.values.as_ref()))
    }

    /// Commits the working tree on top of `tip`. Returns `None` when there is nothing to commit.
    async fn commit(&self, tip: &str, message: &str) -> Result<Option<String>> {
        // The path may be a symbolic link, and git stages files only by their real path.
        let path = fs::canonicalize(self.tree().join(self.path()))?;
        self.run(&["add", "--update", "--", &path.to_string_lossy()], "commit").await?;
        let tree = self.run(&["write-tree"], "commit").await?;
        let before = self.run(&["rev-parse", &format!("{tip}^{{tree}}")], "commit").await?;
        if tree == before {
            return Ok(None);
        }
        let mut arguments = vec!["commit-tree", "-p", tip, "-m", message, tree.trim()];
        let key = self.scratch.path().join("signing-key");
        let setting = format!("user.signingKey={}", key.display());
        if let Some(source) = self.site_commits().and_then(|commits| commits.signing_key.as_ref()) {
            let secret = self.services.fetcher.net().secrets().read(source).await;
            let secret = secret.map_err(|source| {
                let action = format!("sign a commit to {}", self.location.repository);
                FetchError::from(farrier_net::NetError::Secret(action, source))
            })?;
            write_key(&key, &secret)?;
            arguments.insert(1, "-S");
            arguments.splice(0..0, ["-c", "gpg.format=ssh", "-c", &setting]);
        }
        Ok(Some(self.run(&arguments, "commit").await?.trim().to_owned()))
    }

    /// Pushes a commit. Returns `false` when the branch has moved.
    async fn push(&self, commit: &str, branch: &str) -> Result<bool> {
        let refspec = format!("{commit}:refs/heads/{branch}");
        let command = self.command(&["push", "--porcelain", "--", &self.location.repository, &refspec]);
        let output = self.with_timeout(process::output(command, "git"), "push").await?;
        if output.status.success() {
            return Ok(true);
        }
        // If the branch has moved, git itself prints `[rejected]`, and a server rejects the push with one of the other texts.
        let rejection = output.stdout.lines().find(|line| line.starts_with('!')).unwrap_or_default();
        let moved_texts = ["[rejected]", "cannot lock ref", "failed to update ref"];
        if moved_texts.iter().any(|text| rejection.contains(text)) {
            return Ok(false);
        }
        let reason = rejection.split('\t').next_back().unwrap_or_default();
        Err(process::failure(self.action("push"), &format!("{}\n{reason}", output.stderr)).into())
    }

    async fn branches(&self, prefixes: &[&str]) -> Result<BTreeSet<String>> {
        if prefixes.is_empty() {
            return Ok(BTreeSet::new());
        }
        let patterns: Vec<String> = prefixes.iter().map(|prefix| format!("refs/heads/{prefix}*")).collect();
        let arguments = ["ls-remote", "--", &self.location.repository].into_iter();
        let arguments: Vec<&str> = arguments.chain(patterns.iter().map(String::as_str)).collect();
        let output = self.run(&arguments, "list branches").await?;
        let name = |line: &str| Some(line.split_once("\trefs/heads/")?.1.to_owned());
        Ok(output.lines().filter_map(name).collect())
    }

    fn tree(&self) -> PathBuf {
        self.scratch.path().join("tree")
    }

    fn path(&self) -> &str {
        self.location.path.as_deref().unwrap_or(".")
    }

    fn site_commits(&self) -> Option<&farrier_core::site::GitCommits> {
        self.services.definitions.site.git.as_ref()
    }

    fn action(&self, verb: &str) -> String {
        format!("{verb} {}", self.location)
    }

    async fn run(&self, arguments: &[&str], verb: &str) -> Result<String> {
        let run = process::run(self.command(arguments), "git", || self.action(verb));
        Ok(self.with_timeout(run, verb).await?.stdout)
    }

    async fn with_timeout<T>(
        &self,
        command: impl Future<Output = Result<T, FetchError>>,
        verb: &str,
    ) -> Result<T, FetchError> {
        tokio::time::timeout(COMMAND_TIMEOUT, command).await.unwrap_or_else(|_| {
            let message = format!("no result within {} minutes", COMMAND_TIMEOUT.as_secs() / 60);
            Err(FetchError::Program { action: self.action(verb), message, transient: true })
        })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = process::command("git");
        process::without_proxies(&mut command);
        let (name, email) = match self.site_commits() {
            Some(commits) => (commits.name.as_str(), commits.email.as_str()),
            None => ("farrier", "farrier@localhost"),
        };
        for role in ["AUTHOR", "COMMITTER"] {
            command.env(format!("GIT_{role}_NAME"), name).env(format!("GIT_{role}_EMAIL"), email);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value.as_str())));
        command.env("GIT_DIR", &self.git_directory).env("GIT_INDEX_FILE", self.scratch.path().join("index"));
        command.args(arguments).current_dir(&self.git_directory);
        if self.tree().exists() {
            command.env("GIT_WORK_TREE", self.tree()).current_dir(self.tree());
        }
        command
    }
}
