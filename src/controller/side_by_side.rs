//! Adapter: the builds of one pass, as many side by side as the machine has room for, dependents after what they need.

use std::{collections::BTreeMap, sync::Arc};

use tokio::task::{JoinError, JoinSet};
use tracing::Instrument as _;

use super::{
    Controller, Memory, PassError, TargetReport,
    pass::{BuildEnd, Fault},
};
use crate::{
    image::{BuildSpec, Chains, Definitions, ImageName},
    kernel::KernelTarget,
    parts::BuildLimits,
    plan::{Cell, ClusterSnapshot, Plan},
};

/// What became of the builds of a pass.
#[derive(Default)]
pub(super) struct BuiltAll {
    /// In the order in which they ended.
    pub(super) targets: Vec<TargetReport>,
    /// Was an outside system out of reach?
    pub(super) unreachable: bool,
}

type Key = (ImageName, KernelTarget);
type Task = (Arc<Cell>, Result<BuildEnd, PassError>);

/// What runs and what is next.
struct Yard<'a> {
    definitions: &'a Definitions,
    limits: BuildLimits,
    /// In the plan's order.
    queue: Vec<Arc<Cell>>,
    /// What was started, with what it takes while it runs.
    started: BTreeMap<Key, Option<BuildSpec>>,
}

/// What a build of this cell takes of the machine.
pub(super) fn cost(definitions: &Definitions, cell: &Cell) -> BuildSpec {
    definitions.images.get(&cell.image).map(|image| image.spec.build).unwrap_or_default()
}

fn key(cell: &Cell) -> Key {
    (cell.image.clone(), cell.target.clone())
}

impl Yard<'_> {
    /// Takes over what a plan asks for; each target is built once in a pass, whatever comes of it.
    fn plan(&mut self, plan: &Plan) {
        let new = |cell: &&Arc<Cell>| !self.started.contains_key(&key(cell));
        self.queue = plan.builds.iter().map(|planned| &planned.cell).filter(new).cloned().collect();
    }

    /// The next one, if there is room for it beside those that run. None overtakes another.
    fn next(&mut self) -> Option<Arc<Cell>> {
        let cost = cost(self.definitions, self.queue.first()?);
        let running: Vec<&BuildSpec> = self.started.values().flatten().collect();
        if running.len() >= self.limits.at_once.max(1) || !self.limits.budget.admits(running, &cost) {
            return None;
        }
        let cell = self.queue.remove(0);
        self.started.insert(key(&cell), Some(cost));
        Some(cell)
    }

    fn ended(&mut self, cell: &Cell) {
        self.started.insert(key(cell), None);
    }
}

impl Controller {
    /// Makes the builds of a plan and, as soon as what they need is published, those that waited for it. A build that
    /// fails is not tried again, and does not stop the others.
    pub(super) async fn build_all(
        &self,
        plan: &Plan,
        snapshot: &ClusterSnapshot,
        memory: &mut Memory,
    ) -> Result<BuiltAll, PassError> {
        let mut built = BuiltAll::default();
        let (mut yard, chains) = (
            Yard {
                definitions: &self.definitions,
                limits: self.limits,
                queue: Vec::new(),
                started: BTreeMap::new(),
            },
            Chains::of(&self.definitions.images),
        );
        yard.plan(plan);
        let (mut tasks, mut fault) = (JoinSet::new(), None);
        loop {
            while !self.cancel.is_cancelled()
                && fault.is_none()
                && let Some(cell) = yard.next()
            {
                self.start(&mut tasks, cell);
            }
            let Some(ended) = tasks.join_next().await else { break };
            let Some((cell, end)) = finished(ended) else { continue };
            yard.ended(&cell);
            let end = match end {
                Ok(end) => end,
                // What runs is brought to its end: a build that is dropped leaves its parts in the engine.
                Err(error) => {
                    fault.get_or_insert(error);
                    continue;
                }
            };
            built.unreachable |= end.fault == Some(Fault::Unreachable);
            let is_needed = chains.dependents(&cell.image).next().is_some();
            if end.fault.is_none() && is_needed && !self.cancel.is_cancelled() {
                memory.forget(cell.references());
                match self.plan_for(snapshot.clone(), memory).await {
                    Ok(planned) => yard.plan(&planned.plan),
                    Err(error) => drop(fault.get_or_insert(error)),
                }
            }
            built.targets.push(end.report);
        }
        fault.map_or(Ok(built), Err)
    }

    fn start(&self, tasks: &mut JoinSet<Task>, cell: Arc<Cell>) {
        let builder = self.clone();
        let span = tracing::info_span!("build", image = %cell.image, kernel = %cell.target.release);
        let build = async move {
            let end = builder.build_planned(&cell).await;
            (cell, end)
        };
        tasks.spawn(build.instrument(span));
    }
}

/// What a task came to. A panic is a fault of farrier's own, and goes on.
fn finished(ended: Result<Task, JoinError>) -> Option<Task> {
    match ended.map_err(JoinError::try_into_panic) {
        Ok(task) => Some(task),
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // Aborted, as at the end of a runtime.
        Err(Err(_)) => None,
    }
}
