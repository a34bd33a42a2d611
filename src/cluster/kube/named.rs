//! Adapter: names in a live cluster, as its server prints them for people: some bytes for each object, whatever the objects hold.

use http::{Request, header::ACCEPT};
use kube::Client;
use serde::Deserialize;
use serde_json::Value;

use super::{
    super::error::ClusterError,
    connect::{KubeOptions, client},
};

/// What a cluster names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// Nodes.
    pub nodes: Vec<String>,
    /// The kernel releases that they run, and those of DriverBuilds, as they say them.
    pub kernels: Vec<String>,
    /// The driver images of DriverBuilds.
    pub images: Vec<String>,
}

/// Asks for the names. What is not there, or may not be read, has none.
pub async fn named(options: &KubeOptions) -> Result<Named, ClusterError> {
    let client = client(options).await?;
    let (nodes, builds) = tokio::join!(
        table(&client, "/api/v1/nodes"),
        table(&client, "/apis/farrier.dev/v1alpha1/driverbuilds")
    );
    let (nodes, builds) = (nodes.unwrap_or_default(), builds.unwrap_or_default());
    let kernels = [nodes.column("Kernel-Version"), builds.column("Kernel")].concat();
    Ok(Named { nodes: nodes.column("Name"), kernels, images: builds.column("Image") })
}

/// `Table` of `meta.k8s.io/v1`.
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
    /// The texts below a heading.
    fn column(&self, name: &str) -> Vec<String> {
        let Some(place) = self.column_definitions.iter().position(|column| column.name == name) else {
            return Vec::new();
        };
        let rows = self.rows.iter().flatten();
        rows.filter_map(|row| row.cells.get(place)?.as_str().map(str::to_owned)).collect()
    }
}

/// What `kubectl get` shows, out of the server's cache (`resourceVersion=0`).
async fn table(client: &Client, path: &str) -> kube::Result<Table> {
    let request = Request::get(format!("{path}?includeObject=None&resourceVersion=0"))
        .header(ACCEPT, "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .map_err(kube::Error::HttpError)?;
    client.request(request).await
}
