//! The dependencies between the workspace's crates, as `cargo metadata` reports them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use serde_json::Value;
use walkdir::WalkDir;

/// Layer of a crate, given by its folder. A crate depends only on crates of its layer or of lower layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Layer {
    /// Libraries and programs that need no other layer: formats, protocols, and what runs on nodes.
    Foundation,
    /// Decisions, without input and output.
    Core,
    /// Input and output, and engines.
    Adapters,
    /// Optional features; none depends on another.
    Features,
    /// The program.
    Program,
}

impl Layer {
    fn of(folder: &str) -> Option<Self> {
        Some(match folder {
            "" => Self::Program,
            "crates/core" => Self::Core,
            "crates/engines" => Self::Adapters,
            "crates/kmod" | "crates/oci" | "crates/yaml" | "crates/loader-fuzz" => Self::Foundation,
            _ if folder.starts_with("crates/node/") => Self::Foundation,
            _ if folder.starts_with("crates/adapters/") => Self::Adapters,
            _ if folder.starts_with("crates/features/") => Self::Features,
            _ => return None,
        })
    }
}

struct Package {
    folder: String,
    layer: Layer,
    /// Normal dependencies, without development dependencies.
    dependencies: BTreeSet<String>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn metadata() -> Value {
    let cargo = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline", "--locked"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(cargo.status.success(), "{}", String::from_utf8_lossy(&cargo.stderr));
    serde_json::from_slice(&cargo.stdout).unwrap()
}

fn packages() -> BTreeMap<String, Package> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap().iter().map(|package| {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        let folder = manifest.parent().unwrap().strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        let layer = Layer::of(&folder).unwrap_or_else(|| panic!("{folder} has no place in the tree"));
        let used = package["dependencies"].as_array().unwrap().iter().filter(|used| used["kind"].is_null());
        let dependencies = used.map(|used| used["name"].as_str().unwrap().to_owned()).collect();
        (package["name"].as_str().unwrap().to_owned(), Package { folder, layer, dependencies })
    });
    packages.collect()
}

#[test]
fn no_crate_depends_upwards() {
    let packages = packages();
    let mut upwards = Vec::new();
    for (name, package) in &packages {
        for used in package.dependencies.iter().filter_map(|used| packages.get_key_value(used)) {
            let (used, Package { layer, .. }) = used;
            let is_allowed = *layer < package.layer || (*layer == package.layer && *layer != Layer::Features);
            if !is_allowed {
                upwards.push(format!("{name} ({:?}) depends on {used} ({layer:?})", package.layer));
            }
        }
    }
    assert!(upwards.is_empty(), "{upwards:#?}");
    assert!(packages.len() > 20, "{} packages", packages.len());
}

/// The page lists each folder before the folders that it depends on.
#[test]
fn the_page_lists_the_crates_in_the_order_of_their_dependencies() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let listed: Vec<&str> = rows.map(|(folder, _)| if folder == "src" { "" } else { folder }).collect();
    let place = |folder: &str| listed.iter().position(|listed| *listed == folder);
    let packages = packages();
    for (name, package) in &packages {
        let own = place(&package.folder).unwrap_or_else(|| panic!("the page does not list {name}"));
        for used in package.dependencies.iter().filter_map(|used| packages.get(used)) {
            let place = place(&used.folder);
            assert!(place > Some(own), "{name} depends on {}, which the page lists before it", used.folder);
        }
    }
}

/// The pure crates depend on no client, no async runtime and no file system.
#[test]
fn the_core_has_no_input_and_output() {
    let packages = packages();
    for name in ["farrier-core", "farrier-kmod", "farrier-yaml"] {
        for used in ["tokio", "reqwest", "kube", "hyper", "rustix", "fs-err", "bollard", "axum"] {
            assert!(!packages[name].dependencies.contains(used), "{name} depends on {used}");
        }
    }
}

/// Each feature crate is an optional dependency of the program under its folder's name, on by default. Other crates contain no
/// condition on a feature, except for their tests, the registry client, and the runner of the attack suite.
#[test]
fn features_are_known_to_the_program_alone() {
    let metadata = metadata();
    let program =
        metadata["packages"].as_array().unwrap().iter().find(|package| package["name"] == "farrier");
    let features = program.unwrap()["features"].as_object().unwrap();
    let default: BTreeSet<&str> =
        features["default"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let packages = packages();
    let crates = packages.iter().filter(|(_, package)| package.layer == Layer::Features);
    let mut names = BTreeSet::new();
    for (name, package) in crates {
        let feature = Path::new(&package.folder).file_name().unwrap().to_str().unwrap();
        assert_eq!(features[feature], serde_json::json!([format!("dep:{name}")]), "{feature}");
        names.insert(feature.to_owned());
    }
    assert_eq!(names, default.iter().map(|name| (*name).to_owned()).collect());

    let mut conditions = Vec::new();
    for entry in WalkDir::new(root().join("crates")).into_iter().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(entry.path()).unwrap();
            let lines = text.lines().filter(|line| line.contains("feature = \""));
            let allowed = ["\"testing\"", "\"client\"", "\"breakable\""];
            let lines = lines.filter(|line| !allowed.iter().any(|name| line.contains(name)));
            conditions.extend(lines.map(|line| format!("{}: {line}", entry.path().display())));
        }
    }
    assert!(conditions.is_empty(), "{conditions:#?}");
}
