//! Attacks from a build step in a container of a Docker daemon. The step is root, may create device nodes and sockets, and
//! runs in every kind of namespace that Docker creates. It must not find anything outside the container.

use std::{env, fs, process, sync::Arc};

use farrier_engines::{BuildLog, BuildRequest, ContextEntry, Engine, EngineChoice, EngineEnv, connect};
use tokio_util::sync::CancellationToken;

use crate::{
    domain::Domain,
    host::pack,
    player::{Lines, attack, make_tree},
    table::{Row, Table},
};

/// Attacks that a container must deny. Docker's seccomp filter allows more system calls than the sandbox's.
const DENIED: [&str; 22] = [
    "open the secret",
    "write the secret",
    "hard link to the secret",
    ".. from every mount",
    ".. from the root",
    "out by links of /proc/PID",
    "a canary by an inherited descriptor",
    "the caller's environment",
    "double chroot",
    "root of process 1",
    "mount",
    "bind mount",
    "pivot_root",
    "user namespace",
    "abstract socket",
    "path socket",
    "loopback",
    "bpf",
    "request_key",
    "init_module",
    "kexec",
    "open_by_handle",
];

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_step_in_a_daemons_container_finds_nothing() {
    let env = EngineEnv { docker_host: env::var("DOCKER_HOST").ok(), ..EngineEnv::default() };
    let Ok(Engine::Docker(daemon)) = connect(EngineChoice::Docker, &env).await else {
        panic!("no Docker daemon on this machine");
    };
    let work = tempfile::tempdir().unwrap();
    let kit = pack(work.path());
    let secret = fs::read_to_string(kit.secret()).unwrap();
    let domain = Domain::new(&secret, &kit.attack());
    let tree = domain.root().join("cache/tree");
    make_tree(&kit, &tree, "forged");
    let before = domain.snapshot();
    let log = Arc::new(Lines::default());
    // The attack sends signals to process 1, which is this step's shell.
    let request = BuildRequest {
        id: format!("canary-{}", process::id()),
        dockerfile: format!(
            "FROM scratch AS modules\nCOPY tree /\nENV PATH=/bin\nRUN trap '' INT; env; {}; mkdir /out\nFROM scratch\n\
             COPY --from=modules /out /\n",
            attack(&domain, "container", "")
        ),
        context: vec![ContextEntry { dest: "tree".to_owned(), from: tree }],
        log: Arc::clone(&log) as Arc<dyn BuildLog>,
        cancel: CancellationToken::new(),
    };
    let dest = work.path().join("payload");
    fs::create_dir(&dest).unwrap();
    daemon.build_payload(&request, &dest).await.unwrap();
    let lines = log.take();
    let table = Table::new(lines.iter().filter_map(|line| Row::attacked(line)));
    let escapes = table.escapes();
    for attack in DENIED {
        assert!(table.has(attack, "container"), "{attack} was not tried: {lines:#?}");
        assert!(!escapes.contains(&format!("{attack} (container)")), "{escapes:?}");
    }
    assert!(!domain.is_seen_in(&lines.join("\n")), "{lines:#?}");
    assert!(!lines.iter().any(|line| line.starts_with("CARGO_")), "{lines:#?}");
    assert_eq!(domain.changes(&before), [""; 0]);
}
