//! The actions that the page offers for cells and rollouts, and the previews of their effects.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use farrier_controller::rollback::RollbackResult;
use farrier_core::{
    image::Strategy,
    plan::{Change, Outcome, PAUSED_ANNOTATION, PlannedCell, PlannedRollout, RolloutDecision, RolloutTarget},
};
use serde::Serialize;

use super::{facts::Facts, request::take_fields};

/// Path of the confirmation page.
pub const ACTION_PATH: &str = "do";

/// An action of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, Serialize)]
#[strum(serialize_all = "kebab-case")]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Retries a failed build, as `farrier retry` does.
    Retry,
    /// Builds an image in advance, as `farrier prebuild` does.
    Prebuild,
    /// Stops all writes to an object.
    Pause,
    /// Resumes writes to an object, also after a rollback.
    Resume,
    /// Restores the values that a rewrite replaced, as `farrier rollback` does.
    Restore,
}

impl Action {
    /// Returns the text of a button.
    pub fn title(self) -> String {
        <&str>::from(self).replace('-', " ")
    }
}

/// Link to the confirmation page of an action.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ActionLink {
    pub title: String,
    pub link: String,
}

impl ActionLink {
    pub fn of(action: Action, subject: &str) -> Self {
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        let query = query.append_pair("what", action.into()).append_pair("of", subject).finish();
        Self { title: action.title(), link: format!("{ACTION_PATH}?{query}") }
    }
}

/// Links by subject: the path of a cell's page, or the name of an object as `farrier rollback` takes it.
pub type ActionLinks = BTreeMap<String, Vec<ActionLink>>;

/// Response to a rejected request.
pub type Rejection = (StatusCode, String);

pub fn forbidden(why: impl std::fmt::Display) -> Rejection {
    (StatusCode::FORBIDDEN, format!("{why}\n"))
}

pub fn conflict(why: impl std::fmt::Display) -> Rejection {
    (StatusCode::CONFLICT, format!("{why}\n"))
}

/// Parses a query string or a form into the action, its subject, and the digest of the effects that the sender has seen.
pub fn parse_request(text: &[u8]) -> Result<(Action, String, String), Rejection> {
    let mut take_field = take_fields(text);
    let unknown = |_| (StatusCode::BAD_REQUEST, "there is no such action\n".to_owned());
    Ok((take_field("what").parse().map_err(unknown)?, take_field("of"), take_field("seen")))
}

/// Returns the actions that the page offers for a cell.
pub fn cell_actions(facts: &Facts, cell: &PlannedCell) -> Vec<Action> {
    let activity = facts.activity.get(&(cell.image.clone(), cell.target.clone()));
    match &cell.outcome {
        Outcome::Failed { .. } => vec![Action::Retry],
        // Do not offer a build that the loop is already running.
        Outcome::Build { .. } if activity.is_none_or(|activity| activity.stage.is_none()) => {
            vec![Action::Prebuild]
        }
        _ => Vec::new(),
    }
}

/// Returns the actions that the page offers for an object, if a rollout writes to it.
pub fn object_actions(facts: &Facts, name: &str) -> Vec<Action> {
    let rollouts = facts.plan.rollouts.iter().filter(|rollout| {
        let RolloutTarget { location, object, .. } = &rollout.target;
        location.is_none() && object.name().is_some_and(|object_name| object_name == name)
    });
    let (mut can_resume, mut can_restore) = (facts.paused_objects.get(name) == Some(&true), false);
    let mut has_rollout = false;
    for PlannedRollout { target, decision, .. } in rollouts {
        has_rollout = true;
        can_resume |= matches!(decision, RolloutDecision::Hold(why) if why.is_given_up());
        can_restore |= target.strategy == Strategy::PerKernel || facts.record_of(target).is_some();
    }
    if !has_rollout {
        return Vec::new();
    }
    let actions =
        [(Action::Resume, can_resume), (Action::Pause, !can_resume), (Action::Restore, can_restore)];
    actions.into_iter().filter(|(_, is_offered)| *is_offered).map(|(action, _)| action).collect()
}

/// Returns the effects of an action on a cell, or why there is nothing to do.
pub fn preview_cell(action: Action, planned: &PlannedCell) -> Result<Vec<String>, String> {
    match (action, &planned.outcome) {
        (Action::Retry, Outcome::Failed { cell, at, message }) => Ok(vec![
            format!("The build failed at {at:.0}: {message}"),
            format!(
                "The failure is forgotten. The next reconcile builds the image again from the same inputs, and publishes it as {} \
                 on success.",
                cell.reference
            ),
        ]),
        (Action::Prebuild, Outcome::Build { cell, .. }) => {
            let first =
                format!("farrier builds and checks the image now, and publishes it as {}.", cell.reference);
            let needs = cell.needs.iter().map(|need| format!("The image is compiled against {need}."));
            Ok(std::iter::once(first).chain(needs).collect())
        }
        (_, outcome) => Err(format!("nothing to do: the cell is {}", outcome.phase().as_str())),
    }
}

/// Returns the effects of pausing or resuming an object.
pub fn preview_pause(changes: &[Change]) -> Vec<String> {
    let Some(change) = changes.first() else { return Vec::new() };
    let annotations = match change {
        Change::DaemonSet(change) => &change.annotations,
        Change::Resource(change) => &change.annotations,
        _ => return Vec::new(),
    };
    let (object, paused) = (change.object(), annotations.get(PAUSED_ANNOTATION));
    let effects =
        paused.map(|value| format!("The annotation {PAUSED_ANNOTATION} of {object} becomes {value:?}."));
    let consequence = if paused.is_some_and(|value| value != "false") {
        "While the object is paused, farrier writes nothing else to it: no image, no restart, no rollback. Running pods stay, and builds continue."
    } else {
        "The next reconcile decides again and sets the planned image, even if an image was restored, failed, or was changed by \
         another writer."
    };
    effects.into_iter().chain([consequence.to_owned()]).collect()
}

/// Returns the effects of a rollback, or why nothing would be restored.
pub fn preview_rollback(results: &[RollbackResult]) -> Result<Vec<String>, String> {
    let mut effects = Vec::new();
    for RollbackResult { step, failed, .. } in results {
        effects.extend(
            step.error.iter().chain(failed).map(|why| format!("{}: nothing, because {why}", step.object)),
        );
        effects.extend(step.fields.iter().map(|(field, outcome)| {
            let (action, detail) = outcome.summary();
            format!("{}, {field}: {action}: {detail}", step.object)
        }));
    }
    if !results.iter().any(|result| result.written && result.failed.is_none()) {
        effects.insert(0, "nothing to restore".to_owned());
        return Err(effects.join("; "));
    }
    effects.push(
        "farrier leaves the object unchanged until another image is planned, or until the object is resumed."
            .to_owned(),
    );
    Ok(effects)
}
