use farrier_core::plan::testing;
use kmod::Verdict;
use serde_json::json;

use super::*;
use crate::fleet::tests::{K47, K48, facts_of, large};

fn component(role: &str, name: &str, version: &str, digest: &str) -> Component {
    let [role, name, version, digest] = [role, name, version, digest].map(str::to_owned);
    Component { role, name, version, digest }
}

fn summaries(found: &[Difference]) -> Vec<[&str; 3]> {
    found.iter().map(|one| [one.what.as_str(), &one.before, &one.now]).collect()
}

#[test]
fn any_bill_of_materials_can_be_parsed() {
    let bill = json!({"components": [
        {
            "name": "gcc-12", "version": "12.2.0-14", "hashes": [{"alg": "SHA-256", "content": "abc"}],
            "properties": [{"name": "other", "value": "x"}, {"name": "farrier:role", "value": "toolchain"}],
        },
        {"name": "x".repeat(5000), "version": 7, "properties": {"name": "farrier:role"}},
        "text",
    ], "formulation": [{"components": [{"name": "Dockerfile"}]}, 1]});
    let components = components_of(&bill);
    assert_eq!(components[0], component("toolchain", "gcc-12", "12.2.0-14", "abc"));
    assert_eq!(components[1], component("", &"x".repeat(MAX_TEXT_CHARS), "", ""));
    assert_eq!(
        (&components[2], &components[3]),
        (&Component::default(), &component("", "Dockerfile", "", ""))
    );
    let many = json!({"components": vec![json!({}); MAX_COMPONENTS + 1]});
    assert_eq!((components_of(&many).len(), components_of(&json!([])).len()), (MAX_COMPONENTS, 0));
}

#[test]
fn toolchain_packages_are_read_from_the_provenance() {
    let packages = json!(["pkg:deb/debian/g%2B%2B-12@12.2.0-14?arch=amd64&distro=debian-12", "pkg:x", 7]);
    let input = |role: &str| json!({"annotations": {"role": role, "packages": packages}});
    let predicate =
        json!({"buildDefinition": {"resolvedDependencies": [input("toolchain"), input("runtime-base"), 1]}});
    assert_eq!(toolchain_of(&predicate), [component("toolchain", "g++-12", "12.2.0-14", "")]);
    assert!(toolchain_of(&json!([])).is_empty());
}

#[test]
fn differences_name_components_and_versions() {
    let before = [
        component("kernel-headers", "linux-headers-6.1.0-9-amd64", "6.1.1", "aaaaaaaaaaaaaaaa"),
        component("toolchain", "gcc-12", "12.2.0-13", ""),
        component("toolchain", "make", "4.3", ""),
        component("module", "mft", "4.33", "1111"),
        component("recipe", "Dockerfile", "", "2222"),
    ];
    let now = [
        component("kernel-headers", "linux-headers-6.1.0-10-amd64", "6.1.2", "bbbbbbbbbbbbbbbb"),
        component("toolchain", "gcc-12", "12.2.0-14", ""),
        component("toolchain", "make", "4.3", ""),
        component("patch", "001-mft.patch", "", "cccccccccccccccc"),
        component("module", "mft", "4.33", "3333"),
        component("recipe", "Dockerfile", "", "4444"),
    ];
    let other_kernel = [
        [
            "kernel-headers",
            "linux-headers-6.1.0-9-amd64 6.1.1 aaaaaaaaaaaa",
            "linux-headers-6.1.0-10-amd64 6.1.2 bbbbbbbbbbbb",
        ],
        ["patch", "–", "001-mft.patch cccccccccccc"],
        ["toolchain", "gcc-12 12.2.0-13", "gcc-12 12.2.0-14"],
    ];
    assert_eq!(summaries(&differences(&before, &now, false)), other_kernel);
    let same_kernel: Vec<String> = differences(&before, &now, true).into_iter().map(|one| one.what).collect();
    assert_eq!(same_kernel, ["kernel-headers", "module", "patch", "recipe", "toolchain"]);
    assert!(differences(&now, &now, true).is_empty());
}

#[test]
fn an_image_is_compared_with_the_nearest_older_kernel() {
    let facts = large(24, 1, 24);
    let plan = &facts.plan;
    let before = |release: &str| {
        let planned = plan.cells.iter().find(|cell| cell.target.release.as_str() == release).unwrap();
        ComparedImage::of(plan, planned)
            .and_then(|before| before.cell)
            .map(|cell| cell.target.release.to_string())
    };
    // Kernels with even numbers are Debian's, with odd numbers Ubuntu's.
    assert_eq!(before("6.1.10-10-generic").as_deref(), Some("6.1.8-8-generic"));
    assert_eq!(before("6.1.0-0-generic").as_deref(), Some("6.1.2-2-generic"));
    assert_eq!(before("6.1.11-11-generic").as_deref(), Some("6.1.9-9-generic"));

    let mut fleet = testing::Fleet::new(&[K47]);
    assert!(ComparedImage::of(&fleet.plan(), &fleet.plan().cells[0]).is_none());
    fleet.publish(Verdict::Loads);
    fleet.announce(0, K48);
    let facts = facts_of(&fleet);
    let next = facts.plan.cells.iter().find(|cell| cell.target.release.as_str() == K48).unwrap();
    let before = ComparedImage::of(&facts.plan, next).unwrap();
    assert_eq!(Some(before.image), image_of(&facts.plan.cells[0].outcome));
    // Both are built from the same sources.
    let components = |cell: &PlannedCell| planned_components(cell.outcome.cell().unwrap());
    assert_eq!(
        summaries(&differences(&components(&before.cell.unwrap()), &components(next), false)),
        [[""; 3]; 0]
    );
}
