//! Makefiles as third parties write them: they ask `uname`, lie in another directory, have leftovers of other builds, or build
//! nothing.

use crate::support::{
    kernels,
    site::{Run, Site},
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
        let words =
            format!("compile failed: /build/Kbuild:5: built for {kernel} on {}", std::env::consts::ARCH);
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
