//! Sources from Git. farrier runs the git program without the configuration, hooks, filters and credential helpers of this
//! machine, its users and the repository.

mod archive;
mod fetch;
mod signature;
mod submodules;

use std::{
    fmt::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use farrier_core::{image::GitSource, shell::shell_word, site::HostPort};
use farrier_local::cache::has_content;
use farrier_net::{GitAccess, Secret, git_access};
use fs_err as fs;
use tokio::{io::AsyncReadExt as _, process::Command};
use url::Url;
use zeroize::Zeroizing;

use super::{FetchError, Fetcher, Result, process};

/// Timeout of a git command that fetches no content.
const LOOKUP_TIMEOUT: Duration = Duration::from_mins(2);

/// Maximum memory of a git program in bytes. A small pack can contain an object of any size.
const MEMORY: u64 = 2 << 30;

/// Environment variables for git, some with secrets.
pub type Environment = Vec<(String, Zeroizing<String>)>;

/// Settings for sources. The content of a repository is untrusted; it arrives as a single pack, so that its size can be limited.
const SOURCE_SETTINGS: [(&str, &str); 10] = [
    ("core.packedGitLimit", "256m"),
    ("core.packedGitWindowSize", "32m"),
    ("pack.threads", "1"),
    ("transfer.fsckObjects", "true"),
    ("transfer.bundleURI", "false"),
    ("fetch.unpackLimit", "1"),
    ("fetch.recurseSubmodules", "false"),
    ("maintenance.auto", "false"),
    ("http.lowSpeedLimit", "4096"),
    ("http.lowSpeedTime", "60"),
];

/// Returns the environment of git for one repository: ignores this machine's configuration, disables prompts, and sets what the
/// repository needs for access. `protocols` are separated by colons, and `extra` are settings of git.
pub fn environment(
    access: &GitAccess,
    scratch: &Path,
    protocols: &str,
    extra: &[(&'static str, &str)],
) -> Result<Environment> {
    let GitAccess { settings, ssh_key, known_hosts } = access;
    let fixed_variables = [
        ("GIT_CONFIG_NOSYSTEM", "1"),
        ("GIT_CONFIG_GLOBAL", "/dev/null"),
        ("GIT_ATTR_NOSYSTEM", "1"),
        ("GIT_TERMINAL_PROMPT", "0"),
        ("GIT_NO_REPLACE_OBJECTS", "1"),
        ("GIT_ALLOW_PROTOCOL", protocols),
    ];
    let mut environment: Environment =
        fixed_variables.map(|(name, value)| (name.to_owned(), value.to_owned().into())).into();
    let base = [
        ("core.hooksPath", "/dev/null"),
        ("core.attributesFile", "/dev/null"),
        ("core.fsmonitor", "false"),
        ("credential.helper", ""),
        ("gc.auto", "0"),
        ("safe.directory", "*"),
        ("core.fsync", "none"),
    ];
    let plain = base.iter().chain(extra).map(|(name, value)| (*name, Zeroizing::new((*value).to_owned())));
    let all_settings: Vec<_> = plain.chain(settings.iter().cloned()).collect();
    // Otherwise libcurl reads ~/.netrc of the user, even without HOME.
    let home = scratch.to_string_lossy().into_owned();
    environment.extend(["HOME", "XDG_CONFIG_HOME"].map(|name| (name.to_owned(), home.clone().into())));
    environment.push(("GIT_CONFIG_COUNT".to_owned(), all_settings.len().to_string().into()));
    for (number, (name, value)) in all_settings.into_iter().enumerate() {
        environment.push((format!("GIT_CONFIG_KEY_{number}"), name.to_owned().into()));
        environment.push((format!("GIT_CONFIG_VALUE_{number}"), value));
    }
    let mut ssh = "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=20 \
                   -o IdentityAgent=none"
        .to_owned();
    if let Some(key) = ssh_key {
        let file = scratch.join("ssh-key");
        write_key(&file, key)?;
        let _ = write!(ssh, " -o IdentitiesOnly=yes -i {}", shell_word(&file.to_string_lossy()));
    } else {
        // Otherwise ssh offers the keys in ~/.ssh.
        ssh.push_str(" -o IdentityFile=none");
    }
    if let Some(file) = known_hosts {
        let _ = write!(
            ssh,
            " -o UserKnownHostsFile={} -o GlobalKnownHostsFile=/dev/null",
            shell_word(&file.to_string_lossy())
        );
    }
    environment.push(("GIT_SSH_COMMAND".to_owned(), ssh.into()));
    Ok(environment)
}

/// Writes a key that only this user can read: OpenSSH refuses keys with wider permissions.
pub fn write_key(file: &Path, key: &Secret) -> Result<()> {
    let write = || {
        fs::write(file, "")?;
        fs::set_permissions(file, std::fs::Permissions::from_mode(0o600))?;
        fs::write(file, key.as_bytes())
    };
    Ok(write()?)
}

/// The git program in a bare repository, with access to one remote repository.
struct Git {
    /// Address of the remote repository.
    url: String,
    directory: PathBuf,
    environment: Environment,
}

impl Git {
    /// Prepares access to a repository. Without `trusted`, no credentials are sent.
    async fn open(fetcher: &Fetcher, url: &Url, scratch: &Path, trusted: bool) -> Result<Self> {
        let net = fetcher.net();
        if let Some(host) =
            HostPort::of_url(url).filter(|host| url.scheme() == "http" && !net.allows_plain(host))
        {
            let message = format!("cannot fetch {url}: plain HTTP to {host} is not allowed");
            return Err(FetchError::unusable(
                message,
                "use https, or allow it with `plainHttp: true` of the host in site.yaml",
            ));
        }
        let mut access = git_access(net, url).await?;
        if !trusted {
            access = access.anonymous();
        }
        let environment = environment(&access, scratch, url.scheme(), &SOURCE_SETTINGS)?;
        Ok(Self { url: url.to_string(), directory: scratch.join("repository.git"), environment })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = process::clean_command("git");
        command.envs(self.environment.iter().map(|(name, value)| (name, value.as_str())));
        command.args(arguments);
        if self.directory.exists() {
            command.env("GIT_DIR", &self.directory).current_dir(&self.directory);
        } else {
            // Otherwise git reads the configuration of a repository around the current directory.
            command.env("GIT_DIR", "/dev/null").current_dir("/");
        }
        command
    }

    async fn run(&self, arguments: &[&str], action: &str) -> Result<String> {
        let run = process::run_limited(MEMORY, self.command(arguments), "git", || action.to_owned());
        with_timeout(LOOKUP_TIMEOUT, action, run).await.map(|output| output.stdout)
    }

    /// Returns the entries of a tree in the form of `git ls-tree -z`. Memory, output and time are limited: a few small trees that
    /// contain each other can form any number of directories, and git prints nothing for a directory.
    async fn list(&self, tree: &str, what: &str) -> Result<Vec<u8>> {
        let command = self.command(&["ls-tree", "-r", "-z", "--full-tree", tree]);
        let action = format!("list the files of {what}");
        let listed = async {
            let mut running = process::start(command, "git", Duration::ZERO)?;
            running.limit_memory(MEMORY);
            let mut listed = Vec::new();
            if let Some(output) = running.child.stdout.take() {
                output.take(archive::MAX_LIST_BYTES).read_to_end(&mut listed).await?;
            }
            let status = running.child.wait().await?;
            if status.success() { Ok(listed) } else { Err(archive::damaged(what)) }
        };
        with_timeout(LOOKUP_TIMEOUT, &action, listed).await
    }
}

/// Fails with a transient error if the work takes longer than `limit`.
async fn with_timeout<T>(limit: Duration, action: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let message = format!("no result within {} minutes", limit.as_secs() / 60);
        Err(FetchError::Program { action: action.to_owned(), message, transient: true })
    })
}

/// Returns the commit of a source. Asks the server for the commit of a branch or tag.
pub(super) async fn commit_of(fetcher: &Fetcher, source: &GitSource) -> Result<String> {
    let name = match (&source.commit, &source.reference) {
        (Some(commit), _) => return Ok(commit.to_string()),
        (None, Some(name)) => name,
        (None, None) => {
            return Err(FetchError::value("a Git source", &source.url, "neither `ref` nor `commit` is set"));
        }
    };
    let mut outcome = Err(FetchError::Interrupted);
    for address in addresses(fetcher, source)? {
        let scratch = fetcher.scratch()?;
        let git = Git::open(fetcher, &address, scratch.path(), true).await?;
        let peeled = format!("{name}^{{}}");
        let action = format!("look up {name} of {address}");
        let listed = git.run(&["ls-remote", "--", &git.url, name, &peeled], &action).await;
        outcome = listed.and_then(|listed| {
            // Prefer the commit of an annotated tag to the tag object.
            let id_of = |reference: &str| {
                let mut lines = listed.lines().filter_map(|line| line.split_once('\t'));
                lines.find(|(_, name)| *name == reference).map(|(id, _)| id.to_owned())
            };
            id_of(&peeled).or_else(|| id_of(name)).ok_or_else(|| {
                let hint = "correct `ref` of the source, or set `commit`";
                FetchError::unusable(format!("{action}: the repository has no such branch or tag"), hint)
            })
        });
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Returns the archive of a commit's tree, from the cache or the repository. The same commit gives the same archive. `key` is the
/// cache key.
pub(super) async fn archive(
    fetcher: &Fetcher,
    source: &GitSource,
    commit: &str,
    key: &str,
) -> Result<PathBuf> {
    let make = |dir: PathBuf| async move {
        let mut outcome = Err(FetchError::Interrupted);
        for address in addresses(fetcher, source)? {
            outcome = fetch::Checkout { fetcher, source, commit }.archive(&address, &dir.join(ARCHIVE)).await;
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    };
    Ok(fetcher.cache().get_or_make_intact(KIND, key, has_content, make).await?.join(ARCHIVE))
}

/// Kind of the cache entries.
const KIND: &str = "git-sources";
/// Name of an archive.
pub(super) const ARCHIVE: &str = "source.tar.gz";

/// Returns the addresses of a repository: the site's mirrors come first.
fn addresses(fetcher: &Fetcher, source: &GitSource) -> Result<Vec<Url>> {
    let url = parse(&source.url)?;
    Ok(match url.scheme() {
        "http" | "https" => fetcher.net().url_candidates(&url),
        _ => vec![url],
    })
}

fn parse(address: &str) -> Result<Url> {
    Url::parse(address)
        .map_err(|_| FetchError::value("the address of a Git repository", address, "it is not an address"))
}

#[cfg(test)]
mod tests;
