//! Composes the Job of a build.

use std::{collections::BTreeMap, time::Duration};

use farrier_core::{
    image::{BuildSpec, Digest, ImageName, ImageReference, InputHash},
    kernel::{Architecture, KernelLabel},
    plan::{Instance, is_same_image},
    site::Builds,
};
use k8s_openapi::api::{
    batch::v1::Job,
    core::v1::{Container, PodSpec},
};
use runner::{plan::Limits, pod};
use serde_json::{Value, json};

/// User ID of build steps. It owns nothing on a node (distroless images call it `nonroot`).
pub const USER: u32 = 65532;
/// Memory for the runner itself, in bytes.
const RUNNER_MEMORY: u64 = 256 << 20;
/// Name of the build's container.
pub const CONTAINER: &str = "build";
/// Ephemeral storage for written files and the pod's log.
const DISK: &str = "32Gi";
/// Time from the kubelet's acknowledgment of a pod to the first step, which includes the image pull.
const START_TIMEOUT: Duration = Duration::from_mins(30);
/// How long a finished Job remains for inspection if farrier did not delete it.
const FINISHED_JOB_TTL: Duration = Duration::from_hours(1);

/// Annotation of a Job with the digest of its manifest, without this annotation.
const MANIFEST_DIGEST: &str = "farrier.dev/manifest-digest";

/// Inputs of a Job.
pub struct JobSpec<'a> {
    /// The site's settings for builds.
    pub builds: &'a Builds,
    /// The farrier instance that owns the Job.
    pub instance: &'a Instance,
    /// The driver image that is built.
    pub driver: &'a ImageName,
    /// Hash over the declared inputs of the build.
    pub inputs: InputHash,
    /// Label of the kernel release; `None` if the release yields no valid label value.
    pub kernel: Option<KernelLabel>,
    /// Architecture of the node.
    pub arch: Architecture,
    /// The rootfs as an image, by digest.
    pub image: &'a ImageReference,
    /// Requested resources, and the deadline.
    pub build: BuildSpec,
    /// Limits that the runner enforces.
    pub limits: Limits,
}

/// Returns the specification of a Job's pods.
pub fn pod_spec(job: &Job) -> Option<&PodSpec> {
    job.spec.as_ref()?.template.spec.as_ref()
}

fn manifest_digest(job: &Job) -> Option<&String> {
    job.metadata.annotations.as_ref()?.get(MANIFEST_DIGEST)
}

/// Whether a Job was created from this manifest. Its annotation alone proves nothing, because other clients can copy it.
pub fn is_from_manifest(job: &Job, manifest: &Job) -> bool {
    let pods = pod_spec(job).zip(pod_spec(manifest));
    manifest_digest(job) == manifest_digest(manifest)
        && pods.is_some_and(|(pod, own)| is_same_program(pod, own))
}

/// Whether a pod runs the expected program and nothing else.
pub fn is_same_program(pod: &PodSpec, expected: &PodSpec) -> bool {
    pod.init_containers.as_ref().is_none_or(Vec::is_empty)
        && pod.containers.iter().map(program).eq(expected.containers.iter().map(program))
        && pod.containers.iter().zip(&expected.containers).all(|(one, other)| has_same_image(one, other))
}

fn has_same_image(one: &Container, other: &Container) -> bool {
    one.image.as_deref().zip(other.image.as_deref()).is_some_and(|(one, other)| is_same_image(one, other))
}

/// Returns a container without its image, and without the fields that do not change what it runs. API servers and admission
/// webhooks set them, and the namespace's Pod Security level restricts the security context.
fn program(container: &Container) -> Container {
    Container {
        env: None,
        env_from: None,
        image: None,
        image_pull_policy: None,
        resize_policy: None,
        resources: None,
        security_context: None,
        termination_message_path: None,
        termination_message_policy: None,
        ..container.clone()
    }
}

/// Returns the name of a build's Job. It is the same for each build of the same inputs by one instance, so that a later caller
/// finds the Job. The rootfs has the runner, so its digest would give each version of farrier another Job.
pub fn name(instance: &Instance, driver: &ImageName, inputs: InputHash) -> String {
    // A Job's name has at most 63 characters. A pod's name, which also becomes a label, is six characters longer.
    let prefix: String = driver.chars().take(40).collect();
    // Drivers with the same prefix can have equal inputs. Instances with one name for a Job would delete each other's.
    let digest = Digest::of(format!("{instance} {driver} {inputs}").as_bytes());
    format!("{}-{}", prefix.trim_end_matches(['-', '.']), &digest.hex()[..12])
}

/// Number of whole processors that a build may use.
fn processors(build: BuildSpec) -> u64 {
    build.cpus.thousandths().div_ceil(1000).max(1)
}

/// Environment variable that steps get in addition to the Dockerfile's. Without it, nproc(1) counts the node's
/// processors.
pub fn environment(build: BuildSpec) -> (String, String) {
    ("OMP_NUM_THREADS".to_owned(), processors(build).to_string())
}

/// Composes the Job: one pod, one try, no permissions. It complies with the Pod Security Standard `restricted`.
pub fn manifest(spec: &JobSpec<'_>) -> Result<Job, serde_json::Error> {
    let JobSpec { builds, instance, driver, inputs, kernel, arch, image, build, limits } = spec;
    let mut labels: BTreeMap<&str, &str> =
        builds.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let name = name(instance, driver, *inputs);
    let instance = instance.to_string();
    labels.extend([
        ("app.kubernetes.io/name", "farrier-build"),
        ("app.kubernetes.io/managed-by", "farrier"),
        ("farrier.dev/instance", &instance),
        ("farrier.dev/image", driver.as_str()),
    ]);
    labels.extend(kernel.as_ref().map(|kernel| ("farrier.dev/kernel", kernel.as_str())));
    let deadline = build.deadline.duration() + START_TIMEOUT + pod::RESULT_TTL;
    // A Job that no farrier follows ends by itself, even if its pod never runs. Kubernetes does not count the time for which
    // the Job is suspended.
    let job_deadline = builds.wait_at_most.duration() + deadline;
    // Slightly more than the limit, so that the runner survives to report which limit was exceeded.
    let memory = limits.memory.unwrap_or(build.memory.bytes()) + RUNNER_MEMORY;
    let mut pod = builds.pod.fields().clone();
    // These fields replace fields of the site's pod (`builds.pod`) with the same name.
    let required_fields = json!({
        "restartPolicy": "Never",
        "activeDeadlineSeconds": deadline.as_secs(),
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [{
            "name": CONTAINER,
            "image": image.to_string(),
            "command": [pod::RUNNER, "pod"],
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]},
            },
            "resources": {
                "requests": {
                    "cpu": build.cpus.to_string(), "memory": build.memory.to_string(), "ephemeral-storage": "1Gi",
                },
                "limits": {
                    "cpu": processors(*build).to_string(), "memory": memory.to_string(), "ephemeral-storage": DISK,
                },
            },
        }],
    });
    if let Value::Object(fields) = required_fields {
        pod.extend(fields);
    }
    let selector = pod.entry("nodeSelector").or_insert_with(|| json!({}));
    selector["kubernetes.io/arch"] = json!(arch.as_str());
    selector["kubernetes.io/os"] = json!("linux");
    pod.entry("topologySpreadConstraints").or_insert_with(|| {
        json!([{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "farrier-build"}},
        }])
    });
    let mut job: Job = serde_json::from_value(json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "namespace": builds.namespace(), "labels": &labels},
        "spec": {
            "activeDeadlineSeconds": job_deadline.as_secs(),
            "backoffLimit": 0,
            "suspend": builds.suspend,
            "ttlSecondsAfterFinished": FINISHED_JOB_TTL.as_secs(),
            "template": {"metadata": {"labels": &labels}, "spec": pod},
        },
    }))?;
    let digest = Digest::of(&serde_json::to_vec(&job)?).to_string();
    job.metadata.annotations = Some([(MANIFEST_DIGEST.to_owned(), digest)].into());
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_no_rights_and_says_what_it_needs() {
        let builds: Builds = serde_json::from_value(json!({
            "labels": {"kueue.x-k8s.io/queue-name": "builds"}, "suspend": true,
            "pod": {"nodeSelector": {"pool": "builds"}, "priorityClassName": "low"},
        }))
        .unwrap();
        let digest = format!("registry.example/drivers/builds@sha256:{}", "0".repeat(64));
        let mut job = manifest(&JobSpec {
            builds: &builds,
            instance: &Instance::default(),
            driver: &"mofed".parse().unwrap(),
            inputs: "00".repeat(32).parse().unwrap(),
            kernel: "6.1.0-56-amd64".parse().ok(),
            arch: Architecture::Amd64,
            image: &digest.parse().unwrap(),
            build: serde_json::from_value(json!({"cpus": "1500m", "memory": "2Gi"})).unwrap(),
            limits: Limits { memory: Some(4 << 30), ..Limits::default() },
        })
        .unwrap();
        assert!(job.metadata.annotations.take().is_some());
        insta::assert_snapshot!(serde_json::to_string_pretty(&job).unwrap());
    }

    #[test]
    fn another_program_is_told_from_fields_that_servers_set() {
        let read = |pod: Value| serde_json::from_value::<PodSpec>(pod).unwrap();
        let ours = json!({"name": "build", "image": "registry.example/i@sha256:0", "command": ["runner"]});
        let with = |field: &str, value: Value| {
            let mut container = ours.clone();
            container[field] = value;
            read(json!({"containers": [container]}))
        };
        let expected = read(json!({"containers": [ours]}));
        for same in [
            with("imagePullPolicy", json!("IfNotPresent")),
            with("image", json!("mirror.example/registry.example/i@sha256:0")),
        ] {
            assert!(is_same_program(&same, &expected), "{same:?}");
        }
        for other in [
            with("command", json!(["sh"])),
            with("image", json!("registry.example/i@sha256:1")),
            with("args", json!(["follow"])),
            with("volumeMounts", json!([{"name": "v", "mountPath": "/.farrier"}])),
            read(json!({"containers": [ours, ours]})),
            read(json!({"containers": [ours], "initContainers": [ours]})),
        ] {
            assert!(!is_same_program(&other, &expected), "{other:?}");
        }
    }

    #[test]
    fn names_are_names_of_jobs_and_short_enough_for_their_pods() {
        let inputs: InputHash = "cd".repeat(32).parse().unwrap();
        let name_for = |instance: &Instance, driver: String| name(instance, &driver.parse().unwrap(), inputs);
        let name = |driver: String| name_for(&Instance::default(), driver);
        let (long, shorter) = (name("a".repeat(63)), name("a".repeat(62)));
        assert_eq!((long.len(), &long[..41]), (53, &*format!("{}-", "a".repeat(40))));
        assert_ne!(long, shorter);
        assert_ne!(name("mofed".to_owned()), name_for(&"gpu".parse().unwrap(), "mofed".to_owned()));
        let dotted = name(format!("{}.8.0", "a".repeat(39)));
        assert_eq!((dotted.len(), &dotted[..40]), (52, &*format!("{}-", "a".repeat(39))));
    }
}
