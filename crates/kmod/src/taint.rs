//! Taint of a proprietary license. A module inherits the taint from the modules whose symbols it uses (`inherit_taint` in
//! `kernel/module/main.c`).

use std::collections::{BTreeSet, HashSet};

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
    needs: &[BTreeSet<usize>],
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
        let needed = needs.get(index).into_iter().flatten();
        let of_payload = needed.filter_map(|&needed| {
            let taint = proprietary(needed).or_else(|| inherited.get(needed).cloned()?)?;
            let mut symbols = imports.clone().filter(|import| import.is_provided_by(needed));
            Some(InheritedTaint { weak: symbols.all(|import| import.symbol.weak), ..taint })
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
    let mut clean: Vec<&Module> = modules.iter().filter_map(|payload| payload.module.as_ref().ok()).collect();
    let (mut names, mut exports) = (BTreeSet::new(), HashSet::new());
    loop {
        let is_clean = |module: &&Module| {
            let inherits = || module.undefined.iter().any(|symbol| exports.contains(symbol.name.as_str()));
            module.is_gpl_compatible() && !inherits()
        };
        let (still_clean, tainted): (Vec<&Module>, Vec<&Module>) = clean.into_iter().partition(is_clean);
        if tainted.is_empty() {
            return names;
        }
        for module in tainted {
            names.insert(module.name.clone());
            exports.extend(module.exports.iter().map(|export| export.name.as_str()));
        }
        clean = still_clean;
    }
}
