//! RPM repositories, created with Debian's rpmbuild, rpmsign, createrepo_c and gpg.

use std::{
    fs,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use super::packages::run;

/// A key in a separate GnuPG directory.
pub struct SigningKey {
    home: tempfile::TempDir,
    user: String,
}

impl SigningKey {
    pub fn new(user: &str) -> Self {
        Self::lasting(user, "never")
    }

    /// Creates a key that expires, with the time in gpg's format: `2d`.
    pub fn lasting(user: &str, time: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        fs::DirBuilder::new().mode(0o700).create(home.path().join("gnupg")).unwrap();
        let key = Self { home, user: format!("{user}@example.test") };
        run(key
            .gpg(&["--passphrase", "", "--quick-generate-key"])
            .args([&key.user, "rsa2048", "sign", time]));
        key
    }

    /// Returns the public key in the form in which distributions publish theirs.
    pub fn armored(&self) -> String {
        run(self.gpg(&["--armor", "--export"]).arg(&self.user))
    }

    /// Writes a detached signature next to a file.
    pub fn sign_file(&self, file: &Path) {
        let signature = PathBuf::from(format!("{}.asc", file.display()));
        let _ = fs::remove_file(&signature);
        run(self.gpg(&["--armor", "--detach-sign", "--output"]).arg(signature).arg(file));
    }

    /// Signs a package.
    pub fn sign_package(&self, package: &Path) {
        self.sign_packages(std::slice::from_ref(&package));
    }

    /// Signs several packages.
    pub fn sign_packages(&self, packages: &[impl AsRef<Path>]) {
        run(Command::new("rpmsign")
            .args([
                "--define",
                "__gpg /usr/bin/gpg",
                "--define",
                &format!("_gpg_name {}", self.user),
                "--addsign",
            ])
            .args(packages.iter().map(AsRef::as_ref))
            .env("GNUPGHOME", self.home.path().join("gnupg")));
    }

    fn gpg(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("gpg");
        command.args(["--batch", "--quiet", "--pinentry-mode", "loopback", "--homedir"]);
        command.arg(self.home.path().join("gnupg")).args(arguments);
        command
    }
}

impl Drop for SigningKey {
    fn drop(&mut self) {
        // Otherwise the key's gpg-agent would keep running.
        let _ = Command::new("gpgconf")
            .arg("--homedir")
            .arg(self.home.path().join("gnupg"))
            .args(["--kill", "all"])
            .status();
    }
}

/// A stand-in for a distribution's package.
#[derive(Default)]
pub struct StandIn<'a> {
    pub name: &'a str,
    pub version: &'a str,
    pub release: &'a str,
    /// `kernel-devel-uname-r = 5.14.0-503.el9.x86_64`.
    pub provides: &'a str,
    /// In the same form as `provides`.
    pub requires: &'a str,
    /// Paths below `/`, with their content.
    pub files: Vec<(String, String)>,
}

impl StandIn<'_> {
    /// Builds the package into a directory, and returns its file.
    pub fn build(&self, into: &Path) -> PathBuf {
        let root = tempfile::tempdir().unwrap();
        let Self { name, version, release, provides, requires, files } = self;
        for (path, content) in files {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        }
        let mut tags = format!("Name: {name}\nVersion: {version}\nRelease: {release}\n");
        for (tag, value) in [("Provides", provides), ("Requires", requires)] {
            if !value.is_empty() {
                tags.extend([tag, ": ", value, "\n"]);
            }
        }
        let made = into.join(format!("{name}-{version}-{release}.x86_64.rpm"));
        pack(root.path(), &tags, &made);
        made
    }
}

/// Builds a package from the content of a directory, with further tags of a spec file.
pub fn pack(root: &Path, tags: &str, into: &Path) {
    let work = tempfile::tempdir().unwrap();
    let spec = format!(
        "{tags}Summary: s\nLicense: l\nAutoReqProv: no\n%define __spec_install_post %{{nil}}\n%define debug_package %{{nil}}\n\
         %description\nd\n%install\nmkdir -p %{{buildroot}}\ncp -a {}/. %{{buildroot}}/\n%files\n/*\n",
        root.display()
    );
    let (file, packages) = (work.path().join("x.spec"), work.path().join("packages"));
    fs::write(&file, spec).unwrap();
    run(Command::new("rpmbuild")
        .args(["--quiet", "--target", "x86_64-linux", "--define"])
        .arg(format!("_topdir {}", work.path().display()))
        .args(["--define", &format!("_rpmdir {}", packages.display()), "-bb"])
        .arg(&file));
    let made = fs::read_dir(packages.join("x86_64")).unwrap().next().unwrap().unwrap().path();
    fs::create_dir_all(into.parent().unwrap()).unwrap();
    fs::copy(made, into).unwrap();
}

/// Returns the files that farrier requires in every header set, for the build tree at `build`.
pub fn tiny_headers(build: &str, release: &str) -> Vec<(String, String)> {
    let file = |name: &str, content: String| (format!("{build}/{name}"), content);
    vec![
        file("Makefile", String::new()),
        file("Module.symvers", "0x12345678\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n".to_owned()),
        file(
            "include/config/auto.conf",
            "CONFIG_MODULES=y\nCONFIG_X86_64=y\nCONFIG_CC_VERSION_TEXT=\"gcc (GCC) 11.5.0\"\n".to_owned(),
        ),
        file("include/generated/utsrelease.h", format!("#define UTS_RELEASE \"{release}\"\n")),
    ]
}

/// Writes or rewrites a repository's metadata. `compression`: `gz` or `xz`; `checksum`: `sha256` or `sha512`.
pub fn index(repository: &Path, compression: &str, checksum: &str) {
    run(Command::new("createrepo_c")
        .args(["--quiet", "--no-database", "--general-compress-type", compression, "--checksum", checksum])
        .arg(repository));
}
