//! How lists and maps merge, by their path: the part of the published OpenAPI schema that farrier's objects touch.

use super::{fields::Path, kinds::Kind};

/// How a list merges.
pub enum List {
    /// Replaced as a whole.
    Atomic,
    /// Each value is a member.
    Set,
    /// Items are told apart by these fields.
    Keyed(&'static [&'static str]),
}

/// The list at `path`.
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

/// Is the map at `path` replaced as a whole?
pub fn is_atomic_map(kind: &Kind, path: &Path) -> bool {
    let name = path.last().and_then(|element| element.strip_prefix("f:")).unwrap_or_default();
    // A label or an annotation may have any of these names, and is no map.
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
