//! Adapter: asks the API server beforehand whether farrier may write what its rollouts write.

use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
    batch::v1::Job,
    core::v1::{Event, Node, Pod},
};
use kube::{
    Api,
    api::{ApiResource, PostParams},
};

use super::{
    super::error::{ApiError, ClusterError, MissingRight, Scope},
    live::KubeCluster,
    target::Target,
    write::{DAEMON_SET_VERBS, PATCHED},
};
use crate::image::{RolloutSpec, Strategy};

/// What builds do in their namespace, as `deploy/` grants it: resources with their verbs.
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

impl KubeCluster {
    /// The rights that builds as Jobs of this namespace need and farrier does not have: of each resource the first.
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

    /// The rights to write that these rollouts need and farrier does not have, and that to mark nodes. Every authenticated
    /// user may ask this of itself; nothing is written.
    pub async fn missing_rights<'a>(
        &self,
        rollouts: impl IntoIterator<Item = &'a RolloutSpec>,
    ) -> Result<Vec<ClusterError>, ClusterError> {
        let mut needed = vec![self.right("patch", &ApiResource::erase::<Node>(&()), None, PATCHED)];
        for rollout in rollouts {
            let right = match (rollout.strategy(), rollout.daemon_set(), rollout) {
                (Strategy::File | Strategy::Git, ..) => continue,
                (_, Some(found), _) => {
                    let resource = Target::DaemonSets.resource();
                    self.right("patch", &resource, Some(&found.namespace), DAEMON_SET_VERBS)
                }
                (_, None, RolloutSpec::CustomResource { resource, .. }) => {
                    self.right("patch", &Target::Resources(*resource).resource(), None, PATCHED)
                }
                _ => continue,
            };
            if !needed.contains(&right) {
                needed.push(right);
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
        let api: Api<SelfSubjectAccessReview> = Api::all(self.client());
        let params = PostParams::default();
        let asked = self.caller.call(right, || api.create(&params, &question)).await;
        let failed = |error| ClusterError::Api { action: "ask which rights farrier has".to_owned(), error };
        Ok(asked.map_err(failed)?.status.is_some_and(|status| status.allowed))
    }
}

fn lacking(action: &str, right: MissingRight) -> ClusterError {
    ClusterError::Api { action: action.to_owned(), error: ApiError::Forbidden(Box::new(right)) }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// What is asked for is what `deploy/` grants, no more and no less.
    #[test]
    fn builds_ask_for_the_rights_that_are_deployed() {
        let deployed = include_str!("../../../deploy/kustomize/builds/rbac.yaml");
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
