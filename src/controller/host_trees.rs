//! Adapter: needs that are trees of the user's, such as the headers of a host's own driver.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Controller, TargetError,
    needs::{Needed, parse_tables},
};
use crate::{
    engine::ContextEntry,
    fault::chain,
    headers::{HostTree, HostTreeLookup},
    image::{Digest, DriverImage, Need},
    kernel::KernelTarget,
    plan::{Cell, TreeKey},
};

impl Controller {
    /// Looks at the trees of these images for these kernels. One that is not there, or not fit, is a reason not to
    /// build.
    pub(super) async fn resolve_trees(
        &self,
        images: &[&DriverImage],
        targets: &BTreeSet<KernelTarget>,
        trees: &mut BTreeMap<TreeKey, Result<Digest, String>>,
    ) {
        for image in images {
            for need in &image.spec.needs {
                for target in targets {
                    let key = (image.metadata.name.clone(), need.name().clone(), target.clone());
                    if trees.contains_key(&key) {
                        continue;
                    }
                    if let Some(found) = self.digest_of_tree(need, target).await {
                        trees.insert(key, found);
                    }
                }
            }
        }
    }

    /// `None` for a need that is an image.
    async fn digest_of_tree(&self, need: &Need, target: &KernelTarget) -> Option<Result<Digest, String>> {
        let Need::Tree { name: _, tree } = need else { return None };
        let found = self.fetcher.host_tree(tree, &self.definitions.root, target).await;
        Some(match found {
            Ok(HostTreeLookup::Found(found)) => Ok(found.digest),
            Ok(HostTreeLookup::Missing { looked_for, hint }) => {
                Err(format!("there is no {looked_for}: {hint}"))
            }
            Err(error) => {
                let hint = error.hint().map(|hint| format!(": {hint}")).unwrap_or_default();
                Err(format!("{}{hint}", chain(&error)))
            }
        })
    }

    /// Adds the cell's trees to its build context and their symbols to what it is checked against.
    pub(super) async fn add_host_trees(
        &self,
        cell: &Cell,
        image: &DriverImage,
        needed: &mut Needed,
    ) -> Result<(), TargetError> {
        for need in &image.spec.needs {
            let Need::Tree { name, tree } = need else { continue };
            let found = self.fetcher.host_tree(tree, &self.definitions.root, &cell.target).await?;
            let HostTree { root, digest, symvers, origin } = match found {
                HostTreeLookup::Found(found) => found,
                HostTreeLookup::Missing { looked_for, hint } => {
                    return Err(TargetError::HeadersMissing { looked_for, hint });
                }
            };
            let planned = cell.needs.iter().find(|planned| planned.name == *name);
            if planned.is_none_or(|planned| planned.exposed != digest) {
                return Err(TargetError::TreeChanged { need: name.to_string(), origin });
            }
            let mut texts = Vec::new();
            for path in symvers {
                let place = root.join(&path);
                let bytes = tokio::fs::read(&place).await;
                let bytes = bytes.map_err(|source| TargetError::Input { path: place, source })?;
                texts.push((path, String::from_utf8_lossy(&bytes).into_owned()));
            }
            needed.tables.extend(parse_tables(name.as_str(), &origin, texts)?);
            needed.context.push(ContextEntry { dest: format!("needs/{name}"), from: root });
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "host_trees_tests.rs"]
mod tests;
