//! Git repositories behind TLS, with git's own HTTP backend, and behind an SSH server.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{certificates::Authority, packages::run, site::wait_until};

/// Serves the repositories of a directory to one user. After a client has fetched content, it runs `after-fetch`, if there is
/// such a script.
const SERVER: &str = r#"
import base64, http.server, os, ssl, subprocess, sys

certificate, key, root, login = sys.argv[1:]
wanted = "Basic " + base64.b64encode(login.encode()).decode()
context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
context.load_cert_chain(certificate, key)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        if self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic realm=git")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        environment = {
            "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": root, "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": self.command, "PATH_INFO": path, "QUERY_STRING": query, "REMOTE_USER": "user",
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        answer = subprocess.run(["git", "http-backend"], input=body, env=environment, stdout=subprocess.PIPE).stdout
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().split("\r\n")]
        status = [value.split(" ")[0] for name, value in fields if name == "Status"]
        self.send_response(int(status[0]) if status else 200)
        for name, value in fields:
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        script = os.path.join(root, "after-fetch")
        if b"command=fetch" in body and os.path.exists(script):
            subprocess.run(["sh", script], cwd=root, check=True)
        self.wfile.write(content)
    do_GET = do_POST = answer
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print("port", server.server_port, flush=True)
server.serve_forever()
"#;

/// A directory of bare repositories.
pub struct Repositories {
    directory: tempfile::TempDir,
}

impl Repositories {
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, inside: &str) -> PathBuf {
        self.directory.path().join(inside)
    }

    /// Commits files on top of `main` of a repository, which is made if it is missing, and returns the commit. Git links are
    /// (path, commit).
    pub fn commit(&self, repository: &str, files: &[(&str, &str)], links: &[(&str, &str)]) -> String {
        let (bare, clone) = (self.path(repository), tempfile::tempdir().unwrap());
        let inside = |arguments: &[&str]| git(clone.path(), arguments);
        if !bare.exists() {
            fs::create_dir(&bare).unwrap();
            git(&bare, &["init", "--quiet", "--bare", "--initial-branch", "main", "."]);
        }
        inside(&["clone", "--quiet", bare.to_str().unwrap(), "."]);
        for (file, text) in files {
            let path = clone.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        inside(&["add", "--all"]);
        for (path, commit) in links {
            inside(&["update-index", "--add", "--cacheinfo", &format!("160000,{commit},{path}")]);
        }
        inside(&["commit", "--quiet", "--message", "a change"]);
        inside(&["push", "--quiet", "origin", "HEAD:main"]);
        inside(&["rev-parse", "HEAD"]).trim().to_owned()
    }
}

/// Runs git without a user's configuration.
pub fn git(directory: &Path, arguments: &[&str]) -> String {
    run(Command::new("git")
        .args(["-c", "user.name=a person", "-c", "user.email=person@example.org", "-c", "safe.directory=*"])
        .args(arguments)
        .current_dir(directory)
        .env("GIT_CONFIG_GLOBAL", "/dev/null"))
}

/// A server process, stopped on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Repositories behind TLS.
pub struct HttpsServer {
    /// Listening address: `127.0.0.1:<port>`.
    pub host: String,
    _server: Server,
}

impl HttpsServer {
    /// Serves repositories to user `farrier` with password `s3cret`, with the authority's certificate `server`.
    pub fn start(authority: &Authority, repositories: &Repositories) -> Self {
        let mut child = Command::new("python3")
            .args(["-c", SERVER])
            .args([authority.path("server.pem"), authority.path("server.key"), repositories.path("")])
            .arg("farrier:s3cret")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("run python3 (Debian package python3)");
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let port = said.trim().strip_prefix("port ").expect("the server's port");
        Self { host: format!("127.0.0.1:{port}"), _server: Server(child) }
    }
}

/// An SSH server that lets this user in with one key.
pub struct SshServer {
    /// Listening port on 127.0.0.1.
    pub port: u16,
    /// The server's public key.
    pub host_key: String,
    directory: tempfile::TempDir,
    _server: Server,
}

impl SshServer {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let keys = directory.path();
        let run =
            |program: &str, arguments: &[&str]| run(Command::new(program).args(arguments).current_dir(keys));
        run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", "client"]);
        run("dropbearkey", &["-t", "ed25519", "-f", "host"]);
        let told = run("dropbearkey", &["-y", "-f", "host"]);
        let host_key = told.lines().find(|line| line.starts_with("ssh-ed25519 ")).unwrap().to_owned();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let script = format!(
            "home=~root && mount -t tmpfs -o mode=700 none \"$home\" && mkdir -m 700 \"$home/.ssh\" && \
             cp client.pub \"$home/.ssh/authorized_keys\" && \
             exec dropbear -F -E -s -r host -P pid -p 127.0.0.1:{port}"
        );
        let server = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .current_dir(keys)
            .stderr(fs::File::create(keys.join("log")).unwrap())
            .spawn()
            .expect("run unshare");
        let server = Server(server);
        wait_until("the server", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        Self { port, host_key, directory, _server: server }
    }

    /// Returns the client's private key.
    pub fn client_key(&self) -> PathBuf {
        self.directory.path().join("client")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }
}
