//! Events from controllers, the scheduler and kubelets, in both of the API's forms.

use serde_json::{Value, json};

use super::store::State;

/// Source, reason and message of an Event.
#[derive(Clone, Copy, Debug)]
pub struct EventText<'a> {
    /// `job-controller`, `default-scheduler` or `kubelet`.
    pub by: &'a str,
    pub reason: &'a str,
    pub message: &'a str,
}

impl State {
    /// Records an Event for each call; a real recorder aggregates repeated ones.
    pub fn tell(&mut self, kind: &str, about: &Value, told: EventText<'_>) {
        self.record("Normal", kind, about, told);
    }

    pub fn warn(&mut self, kind: &str, about: &Value, told: EventText<'_>) {
        self.record("Warning", kind, about, told);
    }

    fn record(&mut self, weight: &str, kind: &str, about: &Value, told: EventText<'_>) {
        let metadata = &about["metadata"];
        let now = super::pod_fate::text(jiff::Timestamp::now());
        let (name, namespace) = (metadata["name"].as_str().unwrap_or_default(), &metadata["namespace"]);
        let name = format!("{name}.{:016x}", fastrand::u64(..));
        let object = json!({
            "kind": kind, "namespace": namespace, "name": metadata["name"], "uid": metadata["uid"],
            "apiVersion": if kind == "Job" { "batch/v1" } else { "v1" },
            "resourceVersion": metadata["resourceVersion"],
        });
        let core = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": namespace},
            "involvedObject": object, "type": weight, "reason": told.reason, "message": told.message,
            "count": 1, "firstTimestamp": now, "lastTimestamp": now, "eventTime": null,
            "source": {"component": told.by}, "reportingComponent": told.by, "reportingInstance": "",
        });
        let other = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "regarding": object, "type": weight, "reason": told.reason, "note": told.message,
            "deprecatedCount": 1, "deprecatedFirstTimestamp": now, "deprecatedLastTimestamp": now,
            "deprecatedSource": {"component": told.by}, "eventTime": null,
            "reportingController": told.by, "reportingInstance": "",
        });
        for (resource, event) in [("events", core), ("events.events.k8s.io", other)] {
            let kind = self.resource(resource);
            self.insert(&kind, event);
        }
    }
}
