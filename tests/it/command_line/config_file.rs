//! Options from `farrier.yaml`.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::PathBuf,
};

use super::bare;
use crate::support::{
    as_root,
    site::{Run, Site},
};

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
    wrong(
        "engine: dokcer\n",
        r#"farrier.yaml: engine: "dokcer" is not an engine; known: auto, sandbox, docker"#,
    );
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
