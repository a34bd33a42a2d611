//! The headers stage fetches the header set of the cell's kernel.

use std::path::PathBuf;

use farrier_core::plan::FetchedInputs;
use farrier_inputs::{HeaderLookup, HeaderSet};

use super::{
    cell_build::{CellBuild, ensure_planned},
    verified_tree::verified_tree,
};
use crate::services::{BuildError, Result, Stage};

/// Returns the header set of the kernel, from the cache if possible. Fails if the header set differs from the planned
/// header set, for example because a user imported headers after the plan was made.
pub(super) async fn fetch(build: &CellBuild<'_>) -> Result<HeaderSet> {
    build.stage(Stage::Headers);
    let (services, target) = (build.services, &build.cell.target);
    let source = build.family.spec.headers_for(target, &build.cell.system);
    let look = || services.fetcher.headers().find(&source, target);
    let find = || services.process.retry("fetch headers", look);
    match verified_tree(services, find, tree_of).await? {
        HeaderLookup::Found(headers) => {
            let planned = &build.cell.fetched;
            let is_planned = headers.identity == planned.headers
                && headers.unverified.as_ref() == planned.unverified.get(FetchedInputs::HEADERS);
            ensure_planned(is_planned, "the kernel's headers")?;
            Ok(*headers)
        }
        HeaderLookup::Missing { looked_for, hint } => Err(BuildError::headers_missing(&looked_for, hint)),
    }
}

fn tree_of(lookup: &HeaderLookup) -> Option<&PathBuf> {
    match lookup {
        HeaderLookup::Found(headers) => Some(&headers.root),
        HeaderLookup::Missing { .. } => None,
    }
}
