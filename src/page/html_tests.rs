use std::{collections::BTreeMap, sync::Arc};

use super::*;
use crate::{
    page::{
        facts::Names,
        fleet::tests::{K47, K48, facts_of, large},
        log::{Excerpt, Line, Log},
        report::{Finding, Module, Report},
    },
    plan::{FieldRecord, Outcome, Plan, Record, testing},
};

/// What a page must not hold: a tag, a control character, a mark that turns the direction of text.
const HOSTILE: &str = "\"'><script>alert(1)</script>\u{1b}[2J\u{202e}gnp\u{0}";

fn whole(facts: &Facts) -> String {
    fleet_page(&Fleet::new(facts, &BTreeMap::new()), Filter::default(), &[]).unwrap()
}

#[test]
fn the_first_view_of_a_thousand_cells_is_small_and_nodes_add_nothing() {
    let bytes = |nodes| whole(&large(100, 10, nodes)).len();
    let (few, many) = (bytes(100), bytes(10_000));
    assert!(few <= 100_000, "{few} bytes");
    // Digits of counts, and names of five nodes for each of the kernels that are listed.
    assert!(many <= few + 10_000 && many <= 110_000, "{many} bytes, with few nodes {few}");
}

#[test]
fn nothing_from_outside_is_taken_for_a_tag_or_steers_the_reader() {
    let mut fleet = testing::Fleet::new(&[K47, K47]);
    fleet.announce(1, K48);
    for index in [0, 1] {
        let node = fleet.node(index);
        (node.name, node.os_image) = (format!("{HOSTILE}{index}"), HOSTILE.to_owned());
    }
    let mut facts = facts_of(&fleet);
    let hold = |mut planned: crate::plan::PlannedCell| {
        let Some(cell) = planned.outcome.cell().cloned() else { return planned };
        planned.outcome = Outcome::HeldBack { cell, at: facts.now, message: HOSTILE.to_owned() };
        planned
    };
    let plan = Plan::clone(&facts.plan);
    facts.plan = Arc::new(Plan { cells: plan.cells.into_iter().map(hold).collect(), ..plan });
    let record = FieldRecord {
        set: HOSTILE.into(),
        replaced: serde_json::json!({HOSTILE: HOSTILE}),
        at: facts.now,
        state: crate::plan::RecordState::Failed,
        changed_back: 1,
        why: Some(HOSTILE.to_owned()),
    };
    let record = Record([(HOSTILE.to_owned(), record)].into());
    facts.records.insert("DaemonSet kube-system/mft".to_owned(), Ok(record));
    facts.configuration_error = Some(HOSTILE.to_owned());
    facts.aside.insert(HOSTILE.to_owned(), Names::of([&HOSTILE.to_owned()]));
    for rollout in &facts.plan.rollouts {
        facts.failed_rewrites.insert(rollout.target.clone(), HOSTILE.to_owned());
    }
    let none = BTreeMap::new();
    let fleet = Fleet::new(&facts, &none);
    let finding = Finding { message: HOSTILE.to_owned(), remedy: HOSTILE.to_owned(), ..Finding::default() };
    let module =
        Module { name: HOSTILE.to_owned(), verdict: HOSTILE.to_owned(), findings: vec![finding.clone()] };
    let report =
        Report { verdict: HOSTILE.to_owned(), findings: vec![finding], modules: vec![module], boot: None };
    let line = Line { number: 1, text: HOSTILE.to_owned(), is_error: true };
    let excerpt = Excerpt { error: Some(HOSTILE.to_owned()), lines: vec![line] };
    let found =
        Found { log: Some(Log { path: "log".into(), excerpt: Some(excerpt) }), report: Some(Ok(report)) };
    let filter = Filter { image: HOSTILE.to_owned(), kernel: HOSTILE.to_owned(), state: HOSTILE.to_owned() };
    let pages = [
        whole(&facts),
        fleet_page(&fleet, filter, &[]).unwrap(),
        cell_page(&fleet, &fleet.entries[0], found).unwrap(),
        cell_page(&fleet, &fleet.entries[0], Found { log: None, report: Some(Err(HOSTILE.to_owned())) })
            .unwrap(),
        node_page(&fleet, &format!("{HOSTILE}1")).unwrap().unwrap(),
        nodes_page(&facts).unwrap(),
        rollouts_page(&facts).unwrap(),
    ];
    for page in pages {
        assert!(
            page.contains("&gt;&lt;script&gt;alert(1)&lt;/script&gt;\u{fffd}[2J\u{fffd}gnp\u{fffd}"),
            "{page}"
        );
        assert!(!page.contains("<script") && !page.contains(['\u{1b}', '\u{202e}', '\u{0}']), "{page}");
    }
}

#[test]
fn a_cell_shows_the_error_its_report_and_its_inputs() {
    let facts = facts_of(&testing::Fleet::new(&[K47]));
    let none = BTreeMap::new();
    let fleet = Fleet::new(&facts, &none);
    let line = |number, text: &str, is_error| Line { number, text: text.to_owned(), is_error };
    let lines = vec![line(6, "  CC [M]  a.o", false), line(7, "a.c:1:2: error: bad", true)];
    let excerpt = Excerpt { error: Some("a.c:1:2: bad".to_owned()), lines };
    let module = Module { name: "mft".to_owned(), verdict: "loads".to_owned(), findings: Vec::new() };
    let report = Report { verdict: "loads".to_owned(), modules: vec![module], ..Report::default() };
    let found =
        Found { log: Some(Log { path: "log".into(), excerpt: Some(excerpt) }), report: Some(Ok(report)) };
    let page = cell_page(&fleet, &fleet.entries[0], found).unwrap();
    insta::assert_snapshot!(page);
}

#[test]
fn the_first_view() {
    insta::assert_snapshot!(whole(&large(4, 6, 12)));
}

#[test]
fn pages_are_for_screen_readers_and_keyboards() {
    let page = whole(&large(2, 5, 4));
    for wanted in [
        "<html lang=\"en\">",
        "<a class=\"skip\" href=\"#main\">",
        "<main id=\"main\"",
        "<nav aria-label=\"Pages\">",
        "role=\"region\" aria-labelledby=\"matrix\" tabindex=\"0\"",
        "<th scope=\"col\">driver-1",
        "<th scope=\"row\">6.1.0-0-generic",
        "<th scope=\"rowgroup\"",
        "<label>Image <input name=\"image\"",
    ] {
        assert!(page.contains(wanted), "{wanted} is not in {page}");
    }
    assert!(!page.contains("http:") && !page.contains("https:") && !SCRIPT.contains("http"), "{page}");
    assert_eq!(page.matches("<script src=\"page.js\"").count(), page.matches("<script").count(), "{page}");
    assert!(!STYLE.contains("url(") && !STYLE.contains("@import"), "the style asks no other host");
}
