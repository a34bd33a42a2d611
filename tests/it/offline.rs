//! A site without external network: the registry's store alone supplies a plan and a build.
use std::{fs, process::Output};

use crate::support::{
    kernels,
    netns::{LoopbackOnly, SealedRegistry},
    site::Site,
};
use serde_json::Value;

/// A module from a package in its newest version, on a base made from packages.
pub const MSTFLINT: &str = r#"apiVersion: farrier.dev/v1alpha1
kind: DriverImage
metadata: {name: mstflint}
spec:
  version: {source: mstflint}
  template: kbuild
  vars: {directory: ., makeArgs: ""}
  sources:
    - name: mstflint
      from: {apt: {package: mstflint-dkms, suites: [sid]}}
      subdir: usr/src/mstflint-*
  nodes: {matchLabels: {test.farrier.dev/hello: "true"}}
  modules: [mstflint_access]
  runtime:
    base: {minimal: {suites: [bookworm]}}
    entrypoint: [modprobe, mstflint_access]
"#;

const PATCH: &str = r#"--- a/farrier_hello.c
+++ b/farrier_hello.c
@@ -4,5 +4,5 @@
 
 static int __init farrier_hello_init(void)
 {
-	pr_info("hello\n");
+	pr_info("hello from a site without a network\n");
 	return 0;
"#;

/// The sealed side: definitions, an empty cache and a registry with the transferred content, with only loopback as its network.
struct Sealed<'a> {
    site: &'a Site,
    namespace: &'a LoopbackOnly,
    registry: &'a SealedRegistry,
}

impl Sealed<'_> {
    fn farrier(&self, args: &[&str]) -> Output {
        let mut command = self.site.command(args);
        command
            .env("FARRIER_CACHE_DIR", self.site.path("empty-cache"))
            .env("FARRIER_REGISTRY", format!("{}/drivers", self.registry.host))
            .env("FARRIER_ENGINE", "sandbox")
            .env("FARRIER_OFFLINE", "1");
        self.namespace.moved(&command).output().unwrap()
    }

    #[track_caller]
    fn json(&self, args: &[&str]) -> Value {
        let output = self.farrier(&[args, &["-o", "json"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {}{stderr}", String::from_utf8_lossy(&output.stdout));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    #[track_caller]
    fn nothing_to_do(&self) {
        let plan = self.json(&["plan"]);
        let count = |part: &str| plan[part].as_array().map_or(0, Vec::len);
        assert_eq!(count("upToDate"), 2, "{plan:#}");
        for part in ["builds", "waiting", "conflicts", "unknown", "skipped"] {
            assert_eq!(count(part), 0, "{part}: {plan:#}");
        }
    }
}

#[track_caller]
fn reports(site: &Site, kernel: &str) -> Vec<Value> {
    let kernel = ["--kernel", kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    let run = site.farrier(&[&["mirror", "-o", "json"][..], &kernel].concat()).exits(0);
    run.json().as_array().unwrap().clone()
}

#[test]
fn a_site_without_a_network_plans_and_builds_from_the_registry_alone() {
    let kernel = kernels::newest().newer;
    let mut site = Site::new();
    fs::remove_file(site.definitions().join("images/broken.yaml")).unwrap();
    site.define("images/mstflint.yaml", MSTFLINT);
    site.canary(&kernel);

    // The connected side fills the store, once, and publishes.
    let kept = reports(&site, &kernel);
    let what: Vec<&str> = kept.iter().map(|report| report["kind"].as_str().unwrap()).collect();
    for kind in ["definitions", "headers", "source", "root-fs"] {
        assert!(what.contains(&kind), "{kept:#?}");
    }
    assert!(kept.iter().all(|report| report["outcome"] == "kept" && report["new"] == true), "{kept:#?}");
    let again = reports(&site, &kernel);
    assert!(again.iter().all(|report| report["new"] == false), "{again:#?}");
    let digests =
        |reports: &[Value]| reports.iter().map(|report| report["digest"].clone()).collect::<Vec<_>>();
    assert_eq!(digests(&again), digests(&kept));
    site.farrier(&[
        "prebuild",
        "--kernel",
        &kernel,
        "--os",
        "debian",
        "--os-version",
        "12",
        "--arch",
        "amd64",
    ])
    .exits(0);

    // The sealed side has the registry's content and the definitions, without the sources next to the definitions.
    site.registry.stop();
    let namespace = LoopbackOnly::new();
    let registry = namespace.registry(&site.registry.storage());
    fs::remove_dir_all(site.definitions().join("sources/hello")).unwrap();
    let sealed = Sealed { site: &site, namespace: &namespace, registry: &registry };
    let links = namespace.command("ip").args(["-o", "link", "show"]).output().unwrap().stdout;
    let links = String::from_utf8(links).unwrap();
    assert!(links.lines().count() == 1 && links.contains(" lo: "), "the namespace has a network: {links}");
    sealed.nothing_to_do();

    // A new patch and a different make argument: both images are compiled from the store alone.
    site.define("patches/hello.patch", PATCH);
    site.edit("images/hello.yaml", "  nodes:", "  patches: [{path: patches/hello.patch}]\n  nodes:");
    site.edit("images/mstflint.yaml", "makeArgs: \"\"", "makeArgs: \"V=0\"");
    site.edit("images/hello.yaml", "\"1.0\"", "\"1.1\"");
    site.edit("images/mstflint.yaml", "  modules:", "  onConflict: overwrite\n  modules:");
    for image in ["hello", "mstflint"] {
        let built = sealed.json(&[
            "build",
            image,
            "--kernel",
            &kernel,
            "--os",
            "debian",
            "--os-version",
            "12",
            "--arch",
            "amd64",
            "--push",
        ]);
        assert_eq!((&built["outcome"], &built["check"]["verdict"]), (&"built".into(), &"loads".into()));
    }
    sealed.nothing_to_do();
}
