//! A simulated fleet, small enough to play through every step of an upgrade: nodes that reboot, vanish and are cordoned
//! by people, pods that budgets hold, and a farrier that is killed between any two steps.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use crate::{
    image::{Drain, UpgradeSpec},
    plan::{
        Change, DriverPod, JobKind, JobState, NodeChange, NodeFacts, NodePrecondition, ObjectVersion,
        PlannedUpgrade, PodFacts, PullFailure, Taint, UPGRADE, UPGRADE_STATE_LABELS, Upgrade, UpgradeNode,
        UpgradeNote, WorkloadFacts,
    },
};

pub(super) const ROLLOUT: &str = "drivers/mft";
/// Seconds that a pod takes to end, and that the next one takes to become ready.
const POD: i64 = 20;

/// Simulated node with its pods.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) facts: NodeFacts,
    /// Whether another actor set the cordon.
    pub(super) by_person: bool,
    /// Set while an operator upgrades the node: whether the operator cordoned it.
    operator: Option<bool>,
    /// Whether the kernel of the node is known.
    pub(super) is_known: bool,
    pub(super) driver: Option<Pod>,
    pub(super) users: Vec<Pod>,
    /// Taint that the driver pod does not tolerate. An existing pod stays.
    pub(super) taint: Option<Taint>,
}

#[derive(Clone, Debug)]
pub(super) struct Pod {
    uid: String,
    pub(super) image: String,
    pub(super) created: i64,
    pub(super) ready_at: i64,
    ends_at: Option<i64>,
}

#[expect(clippy::struct_excessive_bools, reason = "the switches of a test are independent")]
pub(super) struct Fleet {
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) spec: UpgradeSpec,
    /// Name of the DaemonSet.
    pub(super) daemon_set: &'static str,
    /// Image of the DaemonSet.
    pub(super) image: String,
    /// Kernels that each image has modules for. An image without an entry has modules for all kernels.
    pub(super) modules: BTreeMap<String, BTreeSet<String>>,
    /// Images whose pods never become ready.
    pub(super) broken: BTreeSet<String>,
    /// Failure to pull the image of each pod that is not ready.
    pub(super) pull_failure: Option<PullFailure>,
    pub(super) is_registry_down: bool,
    /// Image that a webhook writes into new pods.
    pub(super) rewritten: Option<String>,
    /// Nodes whose old driver farrier ended, and whose new driver was not checked yet.
    pub(super) unchecked: BTreeSet<String>,
    /// Whether a budget blocks the eviction of all device users.
    pub(super) held: bool,
    pub(super) paused: bool,
    pub(super) cannot_list_pods: Option<String>,
    /// States of the check Jobs, by name.
    pub(super) jobs: BTreeMap<String, JobState>,
    /// Names of the forecast Jobs. A forecast succeeds when no pod holds the driver.
    forecasts: BTreeSet<String>,
    /// Whether something outside of pods holds every driver.
    pub(super) stuck: bool,
    /// State of a new check Job; `None` if no Job is created.
    pub(super) new_job: Option<JobState>,
    pub(super) now: i64,
    counter: u64,
}

impl Fleet {
    /// Creates nodes `n0`, `n1`... with kernel `k1`, image `v1`, and a device user on each. The upgrade's target is `v2`.
    pub(super) fn new(nodes: usize, upgrade: serde_json::Value) -> Self {
        let mut fleet = Self {
            nodes: BTreeMap::new(),
            spec: serde_json::from_value(upgrade).unwrap(),
            daemon_set: "mft",
            image: "v1".to_owned(),
            modules: BTreeMap::new(),
            broken: BTreeSet::new(),
            pull_failure: None,
            is_registry_down: false,
            rewritten: None,
            unchecked: BTreeSet::new(),
            held: false,
            paused: false,
            cannot_list_pods: None,
            jobs: BTreeMap::new(),
            forecasts: BTreeSet::new(),
            stuck: false,
            new_job: Some(JobState::Running),
            now: 1_000_000,
            counter: 0,
        };
        for number in 0..nodes {
            fleet.join(&format!("n{number}"), "k1");
        }
        fleet.pass_time(1000);
        fleet.image = "v2".to_owned();
        fleet
    }

    fn pod(&mut self, image: &str) -> Pod {
        self.counter += 1;
        Pod {
            uid: format!("u{}", self.counter),
            image: image.to_owned(),
            created: self.now,
            ready_at: self.now + POD,
            ends_at: None,
        }
    }

    pub(super) fn join(&mut self, name: &str, kernel: &str) {
        let image = self.image.clone();
        self.unchecked.remove(name);
        let (driver, user) = (self.pod(&image), self.pod("app"));
        let facts = NodeFacts {
            name: name.to_owned(),
            kernel_version: kernel.to_owned(),
            labels: [("name".to_owned(), name.to_owned())].into(),
            ..NodeFacts::default()
        };
        let node = Node {
            facts,
            by_person: false,
            operator: None,
            is_known: true,
            driver: Some(driver),
            users: vec![user],
            taint: None,
        };
        self.nodes.insert(name.to_owned(), node);
    }

    pub(super) fn reboot(&mut self, name: &str, kernel: &str, is_known: bool) {
        let now = self.now;
        let Some(node) = self.nodes.get_mut(name) else { return };
        node.facts.kernel_version = kernel.to_owned();
        node.is_known = is_known;
        if let Some(driver) = &mut node.driver {
            driver.ready_at = now + 2 * POD;
        }
    }

    /// Cordons or uncordons a node, as a person would.
    pub(super) fn cordon(&mut self, name: &str, on: bool) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        let believes = UpgradeNote::of(&node.facts).is_some_and(|note| note.cordoned);
        if on && !node.facts.unschedulable {
            if believes {
                // Removed and set again between two reconciles: no state of the node shows that.
                return;
            }
            node.by_person = true;
        }
        if !on {
            node.by_person = false;
        }
        node.facts.unschedulable = on;
    }

    /// Starts or ends an operator's own upgrade of a node. A cordon that the operator finds stays.
    pub(super) fn operate(&mut self, name: &str, on: bool) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        let state = if on { "drain-required" } else { "upgrade-done" };
        node.facts.labels.insert(UPGRADE_STATE_LABELS[0].to_owned(), state.to_owned());
        match (on, node.operator.take()) {
            (true, None) => {
                node.operator = Some(!node.facts.unschedulable);
                node.by_person |= !node.facts.unschedulable;
                node.facts.unschedulable = true;
            }
            (true, before) => node.operator = before,
            (false, Some(true)) => (node.facts.unschedulable, node.by_person) = (false, false),
            (false, _) => {}
        }
    }

    /// Makes a node not Ready, or Ready again.
    pub(super) fn away(&mut self, name: &str, on: bool) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.facts.not_ready = on;
        }
    }

    pub(super) fn delete_driver(&mut self, name: &str) {
        let ends_at = Some(self.now + POD);
        if let Some(driver) = self.nodes.get_mut(name).and_then(|node| node.driver.as_mut()) {
            driver.ends_at = driver.ends_at.or(ends_at);
        }
    }

    fn fits(&self, image: &str, kernel: &str) -> bool {
        self.modules.get(image).is_none_or(|kernels| kernels.contains(kernel))
    }

    pub(super) fn is_ready(&self, node: &Node, pod: &Pod) -> bool {
        self.now >= pod.ready_at
            && pod.ends_at.is_none()
            && !node.facts.not_ready
            && !self.broken.contains(&pod.image)
            && self.fits(&pod.image, &node.facts.kernel_version)
    }

    /// Advances time, and simulates the controllers and kubelets.
    pub(super) fn pass_time(&mut self, seconds: i64) {
        self.now += seconds;
        let now = self.now;
        let has_ended = |pod: &Pod| pod.ends_at.is_some_and(|ends| ends <= now);
        let image = self.rewritten.clone().unwrap_or_else(|| self.image.clone());
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        let mut moved = 0;
        for name in &names {
            let node = self.nodes.get_mut(name).unwrap();
            if node.facts.not_ready {
                continue;
            }
            let before = node.users.len();
            node.users.retain(|user| !has_ended(user));
            moved += before - node.users.len();
            if node.driver.as_ref().is_some_and(has_ended) {
                node.driver = None;
            } else if node.driver.is_none() && node.taint.is_none() {
                let driver = self.pod(&image);
                self.nodes.get_mut(name).unwrap().driver = Some(driver);
            }
        }
        // Evicted pods return to a node that accepts pods.
        let open = names.iter().find(|name| !self.nodes[*name].facts.unschedulable).cloned();
        if let Some(open) = open {
            for _ in 0..moved {
                let user = self.pod("app");
                self.nodes.get_mut(&open).unwrap().users.push(user);
            }
        }
    }

    fn facts(&self, node: &Node) -> Option<PodFacts> {
        let pod = node.driver.as_ref()?;
        let ready = self.is_ready(node, pod);
        let at = |second| Timestamp::from_second(second).unwrap();
        Some(PodFacts {
            namespace: "drivers".to_owned(),
            name: format!("mft-{}", node.facts.name),
            version: ObjectVersion { uid: pod.uid.clone(), resource_version: "1".to_owned() },
            daemon_set: "ds".to_owned(),
            node: node.facts.name.clone(),
            bound: true,
            probed: Vec::new(),
            pull_secrets: 0,
            images: [("driver".to_owned(), pod.image.clone())].into(),
            ready,
            stable_since: ready.then(|| at(pod.ready_at)),
            created: Some(at(pod.created)),
            deleting: pod.ends_at.is_some(),
            messages: if ready { Vec::new() } else { vec!["driver: no such device".to_owned()] },
            pull_failure: self.pull_failure.filter(|_| !ready),
        })
    }

    /// Returns the state of the node's unload forecast.
    fn unload_forecast(&self, node: &Node) -> Option<JobState> {
        let name = UpgradeNote::of(&node.facts)?.job_name(JobKind::Forecast, &node.facts.name);
        let is_free = node.users.is_empty() && !self.stuck;
        let state = if is_free { JobState::Succeeded } else { JobState::Running };
        self.forecasts.contains(&name).then_some(state)
    }

    /// Returns the pods that must leave the node. Where resource requests do not identify them, a forecast finds them.
    fn users(&self, node: &Node) -> Vec<WorkloadFacts> {
        let are_known = match self.spec.drain {
            Drain::None => false,
            Drain::DeviceUsers => self.unload_forecast(node).is_some(),
            Drain::Node => true,
        };
        let users = node.users.iter().filter(|_| are_known).map(|user| WorkloadFacts {
            namespace: "apps".to_owned(),
            name: user.uid.clone(),
            uid: user.uid.clone(),
            deleting: user.ends_at.is_some(),
            ..WorkloadFacts::default()
        });
        users.collect()
    }

    /// Computes the plan.
    pub(super) fn plan(&self) -> PlannedUpgrade {
        let pods: BTreeMap<&str, PodFacts> = self
            .nodes
            .values()
            .filter_map(|node| Some((node.facts.name.as_str(), self.facts(node)?)))
            .collect();
        let users: BTreeMap<&str, Vec<WorkloadFacts>> =
            self.nodes.values().map(|node| (node.facts.name.as_str(), self.users(node))).collect();
        let nodes = self.nodes.values().map(|node| {
            let name = node.facts.name.as_str();
            let pod = pods.get(name);
            let check = UpgradeNote::of(&node.facts)
                .and_then(|note| self.jobs.get(&note.job_name(JobKind::Check, name)).cloned());
            UpgradeNode {
                facts: &node.facts,
                target: &self.image,
                is_target_pending: false,
                hand_over: None,
                driver: pod.map(|pod| {
                    let image = pod.images["driver"].as_str();
                    let lacks_modules = node.is_known && !self.fits(image, &node.facts.kernel_version);
                    DriverPod { pod, image, is_current: image == self.image, lacks_modules }
                }),
                taint: node.taint.as_ref(),
                fits: node.is_known.then(|| self.fits(&self.image, &node.facts.kernel_version)),
                users: users[name].iter().collect(),
                unload_forecast: self.unload_forecast(node),
                holders: &[],
                check,
            }
        });
        let upgrade = Upgrade {
            by: "farrier",
            namespace: "drivers",
            daemon_set: self.daemon_set,
            spec: &self.spec,
            deadline: SignedDuration::from_secs(120),
            stable_for: SignedDuration::from_secs(30),
            missing: self.nodes.values().filter(|node| node.driver.is_none()).count(),
            paused: self.paused,
            is_registry_down: self.is_registry_down,
            cannot_list_pods: self.cannot_list_pods.as_deref(),
            now: Timestamp::from_second(self.now).unwrap(),
            nodes: nodes.collect(),
        };
        upgrade.plan()
    }

    /// Applies a change, if the API server would accept it.
    pub(super) fn make(&mut self, change: &Change) {
        match change {
            Change::Node(change) => self.mark(change),
            Change::Restart(pod) => self.evict(&pod.uid),
            Change::Check(check) if check.name.starts_with("farrier-forecast-") => {
                assert!(check.driver_pod.is_some());
                self.forecasts.insert(check.name.clone());
            }
            Change::Check(check) => {
                let made = self.new_job.clone().map(|job| (check.name.clone(), job));
                self.jobs.extend(made);
            }
            _ => panic!("no change of an upgrade: {change:?}"),
        }
    }

    fn mark(&mut self, change: &NodeChange) {
        let Some(node) = self.nodes.get_mut(&change.name) else { return };
        if change.precondition != Some(NodePrecondition::of(&node.facts)) {
            return;
        }
        for (changes, found) in
            [(&change.labels, &mut node.facts.labels), (&change.annotations, &mut node.facts.annotations)]
        {
            for (key, value) in changes {
                match value {
                    Some(value) => drop(found.insert(key.clone(), value.clone())),
                    None => drop(found.remove(key)),
                }
            }
        }
        if let Some(cordon) = change.cordon {
            assert!(!node.by_person, "the cordon of {} is someone else's", change.name);
            assert!(node.operator.is_none(), "an operator upgrades {}", change.name);
            node.facts.unschedulable = cordon;
        }
        let has_driver = node.driver.as_ref().is_some_and(|driver| driver.ends_at.is_none());
        match node.facts.labels.get(UPGRADE).map_or("", String::as_str) {
            "not-drained" if !has_driver => {}
            "" | "checked" | "failed" | "not-drained" => {
                self.unchecked.remove(&change.name);
            }
            _ => {}
        }
    }

    fn evict(&mut self, uid: &str) {
        let ends_at = Some(self.now + POD);
        let leaving = self.nodes.values().flat_map(|node| &node.users).any(|user| user.ends_at.is_some());
        let is_refused = self.held || leaving;
        for node in self.nodes.values_mut() {
            let (fits, name) = (&self.modules, &node.facts.name);
            if let Some(driver) = node.driver.as_mut().filter(|driver| driver.uid == uid) {
                let kernels = fits.get(&self.image);
                let fits = kernels.is_none_or(|kernels| kernels.contains(&node.facts.kernel_version));
                assert!(node.operator.is_none(), "an operator upgrades {name}");
                assert!(fits && node.is_known, "{name} loses its driver for one that does not fit");
                let can_restart = node.taint.is_none() && !node.facts.not_ready;
                assert!(can_restart, "{name} loses its driver and gets no other");
                let is_held = self.stuck || !node.users.is_empty();
                assert!(self.spec.forecast.is_none() || !is_held, "{name} loses a driver that is held");
                driver.ends_at = driver.ends_at.or(ends_at);
                self.unchecked.insert(name.clone());
            }
            for user in node.users.iter_mut().filter(|user| user.uid == uid && !is_refused) {
                assert!(node.operator.is_none(), "an operator drains {name}");
                user.ends_at = user.ends_at.or(ends_at);
            }
        }
    }

    /// Reconciles once, making only the first `steps` changes.
    pub(super) fn reconcile(&mut self, steps: usize) -> PlannedUpgrade {
        let plan = self.plan();
        for change in plan.changes().take(steps) {
            self.make(change);
        }
        plan
    }

    /// Reconciles until nothing has changed for longer than any timeout, for at most a day.
    pub(super) fn settle(&mut self) -> PlannedUpgrade {
        let mut quiet = 0;
        for _ in 0..8640 {
            self.pass_time(10);
            let plan = self.reconcile(usize::MAX);
            quiet = if plan.changes().next().is_none() { quiet + 1 } else { 0 };
            if quiet == 48 {
                return plan;
            }
        }
        panic!("no end of changes: {:#?}", self.plan());
    }

    /// Reconciles until the condition holds.
    pub(super) fn settle_until(&mut self, holds: impl Fn(&Self) -> bool) {
        for _ in 0..1000 {
            if holds(self) {
                return;
            }
            self.pass_time(10);
            self.reconcile(usize::MAX);
        }
        panic!("it does not come to that: {:#?}", self.plan());
    }

    /// Returns the number of nodes in progress, and the number of nodes that are in progress or without a working driver.
    pub(super) fn down(&self) -> (usize, usize) {
        let is_taken =
            |node: &&Node| UpgradeNote::of(&node.facts).is_some_and(|note| note.state.is_in_progress());
        let works = |node: &Node| node.driver.as_ref().is_some_and(|driver| self.is_ready(node, driver));
        let taken = self.nodes.values().filter(is_taken).count();
        (taken, self.nodes.values().filter(|node| is_taken(node) || !works(node)).count())
    }

    /// Returns the node's upgrade label.
    pub(super) fn state(&self, name: &str) -> &str {
        self.nodes[name].facts.labels.get(UPGRADE).map_or("", String::as_str)
    }
}

/// Returns the minimal settings of an upgrade with a drain, plus `more`.
pub(super) fn draining(more: serde_json::Value) -> serde_json::Value {
    let serde_json::Value::Object(more) = more else { panic!("{more} is no mapping") };
    let mut upgrade = json!({"drain": "node", "timeout": "5m"});
    upgrade.as_object_mut().unwrap().extend(more);
    upgrade
}
