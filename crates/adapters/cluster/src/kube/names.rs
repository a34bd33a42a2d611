//! Reads names from a live cluster, for shell completion. Requests tables from the server, so that the response has only a
//! few bytes per object.

use http::{Request, header::ACCEPT};
use kube::Client;
use serde::Deserialize;
use serde_json::Value;

use super::{
    super::error::ClusterError,
    connect::{KubeOptions, client},
};

/// Names in a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterNames {
    pub nodes: Vec<String>,
    /// Kernel releases of the nodes and of DriverBuilds, unaltered.
    pub kernels: Vec<String>,
    /// Driver images of DriverBuilds.
    pub images: Vec<String>,
}

/// Requests the names. Missing or forbidden resources give no names.
pub async fn cluster_names(options: &KubeOptions) -> Result<ClusterNames, ClusterError> {
    let client = client(options).await?;
    let builds = table(&client, "/apis/farrier.dev/v1alpha1/driverbuilds");
    let (nodes, builds) = tokio::join!(table(&client, "/api/v1/nodes"), builds);
    let (nodes, builds) = (nodes.unwrap_or_default(), builds.unwrap_or_default());
    let kernels = [nodes.column("Kernel-Version"), builds.column("Kernel")].concat();
    Ok(ClusterNames { nodes: nodes.column("Name"), kernels, images: builds.column("Image") })
}

/// A `Table` of `meta.k8s.io/v1`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Table {
    column_definitions: Vec<Column>,
    rows: Option<Vec<Row>>,
}

#[derive(Debug, Deserialize)]
struct Column {
    name: String,
}

#[derive(Debug, Deserialize)]
struct Row {
    cells: Vec<Value>,
}

impl Table {
    /// Returns the texts in a column.
    fn column(&self, name: &str) -> Vec<String> {
        let Some(index) = self.column_definitions.iter().position(|column| column.name == name) else {
            return Vec::new();
        };
        let rows = self.rows.iter().flatten();
        rows.filter_map(|row| row.cells.get(index)?.as_str().map(str::to_owned)).collect()
    }
}

/// Requests the table that `kubectl get` shows, from the server's cache (`resourceVersion=0`).
async fn table(client: &Client, path: &str) -> kube::Result<Table> {
    let request = Request::get(format!("{path}?includeObject=None&resourceVersion=0"))
        .header(ACCEPT, "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .map_err(kube::Error::HttpError)?;
    client.request(request).await
}
