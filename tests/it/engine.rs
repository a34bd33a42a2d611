//! Both engines for real: the Docker daemon through its socket, and the sandbox.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, OnceLock},
};

use farrier_builder::FileLog;
use farrier_core::template::steps::{self, Base};
use farrier_engines::{
    BuildLog, BuildRequest, ContextEntry, DockerEngine, Engine, EngineChoice, EngineEnv, EngineError,
    InPlace, LOCAL_PREFIX, Owner, connect, connect_docker,
};
use farrier_local::archive::UnpackError;
use runner::plan::{Limits, Plan};
use tokio_util::sync::CancellationToken;

/// Returns the engine from the environment, set by the machine or by the script that runs the tests.
fn engine_env() -> EngineEnv {
    EngineEnv { docker_host: std::env::var("DOCKER_HOST").ok(), ..EngineEnv::default() }
}

/// Collects log lines, and lets a test wait for a line.
#[derive(Default)]
struct Lines {
    seen: Mutex<Vec<String>>,
    changed: tokio::sync::Notify,
}

impl Lines {
    fn has(&self, text: &str) -> bool {
        self.seen.lock().unwrap().iter().any(|line| line.contains(text))
    }

    async fn wait_for(&self, text: &str) {
        loop {
            let changed = self.changed.notified();
            if self.seen.lock().unwrap().iter().any(|line| line == text) {
                return;
            }
            changed.await;
        }
    }
}

impl BuildLog for Lines {
    fn line(&self, line: &str) {
        self.seen.lock().unwrap().push(line.to_owned());
        self.changed.notify_waiters();
    }
}

/// Packs a static busybox and its applets as a tar, the smallest root file system that can run a step.
fn root_fs() -> &'static Path {
    static ROOT_FS: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, tar) = ROOT_FS.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        run(Command::new("apt-get").args(["download", "-q", "busybox-static"]).current_dir(dir.path()));
        run(Command::new("sh")
            .current_dir(dir.path())
            .args(["-c", "dpkg-deb -x busybox-static_*.deb unpacked"]));
        let root = dir.path().join("root");
        let bin = root.join("bin");
        for path in [&bin, &root.join("tmp")] {
            fs::create_dir_all(path).unwrap();
        }
        fs::create_dir_all(root.join("usr")).unwrap();
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").unwrap();
        std::os::unix::fs::symlink("../bin", root.join("usr/bin")).unwrap();
        let unpacked = dir.path().join("unpacked");
        let busybox = [unpacked.join("bin/busybox"), unpacked.join("usr/bin/busybox")];
        fs::copy(busybox.iter().find(|path| path.is_file()).unwrap(), bin.join("busybox")).unwrap();
        for applet in run(Command::new(bin.join("busybox")).arg("--list")).lines() {
            let _ = std::os::unix::fs::symlink("busybox", bin.join(applet));
        }
        let tar = dir.path().join("rootfs.tar");
        run(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&tar).arg("."));
        (dir, tar)
    });
    tar
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Unpacks [`root_fs`] into a tree owned as the sandbox requires.
fn root_tree(owner: Owner) -> &'static Path {
    static TREE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, tree) = TREE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        run(Command::new("tar").arg("-C").arg(&tree).arg("-xf").arg(root_fs()));
        owner.chown_tree(&tree).unwrap();
        (dir, tree)
    });
    tree
}

/// An engine with a separate base image for this test.
pub struct Bench {
    engine: Engine,
    pub base: String,
    work: tempfile::TempDir,
    log: Arc<Lines>,
    cancel: CancellationToken,
}

impl Bench {
    pub async fn new(choice: EngineChoice, name: &str) -> Self {
        let engine = connect(choice, &engine_env()).await.unwrap();
        let base = format!("localhost/farrier-test/{name}-{}:1", std::process::id());
        let bench = Self {
            engine,
            base,
            work: tempfile::tempdir().unwrap(),
            log: Arc::default(),
            cancel: CancellationToken::new(),
        };
        if let Engine::Docker(engine) = &bench.engine {
            let mut request = bench.request("base", "FROM scratch\nADD rootfs.tar /\n");
            request.context = vec![ContextEntry { dest: "rootfs.tar".into(), from: root_fs().to_owned() }];
            engine.build_image(&request, &bench.base).await.unwrap();
            assert!(engine.has_image(&bench.base).await.unwrap());
        }
        bench
    }

    fn docker(&self) -> &DockerEngine {
        let Engine::Docker(engine) = &self.engine else { panic!("this test needs a daemon") };
        engine
    }

    pub fn request(&self, id: &str, dockerfile: &str) -> BuildRequest {
        BuildRequest {
            id: format!("test-{id}-{}", std::process::id()),
            dockerfile: dockerfile.to_owned(),
            context: Vec::new(),
            log: Arc::clone(&self.log) as Arc<dyn BuildLog>,
            cancel: self.cancel.clone(),
        }
    }

    /// Wraps steps in the two stages of a template.
    fn modules(&self, steps: &str) -> BuildRequest {
        let base = &self.base;
        self.request(
            "modules",
            &format!("FROM {base} AS modules\n{steps}\nFROM scratch\nCOPY --from=modules /out /\n"),
        )
    }

    /// Builds the request's payload into a new directory.
    pub async fn payload(&self, request: &BuildRequest) -> Result<PathBuf, EngineError> {
        let number = fs::read_dir(self.work.path()).unwrap().count();
        let dest = self.work.path().join(format!("payload-{number}"));
        fs::create_dir(&dest).unwrap();
        match &self.engine {
            Engine::Docker(engine) => engine.build_payload(request, &dest).await?,
            Engine::Sandbox(sandbox) => {
                let base = Base { name: self.base.clone(), ..Base::default() };
                let recipe = steps::read(&request.dockerfile, &base).unwrap();
                let build = InPlace {
                    plan: Plan { steps: recipe.steps, limits: Limits::default() },
                    lowers: vec![root_tree(sandbox.owner()).to_owned()],
                    context: request.context.clone(),
                    scratch: self.work.path().join(format!("scratch-{number}")),
                    log: Arc::clone(&request.log),
                    min_landlock_abi: 0,
                    cancel: request.cancel.clone(),
                };
                sandbox.compile(build, &dest).await?;
            }
            Engine::Kubernetes(_) => panic!("these tests do not use a cluster"),
        }
        Ok(dest)
    }

    /// Returns the leftovers of this test's jobs in the engine or among the processes, except the base. Other tests run
    /// concurrently.
    fn leftovers(&self) -> Vec<String> {
        if let Engine::Sandbox(_) = &self.engine {
            // A sandbox's mounts name its scratch directory and are visible only in its own processes.
            let mounts = fs::read_dir("/proc").unwrap().filter_map(|entry| {
                let path = entry.unwrap().path().join("mountinfo");
                let found = fs::read_to_string(&path).ok()?.contains(self.work.path().to_str()?);
                found.then(|| path.display().to_string())
            });
            return mounts.collect();
        }
        let label = format!("label=farrier.dev/build=test-modules-{}", std::process::id());
        let list = |args: &[&str]| run(Command::new("docker").args(args).args(["--filter", &label]));
        let found = list(&["ps", "-aq"]) + &list(&["images", "-aq"]);
        found.lines().map(str::to_owned).collect()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Engine::Docker(_) = &self.engine {
            let _ = Command::new("docker").args(["rmi", "--force", &self.base]).output();
        }
    }
}

/// Docker's answers about images with shared layers and about a missing image.
#[tokio::test]
async fn kept_images_are_listed_with_their_own_bytes_and_go() {
    let bench = Bench::new(EngineChoice::Docker, "kept").await;
    let name = format!("{LOCAL_PREFIX}base:test-{}", std::process::id());
    let mut request = bench.request("base", &format!("FROM {}\nCOPY file /file\n", bench.base));
    let file = bench.work.path().join("file");
    fs::write(&file, vec![1; 1 << 20]).unwrap();
    request.context = vec![ContextEntry { dest: "file".into(), from: file }];
    bench.docker().build_image(&request, &name).await.unwrap();
    let cached = bench.docker().cached_images().await.unwrap();
    assert!(cached.iter().all(|image| image.name.starts_with(LOCAL_PREFIX)), "{cached:?}");
    let own = cached.iter().find(|image| image.name == name).unwrap();
    // A daemon before API 1.42 does not report the size of shared layers.
    assert!((1 << 20..4 << 20).contains(&own.bytes), "{own:?}");
    assert!(own.created.elapsed().unwrap() < std::time::Duration::from_hours(1));
    for _ in 0..2 {
        assert!(bench.docker().remove_cached_image(&name).await.unwrap());
        assert!(!bench.docker().has_image(&name).await.unwrap());
    }
    assert!(bench.docker().has_image(&bench.base).await.unwrap());
}

async fn payload_round_trip(choice: EngineChoice) {
    let bench = Bench::new(choice, "payload").await;
    let source = bench.work.path().join("source");
    fs::create_dir_all(source.join("deep/er")).unwrap();
    fs::write(source.join("deep/er/run.sh"), "#!/bin/sh\ncat \"$1\"\n").unwrap();
    fs::set_permissions(source.join("deep/er/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink("er", source.join("deep/link")).unwrap();
    let mut request = bench.modules(
        "COPY sources/ /src/\n\
         RUN mkdir -p /out/lib/modules && cd /src/x && ./deep/link/run.sh deep/er/run.sh > /out/lib/modules/a.ko \
         && ln -s a.ko /out/lib/modules/b.ko && ln /out/lib/modules/a.ko /out/hard && chmod 0640 /out/hard \
         && echo to-stdout && echo to-stderr >&2",
    );
    request.context = vec![ContextEntry { dest: "sources/x".into(), from: source }];
    let dest = bench.payload(&request).await.unwrap();
    let modules = dest.join("lib/modules");
    assert_eq!(fs::read_to_string(modules.join("a.ko")).unwrap(), "#!/bin/sh\ncat \"$1\"\n");
    assert_eq!(fs::read_link(modules.join("b.ko")).unwrap(), Path::new("a.ko"));
    assert_eq!(fs::metadata(dest.join("hard")).unwrap().permissions().mode() & 0o7777, 0o640);
    assert!(bench.log.has("to-stdout") && bench.log.has("to-stderr"));
    assert_eq!(bench.leftovers(), [""; 0]);
}

async fn failed_step(choice: EngineChoice) {
    let bench = Bench::new(choice, "fail").await;
    let log_path = bench.work.path().join("logs/build.log");
    let log = Arc::new(FileLog::create(&log_path, |_| {}).unwrap());
    let mut request = bench.modules("RUN echo 'a.c:1:2: error: bad thing' >&2; exit 17");
    request.log = Arc::clone(&log) as Arc<dyn BuildLog>;
    let error = bench.payload(&request).await.unwrap_err();
    let EngineError::Step(message) = &error else { panic!("{error:?}") };
    assert!(message.starts_with("RUN echo") && message.ends_with("exit code 17"), "{message}");
    assert!(!error.is_transient());
    let (diagnosis, tail) = log.finish();
    assert_eq!(diagnosis.unwrap().to_string(), "a.c:1:2: bad thing");
    assert!(tail.iter().any(|line| line == "a.c:1:2: error: bad thing"));
    assert!(fs::read_to_string(&log_path).unwrap().contains("bad thing"));
    assert_eq!(bench.leftovers(), [""; 0]);
}

async fn no_network(choice: EngineChoice) {
    let bench = Bench::new(choice, "net").await;
    let server = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let reached = tokio::spawn(async move { server.accept().await.is_ok() });
    // The step tries host and bridge addresses. In /proc/net/dev each further interface would have a line with a colon.
    let request = bench.modules(&format!(
        "RUN mkdir /out; for to in 127.0.0.1 172.17.0.1; do nc -w 2 $to {port} </dev/null && exit 5; done; \
         while read line; do case \"$line\" in lo:*|Inter*|face*) ;; *:*) exit 6;; esac; done < /proc/net/dev"
    ));
    bench.payload(&request).await.unwrap();
    assert!(!reached.is_finished());
    reached.abort();
}

async fn missing_out(choice: EngineChoice) {
    let bench = Bench::new(choice, "noout").await;
    let error = bench.payload(&bench.modules("RUN true")).await.unwrap_err();
    assert_eq!(error.to_string(), "build step failed: the modules stage created no /out");
    assert_eq!(bench.leftovers(), [""; 0]);
}

async fn hostile_payload(choice: EngineChoice) {
    let bench = Bench::new(choice, "hostile").await;
    // A sandbox's steps cannot create device nodes, so the fallback is a FIFO.
    let request = bench.modules("RUN mkdir /out && (mknod /out/mem c 1 1 || mknod /out/fifo p)");
    let error = bench.payload(&request).await.unwrap_err();
    assert!(matches!(error, EngineError::Payload(UnpackError::Kind(..))), "{error:?}");
    let left = fs::read_dir(bench.work.path().join("payload-0")).unwrap().count();
    assert_eq!(left, 0, "a refused payload leaves no files");
    assert_eq!(bench.leftovers(), [""; 0]);
}

async fn cancelled(choice: EngineChoice) {
    let bench = Bench::new(choice, "cancel").await;
    let request = bench.modules("RUN echo started-now && sleep 600");
    let started = std::time::Instant::now();
    let (result, ()) = tokio::join!(bench.payload(&request), async {
        // Wait for the step's output, not for the line that announces the step.
        bench.log.wait_for("started-now").await;
        bench.cancel.cancel();
    });
    assert!(matches!(result, Err(EngineError::Canceled)), "{result:?}");
    assert!(started.elapsed().as_secs() < 60);
    assert_eq!(bench.leftovers(), [""; 0]);
}

/// Cancels a build of a kept image whose step ignores signals. Neither the image nor a container of it may remain.
async fn cancelled_image(choice: EngineChoice) {
    let bench = Bench::new(choice, "kept").await;
    let request = bench.request(
        "modules",
        &format!("FROM {}\nRUN trap '' TERM INT; echo started-now; while :; do sleep 1; done\n", bench.base),
    );
    let name = format!("{}-never", bench.base);
    let (result, ()) = tokio::join!(bench.docker().build_image(&request, &name), async {
        bench.log.wait_for("started-now").await;
        bench.cancel.cancel();
    });
    assert!(matches!(result, Err(EngineError::Canceled)), "{result:?}");
    assert!(!bench.docker().has_image(&name).await.unwrap());
    assert_eq!(bench.leftovers(), [""; 0]);
}

/// Cancels before the upload of the context, when the engine has created nothing yet.
async fn cancelled_early(choice: EngineChoice) {
    let bench = Bench::new(choice, "early").await;
    bench.cancel.cancel();
    let result = bench.payload(&bench.modules("RUN mkdir /out")).await;
    assert!(matches!(result, Err(EngineError::Canceled)), "{result:?}");
    assert_eq!(bench.leftovers(), [""; 0]);
}

async fn archive_is_readable(choice: EngineChoice) {
    let bench = Bench::new(choice, "archive").await;
    let dest = bench.work.path().join("image.tar");
    bench
        .docker()
        .build_archive(&bench.modules("RUN mkdir /out && echo x > /out/file"), &dest)
        .await
        .unwrap();
    let shown = run(Command::new("skopeo").arg("inspect").arg(format!("docker-archive:{}", dest.display())));
    assert!(shown.contains("\"Layers\""), "{shown}");
    let files: Vec<_> =
        fs::read_dir(bench.work.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files, ["image.tar"]);
    assert_eq!(bench.leftovers(), [""; 0]);
}

async fn unknown_instruction(choice: EngineChoice) {
    let bench = Bench::new(choice, "syntax").await;
    let error = bench.payload(&bench.modules("RNU true")).await.unwrap_err();
    assert!(matches!(&error, EngineError::Step(message) if message.contains("RNU")), "{error:?}");
}

async fn refused_pull(choice: EngineChoice) {
    let engine = connect_docker(choice, &engine_env()).await.unwrap();
    // Nothing listens on the port: the error is transient, not a refusal.
    let error = engine.pull("127.0.0.1:1/farrier/none:1", None).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    assert!(!engine.has_image("127.0.0.1:1/farrier/none:1").await.unwrap());
}

macro_rules! on {
    ($engine:ident, $choice:expr, $($case:ident),* $(,)?) => {
        mod $engine {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                super::$case($choice).await;
            })*
        }
    };
}

on!(
    docker,
    super::EngineChoice::Docker,
    payload_round_trip,
    failed_step,
    no_network,
    missing_out,
    hostile_payload,
    cancelled,
    cancelled_early,
    cancelled_image,
    archive_is_readable,
    unknown_instruction,
    refused_pull,
);

on!(
    sandbox,
    super::EngineChoice::Sandbox,
    payload_round_trip,
    failed_step,
    no_network,
    missing_out,
    hostile_payload,
    cancelled,
    cancelled_early,
);
