//! Build inputs that a published image names, and how they differ from a cell's.

use std::collections::BTreeMap;

use super::{Cell, FetchedInputs, table::with_short_digests};
use crate::facts::annotations::{DRIVER_VERSION, RECIPE, REUSED_FROM, SOURCES, TOOLCHAIN, UNSIGNED_HASH};

/// Annotations of a published image that name its build inputs. Untrusted input, for messages only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishedInputs(BTreeMap<String, String>);

impl PublishedInputs {
    /// Keeps the annotations that name inputs.
    pub fn of(mut annotations: BTreeMap<String, String>) -> Self {
        let named = [DRIVER_VERSION, RECIPE, REUSED_FROM, SOURCES, TOOLCHAIN, UNSIGNED_HASH];
        annotations.retain(|key, _| named.contains(&key.as_str()));
        Self(annotations)
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Describes each input that differs from the cell's. Empty for an image that does not name its inputs.
    pub fn changed(&self, cell: &Cell) -> Vec<String> {
        let Some(recipe) = self.get(RECIPE) else { return Vec::new() };
        let mut changed = Vec::new();
        let mut compare = |what: &str, then: Option<&str>, now: Option<&str>| {
            if then != now {
                let [then, now] = [then, now].map(|text| with_short_digests(text.unwrap_or("none")));
                changed.push(format!("{what} changed ({then} -> {now})"));
            }
        };
        compare("version", self.get(DRIVER_VERSION), Some(&cell.version));
        let (then, now) = (self.sources(), &cell.fetched.sources);
        for (name, identity) in now {
            compare(&format!("source {name}"), then.get(name.as_str()).copied(), Some(identity));
        }
        for (name, identity) in then.iter().filter(|(name, _)| !now.contains_key(**name)) {
            compare(&format!("source {name}"), Some(identity), None);
        }
        if self.has_toolchain_of(cell) {
            compare("toolchain", self.get(TOOLCHAIN), Some(&cell.toolchain));
        }
        if changed.is_empty() {
            changed.push(self.unnamed(cell, recipe).to_owned());
        }
        changed
    }

    /// Concludes from the hashes which input changed, where the image does not name that input.
    fn unnamed(&self, cell: &Cell, recipe: &str) -> &'static str {
        let unsigned = cell.unsigned_hash.map(|hash| hash.to_string());
        if unsigned.is_some() && self.get(UNSIGNED_HASH) == unsigned.as_deref() {
            "the key that signs modules changed"
        } else if recipe != cell.recipe.to_string() {
            "the definition or its template changed"
        } else if self.has_toolchain_of(cell) {
            "headers changed"
        } else {
            "headers or toolchain changed"
        }
    }

    /// Whether the named toolchain counts: not the one of a reused payload, nor one that the nodes' system names.
    fn has_toolchain_of(&self, cell: &Cell) -> bool {
        self.get(REUSED_FROM).is_none() && !cell.fetched.unverified.contains_key(FetchedInputs::SYSTEM)
    }

    fn sources(&self) -> BTreeMap<&str, &str> {
        let sources = self.get(SOURCES).unwrap_or_default().split(", ");
        sources.filter_map(|source| source.split_once(": ")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        image::Digest,
        plan::{
            Outcome,
            fixtures::{K47, World},
        },
    };

    fn inputs(cell: &Cell, changes: &[(&str, &str)]) -> PublishedInputs {
        let sources = cell.fetched.sources.iter().map(|(name, identity)| format!("{name}: {identity}"));
        let mut annotations: BTreeMap<String, String> = [
            (DRIVER_VERSION, cell.version.clone()),
            (RECIPE, cell.recipe.to_string()),
            (SOURCES, sources.collect::<Vec<_>>().join(", ")),
            (TOOLCHAIN, cell.toolchain.clone()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        annotations.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        PublishedInputs::of(annotations)
    }

    /// Returns the cell with one source, whose tree has the digest of `text`.
    fn cell(text: &str) -> Cell {
        let mut cell = World::new(&[K47]).cells()[0].as_ref().clone();
        let tree = format!("tree {}", Digest::of(text.as_bytes()));
        cell.fetched.sources = [("hello".to_owned(), tree)].into();
        cell
    }

    #[test]
    fn each_changed_input_is_named() {
        let (before, now) = (cell("a"), cell("b"));
        let changed = |changes: &[(&str, &str)]| inputs(&now, changes).changed(&now).join("; ");
        assert_eq!(
            inputs(&before, &[]).changed(&now),
            ["source hello changed (tree sha256:ca978112ca1b -> tree sha256:3e23e8160039)"]
        );
        let gone = changed(&[(SOURCES, "old: tree x")]);
        assert!(gone.contains("source old changed (tree x -> none)"), "{gone}");
        assert!(gone.contains("source hello changed (none -> tree sha256:"), "{gone}");
        assert_eq!(changed(&[(DRIVER_VERSION, "0.9")]), format!("version changed (0.9 -> {})", now.version));
        assert!(changed(&[(TOOLCHAIN, "gcc 11")]).starts_with("toolchain changed (gcc 11 -> "));
        assert_eq!(changed(&[]), "headers changed");
        assert_eq!(changed(&[(TOOLCHAIN, "gcc 11"), (REUSED_FROM, "x")]), "headers or toolchain changed");
        assert_eq!(changed(&[(RECIPE, "other")]), "the definition or its template changed");
        assert_eq!(PublishedInputs::default().changed(&now), [""; 0], "an image without annotations");
    }

    #[test]
    fn a_conflict_names_what_changed() {
        let mut world = World::new(&[K47]);
        world.publish(crate::kmod::Verdict::Loads);
        let cell = world.cells()[0].clone();
        for published in world.observed.published.values_mut() {
            published.input_hash = Some("ab".repeat(32).parse().unwrap());
            published.inputs = inputs(&cell, &[(RECIPE, "other")]);
        }
        let plan = world.plan();
        let Outcome::Conflict { changed, .. } = &plan.cells[0].outcome else { panic!("{plan:?}") };
        assert_eq!(changed, &["the definition or its template changed"]);
        let why = plan.cells[0].outcome.why_not();
        assert!(why.ends_with("built from other inputs: the definition or its template changed"), "{why}");
    }
}
