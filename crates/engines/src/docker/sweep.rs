//! Removes the containers and images of a run from the daemon. The run's label identifies them.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::Ordering,
    time::{Duration, SystemTime},
};

use bollard::{
    errors::Error,
    models::ImageSummary,
    query_parameters::{
        ListContainersOptions, ListImagesOptions, RemoveContainerOptions, RemoveImageOptions,
    },
};

use super::{CACHE_LABEL, DockerEngine, EngineError, RUN_LABEL, Result, Run, fault};
use crate::{CachedImage, LOCAL_PREFIX};

/// Number of attempts before leftovers are reported. A builder that was disconnected may still work on its last step.
const MAX_ROUNDS: usize = 20;
const PAUSE: Duration = Duration::from_millis(250);
/// Number of consecutive attempts that must find nothing after a builder was disconnected.
const QUIET_ROUNDS: usize = 4;

impl DockerEngine {
    /// Removes the run's containers and images, except for a named image, which is kept for later builds.
    pub(super) async fn sweep(&self, run: &Run) -> Result<()> {
        let quiet_rounds = if run.unobserved.load(Ordering::Relaxed) { QUIET_ROUNDS } else { 1 };
        let mut quiet = 0;
        for _ in 0..MAX_ROUNDS {
            let clean = self.remove_containers(run).await? & self.remove_images(run).await?;
            // The next round retries what could not be removed.
            quiet = if clean { quiet + 1 } else { 0 };
            if quiet == quiet_rounds {
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(EngineError::engine(super::EngineKind::Docker, "clean up", "containers or images remain"))
    }

    /// Removes the run's containers, running or not. Returns whether none is left.
    pub(super) async fn remove_containers(&self, run: &Run) -> Result<bool> {
        let options = ListContainersOptions {
            all: true,
            filters: Some(by_label(run)),
            ..ListContainersOptions::default()
        };
        let containers =
            self.client.list_containers(Some(options)).await.map_err(fault("list containers"))?;
        let mut clean = true;
        for id in containers.into_iter().filter_map(|container| container.id) {
            let options = RemoveContainerOptions { v: true, force: true, link: false };
            let removed = self.client.remove_container(&id, Some(options)).await;
            clean &= is_removed(removed, "remove a container")?;
        }
        Ok(clean)
    }

    /// Lists the cached images of all runs.
    pub async fn cached_images(&self) -> Result<Vec<CachedImage>> {
        let filters = HashMap::from([("label".to_owned(), vec![format!("{CACHE_LABEL}=base")])]);
        let options =
            ListImagesOptions { filters: Some(filters), shared_size: true, ..ListImagesOptions::default() };
        let images = self.client.list_images(Some(options)).await.map_err(fault("list images"))?;
        Ok(images.into_iter().filter_map(cached_image).collect())
    }

    /// Removes a cached image. Returns whether it is gone: the daemon keeps an image that a container uses.
    pub async fn remove_cached_image(&self, name: &str) -> Result<bool> {
        let options = RemoveImageOptions { force: false, noprune: false, platforms: None };
        is_removed(self.client.remove_image(name, Some(options), None).await, "remove an image")
    }

    /// Removes the run's images, children first, but no parent that belongs to another run. The daemon cannot remove an
    /// intermediate image before its child. Returns whether none is left.
    async fn remove_images(&self, run: &Run) -> Result<bool> {
        let options =
            ListImagesOptions { all: true, filters: Some(by_label(run)), ..ListImagesOptions::default() };
        let images = self.client.list_images(Some(options)).await.map_err(fault("list images"))?;
        let mut clean = true;
        for id in children_first(&images) {
            let options = RemoveImageOptions { force: true, noprune: true, platforms: None };
            clean &= is_removed(self.client.remove_image(id, Some(options), None).await, "remove an image")?;
        }
        Ok(clean)
    }
}

fn by_label(run: &Run) -> HashMap<String, Vec<String>> {
    HashMap::from([("label".to_owned(), vec![format!("{RUN_LABEL}={}", run.nonce)])])
}

/// Whether an object was removed by this call or an earlier one. 409 means that it is in use or is already being removed.
fn is_removed<T>(removed: Result<T, Error>, action: &'static str) -> Result<bool> {
    match removed {
        Ok(_) | Err(Error::DockerResponseServerError { status_code: 404, .. }) => Ok(true),
        Err(Error::DockerResponseServerError { status_code: 409 | 500, .. }) => Ok(false),
        Err(error) => Err(fault(action)(error)),
    }
}

/// Returns the image if farrier named it. Labels are not enough, because images built on top of a farrier image inherit
/// them.
fn cached_image(image: ImageSummary) -> Option<CachedImage> {
    let name = image.repo_tags.into_iter().find(|tag| tag.starts_with(LOCAL_PREFIX))?;
    // The shared size is -1 if the daemon does not report it.
    let own = image.size.saturating_sub(image.shared_size.max(0));
    let bytes = u64::try_from(if own > 0 { own } else { image.size }).unwrap_or(0);
    let created = Duration::from_secs(u64::try_from(image.created).unwrap_or(0));
    Some(CachedImage { name, bytes, created: SystemTime::UNIX_EPOCH + created })
}

/// Returns the images in an order in which they can be removed, without named images and their ancestors.
fn children_first<'a>(images: &'a [ImageSummary]) -> Vec<&'a str> {
    let parents: HashMap<&str, &str> =
        images.iter().map(|image| (image.id.as_str(), image.parent_id.as_str())).collect();
    let ancestors = |id: &'a str| {
        // Bounded by the number of images, in case a daemon reports a cycle.
        std::iter::successors(parents.get(id).copied(), |id| parents.get(id).copied()).take(images.len())
    };
    // Older daemons report this name for untagged images.
    let is_named = |image: &&ImageSummary| image.repo_tags.iter().any(|tag| tag != "<none>:<none>");
    let retained: HashSet<&str> = images
        .iter()
        .filter(is_named)
        .map(|image| image.id.as_str())
        .flat_map(|id| std::iter::once(id).chain(ancestors(id)))
        .collect();
    let mut removable: Vec<&str> = parents.keys().copied().filter(|id| !retained.contains(id)).collect();
    removable.sort_by_key(|id| (std::cmp::Reverse(ancestors(id).count()), *id));
    removable
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str, parent: &str) -> ImageSummary {
        ImageSummary { id: id.to_owned(), parent_id: parent.to_owned(), ..ImageSummary::default() }
    }

    fn named(id: &str, parent: &str, name: &str) -> ImageSummary {
        ImageSummary { repo_tags: vec![name.to_owned()], ..image(id, parent) }
    }

    #[test]
    fn children_go_before_parents() {
        let images = [image("a", "base"), image("c", "b"), named("b", "a", "<none>:<none>"), image("x", "")];
        let order = children_first(&images);
        let place = |id| order.iter().position(|found| *found == id);
        assert!(place("c") < place("b") && place("b") < place("a"));
        assert_eq!(order.len(), 4);
    }

    #[test]
    fn what_has_a_name_keeps_its_parents() {
        let images = [image("a1", ""), named("b2", "a1", "localhost/farrier/base:1"), image("c3", "")];
        assert_eq!(children_first(&images), ["c3"]);
    }

    #[test]
    fn only_images_that_farrier_named_are_kept_by_it() {
        let of = |name: &str, size, shared_size| {
            cached_image(ImageSummary { size, shared_size, ..named("a", "", name) })
                .map(|kept| (kept.name, kept.bytes))
        };
        let base = "localhost/farrier/base:1".to_owned();
        assert_eq!(of(&base, 10, 7), Some((base.clone(), 3)));
        assert_eq!(of(&base, 10, 10), Some((base.clone(), 10)));
        assert_eq!(of(&base, 10, -1), Some((base.clone(), 10)));
        assert_eq!(of("registry.example/mine:1", 10, 7), None);
    }

    #[test]
    fn a_circle_ends() {
        assert_eq!(children_first(&[image("a", "b"), image("b", "a")]).len(), 2);
    }
}
