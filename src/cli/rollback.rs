//! `farrier rollback`: takes back what farrier has set in a cluster.

use std::time::Duration;

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{Global, OutputForm, RollbackArgs},
    printer, session,
    settings::Settings,
};
use crate::{
    cluster::{Cluster, ClusterError},
    controller::chain,
    image::{Definitions, OperatorResource, RolloutSpec},
    plan::{
        self, Change, HoldReason, Interest, PER_KERNEL_ANNOTATION, RollbackOutcome, RollbackStep,
        RolloutObject, RolloutTarget, Seen,
    },
};

/// Times that an object is looked at again because somebody was faster.
const TRIES: usize = 3;
/// How long a newer state of such an object is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// One object's step, and how it went.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Taken {
    #[serde(flatten)]
    step: RollbackStep,
    /// Is, or was, anything written?
    #[serde(skip)]
    written: bool,
    /// Why the change was not made.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

/// Takes back what is selected, or everything.
pub async fn rollback(
    global: &Global,
    args: &RollbackArgs,
    cancel: CancellationToken,
) -> Result<Exit, CliError> {
    if args.cluster.starts_with("dir:") {
        return Err(CliError::Usage(format!(
            "--cluster {}: farrier keeps no record in a directory of manifests; its history is version control \
             (git revert)",
            args.cluster
        )));
    }
    let choice = session::cluster(&args.cluster)?;
    let definitions = Settings::resolve(global)?.definitions;
    let mut interest = Interest::of(&definitions);
    // Objects whose rollout the definitions have lost meanwhile can still be named.
    for object in &args.objects {
        let Some((first, name)) = object.split_once('/') else { continue };
        match OperatorResource::ALL.into_iter().find(|resource| resource.kind() == first) {
            Some(resource) => drop(interest.resources.insert(resource)),
            None => drop(interest.daemon_sets.insert((first.to_owned(), name.to_owned()))),
        }
    }
    let cluster = choice.open_for(interest, cancel.clone()).await?;
    let taken = tokio::select! {
        () = cancel.cancelled() => return Ok(Exit::Interrupted),
        taken = take_back(cluster.as_ref(), &definitions, args) => taken?,
    };
    printer::result(&match global.output {
        OutputForm::Table => text(&taken, args.dry_run),
        OutputForm::Json => printer::json(&taken)?,
    })?;
    let failed = |taken: &Taken| taken.failed.is_some() || taken.step.error.is_some();
    Ok(if taken.iter().any(failed) { Exit::Failed } else { Exit::Done })
}

async fn take_back(
    cluster: &dyn Cluster,
    definitions: &Definitions,
    args: &RollbackArgs,
) -> Result<Vec<Taken>, CliError> {
    let mut selected = args.objects.clone();
    let mut taken = take_back_copies(cluster, definitions, args).await?;
    for tries_left in (0..TRIES).rev() {
        let mut again = Vec::new();
        for step in steps(cluster, &selected).await? {
            let outcome = match &step.change {
                Some(change) if !args.dry_run => cluster.apply(change).await,
                Some(_) | None => Ok(()),
            };
            match outcome {
                Err(error) if error.is_conflict() && tries_left > 0 => again.push(step.object),
                outcome => {
                    let written = step.change.is_some();
                    taken.push(Taken { step, failed: outcome.err().map(|error| chain(&error)), written });
                }
            }
        }
        if again.is_empty() {
            break;
        }
        // What was seen is out of date; a source that cannot tell of news is asked anew in any case.
        let _ = tokio::time::timeout(PATIENCE, cluster.changed()).await;
        selected = again;
    }
    taken.sort_by(|a, b| a.step.object.cmp(&b.step.object));
    Ok(taken)
}

/// Takes back what stands for a DaemonSet over mixed kernels: step by step, each decided from what the cluster shows
/// after the one before.
async fn take_back_copies(
    cluster: &dyn Cluster,
    definitions: &Definitions,
    args: &RollbackArgs,
) -> Result<Vec<Taken>, CliError> {
    let rollouts = definitions.images.values().flat_map(|image| &image.spec.rollout);
    let mut all = Vec::new();
    for spec in rollouts.filter(|spec| matches!(spec, RolloutSpec::PerKernel { .. })) {
        let target = RolloutTarget::of(spec);
        let RolloutObject::DaemonSet { namespace, daemon_set, .. } = &target.object else { continue };
        let object = format!("{namespace}/{daemon_set}");
        if !args.objects.is_empty() && !args.objects.contains(&object) {
            continue;
        }
        let (mut made, mut conflicts, mut failed) = (0, 0, None);
        loop {
            let snapshot = cluster.snapshot().await?;
            let now = jiff::Timestamp::now();
            let changes = match plan::rollback_per_kernel(definitions, &snapshot, now, &target) {
                Ok(changes) => changes,
                Err(HoldReason::NotFound) => break,
                Err(hold) => {
                    failed = Some(hold.to_string());
                    break;
                }
            };
            made += changes.len();
            if changes.is_empty() || args.dry_run {
                break;
            }
            match apply_all(cluster, &changes).await {
                Ok(()) => conflicts = 0,
                Err(error) if error.is_conflict() && conflicts < TRIES => {
                    conflicts += 1;
                    let _ = tokio::time::timeout(PATIENCE, cluster.changed()).await;
                }
                Err(error) => {
                    failed = Some(chain(&error));
                    break;
                }
            }
        }
        if made == 0 && failed.is_none() {
            continue;
        }
        let outcome = RollbackOutcome::PutBack {
            from: "a DaemonSet for each kernel".to_owned(),
            to: "the DaemonSet itself, on all its nodes".to_owned(),
        };
        let step = RollbackStep {
            resume: format!(
                "kubectl annotate daemonset {daemon_set} --namespace {namespace} {PER_KERNEL_ANNOTATION}-"
            ),
            object,
            fields: [("nodes".to_owned(), outcome)].into(),
            error: None,
            change: None,
        };
        all.push(Taken { step, failed, written: made > 0 });
    }
    Ok(all)
}

async fn apply_all(cluster: &dyn Cluster, changes: &[Change]) -> Result<(), ClusterError> {
    for change in changes {
        cluster.apply(change).await?;
    }
    Ok(())
}

async fn steps(cluster: &dyn Cluster, selected: &[String]) -> Result<Vec<RollbackStep>, CliError> {
    let snapshot = cluster.snapshot().await?;
    for (what, why) in &snapshot.unseen {
        if matches!(what, Seen::DaemonSets | Seen::Resources) {
            printer::message(&format!("warning: {what} cannot be seen: {why}"));
        }
    }
    plan::rollback(&snapshot, selected).map_err(|unknown| {
        CliError::Usage(format!(
            "roll back {}: there is no such object in {}; objects are namespace/name for a DaemonSet and Kind/name \
             for an operator's resource that a rollout names",
            unknown.join(" and "),
            cluster.describe()
        ))
    })
}

/// A table of fields, and how to go on.
fn text(taken: &[Taken], dry_run: bool) -> String {
    if taken.is_empty() {
        return "nothing to roll back: farrier has set nothing there\n".to_owned();
    }
    let mut table = printer::table(["OBJECT", "FIELD", "ACTION", "DETAIL"]);
    let mut resume = Vec::new();
    for Taken { step, failed, written } in taken {
        let RollbackStep { object, fields, error, resume: command, change: _ } = step;
        if let Some(error) = error {
            table.add_row([object.as_str(), "", "failed", &printable(error)]);
        }
        for (field, outcome) in fields {
            let (action, detail) = match (failed, outcome) {
                (Some(failed), _) => ("failed", failed.clone()),
                (None, RollbackOutcome::PutBack { from, to }) => ("put back", format!("{from} -> {to}")),
                (None, RollbackOutcome::Released { holds }) => {
                    ("release", format!("somebody else has set {holds} since, which stays"))
                }
                (None, RollbackOutcome::Nothing { why }) => ("nothing", why.clone()),
            };
            table.add_row([object.as_str(), field, action, &printable(&detail)]);
        }
        if *written && failed.is_none() {
            resume.push(format!("  {command}\n"));
        }
    }
    let mut text = format!("{}\n", table.trim_fmt());
    if dry_run {
        text.push_str("\nnothing was written (--dry-run)\n");
    } else if !resume.is_empty() {
        text.push_str(
            "\nA running controller leaves these until another image is due. To let it set them again:\n",
        );
        text.push_str(&resume.concat());
    }
    text
}

/// A record is an annotation, which strangers may have written; a terminal must not take it for commands.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(object: &str, outcome: RollbackOutcome, failed: Option<&str>) -> Taken {
        let change = plan::Change::Node(plan::NodeChange::default());
        let differs = !matches!(outcome, RollbackOutcome::Nothing { .. });
        let step = RollbackStep {
            object: object.to_owned(),
            fields: [("driver".to_owned(), outcome)].into(),
            error: None,
            resume: format!("kubectl annotate {object}"),
            change: differs.then_some(change),
        };
        Taken { step, failed: failed.map(str::to_owned), written: differs }
    }

    #[test]
    fn people_read_what_became_of_each_field_and_how_to_go_on() {
        let put_back = || RollbackOutcome::PutBack { from: "new@1".to_owned(), to: "old:1".to_owned() };
        let all = [
            taken("a/put-back", put_back(), None),
            taken("b/released", RollbackOutcome::Released { holds: "theirs:1".to_owned() }, None),
            taken(
                "c/nothing",
                RollbackOutcome::Nothing { why: "it was rolled back before".to_owned() },
                None,
            ),
            taken("d/failed", put_back(), Some("write DaemonSet d/failed: forbidden")),
        ];
        insta::assert_snapshot!(format!(
            "{}---\n{}---\n{}",
            text(&all, false),
            text(&all, true),
            text(&[], false)
        ));
    }
}
