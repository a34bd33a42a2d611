//! Settings for upgrading the driver on the nodes of a rollout: order, limits, and checks before and after.

use std::{collections::BTreeMap, num::NonZeroU32};

use jiff::{SignedDuration, Timestamp, fmt::temporal::DateTimeParser, tz::TimeZone};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::definition::has_labels;
use crate::definition::{
    Period,
    checked::{CronSchedule, DnsName, LabelKey, LabelValue, ResourcePattern, Share, matches_glob},
};

/// Settings to replace the driver on the nodes of a DaemonSet, one after the other. The DaemonSet's update strategy must be
/// `OnDelete`.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UpgradeSpec {
    /// The nodes to upgrade first: a number of nodes, or the nodes with these labels. The others follow when all of these are
    /// done.
    pub canary: Option<Canary>,
    /// How many nodes may be without a working driver at the same time: a number, or a share of the DaemonSet's nodes such as
    /// `10%`, rounded down, but at least 1. Nodes whose driver already fails count, and go first.
    #[serde(default)]
    pub max_parallel: MaxParallel,
    /// Condition for uncordoning a node, in addition to its new pod being ready for `stableFor`.
    #[serde(default)]
    pub wait_for: WaitFor,
    /// How long to wait after one node before upgrading the next.
    #[serde(default = "no_pause")]
    pub between: Period,
    /// When node upgrades may start. Default: at any time. A started upgrade is always finished.
    pub window: Option<Window>,
    /// Pods to evict from a node before its driver is replaced. With any value but `none`, farrier also cordons the node.
    #[serde(default)]
    pub drain: Drain,
    /// Evict only pods with these labels. Default: all pods.
    pub pod_selector: Option<LabelSelector>,
    /// Resources that identify users of the device by their pods' requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_resources: Vec<ResourcePattern>,
    /// A CronJob in the DaemonSet's namespace that runs `driver-entrypoint forecast`. farrier creates a Job from it on a node,
    /// and removes the driver after the Job has succeeded. With `drain: device-users`, farrier also evicts pods that the Job
    /// finds using the device.
    pub forecast: Option<DnsName>,
    /// How long an evicted pod may take to terminate, in seconds. Default: the pod's own grace period.
    pub grace_seconds: Option<u32>,
    /// Time limit for evicting pods from a node, and for `waitFor`. If pods do not leave in time, farrier uncordons the node
    /// unchanged. It retries the node after the same time, when the other nodes have had their turn.
    #[serde(default = "default_timeout")]
    pub timeout: Period,
    /// Action if a node's new driver does not work, or `waitFor` fails.
    #[serde(default)]
    pub on_failure: OnFailure,
}

/// Nodes to upgrade first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "a number of nodes above zero, or labels of nodes: {matchLabels: {KEY: VALUE}}"
)]
pub enum Canary {
    /// This number of nodes.
    Nodes(#[serde(deserialize_with = "count")] NonZeroU32),
    /// The nodes with these labels.
    Labels(LabelSelector),
}

/// Selects objects by label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelSelector {
    /// Labels that an object must have, with these values.
    pub match_labels: BTreeMap<LabelKey, LabelValue>,
}

/// A number of nodes, or a share of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a number of nodes above zero, or a share of them from `1%` to `100%`")]
pub enum MaxParallel {
    /// This number of nodes.
    Nodes(#[serde(deserialize_with = "count")] NonZeroU32),
    /// A percentage of the nodes.
    Share(Share),
}

/// Condition that a node with its new driver must meet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WaitFor {
    /// Only the pod must be ready.
    #[default]
    PodsReady,
    /// farrier creates a Job on the node from this CronJob in the DaemonSet's namespace. The Job must succeed.
    Job(DnsName),
    /// The node's annotation `farrier.dev/upgrade-checked` must have the new image as its value.
    Annotation,
}

/// Maintenance window in which node upgrades may start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Window {
    /// When the window opens: cron's five fields and a time zone, as in `0 22 * * 1-5 Europe/Berlin`.
    pub opens: CronSchedule,
    /// How long the window stays open.
    pub duration: Period,
}

/// Pods to evict from a node before its driver is replaced. DaemonSet pods and static pods are never evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Drain {
    /// No pods.
    #[default]
    None,
    /// Pods that request one of `deviceResources`, and pods that `forecast` finds.
    DeviceUsers,
    /// All pods.
    Node,
}

/// Action if a new driver does not work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnFailure {
    /// Restore the previous image. Nodes that have the new image get the previous one, in the same order.
    #[default]
    Restore,
    /// Upgrade no further node until the annotation `farrier.dev/upgrade` is removed from the node, or the DaemonSet gets another
    /// image.
    Stop,
}

/// Deserializes a number. In an untagged enum, a YAML number arrives as text.
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

fn no_pause() -> Period {
    Period::seconds(0)
}

fn default_timeout() -> Period {
    Period::seconds(600)
}

impl UpgradeSpec {
    /// Validates the combination of fields.
    pub(super) fn checked(self) -> Result<Self, String> {
        let drain_fields =
            [("podSelector", self.pod_selector.is_some()), ("graceSeconds", self.grace_seconds.is_some())];
        if let (Drain::None, Some((field, _))) = (self.drain, drain_fields.iter().find(|(_, set)| *set)) {
            return Err(format!("upgrade: `{field}` has no effect with `drain: none`"));
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
        if matches!(&self.canary, Some(Canary::Labels(labels)) if labels.match_labels.is_empty()) {
            return Err("upgrade: `canary` has no labels, so every node would be a canary".to_owned());
        }
        if self.timeout.duration().is_zero() {
            return Err("upgrade: a `timeout` of zero leaves no time to replace a driver".to_owned());
        }
        if self.window.as_ref().is_some_and(|window| window.duration.duration().is_zero()) {
            return Err("upgrade: a `window` with a duration of zero never opens".to_owned());
        }
        Ok(self)
    }

    /// Whether the upgrade creates Jobs in the DaemonSet's namespace.
    pub fn creates_jobs(&self) -> bool {
        self.forecast.is_some() || matches!(self.wait_for, WaitFor::Job(_))
    }

    /// Whether a pod with these resource requests uses the device.
    pub(crate) fn uses_device<'a>(&self, requests: impl IntoIterator<Item = &'a String>) -> bool {
        let is_device =
            |name: &String| self.device_resources.iter().any(|pattern| matches_glob(pattern, name));
        requests.into_iter().any(is_device)
    }
}

impl Default for MaxParallel {
    fn default() -> Self {
        Self::Nodes(NonZeroU32::MIN)
    }
}

impl MaxParallel {
    /// Returns the limit for `nodes` nodes. A share is rounded down, but the limit is at least one, or no node could ever change.
    pub fn limit(&self, nodes: usize) -> usize {
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
    /// Whether `labels` include all labels of the selector.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        has_labels(labels, &self.match_labels)
    }
}

impl Window {
    /// Opening and closing time of the window that is open at `now`, or else of the next one. `None` if no window opens within
    /// four years.
    pub fn next(&self, now: Timestamp) -> Option<(Timestamp, Timestamp)> {
        let duration = self.duration.signed_duration();
        let (fields, zone) = self.opens.rsplit_once(' ')?;
        let zone = DateTimeParser::new().parse_time_zone(zone).ok()?;
        // Find the clock time first: cronexpr skips a time that daylight saving time leaves out, and finds a repeated one twice.
        let schedule = cronexpr::parse_crontab(&format!("{fields} UTC")).ok()?;
        let start = now.checked_sub(duration).ok()?;
        // A clock time that daylight saving time leaves out opens the window up to two hours later.
        let earlier = start.checked_sub(SignedDuration::from_hours(2)).ok()?;
        let mut clock = TimeZone::UTC.to_timestamp(zone.to_datetime(earlier)).ok()?;
        loop {
            clock = schedule.find_next(clock).ok()?.timestamp();
            let opens = zone.to_timestamp(TimeZone::UTC.to_datetime(clock)).ok()?;
            if opens > start {
                return Some((opens, opens.checked_add(duration).ok()?));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::image::RolloutSpec;

    #[expect(clippy::needless_pass_by_value, reason = "callers write the JSON inline")]
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
            (least.max_parallel.limit(9), least.drain, least.on_failure),
            (1, Drain::None, OnFailure::Restore)
        );
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for (upgrade, wanted) in [
            (json!({"canary": 0}), "a number of nodes above zero, or labels"),
            (json!({"canary": {"matchLabels": {}}}), "every node would be a canary"),
            (json!({"maxParallel": "0%"}), "a share of them from"),
            (json!({"drain": "device-users"}), "needs `deviceResources` or `forecast`"),
            (json!({"graceSeconds": 3}), "has no effect with `drain: none`"),
            (json!({"drain": "node", "deviceResources": ["rdma/x"]}), "is for `drain: device-users`"),
            (json!({"window": {"opens": "0 22 * * 1-5", "duration": "1h"}}), "with a time zone"),
            (json!({"window": {"opens": "0 25 * * * UTC", "duration": "1h"}}), "with a time zone"),
            (json!({"window": {"opens": "0 2 * * * Mars/Base", "duration": "1h"}}), "with a time zone"),
            (json!({"window": {"opens": "0 2 * * * UTC", "duration": "0s"}}), "never opens"),
            (json!({"timeout": "0s"}), "leaves no time"),
            (json!({"drains": "node"}), "unknown field"),
        ] {
            let error = read(upgrade.clone()).unwrap_err();
            assert!(error.contains(wanted), "{upgrade}: {error}");
        }
    }

    #[test]
    fn shares_are_rounded_down_and_never_to_none() {
        let share = MaxParallel::Share("10%".parse().unwrap());
        assert_eq!([share.limit(0), share.limit(9), share.limit(19), share.limit(20)], [1, 1, 1, 2]);
    }

    #[test]
    fn a_window_is_one_of_its_time_zone() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let window =
            Window { opens: "0 22 * * * Europe/Berlin".parse().unwrap(), duration: Period::seconds(7200) };
        let opens = |text: &str| window.next(at(text)).unwrap();
        assert_eq!(opens("2026-01-10T12:00:00Z"), (at("2026-01-10T21:00:00Z"), at("2026-01-10T23:00:00Z")));
        assert_eq!(opens("2026-01-10T22:59:59Z").0, at("2026-01-10T21:00:00Z"), "the window is open");
        assert_eq!(opens("2026-01-10T23:00:00Z").0, at("2026-01-11T21:00:00Z"), "the window has just closed");
        assert_eq!(opens("2026-07-10T12:00:00Z").0, at("2026-07-10T20:00:00Z"), "daylight saving time");
        // New York leaves out 02:00 to 03:00 on 14 March, and repeats 01:00 to 02:00 on 7 November.
        let sunday = |opens: &str| Window {
            opens: format!("{opens} * * 0 America/New_York").parse().unwrap(),
            duration: Period::seconds(3600),
        };
        let opens = |text: &str, now: &str| sunday(text).next(at(now)).unwrap().0;
        assert_eq!(opens("0 2", "2027-03-14T06:00:00Z"), at("2027-03-14T07:00:00Z"));
        assert_eq!(opens("0 2", "2027-03-14T08:00:00Z"), at("2027-03-21T06:00:00Z"), "the next one");
        assert_eq!(opens("30 2", "2027-03-14T08:15:00Z"), at("2027-03-14T07:30:00Z"), "still open");
        assert_eq!(opens("30 1", "2027-11-07T05:00:00Z"), at("2027-11-07T05:30:00Z"));
        assert_eq!(opens("30 1", "2027-11-07T06:30:00Z"), at("2027-11-14T06:30:00Z"), "once");
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
            assert_eq!(spec.uses_device(&requests), is_user, "{requests:?}");
        }
    }
}
