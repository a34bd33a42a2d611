//! Attack suite of the sandbox: a hostile build step must not reach anything outside of its build. `attack.c` tries every
//! way out, from every position of a build, as root and as an ordinary user. It runs with both barriers in force, and with
//! either of them disabled. Canary files are placed at every location that an escape could reach.
//!
//! The isolation is the namespaces with the pivoted root. The restrictions are Landlock with the seccomp filter.
//!
//! Each test starts this program again as the user under test, with a careless caller's leaks (`player`). That process runs
//! the builds and prints one row for each attack.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)]

mod attacks;
mod daemon;
mod domain;
mod forgery;
mod host;
mod kit;
mod machine;
mod player;
mod support;
mod table;

use host::User;
use player::Barriers;
use table::{Table, Verdict};

/// Attacks that must have run in every position: one of each kind.
const TRIED: [&str; 17] = [
    "open the secret",
    "an inherited descriptor",
    "out by links of /proc/PID",
    "files of process 1",
    "double chroot",
    "ptrace",
    "sockets",
    "abstract socket",
    "vsock",
    "io_uring",
    "userfaultfd",
    "the caller's session keyring",
    "the caller's supplementary groups",
    "a setuid file of this step",
    "core pattern",
    "core dump to a program",
    "scheduling of process 1",
];

/// Plays the attacks, prints the table, and checks that nothing escaped.
fn holds(user: User, barriers: Barriers) {
    let table = Table::new(host::play(user, barriers));
    println!("{}, {}:\n{table}", user.name(), barriers.name());
    check(&table, barriers);
}

fn check(table: &Table, barriers: Barriers) {
    assert_eq!(table.escapes(), [""; 0]);
    for place in attacks::PLACES {
        for attack in TRIED {
            assert!(table.has(attack, place), "{attack} was not tried: {place}");
        }
        assert!(table.count(place) > 100, "{place}: {}", table.count(place));
    }
    let allowed = table.with(Verdict::Allowed);
    assert!(barriers == Barriers::IsolationOnly || allowed.is_empty(), "{allowed:?}");
}

#[test]
fn a_hostile_step_gets_at_nothing() {
    holds(User::Root, Barriers::Both);
}

#[test]
fn a_hostile_step_of_an_ordinary_user_gets_at_nothing() {
    holds(User::Ordinary, Barriers::Both);
}

#[test]
fn isolation_holds_alone() {
    holds(User::Root, Barriers::IsolationOnly);
}

#[test]
fn isolation_of_an_ordinary_user_holds_alone() {
    holds(User::Ordinary, Barriers::IsolationOnly);
}

#[test]
fn restrictions_hold_alone() {
    holds(User::Root, Barriers::LeakOfCanaries);
    holds(User::Root, Barriers::LeakOfRoot);
}

#[test]
fn restrictions_of_an_ordinary_user_hold_alone() {
    holds(User::Ordinary, Barriers::LeakOfCanaries);
    holds(User::Ordinary, Barriers::LeakOfRoot);
}

/// Proves that the attacks work: without any barrier they escape.
#[test]
fn attacks_get_out_where_no_barrier_stands() {
    let table = Table::new(host::play(User::Root, Barriers::Nothing));
    let escapes = table.escapes();
    for attack in [
        "read",
        "map",
        "walk",
        "read names",
        "write",
        "truncate by path",
        "create",
        "unlink",
        "rename",
        "mkdir",
        "start a program",
    ] {
        let attack = format!("leak: {attack} (first RUN)");
        assert!(escapes.contains(&attack), "{attack}: {escapes:#?}");
    }
    // The harness detects the changed canaries.
    assert!(escapes.contains(&"its result (the build)".to_owned()), "{escapes:#?}");
}

/// Not a test: the other tests start it as a separate process.
#[test]
#[ignore = "the other tests start it"]
fn player() {
    let (barriers, kit) = player::wanted();
    let secret = std::fs::read_to_string(kit.secret()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let player = player::Player::new(&kit, &secret, barriers).await;
        attacks::all(&player).await;
    });
    println!("{}", host::PLAYED);
}
