//! Named inputs of a build, and the differences between a published image and a cell.

use std::collections::{BTreeMap, BTreeSet};

use super::{Cell, table::with_short_digests};

/// Inputs of the input hash by name: values, or digests of long values. They are part of the provenance of a published image.
/// Untrusted input, for messages only.
pub type NamedInputs = BTreeMap<String, String>;

/// Files that earlier builds left in local source directories: one file for each source, by the source's name.
pub type BuildProducts = BTreeMap<String, String>;

/// Name of the input for the rendered Dockerfile. The base image's name is left out: it follows from toolchain and headers.
pub(super) const DOCKERFILE: &str = "Dockerfile";
/// Longest value in a message.
const MAX_SHOWN: usize = 200;
/// Largest number of changes in a message.
const MAX_CHANGES: usize = 20;

/// Describes each input of a published image that differs from the cell's. Empty for an image that does not name its inputs.
pub fn changed_inputs(published: &NamedInputs, cell: &Cell) -> Vec<String> {
    let current = &cell.inputs;
    if published.is_empty() {
        return Vec::new();
    }
    let mut changed: BTreeSet<&String> = published.keys().chain(current.keys()).collect();
    changed.retain(|name| published.get(*name) != current.get(*name));
    // A change of another input can change the Dockerfile, so name the Dockerfile only if nothing else changed.
    if changed.len() > 1 {
        changed.retain(|name| *name != DOCKERFILE);
    }
    let shown = |inputs: &NamedInputs, name: &String| {
        let value = inputs.get(name).map_or("none", |value| if value.is_empty() { "empty" } else { value });
        with_short_digests(&value.chars().take(MAX_SHOWN).collect::<String>())
    };
    let describe =
        |name: &&String| format!("{name} changed ({} -> {})", shown(published, name), shown(current, name));
    changed.iter().take(MAX_CHANGES).map(describe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{
        Outcome, conflict_remedy,
        fixtures::{K47, World},
    };

    #[test]
    fn a_conflict_names_what_changed() {
        let mut world = World::new(&[K47]);
        world.publish(crate::kmod::Verdict::Loads);
        let cell = world.cells()[0].clone();
        let changed = |world: &World| {
            let (plan, rounds) = world.rounds();
            let Outcome::Conflict { changed, .. } = plan.cells[0].outcome.clone() else { panic!("{plan:?}") };
            assert_eq!(rounds.conflicts.len(), 1, "one lookup for each published image");
            (changed, plan.cells[0].outcome.absence_reason())
        };
        assert_eq!(world.rounds().1.conflicts.len(), 0, "without a conflict nothing is looked up");
        for published in world.observed.published.values_mut() {
            published.input_hash = Some("ab".repeat(32).parse().unwrap());
            let before = [("version".to_owned(), "1.0".to_owned()), ("old".to_owned(), "x".repeat(999))];
            let mut inputs = cell.inputs.clone();
            inputs.extend(before);
            world.observed.inputs.insert(published.digest.clone(), inputs);
        }
        let (found, why) = changed(&world);
        let old = format!("old changed ({} -> none)", "x".repeat(MAX_SHOWN));
        assert_eq!(found, [old, format!("version changed (1.0 -> {})", cell.version)]);
        assert!(why.contains("built from other inputs: old changed"), "{why}");
        world.observed.inputs.clear();
        let (found, why) = changed(&world);
        assert_eq!(found, [""; 0], "an image without named inputs");
        assert!(why.ends_with("holds an image built from other inputs"), "{why}");
    }

    #[test]
    fn the_remedy_of_a_conflict_fits_what_changed() {
        let cell = World::new(&[K47]).cells()[0].clone();
        let products = BuildProducts::from([("mft".to_owned(), "mft.o".to_owned())]);
        let remedy = |change: &str| conflict_remedy(&cell, &[change.to_owned()], &products);
        let certificate = remedy("certificate changed (1 -> 2)");
        assert!(certificate.contains("{{signer}}") && !certificate.contains("make clean"), "{certificate}");
        let remedy = remedy("source mft changed (tree 1 -> tree 2)");
        let command = format!("`farrier build {} --kernel {K47}`", cell.image);
        assert!(!remedy.contains("{{signer}}") && remedy.contains(&command), "{remedy}");
        let clean = "source mft contains products of a build, such as mft.o: run `make clean` there; ";
        assert!(remedy.starts_with(clean), "{remedy}");
    }

    /// The Dockerfile has the names of patches, for instance.
    #[test]
    fn a_dockerfile_that_follows_from_a_changed_input_is_not_named() {
        let cell = World::new(&[K47]).cells()[0].as_ref().clone();
        let changed = |names: &[&str]| {
            let mut then = cell.inputs.clone();
            then.extend(names.iter().map(|name| ((*name).to_owned(), "other".to_owned())));
            changed_inputs(&then, &cell).len()
        };
        assert_eq!([changed(&[]), changed(&[DOCKERFILE]), changed(&[DOCKERFILE, "version"])], [0, 1, 1]);
    }
}
