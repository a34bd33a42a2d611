//! The strategy `publish-only`: an operator computes the tag itself, so that nothing is left to do once the tag is
//! published.

use super::{
    Context, Decided, HoldReason, RolloutDecision, no_image, operator,
    resource::{is_published, tag_form},
};
use crate::{
    image::OperatorResource,
    plan::{Outcome, PlannedCell, outcome::CellState},
};

/// Checks every kernel that calls for the image, including announced kernels.
pub(super) fn decide(
    context: &Context<'_>,
    operator: Option<OperatorResource>,
) -> Result<Decided, HoldReason> {
    let Context { inputs, cells, image, .. } = *context;
    let all: Vec<&PlannedCell> = cells.of(image).collect();
    if all.is_empty() {
        return Err(HoldReason::NOT_FOUND);
    }
    if !inputs.cells.location.pullable {
        return Err(HoldReason::NotPullable);
    }
    let is_skipped = |planned: &PlannedCell| planned.outcome.is_unbuildable();
    let is_waiting = |planned: &PlannedCell| matches!(planned.outcome, Outcome::Waiting { .. });
    let unbuildable = all.iter().find(|planned| is_skipped(planned));
    if let Some(planned) = unbuildable.or_else(|| all.iter().find(|planned| is_waiting(planned))) {
        let CellState::Absent(absence) = cells.state(image, &planned.target) else {
            return Err(HoldReason::NOT_FOUND);
        };
        return Err(no_image(&planned.target, absence.why));
    }
    let mut pending = None;
    let mut tags = 0;
    for (planned, cell) in all.iter().filter_map(|planned| Some((planned, planned.outcome.cell()?))) {
        if let Some(kind) = operator
            && operator::versions(kind, cell, context.resources()).is_empty()
        {
            return Err(tag_form(kind, cell, context.resources()));
        }
        match cells.state(image, &planned.target) {
            CellState::Published(cell, published) => {
                context.admissible_image(cell, published)?;
                let unpublished = cell.references().find(|name| !is_published(context, cell, name));
                pending = pending.or(unpublished);
                tags += cell.references().count();
            }
            CellState::ToBuild(cell) => pending = pending.or(Some(&cell.reference)),
            CellState::Absent(absence) => return Err(no_image(&planned.target, absence.why)),
        }
    }
    Ok(match (pending, tags) {
        (Some(on), _) => RolloutDecision::Pending { on: on.clone() },
        // Kernels that the definition is not meant for need no tags.
        (None, 0) => return Err(HoldReason::NoNodes),
        (None, 1) => RolloutDecision::Settled { how: "1 tag published".to_owned() },
        (None, tags) => RolloutDecision::Settled { how: format!("{tags} tags published") },
    }
    .into())
}
