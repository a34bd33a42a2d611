//! Derives the desired DriverBuild objects from a plan, and the writes that bring the cluster to the desired state.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::ImageName,
    kernel::{KernelLabel, KernelTarget},
    plan::{Activity, Phase, Plan, StatusEntry, status_entries},
    text::printable_lines,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kmod::Verdict;
use kube::api::ObjectMeta;
use sha2::{Digest as _, Sha256};

use super::{DriverBuild, DriverBuildSpec, DriverBuildStatus};

/// Label and value that mark the objects that farrier created and may delete.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "farrier");

// Limits on the log lines in an object. The limits are small, because etcd is not a log store.
const LOG_LINES: usize = 20;
const MAX_LOG_LINE_CHARS: usize = 200;

/// Maximum length of a message in characters.
const MAX_MESSAGE_CHARS: usize = 1024;

/// Returns the name of a cell's object: `<image>-<kernel label>-<8 digits>`, a DNS name of at most 63 characters.
pub fn name_of(image: &ImageName, target: &KernelTarget) -> String {
    let KernelTarget { os, os_version, release, arch } = target;
    let key = [image.as_str(), os.as_str(), os_version.as_str(), release.as_str(), arch.as_str()].join("\0");
    let hash = hex::encode(&Sha256::digest(key.as_bytes())[..4]);
    let label = KernelLabel::of(release).map(|label| label.to_string()).unwrap_or_default();
    let readable: String = format!("{image}-{label}")
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' })
        .take(63 - 1 - hash.len())
        .collect();
    // Each label of a DNS name begins and ends with a letter or digit.
    let parts = readable.split('.').map(|part| part.trim_matches('-')).filter(|part| !part.is_empty());
    format!("{}-{hash}", parts.collect::<Vec<_>>().join("."))
}

/// Returns one object for each row of `farrier status`. Takes the transition times of unchanged conditions, and the generation
/// that the API server assigned, from `existing`.
pub fn desired(
    plan: &Plan,
    activity: &Activity,
    configuration_error: Option<&str>,
    existing: &BTreeMap<String, DriverBuild>,
    now: Timestamp,
) -> Vec<DriverBuild> {
    let entries = status_entries(plan, activity);
    let object = |entry: &StatusEntry<'_>| {
        let name = name_of(entry.image, entry.target);
        let existing = existing.get(&name);
        let KernelTarget { os, os_version, release, arch } = entry.target;
        let spec = DriverBuildSpec {
            image: entry.image.to_string(),
            os: os.to_string(),
            os_version: os_version.to_string(),
            release: release.to_string(),
            arch: arch.to_string(),
        };
        let status = status(entry, configuration_error, existing, now);
        let labels = [(MANAGED_BY.0.to_owned(), MANAGED_BY.1.to_owned())].into();
        let metadata = ObjectMeta { name: Some(name), labels: Some(labels), ..ObjectMeta::default() };
        DriverBuild { metadata, spec, status: Some(status) }
    };
    entries.iter().map(object).collect()
}

fn status(
    entry: &StatusEntry<'_>,
    configuration_error: Option<&str>,
    existing: Option<&DriverBuild>,
    now: Timestamp,
) -> DriverBuildStatus {
    let (row, activity) = (&entry.row, entry.activity);
    let configuration = configuration_condition(configuration_error);
    DriverBuildStatus {
        phase: row.phase.as_str().to_owned(),
        conditions: vec![
            condition(existing, now, "Published", published_condition(row.phase), &row.reason),
            condition(existing, now, "Checked", checked_condition(row.phase, row.verdict), ""),
            condition(
                existing,
                now,
                "ConfigurationCurrent",
                configuration,
                configuration_error.unwrap_or(""),
            ),
        ],
        reference: (!row.reference.is_empty()).then(|| row.reference.clone()),
        digest: row.digest.as_ref().map(ToString::to_string),
        input_hash: entry.input_hash.map(|hash| hash.to_string()),
        verdict: row.verdict.map(|verdict| verdict.as_str().to_owned()),
        nodes: i64::try_from(row.nodes).unwrap_or(i64::MAX),
        announced_by: row.announced_by.clone(),
        needs: row.needs.clone(),
        attempts: activity.map(|activity| activity.attempts).filter(|attempts| *attempts > 0).map(i64::from),
        next_retry: activity.and_then(|activity| activity.next_retry).map(|time| Time(whole_seconds(time))),
        last_duration: activity.and_then(|activity| activity.took).map(|took| format!("{}s", took.as_secs())),
        log_tail: activity.map(|activity| log_tail(&activity.log_tail)).unwrap_or_default(),
        message: (!row.reason.is_empty()).then(|| printable(&row.reason, MAX_MESSAGE_CHARS)),
    }
}

/// Status and reason of a condition.
type ConditionState = (&'static str, &'static str);

fn published_condition(phase: Phase) -> ConditionState {
    match phase {
        Phase::Published => ("True", "Published"),
        Phase::Building => ("False", "Building"),
        Phase::Queued => ("False", "Queued"),
        Phase::Retrying => ("False", "Retrying"),
        Phase::Missing => ("False", "NotBuilt"),
        Phase::Waiting => ("False", "WaitingForNeeds"),
        Phase::Failed => ("False", "Failed"),
        Phase::Conflict => ("False", "TagConflict"),
        Phase::Unknown => ("Unknown", "RegistryUnavailable"),
        Phase::Skipped => ("False", "NotBuildable"),
        Phase::OwnDriver => ("False", "OwnDriver"),
    }
}

fn checked_condition(phase: Phase, verdict: Option<Verdict>) -> ConditionState {
    match (phase, verdict) {
        (_, Some(Verdict::Loads)) => ("True", "Loads"),
        (_, Some(Verdict::Refused)) => ("False", "Refused"),
        (_, Some(Verdict::Unknown)) => ("Unknown", "VerdictUnknown"),
        (Phase::Published, None) => ("Unknown", "NoReport"),
        (_, None) => ("Unknown", "NotPublished"),
    }
}

fn configuration_condition(error: Option<&str>) -> ConditionState {
    if error.is_some() { ("False", "Invalid") } else { ("True", "Valid") }
}

/// Returns a condition. An existing condition with the same status keeps its transition time.
fn condition(
    existing: Option<&DriverBuild>,
    now: Timestamp,
    type_: &str,
    (status, reason): ConditionState,
    message: &str,
) -> Condition {
    let mut conditions =
        existing.iter().flat_map(|object| &object.status).flat_map(|status| &status.conditions);
    let unchanged = conditions.find(|old| old.type_ == type_ && old.status == status);
    let last_transition_time =
        unchanged.map_or_else(|| Time(whole_seconds(now)), |old| old.last_transition_time.clone());
    // A new object has generation 1. The spec never changes afterwards, because the object's name contains its hash.
    let generation = existing.and_then(|object| object.metadata.generation).unwrap_or(1);
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: printable(message, MAX_MESSAGE_CHARS),
        observed_generation: Some(generation),
        last_transition_time,
    }
}

/// Truncates to whole seconds, as the API does. A finer time would always differ from the time that the API returns.
fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn log_tail(lines: &[String]) -> Vec<String> {
    let first = lines.len().saturating_sub(LOG_LINES);
    lines[first..].iter().map(|line| printable(line, MAX_LOG_LINE_CHARS)).collect()
}

/// Replaces control characters and limits the length. Output of compilers and registries is untrusted, and must not control the
/// terminal of a reader.
pub(super) fn printable(text: &str, limit: usize) -> String {
    printable_lines(text).replace(['\t', '\r'], "\u{fffd}").chars().take(limit).collect()
}

/// Writes that bring the cluster to the desired state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Writes {
    /// Objects to create, and objects whose spec or labels differ. Their status is written afterwards.
    pub objects: Vec<DriverBuild>,
    /// Objects of which only the status differs.
    pub statuses: Vec<DriverBuild>,
    /// Names of objects to delete.
    pub deletions: Vec<String>,
}

/// Compares the existing objects with the desired ones. Deletes objects whose grace period has ended (`expired`), but never
/// objects that farrier did not create.
pub fn writes(
    desired: &[DriverBuild],
    existing: &BTreeMap<String, DriverBuild>,
    expired: &BTreeSet<String>,
) -> Writes {
    let mut writes = Writes::default();
    for object in desired {
        match object.metadata.name.as_ref().and_then(|name| existing.get(name)) {
            Some(old) if old.spec == object.spec && is_managed(old) => {
                if old.status != object.status {
                    writes.statuses.push(object.clone());
                }
            }
            _ => writes.objects.push(object.clone()),
        }
    }
    let is_managed_name = |name: &&String| existing.get(*name).is_some_and(is_managed);
    writes.deletions = expired.iter().filter(is_managed_name).cloned().collect();
    writes
}

/// Whether farrier created the object.
pub(super) fn is_managed(object: &DriverBuild) -> bool {
    let labels = object.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(MANAGED_BY.0)).is_some_and(|value| value == MANAGED_BY.1)
}

#[cfg(test)]
mod tests;
