//! Leader election with a `coordination.k8s.io/v1` Lease, and the fence that blocks writes of all replicas except the leader.
//!
//! farrier implements the election itself. Existing crates rely on the wall clock of another machine, and a jump of that clock
//! makes two leaders (docs/decisions/0010-own-lease.md).

mod election;

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use parking_lot::Mutex;
use tokio::{sync::watch, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

pub use election::LeaseTiming;
use election::{Election, ElectionStep, LeaseRecord};
use farrier_cluster::{
    Fence,
    kube::{causes, is_starting},
};

/// Name of the lease, and this process's identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseOptions {
    /// The lease's namespace.
    pub namespace: String,
    /// The lease's name. Farriers with the same lease name never write at the same time.
    pub name: String,
    /// Identity of this process, unique among all processes. A restarted process has another identity.
    pub identity: String,
    pub timing: LeaseTiming,
}

/// Failed request to read or write the lease.
struct LeaseError {
    message: String,
    /// Status code of the API server's response, if there was one. The code is 409 if another client wrote the lease in between.
    code: Option<u16>,
    /// Whether the API server is still starting.
    starting: bool,
}

/// Leadership of this process, which is also its fence. Clones share one leadership.
#[derive(Clone)]
pub struct Leadership {
    shared: Arc<Shared>,
    leads: watch::Receiver<bool>,
}

struct Shared {
    lease: String,
    state: Mutex<LeaseValidity>,
}

/// Validity of the last renewal, by two clocks.
///
/// The monotonic clock never jumps, and the wall clock also advances while the machine is suspended. A jump of the wall clock at
/// worst closes the fence until the next renewal, seconds later.
#[derive(Clone, Copy, Debug, Default)]
struct LeaseValidity {
    until: Option<(Instant, SystemTime)>,
    /// Whether this process was the last known holder of the lease, but could not renew it.
    cut_off: bool,
    ever_led: bool,
}

impl LeaseValidity {
    fn closed_reason(&self, lease: &str, now: Instant, wall: SystemTime) -> Option<String> {
        match self.until {
            Some((until, wall_until)) if now < until && wall < wall_until => None,
            Some(_) => Some(format!("lease {lease} could not be renewed in time")),
            None if self.cut_off => Some(format!("lease {lease} could not be renewed")),
            None if self.ever_led => Some(format!("lease {lease} was lost")),
            None => Some(format!("lease {lease} is held by another farrier")),
        }
    }
}

impl Fence for Leadership {
    fn closed_reason(&self) -> Option<String> {
        self.shared.state.lock().closed_reason(&self.shared.lease, Instant::now(), SystemTime::now())
    }
}

/// Background task that acquires and renews the lease.
pub struct LeaseTask {
    release: CancellationToken,
    task: JoinHandle<()>,
}

impl LeaseTask {
    /// Releases the lease, so that another candidate takes over at once. The caller must not write afterwards.
    pub async fn release(self) {
        self.release.cancel();
        if let Err(error) = self.task.await {
            tracing::warn!(%error, "the lease could not be released");
        }
    }
}

/// Starts the task that acquires and renews the lease.
pub fn campaign(client: Client, options: LeaseOptions) -> (Leadership, LeaseTask) {
    let (sender, leads) = watch::channel(false);
    let lease = format!("{}/{}", options.namespace, options.name);
    let shared = Arc::new(Shared { lease, state: Mutex::default() });
    let release = CancellationToken::new();
    let candidate = Candidate {
        api: Api::namespaced(client, &options.namespace),
        election: Election::new(options.identity.clone(), options.timing),
        options,
        shared: Arc::clone(&shared),
        leads: sender,
        last_written: None,
        wall_until: SystemTime::UNIX_EPOCH,
        reported: None,
        leader: None,
    };
    let task = tokio::spawn(candidate.run(release.clone()));
    (Leadership { shared, leads }, LeaseTask { release, task })
}

impl Leadership {
    /// Watches whether this process considers itself the leader. Also notifies when the fence opens or closes.
    ///
    /// A leader that is cut off from the API server stays the leader, behind a closed fence, until it sees another holder. Until
    /// then, its running builds may still be useful.
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.leads.clone()
    }
}

struct Candidate {
    api: Api<Lease>,
    options: LeaseOptions,
    election: Election,
    shared: Arc<Shared>,
    leads: watch::Sender<bool>,
    /// The lease that this candidate wrote last. The next renewal needs no read.
    last_written: Option<Lease>,
    /// End of the validity of the last renewal, by the wall clock.
    wall_until: SystemTime,
    /// The last logged error, so that an outage of minutes is logged once.
    reported: Option<String>,
    /// The leader that was last logged.
    leader: Option<String>,
}

impl Candidate {
    async fn run(mut self, release: CancellationToken) {
        loop {
            match self.campaign_once().await {
                Ok(()) => self.reported = None,
                Err(error) => self.report(error),
            }
            self.update_fence();
            let next = Instant::now() + self.options.timing.retry;
            // A leader that cannot renew must close the fence at the expiry, not at the next poll.
            let expiry = self.election.leads_until(Instant::now()).unwrap_or(next).min(next);
            for wake in [expiry, next] {
                tokio::select! {
                    () = release.cancelled() => return self.release_lease().await,
                    () = tokio::time::sleep_until(wake) => self.update_fence(),
                }
            }
        }
    }

    /// Makes one attempt to acquire or renew the lease. After a conflict with another client, makes a second attempt at once to
    /// learn who holds the lease.
    async fn campaign_once(&mut self) -> Result<(), LeaseError> {
        for _ in 0..2 {
            match self.advance().await {
                Err(LeaseError { message, code: Some(409), .. }) => {
                    tracing::debug!(message, "lease was written by another client");
                }
                outcome => return outcome,
            }
        }
        Ok(())
    }

    /// Reads the lease, and creates, takes over or renews it as the election decides.
    async fn advance(&mut self) -> Result<(), LeaseError> {
        let lease = match self.last_written.take() {
            Some(lease) => Some(lease),
            None => self.request("read", self.api.get_opt(&self.options.name)).await?,
        };
        let record = lease.as_ref().map(record_of);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let step = self.election.decide(record.as_ref(), now);
        let action = match step {
            ElectionStep::Wait => {
                self.log_leader(record.unwrap_or_default().holder);
                return Ok(());
            }
            ElectionStep::Create => "create",
            ElectionStep::Take => "take over",
            ElectionStep::Renew => "renew",
        };
        let lease = self.with_this_holder(lease, &record.unwrap_or_default());
        let written = if step == ElectionStep::Create {
            self.request(action, self.api.create(&PostParams::default(), &lease)).await?
        } else {
            self.request(action, self.api.replace(&self.options.name, &PostParams::default(), &lease)).await?
        };
        self.election.record_renewal(now);
        self.wall_until = wall + self.options.timing.renew_deadline;
        self.last_written = Some(written);
        Ok(())
    }

    /// Returns the lease with this candidate as its holder.
    fn with_this_holder(&self, existing: Option<Lease>, before: &LeaseRecord) -> Lease {
        let now = MicroTime(jiff::Timestamp::now());
        let LeaseOptions { namespace, name, identity, timing } = &self.options;
        let mut lease = existing.unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                namespace: Some(namespace.clone()),
                name: Some(name.clone()),
                ..ObjectMeta::default()
            },
            ..Lease::default()
        });
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if before.holder != *identity {
            let is_new = spec.holder_identity.is_none() && spec.acquire_time.is_none();
            spec.lease_transitions = Some(before.transitions.saturating_add(i32::from(!is_new)));
            spec.acquire_time = Some(now.clone());
        }
        spec.holder_identity = Some(identity.clone());
        spec.lease_duration_seconds = Some(i32::try_from(timing.lease.as_secs()).unwrap_or(i32::MAX));
        spec.renew_time = Some(now);
        lease
    }

    /// Updates the fence and notifies watchers.
    fn update_fence(&mut self) {
        let until = self.election.leads_until(Instant::now());
        let (leads, may_write) = (self.election.holds(), until.is_some());
        let could_write = {
            let mut validity = self.shared.state.lock();
            let before = std::mem::replace(&mut validity.until, until.map(|until| (until, self.wall_until)));
            validity.cut_off = leads && !may_write;
            validity.ever_led |= may_write;
            before.is_some()
        };
        let led_before = *self.leads.borrow();
        if (led_before, could_write) == (leads, may_write) {
            return;
        }
        let (lease, identity) = (&self.shared.lease, &self.options.identity);
        if may_write {
            self.leader = None;
            tracing::info!(lease, identity, "became leader: this farrier builds and writes");
        } else if leads {
            tracing::warn!(lease, identity, "the lease could not be renewed: farrier writes nothing");
        } else {
            tracing::warn!(lease, identity, "lost leadership: farrier writes nothing");
        }
        self.leads.send_replace(leads);
    }

    /// Logs another leader once. A standby logs little else.
    fn log_leader(&mut self, holder: String) {
        if self.leader.as_ref() == Some(&holder) {
            return;
        }
        // The part before the last `_` is the name of the holder's machine, which in a cluster is the pod's name.
        let pod = holder.rsplit_once('_').map_or(holder.as_str(), |(pod, _)| pod);
        let hint = format!("read the leader's log: kubectl -n {} logs {pod}", self.options.namespace);
        tracing::info!(
            lease = self.shared.lease,
            leader = holder,
            hint,
            "standing by: another farrier leads"
        );
        self.leader = Some(holder);
    }

    async fn release_lease(mut self) {
        let lease = self.last_written.take();
        self.election.record_loss();
        self.update_fence();
        let Some(mut lease) = lease else { return };
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(MicroTime(jiff::Timestamp::now()));
        let parameters = PostParams::default();
        let replace = self.api.replace(&self.options.name, &parameters, &lease);
        match self.request("release", replace).await {
            Ok(_) => tracing::info!(lease = self.shared.lease, "lease released"),
            Err(error) => self.report(error),
        }
    }

    /// Sends a request. The timeout leaves time for another attempt before the last renewal expires.
    async fn request<T>(
        &self,
        action: &'static str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, LeaseError> {
        let action = format!("{action} lease {}", self.shared.lease);
        let (now, half) = (Instant::now(), self.options.timing.renew_deadline / 2);
        let timeout = self.election.leads_until(now).map_or(half, |until| half.min(until - now));
        match tokio::time::timeout(timeout, request).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => {
                let code = match &error {
                    kube::Error::Api(status) => Some(status.code),
                    _ => None,
                };
                let message = format!("{action}: {}", causes(&error));
                Err(LeaseError { message, code, starting: is_starting(&error) })
            }
            Err(_) => {
                let message = format!("{action}: no answer within {} ms", timeout.as_millis());
                Err(LeaseError { message, code: None, starting: false })
            }
        }
    }

    fn report(&mut self, fault: LeaseError) {
        let LeaseError { message, code, starting } = fault;
        if starting || self.reported.as_ref() == Some(&message) {
            tracing::debug!(error = message, "lease");
            return;
        }
        let hint = match code {
            Some(403) => {
                "add apiGroups [coordination.k8s.io], resources [leases], verbs [get, create, update] to farrier's Role"
            }
            Some(404) => "create the namespace, or choose another one with --lease-namespace",
            _ => "farrier retries automatically",
        };
        tracing::warn!(error = message, hint, "lease");
        self.reported = Some(message);
    }
}

fn record_of(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        renewed: spec.renew_time.map(|time| time.0),
        duration: seconds.map(Duration::from_secs),
        transitions: spec.lease_transitions.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_fence_closes_when_either_clock_expires() {
        let (now, wall) = (Instant::now(), SystemTime::now());
        let validity =
            LeaseValidity { until: Some((now + s(10), wall + s(10))), cut_off: false, ever_led: true };
        assert_eq!(validity.closed_reason("f/f", now + s(9), wall + s(9)), None);
        // The monotonic clock decides even if the wall clock was set back by a year.
        let set_back = wall - s(31_000_000);
        assert!(validity.closed_reason("f/f", now + s(11), set_back).unwrap().contains("renewed in time"));
        assert_eq!(validity.closed_reason("f/f", now + s(9), set_back), None);
        // The machine was suspended for an hour, and its monotonic clock stood still.
        assert!(validity.closed_reason("f/f", now + s(1), wall + s(3600)).is_some());
        assert!(
            LeaseValidity::default().closed_reason("f/f", now, wall).unwrap().contains("another farrier")
        );
    }
}

#[cfg(test)]
mod race_tests;
