use std::{collections::BTreeSet, sync::Arc};

use farrier_core::plan::{Cell, Plan, PlannedCell, Published, testing};

use super::*;
use crate::{
    details::NodesPage,
    facts::{NodeFact, NodeGroup},
    history::{History, changes},
    matrix::{Filter, Matrix, OPEN},
    rollouts::RolloutsPage,
};

pub(crate) const K47: &str = "6.1.0-47-amd64";
pub(crate) const K48: &str = "6.1.0-48-amd64";

/// Returns the facts of a small fleet of the planner's tests.
pub(crate) fn facts_of(fleet: &testing::Fleet) -> Facts {
    let (snapshot, definitions) = fleet.made_from();
    Facts::of(Arc::new(fleet.plan()), snapshot, definitions, Timestamp::UNIX_EPOCH)
}

fn page_of(facts: &Facts) -> FleetPage {
    let since = BTreeMap::new();
    let fleet = Fleet::new(facts, &since);
    fleet.page(Filter::default(), changes(&fleet, &[]))
}

/// Time at which cells of [`large`] failed. The page is rendered three hours later.
pub(crate) fn morning() -> Timestamp {
    "2026-11-25T09:00:00Z".parse().unwrap()
}

/// A fleet of `kernels` x `images` cells. Of every ten images, one failed with its own error for each kernel,
/// and one is to be built.
pub(crate) fn large(kernels: usize, images: usize, nodes: usize) -> Facts {
    let small = testing::Fleet::new(&[K47]).plan();
    let cell = small.cells[0].outcome.cell().unwrap();
    let mut facts = Facts::default();
    let mut cells = Vec::new();
    for kernel in 0..kernels {
        let target = KernelTarget {
            os: if kernel % 2 == 0 { "debian" } else { "ubuntu" }.parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: format!("6.1.{kernel}-{kernel}-generic").parse().unwrap(),
            arch: cell.target.arch,
        };
        let mut group =
            NodeGroup { target: target.clone(), images: Vec::new(), nodes: Vec::new(), unready: 0 };
        for node in (kernel..nodes).step_by(kernels) {
            let name = format!("node-{node:05}");
            let fact =
                NodeFact { group: Ok(kernel), os_image: String::new(), announces: None, cordoned: false };
            facts.nodes.insert(name.clone(), fact);
            group.nodes.push(name);
        }
        for number in 0..images {
            let image: ImageName = format!("driver-{number}").parse().unwrap();
            group.images.push(image.clone());
            let (image, target) = (image, target.clone());
            let cell = Arc::new(Cell { image: image.clone(), target: target.clone(), ..(**cell).clone() });
            let outcome = match number {
                3 => Outcome::Failed {
                    cell,
                    at: morning(),
                    message: format!(
                        "compile: nv-pci.c:{kernel}:9: too few arguments to function 'pci_resize_resource'"
                    ),
                },
                4 => Outcome::Build {
                    cell,
                    why: farrier_core::plan::BuildReason::NotPublished,
                    may_reuse: false,
                },
                _ => Outcome::UpToDate {
                    published: published(&cell),
                    cell,
                    denied: false,
                    missing_tags: Vec::new(),
                },
            };
            cells.push(PlannedCell {
                image,
                target,
                outcome,
                nodes: nodes / kernels,
                announced_by: Vec::new(),
            });
        }
        facts.groups.push(group);
    }
    facts.plan = Arc::new(Plan { cells, ..Plan::default() });
    facts.served = true;
    facts.now = morning() + jiff::SignedDuration::from_hours(3);
    facts
}

fn published(cell: &Cell) -> Published {
    Published {
        digest: farrier_core::image::Digest::of(cell.input_hash.to_string().as_bytes()),
        input_hash: Some(cell.input_hash),
        declared_hash: None,
        exposed: None,
        verdict: Some(Verdict::Loads),
        kernel_release: None,
        platforms: BTreeMap::new(),
    }
}

#[test]
fn the_matrix_groups_by_distribution_and_lists_the_newest_kernels_first() {
    let facts = large(24, 2, 24);
    let matrix = page_of(&facts).matrix;
    let names: Vec<&str> = matrix.groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!((names.as_slice(), matrix.columns), (&["debian 12, amd64", "ubuntu 12, amd64"][..], 3));
    let kernels: Vec<&str> = matrix.groups[0].rows.iter().map(|row| row.kernel.as_str()).take(3).collect();
    assert_eq!(kernels, ["6.1.22-22-generic", "6.1.20-20-generic", "6.1.18-18-generic"]);
    let row = &matrix.groups[0].rows[0];
    assert_eq!((row.nodes.as_str(), row.cells[0].as_ref().unwrap().note.as_str()), ("1 node", ""));
}

#[test]
fn published_images_are_neither_problems_nor_risks() {
    let mut fleet = testing::Fleet::new(&[K47]);
    fleet.publish(Verdict::Loads);
    let page = page_of(&facts_of(&fleet));
    assert!(page.at_risk.items.is_empty(), "{page:?}");
    assert!(page.problems.items.iter().all(|problem| problem.state == "hold"), "{page:?}");
    let cell = page.matrix.groups[0].rows[0].cells[0].clone().unwrap();
    assert_eq!((cell.state, cell.class), ("published", StateClass::Ok));
}

#[test]
fn a_rewrite_that_failed_is_a_problem() {
    let mut fleet = testing::Fleet::new(&[K47]);
    fleet.publish(Verdict::Loads);
    let mut facts = facts_of(&fleet);
    let target = facts.plan.rollouts[0].target.clone();
    facts.failed_rewrites.insert(target, "denied by a policy".to_owned());
    let page = page_of(&facts);
    let [problem] = page.problems.items.as_slice() else { panic!("{:?}", page.problems) };
    assert_eq!(problem.reason, "the last rewrite failed: denied by a policy");
    assert_eq!((problem.state, problem.class), ("rewrite", StateClass::Bad));
}

#[test]
fn the_page_of_nodes_has_a_limited_length() {
    let facts = large(100, 1, 10_000);
    let since = BTreeMap::new();
    let groups = NodesPage::of(&Fleet::new(&facts, &since), String::new()).groups;
    assert!(groups.iter().all(|group| group.count == "100 nodes"), "{groups:?}");
    let rows: usize = groups.iter().map(|group| group.nodes.items.len()).sum();
    assert_eq!((groups.len(), rows, groups[0].nodes.more), (100, 3900, 61));
}

#[test]
fn a_rewrite_that_keeps_failing_displaces_no_other() {
    let mut fleet = testing::Fleet::new(&[K47]);
    fleet.publish(Verdict::Loads);
    let planned = fleet.plan().rollouts[0].clone();
    assert!(!planned.changes.is_empty());
    let mut history = History::default();
    for attempt in 0..100 {
        let error = (attempt > 0).then(|| "denied by a policy".to_owned());
        let report = farrier_controller::RolloutReport { planned: planned.clone(), error };
        history.record_rewrites(&[report], morning() + jiff::SignedDuration::from_secs(attempt));
    }
    let failed: Vec<Option<&str>> =
        history.rewrites.iter().map(|rewrite| rewrite.failed.as_deref()).collect();
    assert_eq!(failed, [Some("denied by a policy"), None]);
    assert_eq!(history.rewrites[0].at, "2026-11-25T09:01:39Z");
}

#[test]
fn nodes_whose_image_is_not_accepted_are_at_risk() {
    let mut fleet = testing::Fleet::new(&[K47]);
    fleet.publish(Verdict::Unknown);
    let mut facts = facts_of(&fleet);
    assert_eq!(page_of(&facts).at_risk_nodes, 0);
    if let Outcome::UpToDate { denied, .. } = &mut Arc::make_mut(&mut facts.plan).cells[0].outcome {
        *denied = true;
    }
    let page = page_of(&facts);
    let [risk] = page.at_risk.items.as_slice() else { panic!("{:?}", page.at_risk) };
    assert_eq!((page.at_risk_nodes, risk.missing[0].state), (1, "published"));
    assert!(risk.missing[0].why.contains("does not accept"), "{risk:?}");
}

#[test]
fn nodes_that_run_or_announce_a_kernel_without_image_are_at_risk() {
    let mut fleet = testing::Fleet::new(&[K47, K47]);
    fleet.publish(Verdict::Loads);
    fleet.announce(1, K48);
    let page = page_of(&facts_of(&fleet));
    let [risk] = page.at_risk.items.as_slice() else { panic!("{:?}", page.at_risk) };
    assert!(risk.announced && risk.kernel.starts_with(K48), "{risk:?}");
    assert_eq!((risk.count, risk.nodes[0].name.as_str(), risk.more), (1, "n1", 0));
    assert_eq!((risk.missing[0].state, risk.missing[0].class), ("missing", StateClass::Wait));
    let rows: Vec<&str> = page.matrix.groups[0].rows.iter().map(|row| row.nodes.as_str()).collect();
    assert_eq!(rows, ["1 announced", "2 nodes"]);

    fleet.lose();
    let page = page_of(&facts_of(&fleet));
    assert_eq!(page.at_risk.items.iter().map(|risk| risk.announced).collect::<Vec<_>>(), [true, false]);
    assert_eq!(page.at_risk_nodes, 2, "n1 lacks its current and its next image, but is one node");
}

#[test]
fn identical_problems_are_merged_and_lists_are_limited() {
    let mut fleet = testing::Fleet::new(&[K47, K48]);
    fleet.unresolved("404 for driver.tgz");
    let page = page_of(&facts_of(&fleet));
    let problem = &page.problems.items[0];
    assert_eq!((problem.state, problem.class, problem.more), ("skipped", StateClass::Warn, 1));
    assert!(problem.reason.contains("404 for driver.tgz"), "{problem:?}");

    let page = page_of(&large(50, 10, 0));
    assert_eq!((page.problems.items.len(), page.problems.more), (10, 40));
    assert!(
        page.problems.items[0].hint.contains("farrier logs driver-3 --kernel 6.1."),
        "{:?}",
        page.problems.items[0]
    );
    let [change] = page.changed.as_slice() else { panic!("{:?}", page.changed) };
    assert_eq!((change.state, change.ago.as_str(), change.more), ("failed", "3 h", 49));
}

#[test]
fn a_filter_selects_cells_of_the_matrix() {
    let facts = large(4, 10, 4);
    let none = BTreeMap::new();
    let fleet = Fleet::new(&facts, &none);
    let matrix = |image: &str, kernel: &str, state: &str| {
        let [image, kernel, state] = [image, kernel, state].map(str::to_owned);
        fleet.page(Filter { image, kernel, state, os: String::new() }, Vec::new()).matrix
    };
    let count = |matrix: &Matrix| -> usize {
        matrix.groups.iter().flat_map(|group| &group.rows).map(|row| row.cells.iter().flatten().count()).sum()
    };
    let names = |matrix: Matrix| matrix.images.into_iter().map(|column| column.name).collect::<Vec<_>>();
    assert_eq!(names(matrix("", "", "failed")), ["driver-3"]);
    assert_eq!(count(&matrix("", "6.1.2-", "")), 10);
    assert_eq!(count(&matrix("driver-4", "6.1.2-", "missing")), 1);
    assert_eq!(count(&matrix("driver-4", "6.1.2-", "published")), 0);
    assert_eq!(count(&matrix("<script>", "", "")), 0);
    let open = matrix("", "", OPEN);
    assert_eq!(
        (names(open), count(&matrix("", "", OPEN))),
        (vec!["driver-3".to_owned(), "driver-4".to_owned()], 8)
    );
    let os = Filter { os: "ubuntu".to_owned(), ..Filter::default() };
    let groups = fleet.page(os, Vec::new()).matrix.groups;
    assert_eq!((groups.len(), groups[0].name.as_str()), (1, "ubuntu 12, amd64"));
}

#[test]
fn history_records_changes_between_reconciles() {
    let mut fleet = testing::Fleet::new(&[K47]);
    let mut history = History::default();
    let none = BTreeMap::new();
    history.record_phases(&Fleet::new(&facts_of(&fleet), &none));
    assert!(history.changes.is_empty(), "a state that is seen first is no change");
    fleet.publish(Verdict::Loads);
    let facts = facts_of(&fleet);
    history.record_phases(&Fleet::new(&facts, &none));
    history.record_phases(&Fleet::new(&facts, &none));
    let [change] = history.changes.as_slice() else { panic!("{:?}", history.changes) };
    assert_eq!(
        (change.state, change.subject.as_str()),
        ("published", "mft for 6.1.0-47-amd64 (debian 12, amd64)")
    );
    assert_eq!(history.since.len(), 1);
}

#[test]
fn ages_are_relative_to_the_time_of_rendering() {
    let mut facts = large(1, 5, 1);
    let cell = &facts.plan.cells[0];
    let key = (cell.image.clone(), cell.target.clone());
    facts.builds.times.insert(key, morning());
    let (none, later) = (BTreeMap::new(), facts.now + jiff::SignedDuration::from_hours(2));
    let fleet = Fleet::at(&facts, &none, &facts.activity, later);
    let page = fleet.page(Filter::default(), changes(&fleet, &[]));
    let cells = &page.matrix.groups[0].rows[0].cells;
    let ages = [0, 1, 3].map(|index: usize| cells[index].as_ref().unwrap().note.clone());
    assert_eq!(ages, ["5 h", "", "5 h"]);
    assert_eq!(page.changed[0].ago, "5 h");
}

#[test]
fn builds_of_the_last_days_are_bars() {
    let mut facts = large(1, 2, 1);
    let image = facts.plan.cells[0].image.clone();
    let mut days = [0; farrier_builder::DAYS];
    (days[0], days[29]) = (1, 3);
    facts.builds.by_day.insert(image, days);
    let page = page_of(&facts);
    let builds = page.matrix.images[0].builds.as_ref().unwrap();
    let bars: Vec<_> = builds.bars.iter().map(|bar| (bar.x, bar.y, bar.height)).collect();
    assert_eq!((builds.days, builds.sum, bars), (30, 4, vec![(0, 6, 4), (29, 0, 10)]));
    assert_eq!(page.matrix.images[1].builds, None);
}

#[test]
fn a_node_may_not_boot_while_an_image_for_its_next_kernel_has_failed() {
    let mut fleet = testing::Fleet::new(&[K47]);
    fleet.announce(0, K48);
    let mut facts = facts_of(&fleet);
    let mut plan = Plan::clone(&facts.plan);
    let next = plan.cells.iter_mut().find(|cell| cell.target.release.as_str() == K48).unwrap();
    let cell = Arc::clone(next.outcome.cell().unwrap());
    next.outcome = Outcome::Failed { cell, message: "no such header".to_owned(), at: morning() };
    facts.plan = Arc::new(plan);
    let none = BTreeMap::new();
    let may_boot = Fleet::new(&facts, &none).node_page("n0").unwrap().may_boot.unwrap();
    assert_eq!((may_boot.word, may_boot.class), ("no: an image failed", StateClass::Bad));
}

#[test]
fn names_are_in_natural_order() {
    let mut names = ["n325", "n3250", "n4", "n0004", "n", "m9", "n4-b", "n4-a", "3", "\u{e9}2"];
    names.sort_by(|a, b| crate::facts::natural_order(a, b));
    assert_eq!(names, ["3", "m9", "n", "n0004", "n4", "n4-a", "n4-b", "n325", "n3250", "\u{e9}2"]);
}

#[test]
fn ages_are_formatted() {
    let now = Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_hours(1000);
    let since = |seconds| ago(now - jiff::SignedDuration::from_secs(seconds), now);
    assert_eq!(
        [-5, 59, 60, 3600, 47 * 3600, 49 * 3600].map(since),
        ["now", "now", "1 min", "1 h", "47 h", "2 d"]
    );
}

#[test]
fn links_contain_no_untrusted_text() {
    let names = ["../../etc/passwd", "a/b", "a", "A", "CON", "", "\u{202e}txt", &"x".repeat(5000)];
    let links: BTreeSet<String> = names.iter().map(|name| node_link(name).link).collect();
    assert_eq!(links.len(), names.len());
    let is_safe = |link: &String| {
        let digits = link.strip_prefix("n/").and_then(|rest| rest.strip_suffix(".html")).unwrap();
        digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    assert!(links.iter().all(is_safe), "{links:?}");
}

#[test]
fn a_node_page_shows_its_kernels_and_images() {
    let mut fleet = testing::Fleet::new(&[K47, K47]);
    fleet.publish(Verdict::Loads);
    fleet.announce(1, K48);
    let facts = facts_of(&fleet);
    let none = BTreeMap::new();
    let fleet = Fleet::new(&facts, &none);
    let page = fleet.node_page("n1").unwrap();
    let shown_facts: Vec<String> =
        page.facts.iter().map(|fact| format!("{}: {}", fact.name, fact.value)).collect();
    assert!(shown_facts.contains(&"Announces: 6.1.0-48-amd64".to_owned()), "{shown_facts:?}");
    assert_eq!(page.may_boot.unwrap().why, "mft: it is not built yet");
    assert_eq!(page.images.iter().map(|image| image.state).collect::<Vec<_>>(), ["published", "missing"]);
    let may_boot = fleet.node_page("n1").unwrap().may_boot.unwrap();
    assert_eq!((may_boot.word, may_boot.class), ("wait", StateClass::Wait), "same as the matrix");
    assert!(fleet.node_page("n0").unwrap().may_boot.is_none());
    let next = fleet.entries.iter().find(|entry| entry.target.release.as_str() == K48).unwrap();
    let waiting = fleet.cell_page(next, crate::image::CellData::default()).nodes;
    assert_eq!(waiting.items.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["n1"]);
    assert!(fleet.node_page("else").is_none());
    let nodes = |name: &str| NodesPage::of(&fleet, name.to_owned()).groups;
    assert_eq!((nodes("").len(), nodes("")[0].count.as_str()), (1, "2 nodes"));
    let found = &nodes("n1")[0];
    assert_eq!((found.images[0].state, found.nodes.items.len()), ("published", 1));
    let row = &found.nodes.items[0];
    assert_eq!((row.next.as_str(), row.may_boot.as_ref().unwrap().word), (K48, "wait"));
    assert!(nodes("n7").is_empty());
    let rollouts = RolloutsPage::of(&facts, &BTreeMap::new(), &[]).rollouts;
    assert_eq!(
        (rollouts.len(), rollouts[0].subject.starts_with("mft: DaemonSet kube-system/mft")),
        (1, true)
    );
}
