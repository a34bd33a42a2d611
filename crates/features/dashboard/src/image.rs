//! Reads published images and their referrers from the registry.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farrier_builder::{
    images::{BILL_OF_MATERIALS, CHECK_REPORT, PROVENANCE, StoredImage, build_times},
    parts::{Parts, TargetError},
};
use farrier_core::{
    image::ImageReference,
    plan::{BuildTimes, Plan, PlannedCell},
    provenance::{Statement, is_about},
};
use farrier_store::Standing;
use oci::{ImageManifest, error_chain};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;

use super::{
    action::Offers,
    fleet::Listed,
    log::Log,
    materials::{Before, Part, image_of, parts_of, toolchain_of},
};

/// Maximum number of cached images, and how long they are cached. The content of a digest does not change,
/// but documents and signatures can be added later.
const KEPT: usize = 100;
const FRESH: Duration = Duration::from_mins(5);
/// Maximum number of inputs of a provenance that are shown, and maximum length of each text.
const INPUTS: usize = 300;
const TEXT: usize = 300;

/// Data of an image, or why it cannot be shown.
pub type FoundImage = Result<Arc<Image>, String>;

/// Data of a cell beyond the plan, from the disk and the registry.
#[derive(Debug, Default)]
pub struct Found {
    /// Log of the cell's build.
    pub log: Option<Log>,
    /// The published image.
    pub image: Option<FoundImage>,
    /// Image that the cell's image is compared with.
    pub before: Option<(Before, FoundImage)>,
    /// Usual duration of the image's builds.
    pub usual: Option<Duration>,
    /// Actions that the sender may take.
    pub offers: Offers,
}

/// Data of a published image that a page shows.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// Compressed size of the layers, in bytes.
    pub size: u64,
    pub signature: Option<Standing>,
    /// Check report in the form that builds store.
    pub report: Option<Value>,
    /// Components of the bill of materials, if any.
    pub parts: Option<Vec<Part>>,
    pub provenance: Option<Built>,
}

/// Build of an image, from its provenance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Built {
    /// Summary in one line.
    pub said: String,
    /// Builder and build type, both URIs. The build type defines the meaning of the other fields.
    pub builder: String,
    pub kind: String,
    pub inputs: Listed<Dependency>,
}

/// An input of an image's build.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Dependency {
    pub role: String,
    pub name: String,
    pub uri: String,
    pub digest: String,
}

/// Reads images, with a cache.
pub struct Images {
    parts: Parts,
    kept: Mutex<BTreeMap<ImageReference, (Instant, Arc<Image>)>>,
    times: Mutex<Option<(Instant, BuildTimes)>>,
}

impl Images {
    pub fn of(parts: Parts) -> Self {
        Self { parts, kept: Mutex::default(), times: Mutex::default() }
    }

    /// Returns the data of a cell's image and of the previous image.
    pub async fn of_cell(&self, plan: &Plan, planned: &PlannedCell) -> Found {
        let image = async { Some(self.find(&image_of(&planned.outcome)?).await) };
        let before = async {
            let before = Before::of(plan, planned)?;
            let found = self.find(&before.image).await;
            Some((before, found))
        };
        let (image, before, usual) = futures::join!(image, before, self.usual(planned));
        Found { image, before, usual, ..Found::default() }
    }

    async fn usual(&self, PlannedCell { image, target, .. }: &PlannedCell) -> Option<Duration> {
        let known = self.times.lock().clone().filter(|(since, _)| since.elapsed() < FRESH);
        if let Some((_, times)) = known {
            return times.usual(image, target.arch);
        }
        let times = build_times(&self.parts).await;
        let usual = times.usual(image, target.arch);
        *self.times.lock() = Some((Instant::now(), times));
        usual
    }

    /// Returns the data of an image, or why it cannot be shown.
    async fn find(&self, reference: &ImageReference) -> FoundImage {
        let known = self.kept.lock().get(reference).filter(|(since, _)| since.elapsed() < FRESH).cloned();
        if let Some((_, image)) = known {
            return Ok(image);
        }
        let found = look_at(&self.parts, reference).await;
        let image = Arc::new(found.map_err(|error| error_chain(&error))?);
        let mut kept = self.kept.lock();
        if kept.len() >= KEPT {
            kept.clear();
        }
        kept.insert(reference.clone(), (Instant::now(), Arc::clone(&image)));
        Ok(image)
    }
}

async fn look_at(parts: &Parts, reference: &ImageReference) -> Result<Image, TargetError> {
    let stored = parts.existing_manifest(reference).await?;
    let layers = ImageManifest::parse(&stored.bytes)?.layers;
    let image = StoredImage { parts, repository: &reference.repository, digest: &stored.digest };
    let (report, bill) =
        (image.find_document(&CHECK_REPORT).await?, image.find_document(&BILL_OF_MATERIALS).await?);
    let statement = image.find_document(&PROVENANCE).await?;
    let statement = statement.and_then(|bytes| Statement::parse(&bytes).ok());
    let statement = statement.filter(|statement| is_about(statement, &stored.digest));
    let mut listed = bill.and_then(|bytes| Some(parts_of(&serde_json::from_slice(&bytes).ok()?)));
    if let (Some(listed), Some(statement)) = (&mut listed, &statement) {
        // Earlier versions of farrier listed these packages in the bill.
        let new = |package: &Part| !listed.contains(package);
        let packages: Vec<Part> = toolchain_of(&statement.predicate).into_iter().filter(new).collect();
        listed.extend(packages);
    }
    Ok(Image {
        size: layers.iter().fold(0, |sum, layer| layer.size.saturating_add(sum)),
        signature: Some(image.standing().await?),
        // A report in another format than this farrier's is not shown.
        report: report.and_then(|bytes| read_report(&bytes)),
        parts: listed,
        provenance: statement.map(|statement| built(&statement.predicate)),
    })
}

fn read_report(bytes: &[u8]) -> Option<Value> {
    let mut document: Value = serde_json::from_slice(bytes).ok()?;
    let lists =
        |of: &Value, names: &[&str]| names.iter().all(|name| of[*name].is_null() || of[*name].is_array());
    let report = document.get_mut("report")?.take();
    let is_one =
        report["modules"].is_array() && lists(&report, &["findings"]) && lists(&report["boot"], &["modules"]);
    is_one.then_some(report)
}

fn built(predicate: &Value) -> Built {
    let text = |value: &Value, most: usize| -> String {
        value.as_str().unwrap_or_default().chars().take(most).collect()
    };
    let (definition, details) = (&predicate["buildDefinition"], &predicate["runDetails"]);
    let inputs = definition["resolvedDependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
    let dependency = |input: &Value| Dependency {
        role: text(&input["annotations"]["role"], TEXT),
        name: text(&input["name"], TEXT),
        uri: text(&input["uri"], TEXT),
        digest: text(&input["digest"]["sha256"], TEXT),
    };
    let farrier = match text(&details["builder"]["version"]["farrier"], 40) {
        farrier if farrier.is_empty() => "of no version".to_owned(),
        farrier => farrier,
    };
    let items = inputs.iter().take(INPUTS).map(dependency).collect();
    Built {
        said: format!("SLSA v1: farrier {farrier}, {} inputs", inputs.len()),
        builder: text(&details["builder"]["id"], TEXT),
        kind: text(&definition["buildType"], TEXT),
        inputs: Listed { items, folded: 0, more: inputs.len().saturating_sub(INPUTS) },
    }
}

#[cfg(test)]
mod tests {
    use farrier_core::{facts::CheckReportDocument, kernel::Architecture};
    use kmod::{BootOutcome, BootReport, CheckReport, ModuleBoot, Verdict};

    use super::*;

    #[test]
    fn the_report_that_a_build_stores_is_the_one_that_is_shown() {
        let refused = BootOutcome::Refused {
            error: "ENOEXEC".to_owned(),
            messages: vec!["disagrees about version of symbol module_layout".to_owned()],
        };
        let report = CheckReport {
            kernel: "6.1.0-56-amd64".to_owned(),
            architecture: Architecture::Amd64,
            verdict: Verdict::Refused,
            findings: Vec::new(),
            modules: Vec::new(),
            load_order: Vec::new(),
            boot: Some(BootReport {
                kernel: "6.1.0-56-amd64".to_owned(),
                accelerator: "kvm".to_owned(),
                milliseconds: 1,
                modules: vec![ModuleBoot {
                    path: "mft.ko".to_owned(),
                    name: "mft".to_owned(),
                    outcome: refused,
                }],
            }),
        };
        let stored = CheckReportDocument { report: &report, reused_from: None }.to_bytes().unwrap();
        let shown = read_report(&stored).unwrap();
        assert_eq!(shown["verdict"], "refused");
        let module = &shown["boot"]["modules"][0];
        assert_eq!(
            (&module["name"], &module["outcome"], &module["error"]),
            (&"mft".into(), &"refused".into(), &"ENOEXEC".into())
        );
        assert_eq!(module["messages"][0], "disagrees about version of symbol module_layout");
        for other in
            ["{}", "[", r#"{"report": {"modules": "x"}}"#, r#"{"report": {"modules": [], "findings": 1}}"#]
        {
            assert!(read_report(other.as_bytes()).is_none(), "{other}");
        }
    }

    #[test]
    fn how_an_image_was_built() {
        let input = serde_json::json!({
            "name": "mft", "uri": "https://x.test/mft.tgz", "digest": {"sha256": "ab"}, "annotations": {"role": "source"},
        });
        let found = built(&serde_json::json!({
            "buildDefinition": {"buildType": "kind", "resolvedDependencies": [input, {}]},
            "runDetails": {"builder": {"id": "builder", "version": {"farrier": "1".repeat(500)}}},
        }));
        assert_eq!(found.said, format!("SLSA v1: farrier {}, 2 inputs", "1".repeat(40)));
        assert_eq!((found.builder.as_str(), found.kind.as_str()), ("builder", "kind"));
        let Dependency { role, name, uri, digest } = &found.inputs.items[0];
        assert_eq!([role, name, uri, digest], ["source", "mft", "https://x.test/mft.tgz", "ab"]);
        assert_eq!(built(&Value::Null).said, "SLSA v1: farrier of no version, 0 inputs");
    }
}
