//! The specification of a container in a DaemonSet's manifest, as a kubelet and a runtime implement it.

use std::{fs, path::Path};

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Container, PodSpec, Probe, VolumeMount},
};

/// A container to run on a node.
#[derive(Clone, Debug)]
pub struct ContainerSpec {
    pub name: String,
    /// `command`; empty for the image's own entrypoint.
    pub command: Vec<String>,
    /// `args`; empty for the image's own arguments.
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub mounts: Vec<Mount>,
    pub host_pid: bool,
    pub host_network: bool,
    pub startup: Option<Vec<String>>,
    pub liveness: Option<Vec<String>>,
    pub readiness: Option<Vec<String>>,
}

/// A path of the node mounted in the container.
#[derive(Clone, Debug)]
pub struct Mount {
    pub source: String,
    pub target: String,
    pub read_only: bool,
    pub propagation: Propagation,
}

/// `mountPropagation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    None,
    HostToContainer,
    Bidirectional,
}

impl ContainerSpec {
    /// Reads the container of this name from a manifest in `tests/fixtures/daemon-sets`.
    pub fn read(manifest: &str, container: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/daemon-sets").join(manifest);
        let text = fs::read_to_string(&path).unwrap();
        let set: DaemonSet =
            serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{manifest}: {error}"));
        let pod = set.spec.template.spec.expect("a DaemonSet has a pod");
        let found = pod.containers.iter().find(|found| found.name == container);
        Self::new(&pod, found.unwrap_or_else(|| panic!("{manifest} has no container {container}")))
    }

    fn new(pod: &PodSpec, container: &Container) -> Self {
        let privileged = container.security_context.as_ref().and_then(|context| context.privileged);
        assert_eq!(privileged, Some(true), "a container that loads modules is privileged");
        let env = container.env.iter().flatten();
        let mounts = container.volume_mounts.iter().flatten();
        Self {
            name: container.name.clone(),
            command: container.command.clone().unwrap_or_default(),
            args: container.args.clone().unwrap_or_default(),
            // Drivers do not use values of the downward API, so these variables are set to an empty value.
            env: env.map(|each| (each.name.clone(), each.value.clone().unwrap_or_default())).collect(),
            mounts: mounts.map(|mount| Mount::new(pod, mount)).collect(),
            host_pid: pod.host_pid == Some(true),
            host_network: pod.host_network == Some(true),
            startup: container.startup_probe.as_ref().map(command),
            liveness: container.liveness_probe.as_ref().map(command),
            readiness: container.readiness_probe.as_ref().map(command),
        }
    }

    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Sets an environment variable, as the operator's resource would.
    #[must_use]
    pub fn with_env(mut self, name: &str, value: &str) -> Self {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Mounts one more directory of the node.
    #[must_use]
    pub fn with_host_path(mut self, source: &str, target: &str) -> Self {
        let (source, target) = (source.to_owned(), target.to_owned());
        self.mounts.push(Mount { source, target, read_only: false, propagation: Propagation::None });
        self
    }
}

impl Mount {
    fn new(pod: &PodSpec, mount: &VolumeMount) -> Self {
        let volume = pod.volumes.iter().flatten().find(|volume| volume.name == mount.name);
        let volume = volume.unwrap_or_else(|| panic!("the pod has no volume {}", mount.name));
        let host = volume.host_path.as_ref().unwrap_or_else(|| panic!("{} is not a hostPath", mount.name));
        let propagation = match mount.mount_propagation.as_deref() {
            None | Some("None") => Propagation::None,
            Some("HostToContainer") => Propagation::HostToContainer,
            Some("Bidirectional") => Propagation::Bidirectional,
            Some(other) => panic!("no mountPropagation {other}"),
        };
        Self {
            source: host.path.clone(),
            target: mount.mount_path.clone(),
            read_only: mount.read_only == Some(true),
            propagation,
        }
    }
}

fn command(probe: &Probe) -> Vec<String> {
    probe.exec.as_ref().and_then(|exec| exec.command.clone()).expect("the operators' probes are commands")
}
