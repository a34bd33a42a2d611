//! Waits until the pod of a build runs, and reports the reasons for the wait.

use std::{mem, pin::pin, time::Duration};

use farrier_core::{definition::Period, site::Builds};
use futures::StreamExt as _;
use k8s_openapi::api::{
    batch::v1::Job,
    core::v1::{Event, Pod, PodSpec},
};
use kube::{
    Api, ResourceExt as _,
    api::ListParams,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::time::Instant;

use super::{
    JobId, Kubernetes, Phase, is_over,
    pod::{PodState, deleted, pod_state, state_without_pod},
};
use crate::{EngineError, Result};

/// Interval of the checks whether the Job still exists and, if it has no pod, why.
const JOB_CHECK_INTERVAL: Duration = Duration::from_secs(3);

/// How long a node may retry to pull the image, because the registry or the network may be down.
const PULL_TIMEOUT: Duration = Duration::from_mins(5);

/// Waits for one Job's pod.
pub(super) struct Wait<'a> {
    jobs: Api<Job>,
    pods: Api<Pod>,
    events: Api<Event>,
    job: JobId,
    /// Specification of the Job's own pods.
    own: PodSpec,
    limit: Period,
    /// End of the wait for the first running pod.
    deadline: Instant,
    has_run: bool,
    phases: &'a (dyn Fn(Phase) + Send + Sync),
    /// Last reported reason.
    reported: Option<String>,
    /// Whether the last check found that the Job has ended.
    was_over: bool,
}

impl<'a> Wait<'a> {
    pub(super) fn new(
        engine: &Kubernetes,
        builds: &Builds,
        job: JobId,
        own: PodSpec,
        phases: &'a (dyn Fn(Phase) + Send + Sync),
    ) -> Self {
        let client = || engine.client.clone();
        let namespace = builds.namespace();
        Self {
            jobs: Api::namespaced(client(), namespace),
            pods: Api::namespaced(client(), namespace),
            events: Api::namespaced(client(), namespace),
            job,
            own,
            limit: builds.wait_at_most,
            deadline: Instant::now() + builds.wait_at_most.duration(),
            has_run: false,
            phases,
            reported: None,
            was_over: false,
        }
    }

    /// Waits for a running pod and returns its name.
    pub(super) async fn until_running(&mut self) -> Result<String> {
        // Selected by the Job's UID: pods of an earlier Job of the same name may still exist.
        let label = format!("batch.kubernetes.io/controller-uid={}", self.job.uid);
        let of_job = watcher::Config::default().labels(&label);
        let mut pods = pin!(watcher(self.pods.clone(), of_job).default_backoff().applied_objects());
        let mut has_pod = false;
        let mut without_image: Option<(String, Instant)> = None;
        loop {
            if !self.has_run && Instant::now() >= self.deadline {
                return Err(self.waited_too_long());
            }
            let timer = tokio::time::sleep(JOB_CHECK_INTERVAL);
            let (name, state) = tokio::select! {
                pod = pods.next() => match pod {
                    Some(Ok(pod)) => {
                        has_pod = true;
                        (pod.name_any(), pod_state(&pod, &self.own))
                    }
                    Some(Err(
                        watcher::Error::InitialListFailed(kube::Error::Api(status))
                        | watcher::Error::WatchStartFailed(kube::Error::Api(status)),
                    )) if status.code == 403 => {
                        (String::new(), PodState::Ended(missing_permission(&status.message)))
                    }
                    // The watcher restarts automatically.
                    Some(Err(error)) => {
                        tracing::debug!(job = self.job.name, %error, "pods of a build cannot be watched");
                        continue;
                    }
                    None => continue,
                },
                () = timer => match self.check_job(has_pod).await {
                    Some(state) => (String::new(), state),
                    None => match &without_image {
                        Some((why, since)) if since.elapsed() > PULL_TIMEOUT => {
                            (String::new(), PodState::Ended(pull_timed_out(&self.job.name, why)))
                        }
                        _ => continue,
                    },
                },
            };
            without_image = match &state {
                PodState::WithoutImage(why) => {
                    let since = without_image.map_or_else(Instant::now, |(_, since)| since);
                    Some((why.clone(), since))
                }
                _ => None,
            };
            match state {
                PodState::Running => {
                    self.has_run = true;
                    (self.phases)(Phase::Running);
                    return Ok(name);
                }
                PodState::Ended(error) => {
                    return Err(if self.has_run { error } else { before_first_step(error) });
                }
                PodState::Waiting(why) => self.report(why),
                PodState::WithoutImage(why) => self.report(format!("its node cannot pull the image: {why}")),
            }
        }
    }

    /// Returns the state of the build if the watch on its pods cannot show it.
    async fn check_job(&mut self, has_pod: bool) -> Option<PodState> {
        let JobId { name, uid } = &self.job;
        // After a failed request the state is unknown.
        let job = self.jobs.get_opt(name).await.ok()?;
        let Some(job) = job.filter(|job| job.metadata.uid.as_ref() == Some(uid)) else {
            return Some(deleted(name, "its Job was deleted"));
        };
        if job.spec.as_ref().is_some_and(|spec| spec.suspend == Some(true)) {
            // The cluster deletes the pods of a suspended Job.
            if self.has_run {
                return Some(deleted(name, "its Job was suspended"));
            }
            self.deadline = Instant::now() + self.limit.duration();
        }
        // The watch shows a pod's end at about the time of its Job's end, unless the pod was deleted during a gap of the watch.
        if is_over(&job) && (!has_pod || mem::replace(&mut self.was_over, true)) {
            return Some(deleted(name, "it was deleted"));
        }
        if has_pod {
            return None;
        }
        // The Job's Events explain why it has no pod.
        let selector = format!("involvedObject.kind=Job,involvedObject.name={name}");
        let events = self.events.list(&ListParams::default().fields(&selector)).await.ok()?;
        let of_job = |event: &Event| event.involved_object.uid.as_ref().is_none_or(|id| id == uid);
        let events: Vec<Event> = events.items.into_iter().filter(of_job).collect();
        Some(state_without_pod(name, &events))
    }

    fn waited_too_long(&self) -> EngineError {
        let (job, limit) = (&self.job.name, self.limit);
        let why = self.reported.as_deref().unwrap_or("the cluster gives no reason");
        EngineError::Pod {
            message: format!("Job {job} did not start within {limit}: {why}"),
            hint: "farrier retries automatically, with the current site.yaml; spec.builds.waitAtMost allows a longer wait".to_owned(),
            is_transient: true,
        }
    }

    fn report(&mut self, why: String) {
        if self.reported.as_ref() != Some(&why) {
            (self.phases)(Phase::Waiting(&why));
            self.reported = Some(why);
        }
    }
}

/// Returns the error for a pod that ended before a step ran. Its deadline then says nothing about the steps: its node could not
/// start it, for example because the node's network plugin fails.
fn before_first_step(error: EngineError) -> EngineError {
    match error {
        EngineError::Deadline(message) => EngineError::Pod {
            message: format!("{message}: its node did not start it"),
            hint: "see the Events of the pods in the namespace of builds, and their node; farrier retries automatically".to_owned(),
            is_transient: true,
        },
        error => error,
    }
}

/// Error for a missing permission in the namespace of builds.
pub(super) fn missing_permission(detail: &str) -> EngineError {
    EngineError::Pod {
        message: format!("the cluster denies farrier access to the pod of a build: {detail}"),
        hint: "deploy/ has the Role for the namespace of builds".to_owned(),
        is_transient: false,
    }
}

fn pull_timed_out(job: &str, why: &str) -> EngineError {
    EngineError::Pod {
        message: format!("the node of Job {job} cannot pull the build's image: {why}"),
        hint: "nodes must reach and trust the registry that --registry names; if the registry requires a password, spec.builds.pod.imagePullSecrets \
               in site.yaml names a Secret of the namespace of builds"
            .to_owned(),
        is_transient: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_never_started_says_nothing_about_the_deadline_of_the_steps() {
        let late =
            before_first_step(EngineError::Deadline("pod p did not end within its deadline".to_owned()));
        assert!(late.is_transient());
        assert_eq!(late.to_string(), "pod p did not end within its deadline: its node did not start it");
        assert!(matches!(
            before_first_step(EngineError::MemoryLimit(String::new())),
            EngineError::MemoryLimit(_)
        ));
    }
}
