//! The simulated cluster that runs Jobs on a separate thread, and the faults that a test can inject.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{sync::watch, task::JoinSet};

use super::{
    FakeApi, Shared,
    containers::Engine,
    events::EventText,
    job_kubelet::JobKubelet,
    jobs::{Jobs, NodeDisruption, Refusal},
};

/// Interval at which deadlines are checked; all other changes wake the tasks directly.
const TICK: Duration = Duration::from_millis(100);

/// All controllers of Jobs' pods. Dropping the cluster removes everything that it started.
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
        // Wait for the thread, so that containers under construction are included in the cleanup.
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
                let kubelet = JobKubelet::new(&shared, &engine, &stopped, &pod);
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

/// An involuntary end of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disruption {
    /// Evicted by its kubelet, because the node is short of a resource, with this message.
    Evicted(String),
    /// The node is gone, and the container with it.
    NodeLost,
    /// A pod with a higher priority preempted the pod.
    Preempted,
    /// Evicted by `kubectl drain`.
    Drained,
}

impl FakeApi {
    /// Runs Jobs from now on. Each pod is a container in the Docker engine with the pod's own image, until the server is
    /// dropped.
    /// A cluster without Node objects behaves as if it had one node.
    pub fn run_jobs(&self) {
        let engine = Arc::new(Engine::new(self.address.port()));
        self.change(|state| state.jobs = Some(Jobs::new(Arc::clone(&engine))));
        *self.cluster.lock().unwrap() = Some(Cluster::start(&self.shared, engine));
    }

    fn order<T>(&self, order: impl FnOnce(&mut Jobs) -> T) -> T {
        self.change(|state| order(state.jobs.as_mut().expect("the test calls run_jobs first")))
    }

    fn number(&self) -> u64 {
        self.state().faults.number()
    }

    /// Refuses all pods with this message after `pods "x" is forbidden: `. The returned number revokes the refusal.
    pub fn refuse_pods(&self, why: &str) -> u64 {
        let id = self.number();
        self.order(|jobs| jobs.refusals.insert(id, Refusal::Words(why.to_owned())));
        id
    }

    /// Limits a namespace to `pods` pods that have not ended, with a quota of this name.
    pub fn limit_pods(&self, quota: &str, pods: usize) -> u64 {
        let id = self.number();
        self.order(|jobs| jobs.refusals.insert(id, Refusal::Quota(quota.to_owned(), pods)));
        id
    }

    /// Lets no pod find a node, with the scheduler's message: `0/3 nodes are available: ...`.
    pub fn unschedulable(&self, why: &str) -> u64 {
        let id = self.number();
        self.order(|jobs| jobs.unschedulable.insert(id, why.to_owned()));
        id
    }

    /// Cuts execs after these numbers of bytes of standard output: each exec uses up one number, in this order.
    pub fn cut_execs(&self, after: &[u64]) {
        self.order(|jobs| jobs.cuts.extend(after));
    }

    /// Returns the number of pending cuts.
    pub fn cuts_left(&self) -> usize {
        self.state().jobs.as_ref().map_or(0, |jobs| jobs.cuts.len())
    }

    /// Ends a pod of a Job that has a node.
    pub fn disrupt(&self, namespace: &str, pod: &str, how: Disruption) {
        self.change(|state| {
            let kind = state.resource("pods");
            let object = state.get(&kind, namespace, pod).expect("the pod exists");
            let disruption = match how {
                Disruption::Evicted(message) => NodeDisruption::Evicted(message),
                Disruption::NodeLost => NodeDisruption::NodeLost,
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
            state
                .jobs
                .as_mut()
                .expect("the test calls run_jobs first")
                .disrupted
                .insert(object.uid.clone(), disruption);
        });
    }

    /// Returns this cluster's containers in the engine, running or ended.
    pub fn containers(&self) -> Vec<String> {
        let engine = self.state().jobs.as_ref().map(|jobs| Arc::clone(&jobs.engine));
        engine.map(|engine| engine.containers()).unwrap_or_default()
    }
}
