//! Classifies entries of a source tree: source, version-control data, or probable credentials.

use std::{ffi::OsStr, path::Path, sync::LazyLock};

use regex::bytes::Regex;

/// Names of version-control data. `.git` is a file in a worktree and in a submodule.
const VERSION_CONTROL: [&str; 6] = [".git", ".hg", ".svn", ".jj", ".bzr", "CVS"];

/// Path suffixes of files that are treated as credentials regardless of their content, with the kind of credentials.
const CREDENTIAL_PATHS: [(&str, &str); 13] = [
    ("signing_key.pem", SIGNING_KEY),
    ("MOK.priv", SIGNING_KEY),
    ("mok.key", SIGNING_KEY),
    ("id_rsa", PRIVATE_KEY),
    ("id_dsa", PRIVATE_KEY),
    ("id_ecdsa", PRIVATE_KEY),
    ("id_ed25519", PRIVATE_KEY),
    (".netrc", "logins"),
    (".git-credentials", "Git credentials"),
    (".pypirc", "credentials of a package index"),
    (".aws/credentials", "AWS credentials"),
    (".dockercfg", REGISTRY),
    (".kube/config", KUBECONFIG),
];
const SIGNING_KEY: &str = "a module signing key";
const PRIVATE_KEY: &str = "a private key";
const REGISTRY: &str = "registry credentials";
const KUBECONFIG: &str = "a kubeconfig";

/// Class of an entry in a source tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceEntry {
    /// Data of a version-control system, which is not part of the source.
    VersionControl,
    /// Part of the source that looks like credentials, with the kind of credentials.
    Credentials(&'static str),
    /// Any other part of the source.
    Source,
}

impl SourceEntry {
    /// Size limit in bytes for content inspection. Keys and configuration files are smaller.
    pub const MAX_INSPECTED_SIZE: u64 = 1 << 20;

    /// Classifies an entry by its path in the tree and its content. Pass empty content for a directory, a link or a file larger
    /// than [`Self::MAX_INSPECTED_SIZE`].
    pub fn of(path: &Path, content: &[u8]) -> Self {
        if path.iter().any(is_version_control) {
            return Self::VersionControl;
        }
        let by_path = CREDENTIAL_PATHS.iter().find(|(end, _)| path.ends_with(end)).map(|(_, kind)| *kind);
        by_path.or_else(|| by_content(path, content)).map_or(Self::Source, Self::Credentials)
    }
}

/// Whether an entry of this name is version-control data.
pub fn is_version_control(name: &OsStr) -> bool {
    VERSION_CONTROL.iter().any(|known| name == *known)
}

/// Whether a file of this name belongs to an editor: a backup (`x~`), a swap file of Vim (`.x.swp`), a lock or an auto-save file of
/// Emacs (`.#x`, `#x#`).
pub fn is_editor_file(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    let is_swap = name.starts_with(b".") && matches!(name, [.., b'.', b's', b'w', b'l'..=b'p' | b'x']);
    is_swap || matches!(name, [_, .., b'~'] | [b'.', b'#', _, ..] | [b'#', _, .., b'#'])
}

fn by_content(path: &Path, content: &[u8]) -> Option<&'static str> {
    // A single search rules out almost all files.
    if !is_match(&CREDENTIAL_MARKS, content) {
        return None;
    }
    if is_match(&PRIVATE_KEYS, content) {
        Some(PRIVATE_KEY)
    } else if is_docker_config(content) {
        Some(REGISTRY)
    } else if is_match(&KUBE_KIND, content) && is_match(&KUBE_SECRET, content) {
        Some(KUBECONFIG)
    } else if path.ends_with(".npmrc") && is_match(&NPM_SECRET, content) {
        Some("credentials of a package registry")
    } else {
        None
    }
}

/// Whether the content is Docker's `config.json` with logins.
fn is_docker_config(content: &[u8]) -> bool {
    let value: Result<serde_json::Value, _> = serde_json::from_slice(content);
    value.is_ok_and(|value| value.get("auths").is_some())
}

fn is_match(expression: &LazyLock<Option<Regex>>, content: &[u8]) -> bool {
    expression.as_ref().is_some_and(|expression| expression.is_match(content))
}

fn byte_regex(text: &str) -> Option<Regex> {
    // The content may be invalid UTF-8.
    Regex::new(&format!("(?-u){text}")).ok()
}

/// Prefilter: a file without any of these marks cannot match the expressions below.
static CREDENTIAL_MARKS: LazyLock<Option<Regex>> =
    LazyLock::new(|| byte_regex(r#"PRIVATE KEY|PuTTY-User-Key-File-|"auths"|kind"?:|_auth|_password"#));
/// PEM in all its forms (PKCS #1, PKCS #8, SEC 1, OpenSSH), OpenPGP's armor, SSH2's and PuTTY's files. A key may be quoted in
/// JSON or indented in YAML.
static PRIVATE_KEYS: LazyLock<Option<Regex>> = LazyLock::new(|| {
    byte_regex("----[- ]BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?[- ]----|PuTTY-User-Key-File-[0-9]")
});
static KUBE_KIND: LazyLock<Option<Regex>> = LazyLock::new(|| byte_regex(r#"(?m)^\s*"?kind"?:\s*"?Config\b"#));
static KUBE_SECRET: LazyLock<Option<Regex>> =
    LazyLock::new(|| byte_regex(r#""?\b(?:client-key-data|token|password)"?:\s*\S"#));
static NPM_SECRET: LazyLock<Option<Regex>> =
    LazyLock::new(|| byte_regex(r"(?m)^[^#;\n]*(?:_auth|_password)[^\n=]*="));

#[cfg(test)]
mod tests {
    use super::*;

    fn classify(path: &str, content: &str) -> SourceEntry {
        SourceEntry::of(Path::new(path), content.as_bytes())
    }

    #[test]
    fn every_expression_compiles() {
        for expression in [&CREDENTIAL_MARKS, &PRIVATE_KEYS, &KUBE_KIND, &KUBE_SECRET, &NPM_SECRET] {
            assert!(expression.is_some());
        }
    }

    #[test]
    fn version_control_data_is_no_source_at_any_depth() {
        for path in [
            ".git",
            ".git/config",
            "sub/.git",
            "a/b/.hg/store",
            ".svn/wc.db",
            ".jj/repo",
            "x/.bzr",
            "kernel/CVS/Root",
        ] {
            assert_eq!(classify(path, ""), SourceEntry::VersionControl, "{path}");
        }
        for path in [
            ".gitignore",
            ".gitmodules",
            ".gitattributes",
            "git/config",
            "x.git/config",
            "CVSROOT",
            "cvs/a",
            ".github/a.yml",
            ".hgignore",
        ] {
            assert_eq!(classify(path, ""), SourceEntry::Source, "{path}");
        }
    }

    #[test]
    fn files_of_editors_are_told_from_inputs_of_drivers() {
        for name in
            ["acme.c~", "Makefile~", ".acme.c.swp", ".acme.c.swo", ".acme.swx", ".#acme.c", "#acme.c#"]
        {
            assert!(is_editor_file(OsStr::new(name)), "{name}");
        }
        for name in [
            "~",
            "#",
            ".#",
            "##",
            "acme.c",
            "acme.swp",
            ".swp.c",
            "nv-kernel.o_binary",
            "fw.o_shipped",
            "acme.o",
            "acme.ko",
            "Module.symvers",
        ] {
            assert!(!is_editor_file(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn credentials_are_known_by_name_or_content() {
        let docker = r#"{"auths": {"r.example": {"auth": "c21pdGg6YW52aWw="}}}"#;
        let kube = "apiVersion: v1\nkind: Config\nusers:\n- name: a\n  user:\n    token: abc\n";
        let kube_json =
            "{\n \"kind\": \"Config\",\n \"users\": [{\"user\": {\n \"client-key-data\": \"eA==\"}}]}";
        for (path, content, what) in [
            ("certs/signing_key.pem", "-----BEGIN PRIVATE KEY-----\n", SIGNING_KEY),
            ("MOK.priv", "", SIGNING_KEY),
            ("a.pem", "-----BEGIN PRIVATE KEY-----\nMII\n", PRIVATE_KEY),
            ("a.pem", "-----BEGIN CERTIFICATE-----\nx\n-----BEGIN RSA PRIVATE KEY-----\n", PRIVATE_KEY),
            ("a.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\n", PRIVATE_KEY),
            ("deploy", "-----BEGIN OPENSSH PRIVATE KEY-----\n", PRIVATE_KEY),
            ("a.asc", "-----BEGIN PGP PRIVATE KEY BLOCK-----\n", PRIVATE_KEY),
            ("a", "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\n", PRIVATE_KEY),
            ("a.ppk", "PuTTY-User-Key-File-3: ssh-ed25519\n", PRIVATE_KEY),
            ("sa.json", r#"{"private_key": "-----BEGIN PRIVATE KEY-----\nMII"}"#, PRIVATE_KEY),
            ("values.yaml", "key: |\n  -----BEGIN EC PRIVATE KEY-----\n", PRIVATE_KEY),
            ("home/id_rsa", "", PRIVATE_KEY),
            ("id_ed25519", "", PRIVATE_KEY),
            (".netrc", "machine x login a password b\n", "logins"),
            ("sub/.git-credentials", "https://a:b@x\n", "Git credentials"),
            (".docker/config.json", docker, REGISTRY),
            ("pull.json", docker, REGISTRY),
            (".npmrc", "//r.example/:_authToken=x\n", "credentials of a package registry"),
            (".pypirc", "[pypi]\n", "credentials of a package index"),
            (".aws/credentials", "[default]\n", "AWS credentials"),
            (".kube/config", "", KUBECONFIG),
            ("admin.conf", kube, KUBECONFIG),
            ("admin.json", kube_json, KUBECONFIG),
        ] {
            assert_eq!(classify(path, content), SourceEntry::Credentials(what), "{path}: {content}");
        }
    }

    #[test]
    fn public_parts_and_ordinary_files_are_sources() {
        for (path, content) in [
            ("id_rsa.pub", "ssh-rsa AAAA\n"),
            ("a.crt", "-----BEGIN CERTIFICATE-----\nMII\n"),
            ("a.pem", "-----BEGIN PUBLIC KEY-----\nMII\n"),
            ("Makefile", "# makes the PRIVATE KEY file\n"),
            (".npmrc", "registry=https://r.example/\n# _auth=\n"),
            (".docker/config.json", r#"{"credsStore": "pass"}"#),
            ("config.json", r#"{"x": {"auths": 1}}"#),
            ("deploy.yaml", "kind: Deployment\nspec:\n  token: x\n"),
            ("kube.yaml", "kind: Config\nclusters: []\n"),
            ("credentials", "a list of people\n"),
            ("signing_key.x509", "\u{0}"),
        ] {
            assert_eq!(classify(path, content), SourceEntry::Source, "{path}");
        }
    }
}
