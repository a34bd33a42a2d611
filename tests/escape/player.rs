//! Runs the attacks as a caller of the sandbox: from each position of a build, through each place where a link can be
//! swapped in, and against each limit.

use std::{
    env,
    fmt::Debug,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use farrier_engines::{BuildLog, ContextEntry, Engine, EngineChoice, EngineEnv, InPlace, Sandbox, connect};
use runner::plan::{Action, Limits, Plan, Run, Source, Step};
use tokio_util::sync::CancellationToken;
use walkdir::WalkDir;

use crate::{
    domain::{Domain, processes, strays},
    kit::Kit,
    table::{Row, Verdict},
};

/// Number of the descriptor that the breakable runner leaks.
pub const LEAK: u32 = 100;

/// Barriers in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barriers {
    /// Both barriers.
    Both,
    /// Isolation only (namespaces and the pivoted root), without Landlock and the seccomp filter.
    IsolationOnly,
    /// Restrictions only (Landlock and the seccomp filter), while process 1 and every step hold a descriptor of the canaries'
    /// directory.
    LeakOfCanaries,
    /// Restrictions only, with a descriptor of the machine's root directory.
    LeakOfRoot,
    /// No barrier, to show that the attacks work.
    Nothing,
}

impl Barriers {
    pub const ALL: [(Self, &str); 5] = [
        (Self::Both, "both barriers"),
        (Self::IsolationOnly, "restrictions off"),
        (Self::LeakOfCanaries, "isolation broken at the canaries"),
        (Self::LeakOfRoot, "isolation broken at the root"),
        (Self::Nothing, "no barrier"),
    ];

    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(barriers, _)| *barriers == self).unwrap().1
    }
}

/// Build log that collects lines.
#[derive(Default)]
pub struct Lines(Mutex<Vec<String>>);

impl Lines {
    /// Returns and removes the lines collected so far.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl BuildLog for Lines {
    fn line(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }
}

/// A caller with a sandbox.
pub struct Player {
    pub domain: Domain,
    barriers: Barriers,
    sandbox: Arc<Sandbox>,
    lower: PathBuf,
    /// Text that only a forged message contains.
    pub forged: String,
}

/// Result of a build.
pub struct Played {
    pub lines: Vec<String>,
    /// Debug output of the outcome with all of its fields.
    pub outcome: String,
    pub is_done: bool,
    /// Paths and short contents of the payload.
    pub payload: Vec<String>,
    /// Bytes that the payload occupies on the disk.
    pub payload_size: u64,
    /// Changes outside the build, and leftovers.
    pub changed: Vec<String>,
}

impl Played {
    /// All text that the build produced.
    pub fn text(&self) -> String {
        format!("{}\n{}\n{}", self.lines.join("\n"), self.outcome, self.payload.join("\n"))
    }
}

impl Player {
    /// Creates the canaries and the tree, and connects to the sandbox.
    pub async fn new(kit: &Kit, secret: &str, barriers: Barriers) -> Self {
        let domain = Domain::new(secret, &kit.attack());
        let lower = domain.root().join("cache/tree");
        let forged = format!("FORGED-{}", domain.abstract_name);
        let env = EngineEnv {
            runner: Some(runner(kit, barriers, domain.root())),
            scratch: Some(domain.root().join("cache")),
            ..EngineEnv::default()
        };
        let sandbox = match connect(EngineChoice::Sandbox, &env).await {
            Ok(Engine::Sandbox(sandbox)) => sandbox,
            Ok(_) => panic!("connected to another engine"),
            Err(error) => panic!("no sandbox on this machine: {error:?}"),
        };
        make_tree(kit, &lower, &forged);
        sandbox.owner().chown_tree(&lower).unwrap();
        // A change of the owner clears the setuid bit.
        fs::set_permissions(lower.join("bin/setuid"), fs::Permissions::from_mode(0o6755)).unwrap();
        Self { domain, barriers, sandbox, lower, forged }
    }

    /// Command that runs all attacks from a position.
    pub fn attack(&self, place: &str) -> String {
        let mut known =
            self.leak().map_or_else(String::new, |(number, below)| format!("leak={number} below={below}"));
        if matches!(self.barriers, Barriers::IsolationOnly | Barriers::Nothing) {
            known += " filter=off";
        }
        attack(&self.domain, place, &known)
    }

    /// Runs a build, and checks everything that it could have reached.
    pub async fn build(&self, steps: Vec<Step>, limits: Limits) -> Played {
        let before = self.domain.snapshot();
        let work = self.domain.cache.scratch().unwrap();
        let (context, dest) = (work.path().join("source"), work.path().join("payload"));
        fs::create_dir_all(context.join("sub")).unwrap();
        fs::create_dir(&dest).unwrap();
        fs::write(context.join("sub/a.c"), "int a;").unwrap();
        let log = Arc::new(Lines::default());
        let build = InPlace {
            plan: Plan { steps, limits },
            lowers: vec![self.lower.clone()],
            context: vec![ContextEntry { dest: "sources/x".to_owned(), from: context }],
            scratch: work.path().join("sandbox"),
            log: Arc::clone(&log) as Arc<dyn BuildLog>,
            min_landlock_abi: 0,
            cancel: CancellationToken::new(),
        };
        let outcome = self.sandbox.compile(build, &dest).await;
        let mut changed = strays(&work.path().join("sandbox"));
        let (payload, payload_size) = contents(&dest);
        let path = work.path().to_owned();
        drop(work);
        if path.exists() {
            changed.push(format!("{} is left", path.display()));
        }
        changed.extend(self.domain.changes(&before));
        changed.extend(processes(&self.domain));
        let lines = log.take();
        Played {
            lines,
            is_done: outcome.is_ok(),
            outcome: describe(&outcome),
            payload,
            payload_size,
            changed,
        }
    }

    /// Whether a build escaped: a canary in its output, a forged message, or a change outside.
    pub fn is_out(&self, played: &Played) -> bool {
        let text = played.text();
        self.domain.is_seen_in(&text)
            || text.contains(&self.forged)
            || text.contains("ESCAPED")
            || !played.changed.is_empty()
    }

    /// Returns the verdict on a whole build. Prints the evidence of an escape to standard error.
    pub fn judge(&self, place: &str, attack: &str, played: &Played, expected: bool) -> Row {
        let is_reached = self.is_out(played) || !expected;
        if is_reached {
            eprintln!("{place}: {attack}: {}\nchanged: {:#?}", played.text(), played.changed);
        }
        Row::new(place, attack, Verdict::of(is_reached))
    }
}

fn describe(outcome: &Result<impl Debug, farrier_engines::EngineError>) -> String {
    match outcome {
        Ok(done) => format!("{done:?}"),
        Err(error) => format!("{error}: {error:?}"),
    }
}

/// Returns the released runner, or a script that starts the breakable one with its options.
fn runner(kit: &Kit, barriers: Barriers, outside: &Path) -> PathBuf {
    let arguments = match barriers {
        Barriers::Both => return kit.runner(),
        Barriers::IsolationOnly => "--without-landlock --without-seccomp".to_owned(),
        Barriers::LeakOfCanaries => format!("--leak {}", outside.display()),
        Barriers::LeakOfRoot => "--leak /".to_owned(),
        Barriers::Nothing => format!("--leak {} --without-landlock --without-seccomp", outside.display()),
    };
    let script = outside.join("runner");
    let program = kit.breakable().display().to_string();
    let text =
        format!("#!/bin/sh\n[ \"$1\" = sandbox ] && set -- \"$@\" {arguments}\nexec {program} \"$@\"\n");
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

/// Command that runs every attack on the canaries of a domain.
pub fn attack(domain: &Domain, place: &str, more: &str) -> String {
    let Domain { abstract_name, port, .. } = domain;
    let outside = domain.root().display();
    format!(
        "attack all '{place}' outside={outside} home={outside}/home abstract={abstract_name} port={port} {more}"
    )
}

/// Creates a rootfs with a static busybox, the attacking program, a setuid copy of it, and forged messages.
pub fn make_tree(kit: &Kit, tree: &Path, forged: &str) {
    for directory in ["bin", "tmp", "etc"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
    fs::copy(kit.busybox(), tree.join("bin/busybox")).unwrap();
    for applet in ["sh", "cat", "mkdir", "mv", "ln", "rm", "env", "ls", "echo", "true", "readlink"] {
        symlink("busybox", tree.join("bin").join(applet)).unwrap();
    }
    fs::copy(kit.attack(), tree.join("bin/attack")).unwrap();
    fs::copy(kit.attack(), tree.join("bin/setuid")).unwrap();
    fs::write(tree.join("frames"), crate::forgery::ends(forged)).unwrap();
    fs::set_permissions(tree.join("bin/setuid"), fs::Permissions::from_mode(0o6755)).unwrap();
}

/// Paths and short contents of a payload, and the bytes that it occupies on the disk.
fn contents(payload: &Path) -> (Vec<String>, u64) {
    let mut size = 0;
    let mut found = Vec::new();
    for entry in WalkDir::new(payload).min_depth(1).into_iter().map(Result::unwrap) {
        let metadata = entry.path().symlink_metadata().unwrap();
        size += metadata.blocks() * 512;
        let is_short = metadata.is_file() && metadata.len() < 4096;
        let text = if is_short { fs::read(entry.path()).unwrap_or_default() } else { Vec::new() };
        let path = entry.path().strip_prefix(payload).unwrap().display().to_string();
        found.push(format!("{path}: {}", String::from_utf8_lossy(&text)));
    }
    (found, size)
}

/// A step with its text and action.
pub fn step(text: &str, action: Action) -> Step {
    Step { line: 1, text: text.to_owned(), action }
}

fn command(argv: Vec<String>, workdir: &str, script: Option<String>) -> Step {
    let env = vec![("PATH".to_owned(), "/bin".to_owned())];
    step("RUN", Action::Run(Run { argv, env, workdir: workdir.to_owned(), script }))
}

pub fn run_in(workdir: &str, script: &str) -> Step {
    command(["/bin/sh", "-c", script].map(str::to_owned).to_vec(), workdir, None)
}

pub fn run(script: &str) -> Step {
    run_in("/", script)
}

/// A `RUN <<EOF` whose first line names an interpreter.
pub fn script(workdir: &str, text: &str) -> Step {
    command(Vec::new(), workdir, Some(text.to_owned()))
}

pub fn workdir(path: &str) -> Step {
    step("WORKDIR", Action::Directory(path.to_owned()))
}

pub fn copy(pattern: &str, dest: &str) -> Step {
    let sources = vec![Source::Context(pattern.to_owned())];
    step("COPY", Action::Copy { sources, dest: dest.to_owned(), mode: None })
}

pub fn document(name: &str, content: &str, dest: &str) -> Step {
    let sources = vec![Source::Document { name: name.to_owned(), content: content.to_owned() }];
    step("COPY", Action::Copy { sources, dest: dest.to_owned(), mode: None })
}

/// Reads from the environment which barriers and which kit this process plays with.
pub fn wanted() -> (Barriers, Kit) {
    let name =
        env::var("ESCAPE_BARRIERS").expect("ESCAPE_BARRIERS is set when another test starts the player");
    let barriers = Barriers::ALL.into_iter().find(|(_, known)| *known == name).unwrap().0;
    (barriers, Kit::at(Path::new(&env::var("ESCAPE_KIT").unwrap())))
}

impl Player {
    /// The leaked descriptor, and the path of the canaries' directory relative to it.
    pub fn leak(&self) -> Option<(u32, String)> {
        let outside = self.domain.root().display().to_string();
        match self.barriers {
            Barriers::Both | Barriers::IsolationOnly => None,
            Barriers::LeakOfCanaries | Barriers::Nothing => Some((LEAK, ".".to_owned())),
            Barriers::LeakOfRoot => Some((LEAK, outside.trim_start_matches('/').to_owned())),
        }
    }

    pub fn barriers(&self) -> Barriers {
        self.barriers
    }
}
