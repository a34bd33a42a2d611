//! A signed apt archive of one package behind TLS that wants a client's certificate: apt-ftparchive, gpg, python3.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{certificates::Authority, packages::run};

/// Serves its directory, but for what is below `/refused/`; a thread for each connection: apt keeps one open while it asks on another.
const SERVER: &str = r#"
import http.server, ssl, sys

authority, certificate, key = sys.argv[1:]
context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
context.verify_mode = ssl.CERT_REQUIRED
context.load_cert_chain(certificate, key)
class Handler(http.server.SimpleHTTPRequestHandler):
    def send_head(self):
        return self.send_error(403) if "/refused/" in self.path else super().send_head()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print("port", server.server_port, flush=True)
server.serve_forever()
"#;

/// Serves a directory over TLS to who shows a certificate of an authority's; ended on drop.
pub struct TlsServer {
    /// Where it listens: `127.0.0.1:<port>`.
    pub host: String,
    child: Child,
    _log: tempfile::NamedTempFile,
}

impl TlsServer {
    /// The authority has a certificate `server`.
    pub fn start(authority: &Authority, directory: &Path) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut child = Command::new("python3")
            .args(["-c", SERVER])
            .arg(authority.ca_file())
            .args([authority.path("server.pem"), authority.path("server.key")])
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.reopen().unwrap())
            .spawn()
            .expect("run python3 (Debian package python3)");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // It says where it listens; a server that ends says nothing.
        let (sender, said) = std::sync::mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
        let host = loop {
            let line = said.recv().unwrap_or_else(|_| panic!("{}", fs::read_to_string(log.path()).unwrap()));
            if let Some(port) = line.strip_prefix("port ") {
                break format!("127.0.0.1:{port}");
            }
        };
        Self { host, child, _log: log }
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ended and removed on drop.
pub struct TlsArchive {
    server: TlsServer,
    directory: tempfile::TempDir,
}

impl TlsArchive {
    /// Serves package `x-dkms` 1.0 with `/usr/src/x-1.0/x.c` in suite `stable`. The authority has a certificate
    /// `server`.
    pub fn start(authority: &Authority) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        let tree = at("tree");
        fs::create_dir_all(tree.join("usr/src/x-1.0")).unwrap();
        fs::write(tree.join("usr/src/x-1.0/x.c"), "int x;\n").unwrap();
        fs::create_dir(tree.join("DEBIAN")).unwrap();
        let control = "Package: x-dkms\nVersion: 1.0\nArchitecture: all\nMaintainer: T <t@example.test>\nDescription: t\n";
        fs::write(tree.join("DEBIAN/control"), control).unwrap();
        let repository = at("repository");
        let packages = repository.join("dists/stable/main/binary-amd64");
        fs::create_dir_all(&packages).unwrap();
        run(Command::new("dpkg-deb").args(["--build", "--root-owner-group"]).arg(&tree).arg(&repository));
        let ftparchive =
            |arguments: &[&str]| run(Command::new("apt-ftparchive").args(arguments).current_dir(&repository));
        fs::write(packages.join("Packages"), ftparchive(&["packages", "."])).unwrap();
        let option = |name: &str, value: &str| format!("APT::FTPArchive::Release::{name}={value}");
        let options = [("Suite", "stable"), ("Components", "main"), ("Architectures", "amd64")];
        let options = options.map(|(name, value)| option(name, value));
        let [suite, components, architectures] = &options;
        let release =
            ftparchive(&["-o", suite, "-o", components, "-o", architectures, "release", "dists/stable"]);
        fs::write(at("Release"), release).unwrap();
        sign(&at("gnupg"), &at("Release"), &repository.join("dists/stable/InRelease"), &at("archive.gpg"));

        Self { server: TlsServer::start(authority, &repository), directory }
    }

    /// Where it listens: `127.0.0.1:<port>`.
    pub fn host(&self) -> &str {
        &self.server.host
    }

    /// The port.
    pub fn port(&self) -> &str {
        self.server.host.rsplit(':').next().unwrap()
    }

    /// The key that it is signed with.
    pub fn keyring(&self) -> PathBuf {
        self.directory.path().join("archive.gpg")
    }
}

fn sign(home: &Path, file: &Path, to: &Path, keyring: &Path) {
    use std::os::unix::fs::DirBuilderExt as _;
    fs::DirBuilder::new().mode(0o700).create(home).unwrap();
    let gpg = |arguments: &[&str]| {
        let mut command = Command::new("gpg");
        command.args(["--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback", "--homedir"]);
        command.arg(home).args(arguments);
        command
    };
    run(&mut gpg(&["--quick-generate-key", "archive@example.test", "rsa2048", "sign", "never"]));
    run(gpg(&["--export", "--output"]).arg(keyring));
    run(gpg(&["--clearsign", "--output"]).arg(to).arg(file));
    // Its agent would stay.
    run(Command::new("gpgconf").arg("--homedir").arg(home).args(["--kill", "all"]));
}
