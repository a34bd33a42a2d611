//! Pure: the strategy `publish-only`: an operator computes the tag by itself, so that nothing is left to do once it
//! is published.

use super::{
    CellState, Context, Decided, HoldReason, RolloutDecision,
    image::passes,
    operator,
    resource::{is_published, tag_form},
};
use crate::image::OperatorResource;

/// Looks at every kernel that calls for the image, announced ones included.
pub(super) fn decide(
    context: &Context<'_>,
    operator: Option<OperatorResource>,
) -> Result<Decided, HoldReason> {
    let Context { inputs, states, groups: _, image, spec: _ } = *context;
    if !inputs.matrix.calls_for(image) {
        return Err(HoldReason::NotFound);
    }
    if !inputs.pullable {
        return Err(HoldReason::NotPullable);
    }
    let skipped = inputs.matrix.skipped.iter().filter(|skipped| skipped.image == *image);
    if let Some(skipped) = skipped.clone().find(|skipped| !skipped.why.is_finding()) {
        let (kernel, detail) = (skipped.target.to_string(), skipped.why.to_string());
        return Err(HoldReason::NoImage { kernel, detail });
    }
    if let Some(waiting) = inputs.matrix.waiting.iter().find(|waiting| waiting.image == *image) {
        let (kernel, detail) = (waiting.target.to_string(), format!("it {}", waiting.why()));
        return Err(HoldReason::NoImage { kernel, detail });
    }
    let mut pending = None;
    let mut tags = 0;
    for cell in inputs.matrix.cells.iter().filter(|cell| cell.image == *image) {
        if let Some(kind) = operator
            && operator::versions(kind, cell).is_empty()
        {
            return Err(tag_form(kind, cell));
        }
        match states.get(&(&cell.image, &cell.target)).map(|(_, state)| state) {
            Some(CellState::Published(published)) => {
                passes(inputs, image, published, &published.pinned(&cell.reference), &cell.target)?;
                let lacking = cell.references().find(|reference| !is_published(context, cell, reference));
                pending = pending.or(lacking);
                tags += cell.references().count();
            }
            Some(CellState::Building) => pending = pending.or(Some(&cell.reference)),
            Some(CellState::Absent(detail)) => {
                let (kernel, detail) = (cell.target.to_string(), detail.clone());
                return Err(HoldReason::NoImage { kernel, detail });
            }
            None => {}
        }
    }
    Ok(match (pending, tags) {
        (Some(on), _) => RolloutDecision::Pending { on: on.clone() },
        // Kernels that the definition is not meant for call for nothing.
        (None, 0) => return Err(HoldReason::NoNodes),
        (None, 1) => RolloutDecision::Settled { how: "1 tag published".to_owned() },
        (None, tags) => RolloutDecision::Settled { how: format!("{tags} tags published") },
    }
    .into())
}
