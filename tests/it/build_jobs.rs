//! End-to-end tests of engine `kubernetes`: the real program against the tests' API server, which runs pods as real containers.
//! The registry, the packages and the compilers are real.

use std::{
    collections::BTreeSet,
    fs,
    io::Read as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use flate2::read::GzDecoder;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::{
    kernels,
    kube_api::{ApiFailure, FakeApi, Requests},
    registry_process::Wants,
    scripted_registry::{HARBOR, ScriptedRegistry},
    site::{Run, Site, skopeo, wait_until, with_immutable_tags},
};

/// The namespace of builds.
const BUILDS: &str = "farrier-builds";

/// A site, and a cluster that runs its builds.
struct Bench {
    site: Site,
    api: FakeApi,
    kernel: String,
}

impl Bench {
    fn new() -> Self {
        let registry = Wants { deletion: true, ..Wants::default() };
        let (site, api, kernel) = (Site::with_registry(registry), FakeApi::start(), kernels::newest().newer);
        site.canary(&kernel);
        api.create(json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": BUILDS, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }));
        api.run_jobs();
        api.kubeconfig(&site.path(""));
        Self { site, api, kernel }
    }

    fn command(&self, engine: &str, args: &[&str]) -> Command {
        self.command_for("hello", engine, args)
    }

    fn command_for(&self, image: &str, engine: &str, args: &[&str]) -> Command {
        let image = ["build", image, "--kernel", &self.kernel, "--os", "debian", "--os-version", "12"];
        let how = ["--arch", "amd64", "--engine", engine, "--push"];
        let mut command = self.site.command(&[&image[..], &how, args].concat());
        command.env("KUBECONFIG", self.site.path("kubeconfig")).env("FARRIER_LOG", "farrier=info");
        command
    }

    fn start(&self, engine: &str, args: &[&str]) -> Child {
        self.command(engine, args).spawn().unwrap()
    }

    fn build(&self, engine: &str, args: &[&str]) -> Run {
        self.site.finish(self.start(engine, args))
    }

    /// Returns the log of the latest build.
    fn log(&self) -> String {
        let logs = fs::read_dir(self.site.cache().join("logs")).into_iter().flatten();
        logs.map(|log| fs::read_to_string(log.unwrap().path()).unwrap()).collect()
    }

    /// Returns the uids of pods whose containers are running.
    fn running(&self) -> Vec<String> {
        let runs = |pod: &Value| pod["status"]["phase"] == "Running";
        let uid = |pod: Value| pod["metadata"]["uid"].as_str().unwrap().to_owned();
        self.api.list("pods").into_iter().filter(runs).map(uid).collect()
    }

    /// Asserts that no Job and no container is left.
    fn assert_all_gone(&self) {
        assert_eq!(self.api.list("jobs.batch"), [Value::Null; 0]);
        wait_until("the containers are gone", || self.api.containers().is_empty());
    }

    /// Asserts that no build image is left in the registry.
    fn assert_no_image(&self) {
        assert!(self.site.tags("builds").is_empty(), "{:?}", self.site.tags("builds"));
    }

    /// Replaces a part of the build's template.
    fn template(&self, from: &str, to: &str) {
        let template = fs::read_to_string("templates/kbuild.Dockerfile.hbs").unwrap();
        let changed = template.replace(from, to);
        assert_ne!(template, changed);
        self.site.define("templates/kbuild.Dockerfile.hbs", &changed);
    }

    /// Starts a build that a quota holds, kills farrier, and returns the Job that is left.
    fn abandoned_job(&self) -> Value {
        self.api.limit_pods("builds", 0);
        let mut build = self.start("kubernetes", &[]);
        wait_until("there is a Job", || !self.api.list("jobs.batch").is_empty());
        build.kill().unwrap();
        build.wait().unwrap();
        self.api.list("jobs.batch").remove(0)
    }

    /// Starts a build, and interrupts it once its Job meets a condition.
    fn build_until(&self, what: &str, condition: impl Fn(&Value) -> bool) {
        let build = self.start("kubernetes", &[]);
        wait_until(what, || self.api.list("jobs.batch").iter().any(&condition));
        interrupt(&build);
        self.site.finish(build).exits(130);
        self.assert_all_gone();
    }

    /// Sets `spec.builds` of the site.
    fn builds(&self, builds: &Value) {
        let site = json!({
            "apiVersion": "farrier.dev/v1alpha1", "kind": "Site", "metadata": {"name": "test"}, "spec": {"builds": builds},
        });
        self.site.define("site.yaml", &site.to_string());
    }

    /// Delays the build, so that a test can interfere with it.
    fn slow(&self) {
        self.template("RUN set -eu;", "RUN set -eu; sleep 20;");
    }
}

fn interrupt(build: &Child) {
    Command::new("kill").args(["-s", "INT", &build.id().to_string()]).status().unwrap();
}

/// Number of places in a build from which the test attacks the runner.
const ATTACKED: usize = 3;

/// The test starts `runner follow`, which runs as the user of the steps, repeatedly, as farrier does after a connection is cut.
#[test]
fn a_step_in_a_pod_gets_at_nothing_of_the_runner() {
    let bench = Bench::new();
    let attack = include_str!("../escape/pod.c");
    let first = format!(
        "COPY <<'POD_C' /attack/pod.c\n{attack}POD_C\nRUN gcc -o /attack/pod /attack/pod.c && /attack/pod\nWORKDIR /build\n\
         RUN [\"/attack/pod\"]\nRUN set -eu;"
    );
    bench.template("RUN set -eu;", &first);
    let done = "find /build -mindepth 1 -delete";
    let template = bench.site.definitions().join("templates/kbuild.Dockerfile.hbs");
    let text = fs::read_to_string(&template).unwrap();
    assert!(text.contains(done));
    fs::write(&template, text.replace(done, &format!("{done}\nRUN /attack/pod"))).unwrap();
    let mut build = bench.start("kubernetes", &["-o", "json"]);
    while build.try_wait().unwrap().is_none() {
        for container in bench.api.containers() {
            let mut follow = Command::new("docker");
            follow.args(["exec", &container, "/.farrier/runner", "follow", "0"]);
            let mut follow = follow.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
            // The first byte shows that the runner has registered this follower.
            let _ = follow.stdout.take().unwrap().read(&mut [0]);
            let _ = follow.kill();
            follow.wait().unwrap();
        }
    }
    let run = bench.site.finish(build);
    let log = bench.log();
    let reached: Vec<&str> = log.lines().filter(|line| line.ends_with(" ESCAPED")).collect();
    assert!(reached.is_empty(), "{}", reached.join("\n"));
    run.exits(0);
    // Each attack was tried in each place.
    let denied: Vec<&str> = log.lines().filter(|line| line.ends_with(" denied")).collect();
    let total = format!("{} attacks", denied.len() / ATTACKED);
    assert_eq!(log.lines().filter(|line| **line == total).count(), ATTACKED, "{log}");
    for what in
        ["the follower: write mem", "process 1: write mem", "the runner's files: replace the directory"]
    {
        let times = denied.iter().filter(|line| line.strip_suffix(" denied") == Some(what)).count();
        assert_eq!(times, ATTACKED, "{what}: {log}");
    }
}

#[test]
fn a_pod_makes_what_a_sandbox_makes_over_whatever_lines() {
    let bench = Bench::new();
    // Cut the connection within the log, at the start of a frame, and within the payload.
    bench.api.cut_execs(&[3, 700, 5000]);
    let in_cluster = bench.build("kubernetes", &["-o", "json"]).exits(0).json();
    assert_eq!(bench.api.cuts_left(), 0);
    bench.assert_all_gone();
    let log = bench.log();
    for once in ["Step 2/", "MODPOST"] {
        assert_eq!(log.matches(once).count(), 1, "{once}: {log}");
    }
    let in_sandbox = bench.build("sandbox", &["--force", "-o", "json"]).exits(0).json();
    assert_eq!(in_cluster["digest"], in_sandbox["digest"]);
}

#[test]
fn half_a_gigabyte_survives_three_cuts() {
    const SIZE: u64 = 500_000_000;
    let bench = Bench::new();
    bench.template("depmod -b /out", &format!("yes | head -c {SIZE} > /out/large; depmod -b /out"));
    bench.api.cut_execs(&[100_000_000, 200_000_000, 150_000_000]);
    bench.build("kubernetes", &[]).exits(0);
    assert_eq!(bench.api.cuts_left(), 0);
    bench.assert_all_gone();
    let copy = bench.site.path("copy");
    let image = format!("docker://{}/hello:{}", bench.site.location, bench.site.tags("hello")[0]);
    assert!(
        skopeo(&["copy", "--src-tls-verify=false", &image, &format!("dir:{}", copy.display())])
            .status
            .success()
    );
    let sizes = fs::read_dir(copy).unwrap().filter_map(|layer| {
        let mut layer = tar::Archive::new(GzDecoder::new(fs::File::open(layer.unwrap().path()).ok()?));
        let large = layer
            .entries()
            .ok()?
            .flatten()
            .find(|entry| entry.path().is_ok_and(|path| path.ends_with("large")));
        large.map(|entry| entry.size())
    });
    assert_eq!(sizes.collect::<Vec<_>>(), [SIZE]);
}

#[test]
fn a_build_waits_for_room_and_says_so() {
    let bench = Bench::new();
    let quota = bench.api.limit_pods("builds", 0);
    let build = bench.start("kubernetes", &[]);
    wait_until("farrier reports the quota", || {
        bench.log().contains("The build waits for the cluster: exceeded quota: builds")
    });
    let place = bench.api.unschedulable("0/3 nodes are available: 3 Insufficient memory.");
    bench.api.take_back(quota);
    wait_until("farrier reports that no node fits", || bench.log().contains("0/3 nodes are available"));
    bench.api.take_back(place);
    bench.site.finish(build).exits(0);
    bench.assert_all_gone();
}

#[test]
fn a_pod_that_may_not_be_is_told_in_the_policys_words() {
    let bench = Bench::new();
    bench.api.refuse_pods(
        "ValidatingAdmissionPolicy 'ours' with binding 'ours' denied request: no builds on Fridays",
    );
    let run = bench.build("kubernetes", &[]).exits(1);
    run.line("no builds on Fridays");
    run.line("hint: the namespace of builds must admit pods");
    bench.assert_all_gone();
}

#[test]
fn a_missing_right_to_watch_pods_is_named() {
    let bench = Bench::new();
    bench.api.limit_pods("builds", 0);
    bench.api.deny("watch", "pods");
    let run = bench.build("kubernetes", &[]).exits(1);
    run.line("the cluster denies farrier access to the pod of a build");
    bench.assert_all_gone();
}

#[test]
fn another_farrier_takes_a_running_build_over() {
    let bench = Bench::new();
    bench.slow();
    let mut first = bench.start("kubernetes", &[]);
    wait_until("the pod runs", || bench.log().contains("Step 3/"));
    let pods = bench.running();
    first.kill().unwrap();
    first.wait().unwrap();
    // A separate cache simulates another machine.
    let cache = bench.site.path("another-cache");
    let second = bench.command("kubernetes", &[]).env("FARRIER_CACHE_DIR", &cache).spawn().unwrap();
    let second = Run::of(second).exits(0);
    second.line("takes over a build that runs");
    assert_eq!(pods.len(), 1);
    bench.assert_all_gone();
}

#[test]
fn a_job_of_earlier_settings_is_replaced() {
    let bench = Bench::new();
    bench.abandoned_job();
    bench.builds(&json!({"pod": {"nodeSelector": {"pool": "builds"}}}));
    let selector = |job: &Value| job["spec"]["template"]["spec"]["nodeSelector"]["pool"].clone();
    bench.build_until("the Job has the new selector", |job| selector(job) == "builds");
}

/// The image of a build has the runner, so each version of farrier runs another image.
#[test]
fn a_job_of_another_version_is_replaced() {
    let bench = Bench::new();
    let earlier = bench.abandoned_job()["metadata"]["uid"].clone();
    let mut runner =
        fs::read(Path::new(env!("CARGO_BIN_EXE_farrier")).with_file_name("farrier-runner")).unwrap();
    runner.push(0);
    let other = bench.site.path("other-runner");
    fs::write(&other, runner).unwrap();
    let build = bench.command("kubernetes", &[]).env("FARRIER_RUNNER", &other).spawn().unwrap();
    wait_until("there is a Job of the other version", || {
        bench.api.list("jobs.batch").iter().any(|job| job["metadata"]["uid"] != earlier)
    });
    assert_eq!(bench.api.list("jobs.batch").len(), 1);
    // A farrier of another cluster may use the same registry, and a node there may still have to pull the first image.
    assert_eq!(bench.site.tags("builds").len(), 2, "each image keeps its tag");
    interrupt(&build);
    bench.site.finish(build).exits(130);
    bench.assert_all_gone();
    // The deletions name the Job, because another version may have replaced it under the same name.
    let requests = bench.api.requests();
    let deletions =
        requests.iter().filter(|record| record.verb == "delete" && record.resource == "jobs.batch");
    let uids: Vec<&Value> = deletions.map(|record| &record.body["preconditions"]["uid"]).collect();
    assert!(uids.len() == 2 && *uids[0] == earlier && uids[1].is_string(), "{uids:?}");
}

/// The image of a farrier that was killed keeps its tag. Harbor refuses to write such a tag again, even with the same content.
#[test]
fn a_build_runs_again_where_tags_are_immutable() {
    let runtime = Runtime::new().unwrap();
    let mut bench = Bench::new();
    let scripted = runtime.block_on(ScriptedRegistry::start(&bench.site.registry.host, HARBOR));
    bench.site.location = format!("{}/drivers", scripted.host);
    bench.site.define("site.yaml", &with_immutable_tags(&scripted.host, "  builds: {waitAtMost: 5s}\n"));
    bench.abandoned_job();
    assert_eq!(bench.site.tags("builds").len(), 1);
    bench.build("kubernetes", &[]).exits(1).line("did not start within 5s: exceeded quota: builds");
    bench.assert_all_gone();
    bench.assert_no_image();
}

#[test]
fn a_job_that_someone_else_made_under_the_name_is_replaced() {
    let bench = Bench::new();
    let mut job = bench.abandoned_job();
    let name = job["metadata"]["name"].as_str().unwrap().to_owned();
    bench.api.delete("jobs.batch", BUILDS, &name);
    let container = "/spec/template/spec/containers/0";
    let image = job.pointer(container).unwrap()["image"].clone();
    job.pointer_mut(container).unwrap()["command"] = json!(["/bin/sh"]);
    let (labels, annotations) = (&job["metadata"]["labels"], &job["metadata"]["annotations"]);
    bench.api.create(json!({
        "apiVersion": "batch/v1", "kind": "Job", "spec": job["spec"],
        "metadata": {"name": name, "namespace": BUILDS, "labels": labels, "annotations": annotations},
    }));
    bench.build_until("the Job has farrier's command", |job| {
        let container = job.pointer(container).unwrap();
        container["image"] == image && container["command"] == json!(["/.farrier/runner", "pod"])
    });
}

#[test]
fn a_build_that_waits_too_long_gives_its_place_to_others() {
    let bench = Bench::new();
    bench.builds(&json!({"waitAtMost": "5s"}));
    bench.api.limit_pods("builds", 0);
    let run = bench.build("kubernetes", &[]).exits(1);
    run.line("did not start within 5s: exceeded quota: builds");
    bench.assert_all_gone();
    bench.assert_no_image();
}

#[test]
fn a_suspended_job_waits_for_its_turn_without_limit() {
    let bench = Bench::new();
    bench.builds(&json!({"waitAtMost": "5s", "suspend": true}));
    let build = bench.start("kubernetes", &[]);
    // farrier checks the Job every three seconds.
    let checks = Requests::verb("get").resource("jobs.batch");
    wait_until("farrier has waited beyond the limit", || bench.api.count(&checks) >= 4);
    interrupt(&build);
    bench.site.finish(build).exits(130);
    bench.assert_all_gone();
}

/// Kueue preempts a build in this way. The next pod would begin again, while farrier reads on where the first pod stopped.
#[test]
fn a_job_that_is_suspended_while_it_runs_ends_the_build() {
    let bench = Bench::new();
    bench.slow();
    let build = bench.start("kubernetes", &[]);
    wait_until("the pod runs", || bench.log().contains("Step 3/"));
    let job = bench.api.list("jobs.batch").remove(0);
    let name = job["metadata"]["name"].as_str().unwrap();
    bench.api.patch_as("kueue", "jobs.batch", BUILDS, name, &json!({"spec": {"suspend": true}}));
    let run = bench.site.finish(build).exits(1);
    run.line("ended without a result: ");
    run.line("hint: farrier retries automatically");
    bench.assert_all_gone();
    bench.assert_no_image();
}

#[test]
fn a_pod_that_vanishes_during_a_gap_of_the_watch_is_missed() {
    let bench = Bench::new();
    let place = bench.api.unschedulable("0/3 nodes are available: 3 Insufficient memory.");
    let build = bench.start("kubernetes", &[]);
    wait_until("farrier has seen the pod", || bench.log().contains("0/3 nodes are available"));
    bench.api.hold_watches("pods");
    let pod = bench.api.list("pods").remove(0);
    bench.api.delete("pods", BUILDS, pod["metadata"]["name"].as_str().unwrap());
    let run = bench.site.finish(build).exits(1);
    run.line("ended without a result: it was deleted");
    bench.api.take_back(place);
    bench.assert_all_gone();
}

/// The steps may have ended in time, which farrier cannot know.
#[test]
fn an_outage_of_the_api_server_past_the_deadline_is_no_fault_of_the_build() {
    let bench = Bench::new();
    bench.slow();
    bench.builds(&json!({"waitAtMost": "1m"}));
    bench.site.edit("images/hello.yaml", "  modules: [", "  build: {deadline: 90s}\n  modules: [");
    let build = bench.start("kubernetes", &[]);
    wait_until("the pod runs", || bench.log().contains("Step 3/"));
    bench.api.go_away();
    let run = bench.site.finish(build).exits(1);
    run.line("the connection to the pod is lost: ");
}

#[test]
fn a_build_that_is_stopped_leaves_no_job() {
    let bench = Bench::new();
    bench.slow();
    let build = bench.start("kubernetes", &[]);
    wait_until("the pod runs", || bench.log().contains("Step 3/"));
    interrupt(&build);
    bench.site.finish(build).exits(130);
    bench.assert_all_gone();
    bench.assert_no_image();
}

#[test]
fn a_build_that_is_stopped_before_the_answer_about_its_job_leaves_no_job() {
    let bench = Bench::new();
    let creation = Requests::verb("create").resource("jobs.batch");
    let hang = bench.api.fail_always(creation.clone(), ApiFailure::Hang);
    let build = bench.start("kubernetes", &[]);
    wait_until("farrier creates the Job", || bench.api.count(&creation) == 1);
    interrupt(&build);
    sleep(Duration::from_secs(1));
    bench.api.take_back(hang);
    bench.site.finish(build).exits(130);
    wait_until("the API server has created the Job", || {
        bench.api.requests().iter().any(|record| creation.matches(record) && record.status == 201)
    });
    bench.assert_all_gone();
    bench.assert_no_image();
}

#[test]
fn a_build_that_takes_too_long_leaves_no_image() {
    let bench = Bench::new();
    bench.slow();
    bench.site.edit("images/hello.yaml", "  modules: [", "  build: {deadline: 2s}\n  modules: [");
    bench.build("kubernetes", &[]).exits(1).line("did not end within the deadline of 2s");
    bench.assert_all_gone();
    bench.assert_no_image();
}

/// Two builds with equal root file systems use separate images. The build that ends first deletes its image, possibly before
/// the other build's node has pulled its own.
#[test]
fn builds_in_equal_root_file_systems_have_images_of_their_own() {
    let bench = Bench::new();
    let hello = fs::read_to_string(bench.site.definitions().join("images/hello.yaml")).unwrap();
    bench.site.define("images/twin.yaml", &hello.replace("{name: hello}", "{name: twin}"));
    let place = bench.api.unschedulable("0/1 nodes are available: 1 Insufficient memory.");
    let builds = ["hello", "twin"].map(|image| bench.command_for(image, "kubernetes", &[]).spawn().unwrap());
    wait_until("both have a Job", || bench.api.list("jobs.batch").len() == 2);
    let images = bench.api.list("jobs.batch").into_iter().map(|job| {
        let image = &job["spec"]["template"]["spec"]["containers"][0]["image"];
        image.as_str().unwrap().to_owned()
    });
    assert_eq!(images.collect::<BTreeSet<_>>().len(), 2);
    bench.api.take_back(place);
    // Both builds must end before the check for leftovers, because they share a cache.
    for run in builds.map(Run::of) {
        bench.site.assert_nothing_left(&run);
        run.exits(0);
    }
    bench.assert_all_gone();
}

/// Each of two instances that build the same inputs deletes its image in the end, which the other's node may still have to pull.
#[test]
fn instances_have_images_of_their_own() {
    let bench = Bench::new();
    bench.api.limit_pods("builds", 0);
    let images = ["one", "other"].map(|instance| {
        let build = bench.start("kubernetes", &["--instance", instance]);
        // Not earlier: farrier does not delete a Job whose creation the API server has not confirmed yet.
        wait_until("farrier reports the quota", || {
            bench.log().contains("The build waits for the cluster: exceeded quota: builds")
        });
        fs::remove_dir_all(bench.site.cache().join("logs")).unwrap();
        let job = bench.api.list("jobs.batch").remove(0);
        interrupt(&build);
        bench.site.finish(build).exits(130);
        job["spec"]["template"]["spec"]["containers"][0]["image"].clone()
    });
    assert_ne!(images[0], images[1]);
    bench.assert_all_gone();
    bench.assert_no_image();
}
