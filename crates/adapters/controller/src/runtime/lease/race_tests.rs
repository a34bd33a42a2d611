//! Tests with two candidates and an API server that responds late, never, or with stale reads. The candidates must never write at
//! the same time. The server's comparison of `resourceVersion` ensures this: without the comparison, the same schedules make two
//! leaders.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use fastrand::Rng;
use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tower::Service;

use super::*;

/// Simulated duration of each schedule.
const SCHEDULE_DURATION: Duration = Duration::from_mins(2);
/// Interval at which the test checks who may write.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Versions of the lease object, the newest last.
#[derive(Default)]
struct LeaseVersions(Vec<Value>);

impl LeaseVersions {
    /// Writes the object if it has the current version.
    fn write(&mut self, mut lease: Value, creates: bool, compares: bool) -> Result<Value, u16> {
        let current = self.0.len().to_string();
        let same = lease["metadata"]["resourceVersion"] == json!(current);
        if compares && (creates != self.0.is_empty() || !creates && !same) {
            return Err(409);
        }
        lease["metadata"]["resourceVersion"] = json!((self.0.len() + 1).to_string());
        self.0.push(lease.clone());
        Ok(lease)
    }

    /// Returns the object as it was some writes ago.
    fn read(&self, writes_ago: usize) -> Result<Value, u16> {
        let index = self.0.len().checked_sub(1 + writes_ago);
        index.and_then(|index| self.0.get(index)).cloned().ok_or(404)
    }
}

/// A candidate's connection to the API server.
#[derive(Clone)]
struct UnreliableApi {
    versions: Arc<Mutex<LeaseVersions>>,
    random: Arc<Mutex<Rng>>,
    /// Whether the server compares versions.
    compares: bool,
}

impl UnreliableApi {
    fn random<T>(&self, choose: impl FnOnce(&mut Rng) -> T) -> T {
        choose(&mut self.random.lock().unwrap())
    }

    /// Waits, sometimes long enough for another candidate to take the lease.
    async fn delay(&self) {
        let most = if self.random(|random| random.u8(..10)) < 3 { 30_000 } else { 3_000 };
        let wait = self.random(|random| random.u64(..most));
        tokio::time::sleep(Duration::from_millis(wait)).await;
    }

    async fn answer(self, request: Request<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap();
        // A request in flight takes effect whether or not the candidate still waits for the answer.
        let done = tokio::spawn(async move {
            self.delay().await;
            let outcome = if head.method == Method::GET {
                let writes_ago = self.random(|random| random.usize(..4).saturating_sub(1));
                self.versions.lock().unwrap().read(writes_ago)
            } else {
                let lease = serde_json::from_slice(&body).unwrap();
                self.versions.lock().unwrap().write(lease, head.method == Method::POST, self.compares)
            };
            self.delay().await;
            outcome
        });
        let (code, body) = match done.await.unwrap() {
            Ok(lease) => (200, lease),
            Err(code) => {
                let reason = if code == 404 { "NotFound" } else { "Conflict" };
                let (kind, version) = ("Status", "v1");
                (
                    code,
                    json!({"kind": kind, "apiVersion": version, "status": "Failure", "code": code, "reason": reason, "message": reason}),
                )
            }
        };
        Response::builder().status(code).body(Body::from(serde_json::to_vec(&body).unwrap())).unwrap()
    }
}

impl Service<Request<Body>> for UnreliableApi {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let api = self.clone();
        Box::pin(async move { Ok(api.answer(request).await) })
    }
}

/// Result of one schedule.
#[derive(Debug, Default, PartialEq, Eq)]
struct ScheduleResult {
    /// Number of checks at which both candidates were allowed to write.
    both: usize,
    /// Number of leadership changes.
    changes: usize,
}

fn run_schedule(schedule: u64, compares: bool) -> ScheduleResult {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let random = Arc::new(Mutex::new(Rng::with_seed(schedule)));
        let api = UnreliableApi { versions: Arc::default(), random, compares };
        let candidates = ["a", "b"].map(|identity| {
            let options = LeaseOptions {
                namespace: "f".to_owned(),
                name: "f".to_owned(),
                identity: identity.to_owned(),
                timing: LeaseTiming::default(),
            };
            campaign(Client::new(api.clone(), "f"), options)
        });
        let end = Instant::now() + SCHEDULE_DURATION;
        let (mut seen, mut last) = (ScheduleResult::default(), None);
        while Instant::now() < end {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let writers: Vec<usize> =
                (0..2).filter(|index| candidates[*index].0.closed_reason().is_none()).collect();
            seen.both += usize::from(writers.len() == 2);
            if let [writer] = writers[..] {
                seen.changes += usize::from(last.is_some_and(|last| last != writer));
                last = Some(writer);
            }
        }
        seen
    })
}

#[test]
fn two_candidates_never_lead_at_the_same_time() {
    let (mut changes, mut without) = (0, 0);
    for schedule in 0..100 {
        let seen = run_schedule(schedule, true);
        assert_eq!(seen.both, 0, "two leaders in schedule {schedule}");
        changes += seen.changes;
        without += usize::from(run_schedule(schedule, false).both > 0);
    }
    assert!(changes > 10, "leadership changed hands only {changes} times");
    assert!(without > 10, "without comparing versions two leaders arose in only {without} of 100 schedules");
}
