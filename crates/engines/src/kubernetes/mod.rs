//! The `kubernetes` engine. Each build is a Job whose pod's image is the complete rootfs of the build. No image builder runs in a
//! container, and no step has permissions, secrets or a network.
//!
//! The runner's messages, including the result, come back through the API server (`follow`): the pod never opens a
//! connection. Another farrier that builds the same inputs, such as a new leader, finds the Job by its name and takes it
//! over.

mod follow;
mod job;
mod pod;
mod wait;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::batch::v1::Job;
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams, Preconditions},
};
use runner::plan::Plan;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use farrier_cluster::{
    KubeOptions,
    kube::{causes, client},
};
use farrier_core::{kernel::Architecture, provenance::Confinement};
use farrier_local::machine::program_for;
pub use job::{JobSpec, USER, environment, name as job_name};

use self::{follow::Follower, pod::is_passing_refusal, wait::Wait};
use super::{BuildLog, EngineError, EngineKind, Result, runner_session::RunnerSession};

/// Pause between two checks of a Job that is being deleted, and between two attempts of a call.
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum attempts to start a Job. Waiting for the end of a previous Job counts as an attempt.
const TRIES: u32 = 30;
/// How long a canceled build waits for the API server's answer about its Job.
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Mechanism that enforces each limit of a pod.
const LIMITS: [(&str, &str); 3] = [
    ("memory", "the container's limit, and the runner's own measurement"),
    ("processes", "the runner's own measurement, and the kubelet's limit for the pod"),
    ("disk", "the container's ephemeral-storage limit"),
];

/// Engine that builds in a cluster.
pub struct Kubernetes {
    client: Client,
    runner: PathBuf,
}

/// Phase of a build in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase<'a> {
    /// Waiting for resources or for the image; the reason.
    Waiting(&'a str),
    Running,
}

/// Name and UID of the created or existing Job.
struct JobId {
    name: String,
    uid: String,
}

impl JobId {
    fn of(job: &Job) -> Self {
        let metadata = &job.metadata;
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
        }
    }
}

/// A build in a pod of the cluster.
pub struct InCluster<'a> {
    /// Inputs of its Job.
    pub job: JobSpec<'a>,
    /// Lowest Landlock ABI that the site accepts.
    pub min_landlock_abi: u32,
    /// Steps and limits, as stored in the image.
    pub plan: Plan,
    pub log: Arc<dyn BuildLog>,
    /// Receives the phase of the build.
    pub phases: &'a (dyn Fn(Phase) + Send + Sync),
    pub cancel: CancellationToken,
    /// If this is canceled too, `cancel` stops only our waiting: the Job keeps running, for a successor to take over.
    pub keep_job: CancellationToken,
}

impl Kubernetes {
    /// Connects to the cluster that the options select.
    pub(super) async fn connect(runner: PathBuf, options: &KubeOptions) -> Result<Self, String> {
        let client = client(options).await.map_err(|error| oci::error_chain(&error))?;
        Ok(Self { client, runner })
    }

    /// Path of the runner for pods of an architecture: a separate file next to this machine's runner.
    pub fn runner(&self, arch: Architecture) -> PathBuf {
        program_for(&self.runner, arch)
    }

    /// Runs the build, unpacks `/out` into the empty directory `dest`, and deletes the Job. Returns the confinement of the
    /// build.
    pub async fn compile(&self, build: InCluster<'_>, dest: &Path) -> Result<Confinement> {
        let InCluster { job, min_landlock_abi, plan, log, phases, cancel, keep_job } = build;
        let namespace = job.builds.namespace();
        let jobs: Api<Job> = Api::namespaced(self.client.clone(), namespace);
        let name = job::name(job.instance, job.driver, job.inputs);
        let manifest = job::manifest(&job).map_err(|error| fault("compose a Job", error))?;
        let mut start = Box::pin(self.start(&jobs, &name, &manifest, &cancel));
        let started = cancel.run_until_cancelled(&mut start).await;
        let Some(job_id) = started else {
            // The API server may have created the Job, and not have answered yet.
            if !keep_job.is_cancelled()
                && let Ok(Ok(job_id)) = timeout(LAST_ANSWER_TIMEOUT, start).await
            {
                delete(&jobs, &name, job_id.uid).await;
            }
            return Err(EngineError::Canceled);
        };
        let job_id = job_id?;
        let uid = job_id.uid.clone();
        let pod = job::pod_spec(&manifest).cloned().unwrap_or_default();
        let wait = Wait::new(self, job.builds, job_id, pod, phases);
        let mut follower = Follower::new(self, namespace, wait);
        let session = RunnerSession {
            engine: EngineKind::Kubernetes,
            plan: &plan,
            log: log.as_ref(),
            min_landlock_abi,
            cancel: &cancel,
        };
        let outcome = match session.run(&mut follower, dest).await {
            // The steps may have ended, so their deadline proves nothing.
            Err(EngineError::Canceled) if follower.is_silent() => {
                let why = follower.last_error.as_deref().unwrap_or("it is silent");
                Err(fault(
                    "read the messages of a build",
                    format!("the connection to the pod is lost: {why}"),
                ))
            }
            outcome => outcome,
        };
        if !keep_job.is_cancelled() {
            delete(&jobs, &name, uid).await;
        }
        outcome.map(|confinement| Confinement { limits: LIMITS.into(), ..confinement })
    }

    /// Creates the Job, or takes over a Job that another farrier, or this one before a restart, has created. A finished Job is
    /// deleted and created again, because its result is lost.
    async fn start(
        &self,
        jobs: &Api<Job>,
        name: &str,
        manifest: &Job,
        cancel: &CancellationToken,
    ) -> Result<JobId> {
        for attempt in 1..=TRIES {
            if cancel.is_cancelled() {
                return Err(EngineError::Canceled);
            }
            match create_or_take_over(jobs, name, manifest).await {
                Ok(StartAttempt::Runs(id)) => return Ok(id),
                // The name is probably free now.
                Ok(StartAttempt::Deleted) if attempt == 1 => continue,
                Err((_, kube::Error::Api(status))) if is_refusal(status.code) => {
                    let namespace = manifest.metadata.namespace.as_deref().unwrap_or_default();
                    return Err(refused(namespace, name, &status.message));
                }
                Err((action, error)) if attempt == TRIES => return Err(fault(action, causes(&error))),
                Ok(StartAttempt::Deleted | StartAttempt::StillDeleting) | Err(_) => {}
            }
            sleep(PAUSE).await;
        }
        Err(fault("create a Job", "the previous Job is still being deleted"))
    }
}

/// Result of one attempt to start a Job.
enum StartAttempt {
    /// The Job was created or taken over.
    Runs(JobId),
    /// An earlier Job of this name was deleted, because its result cannot be used.
    Deleted,
    /// The cluster is still deleting an earlier Job of this name, or has just done so.
    StillDeleting,
}

/// Creates a Job, or takes over the Job of this name. An error comes with the action that failed.
async fn create_or_take_over(
    jobs: &Api<Job>,
    name: &str,
    manifest: &Job,
) -> Result<StartAttempt, (&'static str, kube::Error)> {
    match jobs.create(&PostParams::default(), manifest).await {
        Ok(created) => return Ok(StartAttempt::Runs(JobId::of(&created))),
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => return Err(("create a Job", error)),
    }
    match jobs.get_opt(name).await {
        Ok(Some(job)) if job.metadata.deletion_timestamp.is_some() => Ok(StartAttempt::StillDeleting),
        // The name alone proves nothing: only a Job from the same manifest produces the same result, and runs where the site wants.
        Ok(Some(job)) if is_over(&job) || !job::is_from_manifest(&job, manifest) => {
            delete(jobs, name, JobId::of(&job).uid).await;
            Ok(StartAttempt::Deleted)
        }
        Ok(Some(job)) => {
            tracing::info!(job = name, "takes over a build that runs");
            Ok(StartAttempt::Runs(JobId::of(&job)))
        }
        Ok(None) => Ok(StartAttempt::StillDeleting),
        Err(error) => Err(("read a Job", error)),
    }
}

/// Error for a Job that the cluster refuses. A quota may have room later.
fn refused(namespace: &str, name: &str, message: &str) -> EngineError {
    let is_transient = is_passing_refusal(message);
    let hint = if is_transient {
        "farrier retries automatically; raise the ResourceQuota of the namespace of builds, or lower spec.builds.atOnce in site.yaml"
    } else {
        "apply deploy/kustomize/builds, which has the namespace of builds with farrier's permissions in it, and set \
         spec.builds.namespace in site.yaml to that namespace"
    };
    EngineError::Pod {
        message: format!("the cluster refuses Job {namespace}/{name}: {message}"),
        hint: hint.to_owned(),
        is_transient,
    }
}

/// Whether the cluster would refuse the same call again (401 may be a token that is renewed soon, 429 only asks for a pause).
fn is_refusal(status: u16) -> bool {
    matches!(status, 400..=499) && !matches!(status, 401 | 408 | 429)
}

fn is_over(job: &Job) -> bool {
    let conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| {
        matches!(condition.type_.as_str(), "Complete" | "Failed") && condition.status == "True"
    })
}

/// Deletes a Job and its pod, but not another Job that has replaced it under its name. If that fails, the cluster deletes them
/// when the Job's TTL expires.
async fn delete(jobs: &Api<Job>, name: &str, uid: String) {
    let this_job = Preconditions { uid: Some(uid), resource_version: None };
    match jobs.delete(name, &DeleteParams::background().preconditions(this_job)).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
        Err(error) => {
            tracing::warn!(job = name, error = causes(&error), "the Job of a build was not deleted");
        }
    }
}

fn fault(action: &str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> EngineError {
    EngineError::engine(EngineKind::Kubernetes, action, source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expired_token_is_no_refusal() {
        assert_eq!(
            [400, 401, 403, 404, 408, 422, 429, 500].map(is_refusal),
            [true, false, true, true, false, true, false, false]
        );
    }

    #[test]
    fn a_quota_of_jobs_is_no_missing_permission() {
        let hint = |message: &str| {
            let error = refused("builds", "hello-0", message);
            (error.is_transient(), error.hint().unwrap_or_default())
        };
        for why in [
            "exceeded quota: q, used: count/jobs.batch=5",
            "status unknown for quota: q, resources: count/jobs.batch",
        ] {
            let (is_transient, text) = hint(&format!("jobs.batch \"hello-0\" is forbidden: {why}"));
            assert!(is_transient && text.contains("ResourceQuota"), "{text}");
        }
        let (is_transient, text) = hint("jobs.batch is forbidden: User \"farrier\" cannot create resource");
        assert!(!is_transient && text.contains("deploy/kustomize/builds"), "{text}");
    }
}
