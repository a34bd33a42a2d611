use std::{collections::BTreeMap, sync::Arc, time::Duration};

use farrier_core::plan::{
    BuildActivity, Earlier, FieldRecord, Outcome, Phase, Plan, PlannedNodeUpgrade, PlannedUpgrade,
    RecordState, RewriteRecord, RolloutDecision, Stage, UpgradeForecast, UpgradeNote, UpgradeStage,
    UpgradeState, UpgradeWait, testing, with_short_digests,
};
use farrier_store::SignatureStatus;
use jiff::{SignedDuration, Timestamp};
use kmod::Verdict;

use super::*;
use crate::{
    action::{Action, ActionLink},
    facts::NameList,
    fleet::{
        Listed, cell_link, node_link,
        tests::{K47, K48, facts_of, large},
    },
    image::{Dependency, Image, ProvenanceSummary},
    log::{Excerpt, Line, Log},
    materials::{ComparedImage, Component},
    matrix::OPEN,
};

/// Untrusted text that no page may contain unescaped: a tag, control characters, a mark that reverses the
/// text direction.
const HOSTILE: &str = "\"'><script>alert(1)</script>\u{1b}[2J\u{202e}gnp\u{0}";

fn render_fleet(facts: &Facts) -> String {
    fleet_page(&Fleet::new(facts, &BTreeMap::new()), Filter::default(), &[]).unwrap()
}

#[test]
fn the_index_page_of_a_large_fleet_is_small() {
    let bytes = |nodes| render_fleet(&large(100, 10, nodes)).len();
    let (few, many) = (bytes(100), bytes(10_000));
    assert!(few <= 100_000, "{few} bytes");
    // The difference is for digits of counts, and for the names of five nodes of each listed kernel.
    assert!(many <= few + 10_000 && many <= 110_000, "{many} bytes, with few nodes {few}");
}

/// An upgrade in which half of the nodes are done. `untrusted` is untrusted text; if it is hostile, the last node
/// has failed.
fn upgrade(untrusted: &str, nodes: &[String], now: Timestamp) -> PlannedUpgrade {
    let node_upgrade = |(number, node): (usize, &String)| {
        let (stage, noted, waits) = match nodes.len() - number {
            1 if untrusted == HOSTILE => (UpgradeStage::Failed, Some(UpgradeState::Failed), None),
            1 | 2 => (UpgradeStage::UnderWay, Some(UpgradeState::DriverRestarted), Some(UpgradeWait::Driver)),
            left if left > nodes.len() / 2 => (UpgradeStage::Done, Some(UpgradeState::Uncordoned), None),
            _ => (UpgradeStage::Waits, None, Some(UpgradeWait::Canary)),
        };
        let note = noted.map(|state| UpgradeNote {
            by: String::new(),
            rollout: untrusted.to_owned(),
            state,
            since: now,
            began: now,
            to: untrusted.to_owned(),
            cordoned: false,
            unchecked: false,
            why: (stage == UpgradeStage::Failed).then(|| untrusted.to_owned()),
            others: Vec::new(),
        });
        PlannedNodeUpgrade {
            node: node.clone(),
            to: untrusted.to_owned(),
            stage,
            note,
            waits,
            changes: Vec::new(),
        }
    };
    let mut nodes: Vec<PlannedNodeUpgrade> = nodes.iter().enumerate().map(node_upgrade).collect();
    nodes.sort_by(|a, b| (a.stage, &a.node).cmp(&(b.stage, &b.node)));
    let count = |stage| nodes.iter().filter(|node_upgrade| node_upgrade.stage == stage).count();
    let forecast = UpgradeForecast {
        done: count(UpgradeStage::Done),
        in_progress: count(UpgradeStage::UnderWay),
        waiting: count(UpgradeStage::Waits),
        skipped: 0,
        failed: count(UpgradeStage::Failed),
        seconds_per_node: Some(74),
        ends: Some(now + SignedDuration::from_mins(40)),
    };
    PlannedUpgrade { rollout: untrusted.to_owned(), nodes, forecast }
}

fn provenance(untrusted: &str) -> ProvenanceSummary {
    let input = Dependency {
        role: "source".to_owned(),
        name: untrusted.to_owned(),
        uri: format!("pkg:generic/{untrusted}"),
        digest: "0123456789abcdef".repeat(4),
    };
    ProvenanceSummary {
        summary: format!("SLSA v1: {untrusted}"),
        builder: untrusted.to_owned(),
        kind: untrusted.to_owned(),
        inputs: Listed::of(vec![input], 1),
    }
}

/// All pages of a fleet whose untrusted texts are all hostile, by path.
fn hostile_pages() -> Vec<(String, String)> {
    let mut fleet = testing::Fleet::new(&[K47, K47]);
    fleet.announce(1, K48);
    for index in [0, 1] {
        let node = fleet.node(index);
        (node.name, node.os_image) = (format!("{HOSTILE}{index}"), HOSTILE.to_owned());
    }
    fleet.node(1).os_image = "W".repeat(500);
    let mut facts = facts_of(&fleet);
    let hold = |mut planned: farrier_core::plan::PlannedCell| {
        let Some(cell) = planned.outcome.cell().cloned() else { return planned };
        planned.outcome = Outcome::Failed { cell, at: facts.now, message: HOSTILE.to_owned() };
        planned
    };
    let mut plan = Plan::clone(&facts.plan);
    let hostile = [format!("{HOSTILE}1")];
    plan.rollouts[0].upgrade = Some(upgrade(HOSTILE, &hostile, facts.now));
    facts.plan = Arc::new(Plan { cells: plan.cells.into_iter().map(hold).collect(), ..plan });
    let record = FieldRecord {
        set: HOSTILE.into(),
        replaced: serde_json::json!({HOSTILE: HOSTILE}),
        at: facts.now,
        state: RecordState::Failed,
        changed_back: 1,
        why: Some(HOSTILE.to_owned()),
        by: String::new(),
        earlier: vec![Earlier {
            set: HOSTILE.to_owned(),
            replaced: HOSTILE.to_owned(),
            at: facts.now,
            state: RecordState::Conflict,
            why: Some(HOSTILE.to_owned()),
        }],
    };
    let record = RewriteRecord([(HOSTILE.to_owned(), record)].into());
    facts.records.insert("DaemonSet kube-system/mft".to_owned(), Ok(record));
    facts.configuration_error = Some(HOSTILE.to_owned());
    facts.excluded.insert((HOSTILE.to_owned(), HOSTILE.to_owned()), NameList::of([&HOSTILE.to_owned()]));
    for rollout in &facts.plan.rollouts {
        facts.failed_rewrites.insert(rollout.target.clone(), HOSTILE.to_owned());
    }
    let none = BTreeMap::new();
    let fleet = Fleet::new(&facts, &none);
    let finding =
        json!({"rule": HOSTILE, "verdict": HOSTILE, "message": HOSTILE, "found": HOSTILE, "remedy": HOSTILE});
    let module = json!({"name": HOSTILE, "verdict": HOSTILE, "findings": [finding], "outcome": HOSTILE, "messages": [HOSTILE, {}]});
    let boot = json!({"kernel": HOSTILE, "modules": [module]});
    let report = json!({"verdict": HOSTILE, "findings": [finding], "modules": [module], "boot": boot});
    let line = Line { number: 1, text: HOSTILE.to_owned(), is_error: true };
    let excerpt = Excerpt { error: Some(HOSTILE.to_owned()), lines: vec![line] };
    let part = |version: &str| Component {
        role: HOSTILE.to_owned(),
        name: HOSTILE.to_owned(),
        version: version.to_owned(),
        digest: "W".repeat(200),
    };
    let image = Image {
        size: u64::MAX,
        signature: Some(SignatureStatus::Refused(HOSTILE.to_owned())),
        report: Some(report),
        components: Some(vec![part("1")]),
        provenance: Some(provenance(HOSTILE)),
    };
    let previous = Image { components: Some(vec![part("2")]), ..Image::default() };
    let reference = facts.plan.cells[0].outcome.cell().unwrap().reference.clone();
    let previous_image = Some((ComparedImage { image: reference, cell: None }, Ok(Arc::new(previous))));
    let log = Some(Log { path: "log".into(), excerpt: Some(excerpt), is_of_previous_attempt: true });
    let cells: Vec<String> = fleet.entries.iter().map(|entry| cell_link(entry.image, entry.target)).collect();
    let offers =
        |of: &str| ActionLinks::from([(of.to_owned(), vec![ActionLink::of(Action::Retry, HOSTILE)])]);
    let (image, cell_actions) = (Some(Ok(Arc::new(image))), offers(&cells[0]));
    let usual = Some(Duration::from_secs(74));
    let found = CellData { log, image, previous_image, usual, actions: cell_actions };
    let target = facts.plan.rollouts[0].target.clone();
    let rewrite = Rewrite {
        target,
        at: HOSTILE.to_owned(),
        what: HOSTILE.to_owned(),
        failed: Some(HOSTILE.to_owned()),
    };
    let fault = CellData { image: Some(Err(HOSTILE.to_owned())), ..CellData::default() };
    let [image_part, kernel, os, state] = [HOSTILE; 4].map(str::to_owned);
    let filter = Filter { image: image_part, kernel, os, state };
    let preview = Preview {
        action: Action::Restore,
        subject: HOSTILE.to_owned(),
        title: HOSTILE.to_owned(),
        effects: vec![HOSTILE.to_owned(), "W".repeat(500)],
        effects_digest: "0123456789abcdef".to_owned(),
        back: "rollouts.html".to_owned(),
    };
    let named = format!("{HOSTILE}1");
    vec![
        ("index.html".to_owned(), render_fleet(&facts)),
        ("filtered.html".to_owned(), fleet_page(&fleet, filter, &[]).unwrap()),
        (cells[0].clone(), cell_page(&fleet, &fleet.entries[0], found).unwrap()),
        (cells[1].clone(), cell_page(&fleet, &fleet.entries[1], fault).unwrap()),
        (node_link(&named).link, node_page(&fleet, &named).unwrap().unwrap()),
        ("nodes.html".to_owned(), nodes_page(&fleet, String::new()).unwrap()),
        ("found.html".to_owned(), nodes_page(&fleet, HOSTILE.to_owned()).unwrap()),
        ("rollouts.html".to_owned(), rollouts_page(&facts, &offers("kube-system/mft"), &[rewrite]).unwrap()),
        ("confirm.html".to_owned(), confirm_page(&facts, &preview).unwrap()),
    ]
}

/// Pages of 5,000 nodes under an upgrade, while another image is built. A directory of manifests cannot show
/// these states.
fn upgrade_pages() -> Vec<(String, String)> {
    let mut fleet = testing::Fleet::new(&vec![K47; 5000]);
    fleet.publish(Verdict::Loads);
    fleet.announce(0, K48);
    fleet.node(999).os_image = "Debian GNU/Linux 12 (bookworm)".to_owned();
    let now: Timestamp = "2026-11-25T12:00:00Z".parse().unwrap();
    let mut facts = Facts { now, ..facts_of(&fleet) };
    let mut plan = Plan::clone(&facts.plan);
    let image = |digit: &str| format!("registry.example/drivers/mft@sha256:{}", digit.repeat(64));
    let (target, nodes) = (plan.rollouts[0].target.clone(), facts.nodes.keys().cloned().collect::<Vec<_>>());
    plan.rollouts[0].decision = RolloutDecision::AlreadySet { image: image("a").parse().unwrap() };
    let mut upgrade = upgrade("kube-system/mft", &nodes, now);
    upgrade.nodes.iter_mut().for_each(|node_upgrade| node_upgrade.to = image("a"));
    plan.rollouts[0].upgrade = Some(upgrade);
    let earlier = Earlier {
        set: with_short_digests(&image("b")),
        replaced: String::new(),
        at: now - SignedDuration::from_hours(50),
        state: RecordState::Failed,
        why: Some("on node n17: driver: CrashLoopBackOff: no such device".to_owned()),
    };
    let record = FieldRecord {
        set: image("a").into(),
        replaced: image("c").into(),
        at: now - SignedDuration::from_hours(2),
        state: RecordState::Set,
        changed_back: 0,
        why: None,
        by: String::new(),
        earlier: vec![earlier],
    };
    facts.records =
        [("DaemonSet kube-system/mft".to_owned(), Ok(RewriteRecord([("driver".to_owned(), record)].into())))]
            .into();
    let building = plan.cells.iter().find(|cell| cell.target.release.as_str() == K48).unwrap();
    let key = (building.image.clone(), building.target.clone());
    let began = Some(now - SignedDuration::from_secs(61));
    let (stage, usual) = (Some(Stage::Compile), Some(Duration::from_mins(4)));
    facts
        .activity
        .insert(key, BuildActivity { stage, since: began, began, usual, ..BuildActivity::default() });
    (facts.plan, facts.served) = (Arc::new(plan), true);
    let none = BTreeMap::new();
    let fleet = Fleet::new(&facts, &none);
    let entry = fleet.entries.iter().find(|entry| entry.row.phase == Phase::Building).unwrap();
    let line = |number: usize| Line {
        number: 210 + number,
        text: format!("  CC [M]  /build/mft/mst_{number}.o"),
        is_error: false,
    };
    let excerpt = Some(Excerpt { error: None, lines: (0..10).map(line).collect() });
    let found = CellData {
        log: Some(Log { path: "log".into(), excerpt, is_of_previous_attempt: false }),
        ..CellData::default()
    };
    let object = "kube-system/mft";
    let actions = [Action::Pause, Action::Restore].map(|action| ActionLink::of(action, object));
    let offers = ActionLinks::from([(object.to_owned(), actions.to_vec())]);
    let preview = Preview {
        action: Action::Restore,
        subject: object.to_owned(),
        title: format!("restored: {object}"),
        effects: vec![
            format!("DaemonSet {object}, driver: restored: {} -> {}", image("a"), image("c")),
            "farrier leaves the object unchanged until another image is planned, or until the object is resumed.".to_owned(),
        ],
        effects_digest: "0123456789abcdef".to_owned(),
        back: "rollouts.html".to_owned(),
    };
    let what = format!("rewrite: {} -> {}", image("c"), image("a"));
    let rewrite = Rewrite { target, at: "2026-11-25T10:00:00Z".to_owned(), what, failed: None };
    vec![
        ("index.html".to_owned(), render_fleet(&facts)),
        (cell_link(entry.image, entry.target), cell_page(&fleet, entry, found).unwrap()),
        (node_link("n999").link, node_page(&fleet, "n999").unwrap().unwrap()),
        ("nodes.html".to_owned(), nodes_page(&fleet, String::new()).unwrap()),
        ("rollouts.html".to_owned(), rollouts_page(&facts, &offers, &[rewrite]).unwrap()),
        ("confirm.html".to_owned(), confirm_page(&facts, &preview).unwrap()),
    ]
}

#[test]
fn pages_show_an_upgrade_of_many_nodes() {
    let pages = upgrade_pages();
    let assert_contains = |page: usize, wanted: &[&str]| {
        let text = &pages[page].1;
        for wanted in wanted {
            assert!(text.contains(wanted), "{wanted} is not in {text}");
        }
    };
    assert_contains(0, &["<i>61 s of usually 4 min</i>", " data-live>"]);
    assert_contains(
        1,
        &[
            "<progress max=\"240\" value=\"61\"",
            "</progress> 61 s of usually 4 min",
            " data-live>",
            "The end of the log",
            "<dt>Since<dd><time datetime=\"2026-11-25T11:58:59Z\" title=\"2026-11-25T11:58:59Z\">11:58 UTC</time> (1 min)",
        ],
    );
    assert_contains(
        2,
        &[
            "<dt>Upgrade<dd>kube-system/mft: under-way: waits for its new driver to be ready",
            "<dt>Operating system<dd>Debian GNU/Linux 12 (bookworm)",
        ],
    );
    assert_contains(
        4,
        &[
            "<dt>Time left<dd>about 40 min, until <time datetime=\"2026-11-25T12:40:00Z\"",
            "<rect class=\"ok\" x=\"0\" width=\"2500\"",
            "<b class=\"tag wait\">2498 to come</b>",
            "and 4800 more",
            "title=\"2026-11-23T10:00:00Z\">23 Nov 10:00 UTC</time>",
            "<abbr title=\"aaaaaaaa",
            "CrashLoopBackOff: no such device",
        ],
    );
    let path = |node: &str| pages[4].1.find(&format!(">{node}</a>")).unwrap();
    assert!(path("n998") < path("n4") && path("n9") < path("n33"), "by stage and number");
    assert!(pages[0].1.len() < 100_000 && pages[4].1.len() < 100_000, "nodes are counted instead of listed");
}

#[test]
fn digests_and_times_are_abbreviated() {
    let now = "2026-11-25T12:00:00Z".parse().unwrap();
    let digest = "0123456789abcdef".repeat(4);
    assert_eq!(
        abbreviate(&format!("<x>@sha256:{digest}"), now),
        format!("&lt;x&gt;@sha256:<abbr title=\"{digest}\">0123456789ab…</abbr>")
    );
    for render_fleet in
        [format!("{digest}0"), "0123456789abcdef".to_owned(), "2026-11-25T12:00:00.5Z".to_owned()]
    {
        assert_eq!(abbreviate(&render_fleet, now), render_fleet);
    }
    for (at, shown) in [
        ("2026-11-25T09:59:59Z", "09:59 UTC"),
        ("2026-11-26T00:01:00Z", "26 Nov 00:01 UTC"),
        ("1970-01-01T00:00:00Z", "1 Jan 1970"),
    ] {
        let wanted = format!("since <time datetime=\"{at}\" title=\"{at}\">{shown}</time>");
        assert_eq!(abbreviate(&format!("since {at}"), now), wanted);
    }
    assert_eq!(abbreviate("2026-99-99T00:00:00Z", now).matches("<time").count(), 0);
}

#[test]
fn untrusted_text_is_escaped() {
    for (_, page) in hostile_pages() {
        assert!(
            page.contains("&gt;&lt;script&gt;alert(1)&lt;/script&gt;\u{fffd}[2J\u{fffd}gnp\u{fffd}"),
            "{page}"
        );
        assert!(!page.contains("<script") && !page.contains(['\u{1b}', '\u{202e}', '\u{0}']), "{page}");
    }
}

/// `ci/page` sets the directory and inspects the written files.
#[test]
fn pages_for_a_browser_are_written_as_files() {
    let own = tempfile::tempdir().unwrap();
    let directory = std::env::var_os("FARRIER_PAGES").map_or_else(|| own.path().to_owned(), Into::into);
    let mut large = Facts { served: false, ..large(100, 10, 10_000) };
    for (path, cell) in large.plan.cells.iter().enumerate() {
        let age = SignedDuration::from_hours(i64::try_from(path).unwrap());
        large.builds.times.insert((cell.image.clone(), cell.target.clone()), large.now - age);
    }
    let pages = hostile_pages().into_iter().map(|(path, page)| (format!("hostile/{path}"), page));
    let upgrade_pages = upgrade_pages().into_iter().map(|(path, page)| (format!("story/{path}"), page));
    let open = Filter { state: OPEN.to_owned(), ..Filter::default() };
    let open = fleet_page(&Fleet::new(&large, &BTreeMap::new()), open, &[]).unwrap();
    let large =
        [("large/index.html".to_owned(), render_fleet(&large)), ("large/state-open.html".to_owned(), open)];
    let pages: Vec<(String, String)> = pages.chain(upgrade_pages).chain(large).collect();
    for (path, text) in &pages {
        let file = directory.join(path);
        fs_err::create_dir_all(file.parent().unwrap()).unwrap();
        fs_err::write(file, text).unwrap();
    }
    for set in ["hostile", "large", "story"] {
        fs_err::write(directory.join(set).join("style.css"), STYLE).unwrap();
        fs_err::write(directory.join(set).join("icon.svg"), ICON).unwrap();
    }
    let read = |path: &str| fs_err::read_to_string(directory.join(path)).unwrap();
    assert!(pages.iter().all(|(path, text)| read(path) == *text));
    assert_eq!(read("large/index.html").matches("<td class=").count(), 1000);
    assert_eq!(read("large/state-open.html").matches("<td class=").count(), 200);
}

#[test]
fn a_cell_page_shows_error_report_and_inputs() {
    let facts = facts_of(&testing::Fleet::new(&[K47]));
    let none = BTreeMap::new();
    let fleet = Fleet::new(&facts, &none);
    let line = |number, text: &str, is_error| Line { number, text: text.to_owned(), is_error };
    let lines = vec![line(6, "  CC [M]  a.o", false), line(7, "a.c:1:2: error: bad", true)];
    let excerpt = Excerpt { error: Some("a.c:1:2: bad".to_owned()), lines };
    let report =
        json!({"verdict": "loads", "modules": [{"name": "mft", "verdict": "loads", "findings": []}]});
    let part = |version: &str| Component {
        role: "source".to_owned(),
        name: "mft".to_owned(),
        version: version.to_owned(),
        digest: "0123456789abcdef".to_owned(),
    };
    let image = Image {
        size: 16330,
        signature: Some(SignatureStatus::Signed),
        report: Some(report),
        components: Some(vec![part("4.33")]),
        provenance: Some(provenance("mft")),
    };
    let previous = Image { components: Some(vec![part("4.32")]), ..Image::default() };
    let reference = facts.plan.cells[0].outcome.cell().unwrap().reference.clone();
    let previous_image = Some((ComparedImage { image: reference, cell: None }, Ok(Arc::new(previous))));
    let log = Some(Log { path: "log".into(), excerpt: Some(excerpt), is_of_previous_attempt: true });
    let found = CellData { log, image: Some(Ok(Arc::new(image))), previous_image, ..CellData::default() };
    let page = cell_page(&fleet, &fleet.entries[0], found).unwrap();
    insta::assert_snapshot!(page);
}

#[test]
fn the_index_page() {
    let page = render_fleet(&large(4, 6, 12));
    insta::assert_snapshot!(page.replace(env!("CARGO_PKG_VERSION"), "VERSION"));
}

#[test]
fn pages_are_accessible() {
    let page = render_fleet(&large(2, 5, 4));
    for wanted in [
        "<html lang=\"en\">",
        "<a class=\"skip\" href=\"#main\">",
        "<main id=\"main\"",
        "<nav aria-label=\"Pages\">",
        "role=\"group\" aria-labelledby=\"matrix\" tabindex=\"0\"",
        "<th scope=\"col\">driver-1",
        "<th scope=\"row\">6.1.0-0-generic",
        "<th scope=\"rowgroup\"",
        "<label>Image <input name=\"image\"",
    ] {
        assert!(page.contains(wanted), "{wanted} is not in {page}");
    }
    assert!(!page.contains("http:") && !page.contains("https:") && !SCRIPT.contains("http"), "{page}");
    assert_eq!(page.matches("<script src=\"page.js\"").count(), page.matches("<script").count(), "{page}");
    assert!(!STYLE.contains("url(") && !STYLE.contains("@import"), "the style sheet loads nothing else");
}
