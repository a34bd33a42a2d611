//! An in-memory cluster, and a boot check that waits for the test.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use farrier_cluster::{ApiError, Cluster, ClusterError};
use farrier_core::plan::{
    ARCH_LABEL, Change, ClusterSnapshot, Container, DaemonSetCopy, DaemonSetFacts, KERNEL_LABEL,
    LiveDaemonSet, NodeChange, NodeFacts, OS_ID_LABEL, OS_VERSION_LABEL, ObjectVersion, OwnedFields,
    Placement, PodCount, PodFacts, SnapshotScope, UpdateStrategy,
};
use kmod::{BootOutcome, BootReport, ModuleBoot};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use crate::services::{BootCheck, BootChecker, BuildError};

pub const FIRST: &str = "registry.test/x:first";

/// A change of the cluster in the middle of a test.
pub type Happening = fn(&mut State);

/// An in-memory cluster.
pub struct Fleet(watch::Sender<State>);

#[derive(Clone, Debug, Default)]
pub struct State {
    pub snapshot: ClusterSnapshot,
    /// Whether the state changed since the last snapshot.
    pub changed: bool,
    pub snapshots_taken: usize,
    pub writes: Vec<String>,
    pub scope: Vec<SnapshotScope>,
    /// A change to make before the snapshot with this number.
    pub before: Option<(usize, Happening)>,
    /// Number of upcoming snapshots that change a label of every node.
    pub churn: usize,
    /// DaemonSets and nodes whose writes fail and pods whose eviction fails, with the error.
    pub refused: BTreeMap<String, ApiError>,
    /// Number of writes and evictions that failed with such an error.
    pub refusals: usize,
    /// Time that each write takes.
    pub write_time: Option<Duration>,
    /// Times of eviction requests.
    pub evictions: Vec<Instant>,
}

impl State {
    pub fn node(&mut self, name: &str, release: &str) {
        self.changed = true;
        self.snapshot.nodes.retain(|node| node.name != name);
        let labels = [
            (KERNEL_LABEL, release),
            (OS_ID_LABEL, "debian"),
            (OS_VERSION_LABEL, "12"),
            (ARCH_LABEL, "amd64"),
        ];
        let node = NodeFacts {
            name: name.to_owned(),
            labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            kernel_version: release.to_owned(),
            architecture: "amd64".to_owned(),
            ..NodeFacts::default()
        };
        self.snapshot.nodes.push(node.into());
    }

    pub fn daemon_set(&mut self, name: &str, kernel: &str) {
        self.snapshot.daemon_sets.push(DaemonSetFacts {
            namespace: "drivers".to_owned(),
            name: name.to_owned(),
            containers: vec![Container {
                name: "driver".to_owned(),
                image: FIRST.to_owned(),
                why_not_editable: None,
                tagged: false,
            }],
            placement: Placement {
                node_selector: [(KERNEL_LABEL.to_owned(), kernel.to_owned())]
                    .into_iter()
                    .filter(|(_, kernel)| !kernel.is_empty())
                    .collect(),
                ..Placement::default()
            },
            owner: None,
            paused: false,
            live: None,
        });
    }

    /// Turns the DaemonSet into a live one that does not restart its own pods, and adds a pod `<DaemonSet>-<node>` that
    /// runs this image.
    pub fn pod(&mut self, daemon_set: &str, node: &str, image: &str) {
        let found = self.snapshot.daemon_sets.iter_mut().find(|found| found.name == daemon_set).unwrap();
        let version = |name: &str| ObjectVersion { uid: name.to_owned(), resource_version: "1".to_owned() };
        found.live = Some(LiveDaemonSet {
            version: version(daemon_set),
            annotations: BTreeMap::new(),
            labels: BTreeMap::new(),
            match_labels: BTreeMap::new(),
            update: UpdateStrategy::OnDelete,
            max_unavailable: PodCount::Number(1),
            desired: 0,
            deleting: false,
            owned: OwnedFields::default(),
            manifest: serde_json::json!({"spec": {}}).into(),
        });
        let name = format!("{daemon_set}-{node}");
        self.snapshot.pods.push(PodFacts {
            namespace: found.namespace.clone(),
            version: version(&name),
            name,
            daemon_set: daemon_set.to_owned(),
            node: node.to_owned(),
            bound: true,
            probed: Vec::new(),
            pull_secrets: 0,
            images: [("driver".to_owned(), image.to_owned())].into(),
            ready: true,
            stable_since: None,
            created: None,
            deleting: false,
            messages: Vec::new(),
            pull_failure: None,
        });
    }

    pub fn set_image(&mut self, name: &str, image: &str) {
        let found = self.snapshot.daemon_sets.iter_mut().find(|found| found.name == name);
        image.clone_into(&mut found.unwrap().containers[0].image);
    }

    pub fn image(&self, name: &str) -> &str {
        let found = self.snapshot.daemon_sets.iter().find(|found| found.name == name);
        &found.unwrap().containers[0].image
    }
}

impl Fleet {
    pub fn new(set_up: impl FnOnce(&mut State)) -> Arc<Self> {
        let mut state = State::default();
        set_up(&mut state);
        Arc::new(Self(watch::channel(state).0))
    }

    pub fn change(&self, change: impl FnOnce(&mut State)) {
        self.0.send_modify(change);
    }

    pub fn state(&self) -> State {
        self.0.borrow().clone()
    }

    /// Waits up to an hour of the test's clock for a condition.
    pub async fn until(&self, condition: impl FnMut(&State) -> bool) -> State {
        let mut states = self.0.subscribe();
        let found = tokio::time::timeout(Duration::from_hours(1), states.wait_for(condition)).await;
        found.unwrap_or_else(|_| panic!("condition was never met: {:?}", self.state())).unwrap().clone()
    }
}

#[async_trait::async_trait]
impl Cluster for Fleet {
    fn describe(&self) -> String {
        "a cluster in memory".to_owned()
    }

    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError> {
        self.0.send_modify(|state| {
            state.changed = false;
            state.snapshots_taken += 1;
            if let Some((_, change)) = state.before.take_if(|(number, _)| *number == state.snapshots_taken) {
                change(state);
                state.changed = false;
            }
            if state.churn > 0 {
                state.churn -= 1;
                for node in &mut state.snapshot.nodes {
                    node.labels.insert("churn".to_owned(), state.snapshots_taken.to_string());
                }
            }
        });
        Ok(self.state().snapshot)
    }

    async fn apply(&self, change: &Change) -> Result<(), ClusterError> {
        let name = match change {
            Change::DaemonSet(change) => &change.name,
            Change::Restart(restart) => {
                self.0.send_modify(|state| state.evictions.push(Instant::now()));
                &restart.name
            }
            Change::Copy(DaemonSetCopy { name, .. }) | Change::Node(NodeChange { name, .. }) => name,
            _ => panic!("{change:?}"),
        };
        if let Some(error) = self.state().refused.get(name) {
            self.0.send_modify(|state| state.refusals += 1);
            return Err(ClusterError::Api { action: format!("write {name}"), error: error.clone() });
        }
        // Another client deletes the copy, or reverts the change of the node, at once.
        if matches!(change, Change::Copy(_) | Change::Node(_)) {
            self.change(|state| {
                state.changed = true;
                state.writes.push(name.clone());
            });
            return Ok(());
        }
        let write_time = self.state().write_time;
        if let Some(write_time) = write_time {
            tokio::time::sleep(write_time).await;
        }
        let Change::DaemonSet(change) = change else {
            self.change(|state| {
                state.changed = true;
                state.snapshot.pods.retain(|pod| pod.name != *name);
            });
            return Ok(());
        };
        self.0.send_modify(|state| {
            state.changed = true;
            state.writes.push(change.images["driver"].clone());
            let found =
                state.snapshot.daemon_sets.iter_mut().find(|found| found.name == change.name).unwrap();
            assert_eq!(found.containers[0].image, change.expected["driver"]);
            found.containers[0].image.clone_from(&change.images["driver"]);
        });
        Ok(())
    }

    async fn changed(&self) {
        self.0.subscribe().wait_for(|state| state.changed).await.unwrap();
    }

    fn set_snapshot_scope(&self, scope: &SnapshotScope) {
        self.0.send_modify(|state| state.scope.push(scope.clone()));
    }
}

/// A boot checker that waits until the test opens the gate.
#[derive(Default)]
pub struct Gate {
    pub asked: Notify,
    pub open: Notify,
}

#[async_trait::async_trait]
impl BootChecker for Gate {
    async fn boot_check(&self, check: &BootCheck<'_>) -> Result<BootReport, BuildError> {
        self.asked.notify_one();
        self.open.notified().await;
        let booted = |module: &String| ModuleBoot {
            path: module.clone(),
            name: "m".to_owned(),
            outcome: BootOutcome::Loaded,
        };
        Ok(BootReport {
            kernel: check.target.release.to_string(),
            accelerator: "kvm".to_owned(),
            milliseconds: 900,
            modules: check.modules.iter().map(booted).collect(),
        })
    }
}
