//! What a hostile build step can do in a sandbox: nothing. It tries each way out, and looks for what others have put there to
//! be found; limits hold for what it uses. In a daemon's container it finds nothing, either.

use std::{
    fs,
    os::{linux::net::SocketAddrExt as _, unix::fs::PermissionsExt as _},
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use farrier::engine::{
    BuildJob, BuildLog, ContextEntry, Engine, EngineChoice, EngineEnv, EngineError, InPlace, Owner, connect,
};
use runner::plan::{Action, Limits, Plan, Run, Source, Step};
use tokio_util::sync::CancellationToken;

/// Collects lines.
#[derive(Default)]
struct Lines(Mutex<Vec<String>>);

impl BuildLog for Lines {
    fn line(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }
}

fn step(text: &str, action: Action) -> Step {
    Step { line: 1, text: text.to_owned(), action }
}

fn run(script: &str) -> Step {
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    let env = vec![("PATH".to_owned(), "/bin".to_owned())];
    step(&format!("RUN {script}"), Action::Run(Run { argv, env, workdir: "/".to_owned(), script: None }))
}

/// A root with a static busybox, and a program that tries to get out.
fn tree(work: &Path) -> std::path::PathBuf {
    let tree = work.join("tree");
    for directory in ["bin", "tmp"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    fs::copy(busybox.expect("busybox-static is installed"), tree.join("bin/busybox")).unwrap();
    for applet in
        ["sh", "cat", "mkdir", "sleep", "dd", "env", "ls", "chmod", "seq", "tail", "head", "find", "readlink"]
    {
        std::os::unix::fs::symlink("busybox", tree.join("bin").join(applet)).unwrap();
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/escape.c");
    let compiled = Command::new("gcc-12")
        .args(["-static", "-O1", "-w", "-o"])
        .arg(tree.join("bin/escape"))
        .arg(source)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Owner::of_this_process().own(&tree).unwrap();
    tree
}

/// Runs steps; their output, and how it ended.
async fn in_sandbox(
    work: &Path,
    steps: Vec<Step>,
    limits: Limits,
    context: Vec<ContextEntry>,
) -> (Vec<String>, Result<Vec<String>, EngineError>) {
    let Ok(Engine::Sandbox(sandbox)) = connect(EngineChoice::Sandbox, &EngineEnv::default()).await else {
        panic!("there is no sandbox on this machine");
    };
    let log = Arc::new(Lines::default());
    let number = fs::read_dir(work).unwrap().count();
    let dest = work.join(format!("payload-{number}"));
    fs::create_dir(&dest).unwrap();
    let build = InPlace {
        plan: Plan { steps, limits },
        lowers: vec![work.join("tree")],
        context,
        scratch: work.join(format!("scratch-{number}")),
        log: Arc::clone(&log) as Arc<dyn BuildLog>,
        cancel: CancellationToken::new(),
    };
    let outcome = sandbox.compile(build, &dest).await;
    let lines = std::mem::take(&mut *log.0.lock().unwrap());
    (lines, outcome)
}

/// What must not be found, as long as this lives: files in farrier's home, in its cache, beside its temporary files and where
/// everyone may read, an abstract socket, and a port on loopback.
struct Canaries {
    secrets: Vec<tempfile::NamedTempFile>,
    name: String,
    _abstract: std::os::unix::net::UnixListener,
    tcp: std::net::TcpListener,
}

impl Canaries {
    fn put(work: &Path) -> Self {
        let home = std::env::home_dir().unwrap();
        let cache = home.join(".cache");
        fs::create_dir_all(&cache).unwrap();
        let secret = |place: &Path| {
            let file = tempfile::Builder::new().prefix(".farrier-canary-").tempfile_in(place).unwrap();
            fs::write(&file, "CANARY").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
            file
        };
        let name = format!("farrier-canary-{}", work.file_name().unwrap().display());
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
        Self {
            secrets: [home.as_path(), &cache, work, &std::env::temp_dir()].map(secret).into(),
            name,
            _abstract: std::os::unix::net::UnixListener::bind_addr(&address).unwrap(),
            tcp: std::net::TcpListener::bind("127.0.0.1:0").unwrap(),
        }
    }

    /// Tries every way to each of them.
    fn attack(&self) -> String {
        let (name, port) = (&self.name, self.tcp.local_addr().unwrap().port());
        let each =
            self.secrets.iter().map(|file| format!("escape {} {name} {port}; ", file.path().display()));
        each.collect()
    }
}

/// Each is a border of its own, behind the filter of system calls.
const NAMESPACES: [&str; 7] = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_step_gets_at_nothing() {
    let work = tempfile::tempdir().unwrap();
    tree(work.path());
    let canaries = Canaries::put(work.path());
    let steps = vec![
        run("env; ls /proc/self/fd; cat /proc/self/status"),
        run(&canaries.attack()),
        run("find / -name '.farrier-canary-*' 2> /dev/null; true"),
        run(&NAMESPACES.map(|name| format!("readlink /proc/self/ns/{name}")).join("; ")),
        // The attack on process 1 did not end it, and a process that is left behind is gone in the next step.
        run("sleep 1000 > /dev/null 2>&1 & echo left $!"),
        run("mkdir /out && for process in /proc/[0-9]*; do cat $process/cmdline | head -c 100; echo; done"),
    ];
    let (lines, outcome) = in_sandbox(work.path(), steps, Limits::default(), Vec::new()).await;
    // farrier's own canary says it in short, for the provenance.
    let refused = outcome.unwrap();
    for what in ["a capability", "a socket of IPv4", "a disk", "a mount", "a user namespace"] {
        assert!(refused.iter().any(|refused| refused == what), "{what}: {refused:?}");
    }
    let attempts: Vec<_> = lines.iter().filter_map(|line| line.strip_suffix(" denied")).collect();
    let escaped: Vec<_> = lines.iter().filter(|line| line.ends_with(" ESCAPED")).collect();
    assert_eq!(escaped, [""; 0], "{lines:#?}");
    for expected in
        ["open the secret", "double chroot", "ptrace", "sockets", "io_uring", "keyctl", "end process 1"]
    {
        assert!(attempts.contains(&expected), "{expected} was not tried: {lines:#?}");
    }
    assert!(attempts.len() >= canaries.secrets.len() * 40, "{}", attempts.len());
    // No file of the machine's is below any of its directories, and no namespace is the machine's.
    let found: Vec<_> =
        lines.iter().filter(|line| line.starts_with('/') && line.contains(".farrier-canary-")).collect();
    assert_eq!(found, [""; 0]);
    for name in NAMESPACES {
        let ours = fs::read_link(format!("/proc/self/ns/{name}")).unwrap().display().to_string();
        let theirs = lines.iter().find(|line| line.starts_with(&format!("{name}:["))).unwrap();
        assert_ne!(*theirs, ours);
    }
    // Its environment is the plan's, and it has no capability.
    let mut variables: Vec<_> = lines
        .iter()
        .filter(|line| !line.starts_with("Step"))
        .filter_map(|line| line.split_once('=').map(|(name, _)| name))
        .collect();
    variables.sort_unstable();
    assert_eq!(variables, ["PATH", "PWD", "SHLVL"]);
    for set in ["CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(
            lines.iter().any(|line| line.starts_with(set) && line.ends_with("\t0000000000000000")),
            "{set}"
        );
    }
    assert!(lines.iter().any(|line| line.starts_with("left ")));
    assert!(
        !lines.iter().any(|line| line.starts_with("sleep\u{0}1000") || line == "sleep1000"),
        "{lines:#?}"
    );
    assert!(!lines.iter().any(|line| line.contains("CANARY")));
}

/// A daemon's container is root, may make device nodes and sockets, and has a namespace of each kind that Docker makes: what is
/// outside of it is not found from there.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_step_in_a_daemons_container_finds_nothing() {
    let env = EngineEnv { docker_host: std::env::var("DOCKER_HOST").ok(), ..EngineEnv::default() };
    let Ok(Engine::Docker(daemon)) = connect(EngineChoice::Docker, &env).await else {
        panic!("there is no daemon on this machine");
    };
    let work = tempfile::tempdir().unwrap();
    let canaries = Canaries::put(work.path());
    let log = Arc::new(Lines::default());
    let job = BuildJob {
        id: format!("canary-{}", std::process::id()),
        dockerfile: format!(
            "FROM scratch AS modules\nCOPY tree /\nENV PATH=/bin\nRUN env; {} mkdir /out\nFROM scratch\n\
             COPY --from=modules /out /\n",
            canaries.attack()
        ),
        context: vec![ContextEntry { dest: "tree".to_owned(), from: tree(work.path()) }],
        log: Arc::clone(&log) as Arc<dyn BuildLog>,
        cancel: CancellationToken::new(),
    };
    let dest = work.path().join("payload");
    fs::create_dir(&dest).unwrap();
    daemon.build_payload(&job, &dest).await.unwrap();
    let lines = log.0.lock().unwrap();
    for attempt in [
        "open the secret",
        "double chroot",
        "root of process 1",
        "mount",
        "bind mount",
        "pivot_root",
        "user namespace",
        "abstract socket",
        "loopback",
        "bpf",
        "keyctl",
        "request_key",
        "init_module",
        "kexec",
        "open_by_handle",
    ] {
        let denied = lines.iter().filter(|line| **line == format!("{attempt} denied")).count();
        assert_eq!(denied, canaries.secrets.len(), "{attempt}: {lines:#?}");
    }
    assert!(!lines.iter().any(|line| line.contains("CANARY") || line.starts_with("CARGO_")), "{lines:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_greedy_step_is_stopped_and_told_why() {
    let work = tempfile::tempdir().unwrap();
    tree(work.path());
    let stopped = async |script: &str, limits: Limits| {
        let (_, outcome) = in_sandbox(work.path(), vec![run(script)], limits, Vec::new()).await;
        outcome.unwrap_err().to_string()
    };
    let memory = Limits { memory: Some(64 << 20), ..Limits::default() };
    let said = stopped(
        "dd if=/dev/zero of=/dev/null bs=400M & sleep 60; dd if=/dev/zero bs=400M | sleep 60",
        memory,
    )
    .await;
    assert!(said.contains("MiB of memory, and may use 64"), "{said}");
    let disk = Limits { disk: Some(64 << 20), ..Limits::default() };
    let said = stopped("dd if=/dev/zero of=/tmp/full bs=1M count=100000", disk).await;
    assert!(said.contains("MiB, and may write 64"), "{said}");
    // A fork bomb does not get far, and is gone with the step.
    let processes = Limits { processes: Some(64), ..Limits::default() };
    let bomb = "for i in $(seq 200); do sleep 600 & done; mkdir /out";
    let bombed = tokio::time::timeout(
        Duration::from_mins(1),
        in_sandbox(work.path(), vec![run(bomb)], processes, Vec::new()),
    );
    let (lines, outcome) = bombed.await.expect("a fork bomb stops");
    assert!(outcome.is_err() && lines.iter().any(|line| line.contains("fork")), "{lines:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_copied_as_docker_copies_them() {
    // As root's home: what is below is nobody else's to look up, and not the sandbox's user's either.
    let home = tempfile::tempdir().unwrap();
    fs::set_permissions(home.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let work = tempfile::tempdir_in(home.path()).unwrap();
    tree(work.path());
    let source = work.path().join("source");
    fs::create_dir_all(source.join("sub")).unwrap();
    fs::write(source.join("sub/a.c"), "int a;").unwrap();
    let copy = |pattern: &str, dest: &str| {
        let sources = vec![Source::Context(pattern.to_owned())];
        step("COPY", Action::Copy { sources, dest: dest.to_owned(), mode: None })
    };
    let context = || vec![ContextEntry { dest: "sources/x".to_owned(), from: source.clone() }];
    let steps =
        vec![copy("sources/x/", "/build/"), run("cat /build/sub/a.c; mkdir /out; chmod 0500 /build/sub")];
    let (lines, outcome) = in_sandbox(work.path(), steps, Limits::default(), context()).await;
    outcome.unwrap();
    assert!(lines.contains(&"int a;".to_owned()), "{lines:?}");
    let (_, outcome) =
        in_sandbox(work.path(), vec![copy("nothing/*", "/build/")], Limits::default(), context()).await;
    assert_eq!(
        outcome.unwrap_err().to_string(),
        "build step failed: COPY: the build context has no nothing/*"
    );
}
