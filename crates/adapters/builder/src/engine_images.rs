//! Evicts toolchains and bases from an engine's images, least recently used first, above a quota.

use std::time::SystemTime;

use farrier_engines::{CachedImage, DockerEngine, LOCAL_PREFIX};
use farrier_local::cache::{CacheError, Entry, LockMode, surplus};
use oci::error_chain;

use crate::services::{BuildServices, Result};

/// Removes images above the site's quota. On failure only disk space is wasted.
pub(super) async fn make_room(services: &BuildServices, engine: &DockerEngine) {
    if let Err(error) = remove_surplus(services, engine).await {
        tracing::warn!(error = %error_chain(&error), "the engine's unused images could not be removed");
    }
}

async fn remove_surplus(services: &BuildServices, engine: &DockerEngine) -> Result<()> {
    let quota = services.definitions.site.storage.engine_images.bytes();
    let entry = |image: &CachedImage| cache_entry(image, |kind, key| services.cache.last_use(kind, key));
    let images: Vec<Entry> = engine.cached_images().await?.iter().filter_map(entry).collect();
    for Entry { name, bytes, used: _ } in surplus(images, quota, &services.cache.all_in_use()?) {
        let Some((kind, key)) = name.split_once('/') else { continue };
        // A build that needs the image holds this lock while it marks the image as in use.
        let Some(_lock) = services.cache.try_lock(kind, key, LockMode::Exclusive)? else { continue };
        if services.cache.all_in_use()?.contains(&name) {
            continue;
        }
        if !engine.remove_cached_image(&format!("{LOCAL_PREFIX}{kind}:{key}")).await? {
            tracing::debug!(image = name, "the engine keeps this image, because a container uses it");
            continue;
        }
        services.cache.forget_stamp(kind, key)?;
        tracing::info!(image = name, bytes, "removed the least recently used image from the engine");
    }
    Ok(())
}

/// Parses `localhost/farrier/KIND:KEY` into a cache entry with its last use on this machine. For an image that a
/// farrier with another cache made, the creation time replaces the last use.
fn cache_entry(
    image: &CachedImage,
    last_use: impl Fn(&str, &str) -> Result<Option<SystemTime>, CacheError>,
) -> Option<Entry> {
    let (kind, key) = image.name.strip_prefix(LOCAL_PREFIX)?.split_once(':')?;
    let used = last_use(kind, key).ok().flatten();
    Some(Entry { name: format!("{kind}/{key}"), bytes: image.bytes, used: used.unwrap_or(image.created) })
}

#[cfg(test)]
#[path = "engine_images_tests.rs"]
mod tests;
