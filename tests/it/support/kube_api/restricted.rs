//! The Pod Security Standard `restricted`, as far as build pods can violate it, with the server's messages.

use serde_json::Value;

/// Returns the admission plug-in's message if the pod violates the standard.
pub fn refusal(pod: &Value) -> Option<String> {
    let told: Vec<String> =
        CHECKS.iter().filter_map(|check| check(pod)).map(|(rule, why)| format!("{rule} ({why})")).collect();
    (!told.is_empty()).then(|| format!("violates PodSecurity \"restricted:latest\": {}", told.join(", ")))
}

type Check = fn(&Value) -> Option<(&'static str, String)>;

/// The checks in the server's order.
const CHECKS: [Check; 8] = [
    |pod| {
        let offends = |container: &Value| security(container)["allowPrivilegeEscalation"] != false;
        let names = offenders(pod, offends)?;
        let why = format!("{names} must set securityContext.allowPrivilegeEscalation=false");
        Some(("allowPrivilegeEscalation != false", why))
    },
    |pod| {
        let names = offenders(pod, |container| {
            let given = &security(container)["capabilities"];
            let dropped = given["drop"].as_array().into_iter().flatten().any(|name| name == "ALL");
            let mut added = given["add"].as_array().into_iter().flatten();
            !dropped || added.any(|name| name != "NET_BIND_SERVICE")
        })?;
        let why = format!("{names} must set securityContext.capabilities.drop=[\"ALL\"]");
        Some(("unrestricted capabilities", why))
    },
    |pod| {
        let shared = ["hostNetwork", "hostPID", "hostIPC"].into_iter().filter(|field| pod[field] == true);
        let shared: Vec<String> = shared.map(|field| format!("{field}=true")).collect();
        (!shared.is_empty()).then(|| ("host namespaces", shared.join(", ")))
    },
    |pod| {
        let names = offenders(pod, |container| security(container)["privileged"] == true)?;
        Some(("privileged", format!("{names} must not set securityContext.privileged=true")))
    },
    |pod| {
        const ALLOWED: [&str; 8] = [
            "configMap",
            "csi",
            "downwardAPI",
            "emptyDir",
            "ephemeral",
            "persistentVolumeClaim",
            "projected",
            "secret",
        ];
        let volumes = pod["volumes"].as_array().into_iter().flatten();
        let offenders = volumes.filter_map(|volume| {
            let kind = volume.as_object()?.keys().find(|key| *key != "name")?;
            let name = volume["name"].as_str()?;
            (!ALLOWED.contains(&kind.as_str()))
                .then(|| format!("volume \"{name}\" uses restricted volume type \"{kind}\""))
        });
        let told: Vec<String> = offenders.collect();
        (!told.is_empty()).then(|| ("restricted volume types", told.join(", ")))
    },
    |pod| {
        let names = unless_set(pod, |security| security["runAsNonRoot"] == true)?;
        Some(("runAsNonRoot != true", format!("{names} must set securityContext.runAsNonRoot=true")))
    },
    |pod| {
        let names = offenders(pod, |container| security(container)["runAsUser"] == 0);
        if pod["securityContext"]["runAsUser"] == 0 {
            return Some(("runAsUser=0", "pod must not set runAsUser=0".to_owned()));
        }
        Some(("runAsUser=0", format!("{} must not set runAsUser=0", names?)))
    },
    |pod| {
        let set = |security: &Value| {
            matches!(security["seccompProfile"]["type"].as_str(), Some("RuntimeDefault" | "Localhost"))
        };
        let names = unless_set(pod, set)?;
        let why = format!(
            "{names} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\""
        );
        Some(("seccompProfile", why))
    },
];

fn security(container: &Value) -> &Value {
    &container["securityContext"]
}

fn offenders(pod: &Value, offends: impl Fn(&Value) -> bool) -> Option<String> {
    let containers = ["initContainers", "containers"].map(|list| pod[list].as_array());
    let found = containers.into_iter().flatten().flatten().filter(|container| offends(container));
    let names: Vec<String> = found.map(|container| container["name"].to_string()).collect();
    match names.as_slice() {
        [] => None,
        [name] => Some(format!("container {name}")),
        _ => Some(format!("containers {}", names.join(", "))),
    }
}

/// A setting of the pod applies to containers without that setting.
fn unless_set(pod: &Value, set: impl Fn(&Value) -> bool) -> Option<String> {
    if set(&pod["securityContext"]) {
        return None;
    }
    offenders(pod, |container| !set(security(container))).map(|names| format!("pod or {names}"))
}
