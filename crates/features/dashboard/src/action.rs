//! The actions that the page offers for cells and rollouts, and the effects of each action.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use farrier_controller::rollback::RollbackResult;
use farrier_core::{
    image::Strategy,
    plan::{Change, Outcome, PAUSED_ANNOTATION, PlannedCell, PlannedRollout, RolloutDecision, RolloutTarget},
};
use serde::Serialize;

use super::{facts::Facts, request::fields};

/// Address of the confirmation page.
pub const PATH: &str = "do";

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
    /// Restores what a rewrite replaced, as `farrier rollback` does.
    Restore,
}

impl Action {
    /// Returns the text of a button.
    pub fn title(self) -> String {
        <&str>::from(self).replace('-', " ")
    }
}

/// A link to the confirmation of an action.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Offer {
    pub title: String,
    pub link: String,
}

impl Offer {
    pub fn of(action: Action, of: &str) -> Self {
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        let query = query.append_pair("what", action.into()).append_pair("of", of).finish();
        Self { title: action.title(), link: format!("{PATH}?{query}") }
    }
}

/// Offers by the page of a cell, or by the name of an object as `farrier rollback` takes it.
pub type Offers = BTreeMap<String, Vec<Offer>>;

/// Answer to a refused request.
pub type Refusal = (StatusCode, String);

pub fn forbidden(why: impl std::fmt::Display) -> Refusal {
    (StatusCode::FORBIDDEN, format!("{why}\n"))
}

pub fn conflict(why: impl std::fmt::Display) -> Refusal {
    (StatusCode::CONFLICT, format!("{why}\n"))
}

/// Parses an address or a form: the action, its subject, and the digest of the effects that the sender was
/// shown.
pub fn asked(text: &[u8]) -> Result<(Action, String, String), Refusal> {
    let mut take = fields(text);
    let unknown = |_| (StatusCode::BAD_REQUEST, "there is no such action\n".to_owned());
    Ok((take("what").parse().map_err(unknown)?, take("of"), take("seen")))
}

pub fn of_cell(facts: &Facts, cell: &PlannedCell) -> Vec<Action> {
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

pub fn of_object(facts: &Facts, name: &str) -> Vec<Action> {
    let rollouts = facts.plan.rollouts.iter().filter(|rollout| {
        let RolloutTarget { place, object, .. } = &rollout.target;
        place.is_none() && object.name().is_some_and(|found| found == name)
    });
    let (mut waits, mut written) = (facts.live.get(name) == Some(&true), false);
    let mut is_named = false;
    for PlannedRollout { target, decision, .. } in rollouts {
        is_named = true;
        waits |= matches!(decision, RolloutDecision::Hold(why) if why.is_given_up());
        written |= target.strategy == Strategy::PerKernel || facts.record_of(target).is_some();
    }
    let all = [(Action::Resume, waits), (Action::Pause, !waits), (Action::Restore, written)];
    all.into_iter().filter(|(_, offered)| *offered && is_named).map(|(action, _)| action).collect()
}

pub fn foresee_cell(action: Action, planned: &PlannedCell) -> Result<Vec<String>, String> {
    match (action, &planned.outcome) {
        (Action::Retry, Outcome::Failed { cell, at, message }) => Ok(vec![
            format!("It failed at {at:.0}: {message}"),
            format!(
                "The failure is forgotten. The next reconcile builds the image again from the same inputs, and publishes it as {} \
                 on success.",
                cell.reference
            ),
        ]),
        (Action::Prebuild, Outcome::Build { cell, .. }) => {
            let first =
                format!("farrier builds and checks the image now, and publishes it as {}.", cell.reference);
            let needs = cell.needs.iter().map(|need| format!("It is compiled against {need}."));
            Ok(std::iter::once(first).chain(needs).collect())
        }
        (_, outcome) => Err(format!("nothing to do: the cell is {}", outcome.phase().as_str())),
    }
}

pub fn foresee_pause(changes: &[Change]) -> Vec<String> {
    let Some(change) = changes.first() else { return Vec::new() };
    let annotations = match change {
        Change::DaemonSet(change) => &change.annotations,
        Change::Resource(change) => &change.annotations,
        _ => return Vec::new(),
    };
    let (object, paused) = (change.object(), annotations.get(PAUSED_ANNOTATION));
    let says =
        paused.map(|value| format!("The annotation {PAUSED_ANNOTATION} of {object} becomes {value:?}."));
    let then = if paused.is_some_and(|value| value != "false") {
        "While it is paused, farrier writes nothing else to it: no image, no restart, no rollback. Running pods stay, and builds continue."
    } else {
        "The next reconcile decides again and sets the planned image, even if an image was restored, failed, or was changed by \
         another writer."
    };
    says.into_iter().chain([then.to_owned()]).collect()
}

pub fn foresee_rolled(rolled: &[RollbackResult]) -> Result<Vec<String>, String> {
    let mut says = Vec::new();
    for RollbackResult { step, failed, .. } in rolled {
        says.extend(
            step.error.iter().chain(failed).map(|why| format!("{}: nothing, because {why}", step.object)),
        );
        says.extend(step.fields.iter().map(|(field, outcome)| {
            let (what, detail) = outcome.summary();
            format!("{}, {field}: {what}: {detail}", step.object)
        }));
    }
    if !rolled.iter().any(|rolled| rolled.written && rolled.failed.is_none()) {
        says.insert(0, "nothing to restore".to_owned());
        return Err(says.join("; "));
    }
    says.push(
        "farrier leaves it unchanged until another image is planned, or until it is resumed.".to_owned(),
    );
    Ok(says)
}
