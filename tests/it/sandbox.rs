//! Builds in a sandbox: resource limits with clear errors, and `COPY` with Docker's semantics. `tests/escape` covers hostile
//! steps.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use farrier_core::provenance::Confinement;
use farrier_engines::{
    BuildLog, ContextEntry, Engine, EngineChoice, EngineEnv, EngineError, InPlace, connect,
};
use runner::plan::{Action, Limits, Plan, Run, Source, Step};
use tokio_util::sync::CancellationToken;

/// Collects log lines.
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

/// Creates a root with a static busybox.
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
    tree
}

/// Runs steps and returns their output and the outcome.
async fn in_sandbox(
    work: &Path,
    steps: Vec<Step>,
    limits: Limits,
    context: Vec<ContextEntry>,
) -> (Vec<String>, Result<Confinement, EngineError>) {
    let Ok(Engine::Sandbox(sandbox)) = connect(EngineChoice::Sandbox, &EngineEnv::default()).await else {
        panic!("this machine supports no sandbox");
    };
    sandbox.owner().chown_tree(&work.join("tree")).unwrap();
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
        min_landlock_abi: 0,
        cancel: CancellationToken::new(),
    };
    let outcome = sandbox.compile(build, &dest).await;
    let lines = std::mem::take(&mut *log.0.lock().unwrap());
    (lines, outcome)
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
    assert!(said.contains("MiB of memory; the limit is 64 MiB"), "{said}");
    let disk = Limits { disk: Some(64 << 20), ..Limits::default() };
    let said = stopped("dd if=/dev/zero of=/tmp/full bs=1M count=100000", disk).await;
    assert!(said.contains("MiB; the limit is 64 MiB"), "{said}");
    let unlinked = "exec 3>/tmp/full; busybox rm /tmp/full; dd if=/dev/zero bs=1M count=512 >&3; sleep 5";
    let said = stopped(unlinked, disk).await;
    assert!(said.contains("MiB; the limit is 64 MiB"), "{said}");
    // A fork bomb hits the limit and ends with the step.
    let processes = Limits { processes: Some(64), ..Limits::default() };
    let bomb = "for i in $(seq 200); do sleep 600 & done; mkdir /out";
    let bombed = tokio::time::timeout(
        Duration::from_mins(1),
        in_sandbox(work.path(), vec![run(bomb)], processes, Vec::new()),
    );
    let (lines, outcome) = bombed.await.expect("a fork bomb stops");
    assert!(outcome.is_err() && lines.iter().any(|line| line.contains("fork")), "{lines:?}");
}

/// The programs of another build may have used up the user's processes.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_cannot_start_for_lack_of_processes_is_tried_again() {
    let work = tempfile::tempdir().unwrap();
    tree(work.path());
    // Enough for the two processes of the runner and the thread that measures, but for no step.
    let limits = Limits { processes: Some(3), ..Limits::default() };
    let (_, outcome) = in_sandbox(work.path(), vec![run("true")], limits, Vec::new()).await;
    let error = outcome.unwrap_err();
    let why = format!("{error} {:?}", std::error::Error::source(&error));
    assert!(error.is_transient() && why.contains("start /bin/sh"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_copied_as_docker_copies_them() {
    // A directory that, like root's home, no other user can search, including the sandbox's user.
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
