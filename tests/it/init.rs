//! `farrier init`, from an existing site to the first image, with the real program.
use std::{ffi::OsStr, fs, process::Command};

use serde_json::json;

use crate::support::{
    kernels,
    kube_api::{Kind, objects},
    live::Live,
    pages::{normalized, page},
    site::{Run, Site, read_all},
};

/// Writes the files of a KMM user: a Module, and the sources that its Dockerfile clones.
fn module(site: &Site) -> String {
    let sources = site.path("acme/kernel");
    fs::create_dir_all(&sources).unwrap();
    fs::write(sources.join("Kbuild"), "obj-m := acme.o\n").unwrap();
    fs::copy(site.definitions().join("sources/hello/farrier_hello.c"), sources.join("acme.c")).unwrap();
    let text = format!(
        "apiVersion: kmm.sigs.x-k8s.io/v1beta1\n\
         kind: Module\n\
         metadata: {{name: acme, namespace: kmm}}\n\
         spec:\n  \
         selector: {{pool: canary}}\n  \
         moduleLoader:\n    \
         container:\n      \
         modprobe: {{moduleName: acme}}\n      \
         kernelMappings:\n        \
         - regexp: '^.+$'\n          \
         containerImage: {}/acme:${{KERNEL_FULL_VERSION}}\n          \
         build: {{dockerfileConfigMap: {{name: acme-dockerfile}}}}\n",
        site.location
    );
    fs::write(site.path("module.yaml"), text).unwrap();
    site.path("module.yaml").display().to_string()
}

/// Returns the commands of the tutorial and their results, adapted to this site and kernel.
fn tutorial(site: &Site, kernel: &str) -> Vec<(String, String)> {
    let text = page("docs/kmm.md");
    let transcript = text.split("```console\n").nth(1).expect("the page has a transcript");
    let transcript = transcript.split("```").next().unwrap();
    let here =
        transcript.replace("127.0.0.1:20731/drivers", &site.location).replace("6.1.0-56-amd64", kernel);
    let parts = here.split("$ farrier ").skip(1).map(|part| part.split_once('\n').unwrap());
    parts.map(|(command, result)| (command.to_owned(), result.to_owned())).collect()
}

/// Environment variables that the other tests set and a new user lacks.
const SET: [&str; 3] = ["FARRIER_DEFINITIONS", "FARRIER_REGISTRY", "FARRIER_CLUSTER"];

/// Runs `farrier` as a new user, with only the cache configured in the environment.
fn newcomer<S: AsRef<OsStr>>(site: &Site, args: &[S]) -> Run {
    let mut command = site.command(args);
    for name in SET {
        command.env_remove(name);
    }
    site.finish(command.env("FARRIER_ENGINE", "sandbox").current_dir(site.path("")).spawn().unwrap())
}

/// Runs `farrier init` on the site's directory of manifests with further arguments.
fn init(site: &Site, more: &[&str]) -> Run {
    newcomer(site, &[&["init", "--cluster", "dir:cluster", "--registry", "oci:layout"], more].concat())
}

/// Returns the arguments of the next command that `farrier init` prints.
fn printed<'a>(run: &'a Run, command: &str) -> Vec<&'a str> {
    let line = run.line(&format!("  farrier {command} "));
    line.split_whitespace().skip(1).collect()
}

/// Follows docs/kmm.md and the commands that `farrier init` prints.
#[test]
fn a_newcomer_with_a_module_gets_to_the_first_image() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.canary(&kernel);
    fs::remove_file(site.cluster().join("daemonset.yaml")).unwrap();
    module(&site);
    // Remove the other tests' definitions, because a new user has none.
    fs::remove_dir_all(site.definitions()).unwrap();
    let [(init, made), (run, built)]: [_; 2] = tutorial(&site, &kernel).try_into().unwrap();
    let words = |command: &str| command.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let init = newcomer(&site, &words(&init)).exits(0);
    assert_eq!(normalized(&init.stdout), normalized(&made));
    let text = fs::read_to_string(site.path("definitions/images/acme.yaml")).unwrap();
    assert!(
        text.contains("vars: {directory: kernel, makeArgs: \"\"}"),
        "init finds the directory in the sources: {text}"
    );

    newcomer(&site, &printed(&init, "plan")).exits(0).line("1 to build");
    newcomer(&site, &printed(&init, "doctor")).exits(0);
    assert_eq!(printed(&init, "run").join(" "), run);
    assert_eq!(normalized(&newcomer(&site, &words(&run)).exits(0).stdout), normalized(&built));
    assert_eq!(site.tags("acme"), [kernel.as_str()], "the tag that KMM expects");
    assert_eq!(site.inspect(&format!("acme:{kernel}"))["Os"], "linux");
    newcomer(&site, &printed(&init, "run")).exits(0).line("nothing to do");

    // With a rollout, farrier sets the image in the Module, once KMM makes none.
    let start = text.find("\n  rollout:").expect("a rollout");
    let rollout =
        "\n  rollout:\n    - {strategy: custom-resource, resource: Module, namespace: kmm, name: acme}\n";
    fs::write(site.path("definitions/images/acme.yaml"), text[..start].to_owned() + rollout).unwrap();
    let module = fs::read_to_string(site.path("module.yaml")).unwrap();
    let place = site.cluster().join("module.yaml");
    fs::write(&place, &module).unwrap();
    let held = newcomer(&site, &printed(&init, "run")).exits(1);
    held.line("KMM would build or sign the image itself; remove `build`");
    let made_by_kmm = module.lines().find(|line| line.contains("build:")).unwrap();
    let ready = module
        .replace(&format!("{made_by_kmm}\n"), "")
        .replace("moduleName: acme}", "moduleName: acme, dirName: /}");
    fs::write(&place, ready.replace(&site.location, "old.example")).unwrap();
    newcomer(&site, &printed(&init, "run")).exits(0);
    assert_eq!(fs::read_to_string(&place).unwrap(), ready);
    newcomer(&site, &printed(&init, "run")).exits(0).line("nothing to do");
}

/// A directory with a Makefile, as a developer has it, gets to a published image.
#[test]
fn a_kbuild_directory_needs_no_other_file() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.canary(&kernel);
    let source = site.path("hello");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("Makefile"), "obj-m := farrier_hello.o\n").unwrap();
    fs::copy(site.definitions().join("sources/hello/farrier_hello.c"), source.join("farrier_hello.c"))
        .unwrap();
    fs::remove_dir_all(site.definitions()).unwrap();
    let run = init(&site, &["--source", "./hello"]).exits(0);
    let text = fs::read_to_string(site.path("definitions/images/hello.yaml")).unwrap();
    assert!(text.starts_with("# yaml-language-server: $schema=../.schema/driver-image.json\n"), "{text}");
    for line in [
        "from: {path: {path: ../hello}}",
        "modules: [farrier_hello]",
        "directory: .",
        "nodes: {matchLabels: {pool: canary}}",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let schema = fs::read(site.path("definitions/.schema/driver-image.json")).unwrap();
    let schema: serde_json::Value = serde_json::from_slice(&schema).unwrap();
    assert!(schema["properties"]["spec"].is_object(), "{schema}");
    newcomer(&site, &printed(&run, "run")).exits(0).line("built     hello for");

    // A directory whose name no DaemonSet has: the output says so, and what to set.
    let other = site.path("acme_ticker");
    fs::rename(&source, &other).unwrap();
    let run = init(&site, &["second", "--source", "./acme_ticker"]).exits(0);
    run.line("FIELD OF images/acme-ticker.yaml");
    run.line("no single DaemonSet is named acme-ticker or runs an image of this name; choose one, such as drivers/hello (container driver)");
    let again = init(&site, &["second", "--source", "./acme_ticker"]).exits(0);
    assert!(!again.stdout.contains("publish-only"), "the file was kept, and may have a rollout: {again}");
    let report = init(&site, &["third", "--source", "./acme_ticker", "-o", "json"]).exits(0).json();
    assert_eq!(report["remarks"][0]["becomes"], "publish-only", "{report}");
    init(&site, &["fourth", "--source", "hello=./acme_ticker"]).exits(0);
    let text = fs::read_to_string(site.path("fourth/images/hello.yaml")).unwrap();
    assert!(
        text.contains("daemonSet: hello, container: driver}") && text.contains("{pool: canary}"),
        "{text}"
    );
    fs::rename(&other, &source).unwrap();

    let conf = "PACKAGE_NAME=acme-dkms\nPACKAGE_VERSION=1.0\nBUILT_MODULE_NAME[0]=farrier_hello\n";
    fs::write(source.join("dkms.conf"), conf).unwrap();
    let both = init(&site, &["both", "--source", "./hello"]).exits(0);
    both.line("the dkms.conf is not used; --from DIR/dkms.conf makes a definition of it");
    fs::remove_file(source.join("dkms.conf")).unwrap();

    fs::write(source.join("Makefile"), "all:\n").unwrap();
    init(&site, &["other", "--source", "./hello"]).exits(2).line("found no Makefile or Kbuild with obj-m");

    fs::write(source.join("dkms.conf"), conf).unwrap();
    init(&site, &["fifth", "--source", "ticker=./hello"]).exits(0);
    let text = fs::read_to_string(site.path("fifth/images/ticker.yaml")).unwrap();
    assert!(text.contains("template: dkms") && text.contains("from: {path: {path: ../hello}}"), "{text}");
}

#[test]
fn without_a_terminal_it_says_what_is_missing_and_ends() {
    let site = Site::new();
    let run = newcomer(&site, &["init"]).exits(2);
    run.line("error: --cluster is missing, and there is no terminal to ask at: which cluster: kube");
    run.line(
        "hint: farrier init DIR --cluster CLUSTER --registry LOCATION, and --source DIR, --driver IMAGE, or",
    );
    site.canary("6.1.0-901-amd64");
    newcomer(&site, &["init", "--cluster", "dir:cluster"]).exits(2).line("--registry is missing");
    let refused = |more: &[&str]| init(&site, more).exits(2);
    refused(&[]).line("--driver is missing");
    module(&site);
    refused(&["--from", "module.yaml"]).line("where are the sources of acme (what its Dockerfile fetches)");
    for more in [&["--from", "module.yaml", "--source", "nowhere"][..], &["--source", "nowhere"]] {
        let run = refused(more);
        run.line("error: --source nowhere: there is no such file or directory");
        assert!(!run.stderr.contains("hint"), "{run}");
    }
    let run = refused(&["--source", "apt:acme-dkms@sid"]);
    let hint = "hint: name a directory with a Makefile, Kbuild or dkms.conf; for other sources, also name the driver";
    run.line(hint);
    let run = refused(&["--source", "acme/kernel/Kbuild"]);
    run.line("error: --source acme/kernel/Kbuild: it is not a directory");
    run.line(hint);
    refused(&["--from", "acme/kernel/Kbuild"])
        .line("--source names the directory of a driver's Makefile or Kbuild");
    refused(&["--driver", "mstflint", "--source", "acme"]).line("got 1 sources for 0 drivers that need one");
    refused(&["--driver", "nonesuch"]).line("nonesuch");
    fs::write(site.path("huge.yaml"), "a: b\n".repeat(300_000)).unwrap();
    refused(&["--from", "huge.yaml"]).line("more than 1048576 bytes");
    refused(&["--from", "cluster/edge-2.yaml"]).line("hint: --from names a Module of KMM");
    assert!(!site.path("definitions/site.yaml").exists());
}

/// An invalid label key: `init` writes nothing, not even the valid files.
#[test]
fn what_cannot_be_read_back_is_not_written() {
    let site = Site::new();
    site.canary("6.1.0-901-amd64");
    let path = module(&site);
    let text = fs::read_to_string(&path).unwrap().replace("pool: canary", "'x y': canary");
    fs::write(&path, text).unwrap();
    init(&site, &["mine", "--from", "module.yaml", "--source", "acme"]).exits(2).line("a label key");
    assert!(!site.path("mine").exists());
}

#[test]
fn what_is_there_stays_as_it_is() {
    let site = Site::new();
    site.canary("6.1.0-901-amd64");
    fs::create_dir_all(site.path("mine/images")).unwrap();
    fs::write(site.path("mine/images/mstflint.yaml"), "mine\n").unwrap();
    fs::write(site.path("elsewhere.yaml"), "elsewhere\n").unwrap();
    std::os::unix::fs::symlink("../elsewhere.yaml", site.path("mine/site.yaml")).unwrap();
    let report = init(&site, &["mine", "--driver", "mstflint", "-o", "json"]).exits(0).json();
    assert_eq!(report["kept"], json!(["mine/images/mstflint.yaml", "mine/site.yaml"]));
    assert_eq!(report["written"], json!([]));
    assert_eq!(fs::read_to_string(site.path("mine/images/mstflint.yaml")).unwrap(), "mine\n");
    assert_eq!(fs::read_to_string(site.path("elsewhere.yaml")).unwrap(), "elsewhere\n");
}

/// The directory of `--definitions`, in every place where it can be set.
#[test]
fn init_writes_to_the_directory_of_the_definitions() {
    let site = Site::new();
    site.canary("6.1.0-901-amd64");
    let more = ["--definitions", "by-option", "--driver", "mstflint"];
    init(&site, &more).exits(0).line("wrote  by-option/images/mstflint.yaml");
    fs::write(
        site.path("farrier.yaml"),
        "definitions: by-file\ncluster: dir:cluster\nregistry: oci:layout\n",
    )
    .unwrap();
    fs::create_dir_all(site.path("below")).unwrap();
    let mut command = site.command(&["init", "--driver", "mstflint"]);
    for name in SET {
        command.env_remove(name);
    }
    site.finish(command.current_dir(site.path("below")).spawn().unwrap()).exits(0).line("wrote  ");
    assert!(site.path("by-file/images/mstflint.yaml").exists());
    newcomer(&site, &["init", "given", "--driver", "mstflint"])
        .exits(0)
        .line("wrote  given/images/mstflint.yaml");
}

/// A Module among the manifests of a directory is the rollout of its image, as in a live cluster.
#[test]
fn a_module_of_the_directory_is_the_rollout() {
    let site = Site::new();
    site.canary("6.1.0-901-amd64");
    fs::rename(module(&site), site.cluster().join("module.yaml")).unwrap();
    init(&site, &["mine", "--source", "acme"]).exits(0).line("farrier then sets its images");
    let text = fs::read_to_string(site.path("mine/images/acme.yaml")).unwrap();
    let rollout = "{strategy: custom-resource, resource: Module, namespace: kmm, name: acme}";
    assert!(text.contains(rollout), "{text}");
}

/// Each bundled driver gives a plannable definition in an empty directory.
#[test]
fn drivers_that_come_with_farrier() {
    let site = Site::with_stand_in();
    for (driver, files) in [("nvidia-peermem", 3), ("mstflint", 1), ("nv-peer-mem", 3)] {
        let place = format!("own-{driver}");
        init(&site, &[&place, "--driver", driver]).exits(0);
        assert_eq!(read_all(&site.path(&place).join("images")).len(), files, "{driver}");
        let plan = ["plan", "--definitions", &place, "--cluster", "dir:cluster", "--registry", "oci:layout"];
        newcomer(&site, &plan).exits(0);
    }
}

/// At a terminal `init` prompts, and the user accepts the cluster's suggestions.
#[test]
fn at_a_terminal_it_asks() {
    let site = Site::new();
    site.canary("6.1.0-901-amd64");
    let farrier = env!("CARGO_BIN_EXE_farrier");
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &format!("{farrier} init mine"), "/dev/null"]);
    script
        .current_dir(site.path(""))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped());
    for name in SET {
        script.env_remove(name);
    }
    let mut child = script.spawn().expect("run script (Debian package bsdutils)");
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(
        &mut stdin,
        b"nowhere\ndir:cluster\n\nNo Registry\noci:layout\n\nnonesuch\ngeneric, mstflint\n",
    )
    .unwrap();
    let run = Run::of(child).exits(0);
    drop(stdin);
    run.line("which cluster");
    run.line("which drivers of gdrdrv, generic, mofed,");
    run.line("for another driver, end this and pass --source DIR or --from FILE");
    assert!(!run.stdout.contains("labels of: )"), "{run}");
    for option in ["--registry", "--driver"] {
        run.line(&format!("{option} needs a value; Ctrl-C cancels"));
    }
    // Each wrong answer is asked for again.
    for (wrong, question) in [
        ("\"nowhere\" is not kube", "which cluster"),
        ("--registry: ", "where are images published"),
        ("no driver image is named nonesuch", "which drivers of"),
    ] {
        run.line(wrong);
        assert!(run.stdout.matches(question).count() >= 2, "{run}");
    }
    let files = read_all(&site.path("mine")).into_keys().filter(|path| !path.contains("/.schema/"));
    let files: Vec<String> = files.collect();
    assert_eq!(files.len(), 3, "{files:?}");
}

/// Without arguments, `init` defines the drivers that the cluster already runs.
#[test]
fn a_live_cluster_says_which_drivers_it_has() {
    let live =
        Live::new([objects::node("n0", "6.1.0-901-amd64"), objects::node("n1", "6.1.0-902-amd64")], "image");
    live.api.install(Kind::nic_cluster_policy());
    let module =
        Kind { namespaced: true, ..Kind::custom("kmm.sigs.x-k8s.io", "v1beta1", "modules", "Module") };
    live.api.install(module);
    let spec = json!({"ofedDriver": {"image": "doca-driver", "repository": "registry.example/drivers", "version": "25.07-0.9.7.0-0"}});
    live.api.create(objects::resource(
        "mellanox.com/v1alpha1",
        "NicClusterPolicy",
        "nic-cluster-policy",
        &spec,
    ));
    live.api.create(json!({
        "apiVersion": "kmm.sigs.x-k8s.io/v1beta1", "kind": "Module", "metadata": {"name": "driver", "namespace": "kmm"},
        "spec": {"selector": {}, "moduleLoader": {"container": {
            "modprobe": {"moduleName": "farrier_hello"}, "kernelMappings": [{"literal": "6.1.0-901-amd64"}],
        }}},
    }));
    let init = |more: &[&str]| {
        let place = live.site.path("mine").display().to_string();
        let mut command = live.command(&[&["init", &place, "-o", "json"], more].concat());
        Run::of(command.spawn().unwrap())
    };
    init(&[]).exits(2).line("where are the sources of driver");
    let source = live.site.definitions().join("sources/hello").display().to_string();
    let report = init(&["--source", &source]).exits(0).json();
    let text = |name: &str| fs::read_to_string(live.site.path("mine/images").join(name)).unwrap();
    let mofed = text("mofed.yaml");
    assert!(
        mofed.contains("version: \"25.07-0.9.7.0-0\"")
            && mofed.contains("MLNX_OFED_SRC-debian-25.07-0.9.7.0.tgz"),
        "{mofed}"
    );
    assert!(
        mofed.contains("{strategy: custom-resource, resource: NicClusterPolicy, name: nic-cluster-policy}"),
        "{mofed}"
    );
    let driver = text("driver.yaml");
    assert!(driver.contains("release: \"6\\\\.1\\\\.0\\\\-901\\\\-amd64\""), "{driver}");
    assert!(
        driver.contains("{strategy: custom-resource, resource: Module, namespace: kmm, name: driver}"),
        "{driver}"
    );
    let next = report["next"].to_string();
    assert!(next.contains(" --write-namespaces kmm\""), "{next}");

    // A DaemonSet runs the image of this name on nodes with two kernels.
    live.api.create(objects::daemon_set("other", "mstflint", "registry.example/mstflint:1"));
    let place = live.site.path("second").display().to_string();
    let run = Run::of(live.command(&["init", &place, "--driver", "mstflint"]).spawn().unwrap()).exits(0);
    run.line("--write-namespaces other");
    let text = fs::read_to_string(live.site.path("second/images/mstflint.yaml")).unwrap();
    assert!(
        text.contains("{strategy: per-kernel, namespace: other, daemonSet: mstflint, container: driver}"),
        "{text}"
    );
}
