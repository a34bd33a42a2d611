//! The builds of the suite: every attack in every position, links in place of directories, and steps that exceed limits.

use std::fs;

use runner::plan::{Limits, Step};

use crate::{
    domain::MOUNTED,
    forgery,
    player::{Barriers, LEAK, Played, Player, copy, document, run, run_in, script, workdir},
    table::{Row, Verdict},
};

/// Positions in a build from which the attacks run. Names contain no colon.
pub const PLACES: [&str; 7] =
    ["first RUN", "after COPY", "after WORKDIR", "script", "middle RUN", "between scripts", "last RUN"];
/// Descriptors that process 1 may have open. With one barrier down only the first ones are tried, and in a virtual machine one.
fn descriptors(barriers: Barriers) -> std::ops::RangeInclusive<u32> {
    match barriers {
        _ if is_small() => 3..=3,
        Barriers::Both => 3..=LAST_DESCRIPTOR,
        _ => 3..=4,
    }
}

/// Upper bound of the descriptors of process 1; a step lists the actual numbers.
const LAST_DESCRIPTOR: u32 = 12;

fn is_small() -> bool {
    std::env::var_os("ESCAPE_SCALE").is_some()
}
const MIB: u64 = 1 << 20;

/// Plays all builds of a player. Prints each row as soon as it is known, because an attack may kill the player.
pub async fn all(player: &Player) {
    print(&everywhere(player).await);
    if player.barriers() == Barriers::Nothing {
        return;
    }
    print(&links(player).await);
    print(&forgeries(player).await);
    if player.barriers() == Barriers::Both {
        print(&limits(player).await);
        print(&leftovers(player).await);
    }
}

fn print(rows: &[Row]) {
    println!();
    for row in rows {
        println!("{row}");
    }
}

/// Runs one build with all attacks in all positions.
async fn everywhere(player: &Player) -> Vec<Row> {
    let attack = |place: &str| player.attack(place);
    let namespaces = NAMESPACES.map(|name| format!("readlink /proc/self/ns/{name}")).join("; ");
    let steps = vec![
        run(&attack("first RUN")),
        run(&format!("env; {namespaces}; echo descriptors: $(ls /proc/1/fd)")),
        copy("sources/x/", "/build/"),
        run_in("/build", &attack("after COPY")),
        workdir("/build/sub/new"),
        run_in("/build/sub/new", &attack("after WORKDIR")),
        script("/build", &format!("#!/bin/sh\n{}\n", attack("script"))),
        run(&attack("middle RUN")),
        script("/", "#!/bin/sh\ntrue\n"),
        run(&attack("between scripts")),
        script("/build", "#!/bin/sh\ntrue\n"),
        document("late", "late", "/build/late/"),
        workdir("/build/late"),
        run("attack linger attack & echo left"),
        run_in("/build/late", &format!("{}; mkdir /out; echo fine > /out/the-end", attack("last RUN"))),
    ];
    let outcome = player.build(steps, Limits::default()).await;
    println!("outcome: {}", outcome.outcome);
    let mut rows: Vec<Row> = outcome.lines.iter().filter_map(|line| Row::attacked(line)).collect();
    let ended = outcome.is_done && outcome.payload.iter().any(|entry| entry == "the-end: fine\n");
    rows.push(player.judge("the build", "its result", &outcome, ended));
    rows.push(Row::new(
        "the build",
        "another environment",
        Verdict::of(!has_the_plans_environment(&outcome)),
    ));
    rows.push(Row::new("the build", "the machine's namespaces", Verdict::of(!has_own_namespaces(&outcome))));
    assert!(has_known_descriptors(&outcome), "LAST_DESCRIPTOR: {:#?}", outcome.lines);
    rows
}

/// Whether process 1 has only descriptors that `links` tries and the one that the breakable runner leaks.
fn has_known_descriptors(outcome: &Played) -> bool {
    let listed = outcome.lines.iter().find_map(|line| line.strip_prefix("descriptors:"));
    let numbers = listed.unwrap_or_default().split_whitespace().map(|number| number.parse::<u32>().unwrap());
    let known = |number| number <= LAST_DESCRIPTOR || number == LEAK;
    listed.is_some_and(|listed| !listed.trim().is_empty()) && numbers.into_iter().all(known)
}

/// Namespaces of the sandbox. Each one is a separate barrier, in addition to the seccomp filter.
const NAMESPACES: [&str; 7] = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];

fn has_own_namespaces(outcome: &Played) -> bool {
    NAMESPACES.iter().all(|name| {
        let ours = fs::read_link(format!("/proc/self/ns/{name}")).unwrap().display().to_string();
        let theirs = outcome.lines.iter().find(|line| line.starts_with(&format!("{name}:[")));
        theirs.is_some_and(|theirs| *theirs != ours)
    })
}

/// Whether the environment of a step contains only the plan's variables and the shell's.
fn has_the_plans_environment(outcome: &Played) -> bool {
    let lines = outcome.lines.iter().filter(|line| !line.starts_with("Step") && !line.contains(':'));
    let mut variables: Vec<_> = lines.filter_map(|line| Some(line.split_once('=')?.0)).collect();
    variables.sort_unstable();
    variables == ["PATH", "PWD", "SHLVL"]
}

/// Builds in which a step replaces a directory with a link to a descriptor of process 1, for each descriptor that process 1
/// may have.
async fn links(player: &Player) -> Vec<Row> {
    let mut rows = Vec::new();
    // The cache is three levels above a build's directory.
    let mut targets: Vec<_> =
        descriptors(player.barriers()).map(|number| (number, "../../../keys".to_owned())).collect();
    targets.extend(player.leak().map(|(number, below)| (number, format!("{below}/keys"))));
    for (number, keys) in targets {
        let near = format!("/proc/self/fd/{number}");
        let far = format!("{near}/{keys}");
        for link in [&near, &far] {
            let builds = [
                (
                    "WORKDIR",
                    vec![swap("/build", link), workdir("/build"), run_in("/build", "attack walk link")],
                ),
                ("RUN in a directory", vec![swap("/build", link), run_in("/build", "attack walk link")]),
                (
                    "COPY",
                    vec![swap("/build", link), document("farrier-escaped", "out", "/build/"), run("true")],
                ),
                ("/out", vec![swap("/out", link)]),
                // Process 1 does not find the script that it wrote.
                ("script", vec![swap("/tmp", link), script("/", "#!/bin/attack restore\n")]),
            ];
            for (place, steps) in builds {
                let outcome = player.build(steps, Limits::default()).await;
                let has_payload = place == "/out" && !outcome.payload.is_empty();
                rows.push(player.judge(place, "a link to a descriptor of process 1", &outcome, !has_payload));
            }
        }
        let across = format!("{near}/../../../{MOUNTED}/keys");
        let steps = vec![swap("/build", &across), workdir("/build"), run_in("/build", "attack walk link")];
        let outcome = player.build(steps, Limits::default()).await;
        rows.push(player.judge("WORKDIR", "a link to another mount", &outcome, true));
        let steps =
            vec![swap("/tmp", &near), script("/", "#!/bin/sh\nrm /tmp; mkdir /tmp; attack walk link\n")];
        let outcome = player.build(steps, Limits::default()).await;
        rows.push(player.judge("script", "a link to a descriptor of process 1", &outcome, true));
    }
    for link in [
        "/proc/1/root",
        "/proc/1/cwd",
        "/proc/self/root",
        "/proc/self/cwd",
        "/proc/self/task/1/cwd",
        "/proc/1/fd/3/..",
    ] {
        let steps = vec![swap("/build", link), workdir("/build"), run_in("/build", "attack walk link")];
        let outcome = player.build(steps, Limits::default()).await;
        rows.push(player.judge("WORKDIR", "a link of process 1", &outcome, true));
    }
    rows
}

/// Replaces a directory with a link.
fn swap(directory: &str, link: &str) -> Step {
    run(&format!("mkdir -p {directory}; mv {directory} {directory}.old; ln -s {link} {directory}"))
}

/// Builds in which steps forge the runner's messages through files that process 1 writes.
async fn forgeries(player: &Player) -> Vec<Row> {
    let frames = forgery::fails(&player.forged);
    let mut rows = Vec::new();
    for number in [1, 2].into_iter().chain(descriptors(player.barriers())) {
        let link = |place: &str| {
            run(&format!("mkdir -p /build; ln -s /proc/self/fd/{number} {place}; rm -rf /out; mkdir /out"))
        };
        let builds = [
            ("COPY", vec![link("/build/file"), document("file", &frames, "/build/file")]),
            ("script", vec![link("/tmp/.farrier-script"), script("/", &frames)]),
        ];
        for (place, steps) in builds {
            let mut outcome = player.build(steps, Limits::default()).await;
            // The shell's error message quotes the script that it cannot run.
            outcome.lines.retain(|line| !line.starts_with("/tmp/.farrier-script: "));
            rows.push(player.judge(place, "forged messages by a link", &outcome, true));
        }
    }
    rows
}

/// Verdict on a build that exceeds a limit: it must be stopped for that reason, or be refused the resource.
fn stopped(player: &Player, attack: &str, outcome: &Played, why: &str) -> Row {
    let was_stopped = !outcome.is_done && outcome.outcome.contains(why);
    let was_refused = outcome.lines.iter().any(|line| line.ends_with(": denied"));
    player.judge("a limit", attack, outcome, was_stopped || was_refused)
}

async fn limits(player: &Player) -> Vec<Row> {
    let mut rows = Vec::new();
    let memory = Limits { memory: Some(64 * MIB), ..Limits::default() };
    for kind in
        ["private", "shared", "zero", "memfd", "unmapped", "secret", "sysv", "dev-shm", "small", "thread"]
    {
        let steps = vec![run(&format!("attack memory {kind} 300"))];
        let outcome = player.build(steps, memory).await;
        rows.push(stopped(player, &format!("memory, {kind}"), &outcome, "of memory"));
    }
    let disk = Limits { disk: Some(64 * MIB), ..Limits::default() };
    let outcome = player.build(vec![run("attack disk 1000")], disk).await;
    rows.push(stopped(player, "disk", &outcome, "the limit is 64 MiB"));
    let inodes = Limits { inodes: Some(5_000), ..Limits::default() };
    let files = if is_small() { 8_000 } else { 20_000 };
    let outcome = player.build(vec![run(&format!("attack inodes {files}"))], inodes).await;
    rows.push(stopped(player, "inodes", &outcome, "5000"));
    let processes = Limits { processes: Some(64), ..Limits::default() };
    let outcome = player.build(vec![run("attack forks 300")], processes).await;
    rows.push(stopped(player, "processes", &outcome, "processes"));
    rows
}

/// Builds whose results could burden farrier itself afterwards.
async fn leftovers(player: &Player) -> Vec<Row> {
    let mut rows = Vec::new();
    let hole = if is_small() { 16 } else { 256 };
    let steps = vec![run(&format!("mkdir /out; attack sparse /out/hole {hole}; echo fine > /out/the-end"))];
    let outcome = player.build(steps, Limits::default()).await;
    rows.push(player.judge("/out", "a sparse file", &outcome, outcome.payload_size < hole * MIB / 4));
    // Removed together with the build's directory, in `build`.
    let levels = if is_small() { 20_000 } else { 200_000 };
    let outcome = player.build(vec![run(&format!("attack deep {levels}"))], Limits::default()).await;
    rows.push(player.judge("what is left", "a deep tree", &outcome, true));
    let outcome = player.build(vec![run("mkdir /out; echo fine > /out/the-end")], Limits::default()).await;
    rows.push(player.judge("the next build", "a deep tree", &outcome, outcome.is_done));
    rows
}
