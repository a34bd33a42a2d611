//! Interrupted, killed and concurrent runs leave nothing behind, lose nothing, and let the next run complete.
use std::{
    collections::BTreeSet,
    fs,
    process::{Child, Command},
};

use farrier_core::{facts::media_type, image::Digest};

use crate::support::{
    docker, kernels,
    site::{FIRST_IMAGE, Run, Site, entries, wait_until},
};

/// Replacement for a template's cleanup step that keeps the compile container running, so that the test can watch it.
const SLOW: &str = "find /build -mindepth 1 -delete; sleep 120\n";

/// Creates a site whose canary's image takes two minutes to compile.
fn slow_site(kernel: &str) -> Site {
    let site = Site::in_docker();
    let template = fs::read_to_string("templates/kbuild.Dockerfile.hbs").unwrap();
    site.define(
        "templates/kbuild.Dockerfile.hbs",
        &template.replace("find /build -mindepth 1 -delete\n", SLOW),
    );
    site.canary(kernel);
    site
}

fn make_quick(site: &Site) {
    site.edit("templates/kbuild.Dockerfile.hbs", SLOW, "find /build -mindepth 1 -delete\n");
}

fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Sends SIGTERM during a compile.
#[test]
fn a_run_that_is_told_to_stop() {
    let kernel = kernels::newest().newer;
    let site = slow_site(&kernel);
    let before = site.manifests();
    let child = site.start(&["run", "--once"]);
    wait_until("the compile", || docker::runs_container_of(child.id()));
    signal(child.id(), "TERM");
    // `finish` checks for leftover containers, images and temporary files.
    let run = site.finish(child).exits(130);
    run.line("stopping: cleaning up");
    assert!(run.stderr.contains(": interrupted") && !run.stderr.contains("failed: interrupted"), "{run}");
    assert_eq!((site.manifests(), site.tags("hello").len()), (before, 0));

    // An interrupted build must not be recorded as a failure.
    make_quick(&site);
    site.run_once().exits(0).line("rewrote");
}

/// A read that never ends, as from a dead network file system, does not keep a farrier alive that is told to stop.
#[test]
fn a_read_that_never_ends() {
    let (site, layout) = (Site::new(), tempfile::tempdir().unwrap());
    let digest = Digest::of(b"manifest");
    let blobs = layout.path().join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    assert!(Command::new("mkfifo").arg(blobs.join(digest.hex())).status().unwrap().success());
    let mut index = oci::ImageIndex::empty();
    index.manifests.push(oci::Descriptor {
        annotations: [("org.opencontainers.image.ref.name".to_owned(), "x:1".to_owned())].into(),
        ..oci::Descriptor::new(media_type::OCI_MANIFEST, digest, 8)
    });
    fs::write(layout.path().join("index.json"), index.to_bytes().unwrap()).unwrap();
    let image = format!("oci:{}:x:1", layout.path().display());
    let run = site.farrier(&["verify", "--insecure-no-signature", "--timeout", "1", &image]).exits(3);
    assert!(run.stderr.contains("not done after 1 s (--timeout)"), "{run}");
}

/// A compile that hangs is stopped at its deadline and not retried until an input changes.
#[test]
fn a_build_that_takes_too_long() {
    let kernel = kernels::newest().newer;
    let site = slow_site(&kernel);
    site.edit("images/hello.yaml", "  version:", "  build: {deadline: 5s}\n  version:");
    let child = site.start(&["run", "--once"]);
    // `finish` checks for leftover containers, images and temporary files.
    let run = site.finish(child).exits(1);
    run.line("the build was stopped: the steps did not end within the deadline of 5s");
    run.line("raise build.deadline in the definition");
    assert_eq!((site.image().as_str(), site.tags("hello").len()), (FIRST_IMAGE, 0));
    site.run_once().exits(1).line("failed");

    make_quick(&site);
    site.edit("images/hello.yaml", "deadline: 5s", "deadline: 10m");
    site.run_once().exits(0).line("rewrote");
}

/// Sends SIGKILL during a compile. The next run completes and removes the leftovers from the cache and the engine.
#[test]
fn a_run_that_is_killed() {
    let kernel = kernels::newest().newer;
    let site = slow_site(&kernel);
    let mut child = site.start(&["run", "--once"]);
    wait_until("the compile", || docker::runs_container_of(child.id()));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((site.image().as_str(), site.tags("hello").len()), (FIRST_IMAGE, 0));
    // The attempt was recorded before the build began, so that repeated kills cause a backoff.
    assert_eq!(entries(&site.cache().join("attempts")).len(), 1);
    // The engine stops a build some time after its client is gone.
    wait_until("the engine to stop the step", || !docker::runs_container_of(child.id()));

    make_quick(&site);
    site.run_once().exits(0).line("rewrote");
    assert_eq!(docker::left_by(child.id()), [""; 0]);
    assert_eq!(entries(&site.cache().join("work")), [""; 0]);
}

/// A run that is killed between publication and rollout: the next run does not rebuild the image.
#[test]
fn a_run_that_ended_before_its_rollout() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.canary(&kernel);
    let built = site.build("hello", &kernel, &["--push", "-o", "json"]).exits(0).json();
    let run = site.run_once().exits(0);
    run.line("rewrote");
    assert!(!run.stdout.contains("built  "), "{run}");
    assert_eq!(site.image(), built["pinned"]);
}

/// Two farriers on one cache, registry and cluster produce one image and one field value.
#[test]
fn two_runs_at_once() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.canary(&kernel);
    let (first, second) = (site.start(&["run", "--once"]), site.start(&["run", "--once"]));
    let runs = [first, second].map(|child| {
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    });
    assert!(runs.iter().any(|(code, _)| *code == Some(0)), "{runs:?}");
    // The slower run may report a conflict on the image field, and no other failure.
    assert!(runs.iter().all(|(code, _)| matches!(code, Some(0 | 1))), "{runs:?}");
    assert_eq!(site.tags("hello").len(), 1);
    let tag = site.inspect(&format!("hello:1.0-{kernel}-debian12-amd64"));
    assert!(site.image().ends_with(tag["Digest"].as_str().unwrap()));
    site.run_once().exits(0).line("nothing to do");
}

/// Two farriers on different machines build the same image for one registry, each with a separate cache.
struct Two {
    site: Site,
    elsewhere: Site,
    kernel: String,
}

impl Two {
    fn new() -> Self {
        let kernel = kernels::newest().newer;
        // The engine already has the toolchain, so both builds take about equally long.
        Site::in_docker().build("hello", &kernel, &[]).exits(0);
        Self { site: Site::in_docker(), elsewhere: Site::in_docker(), kernel }
    }

    fn start(&self, site: &Site) -> Child {
        let target = ["build", "hello", "--kernel", &self.kernel, "--os", "debian", "--os-version", "12"];
        let mut command = site.command(&[&target[..], &["--arch", "amd64", "--push", "-o", "json"]].concat());
        command.env("FARRIER_REGISTRY", &self.site.location).spawn().unwrap()
    }

    /// Asserts that both runs report the same image, that the tag never named another one, and that each referrer exists once.
    fn published_one(&self, runs: &[Run; 2]) {
        let digests: BTreeSet<String> =
            runs.iter().map(|run| run.json()["digest"].as_str().unwrap().to_owned()).collect();
        let digest = digests.first().unwrap();
        assert_eq!(digests.len(), 1, "{digests:?}");
        let [tag] = &self.site.tags("hello")[..] else { panic!("one tag: {:?}", self.site.tags("hello")) };
        let hex = digest.strip_prefix("sha256:").unwrap();
        assert_eq!(self.site.registry.ever_tagged("drivers/hello", tag), [hex]);
        let beside = self.site.inspect_raw(&format!("hello:sha256-{hex}"));
        let listed: Vec<&str> = beside["manifests"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["digest"].as_str().unwrap())
            .collect();
        assert_eq!((listed.len(), listed.iter().collect::<BTreeSet<_>>().len()), (4, 4), "{beside}");
        for one in listed {
            assert_eq!(self.site.inspect_raw(&format!("hello@{one}"))["subject"]["digest"], *digest);
        }
    }
}

#[test]
fn two_farriers_that_publish_the_same_at_once_end_with_one_image() {
    let two = Two::new();
    let children = [two.start(&two.site), two.start(&two.elsewhere)];
    let runs = children.map(|child| Run::of(child).exits(0));
    two.published_one(&runs);
}

/// One farrier is stopped during its push while the other publishes the whole image.
#[test]
fn a_farrier_that_publishes_late_what_another_has_published() {
    let two = Two::new();
    let late = two.start(&two.elsewhere);
    wait_until("its first upload", || two.site.registry.requests("POST") > 0);
    signal(late.id(), "STOP");
    let run = Run::of(two.start(&two.site));
    signal(late.id(), "CONT");
    let late = Run::of(late).exits(0);
    two.published_one(&[run.exits(0), late]);
}

/// A loop ends at the first signal, even during its interval.
#[test]
fn a_loop_with_nothing_to_do() {
    let kernel = kernels::newest().newer;
    let site = Site::in_docker();
    site.canary(&kernel);
    site.run_once().exits(0);
    let child = site.start(&["run", "--interval", "3600"]);
    let asked = site.registry.requests("GET");
    wait_until("its reconcile", || site.registry.requests("GET") > asked);
    signal(child.id(), "INT");
    site.finish(child).exits(130);
}
