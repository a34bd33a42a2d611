//! Adapter: check reports, as the registry has them beside the images.

use serde::{Deserialize, Serialize};

use crate::{
    error_chain,
    image::{Digest, Repository},
    images::{CHECK_REPORT, StoredImage},
    parts::{Parts, TargetError},
    plan::Outcome,
};

/// What a page shows of a check report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    pub verdict: String,
    pub findings: Vec<Finding>,
    pub modules: Vec<Module>,
    pub boot: Option<Boot>,
}

/// One module.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Module {
    pub name: String,
    pub verdict: String,
    pub findings: Vec<Finding>,
}

/// One reason.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    pub rule: String,
    pub verdict: String,
    pub message: String,
    pub found: Option<String>,
    pub wanted: Option<String>,
    pub remedy: String,
}

/// What a boot of the kernel showed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Boot {
    pub kernel: String,
    pub modules: Vec<BootedModule>,
}

/// One module, with the kernel's own words.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct BootedModule {
    pub name: String,
    pub outcome: String,
    pub error: Option<String>,
    pub messages: Vec<String>,
}

/// The report of an image by digest; `None` where there is none beside it.
async fn report(
    parts: &Parts,
    repository: &Repository,
    digest: &Digest,
) -> Result<Option<Report>, TargetError> {
    let found = StoredImage { parts, repository, digest }.find_document(&CHECK_REPORT).await?;
    // One in another form than this farrier's is not shown.
    Ok(found.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

/// The report of a cell's image: `None` where there is no image, `Err` with the reason where it cannot be read.
pub async fn report_of(parts: &Parts, outcome: Option<&Outcome>) -> Option<Result<Report, String>> {
    let Some(Outcome::UpToDate { cell, published, .. }) = outcome else { return None };
    Some(match report(parts, &cell.reference.repository, &published.digest).await {
        Ok(Some(report)) => Ok(report),
        Ok(None) => Err("there is none beside the image".to_owned()),
        Err(error) => Err(error_chain(&error)),
    })
}
