//! `kubectl farrier` with the real kubectl, and the archives from which krew installs it.
use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Output},
};

use serde_json::json;

use crate::support::{
    kube_api::{Kind, Requests, objects::node},
    live::Live,
};

const KERNEL: &str = "6.1.0-901-amd64";

/// Returns a `kubectl farrier` command with the plug-in in a directory of PATH.
fn kubectl(live: &Live, words: &str) -> Command {
    let place = live.site.path("bin");
    if !place.exists() {
        fs::create_dir(&place).unwrap();
        for name in ["kubectl-farrier", "kubectl_complete-farrier"] {
            symlink(env!("CARGO_BIN_EXE_farrier"), place.join(name)).unwrap();
        }
    }
    let farrier = live.command(&[]);
    let mut bash = Command::new("bash");
    let script = format!(
        "set -euo pipefail; state={}; . ci/lib.sh; need_kubectl 2> /dev/null; PATH={}:$PATH; cd {}; exec kubectl {words}",
        live.site.path("state").display(),
        place.display(),
        live.site.path("").display(),
    );
    bash.args(["-c", &script]).current_dir(env!("CARGO_MANIFEST_DIR"));
    for (name, value) in farrier.get_envs() {
        match value {
            Some(value) => bash.env(name, value),
            None => bash.env_remove(name),
        };
    }
    bash.env_remove("FARRIER_CLUSTER");
    bash
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

#[track_caller]
fn done(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

#[test]
fn kubectl_finds_it_and_means_the_live_cluster() {
    let live = Live::new([node("n0", KERNEL)], "image");
    assert!(done(&mut kubectl(&live, "plugin list")).contains("kubectl-farrier"));
    let help = done(&mut kubectl(&live, "farrier why --help"));
    assert!(help.contains("Usage: kubectl farrier why [OPTIONS]"), "{help}");
    let node = done(&mut kubectl(&live, "farrier why node/n0"));
    assert!(node.contains("called for by feature.node.kubernetes.io/pci-15b3.present=true"), "{node}");
    assert!(
        done(&mut kubectl(&live, &format!("farrier why driver {KERNEL}"))).contains("not in the registry")
    );
    live.publish();
    assert!(done(&mut kubectl(&live, "farrier status")).contains("published"));
    assert!(done(&mut kubectl(&live, "farrier upgrade plan")).starts_with("no upgrade is planned; "));
    let ready = done(&mut kubectl(&live, &format!("farrier preflight --kernel {KERNEL}")));
    assert!(ready.contains("n0: ready for"), "{ready}");
    let output = kubectl(&live, "farrier stats").output().unwrap();
    assert!(
        !output.status.success() && said(&output).contains("Usage: kubectl farrier"),
        "{}",
        said(&output)
    );
}

/// Requests completions like kubectl: the plug-in prints one candidate per line and a directive number at the end.
#[test]
fn kubectl_completes_names_of_the_live_cluster() {
    let live = Live::new([node("n0", KERNEL), node("n1", "6.1.0-902-amd64")], "image");
    let definition = serde_json::to_value(farrier_controller::status::crd()).unwrap();
    live.api.install(Kind::defined_by(&definition).unwrap());
    live.api.create(json!({
        "apiVersion": "farrier.dev/v1alpha1", "kind": "DriverBuild",
        "metadata": {"name": "ofed-1", "namespace": "farrier"},
        "spec": {"image": "ofed", "release": "6.1.0-903-amd64", "os": "debian", "osVersion": "12", "arch": "amd64"},
    }));
    let complete = |words: &str, has_definitions: bool| {
        let mut command = kubectl(&live, &format!("__complete farrier {words}"));
        if !has_definitions {
            command.env_remove("FARRIER_DEFINITIONS");
        }
        let lines = done(&mut command).lines().map(str::to_owned).collect::<Vec<_>>();
        assert!(lines.contains(&":4".to_owned()), "{lines:?}");
        lines.into_iter().take_while(|line| line != ":4").collect::<Vec<_>>()
    };
    assert_eq!(complete("why node/n", true), ["node/n0", "node/n1"]);
    assert_eq!(complete("why driver 6", true), [KERNEL, "6.1.0-902-amd64", "6.1.0-903-amd64"]);
    assert_eq!(complete("logs d", true), ["driver"]);
    assert_eq!(complete("logs o", false), ["ofed"], "the cluster's farrier has the definitions");
    let commands = complete("pre", true);
    assert_eq!(commands.len(), 2, "{commands:?}");
    assert!(commands[0].starts_with("prebuild\tBuild and publish images"), "{commands:?}");
}

/// A failure is recorded in the cache of the farrier that ran the build.
#[test]
fn a_build_that_failed_is_tried_again() {
    let live = Live::new([node("n0", KERNEL)], "image");
    let plan = live.plan();
    let hash = plan["builds"][0]["cell"]["inputHash"].as_str().unwrap().to_owned();
    let record = live.site.cache().join("records/failures").join(format!("{hash}.json"));
    fs::create_dir_all(record.parent().unwrap()).unwrap();
    let failure = json!({"at": "2026-01-01T00:00:00Z", "message": "error: no such thing", "permanent": true});
    fs::write(&record, failure.to_string()).unwrap();
    assert!(done(&mut kubectl(&live, "farrier status")).contains("failed"));
    let again = done(&mut kubectl(&live, &format!("farrier retry driver {KERNEL}")));
    assert!(again.contains("CLEARED") && again.contains("error: no such thing"), "{again}");
    assert!(!record.exists());
    assert!(done(&mut kubectl(&live, "farrier status")).contains("missing"));
    for image in ["driver", "nonesuch"] {
        let output = kubectl(&live, &format!("farrier retry {image} {KERNEL}")).output().unwrap();
        let why = format!("no build of {image} for {KERNEL} has failed");
        assert!(output.status.code() == Some(1) && said(&output).contains(&why), "{}", said(&output));
    }
}

/// Without a registry, the plug-in asks the leading replica, which alone knows its builds and failures.
#[test]
fn what_names_no_registry_is_asked_of_the_leaders_pod() {
    let live = Live::new([node("n0", KERNEL)], "image");
    let without = |words: &str| {
        let mut command = kubectl(&live, words);
        command.env_remove("FARRIER_REGISTRY").env_remove("FARRIER_CACHE_DIR").output().unwrap()
    };
    let nobody = without("farrier status");
    assert_eq!(nobody.status.code(), Some(2));
    assert!(said(&nobody).contains("no farrier is the leader there"), "{}", said(&nobody));

    live.api.create(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "platform"}}));
    live.api.create(json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "farrier", "namespace": "platform"}, "spec": {"holderIdentity": "farrier-7d-abc_01"},
    }));
    live.api.create(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "farrier-7d-abc", "namespace": "platform"},
        "spec": {"nodeName": "n0", "containers": [{"name": "farrier", "image": "farrier"}]},
    }));
    for (words, asked) in [
        ("farrier status -n platform", "command=farrier&command=status&"),
        (
            "farrier -n platform logs driver 6.1 --follow",
            "command=farrier&command=logs&command=driver&command=6.1&command=--follow&",
        ),
        (
            "farrier why node/n0 --cluster kube --namespace=platform",
            "command=farrier&command=why&command=node%2Fn0&",
        ),
    ] {
        let output = without(words);
        let exec = Requests::any().path("/namespaces/platform/pods/farrier-7d-abc/exec").query(asked);
        assert!(live.api.count(&exec) > 0, "{words}: {}\n{:?}", said(&output), live.api.requests().last());
        assert_ne!(output.status.code(), Some(0), "no kubelet runs the command");
    }
    // Usage errors and commands without a cluster are handled locally.
    let wrong = without("farrier why");
    assert!(said(&wrong).contains("Usage: kubectl farrier why"), "{}", said(&wrong));
    assert!(said(&without("farrier schema site")).contains("farrier.dev/v1alpha1"));
}

#[test]
fn krew_gets_an_archive_and_a_manifest_that_agree() {
    let live = Live::new([], "image");
    // The tests' own build, with stand-ins for the other programs.
    let binaries = live.site.path("binaries");
    fs::create_dir(&binaries).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_farrier"), binaries.join("farrier")).unwrap();
    for name in ["driver-entrypoint", "farrier-runner"] {
        symlink("farrier", binaries.join(name)).unwrap();
    }
    let (native, other) = if cfg!(target_arch = "aarch64") { ("arm64", "amd64") } else { ("amd64", "arm64") };
    fs::write(binaries.join(format!("farrier-{other}")), other).unwrap();
    let notices = live.site.path("notices");
    for arch in [native, other] {
        fs::create_dir_all(notices.join(arch)).unwrap();
        fs::write(notices.join(arch).join("THIRD-PARTY-NOTICES.gz"), arch).unwrap();
    }
    let krew = |out: &Path| {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/krew"));
        command.args(["--url", "https://downloads.example/v1/", "--out"]).arg(out);
        done(command.env("FARRIER_BINARY", binaries.join("farrier")).env("FARRIER_NOTICES", &notices));
    };
    let (out, again) = (live.site.path("krew"), live.site.path("again"));
    krew(&out);
    krew(&again);
    let manifest = fs::read_to_string(out.join("farrier.yaml")).unwrap();
    assert_eq!(manifest, fs::read_to_string(again.join("farrier.yaml")).unwrap(), "the same archive");
    let value = |key: &str| {
        let found = manifest.lines().find_map(|row| row.trim().strip_prefix(key));
        found.unwrap_or_else(|| panic!("no {key} in {manifest}")).trim().to_owned()
    };
    let version = done(Command::new(env!("CARGO_BIN_EXE_farrier")).arg("--version"));
    assert_eq!(format!("farrier {}\n", value("version: v")), version);
    let of = |key: &'static str| manifest.lines().filter_map(move |row| row.trim().strip_prefix(key));
    let archives: Vec<_> = of("uri: https://downloads.example/v1/").zip(of("sha256: ")).collect();
    assert_eq!(archives.len(), 2, "{manifest}");
    for (archive, wanted) in &archives {
        let sum = done(Command::new("sha256sum").arg(out.join(archive)));
        assert!(sum.starts_with(wanted), "{sum} {manifest}");
    }
    let archive_of = |arch: &str| {
        let end = format!("_linux_{arch}.tar.gz");
        out.join(archives.iter().find(|(archive, _)| archive.ends_with(&end)).expect("an archive for each").0)
    };
    let inside =
        Command::new("tar").arg("-xzOf").arg(archive_of(other)).arg("kubectl-farrier").output().unwrap();
    assert_eq!(inside.stdout, other.as_bytes());

    // Install like krew: unpack the archive and link the program under the plug-in's name.
    let store = live.site.path("bin");
    fs::create_dir(&store).unwrap();
    done(Command::new("tar").arg("-xzf").arg(archive_of(native)).arg("-C").arg(&store));
    assert!(store.join("LICENSE").exists() && value("bin:") == "kubectl-farrier");
    assert_eq!(fs::read_to_string(store.join("THIRD-PARTY-NOTICES.gz")).unwrap(), native);
    assert!(
        manifest.contains("{from: LICENSE, to: .}, {from: THIRD-PARTY-NOTICES.gz, to: .}]"),
        "{manifest}"
    );
    let help = done(&mut kubectl(&live, "farrier --help"));
    assert!(help.contains("Usage: kubectl farrier [OPTIONS] <COMMAND>"), "{help}");
}
