//! Load order of a payload's modules.

use std::collections::BTreeSet;

/// Load order of modules: each module follows the modules that it needs. Ties are broken by position in the request.
pub(super) struct LoadOrder {
    /// Indexes of the modules that can be ordered.
    pub order: Vec<usize>,
    /// Indexes of modules in a dependency cycle, and of modules that need one of these.
    pub circular: BTreeSet<usize>,
}

/// Computes the load order. `needs[i]` holds the indexes of the modules that module `i` needs.
pub(super) fn load_order(needs: &[BTreeSet<usize>]) -> LoadOrder {
    let mut unmet: Vec<usize> = needs.iter().map(BTreeSet::len).collect();
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); needs.len()];
    for (module, needed) in needs.iter().enumerate() {
        for &other in needed {
            if let Some(list) = users.get_mut(other) {
                list.push(module);
            }
        }
    }
    let mut ready: BTreeSet<usize> =
        (0..needs.len()).filter(|&module| unmet.get(module) == Some(&0)).collect();
    let mut order = Vec::with_capacity(needs.len());
    while let Some(module) = ready.pop_first() {
        order.push(module);
        for &user in users.get(module).into_iter().flatten() {
            if let Some(count) = unmet.get_mut(user) {
                *count -= 1;
                if *count == 0 {
                    ready.insert(user);
                }
            }
        }
    }
    let done: BTreeSet<usize> = order.iter().copied().collect();
    LoadOrder { order, circular: (0..needs.len()).filter(|module| !done.contains(module)).collect() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sets(needs: &[&[usize]]) -> Vec<BTreeSet<usize>> {
        needs.iter().map(|list| list.iter().copied().collect()).collect()
    }

    #[test]
    fn dependencies_come_first() {
        assert_eq!(load_order(&sets(&[&[2], &[], &[1]])).order, [1, 2, 0]);
    }

    #[test]
    fn dependency_cycles_are_listed_separately() {
        let LoadOrder { order, circular } = load_order(&sets(&[&[1], &[0], &[], &[0]]));
        assert_eq!(order, [2]);
        assert_eq!(circular, BTreeSet::from([0, 1, 3]));
    }

    proptest! {
        #[test]
        fn every_order_respects_the_dependencies(edges in prop::collection::vec((0_usize..20, 0_usize..20), 0..60)) {
            let mut needs = vec![BTreeSet::new(); 20];
            for (a, b) in edges {
                if a != b {
                    needs[a].insert(b);
                }
            }
            let LoadOrder { order, circular } = load_order(&needs);
            prop_assert_eq!(order.len() + circular.len(), 20);
            for (place, module) in order.iter().enumerate() {
                prop_assert!(needs[*module].iter().all(|n| order[..place].contains(n)));
            }
        }
    }
}
