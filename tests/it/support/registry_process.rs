//! A real registry: Debian's `docker-registry` on an ephemeral loopback port.

use std::{
    fmt::Write as _,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const HERE: &str = "127.0.0.1";
/// User and password of a registry with authentication.
pub const USER: &str = "smith";
pub const PASSWORD: &str = "anvil";
/// Output of `htpasswd -nbB smith anvil`.
const HTPASSWD: &str = "smith:$2b$04$dzg.Qk6rVjy9P39K8KJ/Cu.VFBRQDxEHG4dfMmmlE386tM9dZnlkm\n";

/// The running registry; drop stops it and removes its storage.
pub struct RegistryProcess {
    pub host: String,
    child: Child,
    directory: tempfile::TempDir,
}

/// The registry's requirements and options.
#[derive(Clone, Copy, Default)]
pub struct Wants {
    pub tls: bool,
    pub password: bool,
    /// Whether clients may delete.
    pub deletion: bool,
}

impl RegistryProcess {
    pub fn start(wants: Wants) -> Self {
        Self::start_from(HERE, |directory, host| configure(directory, host, wants))
    }

    /// Starts a registry with TLS at an address that no client treats as local.
    pub fn start_elsewhere() -> Self {
        let wants = Wants { tls: true, ..Wants::default() };
        Self::start_from("127.0.0.2", |directory, host| configure(directory, host, wants))
    }

    /// Starts a registry with custom certificates: `tls` is the value of `tls` in its configuration.
    pub fn start_with_tls(tls: &str) -> Self {
        Self::start_from(HERE, |directory, host| {
            let path = configure(directory, host, Wants::default());
            let config = fs::read_to_string(&path).unwrap();
            fs::write(&path, format!("{config}  tls: {tls}\n")).unwrap();
            path
        })
    }

    fn start_from(address: &str, configure: impl Fn(&Path, &str) -> PathBuf) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Another process may take the port in the meantime; the registry then exits, and the loop tries another port.
        for _ in 0..5 {
            let port = TcpListener::bind((address, 0)).unwrap().local_addr().unwrap().port();
            let host = format!("{address}:{port}");
            let config = configure(directory.path(), &host);
            let log = fs::File::create(directory.path().join("log")).unwrap();
            let mut child = Command::new("docker-registry")
                .arg("serve")
                .arg(config)
                .stdin(Stdio::null())
                .stdout(log.try_clone().unwrap())
                .stderr(log)
                .spawn()
                .expect("start docker-registry (Debian package docker-registry)");
            if answers(&host, &mut child) {
                return Self { host, child, directory };
            }
        }
        panic!(
            "docker-registry does not start: {}",
            fs::read_to_string(directory.path().join("log")).unwrap()
        );
    }

    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the storage directory. Another registry can reuse it after this one has stopped.
    pub fn storage(&self) -> PathBuf {
        self.directory.path().join("storage")
    }

    /// Returns the certificate of a registry with TLS, which is also its own authority.
    pub fn ca_file(&self) -> PathBuf {
        self.directory.path().join("cert.pem")
    }

    /// Deletes a tag but not its manifest, like a registry's cleanup job.
    pub fn lose_tag(&self, repository: &str, tag: &str) {
        let tags = format!("storage/docker/registry/v2/repositories/{repository}/_manifests/tags");
        fs::remove_dir_all(self.directory.path().join(tags).join(tag)).expect("the registry has the tag");
    }

    /// Returns every digest that a tag has ever had, in hex.
    pub fn ever_tagged(&self, repository: &str, tag: &str) -> Vec<String> {
        let tags = format!("storage/docker/registry/v2/repositories/{repository}/_manifests/tags");
        let index = self.directory.path().join(tags).join(tag).join("index/sha256");
        let digests = fs::read_dir(index).expect("the registry has the tag");
        digests.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Replaces the bytes of a blob, like a broken disk.
    pub fn replace_blob(&self, digest: &farrier_core::image::Digest, bytes: &[u8]) {
        let path = self.data(digest.as_str());
        assert!(path.exists(), "the registry has the blob");
        fs::write(path, bytes).unwrap();
    }

    /// Deletes a blob but not its manifests, like a garbage collection during a push.
    pub fn lose_blob(&self, digest: &farrier_core::image::Digest) {
        fs::remove_file(self.data(digest.as_str())).expect("the registry has the blob");
    }

    /// Returns a blob's bytes (`sha256:...`).
    pub fn blob(&self, digest: &str) -> Vec<u8> {
        fs::read(self.data(digest)).expect("the registry has the blob")
    }

    /// Garbage-collects the storage, like a registry's administrator.
    pub fn collect_garbage(&self) {
        self.garbage_collect(&[]);
    }

    /// Garbage-collects the storage, and deletes every manifest without a tag.
    pub fn delete_untagged(&self) {
        self.garbage_collect(&["--delete-untagged"]);
    }

    fn garbage_collect(&self, options: &[&str]) {
        let config = self.directory.path().join("config.yml");
        let mut command = Command::new("docker-registry");
        let collected = command.arg("garbage-collect").args(options).arg(config).output().unwrap();
        assert!(collected.status.success(), "{}", String::from_utf8_lossy(&collected.stderr));
    }

    /// Returns whether the storage contains this blob (`sha256:...`) in any repository.
    pub fn stores(&self, digest: &str) -> bool {
        self.data(digest).exists()
    }

    fn data(&self, digest: &str) -> PathBuf {
        let hex = digest.strip_prefix("sha256:").unwrap();
        self.storage().join("docker/registry/v2/blobs/sha256").join(&hex[..2]).join(hex).join("data")
    }

    /// Returns the number of requests with a method that the registry has answered.
    pub fn requests(&self, method: &str) -> usize {
        self.requests_to(method, "")
    }

    /// Returns the number of answered requests with a method to this repository.
    pub fn requests_to(&self, method: &str, repository: &str) -> usize {
        let log = fs::read_to_string(self.directory.path().join("log")).unwrap();
        log.lines().filter(|line| line.contains(&format!("\"{method} /v2/{repository}"))).count()
    }
}

impl Drop for RegistryProcess {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Waits until the port accepts connections or the registry has ended.
fn answers(host: &str, child: &mut Child) -> bool {
    let until = Instant::now() + Duration::from_secs(20);
    while Instant::now() < until {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        if std::net::TcpStream::connect(host).is_ok() {
            return true;
        }
        // No notification of the listening port exists; the sleep only limits the polling rate.
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    false
}

fn configure(directory: &Path, host: &str, wants: Wants) -> PathBuf {
    let at = directory.display();
    let mut config = format!(
        "version: 0.1\nlog: {{level: info, accesslog: {{disabled: false}}}}\n\
         storage: {{filesystem: {{rootdirectory: {at}/storage}}, delete: {{enabled: {}}}}}\nhttp:\n  addr: {host}\n",
        wants.deletion
    );
    if wants.tls {
        certificate(directory);
        writeln!(config, "  tls: {{certificate: {at}/cert.pem, key: {at}/key.pem}}").unwrap();
    }
    if wants.password {
        fs::write(directory.join("htpasswd"), HTPASSWD).unwrap();
        writeln!(config, "auth: {{htpasswd: {{realm: farrier, path: {at}/htpasswd}}}}").unwrap();
    }
    let path = directory.join("config.yml");
    fs::write(&path, config).unwrap();
    path
}

/// Creates a self-signed certificate for both addresses.
fn certificate(directory: &Path) {
    let config = directory.join("openssl.cnf");
    let text = "[req]\ndistinguished_name = name\nx509_extensions = server\n[name]\n\
                [server]\nbasicConstraints = critical, CA:FALSE\nsubjectAltName = IP:127.0.0.1, IP:127.0.0.2\n";
    fs::write(&config, text).unwrap();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=127.0.0.1", "-config"])
        .arg(config)
        .arg("-keyout")
        .arg(directory.join("key.pem"))
        .arg("-out")
        .arg(directory.join("cert.pem"))
        .output()
        .expect("run openssl (Debian package openssl)");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}
