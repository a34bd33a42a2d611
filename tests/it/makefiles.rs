//! Makefiles as third parties write them: they ask `uname`, lie in another directory, have leftovers of other builds, or build
//! nothing. Their modules name firmware.
use std::fs;

use crate::support::{
    kernels,
    site::{Run, Site},
    tiny_image,
};

fn build(site: &Site, kernel: &str, engine: &str) -> Run {
    site.build("hello", kernel, &["--engine", engine, "-o", "json"])
}

/// Returns the paths of the modules in a build's report.
fn modules(run: &Run) -> Vec<String> {
    let report = run.json();
    let modules = report["check"]["modules"].as_array().unwrap_or_else(|| panic!("{run}"));
    modules.iter().map(|module| module["path"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn uname_answers_for_the_target_kernel_with_every_engine() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    let makefile = |wanted: &str| {
        format!(
            "KVER ?= $(shell uname -r)\nMACHINE := $(shell /bin/uname -m)\nobj-m := farrier_hello.o\n\
             ifneq ($(KVER) $(MACHINE),{wanted} {})\n$(error built for $(KVER) on $(MACHINE))\nendif\n",
            std::env::consts::ARCH
        )
    };
    for engine in ["sandbox", "docker"] {
        site.define("sources/hello/Kbuild", &makefile(&kernel));
        build(&site, &kernel, engine).exits(0);
        site.define("sources/hello/Kbuild", &makefile("another"));
        let words = format!("sources/hello/Kbuild:5: built for {kernel} on {}", std::env::consts::ARCH);
        build(&site, &kernel, engine).exits(1).line(&words);
    }
}

#[test]
fn leftovers_of_another_build_are_not_in_the_image() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.define("sources/hello/other.ko", "a module of another build");
    site.define("sources/hello/modules.order", "/build/other.ko\n");
    let run = build(&site, &kernel, "sandbox").exits(0);
    assert_eq!(modules(&run), [format!("lib/modules/{kernel}/extra/farrier_hello.ko")]);
}

#[test]
fn a_makefile_that_builds_nothing() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    site.define("sources/hello/Kbuild", "obj-$(CONFIG_NONESUCH) := farrier_hello.o\n");
    let run = build(&site, &kernel, "sandbox").exits(1);
    run.line("compile failed: make built no module: obj-m of . is empty for this kernel's configuration");
    site.edit("images/hello.yaml", "directory: .", "directory: src");
    let run = build(&site, &kernel, "sandbox").exits(1);
    run.line("compile failed: there is no Makefile in src of the sources: set vars.directory, or subdir of the source");
    // A value of `vars` may name the kernel.
    site.edit("images/hello.yaml", "directory: src", "directory: .");
    site.define("sources/hello/Kbuild", "obj-m := farrier_hello.o\n");
    site.edit("images/hello.yaml", "makeArgs: \"\"", "makeArgs: \"KVER={{kernel.release}}\"");
    build(&site, &kernel, "sandbox").exits(0);
}

/// The module names three files: one is in a source, one is in the base, and nothing provides the third.
#[tokio::test]
async fn firmware_of_sources_and_of_the_base_counts_and_the_rest_is_named() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    let code = site.definitions().join("sources/hello/farrier_hello.c");
    let named =
        ["acme/card.fw", "base.fw", "absent.fw"].map(|name| format!("MODULE_FIRMWARE(\"{name}\");\n"));
    fs::write(&code, fs::read_to_string(&code).unwrap() + &named.concat()).unwrap();
    site.define("sources/firmware/card.fw", "of a source");
    let in_base = [("usr/lib/firmware/base.fw".to_owned(), b"of the base".to_vec())];
    let base = tiny_image::push_files(&site.registry.host, "base", "1", &in_base).await;
    site.edit(
        "images/hello.yaml",
        "  nodes:",
        &format!(
            "    - {{name: firmware, from: {{path: {{path: sources/firmware}}}}}}\n  \
             firmware: [{{source: firmware, to: acme}}]\n  runtime: {{base: {{image: \"{base}\"}}}}\n  nodes:"
        ),
    );
    for engine in ["sandbox", "docker"] {
        let run = build(&site, &kernel, engine).exits(0);
        assert_eq!(run.json()["check"]["modules"][0]["missingFirmware"], serde_json::json!(["absent.fw"]));
    }
    // The published image gives the same answer, with a table.
    let run = site.build("hello", &kernel, &["--engine", "sandbox", "--push"]).exits(0);
    assert!(run.stdout.contains("firmware of farrier_hello that the image lacks: absent.fw\n"), "{run}");
    let image = format!("{}/hello:1.0-{kernel}-debian12-amd64", site.location);
    let run = site.farrier(&["check", &image, "--os", "debian", "--os-version", "12"]).exits(0);
    assert!(run.stdout.contains("firmware of farrier_hello that the image lacks: absent.fw\n"), "{run}");
}
