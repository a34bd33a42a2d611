//! Fetches one commit into a temporary bare repository, verifies its signature and writes the archive.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use farrier_core::image::GitSource;
use farrier_local::blocking::stoppable;
use farrier_store::registry::DiskLimit;
use url::Url;

use super::{
    super::{FetchError, Fetcher, Result, download, process},
    Git, MEMORY,
    archive::{self, Entry, EntryKind},
    parse, submodules, with_timeout,
};

/// Timeout of a fetch.
const FETCH_TIMEOUT: Duration = Duration::from_mins(30);
/// Interval between measurements of a fetch.
const MEASURE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of submodules of a source.
const MAX_SUBMODULES: usize = 200;
/// Name of the fetched branch or tag in the temporary repository.
pub(super) const REF: &str = "refs/farrier/ref";

/// A commit to fetch.
pub(super) struct Checkout<'a> {
    pub(super) fetcher: &'a Fetcher,
    pub(super) source: &'a GitSource,
    pub(super) commit: &'a str,
}

/// Repository or submodule to fetch.
struct TreeToFetch {
    /// Path of the tree in the source.
    path: PathBuf,
    url: Url,
    commit: String,
}

impl Checkout<'_> {
    /// Writes the archive of the commit to a file.
    pub(super) async fn archive(&self, url: &Url, output: &Path) -> Result<()> {
        let scratch = self.fetcher.scratch()?;
        let git = Git::open(self.fetcher, url, scratch.path(), true).await?;
        let format = if self.commit.len() == 64 { "sha256" } else { "sha1" };
        let format = format!("--object-format={format}");
        let directory = git.directory.to_string_lossy().into_owned();
        let init = ["init", "--quiet", "--bare", "--template=", &format, "--", &directory];
        git.run(&init, "prepare a repository").await?;
        self.fetch(&git, self.commit, self.source.reference.as_deref()).await?;
        self.verify(&git, scratch.path()).await?;
        let (mut entries, mut weight) = (BTreeMap::new(), 0);
        let what = format!("{url} at {}", self.commit);
        let mut pending =
            vec![TreeToFetch { path: PathBuf::new(), url: url.clone(), commit: self.commit.to_owned() }];
        let mut fetched = 0;
        while let Some(tree) = pending.pop() {
            if fetched > 0 {
                let trusted = tree.url.host() == url.host() && tree.url.port() == url.port();
                let git = Git::open(self.fetcher, &tree.url, scratch.path(), trusted).await?;
                self.fetch(&git, &tree.commit, None).await?;
            }
            fetched += 1;
            if fetched > MAX_SUBMODULES {
                return Err(self.too_many_submodules(url));
            }
            let tree_entries = self.entries(&git, &tree).await?;
            if self.source.submodules && tree_entries.iter().any(|entry| entry.kind == EntryKind::Submodule) {
                pending.extend(self.submodules(&git, &tree, &tree_entries, url).await?);
            }
            for entry in tree_entries {
                let path = tree.path.join(&entry.path);
                weight += archive::weight(path.as_os_str().len());
                archive::check_weight(weight, &what)?;
                entries.insert(path, entry);
            }
        }
        let time = committer_time(&git, self.commit).await?;
        let command = git.command(&["cat-file", "--batch"]).into_std();
        let (ids, output) = (scratch.path().join("ids"), output.to_owned());
        stoppable(move |stop| archive::write(command, &entries, &ids, &output, time, &what, stop)).await
    }

    /// Fetches a commit by its branch or tag `name`, or else by its ID, which not every server allows.
    async fn fetch(&self, git: &Git, commit: &str, name: Option<&str>) -> Result<()> {
        if let Some(name) = name {
            self.fetch_one(git, &format!("+{name}:{REF}"), name).await?;
            let tip = git.run(&["rev-parse", &format!("{REF}^{{commit}}")], "read the commit").await?;
            if tip.trim() == commit {
                return Ok(());
            }
        }
        self.fetch_one(git, commit, commit).await
    }

    async fn fetch_one(&self, git: &Git, refspec: &str, name: &str) -> Result<()> {
        let action = format!("fetch {name} of {}", git.url);
        let arguments = ["fetch", "--quiet", "--depth=1", "--no-tags", "--no-write-fetch-head", "--"];
        let arguments: Vec<&str> = arguments.into_iter().chain([&*git.url, refspec]).collect();
        let run = process::run_limited(MEMORY, git.command(&arguments), "git", || action.clone());
        let run_or_exceed = async {
            tokio::select! {
                done = run => done.map(drop),
                Err(error) = exceed_limit(&git.directory) => Err(error.into()),
            }
        };
        with_timeout(FETCH_TIMEOUT, &action, run_or_exceed).await
    }

    async fn entries(&self, git: &Git, tree: &TreeToFetch) -> Result<Vec<Entry>> {
        let what = format!("{} at {}", tree.url, tree.commit);
        let listed = git.list(&tree.commit, &what).await?;
        stoppable(move |_| archive::entries(&listed, &what)).await
    }

    /// Returns the submodules of a tree.
    async fn submodules(
        &self,
        git: &Git,
        tree: &TreeToFetch,
        entries: &[Entry],
        top: &Url,
    ) -> Result<Vec<TreeToFetch>> {
        let links: Vec<&Entry> = entries.iter().filter(|entry| entry.kind == EntryKind::Submodule).collect();
        if links.len() > MAX_SUBMODULES {
            return Err(self.too_many_submodules(top));
        }
        let blob = format!("--blob={}:.gitmodules", tree.commit);
        let action = format!("read .gitmodules of {} at {}", tree.url, tree.commit);
        let list = ["config", "--null", "--no-includes", &blob, "--list"];
        let declared = submodules::parse(&git.run(&list, &action).await?);
        let trees = links.into_iter().map(|entry| {
            let address = submodules::address(&declared, &entry.path, &tree.url, top)?;
            let path = tree.path.join(&entry.path);
            Ok(TreeToFetch { path, url: parse(&address)?, commit: entry.id.clone() })
        });
        trees.collect()
    }

    fn too_many_submodules(&self, url: &Url) -> FetchError {
        let message = format!("{url} at {}: more than {MAX_SUBMODULES} submodules", self.commit);
        FetchError::unusable(message, "set `submodules: false`")
    }
}

/// Returns the committer's time in seconds since the Unix epoch.
async fn committer_time(git: &Git, commit: &str) -> Result<u64> {
    let shown = git.run(&["cat-file", "commit", commit], "read the commit").await?;
    let line = shown.lines().find(|line| line.starts_with("committer ")).unwrap_or_default();
    Ok(line.rsplit(' ').nth(1).and_then(|time| time.parse().ok()).unwrap_or_default())
}

/// Waits until a repository exceeds the limit of a download.
async fn exceed_limit(directory: &Path) -> io::Result<Infallible> {
    let (mut limit, mut last) = (DiskLimit::for_download(directory, None, download::MAX_DOWNLOAD_SIZE)?, 0);
    loop {
        tokio::time::sleep(MEASURE_INTERVAL).await;
        let size = size_of(directory);
        limit.take(size.saturating_sub(last))?;
        last = size.max(last);
    }
}

fn size_of(directory: &Path) -> u64 {
    // git may remove a temporary file between the listing and this call.
    let files = walkdir::WalkDir::new(directory).into_iter().filter_map(|entry| entry.ok()?.metadata().ok());
    files.map(|metadata| metadata.len()).sum()
}
