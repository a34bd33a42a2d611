//! A Kubernetes API server on loopback, in a separate thread. It implements the documented API for farrier's kinds and verbs,
//! and injects faults on command.
//!
//! Its answers were compared with a real server of the same version. Simplifications: no strategic merge patch, no JSON patch
//! and no finalizers. Pods of DaemonSets end at once, later pages of a list show the current state, and custom resources are
//! not checked against their schemas.
//!
//! A test decides the status of DaemonSets' pods. Jobs' pods run as containers in the Docker engine.

mod answer;
pub mod cluster;
mod containers;
mod daemon_sets;
mod events;
mod evict;
mod exec;
mod faults;
mod fields;
mod http;
mod job_kubelet;
mod jobs;
mod kinds;
mod managed;
pub mod objects;
pub mod pod_fate;
mod protobuf;
mod restricted;
mod routes;
mod scheduler;
mod schema;
mod selectors;
mod store;
mod validate;
mod watch;
mod write;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::mpsc};

pub use faults::{ApiFailure, Record, Requests};
pub use kinds::Kind;
pub use pod_fate::{Fate, Start};

use cluster::Cluster;
use daemon_sets::Kubelets;
use managed::Author;
use store::State;
use write::Target;

/// State shared by all connections.
pub struct Shared {
    state: Mutex<State>,
    /// Incremented on every change, to wake watches and waiting tests.
    changed: tokio::sync::watch::Sender<u64>,
    /// Number of open watches by resource. Separate from the state, whose lock may be held when a watch ends.
    watches: Mutex<BTreeMap<String, usize>>,
    /// Seconds by which the server's clock is ahead.
    clock: AtomicI64,
}

impl Shared {
    fn announce(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// Advances crashing containers over time.
    async fn tick(&self) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            ticks.tick().await;
            let changed = {
                let mut state = self.state.lock().unwrap();
                let before = state.revision;
                if state.kubelets.as_ref().is_some_and(|kubelets| kubelets.automatic && kubelets.crashing) {
                    state.settle();
                }
                state.revision != before
            };
            if changed {
                self.announce();
            }
        }
    }
}

/// Interval at which crashing containers are checked.
const TICK: Duration = Duration::from_millis(50);

/// The server, stopped on drop.
pub struct FakeApi {
    shared: Arc<Shared>,
    address: SocketAddr,
    commands: mpsc::UnboundedSender<http::Command>,
    cluster: Mutex<Option<Cluster>>,
}

impl FakeApi {
    /// Starts an empty cluster without any operator's kinds.
    pub fn start() -> Self {
        // For the tests' own clients. A second installation fails, which is harmless.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new()),
            changed: tokio::sync::watch::Sender::new(0),
            watches: Mutex::default(),
            clock: AtomicI64::default(),
        });
        let (commands, received) = mpsc::unbounded_channel();
        let (started, address) = std::sync::mpsc::channel();
        let served = Arc::clone(&shared);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                started.send(address).unwrap();
                let ticking = Arc::clone(&served);
                tokio::spawn(async move { ticking.tick().await });
                http::serve(listener, served, received, address).await;
            });
        });
        Self { shared, address: address.recv().unwrap(), commands, cluster: Mutex::default() }
    }

    /// Returns `http://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Writes a kubeconfig file to `directory`.
    pub fn kubeconfig(&self, directory: &Path) -> PathBuf {
        self.kubeconfig_as(directory, &json!({"token": "of-the-test"}))
    }

    /// Writes a kubeconfig file with another `user`, such as one with a `tokenFile`.
    pub fn kubeconfig_as(&self, directory: &Path, user: &Value) -> PathBuf {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url()}}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{
                "name": "test", "context": {"cluster": "test", "user": "test", "namespace": "farrier"},
            }],
        });
        let path = directory.join("kubeconfig");
        std::fs::write(&path, config.to_string()).unwrap();
        path
    }

    /// Returns a new client.
    pub fn client(&self) -> kube::Client {
        let config = kube::Config::new(self.url().parse().unwrap());
        kube::Client::try_from(config).unwrap()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    /// Changes the cluster, lets the controllers react, and notifies the watches.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let done = {
            let mut state = self.state();
            let done = change(&mut state);
            if state.kubelets.as_ref().is_some_and(|kubelets| kubelets.automatic) {
                state.settle();
            }
            done
        };
        self.shared.announce();
        done
    }

    // Content of the cluster.

    /// Creates an object like `kubectl create`, and its namespace if missing.
    pub fn create(&self, object: Value) -> Value {
        self.create_as("kubectl-create", object)
    }

    pub fn create_as(&self, manager: &str, object: Value) -> Value {
        self.change(|state| {
            let kind = state.kind_of(&object).unwrap_or_else(|| panic!("an unknown kind: {object}"));
            let namespace = namespace_of(state, &kind, &object);
            let target = Target { kind: &kind, namespace: &namespace, name: "" };
            // The status is set in a separate write, as by a controller.
            let status = object["status"].clone();
            let author = Author { manager, subresource: None };
            let (made, _) =
                state.create(target, object, author).unwrap_or_else(|failure| panic!("{failure:?}"));
            if !kind.status || status.is_null() {
                return made.value();
            }
            let target = Target { name: &made.name, ..target };
            let author = Author { manager, subresource: Some("status") };
            let patch = json!({"status": status});
            state.merge_patch(target, &patch, author).unwrap().0.value()
        })
    }

    /// Stores objects without validation, for clusters of ten thousand nodes.
    pub fn load(&self, objects: impl IntoIterator<Item = Value>) {
        self.change(|state| {
            for object in objects {
                let kind = state.kind_of(&object).unwrap_or_else(|| panic!("an unknown kind: {object}"));
                namespace_of(state, &kind, &object);
                state.insert(&kind, object);
            }
        });
    }

    /// Applies an object server-side with force, as another manager.
    pub fn apply_as(&self, manager: &str, object: &Value) -> Value {
        self.change(|state| {
            let kind = state.kind_of(object).unwrap_or_else(|| panic!("an unknown kind: {object}"));
            let namespace = namespace_of(state, &kind, object);
            let name = object["metadata"]["name"].as_str().unwrap();
            let target = Target { kind: &kind, namespace: &namespace, name };
            let author = Author { manager, subresource: None };
            state
                .apply(target, object, author, true)
                .unwrap_or_else(|failure| panic!("{failure:?}"))
                .0
                .value()
        })
    }

    /// Applies a merge patch as another manager; `resource` as in `daemonsets.apps`.
    pub fn patch_as(
        &self,
        manager: &str,
        resource: &str,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Value {
        self.patch_subresource(manager, None, (resource, namespace, name), patch)
    }

    /// Applies a merge patch to the status.
    pub fn patch_status(&self, resource: &str, namespace: &str, name: &str, status: &Value) -> Value {
        let patch = json!({"status": status});
        self.patch_subresource("kubelet", Some("status"), (resource, namespace, name), &patch)
    }

    fn patch_subresource(
        &self,
        manager: &str,
        subresource: Option<&str>,
        (resource, namespace, name): (&str, &str, &str),
        patch: &Value,
    ) -> Value {
        self.change(|state| {
            let kind = state.resource(resource);
            let target = Target { kind: &kind, namespace, name };
            let author = Author { manager, subresource };
            state.merge_patch(target, patch, author).unwrap_or_else(|failure| panic!("{failure:?}")).0.value()
        })
    }

    /// Changes a node's kernel in nodeInfo and in the label.
    pub fn set_kernel(&self, node: &str, kernel: &str) {
        let label = objects::KERNEL_LABEL;
        let labels = json!({"metadata": {"labels": {label: objects::label_value(kernel)}}});
        self.patch_status("nodes", "", node, &json!({"nodeInfo": {"kernelVersion": kernel}}));
        self.patch_as("nfd-master", "nodes", "", node, &labels);
    }

    pub fn delete(&self, resource: &str, namespace: &str, name: &str) {
        self.change(|state| {
            let kind = state.resource(resource);
            let target = Target { kind: &kind, namespace, name };
            state.delete(target, &Value::Null).unwrap_or_else(|failure| panic!("{failure:?}"));
        });
    }

    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let state = self.state();
        state.get(&state.resource(resource), namespace, name).map(|object| object.value())
    }

    /// Returns all objects of a resource, by namespace and name.
    pub fn list(&self, resource: &str) -> Vec<Value> {
        let state = self.state();
        state.list(&state.resource(resource), "").map(|object| object.value()).collect()
    }

    /// Starts serving a custom resource, as after its definition was applied.
    pub fn install(&self, kind: Kind) {
        self.change(|state| state.install(kind));
    }

    /// Stops serving a custom resource such as `nicclusterpolicies.mellanox.com`.
    pub fn uninstall(&self, resource: &str) {
        self.change(|state| state.uninstall(resource));
    }

    // Controllers.

    /// Runs DaemonSets, either automatically after each write or through [`FakeApi::step`] and [`FakeApi::settle`].
    pub fn run_daemon_sets(&self, automatic: bool, decide: impl Fn(&Start) -> Fate + Send + 'static) {
        self.change(|state| state.kubelets = Some(Kubelets::new(automatic, decide)));
    }

    /// Advances all controllers by one step. Returns whether something changed.
    pub fn step(&self) -> bool {
        let changed = self.state().step();
        self.shared.announce();
        changed
    }

    /// Steps until nothing changes.
    pub fn settle(&self) {
        self.state().settle();
        self.shared.announce();
    }

    // Faults.

    /// Sets the server's clock ahead by this many seconds.
    pub fn set_clock(&self, ahead: i64) {
        self.shared.clock.store(ahead, Ordering::Relaxed);
    }

    /// Injects a fault for the next `times` matching requests. The returned number revokes the fault.
    pub fn fail(&self, requests: Requests, fault: ApiFailure, times: usize) -> u64 {
        self.state().faults.plan(requests, fault, Some(times))
    }

    /// Injects a fault for all matching requests until it is revoked.
    pub fn fail_always(&self, requests: Requests, fault: ApiFailure) -> u64 {
        self.state().faults.plan(requests, fault, None)
    }

    pub fn take_back(&self, fault: u64) {
        self.change(|state| {
            state.faults.take_back(fault);
            if let Some(jobs) = &mut state.jobs {
                jobs.take_back(fault);
            }
        });
    }

    pub fn clear_faults(&self) {
        self.state().faults.clear();
        self.shared.announce();
    }

    /// Denies a permission, such as (`list`, `nodes`), (`create`, `pods/eviction`), (`*`, `daemonsets.apps`).
    pub fn deny(&self, verb: &str, resource: &str) {
        self.state().faults.deny(verb, resource);
    }

    /// Restores a denied permission.
    pub fn allow(&self, verb: &str, resource: &str) {
        self.state().faults.allow(verb, resource);
    }

    /// Adds a user with a token and permissions such as `patch daemonsets.apps drivers/fleet`.
    pub fn add_person(&self, token: &str, user: &str, may: &[&str]) {
        self.state().faults.add_person(token, user, may);
    }

    /// Sets the user name that refusals contain.
    pub fn set_user(&self, user: &str) {
        self.state().faults.user = Some(user.to_owned());
    }

    /// Stalls the watches of a resource: they stay open but send nothing.
    pub fn hold_watches(&self, resource: &str) {
        self.state().faults.held.insert(resource.to_owned());
    }

    /// Resumes stalled watches, which then send everything that they held back.
    pub fn release_watches(&self, resource: &str) {
        self.state().faults.held.remove(resource);
        self.shared.announce();
    }

    /// Ends all connections and refuses new ones.
    pub fn go_away(&self) {
        self.command(false);
    }

    /// Comes back at the same address with the same state.
    pub fn come_back(&self) {
        self.command(true);
    }

    fn command(&self, up: bool) {
        let (done, wait) = std::sync::mpsc::channel();
        self.commands.send((up, done)).unwrap();
        wait.recv().unwrap();
    }

    /// Compacts the history: running and resumed watches get 410, and lists cannot be continued.
    pub fn compact(&self) {
        self.change(State::compact);
    }

    /// Compacts the history except for watches that are up to date.
    pub fn forget(&self) {
        self.change(|state| {
            state.compacted = state.revision;
            state.tokens_from = state.revision;
        });
    }

    /// Expires the continue tokens of started lists.
    pub fn expire_continue_tokens(&self) {
        self.change(|state| {
            state.revision += 1;
            state.tokens_from = state.revision;
        });
    }

    /// Sends a bookmark on every watch that requested bookmarks.
    pub fn bookmark(&self) {
        self.change(|state| state.bookmarks += 1);
    }

    // Requests.

    pub fn requests(&self) -> Vec<Record> {
        self.state().faults.log.clone()
    }

    pub fn clear_log(&self) {
        self.state().faults.log.clear();
    }

    /// Returns the number of matching requests so far.
    pub fn count(&self, requests: &Requests) -> usize {
        self.state().faults.log.iter().filter(|record| requests.matches(record)).count()
    }

    /// Returns all requests that changed an object or tried to.
    pub fn writes(&self) -> Vec<Record> {
        self.state().faults.log.iter().filter(|record| record.is_write()).cloned().collect()
    }

    /// Returns the number of currently open watches.
    pub fn open_watches(&self, resource: &str) -> usize {
        self.shared.watches.lock().unwrap().get(resource).copied().unwrap_or_default()
    }

    /// Waits for a condition, which is evaluated after every change on the server.
    ///
    /// # Panics
    /// After a minute, with `what` and the last requests.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let wait = async {
            while !condition(self) {
                changed.changed().await.unwrap();
            }
        };
        if tokio::time::timeout(Duration::from_mins(1), wait).await.is_err() {
            let requests = self.requests();
            let last: Vec<String> = requests.iter().rev().take(20).rev().map(Record::told).collect();
            panic!("waited a minute for {what}; the last requests:\n{}", last.join("\n"));
        }
    }
}

fn namespace_of(state: &mut State, kind: &Kind, object: &Value) -> String {
    if !kind.namespaced {
        return String::new();
    }
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
    let namespaces = state.resource("namespaces");
    if state.get(&namespaces, "", &namespace).is_none() {
        let made = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        state.insert(&namespaces, made);
    }
    namespace
}
