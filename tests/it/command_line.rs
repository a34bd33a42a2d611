//! The command line: `lint`, `version`, forms of results, and what a newcomer reads first.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::Command,
};

use serde_json::{Value, json};

use crate::support::{
    kernels,
    site::{Run, Site},
};

mod config_file;
mod conflict;
mod exit_codes;
mod help;
mod kernel_argument;

/// Runs `farrier` in a directory, without the environment variables of options.
fn bare(site: &Site, directory: &Path, args: &[&str]) -> Run {
    let mut command = site.command(args);
    for name in ["FARRIER_DEFINITIONS", "FARRIER_REGISTRY", "FARRIER_CLUSTER", "FARRIER_ENGINE"] {
        command.env_remove(name);
    }
    site.finish(command.current_dir(directory).spawn().unwrap())
}

#[test]
fn results_come_as_yaml_and_as_names() {
    let site = Site::with_stand_in();
    let json = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    let yaml = site.farrier(&["plan", "-o", "yaml"]).exits(0).stdout;
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), json);
    let names = |args: &[&str]| site.farrier(&[args, &["-o", "name"]].concat()).exits(0).stdout;
    let tag = format!("{}/hello:1.0-6.1.0-901-amd64-debian12-amd64\n", site.location);
    assert_eq!(names(&["status"]), tag);
    assert_eq!(names(&["plan"]), tag);
}

/// Without `--definitions`, plans are about the images that farrier ships, and `farrier` says so.
#[test]
fn built_in_definitions_are_mentioned() {
    let site = Site::new();
    site.canary("6.1.0-901-amd64");
    let note = "no --definitions: using the built-in images only; FARRIER_DEFINITIONS";
    let place = ["--cluster", "dir:cluster", "--registry", "oci:layout"];
    let run = |args: &[&str]| bare(&site, &site.path(""), &[args, &place].concat());
    run(&["plan"]).exits(0).line(note);
    run(&["doctor"]).line("all built-in, without --definitions");
    let render = ["render", "hello", "--kernel", "6.1.0-901-amd64"];
    let unknown = bare(&site, &site.path(""), &render).exits(2);
    unknown.line("error: no driver image is named hello; known: gdrdrv, ");
    unknown.line(
        "hint: only the built-in images are known: name your definitions directory with --definitions, ",
    );
    let own = run(&["plan", "--definitions", "definitions"]).exits(0);
    assert!(!own.stderr.contains(note), "{own}");
}

#[test]
fn the_log_level_is_an_option() {
    let site = Site::with_stand_in();
    let said = |args: &[&str]| site.farrier(&[&["plan"], args].concat()).exits(0).stderr;
    assert!(said(&["--log-level", "trace"]).contains("DEBUG"), "{}", said(&["--log-level", "trace"]));
    assert_eq!(said(&["--log-level", "error"]), "");
    site.farrier(&["plan", "--log-level", "loud"])
        .exits(2)
        .line("possible values: error, warn, info, debug, trace");
}

#[test]
fn lint_validates_definitions_without_a_network() {
    let mut site = Site::new();
    site.registry.stop();
    let directory = site.path("");
    let run = bare(&site, &directory, &["lint"]).exits(0);
    run.line("definitions: no mistakes");
    run.line("warning: image hello: without `runtime` the image has neither an entrypoint nor programs");
    let runtime = "  runtime: {base: {minimal: {suites: [bookworm]}}, entrypoint: [sleep, infinity]}\n  template: kbuild";
    site.edit("images/hello.yaml", "  template: kbuild", runtime);
    let warnings = bare(&site, &directory, &["lint", "-o", "json"]).exits(0).json()["warnings"].to_string();
    assert!(warnings.contains("image broken") && !warnings.contains("image hello"), "{warnings}");
    site.define("images/empty.yaml", "# nothing\n");
    bare(&site, &directory, &["lint"]).exits(0).line("warning: images/empty.yaml: has no definition");
    site.edit("images/hello.yaml", "  template: kbuild", "  tempalte: kbuild");
    let run = bare(&site, &directory, &["lint"]).exits(1);
    run.line(r#"images/hello.yaml:7:3: unknown field "tempalte"; did you mean "template"?"#);
    let report = bare(&site, &directory, &["lint", "definitions", "-o", "json"]).exits(1).json();
    let first = &report["mistakes"][0];
    assert_eq!((&first["file"], &first["line"]), (&json!("images/hello.yaml"), &json!(7)));
    bare(&site, &directory, &["lint", "nowhere"]).exits(2).line("definitions nowhere");
    let run = bare(&site, &directory, &["lint", "definitions/images/hello.yaml"]).exits(2);
    run.line("hint: name the directory that has images/ and site.yaml");
    bare(&site, &directory, &["lint", "cluster"])
        .exits(2)
        .line("cluster: has no definitions: it contains none of images");
}

#[test]
fn commands_name_what_a_newcomer_forgot() {
    let site = Site::new();
    let directory = site.path("");
    bare(&site, &directory, &["plan"]).exits(2).line("set FARRIER_CLUSTER and FARRIER_REGISTRY");
    let empty = directory.join("empty");
    fs::create_dir(&empty).unwrap();
    let cluster = format!("dir:{}", empty.display());
    site.farrier(&["plan", "--cluster", &cluster]).exits(0).line("empty: no node, so no image is needed");
    let doctor = site.farrier(&["doctor", "--cluster", &cluster]).exits(1);
    let nodes = doctor.line("there is no node, so no image is needed");
    assert!(nodes.starts_with("nodes") && nodes.contains(" wrong "), "{doctor}");
    doctor.line("kubectl get nodes,daemonsets -A -o yaml");
    assert!(!doctor.stdout.contains("of all needed images were found"), "{doctor}");
    site.farrier(&["logs", "helo"]).exits(2).line("hello");
}

#[test]
fn a_cache_that_cannot_be_written_is_reported_with_the_option_that_names_another() {
    let site = Site::new();
    fs::write(site.path("file"), "").unwrap();
    let below_file = site.path("file/cache").display().to_string();
    let hint = "name a directory that you may write to, with --cache-dir or FARRIER_CACHE_DIR";
    let plan = site.farrier(&["plan", "--cache-dir", &below_file]).exits(1);
    plan.line("error: cannot use the cache: failed to create directory");
    plan.line(&format!("hint: {hint}"));
    // Not even root can write to the second one.
    for cache in [below_file.as_str(), "/sys"] {
        let doctor = site.farrier(&["doctor", "--cache-dir", cache]);
        let found = doctor.line("cannot use the cache: ");
        assert!(found.starts_with("cache ") && found.contains(" wrong "), "{doctor}");
        doctor.line(&format!("-> {hint}"));
    }
    let run = site.farrier(&["doctor", "--registry", "nonsense"]).exits(2);
    run.line("error: --registry: \"nonsense\" is not a registry: ");
}

#[test]
fn a_missing_credential_plugin_is_named() {
    let site = Site::new();
    let kubeconfig = site.path("kubeconfig");
    let text = "apiVersion: v1\nkind: Config\n\
                clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\n\
                users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: no-such-login, \
                interactiveMode: Never, installHint: install it}}}]\n\
                contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n";
    let plan = |text: &str| {
        fs::write(&kubeconfig, text).unwrap();
        site.farrier(&["plan", "--cluster", "kube", "--kubeconfig", kubeconfig.to_str().unwrap()]).exits(2)
    };
    plan(text).line(
        "credential plugin no-such-login of the kubeconfig (install it): unable to run auth exec: No such file",
    );
    // Another fault is not the plugin's.
    let run = plan(&text.replace("127.0.0.1:1'", "127.0.0.1:1', proxy-url: 'http://127.0.0.1:2'"));
    run.line("requires the disabled feature");
    assert!(!run.stderr.contains("credential plugin"), "{run}");
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
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("compiling") {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
    }
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    said.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(text.contains(": interrupted") && !text.contains("failed"), "{text}");
}
