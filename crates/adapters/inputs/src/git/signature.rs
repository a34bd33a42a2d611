//! Verifies the signature of a tag or commit with the keys of a definition only.

use std::{
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use fs_err as fs;
use tokio::process::Command;

use super::{
    super::{FetchError, Result, openpgp::BEGIN, process},
    Git,
    fetch::{Checkout, REF},
};

/// Keys of a definition, in the form that git reads.
struct Keys {
    /// GnuPG's directory with the OpenPGP keys; empty for SSH keys.
    gnupg: PathBuf,
    /// Value of `gpg.ssh.allowedSignersFile`.
    allowed_signers: PathBuf,
}

impl Checkout<'_> {
    /// Fails unless one of the keys of `signedBy` signed the tag or the commit.
    pub(super) async fn verify(&self, git: &Git, scratch: &Path) -> Result<()> {
        let Some(file) = &self.source.signed_by else { return Ok(()) };
        let file = self.fetcher.root.join(file);
        if !file.is_file() {
            return Err(FetchError::Absent(file));
        }
        let keys = Keys::read(&file, scratch).await?;
        let mut problems = Vec::new();
        if let Some(name) = self.source.reference.as_ref().and_then(|name| name.strip_prefix("refs/tags/")) {
            let problem = match self.tag_object(git, name).await {
                Ok(tag) => keys.signature_problem(git, &["verify-tag", "--", &tag]).await?,
                Err(problem) => Some(problem),
            };
            let Some(problem) = problem else { return Ok(()) };
            problems.push(format!("tag: {problem}"));
        }
        let problem = keys.signature_problem(git, &["verify-commit", "--", self.commit]).await?;
        let Some(problem) = problem else { return Ok(()) };
        problems.push(format!("commit: {problem}"));
        Err(FetchError::Signature {
            what: format!("{} of {}", self.commit, git.url),
            keys: file.display().to_string(),
            reason: problems.join("; "),
        })
    }

    /// Returns the object of a tag, or the reason why a signature of the tag does not cover the commit. The tag object must contain
    /// the tag's own name, because an old tag object under a new name still has a valid signature.
    async fn tag_object(&self, git: &Git, name: &str) -> Result<String, String> {
        let read = |rev: String| async move {
            git.run(&["rev-parse", "--verify", "--quiet", &rev], "read the tag").await.unwrap_or_default()
        };
        let (tag, commit) = (read(format!("{REF}^{{tag}}")).await, read(format!("{REF}^{{commit}}")).await);
        if tag.is_empty() {
            return Err("it is not a tag object".to_owned());
        }
        if commit.trim() != self.commit {
            return Err(format!("it points to {}", commit.trim()));
        }
        let content = git.run(&["cat-file", "tag", tag.trim()], "read the tag").await;
        let content = content.unwrap_or_default();
        match content.lines().find_map(|line| line.strip_prefix("tag ")) {
            Some(signed_name) if signed_name == name => Ok(tag.trim().to_owned()),
            signed_name => Err(format!("it was signed as {:?}", signed_name.unwrap_or_default())),
        }
    }
}

impl Keys {
    async fn read(file: &Path, scratch: &Path) -> Result<Self> {
        let gnupg = scratch.join("gnupg");
        std::fs::DirBuilder::new().mode(0o700).create(&gnupg)?;
        let content = fs::read(file)?;
        // Binary OpenPGP keys begin with a packet's tag, whose highest bit is set (RFC 9580, 4.2).
        let is_openpgp = content.first().is_some_and(|byte| byte & 0x80 != 0)
            || String::from_utf8_lossy(&content).contains(BEGIN);
        if !is_openpgp {
            return Ok(Self { gnupg, allowed_signers: file.to_owned() });
        }
        let mut import = process::clean_command("gpg");
        import.args(["--batch", "--no-options", "--no-autostart", "--homedir"]).arg(&gnupg);
        import.args(["--import", "--"]).arg(file);
        process::run(import, "gpg", || format!("read the keys in {}", file.display())).await?;
        Ok(Self { gnupg, allowed_signers: PathBuf::from("/dev/null") })
    }

    /// Returns `None` if the signature is valid, otherwise the first lines of git's error messages.
    async fn signature_problem(&self, git: &Git, arguments: &[&str]) -> Result<Option<String>> {
        let signers = format!("gpg.ssh.allowedSignersFile={}", self.allowed_signers.display());
        let settings = ["-c", &signers, "-c", "gpg.program=gpg", "-c", "gpg.x509.program=false"];
        let all: Vec<&str> = settings.into_iter().chain(arguments.iter().copied()).collect();
        let mut command: Command = git.command(&all);
        command.env("GNUPGHOME", &self.gnupg);
        let output = process::output(command, "git").await?;
        let lines = output.stderr.lines().map(str::trim).filter(|line| !line.is_empty());
        let lines: Vec<&str> = lines.take(5).collect();
        let problem = if lines.is_empty() { "it is not signed".to_owned() } else { lines.join(", ") };
        Ok((!output.status.success()).then_some(problem))
    }
}
