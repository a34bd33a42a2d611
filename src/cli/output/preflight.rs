//! What `farrier preflight` answers, as people read it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::plan::laid_out;
use crate::plan::{Next, readiness_table};

/// What `farrier preflight -o json` prints.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer<'a> {
    /// May all of them?
    pub ready: bool,
    /// The kernel.
    pub kernel: String,
    /// The nodes that were asked about.
    pub nodes: Vec<Asked<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Asked<'a> {
    pub node: &'a str,
    pub ready: bool,
    #[serde(flatten)]
    pub next: Option<&'a Next>,
    /// Why it is not known which images it will need.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// One table for each platform and set of needs, with the nodes that it is for.
pub fn text(answer: &Answer<'_>) -> String {
    let mut groups: BTreeMap<(bool, String, String), Vec<&str>> = BTreeMap::new();
    for Asked { node, ready, next, message } in &answer.nodes {
        let (kernel, table) = match (next, message) {
            (Some(next), _) => (next.kernel.to_string(), laid_out(&readiness_table(next))),
            (None, why) => (answer.kernel.clone(), format!("{}\n", why.as_deref().unwrap_or_default())),
        };
        groups.entry((*ready, kernel, table)).or_default().push(node);
    }
    let group = |((ready, kernel, table), nodes): ((bool, String, String), Vec<&str>)| {
        let verdict = if ready { "ready" } else { "not ready" };
        let some = nodes[..nodes.len().min(5)].join(", ");
        let more = nodes.len().saturating_sub(5);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{some}{more}: {verdict} for {kernel}\n{table}")
    };
    groups.into_iter().map(group).collect::<Vec<_>>().join("\n")
}
