//! A test's certificate authority, created with openssl.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// An expiry date beyond every test.
pub const LATER: &str = "20491231000000Z";
/// An expiry date in the past.
pub const PAST: &str = "20200102000000Z";

/// The authority; its files are removed on drop.
pub struct Authority {
    pub directory: tempfile::TempDir,
}

impl Authority {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Self { directory };
        authority.request("ca", "/CN=test authority");
        fs::write(authority.path("ca.ext"), "basicConstraints = critical, CA:TRUE\n").unwrap();
        authority.openssl(&[
            "x509", "-req", "-in", "ca.csr", "-key", "ca.key", "-days", "2", "-extfile", "ca.ext", "-out",
            "ca.pem",
        ]);
        authority
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the path of the authority's own certificate.
    pub fn ca_file(&self) -> PathBuf {
        self.path("ca.pem")
    }

    /// Issues a certificate `<name>.pem` and its key `<name>.key` for these names (`IP:127.0.0.1`). An expired certificate has
    /// an `end` in the past (`20200102000000Z`).
    pub fn issue(&self, name: &str, alternatives: &str, end: &str) {
        self.sign(name, alternatives, end, ("FALSE", &["-cert", "ca.pem", "-keyfile", "ca.key"]));
    }

    /// Creates a self-signed certificate that is its own authority, as `openssl req -x509` does.
    pub fn self_signed(&self, name: &str, alternatives: &str, end: &str) {
        let key = format!("{name}.key");
        self.sign(name, alternatives, end, ("TRUE", &["-selfsign", "-keyfile", &key]));
    }

    fn sign(&self, name: &str, alternatives: &str, end: &str, (is_ca, issuer): (&str, &[&str])) {
        self.request(name, &format!("/CN={name}"));
        let extensions = format!(
            "basicConstraints = critical, CA:{is_ca}\nsubjectAltName = {alternatives}\n\
             extendedKeyUsage = serverAuth, clientAuth\n"
        );
        let ext = format!("{name}.ext");
        fs::write(self.path(&ext), extensions).unwrap();
        // Only `openssl ca` accepts dates; `x509` of Debian 12 only accepts a number of days.
        fs::write(self.path("index.txt"), "").unwrap();
        fs::write(self.path("index.txt.attr"), "unique_subject = no\n").unwrap();
        fs::write(
            self.path("ca.cnf"),
            "[ca]\ndefault_ca = it\n[it]\ndatabase = index.txt\nnew_certs_dir = .\nrand_serial = yes\n\
             default_md = sha256\npolicy = any\nunique_subject = no\n[any]\ncommonName = supplied\n",
        )
        .unwrap();
        let (csr, pem) = (format!("{name}.csr"), format!("{name}.pem"));
        let batch = ["ca", "-batch", "-notext", "-config", "ca.cnf"];
        let dates = ["-startdate", "20200101000000Z", "-enddate", end];
        let files = ["-in", &csr, "-extfile", &ext, "-out", &pem];
        self.openssl(&[&batch[..], issuer, &dates, &files].concat());
    }

    fn request(&self, name: &str, subject: &str) {
        let (key, csr) = (format!("{name}.key"), format!("{name}.csr"));
        self.openssl(&[
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-subj",
            subject,
            "-keyout",
            &key,
            "-out",
            &csr,
        ]);
    }

    fn openssl(&self, arguments: &[&str]) {
        let made = Command::new("openssl")
            .args(arguments)
            .current_dir(self.directory.path())
            .output()
            .expect("run openssl (Debian package openssl)");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
}

/// Returns the TLS settings as a line of YAML.
pub fn tls(authority: &Authority, server: &str, client_ca: Option<&Path>) -> String {
    let at = authority.directory.path().display();
    let clients = client_ca.map(|file| format!(", clientcas: [{}]", file.display())).unwrap_or_default();
    format!("{{certificate: {at}/{server}.pem, key: {at}/{server}.key{clients}}}")
}
