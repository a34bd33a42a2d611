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

/// Checks every kernel target of the image, including announced kernels. The operator of a resource `kind` computes the tags.
pub(super) fn decide(context: &Context<'_>, kind: Option<OperatorResource>) -> Result<Decided, HoldReason> {
    let Context { inputs, cells, image, .. } = *context;
    if !inputs.cells.location.pullable {
        return Err(HoldReason::NotPullable);
    }
    let mut all: Vec<&PlannedCell> = cells.of(image).collect();
    // Report kernels first for which nothing can be built now.
    all.sort_by_key(|planned| match planned.outcome {
        Outcome::Skipped { .. } => 0,
        Outcome::Waiting { .. } => 1,
        _ => 2,
    });
    let (mut pending, mut tags) = (None, 0);
    for planned in all {
        // Kernels that the definition is not meant for need no tags.
        if matches!(&planned.outcome, Outcome::Skipped { why } if why.is_not_applicable()) {
            continue;
        }
        if let (Some(kind), Some(cell)) = (kind, planned.outcome.cell())
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
        (None, 0) => return Err(HoldReason::NoNodes),
        (None, 1) => RolloutDecision::Settled { how: "1 tag published".to_owned() },
        (None, tags) => RolloutDecision::Settled { how: format!("{tags} tags published") },
    }
    .into())
}
