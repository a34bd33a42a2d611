//! The command line: exit codes that CI can trust, `lint`, `version`, `farrier.yaml`, and help.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};

use crate::support::{
    kernels,
    site::{Run, Site},
};

/// Runs `farrier` in a directory, without the variables that stand for options.
fn bare(site: &Site, directory: &Path, args: &[&str]) -> Run {
    let mut command = site.command(args);
    for name in ["FARRIER_DEFINITIONS", "FARRIER_REGISTRY", "FARRIER_CLUSTER", "FARRIER_ENGINE"] {
        command.env_remove(name);
    }
    site.finish(command.current_dir(directory).spawn().unwrap())
}

#[test]
fn an_empty_matrix_gives_its_reasons_on_standard_error() {
    let site = Site::new();
    site.stand_in_kernels();
    site.canary("6.1.0-901-amd64");
    let full = site.farrier(&["plan", "--matrix", "lines"]).exits(0);
    assert_eq!(full.stdout, "hello 6.1.0-901-amd64 debian 12 amd64\n");
    assert!(!full.stderr.contains("WHY"), "{full}");
    site.edit("images/hello.yaml", "test.farrier.dev/hello", "test.farrier.dev/helo");
    let empty = site.farrier(&["plan", "--matrix", "github"]).exits(0);
    assert_eq!(empty.stdout, "{\"include\":[]}\n");
    assert!(
        empty
            .stderr
            .contains("no node has label test.farrier.dev/helo; nearest: test.farrier.dev/hello on 1 node"),
        "{empty}"
    );
}

#[test]
fn a_mistyped_kernel_is_answered_with_the_nearest_one() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    let (start, flavor) = kernel.rsplit_once('-').unwrap();
    let mistyped = format!("{start}1-{flavor}");
    let run = site.build("hello", &mistyped, &[]).exits(1);
    let (_, near) = run.line("did you mean").split_once("did you mean ").unwrap();
    assert!(near.starts_with("6.1.0-") && near.contains("-amd64? "), "{run}");
}

#[test]
fn absent_kernels_end_with_1_and_malformed_ones_with_2() {
    let site = Site::new();
    site.stand_in_kernels();
    site.canary("6.1.0-901-amd64");
    let build = |kernel| site.build("hello", kernel, &[]);
    let commands: [&dyn Fn(&'static str) -> Run; 3] =
        [&build, &|kernel| site.farrier(&["logs", "hello", kernel]), &|kernel| {
            site.farrier(&["retry", "hello", kernel])
        }];
    for run in commands {
        run("6.1.0-999-amd64").exits(1);
        run("../../etc").exits(2);
    }
}

#[test]
fn lint_validates_definitions_without_a_network() {
    let mut site = Site::new();
    site.registry.stop();
    let directory = site.path("");
    bare(&site, &directory, &["lint"]).exits(0).line("definitions: no mistakes");
    site.edit("images/hello.yaml", "  template: kbuild", "  tempalte: kbuild");
    let run = bare(&site, &directory, &["lint"]).exits(1);
    run.line(r#"images/hello.yaml:6:3: unknown field "tempalte"; did you mean "template"?"#);
    let report = bare(&site, &directory, &["lint", "definitions", "-o", "json"]).exits(1).json();
    let first = &report["mistakes"][0];
    assert_eq!((&first["file"], &first["line"]), (&json!("images/hello.yaml"), &json!(6)));
    bare(&site, &directory, &["lint", "nowhere"]).exits(2).line("definitions nowhere");
}

/// Runs the shipped hook as pre-commit does: its words, in the root of the repository.
#[test]
fn the_shipped_hook_runs_lint() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let hooks: Value =
        serde_saphyr::from_str(&fs::read_to_string(root.join(".pre-commit-hooks.yaml")).unwrap()).unwrap();
    let [hook] = hooks.as_array().unwrap().as_slice() else { panic!("{hooks}") };
    let words: Vec<&str> = hook["entry"].as_str().unwrap().split(' ').collect();
    assert_eq!(
        (words[0], &hook["pass_filenames"], &hook["language"]),
        ("farrier", &json!(false), &json!("system"))
    );
    let site = Site::new();
    bare(&site, &site.path(""), &words[1..]).exits(0);
    site.edit("images/hello.yaml", "  template: kbuild", "  tempalte: kbuild");
    bare(&site, &site.path(""), &words[1..]).exits(1);
}

/// Writes `farrier.yaml` above a directory two levels below it.
fn configured(site: &Site, text: &str) -> PathBuf {
    let below = site.path("below/it");
    fs::create_dir_all(&below).unwrap();
    fs::write(site.path("farrier.yaml"), text).unwrap();
    below
}

#[test]
fn mistakes_in_farrier_yaml_are_told_with_their_place() {
    let site = Site::new();
    let wrong = |text: &str, words: &str| {
        let below = configured(&site, text);
        let run = bare(&site, &below, &["version"]).exits(2);
        run.line(words);
        run.line("--no-config ignores the file");
        bare(&site, &below, &["version", "--no-config"]).exits(0);
    };
    let unknown = r#"farrier.yaml:2:1: unknown field "registery"; did you mean "registry"?"#;
    wrong("cluster: kube\nregistery: oci:layout\n", unknown);
    wrong("engine: dokcer\n", "farrier.yaml: engine: unknown engine");
    wrong("offline: maybe\n", "farrier.yaml:1:10: ");
    wrong("a: [\n", "farrier.yaml:");
    // A Kubernetes object of this name, such as krew's manifest, is no configuration.
    let below =
        configured(&site, "apiVersion: krew.googlecontainertools.github.com/v1alpha2\nkind: Plugin\n");
    bare(&site, &below, &["version"]).exits(0);
}

#[test]
fn version_is_for_programs_too() {
    let site = Site::new();
    let version = site.farrier(&["version", "-o", "json"]).exits(0).json();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(version["formats"]["definitions"], "farrier.dev/v1alpha1");
    assert!(version["features"].as_array().unwrap().contains(&json!("bundle")), "{version}");
    let line = format!("farrier {}", env!("CARGO_PKG_VERSION"));
    assert!(site.farrier(&["version"]).exits(0).stdout.starts_with(&line));
}

#[test]
fn help_shows_a_commands_own_options_first() {
    let site = Site::new();
    for command in ["plan", "run", "build", "check", "init", "bundle"] {
        let help = site.farrier(&[command, "--help"]).exits(0).stdout;
        let own = help.find("\nOptions:\n").unwrap_or(0);
        let global = help.find("\nGlobal options:\n").unwrap();
        assert!(own < global && !help.contains("--cache-dir"), "{help}");
        let examples = help.lines().filter(|line| line.starts_with(&format!("  farrier {command} ")));
        assert!((2..=3).contains(&examples.count()), "{help}");
        let all = site.farrier(&[command, "--help-all"]).exits(0).stdout;
        assert!(all.contains("--cache-dir") && all.contains("--no-config"), "{all}");
    }
}

#[test]
fn an_interrupted_build_says_only_that() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    let template = fs::read_to_string("templates/kbuild.Dockerfile.hbs").unwrap();
    let slow =
        template.replace("find /build -mindepth 1 -delete\n", "find /build -mindepth 1 -delete; sleep 600\n");
    site.define("templates/kbuild.Dockerfile.hbs", &slow);
    let mut child = site.start(&[
        "build",
        "hello",
        "--kernel",
        &kernel,
        "--os",
        "debian",
        "--os-version",
        "12",
        "--arch",
        "amd64",
    ]);
    let mut said = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("compiling") {
        assert!(std::io::BufRead::read_line(&mut said, &mut text).unwrap() > 0, "{text}");
    }
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    std::io::Read::read_to_string(&mut said, &mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(text.contains(": interrupted") && !text.contains("failed"), "{text}");
}
