//! Output of `farrier why` and `farrier doctor`.

use std::fs;

use crate::support::{
    registry_process::Wants,
    site::{FIRST_IMAGE, Run, Site, wait_until},
};

const KERNEL: &str = "6.1.0-901-amd64";

/// Collapses the padding of a table, because column widths depend on paths and digests.
fn narrow(text: &str) -> String {
    text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect()
}

#[test]
fn a_node_and_an_image_are_explained_from_labels_to_fields() {
    let site = Site::with_stand_in();
    let before = site.manifests();
    let node = site.farrier(&["why", "node/edge-2"]).exits(0);
    insta::assert_snapshot!(narrow(&site.neutral(&node.stdout)), @"
    node edge-2

    ABOUT WHY
    kernel it runs 6.1.0-901-amd64 (debian 12, amd64): status.nodeInfo says so, and the label feature.node.kubernetes.io/kernel-version.full agrees
    image broken not called for: the definition requires the label test.farrier.dev/broken=true, and there is no such label
    image hello called for by test.farrier.dev/hello=true
    state missing: not in the registry
    DaemonSet drivers/hello, container driver rewrite later: after REGISTRY/drivers/hello:1.0-6.1.0-901-amd64-debian12-amd64 is published
    ");
    let links = site.farrier(&["why", "hello", KERNEL, "-o", "json"]).exits(0).json();
    let about = |link: &serde_json::Value| link["about"].as_str().unwrap().to_owned();
    let about: Vec<String> = links[0]["chain"].as_array().unwrap().iter().map(about).collect();
    assert_eq!(about[..4], ["nodes", "family", "inputs", "state"]);
    site.farrier(&["why", "hello", "6.1.0-902-amd64"]).exits(0).line("no node runs 6.1.0-902-amd64");
    site.farrier(&["why", "node/nowhere"]).exits(2).line("no node is named \"nowhere\"");
    site.farrier(&["why", "absent", KERNEL])
        .exits(2)
        .line("no driver image is named absent; known: broken, hello");
    // The bare name of a node, and an image with one kernel.
    assert_eq!(site.farrier(&["why", "edge-2"]).exits(0).stdout, node.stdout);
    assert_eq!(site.farrier(&["why", "hello", "-o", "json"]).exits(0).json(), links);
    assert_eq!(site.farrier(&["why", "node/edge-2", "-o", "name"]).exits(0).stdout, "node edge-2\n");
    let run = site.farrier(&["why", "nowhere"]).exits(2);
    run.line(": \"nowhere\" is neither a driver image nor a node");
    run.line("hint: driver images: broken, hello; its nodes: 1, such as edge-2");
    let run = site.farrier(&["why", "broken"]).exits(1);
    run.line("error: image broken is planned for no kernel");
    let edge_3 = site.cluster().join("edge-3.yaml");
    let text = std::fs::read_to_string(site.cluster().join("edge-2.yaml")).unwrap();
    std::fs::write(&edge_3, text.replace("edge-2", "edge-3").replace(KERNEL, "6.1.0-902-amd64")).unwrap();
    let run = site.farrier(&["why", "hello"]).exits(2);
    run.line("error: image hello is planned for several kernels: 6.1.0-901-amd64, 6.1.0-902-amd64");
    run.line("hint: put the kernel's release after the image's name");
    std::fs::remove_file(edge_3).unwrap();
    assert_eq!(site.manifests(), before);
}

/// Where the nodes run several kernels, the image field of the only DaemonSet stays, and everything says as what.
#[test]
fn a_hold_says_which_image_stays() {
    let site = Site::with_stand_in();
    let other = fs::read_to_string(site.cluster().join("edge-2.yaml")).unwrap();
    let other = other.replace("edge-2", "edge-3").replace(KERNEL, "6.1.0-902-amd64");
    fs::write(site.cluster().join("edge-3.yaml"), other).unwrap();
    let stays = format!("; its image stays {FIRST_IMAGE}");
    for args in [&["plan"][..], &["status"], &["why", "hello", KERNEL], &["why", "node/edge-3"]] {
        let run = site.farrier(args).exits(0);
        assert!(run.line("its nodes run different kernels").ends_with(&stays), "{args:?}: {run}");
    }
    let plan = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    assert_eq!(plan["rollouts"][0]["currentImage"], FIRST_IMAGE, "{plan}");
    // `status` lists the same hold after the images.
    let status = site.farrier(&["status", "-o", "json"]).exits(0).json();
    assert_eq!(status.as_array().unwrap().last(), plan["rollouts"].get(0), "{status}");
    assert_eq!(status[0]["phase"], "missing", "{status}");
    assert_eq!(plan["rollouts"][0]["reason"], "mixed-kernels", "{plan}");
    let names = site.farrier(&["status", "-o", "name"]).exits(0).stdout;
    assert!(!names.lines().any(|name| name == "hello"), "{names}");
}

#[test]
fn a_hold_without_a_daemon_set_has_code_message_and_hint() {
    let site = Site::with_stand_in();
    site.edit("images/hello.yaml", "daemonSet: hello", "daemonSet: helo");
    let status = site.farrier(&["status", "-o", "json"]).exits(0).json();
    let hold = status.as_array().unwrap().last().unwrap();
    assert_eq!((&hold["decision"], &hold["reason"]), (&"hold".into(), &"not-found".into()), "{status}");
    let message = hold["message"].as_str().unwrap();
    assert!(message.contains("there is no such DaemonSet; did you mean "), "{status}");
    let hint = hold["hint"].as_str().unwrap();
    assert!(hint.starts_with("create the DaemonSet"), "{status}");
    site.farrier(&["why", "hello", KERNEL]).exits(0).line(&format!("-> {hint}"));
}

#[test]
fn what_is_missing_is_named_with_what_to_do() {
    let site = Site::with_stand_in();
    let run = site.farrier(&["doctor"]).exits(0);
    let names = site.farrier(&["doctor", "-o", "name"]).exits(0).stdout;
    assert!(names.starts_with("definitions\ncache\n"), "{names}");
    for check in
        ["definitions", "cache", "engine", "driver-entrypoint", "registry", "push", "cluster", "inputs"]
    {
        let found = narrow(run.line(check));
        assert!(found.starts_with(&format!("{check} ok ")), "{run}");
    }
    // Nothing was pushed or written.
    assert_eq!(site.tags("hello"), [""; 0]);

    let run = site.farrier(&["doctor", "--entrypoint", "/bin/sh"]).exits(1);
    let found = run.line("cannot use /bin/sh as a static program: it is linked dynamically");
    assert!(narrow(found).starts_with("driver-entrypoint wrong "), "{run}");
    run.line("-> take it from a release, or run");

    site.canary("6.1.0-999-amd64");
    let run = site.farrier(&["doctor"]).exits(1);
    assert!(narrow(run.line("no headers for 6.1.0-999-amd64")).starts_with("inputs wrong "), "{run}");

    // A registry that does not answer is one finding, and the headers that were to be looked up there are none.
    site.canary(KERNEL);
    let mut command = site.command(&["doctor", "-o", "json"]);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    command.env("FARRIER_REGISTRY", format!("{nobody}/drivers"));
    let found = Run::of(command.spawn().unwrap()).exits(3).json();
    let wrong: Vec<_> = found
        .as_array()
        .unwrap()
        .iter()
        .filter(|found| found["ok"] == false)
        .map(|found| &found["check"])
        .collect();
    assert_eq!(wrong, ["registry"], "{found}");

    // Check doctor's answer for a daemon.
    let mut command = site.command(&["doctor", "--engine", "docker", "-o", "json"]);
    command.env("DOCKER_HOST", "unix:///nowhere/docker.sock").env_remove("FARRIER_CLUSTER");
    let found = Run::of(command.spawn().unwrap()).exits(3).json();
    let engine = found.as_array().unwrap().iter().find(|found| found["check"] == "engine").unwrap();
    assert!(engine["says"].as_str().unwrap().contains("/nowhere/docker.sock"), "{engine}");
    assert!(engine["hint"].as_str().unwrap().contains("systemctl start docker"), "{engine}");
}

#[test]
fn a_registry_that_wants_a_password_is_no_registry_yet() {
    let site = Site::with_registry(Wants { password: true, ..Wants::default() });
    let run = site.farrier(&["doctor"]).exits(1);
    assert!(narrow(run.line("registry")).starts_with("registry wrong "), "{run}");
    run.line("-> run `docker login");
    assert!(!run.stdout.contains("\npush"), "{run}");
}

/// The command prints the matrix again after a change, and ends on a signal.
#[test]
fn the_matrix_is_printed_again_when_it_or_a_hold_changes() {
    let site = Site::with_stand_in();
    let out = std::fs::File::create(site.path("out")).unwrap();
    let mut command = site.command(&["status", "--watch"]);
    let mut child = command.stdout(out).spawn().unwrap();
    let printed = || std::fs::read_to_string(site.path("out")).unwrap();
    wait_until("the first matrix", || printed().contains("6.1.0-901-amd64 (debian 12"));
    site.canary("6.1.0-902-amd64");
    wait_until("the second matrix", || printed().contains("6.1.0-902-amd64 (debian 12"));
    assert_eq!(printed().matches("PHASE").count(), 2, "{}", printed());
    assert!(!printed().contains("hold"), "{}", printed());
    std::fs::remove_file(site.cluster().join("daemonset.yaml")).unwrap();
    wait_until("the rollout on hold", || printed().contains("hold"));
    assert_eq!(printed().matches("PHASE").count(), 3, "{}", printed());
    let sent =
        std::process::Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn commands_have_man_pages() {
    let site = Site::new();
    let pages = site.path("man1");
    site.farrier(&["man", pages.to_str().unwrap()]).exits(0);
    for page in ["farrier.1", "farrier-why.1", "farrier-headers-import.1"] {
        let text = std::fs::read_to_string(pages.join(page)).unwrap();
        assert!(text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{page}: {text}");
    }
}
