use std::time::Duration;

use farrier_builder::testing::{Bench, K9, K10, K11};
use farrier_core::{image::FieldHasher, plan::Budget};

use super::*;

async fn cells() -> [Arc<Cell>; 3] {
    let bench = Bench::new(&serde_json::json!({}));
    [bench.cell(K9).await, bench.cell(K10).await, bench.cell(K11).await].map(Arc::new)
}

/// Limits of a machine with two processors.
fn limits(at_once: usize) -> BuildLimits {
    let (cpus, memory) = ("2".parse().unwrap(), "4Gi".parse().unwrap());
    BuildLimits { at_once, budget: Budget { cpus, memory } }
}

fn small(cells: impl IntoIterator<Item = Arc<Cell>>) -> Vec<(Arc<Cell>, BuildSpec)> {
    cells.into_iter().map(|cell| (cell, BuildSpec::default())).collect()
}

fn changed(cell: &Cell) -> Arc<Cell> {
    let mut hasher = FieldHasher::new("other");
    hasher.add("x", "y");
    Arc::new(Cell { input_hash: hasher.finish(), ..cell.clone() })
}

#[tokio::test]
async fn builds_run_once_per_cell_within_the_concurrency_limit() {
    let cells = cells().await;
    let now = Instant::now();
    let mut queue = Queue::new(limits(2));
    queue.update(small(cells.iter().cloned()));
    // In the plan's order, regardless of the names.
    assert_eq!(queue.start(now).as_ref(), Some(&cells[0]));
    assert_eq!(queue.start(now).as_ref(), Some(&cells[1]));
    assert_eq!(queue.start(now), None);
    queue.update(small(cells.iter().cloned()));
    assert_eq!(queue.start(now), None, "asked for again, but already running");
    queue.record_end(&key_of(&cells[0]), BuildDisposition::Settled, now, 0.0);
    assert_eq!(queue.start(now).as_ref(), Some(&cells[2]));
    assert_eq!((queue.running(), queue.waiting()), (2, 0));
}

#[tokio::test]
async fn unwanted_builds_are_dropped_unless_they_run() {
    let cells = cells().await;
    let now = Instant::now();
    let mut queue = Queue::new(limits(1));
    queue.update(small(cells.iter().cloned()));
    queue.start(now);
    queue.update(small([Arc::clone(&cells[2])]));
    assert_eq!((queue.running(), queue.waiting()), (1, 1));
    assert!(!queue.contains(&key_of(&cells[1])));
    queue.record_end(&key_of(&cells[0]), BuildDisposition::Settled, now, 0.0);
    assert_eq!(queue.start(now).as_ref(), Some(&cells[2]));
}

#[tokio::test]
async fn transient_faults_back_off_and_new_inputs_do_not() {
    let [cell, ..] = cells().await;
    let key = key_of(&cell);
    let mut now = Instant::now();
    let mut queue = Queue::new(limits(1));
    for expected in [10, 20, 40] {
        queue.update(small([Arc::clone(&cell)]));
        assert!(queue.start(now).is_some());
        let wait = queue.record_end(&key, BuildDisposition::Transient, now, 0.0);
        assert_eq!(wait, Some(Duration::from_secs(expected)));
        assert_eq!(queue.start(now + Duration::from_secs(expected - 1)), None);
        assert_eq!(queue.next_due(now), Some(now + Duration::from_secs(expected)));
        now += Duration::from_secs(expected);
    }
    queue.start(now);
    queue.record_end(&key, BuildDisposition::Transient, now, 0.0);
    let other = changed(&cell);
    assert_eq!(queue.update(small([Arc::clone(&other)])), std::slice::from_ref(&key));
    assert_eq!(queue.start(now).as_ref(), Some(&other));

    // The inputs change while the build runs. The build keeps its inputs, and the next plan asks for the new ones.
    queue.update(small([Arc::clone(&cell)]));
    assert_eq!(queue.start(now), None);
    queue.record_end(&key, BuildDisposition::Settled, now, 0.0);
    queue.update(small([Arc::clone(&cell)]));
    assert_eq!(queue.start(now).as_ref(), Some(&cell));
}

#[tokio::test]
async fn a_stopped_build_is_queued_again_at_once() {
    let [cell, ..] = cells().await;
    let now = Instant::now();
    let mut queue = Queue::new(limits(1));
    queue.update(small([Arc::clone(&cell)]));
    queue.start(now);
    assert_eq!(queue.record_end(&key_of(&cell), BuildDisposition::Stopped, now, 0.0), None);
    assert_eq!(queue.queued().collect::<Vec<_>>(), [&key_of(&cell)]);
    assert!(queue.start(now).is_some());
}

#[tokio::test]
async fn builds_start_in_order_within_the_resource_budget() {
    let cells = cells().await;
    let now = Instant::now();
    let mut queue = Queue::new(limits(8));
    let mut wanted = small(cells.iter().cloned());
    wanted[1].1.cpus = "1500m".parse().unwrap();
    queue.update(wanted);
    assert_eq!(queue.start(now).as_ref(), Some(&cells[0]));
    assert_eq!(
        queue.start(now),
        None,
        "the second is too large to run with the first, and the third waits behind it"
    );
    assert_eq!(queue.next_due(now), None, "a build that waits for capacity has no due time");
    queue.record_end(&key_of(&cells[0]), BuildDisposition::Settled, now, 0.0);
    assert_eq!(queue.start(now).as_ref(), Some(&cells[1]));
    assert_eq!(queue.start(now), None);
    queue.record_end(&key_of(&cells[1]), BuildDisposition::Settled, now, 0.0);
    assert_eq!(queue.start(now).as_ref(), Some(&cells[2]));
}

#[tokio::test]
async fn a_single_run_builds_each_cell_once() {
    let [cell, other, ..] = cells().await;
    let now = Instant::now();
    let mut queue = Queue::once(limits(1));
    queue.update(small([Arc::clone(&cell)]));
    assert!(queue.start(now).is_some());
    assert_eq!(queue.record_end(&key_of(&cell), BuildDisposition::Transient, now, 0.0), None);
    queue.update(small([cell, Arc::clone(&other)]));
    assert_eq!(queue.start(now), Some(other));
    assert_eq!((queue.running(), queue.waiting()), (1, 0));
}

#[tokio::test]
async fn builds_that_killed_farrier_are_delayed() {
    let [cell, other, ..] = cells().await;
    let now = Instant::now();
    let mut queue = Queue::new(limits(2));
    queue.update(small([Arc::clone(&cell), Arc::clone(&other)]));
    let attempts = [(cell.input_hash, 3)].into();
    let (key, wait) = (key_of(&cell), Duration::from_secs(40));
    assert_eq!(queue.delay_killed(&attempts, now, 0.0), [(key.clone(), 3, wait)]);
    assert_eq!(queue.delay_killed(&attempts, now, 0.0), [], "only once");
    assert_eq!(queue.start(now).as_ref(), Some(&other));
    assert_eq!((queue.start(now), queue.next_due(now)), (None, Some(now + wait)));
    assert_eq!(queue.start(now + wait).as_ref(), Some(&cell));
    assert_eq!(queue.delay_killed(&attempts, now, 0.0), [], "already running");
    assert_eq!(
        queue.record_end(&key, BuildDisposition::Transient, now, 0.0),
        Some(2 * wait),
        "earlier attempts count toward the backoff"
    );
}
