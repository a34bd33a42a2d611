//! Taint of a proprietary license. A module inherits the taint from the modules whose symbols it uses (`inherit_taint` in
//! `kernel/module/main.c`).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{
    CheckRequest, Module, PayloadModule,
    load_order::LoadOrder,
    resolve::{Import, Provider},
};

/// Taint that a module inherits.
#[derive(Clone)]
pub(super) struct InheritedTaint {
    /// Module that the taint comes from, for people: `nvidia`, or `nvidia of gpu`.
    pub source: String,
    /// Whether that module is known to be proprietary; otherwise its license is unknown.
    pub known: bool,
    /// Whether the module uses only weak symbols of that module, and thus also loads without that module.
    pub weak: bool,
}

/// Returns the taint that each module of the payload inherits, directly or through other modules. Before Linux 5.9 (commit
/// 262e6ae7081d) no module inherits a taint.
pub(super) fn inherited(
    request: &CheckRequest<'_>,
    imports: &[Vec<Import<'_>>],
    order: &LoadOrder,
) -> Vec<Option<InheritedTaint>> {
    let mut inherited: Vec<Option<InheritedTaint>> = vec![None; request.modules.len()];
    if request.kernel.release.version() < semver::Version::new(5, 9, 0) {
        return inherited;
    }
    let proprietary = |index: usize| {
        let module = request.modules.get(index)?.module.as_ref().ok()?;
        let taint = || InheritedTaint { source: module.name.clone(), known: true, weak: false };
        (!module.is_gpl_compatible()).then(taint)
    };
    for &index in &order.order {
        let imports = imports.get(index).into_iter().flatten();
        // Modules of the payload that the module needs, each with whether it needs only weak symbols.
        let mut needed = BTreeMap::new();
        for import in imports.clone() {
            if let Provider::Payload { index, .. } = import.provider {
                *needed.entry(index).or_insert(true) &= import.symbol.weak;
            }
        }
        let of_payload = needed.into_iter().filter_map(|(needed, weak)| {
            let taint = proprietary(needed).or_else(|| inherited.get(needed).cloned()?)?;
            Some(InheritedTaint { weak, ..taint })
        });
        let mut taints: Vec<InheritedTaint> =
            of_payload.chain(imports.clone().filter_map(needed_image_taint)).collect();
        // Prefer known taints, then taints through strong symbols.
        taints.sort_by_key(|taint| (!taint.known, taint.weak));
        if let Some(slot) = inherited.get_mut(index) {
            *slot = taints.into_iter().next();
        }
    }
    inherited
}

/// Taint through a symbol of a needed image.
fn needed_image_taint(import: &Import<'_>) -> Option<InheritedTaint> {
    match import.provider {
        Provider::Needed { proprietary: Some(false), .. } => None,
        Provider::Needed { proprietary, .. } => {
            let (source, weak) = (import.provider.describe(), import.symbol.weak);
            Some(InheritedTaint { source, known: proprietary.is_some(), weak })
        }
        _ => None,
    }
}

/// Names the modules that pass on the taint of a proprietary license: modules with such a license, and modules that use
/// symbols of these, directly or through others.
pub fn proprietary_modules(modules: &[PayloadModule]) -> BTreeSet<String> {
    let modules: Vec<&Module> = modules.iter().filter_map(|payload| payload.module.as_ref().ok()).collect();
    let mut users: HashMap<&str, Vec<&Module>> = HashMap::new();
    for &module in &modules {
        for symbol in &module.undefined {
            users.entry(&symbol.name).or_default().push(module);
        }
    }
    let (mut names, mut seen) = (BTreeSet::new(), HashSet::new());
    let mut tainted: Vec<&Module> =
        modules.into_iter().filter(|module| !module.is_gpl_compatible()).collect();
    while let Some(module) = tainted.pop() {
        if seen.insert(std::ptr::from_ref(module)) {
            names.insert(module.name.clone());
            for export in &module.exports {
                tainted.extend(users.remove(export.name.as_str()).unwrap_or_default());
            }
        }
    }
    names
}
