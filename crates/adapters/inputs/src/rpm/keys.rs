//! Verifies signatures with the distributions' tools: `rpmkeys` for packages, `gpgv` for `repomd.xml`.

use std::path::{Path, PathBuf};

use farrier_core::{image::Digest, text::is_deceptive};
use farrier_local::cache::Scratch;
use fs_err as fs;

use crate::{
    FetchError, Result,
    openpgp::{BEGIN, dearmored},
    process,
};

/// The trusted keys of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    file: PathBuf,
    /// The keys as a binary keyring, the only form that gpgv reads.
    binary: Vec<u8>,
}

impl Keys {
    /// Reads a key file; returns `None` if it does not exist.
    pub fn read(file: &Path) -> Result<Option<Self>> {
        if !file.exists() {
            return Ok(None);
        }
        let binary = dearmored(&String::from_utf8_lossy(&fs::read(file)?)).ok_or_else(|| {
            FetchError::unusable(
                format!("cannot use the keys in {}: they are not armored OpenPGP keys", file.display()),
                format!("name the file that the distribution publishes, which begins with {BEGIN}"),
            )
        })?;
        Ok(Some(Self { file: file.to_owned(), binary }))
    }

    /// Returns a digest that identifies the keys.
    pub fn digest(&self) -> String {
        Digest::of(&self.binary).to_string()
    }

    /// Checks that `file` has a good detached `signature` by one of the keys.
    pub(crate) async fn verify_file(
        &self,
        scratch: &Scratch,
        file: &Path,
        signature: &Path,
        what: &str,
    ) -> Result<()> {
        let keyring = scratch.path().join("keyring.gpg");
        fs::write(&keyring, &self.binary)?;
        let mut command = process::command("gpgv");
        command.arg("--homedir").arg(scratch.path()).arg("--keyring").arg(&keyring);
        command.args(["--status-fd", "1"]).args([signature, file]);
        let output = process::output(command, "gpgv").await?;
        // gpgv reports GOODSIG only for keys that are neither expired nor revoked.
        let is_good = output.stdout.lines().any(|line| line.starts_with("[GNUPG:] GOODSIG "));
        if output.status.success() && is_good {
            return Ok(());
        }
        Err(self.invalid(what, output.stderr.lines().last().unwrap_or("gpgv found no good signature")))
    }

    /// Checks that each package is signed by one of the keys and unchanged since.
    pub(crate) async fn verify_packages(&self, scratch: &Scratch, files: &[PathBuf]) -> Result<()> {
        let database = scratch.path().join("rpmdb");
        let rpmkeys = || {
            let mut command = process::command("rpmkeys");
            // Ignore the user's configuration. Without this verify level, packages without signatures would pass.
            command.env("HOME", scratch.path()).arg("--dbpath").arg(&database);
            command.args(["--define", "_pkgverify_level all", "--define", "_pkgverify_flags 0"]);
            command
        };
        if !database.exists() {
            fs::create_dir(&database)?;
            let mut import = rpmkeys();
            import.arg("--import").arg(&self.file);
            process::run(import, "rpmkeys", || format!("read the keys in {}", self.file.display())).await?;
        }
        let mut check = rpmkeys();
        check.arg("--checksig").args(files);
        let output = process::output(check, "rpmkeys").await?;
        if output.status.success() {
            return Ok(());
        }
        // `/path/x.rpm: digests SIGNATURES NOT OK`: the failed check is in capitals.
        let line = output.stdout.lines().find(|line| line.contains("NOT OK"));
        let (file, why) = line.and_then(|line| line.rsplit_once(": ")).unwrap_or(("", output.stderr.trim()));
        let name = file.rsplit('/').next().unwrap_or_default();
        Err(self.invalid(&format!("package {name}"), why))
    }

    fn invalid(&self, what: &str, reason: &str) -> FetchError {
        FetchError::Signature {
            what: what.to_owned(),
            keys: self.file.display().to_string(),
            reason: reason.chars().filter(|c| !is_deceptive(*c)).take(300).collect(),
        }
    }
}
