//! Coupled rollouts of a chain: when one rollout fails, the other images of the chain stay at their old version. The tests use
//! the real program, a real registry and an API server, with images published beforehand.
use farrier_core::{facts::ImageFacts, image::Digest};

use crate::support::{
    kube_api::{
        ApiFailure, Requests,
        objects::{daemon_set, node},
    },
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
    published::publish_with,
};
use kmod::Verdict;
use serde_json::json;

const KERNEL: &str = "6.1.0-901-amd64";
/// An image compiled against the driver, with a separate DaemonSet, and an unrelated image.
const PEER: &str = "peer";
const OTHER: &str = "other";

/// Creates a site with a driver and its peer, which run on the same nodes, and an unrelated image. All images are published.
fn chain() -> Live {
    let live = Live::new([node("n0", KERNEL)], "image");
    live.site.edit(
        "images/driver.yaml",
        "  template: kbuild",
        "  exposes: [/usr/src/driver]\n  template: kbuild",
    );
    for (name, needs) in [(PEER, "[driver]"), (OTHER, "[]")] {
        let definition = format!(
            "apiVersion: farrier.dev/v1alpha1\n\
             kind: DriverImage\n\
             metadata: {{name: {name}}}\n\
             spec:\n  version: \"1.0\"\n  template: kbuild\n  vars: {{directory: ., makeArgs: \"\"}}\n  \
             needs: {needs}\n  \
             nodes: {{matchLabels: {{feature.node.kubernetes.io/pci-15b3.present: \"true\"}}}}\n  \
             rollout:\n    \
             - {{strategy: image, namespace: {NAMESPACE}, daemonSet: {name}, container: driver}}\n"
        );
        live.site.define(&format!("images/{name}.yaml"), &definition);
        live.api.create(daemon_set(NAMESPACE, name, OLD_IMAGE));
    }
    // The peer's inputs are known only after the driver is published.
    for _ in 0..2 {
        for build in live.plan()["builds"].as_array().unwrap() {
            let exposed_digest = (build["cell"]["image"] == DRIVER).then(|| Digest::of(b"headers"));
            let facts = ImageFacts { verdict: Some(Verdict::Loads), exposed_digest, ..ImageFacts::default() };
            publish_with(&build["cell"], facts);
        }
    }
    assert_eq!(live.plan()["builds"], json!([]));
    live
}

/// Refuses every write to the driver's DaemonSet.
fn refuse_the_driver(live: &Live) -> u64 {
    let path = format!("/daemonsets/{DRIVER}");
    live.api.fail_always(Requests::writes().resource("daemonsets.apps").path(&path), ApiFailure::Forbidden)
}

#[test]
fn one_pass_makes_no_rollout_of_a_chain_after_one_that_failed() {
    let live = chain();
    let refused = refuse_the_driver(&live);
    let once = || {
        let output = live.command(&["run", "--once"]).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let (code, text) = once();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("not rolled out: images of a chain are rolled out together, and"), "{text}");
    assert_eq!((live.image(DRIVER).as_str(), live.image(PEER).as_str()), (OLD_IMAGE, OLD_IMAGE), "{text}");
    assert_ne!(live.image(OTHER), OLD_IMAGE, "{text}");

    live.api.take_back(refused);
    let (code, text) = once();
    assert_eq!(code, Some(0), "{text}");
    assert!([DRIVER, PEER].iter().all(|name| live.image(name) != OLD_IMAGE), "{text}");
}

#[test]
fn the_live_loop_makes_no_rollout_of_a_chain_after_one_that_failed() {
    let mut live = chain();
    let refused = refuse_the_driver(&live);
    live.start(&[]);
    live.until("the peer to wait", |live| live.log().contains("rollout waits"));
    live.until("the other image", |live| live.image(OTHER) != OLD_IMAGE);
    assert_eq!(live.image(PEER), OLD_IMAGE, "{}", live.log());
    live.api.take_back(refused);
    live.until("both", |live| [DRIVER, PEER].iter().all(|name| live.image(name) != OLD_IMAGE));
    let written = live.api.writes();
    let first = |name: &str| {
        let is_made = |path: &str| path.contains(&format!("/daemonsets/{name}"));
        written.iter().position(|record| is_made(&record.path)).unwrap()
    };
    assert!(first(DRIVER) < first(PEER), "{}", live.log());
}
