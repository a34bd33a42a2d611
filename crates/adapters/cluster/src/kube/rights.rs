//! Checks permissions at the API server in advance: farrier's permissions for its rollouts, and a person's permissions for
//! requested actions.

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
    super::error::{ApiError, ClusterError, MissingRight, Scope},
    live::KubeCluster,
    target::Target,
    watch::READ,
    write::{CHECK_VERBS, DAEMON_SET_VERBS, PATCHED},
};

/// Resources and verbs that builds use in their namespace, as granted in `deploy/`.
fn of_builds() -> [(ApiResource, &'static [&'static str]); 4] {
    let pods = ApiResource::erase::<Pod>(&());
    let exec = ApiResource { plural: "pods/exec".to_owned(), ..pods.clone() };
    [
        (ApiResource::erase::<Job>(&()), &["get", "create", "delete"]),
        (pods, &["get", "list", "watch"]),
        (exec, &["get", "create"]),
        (ApiResource::erase::<Event>(&()), &["list"]),
    ]
}

/// A patch that a person requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedPatch {
    /// The API group.
    pub group: String,
    /// The resource's plural name.
    pub resource: String,
    /// Namespace of the object; `None` for objects without a namespace.
    pub namespace: Option<String>,
    /// Name of the object; `None` checks all objects.
    pub name: Option<String>,
}

/// The owner of a token, with permissions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// The user's name.
    pub name: String,
    /// For each requested patch, whether the person may make it.
    pub may: Vec<bool>,
}

impl KubeCluster {
    /// Returns the owner of a token, and which of these patches the cluster allows. `None` if the cluster does not accept the
    /// token.
    pub async fn person(&self, token: &str, patches: &[AskedPatch]) -> Result<Option<Person>, ClusterError> {
        let failed = |error| ClusterError::Api { action: "review a person's permissions".to_owned(), error };
        let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
        let review = self.review(&TokenReview { spec, ..TokenReview::default() }).await.map_err(failed)?;
        let status = review.status.filter(|status| status.authenticated == Some(true));
        let Some(user) = status.and_then(|status| status.user) else { return Ok(None) };
        let mut may = Vec::with_capacity(patches.len());
        for AskedPatch { group, resource, namespace, name } in patches {
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
            let question = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            let answer = self.review(&question).await.map_err(failed)?;
            may.push(answer.status.is_some_and(|status| status.allowed));
        }
        Ok(Some(Person { name: user.username.unwrap_or_default(), may }))
    }

    /// Sends a review request to the API server, which stores nothing.
    async fn review<K>(&self, question: &K) -> Result<K, ApiError>
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
    {
        let right = self.right("create", &ApiResource::erase::<K>(&()), None, &["create"]);
        let (api, params): (Api<K>, _) = (Api::all(self.client()), PostParams::default());
        self.caller.call(&right, || api.create(&params, question)).await
    }

    /// Returns the permissions that Jobs of builds in this namespace need and farrier lacks: the first one of each resource.
    pub async fn missing_build_rights(&self, namespace: &str) -> Result<Vec<ClusterError>, ClusterError> {
        let mut missing = Vec::new();
        for (resource, verbs) in of_builds() {
            for verb in verbs {
                let right = self.right(verb, &resource, Some(namespace), verbs);
                if !self.has(&right).await? {
                    missing.push(lacking("build in the cluster", right));
                    break;
                }
            }
        }
        Ok(missing)
    }

    /// Returns the write permissions that these rollouts need and farrier lacks, including the permission to label nodes. Every
    /// authenticated user may check its own permissions. Nothing is written.
    pub async fn missing_rights<'a>(
        &self,
        rollouts: impl IntoIterator<Item = &'a RolloutSpec>,
    ) -> Result<Vec<ClusterError>, ClusterError> {
        let mut needed = vec![self.right("patch", &ApiResource::erase::<Node>(&()), None, PATCHED)];
        for rollout in rollouts {
            let rights = match (rollout.strategy(), rollout.daemon_set(), rollout) {
                (Strategy::File | Strategy::Git, ..) => continue,
                (_, Some(found), _) => {
                    let resource = Target::DaemonSets.resource();
                    let patch = self.right("patch", &resource, Some(&found.namespace), DAEMON_SET_VERBS);
                    let upgrade = rollout.upgrade().map(|upgrade| self.of_upgrade(upgrade, &found.namespace));
                    [vec![patch], upgrade.unwrap_or_default()].concat()
                }
                (_, None, RolloutSpec::CustomResource { resource, .. }) => {
                    vec![self.right("patch", &Target::Resources(*resource).resource(), None, PATCHED)]
                }
                _ => continue,
            };
            for right in rights {
                if !needed.contains(&right) {
                    needed.push(right);
                }
            }
        }
        let mut missing = Vec::new();
        for right in needed {
            if !self.has(&right).await? {
                missing.push(lacking("roll out", right));
            }
        }
        Ok(missing)
    }

    /// Returns the permissions that an upgrade needs in addition to its rollout.
    fn of_upgrade(&self, upgrade: &UpgradeSpec, namespace: &str) -> Vec<MissingRight> {
        let pods = ApiResource::erase::<Pod>(&());
        let evictions = ApiResource { plural: "pods/eviction".to_owned(), ..pods.clone() };
        // The driver's own pod is evicted even if no other pod is.
        let mut rights = vec![self.right("create", &evictions, Some(namespace), &["create"])];
        if upgrade.drain != Drain::None {
            rights.push(self.shared.right("list", &pods, Scope::AllNamespaces, READ));
            rights.push(self.shared.right("create", &evictions, Scope::AllNamespaces, &["create"]));
        }
        if upgrade.makes_jobs() {
            let (templates, jobs) = (ApiResource::erase::<CronJob>(&()), ApiResource::erase::<Job>(&()));
            rights.push(self.right("get", &templates, Some(namespace), &["get"]));
            rights.push(self.right("create", &jobs, Some(namespace), CHECK_VERBS));
        }
        rights
    }

    async fn has(&self, right: &MissingRight) -> Result<bool, ClusterError> {
        let namespace = match &right.scope {
            Scope::Namespace(namespace) => Some(namespace.clone()),
            Scope::Cluster | Scope::AllNamespaces => None,
        };
        let (resource, subresource) = right.resource.split_once('/').unzip();
        let question = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    namespace,
                    verb: Some(right.verb.to_owned()),
                    group: Some(right.group.clone()),
                    resource: Some(resource.unwrap_or(&right.resource).to_owned()),
                    subresource: subresource.map(str::to_owned),
                    ..ResourceAttributes::default()
                }),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let failed =
            |error| ClusterError::Api { action: "review farrier's own permissions".to_owned(), error };
        let answer = self.review(&question).await.map_err(failed)?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }
}

fn lacking(action: &str, right: MissingRight) -> ClusterError {
    ClusterError::Api { action: action.to_owned(), error: ApiError::Forbidden(Box::new(right)) }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The permissions that farrier checks are exactly those granted in `deploy/`.
    #[test]
    fn builds_ask_for_the_rights_that_are_deployed() {
        let deployed = include_str!("../../../../../deploy/kustomize/builds/rbac.yaml");
        let role = deployed.split("\n---\n").next().unwrap();
        let role: Value = serde_saphyr::from_str(role).unwrap();
        let granted = role["rules"].as_array().unwrap().iter();
        let granted: Vec<Value> = granted
            .map(|rule| serde_json::json!([rule["apiGroups"][0], rule["resources"][0], rule["verbs"]]))
            .collect();
        let asked =
            of_builds().map(|(resource, verbs)| serde_json::json!([resource.group, resource.plural, verbs]));
        assert_eq!(granted, asked);
    }
}
