//! Tests the claims of docs/deploy.md, and the packages of `ci/release`. `ci/install` runs the page's commands that create and
//! delete objects, with the real kubectl; on a real cluster `ci/install` runs the whole page. Of `ci/image`, only the parts without compiler and engine are tested.
use std::{fs, path::Path, process::Command};

use crate::support::{kube_api::FakeApi, registry_process::RegistryProcess};

/// Runs commands in the project's directory, with the functions of `ci/lib.sh`.
fn bash(state: &Path, commands: &str) -> Command {
    let mut bash = Command::new("bash");
    let script = format!("set -euo pipefail; state={}; . ci/lib.sh\n{commands}", state.display());
    bash.args(["-c", &script]).current_dir(env!("CARGO_MANIFEST_DIR"));
    bash
}

/// Returns the lines of a project file from the first line that starts with `from` up to, but excluding, the next that starts
/// with `to`.
fn part(file: &str, from: &str, to: &str) -> String {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let lines = text.lines().skip_while(|line| !line.starts_with(from));
    let part: Vec<&str> = lines.take_while(|line| !line.starts_with(to)).collect();
    assert!(!part.is_empty(), "{file} has no line that begins with {from}");
    part.join("\n")
}

#[track_caller]
fn done(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn the_page_on_deployment_makes_the_objects_that_it_says_and_deletes_them() {
    let api = FakeApi::start();
    let directory = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let said = done(
        Command::new(root.join("ci/install"))
            .arg("--kubeconfig")
            .arg(api.kubeconfig(directory.path()))
            .arg("--objects")
            .env("FARRIER_INSTALL_STATE", directory.path().join("state"))
            .env("HOME", directory.path()),
    );
    let left: Vec<String> = [
        "deployments.apps",
        "clusterroles.rbac.authorization.k8s.io",
        "roles.rbac.authorization.k8s.io",
        "validatingadmissionpolicies.admissionregistration.k8s.io",
        "secrets",
    ]
    .iter()
    .flat_map(|resource| api.list(resource))
    .map(|object| object["metadata"]["name"].to_string())
    .collect();
    // The fake API server does not delete the Secret together with its namespace.
    assert_eq!(left, ["\"farrier-registry\""], "{said}");
}

/// A node with room for exactly two replicas cannot run a third one during a rollout.
#[test]
fn replicas_are_replaced_one_after_the_other_and_ask_for_little() {
    for overlay in ["kubernetes", "docker", "podman", "sandbox"] {
        let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kustomize/overlays").join(overlay);
        let made = done(Command::new("kubectl").arg("kustomize").arg(place));
        assert!(made.contains("replicas: 2\n") && made.contains("maxSurge: 0\n"), "{overlay}: {made}");
        let deployment = made.split("\nkind: Deployment\n").nth(1).unwrap();
        let requests = deployment.split("requests:").nth(1).unwrap();
        let cpu = requests.split("cpu: ").nth(1).and_then(|rest| rest.lines().next()).unwrap();
        let millis: u32 = cpu.strip_suffix('m').and_then(|millis| millis.parse().ok()).unwrap_or(1000);
        assert!(millis <= 250, "{overlay} asks for {cpu}");
    }
}

/// Definitions without a mirror find their packages through the image's own apt sources.
#[test]
fn farriers_image_has_the_package_sources_of_the_machine_that_builds_it() {
    let directory = tempfile::tempdir().unwrap();
    let (build, out) = (directory.path().join("bin"), directory.path().join("out"));
    fs::create_dir(&build).unwrap();
    for program in ["farrier", "driver-entrypoint", "farrier-runner"] {
        fs::write(build.join(program), "").unwrap();
    }
    fs::create_dir(build.join("doc")).unwrap();
    fs::write(build.join("doc/THIRD-PARTY-NOTICES.gz"), "").unwrap();
    let prepares = part("ci/image", "for suite in", "empty_headers");
    let step =
        part("deploy/image/templates/farrier.Dockerfile.hbs", "RUN", "FROM scratch").replace("RUN ", "");
    let step = step.replace("/build/", &format!("{}/", build.display()));
    let step = step.replace("/out/", &format!("{}/", out.display()));
    done(&mut bash(directory.path(), &format!("definitions=\"$state\"\n{prepares}\n{step}")));
    let sources = fs::read_to_string(out.join("etc/apt/sources.list.d/debian.list")).unwrap();
    let suites: Vec<&str> = sources.lines().filter_map(|line| line.split(' ').nth_back(1)).collect();
    assert_eq!(suites, ["bookworm", "bookworm-updates", "bookworm-security"], "{sources}");
    assert!(out.join("usr/share/doc/farrier/THIRD-PARTY-NOTICES.gz").is_file());
}

/// Package managers sort `~` before everything, and a hyphen begins the package's own revision.
#[test]
fn packages_of_a_prerelease_are_older_than_its_release_and_have_debians_documents() {
    let directory = tempfile::tempdir().unwrap();
    let packages = part("ci/release", "# pack DIRECTORY", "# metadata ARCH");
    let notes = part("ci/release", "section()", "# An in-toto");
    let farrier = env!("CARGO_BIN_EXE_farrier");
    let said = done(&mut bash(
        directory.path(),
        &format!(
            "version=0.3.0-rc.1 trial=true farrier={farrier} out=\"$state\" programs=\"$state/programs\"\n\
             export SOURCE_DATE_EPOCH=1780000000 FARRIER_NOTICES=\"$state\"\n\
             declare -A machine=([amd64]=x86_64)\n\
             {packages}\n{notes}\n\
             for name in farrier driver-entrypoint farrier-runner; do install -D /bin/true \"$programs/amd64/$name\"; done\n\
             install -D /dev/null \"$state/amd64/THIRD-PARTY-NOTICES.gz\"\n\
             package_version=\"$(package_version \"$version\")\"\n\
             debian_package amd64\nrpm_package amd64\n\
             dpkg --compare-versions \"$(dpkg-deb --field \"$out/farrier_0.3.0~rc.1_amd64.deb\" Version)\" lt 0.3.0\n\
             rpm --query --package --queryformat '%{{version}}\\n' \"$out/farrier-0.3.0~rc.1-1.x86_64.rpm\"\n\
             dpkg-deb --extract \"$out\"/farrier_*.deb \"$state/root\"\n\
             gzip --decompress < \"$state/root/usr/share/doc/farrier/changelog.gz\" > \"$state/changelog\"\n\
             dpkg-parsechangelog --file \"$state/changelog\""
        ),
    ));
    for line in ["0.3.0~rc.1", "Source: farrier", "Version: 0.3.0~rc.1"] {
        assert!(said.lines().any(|printed| printed == line), "{line}: {said}");
    }
    let copyright =
        fs::read_to_string(directory.path().join("root/usr/share/doc/farrier/copyright")).unwrap();
    assert!(copyright.contains("\nLicense: Apache-2.0\n"), "{copyright}");
}

/// `ci/image` trusts FARRIER_CA_FILE both for the publication and for the inspection afterwards.
#[test]
fn farriers_image_is_copied_from_a_registry_whose_certificate_only_farrier_was_told() {
    let registry = RegistryProcess::start_elsewhere();
    let directory = tempfile::tempdir().unwrap();
    let image = format!("{}/platform/farrier:1", registry.host);
    done(&mut bash(
        directory.path(),
        &format!(
            "umoci init --layout \"$state/made\" && umoci new --image \"$state/made:1\"\n\
             skopeo copy --quiet --dest-tls-verify=false \"oci:$state/made:1\" docker://{image}"
        ),
    ));
    let copies = part("ci/image", "secure=()", "as_root umoci unpack");
    let commands = format!("reference={image} from=docker://{image}\n{copies}");
    done(bash(directory.path(), &commands).env("FARRIER_CA_FILE", registry.ca_file()));
    assert!(directory.path().join("copy/index.json").is_file());
}
