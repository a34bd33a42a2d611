//! Pure: in which order the nodes of a rollout get another driver, and what is made sure of before and after.

use std::{collections::BTreeMap, num::NonZeroU32};

use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::definition::has_labels;
use crate::definition::{
    Period,
    checked::{CronSchedule, DnsName, LabelKey, LabelValue, ResourcePattern, Share, fits},
};

/// How the nodes of a DaemonSet get another driver, one after the other. The DaemonSet's update strategy must be `OnDelete`.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UpgradeSpec {
    /// The nodes that go first, so many or those with these labels. The others follow when all of these are done.
    pub canary: Option<Canary>,
    /// How many nodes may be without a working driver at the same time: a number, or a share of the DaemonSet's nodes such as
    /// `10%`, which is rounded down, to 1 at least. Nodes whose driver does not work anyhow count, and go first.
    #[serde(default)]
    pub max_parallel: MaxParallel,
    /// What must hold on a node, beside that its new pod is ready for `stableFor`, until it is given back.
    #[serde(default)]
    pub wait_for: WaitFor,
    /// How long farrier waits after a node before it begins the next.
    #[serde(default = "no_time")]
    pub between: Period,
    /// When nodes are begun; at any time when absent. A node that was begun is finished.
    pub window: Option<Window>,
    /// Which pods leave a node before its driver does. With any but `none`, the node is cordoned meanwhile.
    #[serde(default)]
    pub drain: Drain,
    /// Only pods with these labels leave; all when absent.
    pub pod_selector: Option<LabelSelector>,
    /// Resources by whose requests the users of the device are found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_resources: Vec<ResourcePattern>,
    /// A CronJob of the DaemonSet's namespace that runs `driver-entrypoint forecast`: farrier makes a Job of it on a node, and takes
    /// the driver away when it has succeeded. With `drain: device-users`, pods that it finds at the device leave, too.
    pub forecast: Option<DnsName>,
    /// How long an evicted pod may take to end, in seconds; as the pod itself says when absent.
    pub grace_seconds: Option<u32>,
    /// How long pods may take to leave a node, and `waitFor` may take. A node that they do not leave is given back as it was, and
    /// tried again after so long, when the others have had their turn.
    #[serde(default = "default_timeout")]
    pub timeout: Period,
    /// What is done when a node's new driver does not work, or `waitFor` says so.
    #[serde(default)]
    pub on_failure: OnFailure,
}

/// Nodes that go first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a number of nodes above zero, or labels of nodes: {matchLabels: {KEY: VALUE}}"
)]
pub enum Canary {
    /// So many.
    Nodes(#[serde(deserialize_with = "count")] NonZeroU32),
    /// Those with these labels.
    Labels(LabelSelector),
}

/// Objects by label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelSelector {
    /// Every one of these labels must be there with this value.
    pub match_labels: BTreeMap<LabelKey, LabelValue>,
}

/// A number of nodes, or a share of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a number of nodes above zero, or a share of them from `1%` to `100%`")]
pub enum MaxParallel {
    /// So many.
    Nodes(#[serde(deserialize_with = "count")] NonZeroU32),
    /// So many of a hundred.
    Share(Share),
}

/// What is waited for on a node with its new driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WaitFor {
    /// Nothing more than the pod.
    #[default]
    PodsReady,
    /// A Job that farrier makes from this CronJob of the DaemonSet's namespace, on the node: it must succeed.
    Job(DnsName),
    /// The node's annotation `farrier.dev/upgrade-checked`, with the new image as its value.
    Annotation,
}

/// When nodes are begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Window {
    /// When it opens: the five fields of cron and a time zone, as in `0 22 * * 1-5 Europe/Berlin`.
    pub opens: CronSchedule,
    /// How long it stays open.
    pub duration: Period,
}

/// Which pods leave a node before its driver does. Those of DaemonSets and static pods never do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Drain {
    /// None.
    #[default]
    None,
    /// Those that request one of `deviceResources`, and those that `forecast` finds.
    DeviceUsers,
    /// All.
    Node,
}

/// What is done when a new driver does not work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailure {
    /// The image before it is put back; nodes that have the new one get that, in the same order.
    #[default]
    PutBack,
    /// No other node is begun, until the annotation `farrier.dev/upgrade` is removed from the node, or the DaemonSet has another image.
    Stop,
}

/// A number; among other forms YAML's arrives as text.
fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<NonZeroU32, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Count {
        Number(NonZeroU32),
        Text(String),
    }
    match Count::deserialize(deserializer)? {
        Count::Number(number) => Ok(number),
        Count::Text(text) => text.parse().map_err(D::Error::custom),
    }
}

fn no_time() -> Period {
    Period::seconds(0)
}

fn default_timeout() -> Period {
    Period::seconds(600)
}

impl UpgradeSpec {
    /// The same, where its fields go together.
    pub(super) fn checked(self) -> Result<Self, String> {
        let is_empty = |labels: &LabelSelector| labels.match_labels.is_empty();
        let for_drain =
            [("podSelector", self.pod_selector.is_some()), ("graceSeconds", self.grace_seconds.is_some())];
        if let (Drain::None, Some((field, _))) = (self.drain, for_drain.iter().find(|(_, given)| *given)) {
            return Err(format!("upgrade: `{field}` says nothing with `drain: none`"));
        }
        match (self.drain, self.device_resources.is_empty()) {
            (Drain::DeviceUsers, true) if self.forecast.is_none() => {
                return Err("upgrade: `drain: device-users` needs `deviceResources` or `forecast`".to_owned());
            }
            (Drain::None | Drain::Node, false) => {
                return Err("upgrade: `deviceResources` is for `drain: device-users`".to_owned());
            }
            _ => {}
        }
        if matches!(&self.canary, Some(Canary::Labels(labels)) if is_empty(labels)) {
            return Err("upgrade: `canary` has no labels, so that every node would go first".to_owned());
        }
        if self.window.as_ref().is_some_and(|window| window.duration.duration().is_zero()) {
            return Err("upgrade: a `window` of no duration never opens".to_owned());
        }
        Ok(self)
    }

    /// Does it make Jobs in the DaemonSet's namespace?
    pub fn makes_jobs(&self) -> bool {
        self.forecast.is_some() || matches!(self.wait_for, WaitFor::Job(_))
    }

    /// Does a pod that requests these resources use the device?
    pub fn is_user<'a>(&self, requests: impl IntoIterator<Item = &'a String>) -> bool {
        requests.into_iter().any(|name| self.device_resources.iter().any(|pattern| fits(pattern, name)))
    }
}

impl Default for MaxParallel {
    fn default() -> Self {
        Self::Nodes(NonZeroU32::MIN)
    }
}

impl MaxParallel {
    /// How many of `nodes` that is: never more than it says, and one at least, because nothing could ever change.
    pub fn of(&self, nodes: usize) -> usize {
        match self {
            Self::Nodes(number) => usize::try_from(number.get()).unwrap_or(usize::MAX),
            Self::Share(share) => {
                let share: usize = share.trim_end_matches('%').parse().unwrap_or_default();
                (nodes.saturating_mul(share) / 100).max(1)
            }
        }
    }
}

impl LabelSelector {
    /// Are all of them among these?
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        has_labels(labels, &self.match_labels)
    }
}

impl Window {
    /// When it opens and closes: the first time that it closes after `at`, so that it is open where it opens before. `None` where
    /// there is none within four years.
    pub fn next(&self, at: Timestamp) -> Option<(Timestamp, Timestamp)> {
        let duration = SignedDuration::try_from(self.duration.duration()).ok()?;
        let schedule = cronexpr::parse_crontab(&self.opens).ok()?;
        let opens = schedule.find_next(at.checked_sub(duration).ok()?).ok()?.timestamp();
        Some((opens, opens.checked_add(duration).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::image::RolloutSpec;

    #[expect(clippy::needless_pass_by_value, reason = "it is written where it is handed over")]
    fn read(upgrade: Value) -> Result<UpgradeSpec, String> {
        let rollout = json!({
            "strategy": "image", "namespace": "drivers", "daemonSet": "mft", "container": "driver", "upgrade": upgrade,
        });
        let read = serde_json::from_value::<RolloutSpec>(rollout).map_err(|error| error.to_string())?;
        Ok(read.upgrade().unwrap().clone())
    }

    #[test]
    fn all_fields_are_read_and_written() {
        let full = json!({
            "canary": {"matchLabels": {"tier": "canary"}}, "maxParallel": "10%", "waitFor": {"job": "smoke"}, "between": "5m",
            "window": {"opens": "0 22 * * 1-5 Europe/Berlin", "duration": "4h"}, "drain": "device-users",
            "podSelector": {"matchLabels": {"a": "b"}}, "deviceResources": ["nvidia.com/*"],
            "forecast": "forecast", "graceSeconds": 30, "timeout": "20m", "onFailure": "stop",
        });
        assert_eq!(serde_json::to_value(read(full.clone()).unwrap()).unwrap(), full);
        let least = read(json!({})).unwrap();
        assert_eq!(
            (least.max_parallel.of(9), least.drain, least.on_failure),
            (1, Drain::None, OnFailure::PutBack)
        );
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for (upgrade, wanted) in [
            (json!({"canary": 0}), "a number of nodes above zero, or labels"),
            (json!({"canary": {"matchLabels": {}}}), "every node would go first"),
            (json!({"maxParallel": "0%"}), "a share of them from"),
            (json!({"drain": "device-users"}), "needs `deviceResources` or `forecast`"),
            (json!({"graceSeconds": 3}), "says nothing with `drain: none`"),
            (json!({"drain": "node", "deviceResources": ["rdma/x"]}), "is for `drain: device-users`"),
            (json!({"window": {"opens": "0 22 * * 1-5", "duration": "1h"}}), "with a time zone"),
            (json!({"window": {"opens": "0 25 * * * UTC", "duration": "1h"}}), "with a time zone"),
            (json!({"window": {"opens": "0 2 * * * Mars/Base", "duration": "1h"}}), "with a time zone"),
            (json!({"window": {"opens": "0 2 * * * UTC", "duration": "0s"}}), "never opens"),
            (json!({"drains": "node"}), "unknown field"),
        ] {
            let error = read(upgrade.clone()).unwrap_err();
            assert!(error.contains(wanted), "{upgrade}: {error}");
        }
    }

    #[test]
    fn shares_are_rounded_down_and_never_to_none() {
        let share = MaxParallel::Share("10%".parse().unwrap());
        assert_eq!([share.of(0), share.of(9), share.of(19), share.of(20)], [1, 1, 1, 2]);
    }

    #[test]
    fn a_window_is_one_of_its_time_zone() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let window =
            Window { opens: "0 22 * * * Europe/Berlin".parse().unwrap(), duration: Period::seconds(7200) };
        let opens = |text: &str| window.next(at(text)).unwrap();
        assert_eq!(opens("2026-01-10T12:00:00Z"), (at("2026-01-10T21:00:00Z"), at("2026-01-10T23:00:00Z")));
        assert_eq!(opens("2026-01-10T22:59:59Z").0, at("2026-01-10T21:00:00Z"), "it is open");
        assert_eq!(opens("2026-01-10T23:00:00Z").0, at("2026-01-11T21:00:00Z"), "it has just closed");
        assert_eq!(opens("2026-07-10T12:00:00Z").0, at("2026-07-10T20:00:00Z"), "in summer");
        let never = Window { opens: "0 0 30 2 * UTC".parse().unwrap(), duration: Period::seconds(60) };
        assert_eq!(never.next(at("2026-01-10T12:00:00Z")), None);
    }

    #[test]
    fn users_are_found_by_requests() {
        let spec = read(json!({"drain": "device-users", "deviceResources": ["nvidia.com/*", "rdma/hca"]}));
        let spec = spec.unwrap();
        for (requests, is_user) in
            [("cpu nvidia.com/mig-1g.5gb", true), ("rdma/hca", true), ("rdma/hca2", false), ("", false)]
        {
            let requests: Vec<String> = requests.split(' ').map(str::to_owned).collect();
            assert_eq!(spec.is_user(&requests), is_user, "{requests:?}");
        }
    }
}
