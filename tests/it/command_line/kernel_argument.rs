//! The kernel as an argument: guessed, mistyped, absent or malformed.

use std::{collections::BTreeSet, fs};

use crate::support::{kernels, site::Site};

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
    let secure_boot = "nodes with Secure Boot refuse the modules of hello: no key";
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
    doctor.line("-> sign the modules with a key of those nodes: `moduleSigning` in site.yaml; nodes without Secure Boot");

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
    for kernel in ["6.1.0-999-amd64", "../../etc"] {
        let code = if kernel.contains('/') { 2 } else { 1 };
        site.build("hello", kernel, &[]).exits(code);
        for command in [
            &["logs", "hello", "--kernel"][..],
            &["retry", "hello", "--kernel"],
            // The kernel as a positional argument.
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
}

#[test]
fn kernel_is_an_optional_argument() {
    let site = Site::with_stand_in();
    site.farrier(&["retry", "hello"]).exits(1).line("builds of hello failed for no kernel");
    for command in ["why", "logs", "retry"] {
        let run = site.farrier(&[command, "--help"]).exits(0);
        assert!(run.line("Usage:").ends_with(" [KERNEL]"), "{run}");
    }
}

/// Writes a log of image `hello`. The log of image `hello-2`, whose name begins the same, must not be taken for one of `hello`.
fn add_log(site: &Site, kernel: &str) {
    let logs = site.cache().join("logs");
    fs::create_dir_all(&logs).unwrap();
    for image in ["hello", "hello-2"] {
        let name = format!("{image}-{kernel}-0123456789ab-debian-12-amd64.log");
        fs::write(logs.join(name), format!("{image} {kernel}\n")).unwrap();
    }
}

#[test]
fn logs_are_of_the_only_kernel_or_name_the_kernels() {
    let site = Site::with_stand_in();
    site.farrier(&["logs", "hello"]).exits(1).line("has no log of a build of hello");
    add_log(&site, "6.1.0-901-amd64");
    assert_eq!(site.farrier(&["logs", "hello"]).exits(0).stdout, "hello 6.1.0-901-amd64\n");
    add_log(&site, "6.1.0-902-amd64");
    site.farrier(&["logs", "hello"])
        .exits(2)
        .line("the cache has logs of hello for several kernels: 6.1.0-901-amd64, 6.1.0-902-amd64");
}
