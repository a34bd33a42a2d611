//! Ensures that cached trees have not been tampered with before a build starts from them.

use std::{io, path::PathBuf};

use farrier_engines::Engine;
use farrier_local::cache::{Cache, CacheError};

use crate::services::{BuildServices, Result};

/// Returns an item whose tree is in the cache. If build steps run as the owner of the trees, the tree is compared with
/// its record. A changed tree is created again from its source.
pub(super) async fn verified_tree<T, F>(
    services: &BuildServices,
    get: impl Fn() -> F,
    tree: fn(&T) -> Option<&PathBuf>,
) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let engine = &services.tools.engine;
    let is_owner = matches!(engine.get().await, Ok(Engine::Sandbox(sandbox)) if sandbox.owner().owns_cache());
    if is_owner { get_intact(&services.cache, get, tree).await } else { get().await }
}

/// Gets the item, and gets it once more if its tree was changed.
async fn get_intact<T, F>(cache: &Cache, get: impl Fn() -> F, tree: fn(&T) -> Option<&PathBuf>) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let item = get().await?;
    let Some(first) = tree(&item) else { return Ok(item) };
    if cache.is_tree_intact(first).await? {
        return Ok(item);
    }
    // The check has quarantined the changed tree, so that `get` creates the tree again.
    let remade = get().await?;
    match tree(&remade) {
        Some(second) if !cache.is_tree_intact(second).await? => {
            let text =
                format!("cannot use {}: it was modified again right after it was created", second.display());
            Err(CacheError(io::Error::other(text)).into())
        }
        _ => Ok(remade),
    }
}

#[cfg(test)]
mod tests {
    use farrier_inputs::{HeaderLookup, HeaderSet, find_build};
    use fs_err as fs;
    use serde_json::json;

    use super::*;
    use crate::testing::{Bench, K9};

    async fn headers(bench: &Bench) -> Result<Box<HeaderSet>> {
        let source = bench.definition().1.spec.headers.clone();
        match bench.services.fetcher.headers().find(&source, &Bench::target(K9)).await? {
            HeaderLookup::Found(headers) => Ok(headers),
            HeaderLookup::Missing { looked_for, .. } => panic!("{looked_for}"),
        }
    }

    /// Simulates a step that escaped from its sandbox and poisoned the cache for the next build.
    #[tokio::test]
    async fn a_header_set_that_a_step_changed_is_made_anew() {
        let bench = Bench::new(&json!({}));
        let get = || headers(&bench);
        let first = get_intact(&bench.services.cache, get, |headers| Some(&headers.root)).await.unwrap();
        let build = find_build(&first.root, &first.facts.release).unwrap();
        let symvers = first.root.join(build).join("Module.symvers");
        let good = fs::read_to_string(&symvers).unwrap();
        fs::write(&symvers, "0x00000001\tevil\tvmlinux\tEXPORT_SYMBOL\t\n").unwrap();
        let poisoned = headers(&bench).await.unwrap();
        assert_ne!(format!("{:?}", poisoned.facts), format!("{:?}", first.facts));

        let again = get_intact(&bench.services.cache, get, |headers| Some(&headers.root)).await.unwrap();
        assert_eq!(fs::read_to_string(&symvers).unwrap(), good);
        assert_eq!((&again.root, &again.key), (&first.root, &first.key));
        assert_eq!(format!("{:?}", again.facts), format!("{:?}", first.facts));
        // The changed tree is quarantined for inspection.
        assert_eq!(fs::read_dir(bench.services.cache.root().join("quarantine")).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_tree_that_stays_changed_ends_the_build() {
        let bench = Bench::new(&json!({}));
        let get = async || {
            let found = headers(&bench).await?;
            fs::write(found.root.join("evil"), "")?;
            Ok::<_, crate::services::BuildError>(found)
        };
        let error = get_intact(&bench.services.cache, get, |headers| Some(&headers.root)).await.unwrap_err();
        assert!(oci::error_chain(&error).contains("it was modified again"), "{error:?}");
    }
}
