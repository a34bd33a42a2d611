//! Keys and certificates for tests, created with OpenSSL.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Arguments of `openssl genpkey -algorithm`. RSA with 4096 bits is the kernel's default; 2048 bits are faster to create.
pub const RSA_4096: &str = "RSA -pkeyopt rsa_keygen_bits:4096";
pub const RSA_2048: &str = "RSA -pkeyopt rsa_keygen_bits:2048";
pub const EC_256: &str = "EC -pkeyopt ec_paramgen_curve:P-256";
pub const EC_384: &str = "EC -pkeyopt ec_paramgen_curve:P-384";

/// Directory for files that OpenSSL creates.
pub struct OpensslDir(tempfile::TempDir);

impl OpensslDir {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn root(&self) -> &Path {
        self.0.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    pub fn openssl(&self, arguments: &str) {
        let arguments = arguments.split_whitespace();
        let output = Command::new("openssl").args(arguments).current_dir(self.root()).output().unwrap();
        assert!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Creates a key: writes `k.pem` (PKCS#8) and `p.pem`.
    pub fn key(&self, kind: &str) {
        self.openssl(&format!("genpkey -algorithm {kind} -out k.pem"));
        self.openssl("pkey -in k.pem -pubout -out p.pem");
    }

    /// Creates a certificate for `k.pem` in `c.pem`.
    pub fn certificate(&self, subject: &str) {
        self.openssl(&format!("req -new -x509 -key k.pem -subj {subject} -days 1 -out c.pem"));
    }

    /// A line from the middle of the private key's PEM text, which no other file may contain.
    pub fn secret(&self) -> String {
        let text = std::fs::read_to_string(self.path("k.pem")).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('-')).collect();
        lines[lines.len() / 2].to_owned()
    }
}
