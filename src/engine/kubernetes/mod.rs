//! Adapter: the `kubernetes` engine: each build is a Job, whose pod's image is the whole root file system. Nothing is built in
//! a container by another builder, and no pod has a right, a secret or a network.
//!
//! What the runner in the pod says, its result with it, comes back through the API server (`follow`): the pod answers, and never
//! calls. Whoever builds the same inputs, a new leader too, finds the Job by its name and takes it over.

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
    api::{DeleteParams, PostParams},
};
use runner::plan::Plan;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

pub use job::{JobSpec, USER, environment};

use self::{follow::Follower, wait::Wait};
use super::{BuildLog, EngineError, EngineKind, Result, hearing::Hearing};
use crate::{
    cluster::{
        KubeOptions,
        kube::{causes, client},
    },
    kernel::Architecture,
    machine::program_for,
    provenance::Confinement,
};

/// Between two looks at a Job that is being deleted, and between two tries of a call.
const PAUSE: Duration = Duration::from_secs(1);
/// Tries of a call that may pass.
const TRIES: u32 = 30;

/// What enforces the limits of a pod.
const LIMITS: [(&str, &str); 3] = [
    ("memory", "the container's limit, and the runner's own measurement"),
    ("processes", "a resource limit, and the kubelet's of the pod"),
    ("disk", "the container's ephemeral-storage limit"),
];

/// Builds in a cluster.
pub struct Kubernetes {
    client: Client,
    runner: PathBuf,
}

/// Where a build in the cluster stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase<'a> {
    /// For room, or an image; why.
    Waiting(&'a str),
    /// It runs.
    Running,
}

/// The Job that was made or found.
struct Started {
    name: String,
    uid: String,
}

impl Started {
    fn of(job: &Job) -> Self {
        let metadata = &job.metadata;
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
        }
    }
}

/// A build in a pod.
pub struct InCluster<'a> {
    /// Its Job.
    pub job: JobSpec<'a>,
    /// Lowest Landlock ABI that the site accepts.
    pub least_landlock: u32,
    /// What it does: as it is in the image.
    pub plan: Plan,
    /// Where output goes.
    pub log: Arc<dyn BuildLog>,
    /// Hears where it stands.
    pub phases: &'a (dyn Fn(Phase) + Send + Sync),
    /// Stops it.
    pub cancel: CancellationToken,
    /// Where this is cancelled too, the Job goes on: a successor takes it over.
    pub leave: CancellationToken,
}

impl Kubernetes {
    /// Connects to the cluster that the options name.
    pub(super) async fn connect(runner: PathBuf, options: &KubeOptions) -> Result<Self, String> {
        let client = client(options).await.map_err(|error| crate::error_chain(&error))?;
        Ok(Self { client, runner })
    }

    /// The runner for pods of an architecture: its own file beside that for this machine's.
    pub fn runner(&self, arch: Architecture) -> PathBuf {
        program_for(&self.runner, arch)
    }

    /// Runs the build, unpacks `/out` into `dest`, an empty directory, and deletes the Job. Returns what confined the build.
    pub async fn compile(&self, build: InCluster<'_>, dest: &Path) -> Result<Confinement> {
        let InCluster { job, least_landlock, plan, log, phases, cancel, leave } = build;
        let namespace = job.builds.namespace();
        let jobs: Api<Job> = Api::namespaced(self.client.clone(), namespace);
        let name = job::name(job.driver, job.image);
        let started = cancel.run_until_cancelled(Box::pin(self.start(&jobs, &name, &job))).await;
        let started = started.unwrap_or(Err(EngineError::Cancelled))?;
        let wait = Wait::new(self, namespace, started, phases);
        let mut follower = Follower::new(self, namespace, wait);
        let hearing = Hearing {
            engine: EngineKind::Kubernetes,
            plan: &plan,
            log: log.as_ref(),
            least_landlock,
            cancel: &cancel,
        };
        let outcome = hearing.run(&mut follower, dest).await;
        if !leave.is_cancelled() {
            delete(&jobs, &name).await;
        }
        outcome.map(|confined| Confinement { limits: LIMITS.into(), ..confined })
    }

    /// Makes the Job, or finds the one that is there: of another farrier, or of this one before it was restarted. One that has
    /// ended has no result any more.
    async fn start(&self, jobs: &Api<Job>, name: &str, spec: &JobSpec<'_>) -> Result<Started> {
        let manifest = job::manifest(spec).map_err(|error| fault("write a Job", error))?;
        for attempt in 1..=TRIES {
            let (action, error) = match jobs.create(&PostParams::default(), &manifest).await {
                Ok(made) => return Ok(Started::of(&made)),
                Err(kube::Error::Api(status)) if status.code == 409 => match jobs.get_opt(name).await {
                    // What a name says does not count: only the same root file system compiles the same.
                    Ok(Some(found)) if is_over(&found) || job::image(&found) != job::image(&manifest) => {
                        delete(jobs, name).await;
                        continue;
                    }
                    Ok(Some(found)) if found.metadata.deletion_timestamp.is_none() => {
                        tracing::info!(job = name, "takes over a build that runs");
                        return Ok(Started::of(&found));
                    }
                    Ok(_) => {
                        sleep(PAUSE).await;
                        continue;
                    }
                    Err(error) => ("look at a Job", error),
                },
                Err(error) => ("make a Job", error),
            };
            if let kube::Error::Api(status) = &error
                && matches!(status.code, 400..=499)
                && status.code != 429
            {
                return Err(EngineError::Pod {
                    message: format!("the cluster refuses Job {}/{name}: {}", spec.builds.namespace(), status.message),
                    hint: "deploy/ has the namespace of builds with farrier's rights in it; spec.builds.namespace in site.yaml names it"
                        .to_owned(),
                    may_pass: false,
                });
            }
            if attempt == TRIES {
                return Err(fault(action, causes(&error)));
            }
            sleep(PAUSE).await;
        }
        Err(fault("make a Job", "the one before it is still being deleted"))
    }
}

fn is_over(job: &Job) -> bool {
    let conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|found| matches!(found.type_.as_str(), "Complete" | "Failed") && found.status == "True")
}

/// Takes a Job and its pod away. Where it cannot be done the cluster does it, when the Job's time is over.
async fn delete(jobs: &Api<Job>, name: &str) {
    match jobs.delete(name, &DeleteParams::background()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => {
            tracing::warn!(job = name, error = causes(&error), "the Job of a build was not deleted");
        }
    }
}

fn fault(action: &str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> EngineError {
    EngineError::engine(EngineKind::Kubernetes, action, source)
}
