//! Sources from Git repositories: what a definition states, and how a commit is written in identities and provenance.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::checked::{GitAddress, GitCommitId, GitRef, LocalPath};

/// First part of the identity of a Git source; the commit follows.
const PREFIX: &str = "git:";

/// A commit of a Git repository whose tree is a source. Set `ref`, `commit` or both.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GitSource {
    /// The repository: `https://`, `ssh://` or `file://`. `http://` needs `plainHttp` of the host in site.yaml.
    pub url: GitAddress,
    /// Full name of the branch or tag: `refs/heads/main`, `refs/tags/v1.0`. Each plan looks up its commit, unless `commit` is set.
    #[serde(rename = "ref")]
    pub reference: Option<GitRef>,
    /// The commit, with all its digits.
    pub commit: Option<GitCommitId>,
    /// Fetch submodules too. Default: their directories stay empty.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub submodules: bool,
    /// OpenPGP keys or SSH allowed signers (`ssh-keygen(1)`), relative to the definitions directory. One of them must have signed
    /// the tag or the commit.
    pub signed_by: Option<LocalPath>,
}

impl GitSource {
    /// Whether the source is the tip of a branch, so that its commit changes without a change of the definition.
    pub fn follows_branch(&self) -> bool {
        let is_branch = |name: &GitRef| name.starts_with("refs/heads/");
        self.commit.is_none() && self.reference.as_ref().is_some_and(is_branch)
    }

    /// Returns the identity of the tree of a commit. The commit also determines the commits of submodules.
    pub fn identity(&self, commit: &str) -> String {
        format!("{PREFIX}{commit}{}", if self.submodules { " submodules" } else { "" })
    }

    /// Returns the SPDX download location of a commit, which provenance uses as well: `git+https://host/path@refs/heads/main`.
    pub fn uri(&self, commit: &str) -> String {
        let version = self.reference.as_deref().unwrap_or(commit);
        format!("git+{}@{version}", self.url)
    }
}

/// Returns the commit in the identity of a source, if the source is from Git.
pub fn commit_in(identity: &str) -> Option<&str> {
    identity.split(' ').next()?.strip_prefix(PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn read(fields: &str) -> Result<GitSource, String> {
        serde_json::from_str(&format!("{{{fields}}}")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_commit_is_in_identity_and_uri() {
        let url = r#""url": "https://g.test/a.git""#;
        let branch = read(&format!(r#"{url}, "ref": "refs/heads/main", "submodules": true"#)).unwrap();
        assert!(branch.follows_branch());
        let identity = branch.identity(COMMIT);
        assert_eq!(
            (identity.as_str(), commit_in(&identity)),
            (&*format!("git:{COMMIT} submodules"), Some(COMMIT))
        );
        assert_eq!(branch.uri(COMMIT), "git+https://g.test/a.git@refs/heads/main");
        let commit = read(&format!(r#"{url}, "commit": "{COMMIT}""#)).unwrap();
        assert!(!commit.follows_branch());
        assert_eq!(commit.uri(COMMIT), format!("git+https://g.test/a.git@{COMMIT}"));
        assert_eq!(commit_in("sha256:0"), None);
    }

    /// Everything here becomes an argument of git.
    #[test]
    fn odd_addresses_and_names_are_refused() {
        for url in [
            "ext::sh -c id",
            "--upload-pack=id",
            "-u",
            "g.test:a.git",
            "git://g.test/a",
            "ssh://-oProxyCommand=id/a",
            "ssh://-l@g.test/a",
            "https://user:secret@g.test/a",
            "https://g.test/a b",
            "https://g.test/a?service=x",
            "file://g.test",
            "/srv/a.git",
        ] {
            assert!(read(&format!(r#""url": "{url}", "ref": "refs/tags/v1""#)).is_err(), "{url}");
        }
        for name in [
            "main",
            "-x",
            "--upload-pack=id",
            "HEAD",
            "refs/heads/-x",
            "refs/heads/a..b",
            "refs/heads/a b",
            "refs/heads/a:b",
            "refs/heads/*",
            "refs/heads/a^{}",
            "refs/tags/",
            "refs/tags/a.lock",
            "refs/pull/1/head",
        ] {
            let error = read(&format!(r#""url": "https://g.test/a", "ref": "{name}""#)).unwrap_err();
            assert!(error.contains("refs/heads/main"), "{name}: {error}");
        }
        for name in ["refs/heads/main", "refs/tags/debian/1.2+dfsg-1", "refs/heads/r8125"] {
            assert!(read(&format!(r#""url": "file:///srv/a.git", "ref": "{name}""#)).is_ok(), "{name}");
        }
        for commit in ["0123456", "HEAD", &COMMIT.to_uppercase()] {
            assert!(
                read(&format!(r#""url": "https://g.test/a", "commit": "{commit}""#)).is_err(),
                "{commit}"
            );
        }
    }
}
