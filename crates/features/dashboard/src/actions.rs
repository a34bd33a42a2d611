//! Actions that users request on the page: retry and prebuild of a cell; pause, resume and rollback of a
//! rollout. Each action does the same as a command, after the user has confirmed its effects. Every request
//! is authorized separately.

use std::{sync::Arc, time::Duration};

use axum::http::{HeaderMap, StatusCode};
use farrier_builder::{build_one, forget_failure, parts::Parts};
use farrier_cluster::{Cluster, KubeCluster, RequestedPatch, TokenOwner};
use farrier_controller::{
    rollback::{RollbackResult, apply_all, roll_back},
    runtime::names_loopback,
};
use farrier_core::{
    image::{Definitions, OperatorResource},
    plan::{self, Change, PlannedCell},
};
use oci::error_chain;
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Notify, Semaphore};

use super::{
    action::{
        Action, Offer, Offers, Refusal, asked, conflict, forbidden, foresee_cell, foresee_pause,
        foresee_rolled, of_cell, of_object,
    },
    facts::Facts,
    fleet::cell_at,
    request::{bearer, is_form, is_of_this_page, is_passed_on},
};

/// Timeout of a token review by the cluster, and maximum number of concurrent reviews.
const PATIENCE: Duration = Duration::from_secs(10);
const REVIEWS: usize = 4;

/// The effects of an action, shown for confirmation.
#[derive(Debug, Serialize)]
pub struct Preview {
    pub action: Action,
    pub of: String,
    pub title: String,
    pub says: Vec<String>,
    /// Digest of `says`. The confirmation sends it back, so that only the shown effects are carried out.
    pub seen: String,
    /// Address of the page that leads here.
    pub back: String,
}

/// Authorizes requests and carries out actions.
pub struct Actions {
    parts: Parts,
    cluster: Arc<dyn Cluster>,
    /// Connection for reviewing bearer tokens.
    kube: Option<Arc<KubeCluster>>,
    /// Whether the port is on a loopback address.
    local: bool,
    /// Notifies the loop of changes that its next reconcile has to see.
    asked: Arc<Notify>,
    reviews: Semaphore,
    /// Allows one build at a time, in addition to the loop's builds.
    builds: Arc<Semaphore>,
}

impl Actions {
    /// Creates the handler of actions.
    pub fn new(
        parts: Parts,
        cluster: Arc<dyn Cluster>,
        kube: Option<Arc<KubeCluster>>,
        local: bool,
        asked: Arc<Notify>,
    ) -> Arc<Self> {
        let (reviews, builds) = (Semaphore::new(REVIEWS), Arc::new(Semaphore::new(1)));
        Arc::new(Self { parts, cluster, kube, local, asked, reviews, builds })
    }

    /// Waits for the end of a running build.
    pub async fn finish(&self) {
        // The semaphore is never closed.
        let _ = self.builds.acquire().await;
    }

    /// Returns the actions that the sender of this request may take on a page.
    pub(super) async fn offers(&self, headers: &HeaderMap, facts: &Facts, path: &str) -> Offers {
        let mut all: Vec<(String, Vec<Action>)> = match path {
            "rollouts.html" => facts.live.keys().map(|name| (name.clone(), of_object(facts, name))).collect(),
            _ => {
                cell_at(facts, path).map(|cell| (path.to_owned(), of_cell(facts, cell))).into_iter().collect()
            }
        };
        all.retain(|(_, actions)| !actions.is_empty());
        let patches: Vec<RequestedPatch> = all.iter().map(|(of, _)| self.patch_for(facts, of)).collect();
        if patches.is_empty() {
            return Offers::new();
        }
        let Ok(TokenOwner { allowed, .. }) = self.token_owner(headers, &patches).await else {
            return Offers::new();
        };
        let allowed = all.into_iter().zip(allowed).filter(|(_, allowed)| *allowed);
        let offered = allowed.map(|((of, actions), _)| {
            let offers = actions.into_iter().map(|action| Offer::of(action, &of)).collect();
            (of, offers)
        });
        offered.collect()
    }

    /// Returns the effects of the requested action, the sender's name, and the digest of the effects that the
    /// sender was shown.
    pub(super) async fn preview(
        &self,
        headers: &HeaderMap,
        facts: &Facts,
        text: &[u8],
    ) -> Result<(Preview, String, String), Refusal> {
        let (action, of, seen) = asked(text)?;
        let patch = self.patch_for(facts, &of);
        let TokenOwner { name, allowed } = self.token_owner(headers, &[patch]).await?;
        if allowed != [true] {
            return Err(forbidden(format!("{name} may not patch {of}")));
        }
        let preview = self.foresee(facts, action, of).await.map_err(conflict)?;
        Ok((preview, name, seen))
    }

    /// Carries out the action if its effects are still the shown ones. Returns the page to go back to.
    pub(super) async fn act(
        self: &Arc<Self>,
        headers: &HeaderMap,
        facts: &Facts,
        definitions: &Definitions,
        form: &[u8],
    ) -> Result<String, Refusal> {
        if !is_of_this_page(headers) {
            return Err(forbidden("only a page of this farrier may request this action"));
        }
        if !is_form(headers) {
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "the request is not a form\n".to_owned()));
        }
        let (preview, person, seen) = self.preview(headers, facts, form).await?;
        self.parts.may_write().map_err(|why| (StatusCode::SERVICE_UNAVAILABLE, error_chain(&why)))?;
        if preview.seen != seen {
            return Err(conflict("the effect has changed since it was shown: go back and review it again"));
        }
        let Preview { action, of, back, .. } = preview;
        tracing::info!(person, action = <&str>::from(action), of, "action requested on the page");
        let done = self.carry_out(facts, definitions, action, &of).await;
        self.asked.notify_one();
        done.map_err(conflict)?;
        Ok(back)
    }

    /// Identifies the sender, and checks which of these writes the sender may make.
    async fn token_owner(
        &self,
        headers: &HeaderMap,
        patches: &[RequestedPatch],
    ) -> Result<TokenOwner, Refusal> {
        if self.local && names_loopback(headers) && !is_passed_on(headers) {
            return Ok(TokenOwner {
                name: "a person at this machine".to_owned(),
                allowed: vec![true; patches.len()],
            });
        }
        let (Some(kube), Some(token)) = (&self.kube, bearer(headers)) else {
            return Err(forbidden(
                "actions require a port on the loopback interface, under its own name, or a bearer token that the cluster accepts",
            ));
        };
        let _turn = self.reviews.acquire().await;
        match tokio::time::timeout(PATIENCE, kube.review_token(token, patches)).await {
            Ok(Ok(Some(person))) => Ok(person),
            Ok(Ok(None)) => Err(forbidden("the cluster does not accept the bearer token")),
            Ok(Err(error)) => Err(forbidden(error_chain(&error))),
            Err(_) => Err(forbidden("the cluster did not review the bearer token in time")),
        }
    }

    /// Returns the write whose permission an action needs. Actions on a cell write to the registry and the
    /// cache, so they need the permission to write the DriverBuild of the cell.
    fn patch_for(&self, facts: &Facts, of: &str) -> RequestedPatch {
        let (place, name) = of.split_once('/').unwrap_or_default();
        let kind = OperatorResource::ALL.into_iter().find(|kind| kind.kind() == place);
        let (group, resource, namespace, name) = match kind {
            _ if cell_at(facts, of).is_some() => {
                ("farrier.dev", "driverbuilds", self.kube.as_ref().map(|kube| kube.namespace()), None)
            }
            Some(kind) => (kind.group(), kind.plural(), None, Some(name)),
            None => ("apps", "daemonsets", Some(place), Some(name)),
        };
        let [namespace, name] = [namespace, name].map(|text| text.map(str::to_owned));
        RequestedPatch { group: group.to_owned(), resource: resource.to_owned(), namespace, name }
    }

    async fn foresee(&self, facts: &Facts, action: Action, of: String) -> Result<Preview, String> {
        let gone = || "there is no such cell or rollout".to_owned();
        let (subject, says, back) = match (action, cell_at(facts, &of)) {
            (_, Some(cell)) => {
                let subject = format!("{} for {}", cell.image, cell.target);
                (subject, foresee_cell(action, cell)?, of.clone())
            }
            (Action::Retry | Action::Prebuild, None) => return Err(gone()),
            (_, None) => {
                facts.live.get(&of).ok_or_else(gone)?;
                let says = match action {
                    Action::Restore => foresee_rolled(&self.roll_back(&of, true).await?)?,
                    _ => foresee_pause(&self.pause_changes(action, &of).await?),
                };
                (of.clone(), says, "rollouts.html".to_owned())
            }
        };
        let seen = hex::encode(&Sha256::digest(says.join("\0").as_bytes())[..8]);
        let title = format!("{}: {subject}", action.title());
        Ok(Preview { action, of, title, says, seen, back })
    }

    async fn roll_back(&self, of: &str, dry_run: bool) -> Result<Vec<RollbackResult>, String> {
        let rolled = roll_back(self.cluster.as_ref(), &[of.to_owned()], dry_run).await;
        // The snapshot consumed the cluster's change notification, so wake the loop.
        self.asked.notify_one();
        rolled.map_err(|error| error_chain(&error))
    }

    /// Returns the changes that pause or resume an object.
    async fn pause_changes(&self, action: Action, of: &str) -> Result<Vec<Change>, String> {
        let snapshot = self.cluster.snapshot().await;
        self.asked.notify_one();
        let snapshot = snapshot.map_err(|error| error_chain(&error))?;
        let changes = plan::pause(&snapshot, of, action == Action::Pause).map_err(|why| why.to_string())?;
        let nothing = || format!("nothing to do: {of} is already in this state");
        if changes.is_empty() { Err(nothing()) } else { Ok(changes) }
    }

    /// Carries out or starts the action. Returns the reason for a failure.
    async fn carry_out(
        self: &Arc<Self>,
        facts: &Facts,
        definitions: &Definitions,
        action: Action,
        of: &str,
    ) -> Result<(), String> {
        match (action, cell_at(facts, of)) {
            (Action::Retry, Some(PlannedCell { outcome, .. })) => {
                let inputs = outcome.cell().map(|cell| cell.input_hash);
                let forgotten = inputs.map_or(Ok(()), |inputs| forget_failure(&self.parts.cache, inputs));
                forgotten.map_err(|error| error_chain(&error))
            }
            (Action::Prebuild, Some(planned)) => self.prebuild(planned, definitions),
            (Action::Restore, _) => {
                let rolled = self.roll_back(of, false).await?;
                let failed = rolled.into_iter().find_map(|rolled| rolled.failed.or(rolled.step.error));
                failed.map_or(Ok(()), Err)
            }
            _ => {
                let changes = self.pause_changes(action, of).await?;
                apply_all(self.cluster.as_ref(), &changes).await.map_err(|error| error_chain(&error))
            }
        }
    }

    /// Starts a build. The cell's page shows its log and its outcome.
    fn prebuild(
        self: &Arc<Self>,
        PlannedCell { image, target, .. }: &PlannedCell,
        definitions: &Definitions,
    ) -> Result<(), String> {
        let turn = Arc::clone(&self.builds).try_acquire_owned();
        let turn = turn.map_err(|_| {
            "another image is being built for this page: wait until it is finished".to_owned()
        })?;
        let parts = Parts { definitions: definitions.clone(), ..self.parts.clone() };
        let (this, image, target) = (Arc::clone(self), image.clone(), target.clone());
        tokio::spawn(async move {
            if let Err(error) = Box::pin(build_one(&parts, &image, &target, true, false)).await {
                tracing::warn!(%image, %target, error = error_chain(&error), "prebuild failed");
            }
            this.asked.notify_one();
            drop(turn);
        });
        Ok(())
    }
}

#[cfg(test)]
#[path = "actions_tests.rs"]
mod tests;
