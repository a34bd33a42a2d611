//! Adapter: which images any DaemonSet or pod of the cluster names, farrier's rollout targets or not.

use std::collections::BTreeSet;

use http::Method;
use serde_json::Value;
use url::form_urlencoded;

use super::{
    super::ClusterError,
    KubeCluster,
    call::Call,
    words::{MissingRight, Scope},
};
use crate::plan::Candidates;

/// Objects that are asked for at once: a pod has some 10 KiB.
const PAGE: usize = 250;

impl KubeCluster {
    /// Reads all DaemonSets and pods, page by page, and keeps nothing but what they mention.
    pub(super) async fn add_mentions(
        &self,
        images: &Candidates,
        mentioned: &mut BTreeSet<String>,
    ) -> Result<(), ClusterError> {
        for (group, resource, path) in
            [("apps", "daemonsets", "/apis/apps/v1/daemonsets"), ("", "pods", "/api/v1/pods")]
        {
            let mut next = Some(String::new());
            while let Some(token) = next.take() {
                let page = self.caller.call(&self.list(group, resource, path, &token)).await?;
                for item in page["items"].as_array().into_iter().flatten() {
                    images.mentioned_in(&item.to_string(), mentioned);
                }
                next = page["metadata"]["continue"]
                    .as_str()
                    .filter(|token| !token.is_empty())
                    .map(str::to_owned);
            }
        }
        Ok(())
    }

    fn list(&self, group: &str, resource: &str, path: &str, token: &str) -> Call {
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.append_pair("limit", &PAGE.to_string());
        if !token.is_empty() {
            query.append_pair("continue", token);
        }
        Call {
            action: format!("list {resource} in all namespaces, to see which images they name"),
            method: Method::GET,
            path: format!("{path}?{}", query.finish()),
            content_type: "application/json",
            body: Value::Null,
            right: MissingRight {
                user: self.shared.user.clone(),
                verb: "list",
                group: group.to_owned(),
                resource: resource.to_owned(),
                scope: Scope::AllNamespaces,
                verbs: &["get", "list", "watch"],
            },
        }
    }
}
