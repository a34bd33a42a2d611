//! Exit codes of plans, on which CI can rely.

use std::{fs, net::TcpListener};

use crate::support::{
    fake_http::{FakeHttp, answer},
    site::Site,
};

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
    // A pending build needs no attention.
    site.farrier(&["plan", "--exit-code"]).exits(0).line("1 to build");
    // A kernel without headers needs attention.
    site.manifest("edge-1.yaml", "6.1.0-999-amd64");
    site.farrier(&["plan"]).exits(0);
    let run = site.farrier(&["plan", "--exit-code", "-o", "json"]).exits(1).json();
    assert!(!run["skipped"].as_array().unwrap().is_empty(), "{run}");
    fs::remove_file(site.cluster().join("edge-1.yaml")).unwrap();
    // A node with an unknown kernel needs attention.
    let node = site.cluster().join("edge-2.yaml");
    let text = fs::read_to_string(&node).unwrap();
    fs::write(&node, text.replace("6.1.0-901-amd64", "unknown")).unwrap();
    site.farrier(&["plan", "--exit-code"]).exits(1).line("SKIPPED NODES");
}

#[test]
fn a_prebuild_for_a_platform_without_nodes_ends_with_2() {
    let site = Site::new();
    site.canary("6.1.0-901-amd64");
    let kernel = ["--kernel", "5.14.0-570.12.1.el9_6.x86_64", "--arch", "amd64"];
    let platform = ["--os", "rhel", "--os-version", "9.6"];
    let run = site.farrier(&[&["prebuild"][..], &kernel, &platform].concat()).exits(2);
    run.line("error: no node of the cluster is rhel 9.6, amd64; platforms of its nodes: debian 12, amd64");
    run.line("hint: pass --os, --os-version and --arch of nodes, or choose the images with --image");
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
