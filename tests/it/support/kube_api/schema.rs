//! Merge types of lists and maps by path: the part of the published OpenAPI schema that farrier's objects use.

use super::{fields::Path, kinds::Kind};

/// Merge type of a list.
pub enum List {
    /// The list is replaced as a whole.
    Atomic,
    /// Each value is a member.
    Set,
    /// These fields identify an item.
    Keyed(&'static [&'static str]),
}

/// Returns the merge type of the list at `path`.
pub fn list(kind: &Kind, path: &Path) -> List {
    let names: Vec<&str> = path.iter().filter_map(|element| element.strip_prefix("f:")).collect();
    match names.as_slice() {
        ["metadata", "ownerReferences"] => return List::Keyed(&["uid"]),
        ["metadata", "finalizers"] => return List::Set,
        _ if kind.custom => return List::Atomic,
        _ => {}
    }
    match names.last().copied().unwrap_or_default() {
        "containers" | "initContainers" | "ephemeralContainers" | "volumes" | "env" | "imagePullSecrets" => {
            List::Keyed(&["name"])
        }
        "volumeMounts" => List::Keyed(&["mountPath"]),
        "volumeDevices" => List::Keyed(&["devicePath"]),
        "ports" if names.contains(&"containers") => List::Keyed(&["containerPort", "protocol"]),
        "ports" if kind.kind == "Service" => List::Keyed(&["port", "protocol"]),
        "hostAliases" => List::Keyed(&["ip"]),
        "conditions" | "addresses" => List::Keyed(&["type"]),
        "topologySpreadConstraints" => List::Keyed(&["topologyKey", "whenUnsatisfiable"]),
        _ => List::Atomic,
    }
}

/// Returns whether the map at `path` is replaced as a whole.
pub fn is_atomic_map(kind: &Kind, path: &Path) -> bool {
    let name = path.last().and_then(|element| element.strip_prefix("f:")).unwrap_or_default();
    // A label or annotation may have one of these names, but is not a map.
    !kind.custom
        && matches!(
            name,
            "nodeSelector"
                | "selector"
                | "labelSelector"
                | "requiredDuringSchedulingIgnoredDuringExecution"
                | "configMapKeyRef"
                | "secretKeyRef"
                | "fieldRef"
                | "resourceFieldRef"
        )
}
