//! A network namespace with only loopback: processes inside cannot reach other hosts.

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use super::site::wait_until;

/// The namespace. It ends with its last process, and its keeper ends on drop or with the test.
pub struct LoopbackOnly {
    keeper: Child,
}

impl LoopbackOnly {
    /// Creates a namespace, which requires root.
    pub fn new() -> Self {
        // `cat` ends with the test in any case, because its standard input is then closed.
        let mut keeper = Command::new("unshare")
            .args(["--net", "sh", "-c", "ip link set lo up && echo up && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("run unshare (Debian package util-linux)");
        let mut said = String::new();
        BufReader::new(keeper.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
        if said != "up\n" {
            let output = keeper.wait_with_output().unwrap();
            panic!(
                "no network namespace (root and the Debian package iproute2 are needed): {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Self { keeper }
    }

    /// Returns a command that runs in the namespace with the test's environment.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.keeper.id())).arg("--").arg(program);
        command
    }

    /// Moves a command into the namespace, keeping program, arguments, environment and directory.
    pub fn moved(&self, command: &Command) -> Command {
        let mut moved = self.command(command.get_program());
        moved.args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => moved.env(name, value),
                None => moved.env_remove(name),
            };
        }
        if let Some(directory) = command.get_current_dir() {
            moved.current_dir(directory);
        }
        moved.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        moved
    }

    /// Starts a registry in the namespace on a storage directory, which may have content.
    pub fn registry(&self, storage: &Path) -> SealedRegistry {
        SealedRegistry::start(self, storage)
    }
}

impl Drop for LoopbackOnly {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// A registry that is only reachable in its namespace. Its storage remains afterwards.
pub struct SealedRegistry {
    /// `host:port` inside the namespace.
    pub host: String,
    process: Child,
    directory: tempfile::TempDir,
}

impl SealedRegistry {
    /// No other process is in the namespace, so the port is free.
    const HOST: &str = "127.0.0.1:5000";

    fn start(namespace: &LoopbackOnly, storage: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("config.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: info, accesslog: {{disabled: false}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: \"{}\"}}\n",
            storage.display(),
            Self::HOST
        );
        fs::write(&config, text).unwrap();
        let log = fs::File::create(directory.path().join("log")).unwrap();
        let process = namespace
            .command("docker-registry")
            .arg("serve")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("start docker-registry (Debian package docker-registry)");
        let registry = Self { host: Self::HOST.to_owned(), process, directory };
        wait_until("the registry in the namespace", || {
            let url = format!("http://{}/v2/", Self::HOST);
            let answer = namespace.command("curl").args(["-sf", "-o", "/dev/null", &url]).status();
            answer.expect("run curl").success()
        });
        registry
    }

    /// Returns the registry's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// Returns the number of requests with a method that the registry has answered.
    pub fn requests(&self, method: &str) -> usize {
        self.log().lines().filter(|line| line.contains(&format!("\"{method} /v2/"))).count()
    }
}

impl Drop for SealedRegistry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
