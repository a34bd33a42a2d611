//! Objects as real clusters contain them.

use serde_json::{Value, json};

/// NFD's label for the kernel release.
pub const KERNEL_LABEL: &str = "feature.node.kubernetes.io/kernel-version.full";

/// Returns a release as a label value, the way NFD writes it.
pub fn label_value(release: &str) -> String {
    let plain = |char: char| if char.is_ascii_alphanumeric() || "-_.".contains(char) { char } else { '_' };
    let mapped: String = release.chars().map(plain).take(63).collect();
    mapped.trim_matches(|char: char| !char.is_ascii_alphanumeric()).to_owned()
}

/// Returns a node with a Mellanox and an NVIDIA device, as NFD and its kubelet describe it.
pub fn node(name: &str, kernel: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name,
            "kubernetes.io/arch": "amd64",
            "kubernetes.io/os": "linux",
            KERNEL_LABEL: label_value(kernel),
            "feature.node.kubernetes.io/system-os_release.ID": "debian",
            "feature.node.kubernetes.io/system-os_release.VERSION_ID": "12",
            "feature.node.kubernetes.io/pci-15b3.present": "true",
            "feature.node.kubernetes.io/pci-10de.present": "true",
        }},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {
                "kernelVersion": kernel, "architecture": "amd64", "operatingSystem": "linux",
                "osImage": "Debian GNU/Linux 12 (bookworm)", "containerRuntimeVersion": "containerd://2.1.4",
                "machineID": "", "systemUUID": "", "bootID": "", "kubeletVersion": "v1.36.0", "kubeProxyVersion": "",
            },
        },
    })
}

/// Returns a DaemonSet with one container `driver` for every node with a Mellanox device.
pub fn daemon_set(namespace: &str, name: &str, image: &str) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "nodeSelector": {"feature.node.kubernetes.io/pci-15b3.present": "true"},
                    "containers": [{"name": "driver", "image": image}],
                },
            },
        },
    })
}

/// Returns a PodDisruptionBudget over `app=<app>`.
pub fn budget(namespace: &str, name: &str, app: &str, min_available: u64) -> Value {
    json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"minAvailable": min_available, "selector": {"matchLabels": {"app": app}}},
    })
}

/// Returns a cluster-scoped custom resource.
pub fn resource(api_version: &str, kind: &str, name: &str, spec: &Value) -> Value {
    json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec})
}
