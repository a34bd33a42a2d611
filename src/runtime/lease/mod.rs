//! Adapter: leadership by a `coordination.k8s.io/v1` Lease, and the fence that keeps every other farrier from writing.
//!
//! It is farrier's own, because the crates that exist judge a lease by the wall clock of another machine, where a clock
//! that jumps makes two leaders (decision 10).

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

pub use election::Timing;
use election::{Election, Move, Record};

use crate::cluster::{
    Fence,
    kube::{causes, is_starting},
};

/// Which lease, and as whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseOptions {
    /// The lease's namespace.
    pub namespace: String,
    /// The lease's name: farriers with the same one never write at the same time.
    pub name: String,
    /// Unlike that of every other process, also of this one's own restart.
    pub identity: String,
    /// How it is held.
    pub timing: Timing,
}

/// Why a lease was not read or written.
struct LeaseFault {
    message: String,
    /// The API server's answer, where it gave one: 409 where another client wrote the lease in between.
    code: Option<u16>,
    /// Is it only that the API server has just come back?
    starting: bool,
}

/// Holds the lease, or waits for it. A clone is the same leadership.
#[derive(Clone)]
pub struct Leadership {
    shared: Arc<Shared>,
    leads: watch::Receiver<bool>,
}

struct Shared {
    lease: String,
    state: Mutex<Trust>,
}

/// Until when the last renewal is trusted.
///
/// By the monotonic clock, which no clock jump moves; and by the other clock, too, which goes on while the machine is
/// suspended. A jump of the latter closes the fence until the next renewal, seconds later, and does nothing worse.
#[derive(Clone, Copy, Debug, Default)]
struct Trust {
    until: Option<(Instant, SystemTime)>,
    /// Could the lease only not be renewed?
    cut_off: bool,
    /// Has this farrier led before?
    ever_led: bool,
}

impl Trust {
    fn closed(&self, lease: &str, now: Instant, wall: SystemTime) -> Option<String> {
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
    fn closed(&self) -> Option<String> {
        self.shared.state.lock().closed(&self.shared.lease, Instant::now(), SystemTime::now())
    }
}

/// The task that looks after the lease.
pub struct LeaseTask {
    release: CancellationToken,
    task: JoinHandle<()>,
}

impl LeaseTask {
    /// Gives the lease back, so that another farrier takes over at once. Nothing may be written any more.
    pub async fn release(self) {
        self.release.cancel();
        if let Err(error) = self.task.await {
            tracing::warn!(%error, "the lease was not given back");
        }
    }
}

/// Starts to campaign for the lease.
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
        held: None,
        wall_until: SystemTime::UNIX_EPOCH,
        reported: None,
        leader: None,
    };
    let task = tokio::spawn(candidate.run(release.clone()));
    (Leadership { shared, leads }, LeaseTask { release, task })
}

impl Leadership {
    /// Tells whether this farrier is the leader as far as it knows, when that changes and when its fence opens or closes. One
    /// that is cut off from the API server stays the leader until it sees another one, behind a closed fence: it is not
    /// known that any other is, and what it works on may still be of use.
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
    /// The lease as this one wrote it last: renewed without a look.
    held: Option<Lease>,
    /// Until when the last renewal is trusted by the machine's other clock.
    wall_until: SystemTime,
    /// The fault that was reported last: a server that is away for minutes is one line.
    reported: Option<String>,
    /// Whom the log named as the leader.
    leader: Option<String>,
}

impl Candidate {
    async fn run(mut self, release: CancellationToken) {
        loop {
            match self.look().await {
                Ok(()) => self.reported = None,
                Err(error) => self.report(error),
            }
            self.settle();
            let next = Instant::now() + self.options.timing.retry;
            // A leader that cannot renew ceases to be one at that moment, and not with the next look.
            let expiry = self.election.leads_until(Instant::now()).unwrap_or(next).min(next);
            for wake in [expiry, next] {
                tokio::select! {
                    () = release.cancelled() => return self.give_back().await,
                    () = tokio::time::sleep_until(wake) => self.settle(),
                }
            }
        }
    }

    /// Looks at the lease; once more where another client wrote it meanwhile, to know at once who holds it.
    async fn look(&mut self) -> Result<(), LeaseFault> {
        for _ in 0..2 {
            match self.turn().await {
                Err(LeaseFault { message, code: Some(409), .. }) => {
                    tracing::debug!(message, "lease was written by another client");
                }
                outcome => return outcome,
            }
        }
        Ok(())
    }

    /// Makes, takes or renews the lease where that is right.
    async fn turn(&mut self) -> Result<(), LeaseFault> {
        let lease = match self.held.take() {
            Some(lease) => Some(lease),
            None => self.request("read", self.api.get_opt(&self.options.name)).await?,
        };
        let record = lease.as_ref().map(record_of);
        let (now, wall) = (Instant::now(), SystemTime::now());
        let step = self.election.decide(record.as_ref(), now);
        let (action, name) = match step {
            Move::Wait => {
                self.tell_leader(record.unwrap_or_default().holder);
                return Ok(());
            }
            Move::Create => ("create", &self.options.name),
            Move::Take => ("take over", &self.options.name),
            Move::Renew => ("renew", &self.options.name),
        };
        let wanted = self.written(lease, &record.unwrap_or_default());
        let written = if step == Move::Create {
            self.request(action, self.api.create(&PostParams::default(), &wanted)).await?
        } else {
            self.request(action, self.api.replace(name, &PostParams::default(), &wanted)).await?
        };
        self.election.won(now);
        self.wall_until = wall + self.options.timing.renew_deadline;
        self.held = Some(written);
        Ok(())
    }

    /// The lease with this one as its holder.
    fn written(&self, found: Option<Lease>, before: &Record) -> Lease {
        let now = MicroTime(jiff::Timestamp::now());
        let LeaseOptions { namespace, name, identity, timing } = &self.options;
        let mut lease = found.unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                namespace: Some(namespace.clone()),
                name: Some(name.clone()),
                ..ObjectMeta::default()
            },
            ..Lease::default()
        });
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if before.holder != *identity {
            let made = spec.holder_identity.is_none() && spec.acquire_time.is_none();
            spec.lease_transitions = Some(before.transitions.saturating_add(i32::from(!made)));
            spec.acquire_time = Some(now.clone());
        }
        spec.holder_identity = Some(identity.clone());
        spec.lease_duration_seconds = Some(i32::try_from(timing.lease.as_secs()).unwrap_or(i32::MAX));
        spec.renew_time = Some(now);
        lease
    }

    /// Tells the fence, and those who watch, where things stand.
    fn settle(&mut self) {
        let until = self.election.leads_until(Instant::now());
        let (leads, writes) = (self.election.holds(), until.is_some());
        let wrote = {
            let mut trust = self.shared.state.lock();
            let before = std::mem::replace(&mut trust.until, until.map(|until| (until, self.wall_until)));
            trust.cut_off = leads && !writes;
            trust.ever_led |= writes;
            before.is_some()
        };
        let led = *self.leads.borrow();
        if (led, wrote) == (leads, writes) {
            return;
        }
        let (lease, identity) = (&self.shared.lease, &self.options.identity);
        if writes {
            self.leader = None;
            tracing::info!(lease, identity, "leads: this farrier builds and writes");
        } else if leads {
            tracing::warn!(lease, identity, "the lease could not be renewed: nothing is written until it is");
        } else {
            tracing::warn!(lease, identity, "leads no more: nothing is written");
        }
        self.leads.send_replace(leads);
    }

    /// Says who leads, once for each leader: the log of a standby holds little else.
    fn tell_leader(&mut self, holder: String) {
        if self.leader.as_ref() == Some(&holder) {
            return;
        }
        // What stands before the last `_` is the name of its machine; in a pod, the pod's.
        let pod = holder.rsplit_once('_').map_or(holder.as_str(), |(pod, _)| pod);
        let hint = format!("its log has the rest: kubectl -n {} logs {pod}", self.options.namespace);
        tracing::info!(lease = self.shared.lease, leader = holder, hint, "stands by: another farrier leads");
        self.leader = Some(holder);
    }

    async fn give_back(mut self) {
        let mine = self.held.take();
        self.election.lost();
        self.settle();
        let Some(mut lease) = mine else { return };
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(MicroTime(jiff::Timestamp::now()));
        let parameters = PostParams::default();
        let replace = self.api.replace(&self.options.name, &parameters, &lease);
        match self.request("give back", replace).await {
            Ok(_) => tracing::info!(lease = self.shared.lease, "lease given back"),
            Err(error) => self.report(error),
        }
    }

    /// Makes a request, which has to be answered in time for another one before the renewal is overdue.
    async fn request<T>(
        &self,
        action: &'static str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, LeaseFault> {
        let action = format!("{action} lease {}", self.shared.lease);
        let (now, half) = (Instant::now(), self.options.timing.renew_deadline / 2);
        let waited = self.election.leads_until(now).map_or(half, |until| half.min(until - now));
        match tokio::time::timeout(waited, request).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                let code = match &error {
                    kube::Error::Api(status) => Some(status.code),
                    _ => None,
                };
                let message = format!("{action}: {}", causes(&error));
                Err(LeaseFault { message, code, starting: is_starting(&error) })
            }
            Err(_) => {
                let message = format!("{action}: no answer within {} ms", waited.as_millis());
                Err(LeaseFault { message, code: None, starting: false })
            }
        }
    }

    fn report(&mut self, fault: LeaseFault) {
        let LeaseFault { message, code, starting } = fault;
        if starting || self.reported.as_ref() == Some(&message) {
            tracing::debug!(error = message, "lease");
            return;
        }
        let hint = match code {
            Some(403) => {
                "add apiGroups [coordination.k8s.io], resources [leases], verbs [get, create, update] to farrier's Role"
            }
            Some(404) => "create the namespace, or name another one with --lease-namespace",
            _ => "it is tried again",
        };
        tracing::warn!(error = message, hint, "lease");
        self.reported = Some(message);
    }
}

fn record_of(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    Record {
        holder: spec.holder_identity.unwrap_or_default(),
        renewed: spec.renew_time.map(|time| time.0),
        length: spec
            .lease_duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .map(Duration::from_secs),
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
    fn both_clocks_must_trust_the_lease() {
        let (now, wall) = (Instant::now(), SystemTime::now());
        let trust = Trust { until: Some((now + s(10), wall + s(10))), cut_off: false, ever_led: true };
        assert_eq!(trust.closed("f/f", now + s(9), wall + s(9)), None);
        // The monotonic clock decides though the other one was set back a year.
        let set_back = wall - s(31_000_000);
        assert!(trust.closed("f/f", now + s(11), set_back).unwrap().contains("renewed in time"));
        assert_eq!(trust.closed("f/f", now + s(9), set_back), None);
        // A machine that slept for an hour, whose monotonic clock stood.
        assert!(trust.closed("f/f", now + s(1), wall + s(3600)).is_some());
        assert!(Trust::default().closed("f/f", now, wall).unwrap().contains("another farrier"));
    }
}

#[cfg(test)]
mod race_tests;
