//! A signed apt archive behind TLS with client certificates, made with apt-ftparchive, gpg and python3.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{certificates::Authority, packages::run};

/// Serves its directory except for paths below `/refused/`. It needs a thread per connection, because apt keeps one open while
/// it uses another.
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

/// Serves a directory over TLS to clients with a certificate from an authority; stopped on drop.
pub struct TlsServer {
    /// Listening address: `127.0.0.1:<port>`.
    pub host: String,
    child: Child,
    _log: tempfile::NamedTempFile,
}

impl TlsServer {
    /// Starts the server with the authority's certificate `server`.
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
        // The server prints its port; a server that fails prints nothing.
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

/// A package: the content of its control file and its archive.
pub struct Deb {
    pub name: String,
    pub source: &'static str,
    /// `all`, or an architecture.
    pub architecture: &'static str,
    pub depends: String,
    /// Paths without the leading slash, and their content.
    pub files: Vec<(String, String)>,
    /// Path and target of a symbolic link.
    pub link: Option<(String, String)>,
}

impl Deb {
    /// Returns package `x-dkms` 1.0 with this code in `/usr/src/x-1.0/x.c`.
    pub fn x_dkms(code: &str) -> Self {
        Self {
            name: "x-dkms".to_owned(),
            source: "x",
            architecture: "all",
            depends: String::new(),
            files: vec![("usr/src/x-1.0/x.c".to_owned(), code.to_owned())],
            link: None,
        }
    }

    fn build(&self, tree: &Path, into: &Path) {
        for (path, content) in &self.files {
            let file = tree.join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        }
        if let Some((path, target)) = &self.link {
            fs::create_dir_all(tree.join(path).parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(target, tree.join(path)).unwrap();
        }
        fs::create_dir_all(tree.join("DEBIAN")).unwrap();
        let depends =
            if self.depends.is_empty() { String::new() } else { format!("Depends: {}\n", self.depends) };
        let control = format!(
            "Package: {}\nSource: {}\nVersion: 1.0\nArchitecture: {}\n{depends}Maintainer: T <t@example.test>\nDescription: t\n",
            self.name, self.source, self.architecture
        );
        fs::write(tree.join("DEBIAN/control"), control).unwrap();
        run(Command::new("dpkg-deb").args(["--build", "--root-owner-group"]).arg(tree).arg(into));
    }
}

/// The archive, stopped and removed on drop.
pub struct TlsArchive {
    server: TlsServer,
    directory: tempfile::TempDir,
}

impl TlsArchive {
    /// Serves package `x-dkms` 1.0 with `/usr/src/x-1.0/x.c` in suite `stable`, with the authority's certificate `server`.
    pub fn start(authority: &Authority) -> Self {
        Self::of(authority, &[("stable", vec![Deb::x_dkms("int x;\n")])])
    }

    /// Serves these suites with their packages in `main` for two architectures; `universe` is empty.
    pub fn of(authority: &Authority, suites: &[(&str, Vec<Deb>)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        publish(directory.path(), suites);
        let server = TlsServer::start(authority, &directory.path().join("repository"));
        Self { server, directory }
    }

    /// Publishes these suites in place of those with the same names.
    pub fn publish(&self, suites: &[(&str, Vec<Deb>)]) {
        publish(self.directory.path(), suites);
    }

    /// Returns the listening address: `127.0.0.1:<port>`.
    pub fn host(&self) -> &str {
        &self.server.host
    }

    /// Returns the port.
    pub fn port(&self) -> &str {
        self.server.host.rsplit(':').next().unwrap()
    }

    /// Returns the keyring with the archive's signing key.
    pub fn keyring(&self) -> PathBuf {
        self.directory.path().join("archive.gpg")
    }
}

fn publish(directory: &Path, suites: &[(&str, Vec<Deb>)]) {
    let at = |path: &str| directory.join(path);
    let repository = at("repository");
    let ftparchive =
        |arguments: &[&str]| run(Command::new("apt-ftparchive").args(arguments).current_dir(&repository));
    for (number, (suite, packages)) in suites.iter().enumerate() {
        let pool = format!("pool/{suite}");
        fs::create_dir_all(repository.join(&pool)).unwrap();
        for package in packages {
            package.build(&at(&format!("trees/{number}/{}", package.name)), &repository.join(&pool));
        }
        for architecture in ["amd64", "arm64"] {
            let index = ftparchive(&["--arch", architecture, "packages", &pool]);
            for (component, index) in [("main", index.as_str()), ("universe", "")] {
                let place = repository.join(format!("dists/{suite}/{component}/binary-{architecture}"));
                fs::create_dir_all(&place).unwrap();
                fs::write(place.join("Packages"), index).unwrap();
            }
        }
        let option = |name: &str, value: &str| format!("APT::FTPArchive::Release::{name}={value}");
        let [name, components, architectures] =
            [("Suite", *suite), ("Components", "main universe"), ("Architectures", "amd64 arm64")]
                .map(|(name, value)| option(name, value));
        let release = ["-o", &name, "-o", &components, "-o", &architectures, "release"];
        let release = ftparchive(&[&release[..], &[&format!("dists/{suite}")]].concat());
        fs::write(at("Release"), release).unwrap();
        let signed = repository.join(format!("dists/{suite}/InRelease"));
        sign(&at("gnupg"), &at("Release"), &signed, &at("archive.gpg"));
    }
}

fn sign(home: &Path, file: &Path, to: &Path, keyring: &Path) {
    use std::os::unix::fs::DirBuilderExt as _;
    let gpg = |arguments: &[&str]| {
        let mut command = Command::new("gpg");
        command.args([
            "--batch",
            "--yes",
            "--quiet",
            "--passphrase",
            "",
            "--pinentry-mode",
            "loopback",
            "--homedir",
        ]);
        command.arg(home).args(arguments);
        command
    };
    if !home.exists() {
        fs::DirBuilder::new().mode(0o700).create(home).unwrap();
        run(&mut gpg(&["--quick-generate-key", "archive@example.test", "rsa2048", "sign", "never"]));
        run(gpg(&["--export", "--output"]).arg(keyring));
    }
    run(gpg(&["--clearsign", "--output"]).arg(to).arg(file));
    // Otherwise gpg-agent would keep running.
    run(Command::new("gpgconf").arg("--homedir").arg(home).args(["--kill", "all"]));
}
