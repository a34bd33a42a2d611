//! Logs state changes, one line each: of cells, and of rollouts that need a user's attention. The module `builds` logs the start
//! and end of builds.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use farrier_core::plan::{
    Activity, Cell, NodeReason, Outcome, Phase, Plan, PlannedCell, PlannedRollout, RolloutDecision,
    RolloutWarning, StatusEntry, status_entries, summary,
};

/// Interval between log lines while a plan is being made. The first plan takes longest, because it fetches package lists.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Number of logged states above which the states of absent cells are discarded. Keeping them prevents repeated log lines while a
/// node switches back and forth between two kernels.
const MAX_ABSENT_STATES: usize = 1000;

const HELD: &str = "held";

/// A driver image, with its kernel target or rollout target.
type Subject = (String, String);

/// Waits for a plan, and logs at intervals while the plan takes long.
pub(super) async fn log_while_waiting<T>(mut plan: impl Future<Output = T> + Unpin) -> T {
    loop {
        if let Ok(planned) = tokio::time::timeout(PROGRESS_INTERVAL, &mut plan).await {
            return planned;
        }
        tracing::info!("still looking up versions, headers and published images");
    }
}

/// Content of one log line: the new state of a cell or rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StateLine {
    image: String,
    target: String,
    state: &'static str,
    /// Reason; empty if the state needs none.
    reason: String,
    /// Remedy, unless the reason already names the remedy.
    hint: Option<String>,
    /// Whether the state needs a user's attention.
    warns: bool,
}

/// Last logged state of each cell and rollout.
#[derive(Debug, Default)]
pub(super) struct StateLog {
    /// The state and its normalized reason. The reason is `None` if `builds` logged the state as the end of a build.
    logged: BTreeMap<Subject, (&'static str, Option<String>)>,
    /// Nodes already logged as untrusted.
    untrusted: BTreeSet<String>,
    has_logged_plan: bool,
    /// Rollout warnings already logged, by object and code.
    warned: BTreeSet<(String, &'static str)>,
}

impl StateLog {
    /// Logs what changed since the last plan. Call this method after the plan's builds are queued.
    pub(super) fn log(&mut self, plan: &Plan, activity: &Activity) {
        if !self.has_logged_plan {
            tracing::info!(found = summary(plan), "first plan made");
        }
        self.log_untrusted_nodes(plan);
        for StateLine { image, target, state, reason, hint, warns } in self.new_lines(plan, activity) {
            if warns {
                tracing::warn!(image, target, state, reason, hint, "state changed");
            } else {
                tracing::info!(image, target, state, reason, "state changed");
            }
        }
    }

    /// Logs each rollout warning once for each object. Call this method before the writes.
    pub(super) fn log_warnings(&mut self, plan: &Plan) {
        for rollout in &plan.rollouts {
            let object = rollout.target.object.name().unwrap_or_default();
            for RolloutWarning { code, message, hint } in &rollout.warnings {
                if self.warned.insert((object.clone(), *code)) {
                    tracing::warn!(image = %rollout.image, target = %rollout.target, code, hint, "{message}");
                }
            }
        }
    }

    /// Logs nodes that have become untrusted, one line per reason.
    fn log_untrusted_nodes(&mut self, plan: &Plan) {
        let untrusted: Vec<_> =
            plan.skipped_nodes.iter().filter(|skipped| skipped.why.is_rejected_claim()).collect();
        let mut new_by_reason: BTreeMap<&NodeReason, Vec<&str>> = BTreeMap::new();
        for skipped in untrusted.iter().filter(|skipped| !self.untrusted.contains(&skipped.node)) {
            new_by_reason.entry(&skipped.why).or_default().push(&skipped.node);
        }
        for (reason, nodes) in new_by_reason {
            tracing::warn!(node = nodes.first(), count = nodes.len(), %reason, "a node's kernel is not trusted");
        }
        self.untrusted = untrusted.into_iter().map(|skipped| skipped.node.clone()).collect();
    }

    /// Records a state that the end of a build has already logged.
    pub(super) fn record_build_end(&mut self, cell: &Cell, phase: Phase) {
        let subject = (cell.image.to_string(), cell.target.to_string());
        self.logged.insert(subject, (phase.as_str(), None));
    }

    /// Returns the lines to log. The first plan does not report published cells.
    fn new_lines(&mut self, plan: &Plan, activity: &Activity) -> Vec<StateLine> {
        let is_first = !std::mem::replace(&mut self.has_logged_plan, true);
        let cells = plan.cells.iter().zip(status_entries(plan, activity));
        let cells = cells.map(|(planned, entry)| cell_line(planned, entry));
        let lines: Vec<StateLine> = cells.chain(plan.rollouts.iter().filter_map(rollout_line)).collect();
        let present: BTreeSet<Subject> = lines.iter().map(StateLine::subject).collect();
        let keeps_absent = self.logged.len() <= MAX_ABSENT_STATES;
        self.logged
            .retain(|subject, (state, _)| present.contains(subject) || (keeps_absent && *state != HELD));
        lines.into_iter().filter(|line| self.record(line, is_first)).collect()
    }

    /// Records a state, and returns whether it must be logged.
    fn record(&mut self, line: &StateLine, is_first_plan: bool) -> bool {
        let reason = normalized_reason(&line.reason);
        let before = self.logged.insert(line.subject(), (line.state, Some(reason.clone())));
        match before {
            // The build logs its own start.
            _ if line.state == Phase::Building.as_str() => false,
            None => !(is_first_plan && line.state == Phase::Published.as_str()),
            // The build logs its own end.
            Some((state, _)) if state == Phase::Building.as_str() => !line.is_end(),
            Some((state, logged)) => state != line.state || logged.is_some_and(|logged| logged != reason),
        }
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

fn cell_line(planned: &PlannedCell, entry: StatusEntry<'_>) -> StateLine {
    let row = entry.row;
    let (reason, hint) = match &planned.outcome {
        Outcome::Conflict { remedy, .. } => (planned.outcome.absence_reason(), Some(remedy.clone())),
        Outcome::UpToDate { published, .. } => (format!("{}@{}", row.reference, published.digest), None),
        _ => (row.reason, None),
    };
    let warns = match row.phase {
        Phase::Skipped => !matches!(&planned.outcome, Outcome::Skipped { why } if why.is_not_applicable()),
        phase => matches!(phase, Phase::Conflict | Phase::Failed | Phase::Unknown | Phase::Retrying),
    };
    StateLine { image: row.image, target: row.kernel, state: row.phase.as_str(), reason, hint, warns }
}

/// Returns the line for a hold that needs a user's attention. Other holds come and go with the state of the cluster.
fn rollout_line(rollout: &PlannedRollout) -> Option<StateLine> {
    let RolloutDecision::Hold(why) = &rollout.decision else { return None };
    why.is_failure().then(|| StateLine {
        image: rollout.image.to_string(),
        target: rollout.target.to_string(),
        state: HELD,
        reason: rollout.hold_text().unwrap_or_default(),
        hint: why.hint().map(str::to_owned),
        warns: true,
    })
}

/// Returns a reason without the parts that differ between attempts: numbers, times, names of temporary files.
fn normalized_reason(reason: &str) -> String {
    let differs_between_attempts = |word: &str| word.contains(|c: char| c.is_ascii_digit() || c == '/');
    reason.split_whitespace().filter(|word| !differs_between_attempts(word)).collect::<Vec<_>>().join(" ")
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
    fn new_lines(states: &mut StateLog, fleet: &Fleet, stage: Option<Stage>) -> Vec<String> {
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
        states.new_lines(&plan, &activity).into_iter().map(line).collect()
    }

    const NOTHING: [&str; 0] = [];

    #[tokio::test(start_paused = true)]
    async fn a_slow_plan_logs_its_progress() {
        let logs = Logs::start();
        log_while_waiting(Box::pin(tokio::time::sleep(Duration::from_secs(9)))).await;
        assert_eq!(logs.with(""), NOTHING);
        log_while_waiting(Box::pin(tokio::time::sleep(Duration::from_secs(45)))).await;
        assert_eq!(logs.with("still looking up").len(), 4);
    }

    #[test]
    fn each_state_is_logged_once() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        let queued = "INFO mft 6.1.0-47-amd64 (debian 12, amd64) queued: not in the registry";
        assert_eq!(new_lines(&mut states, &fleet, Some(Stage::Queued)), [queued]);
        assert_eq!(new_lines(&mut states, &fleet, Some(Stage::Queued)), NOTHING);
        assert_eq!(
            new_lines(&mut states, &fleet, Some(Stage::Compile)),
            NOTHING,
            "the build logs its own start"
        );
        // The end of the build is recorded either before or after a plan that includes it.
        fleet.publish(Verdict::Loads);
        assert_eq!(new_lines(&mut states, &fleet, None), NOTHING);
        states.record_build_end(&fleet.plan().cells[0].outcome.cell().unwrap().clone(), Phase::Published);
        assert_eq!(new_lines(&mut states, &fleet, None), NOTHING);
        fleet.lose();
        assert_eq!(new_lines(&mut states, &fleet, Some(Stage::Queued)), [queued]);
    }

    #[test]
    fn a_skip_is_logged_again_only_for_another_reason() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        fleet.unresolved("write /cache/.tmp-a1: No space left on device (free some room)");
        let logged = new_lines(&mut states, &fleet, None);
        assert_eq!(
            logged[0],
            "WARN mft 6.1.0-47-amd64 (debian 12, amd64) skipped: write /cache/.tmp-a1: No space left on device (free some room)"
        );
        fleet.unresolved("write /cache/.tmp-b2: No space left on device (free some room)");
        assert_eq!(new_lines(&mut states, &fleet, None), NOTHING);
        fleet.unresolved("find an apt source for suite bookworm (set `mirror`)");
        assert_eq!(new_lines(&mut states, &fleet, None).len(), 1);
    }

    #[test]
    fn published_cells_are_logged_except_those_of_the_first_plan() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        fleet.publish(Verdict::Loads);
        assert_eq!(new_lines(&mut states, &fleet, None), NOTHING);
        let node = fleet.node(0);
        node.kernel_version = K48.to_owned();
        node.labels.insert(KERNEL_LABEL.to_owned(), K48.to_owned());
        fleet.publish(Verdict::Loads);
        let logged = new_lines(&mut states, &fleet, None);
        assert!(
            logged.len() == 1 && logged[0].contains("published: registry.test/drivers/mft:"),
            "{logged:?}"
        );
        // Flapping between two kernels logs nothing new.
        for kernel in [K47, K48].repeat(9) {
            let node = fleet.node(0);
            node.kernel_version = kernel.to_owned();
            node.labels.insert(KERNEL_LABEL.to_owned(), kernel.to_owned());
            assert_eq!(new_lines(&mut states, &fleet, None), NOTHING);
        }
    }

    #[test]
    fn a_rollout_without_daemon_set_is_logged_with_a_hint() {
        let (mut states, mut fleet) = (StateLog::default(), Fleet::new(&[K47]));
        fleet.publish(Verdict::Loads);
        let lost = fleet.without_daemon_sets();
        let held = "WARN mft DaemonSet kube-system/mft, container driver held: there is no such DaemonSet (create \
                    the DaemonSet, and its namespace where that is missing; or correct `rollout` in the definition)";
        for _ in 0..2 {
            assert_eq!(new_lines(&mut states, &lost, None), [held]);
            assert_eq!(new_lines(&mut states, &lost, None), NOTHING);
            // The DaemonSet appears, then disappears again.
            assert_eq!(new_lines(&mut states, &fleet, None), NOTHING);
        }
    }
}
