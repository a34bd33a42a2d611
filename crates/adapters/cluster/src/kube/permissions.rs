//! Checks permissions at the API server in advance: farrier's own permissions for its rollouts, and a user's permissions
//! for requested actions.

use std::fmt::Debug;

use farrier_core::image::{Drain, RolloutSpec, Strategy, UpgradeSpec};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec},
    authorization::v1::{
        ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReview,
        SubjectAccessReviewSpec,
    },
    batch::v1::{CronJob, Job},
    core::v1::{Event, Node, Pod},
};
use kube::{
    Api,
    api::{ApiResource, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    super::error::{ApiError, ClusterError, MissingPermission, PermissionScope},
    live::KubeCluster,
    target::WatchTarget,
    watch::READ_VERBS,
    write::{CHECK_VERBS, DAEMON_SET_VERBS, PATCH_VERBS},
};

/// Permissions that builds need in their namespace, as granted in `deploy/`.
fn build_permissions() -> [(ApiResource, &'static [&'static str]); 4] {
    let pods = ApiResource::erase::<Pod>(&());
    let exec = ApiResource { plural: "pods/exec".to_owned(), ..pods.clone() };
    [
        (ApiResource::erase::<Job>(&()), &["get", "create", "delete"]),
        (pods, &["get", "list", "watch"]),
        (exec, &["get", "create"]),
        (ApiResource::erase::<Event>(&()), &["list"]),
    ]
}

/// A patch that a user requests, described as in an access review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedPatch {
    /// The API group.
    pub group: String,
    /// The resource's plural name.
    pub resource: String,
    /// Namespace of the object; `None` for objects without a namespace.
    pub namespace: Option<String>,
    /// Name of the object; `None` checks all objects.
    pub name: Option<String>,
}

/// The user that a token authenticates, and the result of the access reviews.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenOwner {
    /// The user's name.
    pub name: String,
    /// Whether the user may make each requested patch, in the order of the request.
    pub allowed: Vec<bool>,
}

impl KubeCluster {
    /// Returns the owner of a token, and which of these patches the owner may make. Returns `None` if the cluster does not
    /// accept the token.
    pub async fn review_token(
        &self,
        token: &str,
        patches: &[RequestedPatch],
    ) -> Result<Option<TokenOwner>, ClusterError> {
        let failed = |error| ClusterError::Api { action: "review a user's permissions".to_owned(), error };
        let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
        let review = self.review(&TokenReview { spec, ..TokenReview::default() }).await.map_err(failed)?;
        let status = review.status.filter(|status| status.authenticated == Some(true));
        let Some(user) = status.and_then(|status| status.user) else { return Ok(None) };
        let mut allowed = Vec::with_capacity(patches.len());
        for RequestedPatch { group, resource, namespace, name } in patches {
            let attributes = ResourceAttributes {
                verb: Some("patch".to_owned()),
                group: Some(group.clone()),
                resource: Some(resource.clone()),
                namespace: namespace.clone(),
                name: name.clone(),
                ..ResourceAttributes::default()
            };
            let spec = SubjectAccessReviewSpec {
                user: user.username.clone(),
                groups: user.groups.clone(),
                uid: user.uid.clone(),
                extra: user.extra.clone(),
                resource_attributes: Some(attributes),
                ..SubjectAccessReviewSpec::default()
            };
            let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            let response = self.review(&review).await.map_err(failed)?;
            allowed.push(response.status.is_some_and(|status| status.allowed));
        }
        Ok(Some(TokenOwner { name: user.username.unwrap_or_default(), allowed }))
    }

    /// Sends a review request to the API server, which stores nothing.
    async fn review<K>(&self, review: &K) -> Result<K, ApiError>
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
    {
        let permission = self.permission("create", &ApiResource::erase::<K>(&()), None, &["create"]);
        let (api, params): (Api<K>, _) = (Api::all(self.client()), PostParams::default());
        self.caller.call(&permission, || api.create(&params, review)).await
    }

    /// Returns the permissions that builds in this namespace need and farrier lacks. Stops at the first missing verb of each
    /// resource.
    pub async fn missing_build_permissions(
        &self,
        namespace: &str,
    ) -> Result<Vec<ClusterError>, ClusterError> {
        let mut missing = Vec::new();
        for (resource, verbs) in build_permissions() {
            for verb in verbs {
                let permission = self.permission(verb, &resource, Some(namespace), verbs);
                if !self.has_permission(&permission).await? {
                    missing.push(missing_permission("build in the cluster", permission));
                    break;
                }
            }
        }
        Ok(missing)
    }

    /// Returns the write permissions that these rollouts need and farrier lacks, including the permission to label nodes.
    /// Nothing is written. Every authenticated user may check its own permissions.
    pub async fn missing_permissions<'a>(
        &self,
        rollouts: impl IntoIterator<Item = &'a RolloutSpec>,
    ) -> Result<Vec<ClusterError>, ClusterError> {
        let mut needed = vec![self.permission("patch", &ApiResource::erase::<Node>(&()), None, PATCH_VERBS)];
        for rollout in rollouts {
            let permissions = match (rollout.strategy(), rollout.daemon_set(), rollout) {
                (Strategy::File | Strategy::Git, ..) => continue,
                (_, Some(daemon_set), _) => {
                    let (resource, namespace) = (WatchTarget::DaemonSets.resource(), &daemon_set.namespace);
                    let mut permissions =
                        vec![self.permission("patch", &resource, Some(namespace), DAEMON_SET_VERBS)];
                    if let Some(upgrade) = rollout.upgrade() {
                        permissions.extend(self.upgrade_permissions(upgrade, namespace));
                    }
                    permissions
                }
                (_, None, RolloutSpec::CustomResource { target }) => {
                    let resource = WatchTarget::Resources(target.resource).resource();
                    vec![self.permission("patch", &resource, target.namespace.as_deref(), PATCH_VERBS)]
                }
                _ => continue,
            };
            for permission in permissions {
                if !needed.contains(&permission) {
                    needed.push(permission);
                }
            }
        }
        let mut missing = Vec::new();
        for permission in needed {
            if !self.has_permission(&permission).await? {
                missing.push(missing_permission("roll out", permission));
            }
        }
        Ok(missing)
    }

    /// Returns the permissions that an upgrade needs in addition to its rollout.
    fn upgrade_permissions(&self, upgrade: &UpgradeSpec, namespace: &str) -> Vec<MissingPermission> {
        let pods = ApiResource::erase::<Pod>(&());
        let evictions = ApiResource { plural: "pods/eviction".to_owned(), ..pods.clone() };
        // An upgrade evicts the driver's own pod even if it drains no other pods.
        let mut permissions = vec![self.permission("create", &evictions, Some(namespace), &["create"])];
        if upgrade.drain != Drain::None {
            let scope = PermissionScope::AllNamespaces;
            permissions.push(self.shared.permission("list", &pods, scope.clone(), READ_VERBS));
            permissions.push(self.shared.permission("create", &evictions, scope, &["create"]));
        }
        if upgrade.creates_jobs() {
            let (templates, jobs) = (ApiResource::erase::<CronJob>(&()), ApiResource::erase::<Job>(&()));
            permissions.push(self.permission("get", &templates, Some(namespace), &["get"]));
            permissions.push(self.permission("create", &jobs, Some(namespace), CHECK_VERBS));
        }
        permissions
    }

    async fn has_permission(&self, permission: &MissingPermission) -> Result<bool, ClusterError> {
        let namespace = match &permission.scope {
            PermissionScope::Namespace(namespace) => Some(namespace.clone()),
            PermissionScope::Cluster | PermissionScope::AllNamespaces => None,
        };
        let (resource, subresource) = permission.resource.split_once('/').unzip();
        let attributes = ResourceAttributes {
            namespace,
            verb: Some(permission.verb.to_owned()),
            group: Some(permission.group.clone()),
            resource: Some(resource.unwrap_or(&permission.resource).to_owned()),
            subresource: subresource.map(str::to_owned),
            ..ResourceAttributes::default()
        };
        let spec = SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        };
        let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
        let failed =
            |error| ClusterError::Api { action: "review farrier's own permissions".to_owned(), error };
        let response = self.review(&review).await.map_err(failed)?;
        Ok(response.status.is_some_and(|status| status.allowed))
    }
}

fn missing_permission(action: &str, permission: MissingPermission) -> ClusterError {
    ClusterError::Api { action: action.to_owned(), error: ApiError::Forbidden(Box::new(permission)) }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The permissions that farrier checks are exactly those granted in `deploy/`.
    #[test]
    fn build_permissions_match_the_deployed_role() {
        let deployed = include_str!("../../../../../deploy/kustomize/builds/rbac.yaml");
        let role = deployed.split("\n---\n").next().unwrap();
        let role: Value = serde_saphyr::from_str(role).unwrap();
        let granted = role["rules"].as_array().unwrap().iter();
        let granted: Vec<Value> = granted
            .map(|rule| serde_json::json!([rule["apiGroups"][0], rule["resources"][0], rule["verbs"]]))
            .collect();
        let checked = build_permissions()
            .map(|(resource, verbs)| serde_json::json!([resource.group, resource.plural, verbs]));
        assert_eq!(granted, checked);
    }
}
