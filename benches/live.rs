//! Measures the controller's loop over large fleets, with the real program:
//!
//! - the memory that it uses for 10,000 nodes with 20 KiB of status each,
//! - the time from a changed kernel label to a rewritten image with 5,000 nodes,
//! - the requests that it sends to the API server when nothing happens.
//!
//! Prints lines of `<what> <number>`; `ci/bench` turns them into table rows.
//!
//! The registry is real. The API server is the tests' fake, which sends pages and events like the real one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "../tests/it/support/mod.rs"]
mod support;

use std::{
    fs,
    time::{Duration, Instant},
};

use support::{
    kube_api::{Requests, objects},
    live::{DRIVER, Live, large_node},
};

const A: &str = "6.1.0-901-amd64";
const B: &str = "6.1.0-902-amd64";
/// Number of nodes whose kernel changes, three times each.
const POOLS: usize = 100;
/// How long the idle loop is observed: several resyncs at `--interval 5`.
const STEADY: Duration = Duration::from_secs(30);

fn main() {
    memory();
    latency();
}

fn memory() {
    let nodes = (0..10_000).map(|number| large_node(&format!("node-{number:05}"), A, 20 << 10));
    let mut live = Live::new(nodes, "image");
    live.publish();
    let pid = live.start(&["--interval", "5"]);
    live.until("the image", |live| live.image(DRIVER).contains("@sha256:"));
    let reconciles = live.reconciles();
    live.until("some more reconciles", |live| live.reconciles() >= reconciles + 2);

    live.api.clear_log();
    std::thread::sleep(STEADY);
    println!("steady-lists {}", live.api.count(&Requests::verb("list")));
    println!("steady-writes {}", live.api.count(&Requests::writes()));

    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mib = |key: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        value.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap().div_ceil(1024)
    };
    println!("resident-mib {}", mib("VmRSS:"));
    println!("resident-peak-mib {}", mib("VmHWM:"));
}

/// 5,000 nodes, 100 of them in pools with a DaemonSet each. Their kernels change one after the other. With a single
/// target the rewrites would be delayed, because farrier limits the rewrites of one target.
fn latency() {
    let pools: Vec<String> = (0..POOLS).map(|number| format!("pool-{number}")).collect();
    let nodes = (0..5_000).map(|number| {
        let mut node = objects::node(&format!("node-{number:05}"), A);
        let labels = node["metadata"]["labels"].as_object_mut().unwrap();
        match pools.get(number) {
            Some(pool) => drop(labels.insert("pool".to_owned(), pool.as_str().into())),
            None => drop(labels.remove("feature.node.kubernetes.io/pci-15b3.present")),
        }
        node
    });
    let mut live = Live::new(nodes, "image");
    live.pools(&pools);
    let images = live.publish_for("node-00000", &[B]);
    live.start(&["--interval", "3600"]);
    live.until("the first images", |live| pools.iter().all(|pool| live.image(pool) == images[A]));
    for (kernel, (number, pool)) in
        [B, A, B].iter().flat_map(|kernel| pools.iter().enumerate().map(move |of| (*kernel, of)))
    {
        let start = Instant::now();
        live.api.set_kernel(&format!("node-{number:05}"), kernel);
        live.until("the image", |live| live.image(pool) == images[kernel]);
        println!("rewritten-ms {:.1}", start.elapsed().as_secs_f64() * 1000.0);
    }
}
