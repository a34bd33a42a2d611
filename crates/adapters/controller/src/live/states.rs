//! Logs each state change of a cell, and of a rollout that needs a user's attention, as one line. The module `builds`
//! logs the start and end of builds.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use farrier_core::plan::{
    Activity, Cell, HoldReason, NodeReason, Outcome, Phase, Plan, PlannedCell, PlannedRollout,
    RolloutDecision, StatusEntry, counts, status_entries,
};

/// Interval between log lines while a plan is being made. The first plan takes longest, because it fetches package
/// lists.
const SLOW: Duration = Duration::from_secs(10);

/// Maximum number of states kept of cells that no node needs at the moment, so that a flapping node does not log them
/// again.
const KEPT: usize = 1000;

const HELD: &str = "held";

/// A driver image, with its kernel target or rollout target.
type Subject = (String, String);

/// Waits for a plan, logging at intervals while it takes long.
pub(super) async fn log_while_waiting<T>(mut plan: impl Future<Output = T> + Unpin) -> T {
    loop {
        if let Ok(planned) = tokio::time::timeout(SLOW, &mut plan).await {
            return planned;
        }
        tracing::info!("still looking up versions, headers and published images");
    }
}

/// One log line: the new state of a cell or rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StateLine {
    image: String,
    target: String,
    state: &'static str,
    /// Reason; empty if the state needs none.
    reason: String,
    /// Remedy, unless the reason already names it.
    hint: Option<&'static str>,
    /// Whether the state needs a user's attention.
    warns: bool,
}

/// Last logged state of each cell and rollout.
#[derive(Debug, Default)]
pub(super) struct StateLog {
    /// The state and its normalized reason. The reason is `None` if the end of a build has logged the state.
    said: BTreeMap<Subject, (&'static str, Option<String>)>,
    /// Nodes already logged as untrusted.
    distrusted: BTreeSet<String>,
    began: bool,
}

impl StateLog {
    /// Logs the differences to the last plan. Call it after the plan's builds are queued.
    pub(super) fn log(&mut self, plan: &Plan, activity: &Activity) {
        if !self.began {
            tracing::info!(found = counts(plan), "first plan made");
        }
        self.log_distrust(plan);
        for StateLine { image, target, state, reason, hint, warns } in self.news(plan, activity) {
            if warns {
                tracing::warn!(image, target, state, reason, hint, "state changed");
            } else {
                tracing::info!(image, target, state, reason, "state changed");
            }
        }
    }

    /// Logs nodes that have become untrusted, one line per reason.
    fn log_distrust(&mut self, plan: &Plan) {
        let distrusted = || plan.skipped_nodes.iter().filter(|left| left.why.is_rejected_claim());
        let mut news: BTreeMap<&NodeReason, Vec<&str>> = BTreeMap::new();
        for left in distrusted().filter(|left| !self.distrusted.contains(&left.node)) {
            news.entry(&left.why).or_default().push(&left.node);
        }
        for (reason, nodes) in news {
            tracing::warn!(node = nodes.first(), count = nodes.len(), %reason, "a node's kernel is not trusted");
        }
        self.distrusted = distrusted().map(|left| left.node.clone()).collect();
    }

    /// Records a state that the end of a build has already logged.
    pub(super) fn note_end(&mut self, cell: &Cell, phase: Phase) {
        let subject = (cell.image.to_string(), cell.target.to_string());
        self.said.insert(subject, (phase.as_str(), None));
    }

    /// Returns the lines to log. The first plan does not report published cells.
    fn news(&mut self, plan: &Plan, activity: &Activity) -> Vec<StateLine> {
        let is_first = !std::mem::replace(&mut self.began, true);
        let cells = plan.cells.iter().zip(status_entries(plan, activity));
        let cells = cells.map(|(planned, entry)| of_cell(planned, entry));
        let lines: Vec<StateLine> = cells.chain(plan.rollouts.iter().filter_map(of_rollout)).collect();
        let present: BTreeSet<Subject> = lines.iter().map(StateLine::subject).collect();
        let keeps_all = self.said.len() <= KEPT;
        self.said.retain(|subject, (state, _)| present.contains(subject) || (keeps_all && *state != HELD));
        let is_news = |line: &StateLine| {
            let normalized_reason = normalized_reason(&line.reason);
            let before = self.said.insert(line.subject(), (line.state, Some(normalized_reason.clone())));
            match before {
                _ if line.state == Phase::Building.as_str() => false,
                None => !(is_first && line.state == Phase::Published.as_str()),
                // The end of the build is logged when the build is recorded.
                Some((state, _)) if state == Phase::Building.as_str() => !line.is_end(),
                Some((state, said)) => {
                    state != line.state || said.is_some_and(|said| said != normalized_reason)
                }
            }
        };
        lines.into_iter().filter(is_news).collect()
    }
}

impl StateLine {
    fn subject(&self) -> Subject {
        (self.image.clone(), self.target.clone())
    }

    fn is_end(&self) -> bool {
        [Phase::Published, Phase::Failed, Phase::Retrying].iter().any(|phase| phase.as_str() == self.state)
    }
}

fn of_cell(planned: &PlannedCell, entry: StatusEntry<'_>) -> StateLine {
    let row = entry.row;
    let (reason, hint) = match &planned.outcome {
        Outcome::Conflict { reference, remedy, .. } => {
            (format!("{reference} holds an image built from other inputs"), Some(*remedy))
        }
        Outcome::UpToDate { published, .. } => (format!("{}@{}", row.reference, published.digest), None),
        _ => (row.reason, None),
    };
    let warns = match row.phase {
        Phase::Skipped => !matches!(&planned.outcome, Outcome::Skipped { why } if why.is_not_applicable()),
        phase => matches!(phase, Phase::Conflict | Phase::Failed | Phase::Unknown | Phase::Retrying),
    };
    StateLine { image: row.image, target: row.kernel, state: row.phase.as_str(), reason, hint, warns }
}

/// Returns a line only for holds that need a user. Other holds come and go with the state of the cluster.
fn of_rollout(rollout: &PlannedRollout) -> Option<StateLine> {
    let RolloutDecision::Hold(why) = &rollout.decision else { return None };
    let hint = match why {
        HoldReason::NotFound => Some(
            "create the DaemonSet, and its namespace where that is missing; or correct `rollout` in the definition",
        ),
        HoldReason::NoResource => Some("create it, or correct `rollout` in the definition"),
        _ => None,
    };
    why.is_failure().then(|| StateLine {
        image: rollout.image.to_string(),
        target: rollout.target.to_string(),
        state: HELD,
        reason: why.to_string(),
        hint,
        warns: true,
    })
}

/// Returns a reason without the parts that differ between attempts: numbers, times, names of temporary files.
fn normalized_reason(reason: &str) -> String {
    let differs = |word: &&str| word.contains(|c: char| c.is_ascii_digit() || c == '/');
    reason.split_whitespace().filter(|word| !differs(word)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use farrier_builder::testing::Logs;
    use farrier_core::plan::{BuildActivity, KERNEL_LABEL, Stage, testing::Fleet};
    use kmod::Verdict;

    use super::*;

    const K47: &str = "6.1.0-47-amd64";
    const K48: &str = "6.1.0-48-amd64";

    /// Lines to log for a fleet whose builds are all in this stage.
    fn news(states: &mut StateLog, fleet: &Fleet, stage: Option<Stage>) -> Vec<String> {
        let plan = fleet.plan();
        let mut activity = Activity::new();
        for cell in plan.builds() {
            let found = BuildActivity { stage, ..BuildActivity::default() };
            activity.insert((cell.image.clone(), cell.target.clone()), found);
        }
        let line = |line: StateLine| {
            let hint = line.hint.map(|hint| format!(" ({hint})")).unwrap_or_default();
            let level = if line.warns { "WARN" } else { "INFO" };
            format!("{level} {} {} {}: {}{hint}", line.image, line.target, line.state, line.reason)
        };
        states.news(&plan, &activity).into_iter().map(line).collect()
    }

    const NOTHING: [&str; 0] = [];

    #[tokio::test(start_paused = true)]
    async fn a_plan_that_takes_long_is_said_to_be_made_still() {
        let logs = Logs::start();
        log_while_waiting(Box::pin(tokio::time::sleep(Duration::from_secs(9)))).await;
        assert_eq!(logs.with(""), NOTHING);
        log_while_waiting(Box::pin(tokio::time::sleep(Duration::from_secs(45)))).await;
        assert_eq!(logs.with("still looking up").len(), 4);
    }

    #[test]
    fn each_state_is_said_once() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        let queued = "INFO mft 6.1.0-47-amd64 (debian 12, amd64) queued: not in the registry";
        assert_eq!(news(&mut states, &fleet, Some(Stage::Queued)), [queued]);
        assert_eq!(news(&mut states, &fleet, Some(Stage::Queued)), NOTHING);
        assert_eq!(news(&mut states, &fleet, Some(Stage::Compile)), NOTHING, "the build logs its own start");
        // The end of the build is recorded either before or after a plan that includes it.
        fleet.publish(Verdict::Loads);
        assert_eq!(news(&mut states, &fleet, None), NOTHING);
        states.note_end(&fleet.plan().cells[0].outcome.cell().unwrap().clone(), Phase::Published);
        assert_eq!(news(&mut states, &fleet, None), NOTHING);
        fleet.lose();
        assert_eq!(news(&mut states, &fleet, Some(Stage::Queued)), [queued]);
    }

    #[test]
    fn a_skip_is_said_with_its_reason_and_not_again_for_another_temporary_file() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        fleet.unresolved("write /cache/.tmp-a1: No space left on device (free some room)");
        let said = news(&mut states, &fleet, None);
        assert_eq!(
            said[0],
            "WARN mft 6.1.0-47-amd64 (debian 12, amd64) skipped: write /cache/.tmp-a1: No space left on device (free some room)"
        );
        fleet.unresolved("write /cache/.tmp-b2: No space left on device (free some room)");
        assert_eq!(news(&mut states, &fleet, None), NOTHING);
        fleet.unresolved("find an apt source for suite bookworm (set `mirror`)");
        assert_eq!(news(&mut states, &fleet, None).len(), 1);
    }

    #[test]
    fn what_is_published_at_the_start_is_no_news_and_later_it_is() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        fleet.publish(Verdict::Loads);
        assert_eq!(news(&mut states, &fleet, None), NOTHING);
        let node = fleet.node(0);
        node.kernel_version = K48.to_owned();
        node.labels.insert(KERNEL_LABEL.to_owned(), K48.to_owned());
        fleet.publish(Verdict::Loads);
        let said = news(&mut states, &fleet, None);
        assert!(said.len() == 1 && said[0].contains("published: registry.test/drivers/mft:"), "{said:?}");
        // Flapping between two kernels logs nothing new.
        for kernel in [K47, K48].repeat(9) {
            let node = fleet.node(0);
            node.kernel_version = kernel.to_owned();
            node.labels.insert(KERNEL_LABEL.to_owned(), kernel.to_owned());
            assert_eq!(news(&mut states, &fleet, None), NOTHING);
        }
    }

    #[test]
    fn a_rollout_to_nowhere_is_said_with_what_to_do() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        fleet.publish(Verdict::Loads);
        let lost = fleet.without_daemon_sets();
        let held = "WARN mft DaemonSet kube-system/mft, container driver held: there is no such DaemonSet (create \
                    the DaemonSet, and its namespace where that is missing; or correct `rollout` in the definition)";
        for _ in 0..2 {
            assert_eq!(news(&mut states, &lost, None), [held]);
            assert_eq!(news(&mut states, &lost, None), NOTHING);
            // The DaemonSet appears, then disappears again.
            assert_eq!(news(&mut states, &fleet, None), NOTHING);
        }
    }
}
