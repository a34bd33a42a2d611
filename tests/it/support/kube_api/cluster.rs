//! The Jobs of this server run: the thread that plays their cluster, and what a test may order of it.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{sync::watch, task::JoinSet};

use super::{
    FakeApi, Shared,
    containers::Engine,
    events::EventText,
    jobs::{Blow, Jobs, Refusal},
    node::Kubelet,
};

/// How often deadlines are looked at; everything else wakes the tasks.
const TICK: Duration = Duration::from_millis(100);

/// Everything that makes pods of Jobs. What it started is gone when it is dropped.
pub struct Cluster {
    engine: Arc<Engine>,
    stop: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Cluster {
    pub fn start(shared: &Arc<Shared>, engine: Arc<Engine>) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (shared, own) = (Arc::clone(shared), Arc::clone(&engine));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(work(shared, own, stopped));
        });
        Self { engine, stop, thread: Some(thread) }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        // Containers that are just being made are there when it has ended.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.engine.clear();
    }
}

async fn work(shared: Arc<Shared>, engine: Arc<Engine>, mut stopped: watch::Receiver<bool>) {
    let mut changed = shared.changed.subscribe();
    let (mut tasks, mut known) = (JoinSet::new(), BTreeSet::new());
    while !*stopped.borrow() {
        changed.mark_unchanged();
        let (news, pods) = {
            let mut state = shared.state.lock().unwrap();
            let before = state.revision;
            state.step_jobs(Timestamp::now());
            (state.revision != before, state.job_pods())
        };
        if news {
            shared.announce();
        }
        for pod in pods.into_iter().filter(|pod| !pod.node_name.is_empty()) {
            if known.insert(pod.uid.clone()) {
                let kubelet = Kubelet::new(&shared, &engine, &stopped, &pod);
                tasks.spawn(kubelet.run());
            }
        }
        tokio::select! {
            _ = changed.changed() => {}
            _ = stopped.changed() => {}
            Some(done) = tasks.join_next() => done.unwrap(),
            () = tokio::time::sleep(TICK) => {}
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// What ends a pod that did nothing wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disruption {
    /// By its kubelet, in these words: the node is short of something.
    Evicted(String),
    /// The node is gone, and the container with it.
    NodeLost,
    /// A pod with a higher priority wants its place.
    Preempted,
    /// `kubectl drain`.
    Drained,
}

impl FakeApi {
    /// Runs Jobs from now on: each pod is a container in the Docker engine, from its own image, until this server is
    /// dropped. A cluster without Node objects has one node all the same.
    pub fn run_jobs(&self) {
        let engine = Arc::new(Engine::new(self.address.port()));
        self.change(|state| state.jobs = Some(Jobs::new(Arc::clone(&engine))));
        *self.cluster.lock().unwrap() = Some(Cluster::start(&self.shared, engine));
    }

    fn order<T>(&self, order: impl FnOnce(&mut Jobs) -> T) -> T {
        self.change(|state| order(state.jobs.as_mut().expect("run_jobs comes first")))
    }

    fn number(&self) -> u64 {
        self.state().faults.number()
    }

    /// No pod is admitted, in these words behind `pods "x" is forbidden: `. The number returned takes it back.
    pub fn refuse_pods(&self, why: &str) -> u64 {
        let id = self.number();
        self.order(|jobs| jobs.refusals.insert(id, Refusal::Words(why.to_owned())));
        id
    }

    /// A quota lets so many pods be in a namespace that have not ended.
    pub fn limit_pods(&self, quota: &str, pods: usize) -> u64 {
        let id = self.number();
        self.order(|jobs| jobs.refusals.insert(id, Refusal::Quota(quota.to_owned(), pods)));
        id
    }

    /// No pod finds a node, in the scheduler's words: `0/3 nodes are available: ...`.
    pub fn unschedulable(&self, why: &str) -> u64 {
        let id = self.number();
        self.order(|jobs| jobs.unschedulable.insert(id, why.to_owned()));
        id
    }

    /// An exec is cut when it has sent so many bytes of its standard output: once for each number, in this order.
    pub fn cut_execs(&self, after: &[u64]) {
        self.order(|jobs| jobs.cuts.extend(after));
    }

    /// How many cuts have not come yet.
    pub fn cuts_left(&self) -> usize {
        self.state().jobs.as_ref().map_or(0, |jobs| jobs.cuts.len())
    }

    /// Ends a pod of a Job that has a node.
    pub fn disrupt(&self, namespace: &str, pod: &str, how: Disruption) {
        self.change(|state| {
            let kind = state.resource("pods");
            let object = state.get(&kind, namespace, pod).expect("the pod is there");
            let blow = match how {
                Disruption::Evicted(message) => Blow::Evicted(message),
                Disruption::NodeLost => Blow::NodeLost,
                Disruption::Preempted => {
                    let message = "default-scheduler: preempting to accommodate a higher priority pod";
                    state.mark_disrupted(&object, "PreemptionByScheduler", message);
                    let by = format!(
                        "Preempted by pod 00000000-0000-4000-8000-ffffffffffff on node {}",
                        object.node_name
                    );
                    let told = EventText { by: "default-scheduler", reason: "Preempted", message: &by };
                    state.tell("Pod", &object.value(), told);
                    return state.terminate(&object, None);
                }
                Disruption::Drained => {
                    state.mark_disrupted(&object, "EvictionByEvictionAPI", "Eviction API: evicting");
                    return state.terminate(&object, None);
                }
            };
            state.jobs.as_mut().expect("run_jobs comes first").struck.insert(object.uid.clone(), blow);
        });
    }

    /// Containers of this cluster that are in the engine, running or ended.
    pub fn containers(&self) -> Vec<String> {
        let engine = self.state().jobs.as_ref().map(|jobs| Arc::clone(&jobs.engine));
        engine.map(|engine| engine.containers()).unwrap_or_default()
    }
}
