//! Shell completion in real shells: the tests press keys and read the resulting command line.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::symlink,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::support::{
    kube_api::{ApiFailure, Requests, objects::node},
    live::Live,
    site::Site,
};

const KERNEL: &str = "6.1.0-901-amd64";
/// Keys in Emacs mode, for bash and zsh: go to the start of the line and print each of its words in brackets.
const SHOW: &str = "\u{1}printf '<%s>\\n' \u{5}\n";
/// Makes bash insert all possible completions of the word.
const ALL: &str = "\u{1b}*";

/// Returns a command that runs a shell with `farrier` in its PATH.
fn shell(site: &Site, command: &str) -> Command {
    let programs = site.path("bin");
    if !programs.exists() {
        fs::create_dir(&programs).unwrap();
        symlink(env!("CARGO_BIN_EXE_farrier"), programs.join("farrier")).unwrap();
    }
    let mut shell = Command::new("script");
    shell.args(["--quiet", "--return", "--command", command, "/dev/null"]).current_dir(site.path(""));
    for (name, value) in site.command(&[] as &[&str]).get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let path = std::env::var("PATH").unwrap();
    shell.env("PATH", format!("{}:{path}", programs.display())).env("TERM", "xterm").env_remove("INPUTRC");
    shell.env_remove("FARRIER_REGISTRY");
    shell
}

/// Returns the words on the command line after the keys.
fn typed(mut shell: Command, keys: &str) -> Vec<String> {
    let mut child = shell
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("run script (Debian package bsdutils)");
    let keys = format!("{keys}{SHOW}exit\n");
    child.stdin.take().unwrap().write_all(keys.as_bytes()).unwrap();
    let output = String::from_utf8_lossy(&child.wait_with_output().unwrap().stdout).into_owned();
    let words = output.lines().filter_map(|line| line.trim().strip_prefix('<')?.strip_suffix('>'));
    let words: Vec<String> = words.map(str::to_owned).filter(|word| word != "%s").collect();
    assert!(!words.is_empty(), "{output}");
    words
}

/// Returns an interactive bash that has sourced the completion script, like `~/.bashrc`.
fn bash_of(site: &Site) -> Command {
    let start = site.path("bashrc");
    fs::write(&start, "source <(farrier completions bash)\nbind 'set enable-bracketed-paste off'\n").unwrap();
    shell(site, &format!("bash --noprofile --rcfile {} -i", start.display()))
}

fn bash(site: &Site, keys: &str) -> Vec<String> {
    typed(bash_of(site), keys)
}

/// Creates a site with two nodes, one of which has hostile label values.
fn site() -> Site {
    let site = Site::with_stand_in();
    site.define(
        "announced/next.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: AnnouncedKernels\nmetadata: {name: next}\nspec:\n  kernels:\n  - {os: debian, \
         osVersion: '12', release: 6.1.0-902-amd64, arch: amd64}\n",
    );
    let hostile = fs::read_to_string(site.cluster().join("edge-2.yaml")).unwrap();
    let hostile =
        hostile.replace("name: edge-2", "name: 'edge-$(touch hit)'").replace(KERNEL, "6.1;touch hit");
    fs::write(site.cluster().join("hostile.yaml"), hostile).unwrap();
    site
}

#[test]
fn bash_completes_images_kernels_and_nodes() {
    let site = site();
    assert_eq!(bash(&site, "farrier why hel\t"), ["farrier", "why", "hello"]);
    assert_eq!(bash(&site, "farrier why node/\t"), ["farrier", "why", "node/edge-2"]);
    assert_eq!(
        bash(&site, &format!("farrier why hello 6{ALL}")),
        ["farrier", "why", "hello", KERNEL, "6.1.0-902-amd64"],
        "the node's kernel and the announced one"
    );
    let mut images = bash(&site, &format!("farrier build {ALL}"));
    images.retain(|word| !word.starts_with('-'));
    assert_eq!(images, ["farrier", "build", "broken", "hello"]);
    // Bash splits these words at `=`.
    assert_eq!(bash(&site, "farrier build hello --kernel=6.1.0-901\t")[3], format!("--kernel={KERNEL}"));
    let elsewhere = Site::new();
    elsewhere.manifest("edge-2.yaml", "6.1.0-905-amd64");
    let options = format!(
        "--cluster dir:{} --definitions {}",
        elsewhere.cluster().display(),
        site.definitions().display()
    );
    assert_eq!(
        bash(&site, &format!("farrier why {options} hello 6.1.0-905\t"))[6..],
        ["hello", "6.1.0-905-amd64"]
    );
    assert_eq!(bash(&site, "farrier --col\t")[1], "--color");
    assert_eq!(bash(&site, "farrier preflight --node edg\t")[3], "edge-2");
    assert!(!site.path("hit").exists());
}

/// Completion prints no errors, because they would disturb the user's typing.
#[test]
fn what_cannot_be_read_is_left_out_without_a_word() {
    let site = site();
    site.define("images/hello.yaml", "kind: Nonsense");
    fs::write(site.cluster().join("edge-2.yaml"), "{").unwrap();
    assert_eq!(bash(&site, "farrier why hel\t"), ["farrier", "why", "hel"]);
    assert_eq!(bash(&site, "farrier stat\t"), ["farrier", "status"]);
}

#[test]
fn a_live_cluster_that_hangs_is_not_waited_for() {
    let live = Live::new([node("n0", KERNEL)], "image");
    let bash = |keys: &str| {
        let mut shell = bash_of(&live.site);
        for (name, value) in live.command(&[]).get_envs().filter_map(|(name, value)| Some((name, value?))) {
            if name == "KUBECONFIG" || name == "FARRIER_CLUSTER" {
                shell.env(name, value);
            }
        }
        typed(shell, keys)
    };
    assert_eq!(bash("farrier why node/\t"), ["farrier", "why", "node/n0"]);
    assert_eq!(bash("farrier why driver 6\t"), ["farrier", "why", "driver", KERNEL]);
    let lists = live.api.requests().into_iter().filter(|record| record.resource == "nodes");
    assert!(lists.clone().all(|record| record.verb == "list" && record.query.contains("includeObject=None")));
    assert!(lists.count() >= 2);
    live.api.fail_always(Requests::any(), ApiFailure::Hang);
    let began = Instant::now();
    assert_eq!(bash("farrier why node/\t"), ["farrier", "why", "node/"]);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn zsh_completes_them_too() {
    let site = site();
    let start = site.path("zsh");
    fs::create_dir(&start).unwrap();
    let lines = "bindkey -e\nautoload -U compinit\ncompinit -u -D\nsource <(farrier completions zsh)\n";
    fs::write(start.join(".zshrc"), lines).unwrap();
    let zsh = |keys: &str| {
        let mut shell = shell(&site, "zsh -d -i");
        shell.env("ZDOTDIR", &start);
        typed(shell, keys)
    };
    assert_eq!(zsh("farrier why hel\t"), ["farrier", "why", "hello"]);
    assert_eq!(zsh("farrier why node/\t"), ["farrier", "why", "node/edge-2"]);
    assert_eq!(zsh("farrier build hello --kernel 6.1.0-902\t")[4], "6.1.0-902-amd64");

    // Packages install a file in `fpath`, which zsh reads at the first completion.
    let lines = "bindkey -e\nfarrier completions zsh > $ZDOTDIR/_farrier\nfpath=($ZDOTDIR $fpath)\n\
                 autoload -U compinit\ncompinit -u -D\n";
    fs::write(start.join(".zshrc"), lines).unwrap();
    assert_eq!(zsh("farrier why hel\t"), ["farrier", "why", "hello"]);
}

#[test]
fn fish_completes_them_too() {
    let site = site();
    let fish = |line: &str| {
        let asked = format!("farrier completions fish | source; complete --do-complete '{line}'");
        let mut shell = shell(&site, "exec fish --no-config --command \"$ASKED\"");
        let output = shell.env("ASKED", asked).stdin(Stdio::null()).output().unwrap();
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        output.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(fish("farrier why hel"), ["hello"]);
    assert_eq!(fish("farrier why node/"), ["node/edge-2"]);
    assert_eq!(fish("farrier why hello 6"), [KERNEL, "6.1.0-902-amd64"]);
}
