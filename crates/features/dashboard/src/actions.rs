//! Actions that users request on the page: retry and prebuild of a cell; pause, resume and restore of a rollout.
//!
//! Each action does the same as a command, after the user has confirmed its effects. Every request is authorized separately.

use std::{sync::Arc, time::Duration};

use axum::http::{HeaderMap, StatusCode};
use farrier_builder::{build_one, forget_failure, services::BuildServices};
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
        Action, ActionLink, ActionLinks, Rejection, cell_actions, conflict, forbidden, object_actions,
        parse_request, preview_cell, preview_pause, preview_rollback,
    },
    facts::Facts,
    fleet::cell_at,
    request::{bearer_token, is_cross_site, is_form, is_proxied, is_same_origin},
};

/// Timeout of a token review by the cluster.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent token reviews.
const MAX_CONCURRENT_REVIEWS: usize = 4;

/// The effects of an action, shown for confirmation.
#[derive(Debug, Serialize)]
pub struct Preview {
    pub action: Action,
    pub subject: String,
    pub title: String,
    pub effects: Vec<String>,
    /// Digest of `effects`. The confirmation returns the digest, so that only effects which the user has seen are carried out.
    pub effects_digest: String,
    /// Path of the page that offers the action.
    pub back: String,
}

/// Authorizes requests and carries out actions.
pub struct Actions {
    services: BuildServices,
    cluster: Arc<dyn Cluster>,
    /// Connection for reviewing bearer tokens.
    kube: Option<Arc<KubeCluster>>,
    /// Whether the port is on a loopback address.
    is_loopback: bool,
    /// Notifies the loop that a reconcile is needed.
    reconcile_request: Arc<Notify>,
    reviews: Semaphore,
    /// Limits prebuilds to one at a time, in addition to the loop's builds.
    builds: Arc<Semaphore>,
}

impl Actions {
    /// Creates the handler of actions. `is_loopback` states whether the port is on a loopback address.
    pub fn new(
        services: BuildServices,
        cluster: Arc<dyn Cluster>,
        kube: Option<Arc<KubeCluster>>,
        is_loopback: bool,
        reconcile_request: Arc<Notify>,
    ) -> Arc<Self> {
        let (reviews, builds) = (Semaphore::new(MAX_CONCURRENT_REVIEWS), Arc::new(Semaphore::new(1)));
        Arc::new(Self { services, cluster, kube, is_loopback, reconcile_request, reviews, builds })
    }

    /// Waits for the end of a running prebuild.
    pub async fn finish(&self) {
        // The semaphore is never closed.
        let _ = self.builds.acquire().await;
    }

    /// Returns links to the actions that the sender may take on a page.
    pub(super) async fn allowed_actions(
        &self,
        headers: &HeaderMap,
        facts: &Facts,
        path: &str,
    ) -> ActionLinks {
        let mut candidates: Vec<(String, Vec<Action>)> = match path {
            "rollouts.html" => {
                facts.paused_objects.keys().map(|name| (name.clone(), object_actions(facts, name))).collect()
            }
            _ => cell_at(facts, path)
                .map(|cell| (path.to_owned(), cell_actions(facts, cell)))
                .into_iter()
                .collect(),
        };
        candidates.retain(|(_, actions)| !actions.is_empty());
        let patches: Vec<RequestedPatch> =
            candidates.iter().map(|(subject, _)| self.patch_for(facts, subject)).collect();
        if patches.is_empty() {
            return ActionLinks::new();
        }
        let Ok(TokenOwner { allowed, .. }) = self.token_owner(headers, &patches).await else {
            return ActionLinks::new();
        };
        let mut links = ActionLinks::new();
        for ((subject, actions), is_allowed) in candidates.into_iter().zip(allowed) {
            if is_allowed {
                let action_links =
                    actions.into_iter().map(|action| ActionLink::of(action, &subject)).collect();
                links.insert(subject, action_links);
            }
        }
        links
    }

    /// Returns the effects of the action that a query string or a form requests, the sender's name, and the digest of the effects
    /// that the sender has seen.
    pub(super) async fn preview(
        &self,
        headers: &HeaderMap,
        facts: &Facts,
        query_or_form: &[u8],
    ) -> Result<(Preview, String, String), Rejection> {
        // A preview changes nothing, but its snapshot of the cluster is expensive, so other sites may not request it.
        if is_cross_site(headers) {
            return Err(forbidden(
                "another site's page sent this request: open the action from farrier's page",
            ));
        }
        let (action, subject, effects_digest) = parse_request(query_or_form)?;
        let patch = self.patch_for(facts, &subject);
        let TokenOwner { name, allowed } = self.token_owner(headers, &[patch]).await?;
        if allowed != [true] {
            return Err(forbidden(format!("{name} may not patch {subject}")));
        }
        let preview = self.preview_action(facts, action, subject).await.map_err(conflict)?;
        Ok((preview, name, effects_digest))
    }

    /// Carries out the action if its effects are still those that the sender has seen. Returns the page to go back to.
    pub(super) async fn act(
        self: &Arc<Self>,
        headers: &HeaderMap,
        facts: &Facts,
        definitions: &Definitions,
        form: &[u8],
    ) -> Result<String, Rejection> {
        if !is_same_origin(headers) {
            return Err(forbidden("only a page of this farrier may request this action"));
        }
        if !is_form(headers) {
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "the request is not a form\n".to_owned()));
        }
        let (preview, sender, effects_digest) = self.preview(headers, facts, form).await?;
        self.services
            .process
            .ensure_may_write()
            .map_err(|why| (StatusCode::SERVICE_UNAVAILABLE, error_chain(&why)))?;
        if preview.effects_digest != effects_digest {
            return Err(conflict("the effect has changed since it was shown: go back and review it again"));
        }
        let Preview { action, subject, back, .. } = preview;
        tracing::info!(sender, action = <&str>::from(action), of = subject, "action requested on the page");
        let outcome = self.carry_out(facts, definitions, action, &subject).await;
        self.reconcile_request.notify_one();
        outcome.map_err(conflict)?;
        Ok(back)
    }

    /// Identifies the sender, and checks which of these patches the sender may make.
    async fn token_owner(
        &self,
        headers: &HeaderMap,
        patches: &[RequestedPatch],
    ) -> Result<TokenOwner, Rejection> {
        if self.is_loopback && names_loopback(headers) && !is_proxied(headers) {
            return Ok(TokenOwner {
                name: "a user of this machine".to_owned(),
                allowed: vec![true; patches.len()],
            });
        }
        let (Some(kube), Some(token)) = (&self.kube, bearer_token(headers)) else {
            return Err(forbidden(
                "actions require a direct request to a loopback port (127.0.0.1 or localhost), or a bearer token that the cluster accepts",
            ));
        };
        let _permit = self.reviews.acquire().await;
        match tokio::time::timeout(REVIEW_TIMEOUT, kube.review_token(token, patches)).await {
            Ok(Ok(Some(owner))) => Ok(owner),
            Ok(Ok(None)) => Err(forbidden("the cluster does not accept the bearer token")),
            Ok(Err(error)) => Err(forbidden(error_chain(&error))),
            Err(_) => Err(forbidden("the cluster did not review the bearer token in time")),
        }
    }

    /// Returns the patch that the sender must be allowed to make. Kubernetes has no permissions for the registry and the cache,
    /// to which actions on a cell write. These actions require the permission to patch DriverBuilds instead.
    fn patch_for(&self, facts: &Facts, subject: &str) -> RequestedPatch {
        let (kind_or_namespace, name) = subject.split_once('/').unwrap_or_default();
        let kind = OperatorResource::TARGETS.into_iter().find(|kind| kind.kind() == kind_or_namespace);
        let (group, resource, namespace, name) = match kind {
            _ if cell_at(facts, subject).is_some() => {
                ("farrier.dev", "driverbuilds", self.kube.as_ref().map(|kube| kube.namespace()), None)
            }
            Some(kind) => {
                let (namespace, name) =
                    name.rsplit_once('/').map_or((None, name), |(namespace, name)| (Some(namespace), name));
                (kind.group(), kind.plural(), namespace, Some(name))
            }
            None => ("apps", "daemonsets", Some(kind_or_namespace), Some(name)),
        };
        let [namespace, name] = [namespace, name].map(|text| text.map(str::to_owned));
        RequestedPatch { group: group.to_owned(), resource: resource.to_owned(), namespace, name }
    }

    async fn preview_action(
        &self,
        facts: &Facts,
        action: Action,
        subject: String,
    ) -> Result<Preview, String> {
        let unknown_subject = || "there is no such cell or rollout".to_owned();
        let (heading, effects, back) = match (action, cell_at(facts, &subject)) {
            (_, Some(cell)) => {
                let heading = format!("{} for {}", cell.image, cell.target);
                (heading, preview_cell(action, cell)?, subject.clone())
            }
            (Action::Retry | Action::Prebuild, None) => return Err(unknown_subject()),
            (_, None) => {
                facts.paused_objects.get(&subject).ok_or_else(unknown_subject)?;
                let effects = match action {
                    Action::Restore => preview_rollback(&self.roll_back(&subject, true).await?)?,
                    _ => preview_pause(&self.pause_changes(action, &subject).await?),
                };
                (subject.clone(), effects, "rollouts.html".to_owned())
            }
        };
        let effects_digest = hex::encode(&Sha256::digest(effects.join("\0").as_bytes())[..8]);
        let title = format!("{}: {heading}", action.title());
        Ok(Preview { action, subject, title, effects, effects_digest, back })
    }

    async fn roll_back(&self, subject: &str, dry_run: bool) -> Result<Vec<RollbackResult>, String> {
        let results = roll_back(self.cluster.as_ref(), &[subject.to_owned()], dry_run).await;
        // `roll_back` takes a snapshot, which consumes the cluster's change notification. The loop may have missed a change.
        self.reconcile_request.notify_one();
        results.map_err(|error| error_chain(&error))
    }

    /// Returns the changes that pause or resume an object.
    async fn pause_changes(&self, action: Action, subject: &str) -> Result<Vec<Change>, String> {
        let snapshot = self.cluster.snapshot().await;
        self.reconcile_request.notify_one();
        let snapshot = snapshot.map_err(|error| error_chain(&error))?;
        let changes =
            plan::pause(&snapshot, subject, action == Action::Pause).map_err(|why| why.to_string())?;
        if changes.is_empty() {
            return Err(format!("nothing to do: {subject} is already in this state"));
        }
        Ok(changes)
    }

    /// Carries out or starts the action. Returns the reason for a failure.
    async fn carry_out(
        self: &Arc<Self>,
        facts: &Facts,
        definitions: &Definitions,
        action: Action,
        subject: &str,
    ) -> Result<(), String> {
        match (action, cell_at(facts, subject)) {
            (Action::Retry, Some(PlannedCell { outcome, .. })) => {
                let inputs = outcome.cell().map(|cell| cell.input_hash);
                let forgotten = inputs.map_or(Ok(()), |inputs| forget_failure(&self.services.cache, inputs));
                forgotten.map_err(|error| error_chain(&error))
            }
            (Action::Prebuild, Some(planned)) => self.prebuild(planned, definitions),
            (Action::Restore, _) => {
                let results = self.roll_back(subject, false).await?;
                let failed = results.into_iter().find_map(|result| result.failed.or(result.step.error));
                failed.map_or(Ok(()), Err)
            }
            _ => {
                let changes = self.pause_changes(action, subject).await?;
                apply_all(self.cluster.as_ref(), &changes).await.map_err(|error| error_chain(&error))
            }
        }
    }

    /// Starts a build. The cell's page shows the build's log and outcome.
    fn prebuild(
        self: &Arc<Self>,
        PlannedCell { image, target, .. }: &PlannedCell,
        definitions: &Definitions,
    ) -> Result<(), String> {
        let permit = Arc::clone(&self.builds).try_acquire_owned();
        let permit = permit.map_err(|_| {
            "another image is being built for this page: wait until it is finished".to_owned()
        })?;
        let services = BuildServices { definitions: definitions.clone(), ..self.services.clone() };
        let (this, image, target) = (Arc::clone(self), image.clone(), target.clone());
        tokio::spawn(async move {
            if let Err(error) = Box::pin(build_one(&services, &image, &target, true, false)).await {
                tracing::warn!(%image, %target, error = error_chain(&error), "prebuild failed");
            }
            this.reconcile_request.notify_one();
            drop(permit);
        });
        Ok(())
    }
}

#[cfg(test)]
#[path = "actions_tests.rs"]
mod tests;
