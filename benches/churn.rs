//! Measures how soon changed kernel labels lead to rewritten images, in a cluster of 5,000 nodes whose images are
//! published:
//!
//! - fifty changes 0.4 s apart, then fifty at once,
//! - changes while fifty users view the status page, and while none does,
//! - the response time of the page.
//!
//! Prints lines of `<what> <figure>`; `ci/bench` turns them into table rows.
//!
//! The API server is the tests' fake, or a real one if FARRIER_BENCH_KUBECONFIG names an administrator's kubeconfig.
//! There the nodes (without kubelets) and the DaemonSets have unique names, and are deleted at the end, whatever
//! happens.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)]

#[path = "../tests/it/support/mod.rs"]
mod support;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    pin::pin,
    process::{Child, Command},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use futures::{StreamExt, future::join_all, stream};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Namespace, Node},
};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde_json::{Value, json};
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use support::{
    kube_api::{
        FakeApi,
        objects::{self, KERNEL_LABEL, label_value},
    },
    published::publish_planned,
    site::Site,
};

const A: &str = "6.1.0-901-amd64";
const B: &str = "6.1.0-902-amd64";
const NODES: usize = 5_000;
/// Number of kernels that change one after the other, and of kernels that change at once. Each node has a separate
/// DaemonSet.
const CHANGES: usize = 50;
const APART: Duration = Duration::from_millis(400);
/// Interval at which the loop is idle again before the next change. At the rate of the reconciles, the figure would
/// mostly show how changes and reconciles happen to interleave.
const UNDISTURBED: Duration = Duration::from_millis(1500);
/// Number of users who view the page at the same time.
const VIEWERS: usize = 50;
/// Label on each object of the benchmark. The value is the name of the run.
const RUN: &str = "bench.farrier.dev/run";
/// Label on the nodes that need the driver. The value is the name of the node's DaemonSet.
const POOL: &str = "bench.farrier.dev/pool";
/// Timeout for all images of a step.
const LIMIT: Duration = Duration::from_mins(2);
/// After a minute without a kubelet's heartbeat, a controller marks all nodes as lost and writes to them. The
/// measurement starts once those writes are over.
const QUIET: Duration = Duration::from_secs(70);
const QUIET_LIMIT: Duration = Duration::from_mins(20);

/// The image that each DaemonSet sets, and when it was first seen.
type Seen = BTreeMap<String, (String, Instant)>;

struct Bench {
    /// Name of the namespace, prefix of the nodes' names, and value of [`RUN`].
    name: String,
    client: Client,
    site: Site,
    fake: Option<FakeApi>,
    runtime: Runtime,
}

/// `farrier run`, killed on drop.
struct Farrier(Child);

impl Drop for Farrier {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Requests the page, rendered again each time because of a filter, and the list of all nodes.
fn look(address: SocketAddr) {
    let ask = |path: &str| get(address, path);
    let began = Instant::now();
    while ask("").is_none() {
        assert!(began.elapsed() < LIMIT, "no page");
        std::thread::sleep(Duration::from_millis(100));
    }
    for _ in 0..20 {
        let (took, bytes) = ask("?kernel=6.1").expect("the first view");
        println!("page-ms {took:.1}\npage-bytes {bytes}");
        println!("nodes-ms {:.1}", ask("nodes.html").expect("all nodes").0);
    }
}

fn main() {
    let bench = Bench::new(std::env::var_os("FARRIER_BENCH_KUBECONFIG").map(PathBuf::from));
    let (client, name) = (bench.client.clone(), bench.name.clone());
    bench.runtime.spawn(async move {
        let [mut interrupted, mut ended] =
            [SignalKind::interrupt(), SignalKind::terminate()].map(|kind| signal(kind).unwrap());
        tokio::select! { _ = interrupted.recv() => {}, _ = ended.recv() => {} }
        clear(&client, &name).await;
        std::process::exit(130);
    });
    let outcome = catch_unwind(AssertUnwindSafe(|| bench.measure()));
    bench.runtime.block_on(clear(&bench.client, &bench.name));
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

/// Requests a page. Returns the response time in milliseconds and the length in bytes.
fn get(address: SocketAddr, path: &str) -> Option<(f64, usize)> {
    let (started, mut answer) = (Instant::now(), Vec::new());
    let request = format!("GET /{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let asked = TcpStream::connect(address).and_then(|mut stream| {
        stream.write_all(request.as_bytes())?;
        stream.read_to_end(&mut answer)
    });
    let is_there = asked.is_ok() && answer.starts_with(b"HTTP/1.1 200 ");
    is_there.then(|| (started.elapsed().as_secs_f64() * 1000.0, answer.len()))
}

/// Users who view the page. Like the page's script, each requests the page again after every reconcile.
struct Viewers(Vec<(TcpStream, JoinHandle<()>)>);

impl Viewers {
    fn open(address: SocketAddr) -> Self {
        let viewer = |_| {
            let mut events = TcpStream::connect(address).unwrap();
            events.write_all(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
            let told = BufReader::new(events.try_clone().unwrap());
            let looks = move || {
                for _ in told.lines().map_while(Result::ok).filter(|line| line == "data: pass") {
                    get(address, "").expect("the first view");
                }
            };
            (events, std::thread::spawn(looks))
        };
        Self((0..VIEWERS).map(viewer).collect())
    }
}

impl Drop for Viewers {
    fn drop(&mut self) {
        for (events, looks) in self.0.drain(..) {
            let _ = events.shutdown(Shutdown::Both);
            let _ = looks.join();
        }
    }
}

fn daemon_set(number: usize) -> String {
    format!("pool-{number}")
}

impl Bench {
    fn new(kubeconfig: Option<PathBuf>) -> Self {
        // A provider that is already installed serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (site, runtime) = (Site::new(), Runtime::new().unwrap());
        let fake = kubeconfig.is_none().then(FakeApi::start);
        let file = kubeconfig.or_else(|| Some(fake.as_ref()?.kubeconfig(&site.path("")))).unwrap();
        let name = format!("farrier-bench-{}", std::process::id());
        let mut config = Kubeconfig::read_from(file).unwrap();
        let current = config.current_context.clone().expect("the kubeconfig has a current context");
        for context in config.contexts.iter_mut().filter(|context| context.name == current) {
            context.context.as_mut().unwrap().namespace = Some(name.clone());
        }
        fs::write(site.path("kubeconfig"), serde_json::to_string(&config).unwrap()).unwrap();
        let client = runtime.block_on(async {
            let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
            Client::try_from(config).unwrap()
        });
        Self { name, client, site, fake, runtime }
    }

    fn measure(&self) {
        self.define();
        self.runtime.block_on(self.make_objects());
        let (first, second) = self.publish();
        let seen = self.follow();
        let farrier = self.start("off");
        self.until(&seen, 0..2 * CHANGES, &first);

        let started = self.change(0..CHANGES, B, APART);
        for (rewritten, started) in self.until(&seen, 0..CHANGES, &second).iter().zip(started) {
            println!("apart-ms {:.1}", (*rewritten - started).as_secs_f64() * 1000.0);
        }

        let started = self.runtime.block_on(async {
            join_all((CHANGES..2 * CHANGES).map(|number| self.boot(number, B))).await;
            let started = Instant::now();
            join_all((CHANGES..2 * CHANGES).map(|number| self.label(number, B))).await;
            started
        });
        for rewritten in self.until(&seen, CHANGES..2 * CHANGES, &second) {
            println!("at-once-ms {:.1}", (rewritten - started).as_secs_f64() * 1000.0);
        }
        drop(farrier);

        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let _farrier = self.start(&address.to_string());
        // The new process may have to wait for the lease of the previous one.
        self.change(CHANGES..CHANGES + 1, A, APART);
        self.until(&seen, CHANGES..CHANGES + 1, &first);
        // The two cases alternate, so that other load on the machine affects both.
        let turns = [(A, &first, false), (B, &second, true), (A, &first, true), (B, &second, false)];
        for (kernel, image, looked_at) in turns {
            let viewers = looked_at.then(|| Viewers::open(address));
            let started = self.change(0..CHANGES / 2, kernel, UNDISTURBED);
            let what = if viewers.is_some() { "watched-ms" } else { "alone-ms" };
            for (rewritten, started) in self.until(&seen, 0..CHANGES / 2, image).iter().zip(started) {
                println!("{what} {:.1}", (*rewritten - started).as_secs_f64() * 1000.0);
            }
        }
        look(address);
    }

    /// Boots nodes into another kernel, one after the other. Returns when the label of each was changed.
    fn change(&self, numbers: std::ops::Range<usize>, kernel: &str, apart: Duration) -> Vec<Instant> {
        self.runtime.block_on(async {
            let mut started = Vec::new();
            let mut ticks = tokio::time::interval(apart);
            for number in numbers {
                ticks.tick().await;
                self.boot(number, kernel).await;
                started.push(Instant::now());
                self.label(number, kernel).await;
            }
            started
        })
    }

    /// Defines one driver image, for all nodes that have a DaemonSet.
    fn define(&self) {
        let rollouts = (0..2 * CHANGES).map(|number| {
            let (namespace, name) = (&self.name, daemon_set(number));
            json!({"strategy": "image", "namespace": namespace, "daemonSet": name, "container": "driver"})
        });
        let image = json!({
            "apiVersion": "farrier.dev/v1alpha1", "kind": "DriverImage", "metadata": {"name": "driver"},
            "spec": {
                "version": "1.0", "template": "kbuild", "vars": {"directory": ".", "makeArgs": ""},
                "nodes": {"matchLabels": {"bench.farrier.dev/driver": self.name}},
                "rollout": rollouts.collect::<Vec<_>>(),
            },
        });
        fs::remove_dir_all(self.site.definitions()).unwrap();
        self.site.define("images/driver.yaml", &image.to_string());
        self.site.stand_in_kernels();
    }

    fn node(&self, number: usize) -> Value {
        let mut node = objects::node(&self.node_name(number), A);
        let labels = node["metadata"]["labels"].as_object_mut().unwrap();
        // Other definitions may select these nodes by such labels.
        labels.retain(|label, _| !label.contains("/pci-"));
        labels.insert(RUN.to_owned(), json!(self.name));
        if number < 2 * CHANGES {
            labels.insert(POOL.to_owned(), json!(daemon_set(number)));
            labels.insert("bench.farrier.dev/driver".to_owned(), json!(self.name));
        }
        node["spec"] = json!({"taints": [{"key": RUN, "value": self.name, "effect": "NoSchedule"}]});
        node
    }

    fn node_name(&self, number: usize) -> String {
        format!("{}-{number}", self.name)
    }

    async fn make_objects(&self) {
        let params = PostParams::default();
        let labels = json!({RUN: self.name});
        let namespace = json!({"metadata": {"name": self.name, "labels": labels}});
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.create(&params, &serde_json::from_value(namespace).unwrap()).await.unwrap();
        let daemon_sets: Api<DaemonSet> = Api::namespaced(self.client.clone(), &self.name);
        for number in 0..2 * CHANGES {
            let mut object = objects::daemon_set(&self.name, &daemon_set(number), "registry.example/old:1");
            object["spec"]["template"]["spec"]["nodeSelector"] = json!({POOL: daemon_set(number)});
            daemon_sets.create(&params, &serde_json::from_value(object).unwrap()).await.unwrap();
        }
        if let Some(fake) = &self.fake {
            fake.load((0..NODES).map(|number| self.node(number)));
            return;
        }
        let (nodes, params) = (&self.nodes(), &params);
        let create = |number| async move {
            let node: Node = serde_json::from_value(self.node(number)).unwrap();
            nodes.create(params, &node).await.unwrap();
        };
        stream::iter(0..NODES).for_each_concurrent(32, create).await;
        self.settle().await;
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Waits until no node has changed for a while.
    async fn settle(&self) {
        let began = Instant::now();
        let selected = watcher::Config::default().labels(&format!("{RUN}={}", self.name));
        let mut events = pin!(watcher(self.nodes(), selected).default_backoff());
        while tokio::time::timeout(QUIET, events.next()).await.is_ok() {
            assert!(began.elapsed() < QUIET_LIMIT, "the nodes keep changing");
        }
        eprintln!(
            "the nodes have not been written since {} s",
            began.elapsed().saturating_sub(QUIET).as_secs()
        );
    }

    /// Publishes the images for both kernels and returns each by digest.
    fn publish(&self) -> (String, String) {
        let published = || {
            let output = self.command(&["plan", "-o", "json"]).output().unwrap();
            let plan: Value = serde_json::from_slice(&output.stdout)
                .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
            publish_planned(&plan).into_values().next().expect("an image is to be built")
        };
        let change = |kernel| {
            self.runtime.block_on(async {
                self.boot(0, kernel).await;
                self.label(0, kernel).await;
            });
        };
        let first = published();
        change(B);
        let second = published();
        change(A);
        (first, second)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.site.command(args);
        command
            .env("FARRIER_CLUSTER", "kube")
            .env("FARRIER_WRITE_NAMESPACES", "*")
            .env("KUBECONFIG", self.site.path("kubeconfig"));
        command
    }

    fn start(&self, listen: &str) -> Farrier {
        let log = File::create(self.site.path("farrier.log")).unwrap();
        let mut command = self.command(&["run", "--listen", listen, "--interval", "3600"]);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        Farrier(command.spawn().unwrap())
    }

    /// Follows the DaemonSets' images.
    fn follow(&self) -> watch::Receiver<Seen> {
        let (told, seen) = watch::channel(Seen::new());
        let daemon_sets: Api<DaemonSet> = Api::namespaced(self.client.clone(), &self.name);
        self.runtime.spawn(async move {
            let mut events = pin!(watcher(daemon_sets, watcher::Config::default()).default_backoff());
            while let Some(event) = events.next().await {
                let Ok(Event::Apply(found) | Event::InitApply(found)) = event else { continue };
                let (name, now) = (found.metadata.name.unwrap_or_default(), Instant::now());
                let template = found.spec.template.spec;
                let image = template.and_then(|spec| spec.containers.into_iter().next()?.image);
                let image = image.unwrap_or_default();
                told.send_if_modified(|seen| {
                    let is_new = seen.get(&name).is_none_or(|(before, _)| *before != image);
                    if is_new {
                        seen.insert(name, (image, now));
                    }
                    is_new
                });
            }
        });
        seen
    }

    /// Waits until these DaemonSets have the image. Returns when each one got it.
    fn until(
        &self,
        seen: &watch::Receiver<Seen>,
        numbers: std::ops::Range<usize>,
        image: &str,
    ) -> Vec<Instant> {
        let names: Vec<String> = numbers.map(daemon_set).collect();
        let since = |seen: &Seen, name: &String| {
            seen.get(name).filter(|(found, _)| found == image).map(|(_, since)| *since)
        };
        let mut seen = seen.clone();
        let found = self.runtime.block_on(async {
            let all = seen.wait_for(|seen| names.iter().all(|name| since(seen, name).is_some()));
            let seen = tokio::time::timeout(LIMIT, all).await.ok()?.ok()?;
            names.iter().map(|name| since(&seen, name)).collect::<Option<Vec<Instant>>>()
        });
        found.unwrap_or_else(|| {
            let log = fs::read_to_string(self.site.path("farrier.log")).unwrap_or_default();
            panic!("waited {LIMIT:?} for {image}\n{log}")
        })
    }

    /// Makes the node report another kernel.
    async fn boot(&self, number: usize, kernel: &str) {
        let patch = Patch::Merge(json!({"status": {"nodeInfo": {"kernelVersion": kernel}}}));
        let name = self.node_name(number);
        self.nodes().patch_status(&name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Sets the node's kernel label.
    async fn label(&self, number: usize, kernel: &str) {
        let patch = Patch::Merge(json!({"metadata": {"labels": {KERNEL_LABEL: label_value(kernel)}}}));
        self.nodes().patch(&self.node_name(number), &PatchParams::default(), &patch).await.unwrap();
    }
}

/// Deletes the benchmark's objects.
async fn clear(client: &Client, name: &str) {
    let (params, ours) = (DeleteParams::default(), ListParams::default().labels(&format!("{RUN}={name}")));
    let nodes: Api<Node> = Api::all(client.clone());
    // A single request may end before all nodes are deleted.
    for _ in 0..60 {
        if let Err(error) = nodes.delete_collection(&params, &ours).await {
            eprintln!("delete nodes with {RUN}={name}: {error}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        if nodes.list(&ours.clone().limit(1)).await.is_ok_and(|left| left.items.is_empty()) {
            break;
        }
    }
    let namespaces: Api<Namespace> = Api::all(client.clone());
    if let Err(error) = namespaces.delete(name, &params).await {
        eprintln!("delete namespace {name}: {error}");
    }
}
