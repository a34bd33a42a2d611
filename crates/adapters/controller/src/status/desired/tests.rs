use farrier_core::plan::{BuildActivity, Stage, testing::Fleet};
use proptest::prelude::*;

use super::*;

const K47: &str = "6.1.0-47-amd64";
const K48: &str = "6.1.0-48-amd64";

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn by_name(objects: Vec<DriverBuild>) -> BTreeMap<String, DriverBuild> {
    objects.into_iter().map(|object| (object.metadata.name.clone().unwrap(), object)).collect()
}

/// Returns the objects as the API server returns them after a write.
fn written(objects: &[DriverBuild]) -> BTreeMap<String, DriverBuild> {
    let json = serde_json::to_string(objects).unwrap();
    let mut objects: Vec<DriverBuild> = serde_json::from_str(&json).unwrap();
    for object in &mut objects {
        object.metadata.generation = Some(1);
    }
    by_name(objects)
}

fn fleet() -> Fleet {
    let mut fleet = Fleet::new(&[K47, K47]);
    fleet.announce(1, K48);
    fleet
}

#[test]
fn objects_have_the_fields_of_farrier_status() {
    let mut fleet = fleet();
    fleet.publish(Verdict::Loads);
    let plan = fleet.plan();
    let objects = desired(&plan, &Activity::new(), None, &BTreeMap::new(), at(0));
    let told: Vec<_> = objects
        .iter()
        .map(|object| {
            let status = object.status.clone().unwrap();
            let reference = status.reference.unwrap_or_default();
            (object.spec.image.clone(), status.nodes, status.phase, status.verdict, reference, status.digest)
        })
        .collect();
    let rows: Vec<_> = farrier_core::plan::status(&plan)
        .into_iter()
        .map(|row| {
            let (nodes, verdict) =
                (i64::try_from(row.nodes).unwrap(), row.verdict.map(|v| v.as_str().to_owned()));
            (
                row.image,
                nodes,
                row.phase.as_str().to_owned(),
                verdict,
                row.reference,
                row.digest.map(|d| d.to_string()),
            )
        })
        .collect();
    assert_eq!(told, rows);
    assert_eq!(objects.len(), 2);
    insta::assert_snapshot!(serde_saphyr::to_string(&objects[1]).unwrap());
}

#[test]
fn missing_headers_are_reported_with_a_remedy() {
    let mut fleet = fleet();
    fleet.without_headers("package linux-headers-x in bookworm");
    let objects = desired(&fleet.plan(), &Activity::new(), None, &BTreeMap::new(), at(0));
    for object in objects {
        let status = object.status.unwrap();
        let message = status.message.unwrap();
        assert_eq!(
            (status.phase.as_str(), status.conditions[0].reason.as_str()),
            ("skipped", "NotBuildable")
        );
        assert!(message.starts_with("no headers for 6.1.0-4"), "{message}");
        assert!(message.contains("`farrier headers collect`"), "{message}");
    }
}

#[test]
fn a_second_reconcile_writes_nothing() {
    let mut fleet = fleet();
    fleet.publish(Verdict::Loads);
    let plan = fleet.plan();
    let first = desired(&plan, &Activity::new(), None, &BTreeMap::new(), at(0));
    let existing = written(&first);
    assert_eq!(writes(&first, &BTreeMap::new(), &BTreeSet::new()).objects.len(), 2);
    let second = desired(&plan, &Activity::new(), None, &existing, at(3600));
    assert_eq!(writes(&second, &existing, &BTreeSet::new()), Writes::default());
}

#[test]
fn conditions_keep_their_last_transition_time() {
    let mut fleet = fleet();
    let missing = written(&desired(&fleet.plan(), &Activity::new(), None, &BTreeMap::new(), at(0)));
    fleet.publish(Verdict::Loads);
    let objects =
        desired(&fleet.plan(), &Activity::new(), Some("images/x.yaml:3: no such template"), &missing, at(60));
    let changes = writes(&objects, &missing, &BTreeSet::new());
    assert_eq!((changes.objects.len(), changes.statuses.len()), (0, 2));
    let existing = written(&objects);
    let objects = desired(&fleet.plan(), &Activity::new(), None, &existing, at(120));
    let conditions = objects[0].status.clone().unwrap().conditions;
    let told: Vec<_> = conditions
        .iter()
        .map(|c| {
            format!(
                "{}={} {} {}",
                c.type_,
                c.status,
                c.reason,
                c.last_transition_time.0.as_second() - at(0).as_second()
            )
        })
        .collect();
    assert_eq!(
        told,
        ["Published=True Published 60", "Checked=True Loads 60", "ConfigurationCurrent=True Valid 120"]
    );
}

#[test]
fn status_shows_the_activity_of_builds() {
    let plan = fleet().plan();
    let cell = &plan.cells[0];
    let key = (cell.image.clone(), cell.target.clone());
    let with = |found: BuildActivity| {
        let activity = Activity::from([(key.clone(), found)]);
        desired(&plan, &activity, None, &BTreeMap::new(), at(0))[0].status.clone().unwrap()
    };
    let building = with(BuildActivity { stage: Some(Stage::Compile), ..BuildActivity::default() });
    assert_eq!((building.phase.as_str(), building.message.as_deref()), ("building", Some("compiling")));
    let retrying = with(BuildActivity {
        attempts: 3,
        next_retry: Some(at(30)),
        took: Some(std::time::Duration::from_millis(72_900)),
        error: Some("fetch headers: \u{1b}[31mconnection refused".to_owned()),
        log_tail: (0..100).map(|line| format!("{line}{}", "x".repeat(1000))).collect(),
        ..BuildActivity::default()
    });
    assert_eq!((retrying.phase.as_str(), retrying.attempts), ("retrying", Some(3)));
    assert_eq!(retrying.last_duration.as_deref(), Some("72s"));
    assert_eq!(retrying.next_retry, Some(Time(at(30))));
    assert_eq!((retrying.log_tail.len(), retrying.log_tail[0].len()), (LOG_LINES, MAX_LOG_LINE_CHARS));
    assert!(retrying.log_tail[0].starts_with("80"));
    assert_eq!(retrying.message.as_deref(), Some("fetch headers: \u{fffd}[31mconnection refused"));
}

#[test]
fn only_objects_created_by_farrier_are_deleted() {
    let existing = written(&desired(&fleet().plan(), &Activity::new(), None, &BTreeMap::new(), at(0)));
    let mut theirs = existing.values().next().unwrap().clone();
    theirs.metadata.labels = None;
    let mut existing = existing;
    existing.insert("theirs".to_owned(), theirs);
    let expired = existing.keys().cloned().collect();
    let deletions = writes(&[], &existing, &expired).deletions;
    assert_eq!(deletions.len(), 2);
    assert!(!deletions.contains(&"theirs".to_owned()));
}

proptest! {
    #[test]
    fn names_are_dns_names(
        image in "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
        release in "[0-9]{1,3}\\.[0-9]{1,3}[A-Za-z0-9._+~-]{0,58}",
        version in "[A-Za-z0-9_][A-Za-z0-9._-]{0,20}",
    ) {
        let (Ok(image), Ok(release)) = (image.parse::<ImageName>(), release.parse()) else { return Ok(()) };
        let target = |arch: &str| KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: version.parse().unwrap(),
            release: std::clone::Clone::clone(&release),
            arch: arch.parse().unwrap(),
        };
        let name = name_of(&image, &target("amd64"));
        prop_assert!(name.len() <= 63, "{name}");
        for part in name.split('.') {
            let ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
            prop_assert!(part.starts_with(ends) && part.ends_with(ends), "{name}");
            prop_assert!(part.chars().all(|c| ends(c) || c == '-'), "{name}");
        }
        prop_assert_ne!(name, name_of(&image, &target("arm64")));
    }
}
