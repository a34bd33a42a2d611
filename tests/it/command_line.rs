//! The command line: exit codes that CI can trust, `lint`, `version`, `farrier.yaml`, and help.

use std::{
    collections::BTreeSet,
    fs,
    net::TcpListener,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};

use crate::support::{
    as_root,
    fake_http::{FakeHttp, answer},
    kernels,
    site::{Run, Site},
};

/// Runs `farrier` in a directory, without the environment variables of options.
fn bare(site: &Site, directory: &Path, args: &[&str]) -> Run {
    let mut command = site.command(args);
    for name in ["FARRIER_DEFINITIONS", "FARRIER_REGISTRY", "FARRIER_CLUSTER", "FARRIER_ENGINE"] {
        command.env_remove(name);
    }
    site.finish(command.current_dir(directory).spawn().unwrap())
}

/// Starts a registry that gives one answer to every request.
fn server(status: u16) -> (tokio::runtime::Runtime, FakeHttp) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(FakeHttp::start(vec![answer(status, "no"); 200]));
    (runtime, server)
}

#[test]
fn a_plan_that_could_not_ask_the_registry_ends_with_3() {
    let mut site = Site::with_stand_in();
    for status in [401, 403, 500, 503] {
        let (_runtime, server) = server(status);
        site.location = format!("{}/drivers", server.host);
        for args in [&["plan"][..], &["plan", "--exit-code"], &["plan", "--matrix", "lines"]] {
            let run = site.farrier(args).exits(3);
            let reason = if status < 500 { "refused to" } else { &status.to_string() };
            assert!(run.line(&server.host).contains(reason), "{args:?}: {run}");
        }
        let matrix = site.farrier(&["plan", "--matrix", "github"]).exits(3);
        assert_eq!(matrix.stdout, "", "no jobs are made from an incomplete plan");
    }
    site.registry.stop();
    site.location = format!("{}/drivers", site.registry.host);
    site.farrier(&["plan", "--matrix", "github"]).exits(3).line("connection refused");
}

/// A registry that accepts connections and never answers.
#[test]
fn a_command_ends_when_its_time_is_up() {
    let mut site = Site::with_stand_in();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    site.location = format!("{}/drivers", silent.local_addr().unwrap());
    for args in [&["plan"][..], &["run", "--once"]] {
        let run = site.farrier(&[args, &["--timeout", "1"]].concat()).exits(3);
        run.line("error: not done after 1 s (--timeout)");
    }
}

#[test]
fn exit_code_1_says_that_a_plan_needs_attention() {
    let site = Site::with_stand_in();
    // A build to do is no reason.
    site.farrier(&["plan", "--exit-code"]).exits(0).line("1 to build");
    // A kernel without headers is.
    site.manifest("edge-1.yaml", "6.1.0-999-amd64");
    site.farrier(&["plan"]).exits(0);
    let run = site.farrier(&["plan", "--exit-code", "-o", "json"]).exits(1).json();
    assert!(!run["skipped"].as_array().unwrap().is_empty(), "{run}");
    fs::remove_file(site.cluster().join("edge-1.yaml")).unwrap();
    // So is a node whose kernel is unknown.
    let node = site.cluster().join("edge-2.yaml");
    let text = fs::read_to_string(&node).unwrap();
    fs::write(&node, text.replace("6.1.0-901-amd64", "unknown")).unwrap();
    site.farrier(&["plan", "--exit-code"]).exits(1).line("SKIPPED NODES");
}

#[test]
fn an_empty_matrix_gives_its_reasons_on_standard_error() {
    let site = Site::with_stand_in();
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

/// Returns the changes that a conflict names.
fn changes(site: &Site) -> String {
    let report = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    let changed = report["conflicts"][0]["changed"].as_array().unwrap_or_else(|| panic!("{report}")).iter();
    changed.map(|text| text.as_str().unwrap()).collect::<Vec<_>>().join("; ")
}

/// The first thing that a developer does: edit something, and run again.
#[test]
fn a_conflict_names_what_changed() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    let template =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("templates/kbuild.Dockerfile.hbs"));
    let template = template.unwrap();
    site.define("templates/own.Dockerfile.hbs", &template);
    site.edit("images/hello.yaml", "template: kbuild", "template: own");
    let family =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/10-debian-12.yaml")).unwrap();
    site.define("kernels/10-debian-12.yaml", &family);
    site.run_once().exits(0);

    // Each kind of input is named, and nothing else.
    let definition = fs::read_to_string(site.definitions().join("images/hello.yaml")).unwrap();
    let empty = "--- a/Makefile\n+++ b/Makefile\n";
    site.define("patches/fix.patch", empty);
    for (from, to, named) in [
        ("makeArgs: \"\"", "makeArgs: V=1", "vars.makeArgs changed (empty -> V=1)"),
        (
            "  modules:",
            "  patches: [{path: patches/fix.patch}]\n  modules:",
            "patch 001-fix.patch changed (none -> sha256:",
        ),
        (
            "  modules:",
            "  exposes: [/usr/src/hello]\n  modules:",
            "exposes changed (none -> [\"/usr/src/hello\"])",
        ),
        ("  modules:", "  buildPackages: [file]\n  modules:", "toolchain changed ("),
        (
            "  modules:",
            "  runtime: {base: {minimal: {suites: [bookworm]}}}\n  modules:",
            "base changed (none -> ",
        ),
        ("  modules:", "  runtime: {env: {A: b}}\n  modules:", "env changed ({} -> {\"A\":\"b\"})"),
        ("modules: [farrier_hello]", "modules: []", "modules changed ([\"farrier_hello\"] -> [])"),
    ] {
        site.edit("images/hello.yaml", from, to);
        let found = changes(&site);
        assert!(found.starts_with(named) && !found.contains("; "), "{named}: {found}");
        site.define("images/hello.yaml", &definition);
    }
    site.define("templates/own.Dockerfile.hbs", &template.replace("FROM scratch", "# edited\nFROM scratch"));
    assert!(changes(&site).starts_with("template own changed (sha256:"), "{}", changes(&site));
    site.define("templates/own.Dockerfile.hbs", &template);
    site.define(
        "kernels/10-debian-12.yaml",
        &family.replace("[\"linux-headers-{{release}}\"]", "[\"linux-headers-{{release}}\", file]"),
    );
    assert!(changes(&site).starts_with("headers changed ("), "{}", changes(&site));
    site.define("kernels/10-debian-12.yaml", &family);
    site.farrier(&["plan", "--exit-code"]).exits(0).line("1 up to date");

    let source = site.definitions().join("sources/hello/farrier_hello.c");
    let text = fs::read_to_string(&source).unwrap();
    fs::write(&source, text + "/* edited */\n").unwrap();
    let changed = "built from other inputs: source hello changed (tree sha256:";
    let plan = site.farrier(&["plan", "--exit-code"]).exits(1);
    assert!(plan.line("conflict  ").contains(changed), "{plan}");
    for words in
        ["raise `version`", "git describe", "`onConflict: overwrite`", "`farrier build hello --kernel "]
    {
        assert!(plan.line("conflict  ").contains(words), "{words}: {plan}");
    }
    site.build("hello", &kernel, &["--push"]).exits(1).line(changed);
    // `make` in the source leaves products of the build.
    fs::write(source.with_file_name("farrier_hello.o"), "").unwrap();
    let products =
        "source hello contains products of a build, such as farrier_hello.o: run `make clean` there";
    assert!(site.farrier(&["plan"]).exits(0).line("conflict  ").contains(products));
    site.build("hello", &kernel, &["--push"]).exits(1).line(products);
    fs::remove_file(source.with_file_name("farrier_hello.o")).unwrap();
    assert!(!site.farrier(&["plan"]).exits(0).to_string().contains("make clean"));
    let report = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    assert!(report["conflicts"][0]["changed"][0].as_str().unwrap().starts_with("source hello changed"));
    // What the message offers works.
    site.build("hello", &kernel, &[]).exits(0);
    site.edit("images/hello.yaml", "  version:", "  onConflict: overwrite\n  version:");
    site.run_once().exits(0).line("rewrote");
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
    // Without a flavor, in a build and in a plan.
    let near = format!("did you mean {kernel}?");
    site.build("hello", start, &[]).line(&near);
    site.canary(start);
    site.farrier(&["plan"]).exits(0).line(&near);
}

/// A newcomer names no kernel where the cluster has only one, and looks for warnings in `plan` and `doctor`.
#[test]
fn the_only_kernel_is_built_and_warnings_are_where_a_newcomer_looks() {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    let only = format!("kernel {kernel} (debian 12, amd64): the only one that manifests in ");
    site.farrier(&["build", "hello"]).exits(0).line(&only);
    let secure_boot = "under Secure Boot, and then refuse the modules of hello";
    assert!(!site.farrier(&["plan"]).exits(0).to_string().contains(secure_boot), "nothing is published");
    let names = site.farrier(&["run", "--once", "-o", "name"]).exits(0).stdout;
    let lines: Vec<&str> = names.lines().collect();
    let unique: BTreeSet<&str> = lines.iter().copied().collect();
    assert_eq!(lines.len(), unique.len(), "{names}");
    let plan = site.farrier(&["plan"]).exits(0);
    assert_eq!(plan.to_string().matches(secure_boot).count(), 1, "{plan}");
    let doctor = site.farrier(&["doctor"]).exits(0);
    assert!(doctor.line(secure_boot).starts_with("secure boot "), "{doctor}");
    assert!(doctor.line(secure_boot).contains(" warning "), "{doctor}");
    doctor.line("-> sign the modules with a key of those nodes: `moduleSigning` in site.yaml");

    site.manifest("edge-1.yaml", &kernels::newest().older);
    let run = site.farrier(&["build", "hello"]).exits(2);
    run.line("error: image hello is planned for several kernels: ");
    run.line("hint: put the kernel's release after the image's name");
    site.farrier(&["build", "hello", "--os", "other"]).exits(1).line("image hello is planned for no kernel");
    let mut command = site.command(&["build", "hello"]);
    let run = site.finish(command.env_remove("FARRIER_CLUSTER").spawn().unwrap()).exits(2);
    run.line("pass --cluster CLUSTER, whose nodes say which it is");
}

#[test]
fn absent_kernels_end_with_1_and_malformed_ones_with_2() {
    let site = Site::with_stand_in();
    let build = |kernel| site.build("hello", kernel, &[]);
    for kernel in ["6.1.0-999-amd64", "../../etc"] {
        let code = if kernel.contains('/') { 2 } else { 1 };
        build(kernel).exits(code);
        for command in [
            &["logs", "hello", "--kernel"][..],
            &["retry", "hello", "--kernel"],
            // Without the option, as before.
            &["retry", "hello"],
            &["headers", "fetch", "--kernel"],
            &["prebuild", "--image", "hello", "--kernel"],
            &["preflight", "--kernel"],
            &["radar", "--kernel", "6.1.0-901-amd64", "--next"],
            &["bundle", "export", "--to", "x.tar", "--kernel"],
        ] {
            site.farrier(&[command, &[kernel]].concat()).exits(code);
        }
    }
    for command in ["render", "why"] {
        site.farrier(&[command, "hello", "--kernel", "../../etc"]).exits(2).line("error: --kernel: ");
    }
    site.farrier(&["logs", "hello"]).exits(1).line("has no log of a build of hello");
    site.farrier(&["retry", "hello"]).exits(1).line("builds of hello failed for no kernel");
    for kernel in ["6.1.0-901-amd64", "6.1.0-902-amd64"] {
        // A name of another image that begins like this one's is not taken for a kernel.
        for image in ["hello", "hello-2"] {
            let log = format!("logs/{image}-{kernel}-0123456789ab-debian-12-amd64.log");
            let log = site.cache().join(log);
            std::fs::create_dir_all(log.parent().unwrap()).unwrap();
            std::fs::write(log, format!("{image} {kernel}\n")).unwrap();
        }
        let run = site.farrier(&["logs", "hello"]);
        if kernel == "6.1.0-901-amd64" {
            assert_eq!(run.exits(0).stdout, format!("hello {kernel}\n"));
        } else {
            run.exits(2)
                .line("the cache has logs of hello for several kernels: 6.1.0-901-amd64, 6.1.0-902-amd64");
        }
    }
    for command in ["why", "logs", "retry"] {
        let run = site.farrier(&[command, "--help"]).exits(0);
        assert!(run.line("Usage:").ends_with(" [KERNEL]"), "{run}");
    }
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
    let note = "no --definitions: using the built-in images only";
    let place = ["--cluster", "dir:cluster", "--registry", "oci:layout"];
    let run = |args: &[&str]| bare(&site, &site.path(""), &[args, &place].concat());
    run(&["plan"]).exits(0).line(note);
    run(&["doctor"]).line("all built-in, without --definitions");
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
    site.edit("images/hello.yaml", "  template: kbuild", "  tempalte: kbuild");
    let run = bare(&site, &directory, &["lint"]).exits(1);
    run.line(r#"images/hello.yaml:7:3: unknown field "tempalte"; did you mean "template"?"#);
    let report = bare(&site, &directory, &["lint", "definitions", "-o", "json"]).exits(1).json();
    let first = &report["mistakes"][0];
    assert_eq!((&first["file"], &first["line"]), (&json!("images/hello.yaml"), &json!(7)));
    bare(&site, &directory, &["lint", "nowhere"]).exits(2).line("definitions nowhere");
    bare(&site, &directory, &["lint", "cluster"])
        .exits(2)
        .line("cluster: has no definitions: none of images");
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
fn an_option_of_another_command_is_named_with_that_command() {
    let site = Site::new();
    for (args, hint) in [
        (&["build", "hello", "--once"][..], "hint: --once is an option of `run`"),
        (&["plan", "--push"], "hint: --push is an option of `build`"),
        (&["lint", "--cluster", "x"], " and others"),
        (&["plan", "--split", "1"], "hint: --split is an option of `bundle export`"),
    ] {
        let run = site.farrier(args).exits(2);
        run.line(hint);
        assert!(!run.stderr.contains("similar argument") && !run.stderr.contains("as a value"), "{run}");
    }
    site.farrier(&["run", "--onec"]).exits(2).line("a similar argument exists: '--once'");
    let run = site.farrier(&["why", "--nothing"]).exits(2);
    assert!(!run.stderr.contains("as a value") && !run.stderr.contains("hint"), "{run}");
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
fn farrier_yaml_stands_for_options() {
    let site = Site::with_stand_in();
    let below = configured(&site, "definitions: definitions\ncluster: dir:cluster\nregistry: oci:layout\n");
    let plan = |more: &[&str]| bare(&site, &below, &[&["plan", "-o", "json"], more].concat());
    let reference = |run: &Run| run.json()["builds"][0]["cell"]["reference"].as_str().unwrap().to_owned();
    assert!(reference(&plan(&[]).exits(0)).starts_with("hello:"), "the registry is a layout directory");
    // A flag goes before a variable, and a variable before the file.
    let flag = format!("{}/flag", site.registry.host);
    assert!(reference(&plan(&["--registry", &flag]).exits(0)).starts_with(&flag));
    let mut command = site.command(&["plan", "-o", "json"]);
    command.current_dir(&below).env_remove("FARRIER_DEFINITIONS").env_remove("FARRIER_CLUSTER");
    assert!(reference(&site.finish(command.spawn().unwrap()).exits(0)).starts_with(&site.location));
    // An option that needs another one takes it from the file.
    bare(&site, &below, &["doctor", "--cluster", "dir:../../cluster", "-o", "json"]).json();
    plan(&["--no-config"]).exits(2).line("--registry <LOCATION>");
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
    // In a directory such as /tmp, another user could place the file.
    let below = configured(&site, "offline: true\n");
    let file = site.path("farrier.yaml");
    let is_refused = || {
        let run = bare(&site, &below, &["version"]).exits(2);
        run.line("farrier.yaml: another user may have written it");
    };
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    is_refused();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    bare(&site, &below, &["version"]).exits(0);
    fs::set_permissions(site.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    is_refused();
    fs::set_permissions(site.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(as_root("chown").arg("nobody").arg(&file).status().unwrap().success());
    is_refused();
    // Paths are relative to a link, and another user can place the link.
    assert!(as_root("rm").arg(&file).status().unwrap().success());
    let own = site.path("own.yaml");
    fs::write(&own, "offline: true\n").unwrap();
    symlink(&own, &file).unwrap();
    bare(&site, &below, &["version"]).exits(0);
    assert!(as_root("chown").args(["--no-dereference", "nobody"]).arg(&file).status().unwrap().success());
    is_refused();
    assert!(as_root("rm").arg(&file).status().unwrap().success());
    // The output names what decides about trust.
    configured(&site, "caFile: ca.pem\ninsecureRegistry: [registry.test]\n");
    let said = bare(&site, &below, &["version"]).exits(0);
    said.line("farrier.yaml sets caFile, insecureRegistry");
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

/// Each example of the help is a command line that farrier accepts, but for the cluster, files and images in it.
#[test]
fn examples_of_the_help_are_accepted() {
    let site = Site::new();
    let mut examples = 0;
    for command in ["plan", "run", "build", "check", "init", "bundle"] {
        let help = site.farrier(&[command, "--help"]).exits(0).stdout;
        for line in help.lines().filter(|line| line.starts_with(&format!("  farrier {command} "))) {
            // `--help` at the end lets clap check the words before it, and runs nothing.
            let words: Vec<&str> = line.split_whitespace().skip(1).chain(["--help"]).collect();
            site.farrier(&words).exits(0);
            examples += 1;
        }
    }
    assert!(examples >= 15, "{examples}");
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
