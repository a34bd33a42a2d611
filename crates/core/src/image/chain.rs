//! Build order and chains of driver images.

use std::collections::{BTreeMap, BTreeSet};

use super::{DriverImage, ImageName, Need};

/// Driver images and the dependencies between them. Images connected by needs form a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chains {
    order: Vec<ImageName>,
    dependents: BTreeMap<ImageName, BTreeSet<ImageName>>,
}

impl Chains {
    /// Computes the chains of these images. A need without a matching image is ignored.
    pub fn of(images: &BTreeMap<ImageName, DriverImage>) -> Self {
        let mut dependents: BTreeMap<ImageName, BTreeSet<ImageName>> = BTreeMap::new();
        for (name, need) in need_edges(images) {
            dependents.entry(need.clone()).or_default().insert(name.clone());
        }
        let (chains, depths) = (connected_components(images.keys(), need_edges(images)), depths(images));
        let mut order: Vec<&ImageName> = images.keys().collect();
        order.sort_by_key(|name| (chains.get(name), depths.get(name), *name));
        Self { order: order.into_iter().cloned().collect(), dependents }
    }

    /// All images, chain by chain, needs before their dependents. The order within a cycle is unspecified; definitions with a
    /// cycle do not load.
    pub fn order(&self) -> &[ImageName] {
        &self.order
    }

    /// The images that are compiled against `image`.
    pub fn dependents(&self, image: &ImageName) -> impl Iterator<Item = &ImageName> {
        self.dependents.get(image).into_iter().flatten()
    }
}

/// Pairs of an image and a dependency that the image is compiled against. The dependency may be undefined.
pub fn need_edges(
    images: &BTreeMap<ImageName, DriverImage>,
) -> impl Iterator<Item = (&ImageName, &ImageName)> {
    images
        .iter()
        .flat_map(|(name, image)| image.spec.needs.iter().filter_map(move |need| Some((name, need.image()?))))
}

/// Length of the longest dependency path below each image. In a cycle, the value stops at the number of images.
fn depths(images: &BTreeMap<ImageName, DriverImage>) -> BTreeMap<&ImageName, usize> {
    let mut depths: BTreeMap<&ImageName, usize> = images.keys().map(|name| (name, 0)).collect();
    for _ in images {
        for (name, image) in images {
            let needs = image.spec.needs.iter().filter_map(Need::image);
            let depth = needs.filter_map(|need| depths.get(need)).max().map_or(0, |depth| depth + 1);
            depths.insert(name, depth.min(images.len()));
        }
    }
    depths
}

/// Maps each name to the smallest name in its connected component.
pub fn connected_components<'a>(
    names: impl IntoIterator<Item = &'a ImageName>,
    edges: impl IntoIterator<Item = (&'a ImageName, &'a ImageName)>,
) -> BTreeMap<&'a ImageName, &'a ImageName> {
    let mut components: BTreeMap<&ImageName, &ImageName> =
        names.into_iter().map(|name| (name, name)).collect();
    for (a, b) in edges {
        let (Some(&a), Some(&b)) = (components.get(a), components.get(b)) else { continue };
        let (first, second) = (a.min(b), a.max(b));
        for component in components.values_mut().filter(|component| **component == second) {
            *component = first;
        }
    }
    components
}

/// Returns the path from an image along its needs back to itself, if one exists: `mofed -> nvidia-gpu -> mofed`.
pub fn find_cycle(images: &BTreeMap<ImageName, DriverImage>, image: &ImageName) -> Option<Vec<ImageName>> {
    let mut paths = vec![vec![image]];
    let mut seen = BTreeSet::new();
    while let Some(path) = paths.pop() {
        let Some(definition) = path.last().and_then(|last| images.get(*last)) else { continue };
        for need in definition.spec.needs.iter().filter_map(Need::image) {
            let extended: Vec<&ImageName> = path.iter().copied().chain([need]).collect();
            if need == image {
                return Some(extended.into_iter().cloned().collect());
            }
            if seen.insert(need) {
                paths.push(extended);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images(needs: &[(&str, &[&str])]) -> BTreeMap<ImageName, DriverImage> {
        let image = |(name, needs): &(&str, &[&str])| {
            let image: DriverImage = serde_json::from_value(serde_json::json!({
                "apiVersion": "farrier.dev/v1alpha1",
                "kind": "DriverImage",
                "metadata": {"name": name},
                "spec": {"version": "1", "template": "kbuild", "needs": needs},
            }))
            .unwrap();
            (image.metadata.name.clone(), image)
        };
        needs.iter().map(image).collect()
    }

    fn name(text: &str) -> ImageName {
        text.parse().unwrap()
    }

    #[test]
    fn needs_stand_before_dependents_and_chains_together() {
        let images = images(&[
            ("a-peer", &["nvidia", "mofed"]),
            ("b-other", &[]),
            ("mofed", &[]),
            ("nvidia", &[]),
            ("z-top", &["a-peer", "mofed"]),
            ("c-lost", &["nobody"]),
        ]);
        let chains = Chains::of(&images);
        let order: Vec<&str> = chains.order().iter().map(ImageName::as_str).collect();
        assert_eq!(order, ["mofed", "nvidia", "a-peer", "z-top", "b-other", "c-lost"]);
        let dependents: Vec<&str> = chains.dependents(&name("mofed")).map(ImageName::as_str).collect();
        assert_eq!(dependents, ["a-peer", "z-top"]);
    }

    #[test]
    fn a_cycle_is_found_from_each_of_its_images_and_from_no_other() {
        let images = images(&[("a", &["b"]), ("b", &["d", "c"]), ("c", &["a"]), ("d", &[]), ("e", &["a"])]);
        let path = |from| {
            find_cycle(&images, &name(from)).map(|path| path.iter().map(ToString::to_string).collect())
        };
        let expected = |path: [&str; 4]| Some(path.map(str::to_owned).to_vec());
        assert_eq!(path("a"), expected(["a", "b", "c", "a"]));
        assert_eq!(path("c"), expected(["c", "a", "b", "c"]));
        assert_eq!((path("d"), path("e")), (None::<Vec<String>>, None));
        assert_eq!(Chains::of(&images).order().len(), 5, "terminates on a cycle");
    }
}
