//! Reads published images and their referrers from the registry.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farrier_builder::{
    images::{BILL_OF_MATERIALS, CHECK_REPORT, PROVENANCE, StoredImage, build_times},
    services::{BuildError, BuildServices, MAX_CONCURRENT_REQUESTS},
};
use farrier_core::{
    image::ImageReference,
    plan::{BuildTimes, Plan, PlannedCell},
    provenance::{Statement, is_about},
};
use farrier_store::SignatureStatus;
use oci::{ImageManifest, error_chain};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::{
    action::ActionLinks,
    fleet::Listed,
    log::Log,
    materials::{ComparedImage, Component, components_of, image_of, toolchain_of},
};

/// Maximum number of cached images.
const MAX_CACHED_IMAGES: usize = 100;
/// How long images are cached. The content of a digest never changes, but documents and signatures can be added later.
const MAX_CACHE_AGE: Duration = Duration::from_mins(5);
/// Maximum number of inputs of a provenance that are shown.
const MAX_INPUTS: usize = 300;
/// Maximum length of each text of an input.
const MAX_TEXT_CHARS: usize = 300;

/// Data of an image, or the reason why the image could not be read.
pub type ImageResult = Result<Arc<Image>, String>;

/// Data of a cell from the cache and the registry, in addition to the plan.
#[derive(Debug, Default)]
pub struct CellData {
    /// Log of the cell's build.
    pub log: Option<Log>,
    /// The published image.
    pub image: Option<ImageResult>,
    /// Image with which the cell's image is compared.
    pub previous_image: Option<(ComparedImage, ImageResult)>,
    /// Usual duration of the image's builds.
    pub usual: Option<Duration>,
    /// Links to the actions that the requesting user may take.
    pub actions: ActionLinks,
}

/// Data of a published image that a page shows.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// Compressed size of the layers, in bytes.
    pub size: u64,
    pub signature: Option<SignatureStatus>,
    /// Check report in the form that builds store.
    pub report: Option<Value>,
    /// Components of the bill of materials, if any.
    pub components: Option<Vec<Component>>,
    pub provenance: Option<ProvenanceSummary>,
}

/// Summary of an image's provenance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProvenanceSummary {
    /// Summary in one line.
    pub summary: String,
    /// Builder, as a URI.
    pub builder: String,
    /// Build type, as a URI, which defines the meaning of the other fields.
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

/// Reads images from the registry, with a cache.
pub struct Images {
    services: BuildServices,
    cache: Mutex<BTreeMap<ImageReference, (Instant, Arc<Image>)>>,
    times: Mutex<Option<(Instant, BuildTimes)>>,
    /// Limits the cells that are looked up at once, so that many viewers are no load for the registry, which may throttle
    /// farrier's own requests.
    lookups: Semaphore,
}

impl Images {
    pub fn of(services: BuildServices) -> Self {
        let lookups = Semaphore::new(MAX_CONCURRENT_REQUESTS);
        Self { services, cache: Mutex::default(), times: Mutex::default(), lookups }
    }

    /// Returns the data of a cell's image and of the previous image.
    pub async fn cell_data(&self, plan: &Plan, planned: &PlannedCell) -> CellData {
        let _permit = self.lookups.acquire().await;
        let image = async { Some(self.find(&image_of(&planned.outcome)?).await) };
        let previous_image = async {
            let compared = ComparedImage::of(plan, planned)?;
            let image = self.find(&compared.image).await;
            Some((compared, image))
        };
        let (image, previous_image, usual) =
            futures::join!(image, previous_image, self.usual_duration(planned));
        CellData { image, previous_image, usual, ..CellData::default() }
    }

    async fn usual_duration(&self, PlannedCell { image, target, .. }: &PlannedCell) -> Option<Duration> {
        let cached = self.times.lock().clone().filter(|(since, _)| since.elapsed() < MAX_CACHE_AGE);
        if let Some((_, times)) = cached {
            return times.usual_duration(image, target.arch);
        }
        let times = build_times(&self.services.images).await;
        let usual = times.usual_duration(image, target.arch);
        *self.times.lock() = Some((Instant::now(), times));
        usual
    }

    /// Returns an image from the cache or the registry.
    async fn find(&self, reference: &ImageReference) -> ImageResult {
        let cached =
            self.cache.lock().get(reference).filter(|(since, _)| since.elapsed() < MAX_CACHE_AGE).cloned();
        if let Some((_, image)) = cached {
            return Ok(image);
        }
        let outcome = read_image(&self.services, reference).await;
        let image = Arc::new(outcome.map_err(|error| error_chain(&error))?);
        let mut cache = self.cache.lock();
        if cache.len() >= MAX_CACHED_IMAGES {
            cache.clear();
        }
        cache.insert(reference.clone(), (Instant::now(), Arc::clone(&image)));
        Ok(image)
    }
}

async fn read_image(services: &BuildServices, reference: &ImageReference) -> Result<Image, BuildError> {
    let stored = services.images.existing_manifest(reference).await?;
    let layers = ImageManifest::parse(&stored.bytes)?.layers;
    let image = StoredImage { services, repository: &reference.repository, digest: &stored.digest };
    let (report, bill) =
        (image.find_document(&CHECK_REPORT).await?, image.find_document(&BILL_OF_MATERIALS).await?);
    let statement = image.find_document(&PROVENANCE).await?;
    let statement = statement.and_then(|bytes| Statement::parse(&bytes).ok());
    let statement = statement.filter(|statement| is_about(statement, &stored.digest));
    let mut components = bill.and_then(|bytes| Some(components_of(&serde_json::from_slice(&bytes).ok()?)));
    if let (Some(components), Some(statement)) = (&mut components, &statement) {
        // Bills of materials of earlier farrier versions already contain these packages.
        let mut packages = toolchain_of(&statement.predicate);
        packages.retain(|package| !components.contains(package));
        components.extend(packages);
    }
    Ok(Image {
        size: layers.iter().fold(0, |sum, layer| layer.size.saturating_add(sum)),
        signature: Some(image.signature_status().await?),
        // A report in the format of another farrier version is omitted.
        report: report.and_then(|bytes| read_report(&bytes)),
        components,
        provenance: statement.map(|statement| provenance_summary(&statement.predicate)),
    })
}

fn read_report(bytes: &[u8]) -> Option<Value> {
    let mut document: Value = serde_json::from_slice(bytes).ok()?;
    let report = document.get_mut("report")?.take();
    let is_list_or_null = |value: &Value| value.is_null() || value.is_array();
    let is_report = report["modules"].is_array()
        && is_list_or_null(&report["findings"])
        && is_list_or_null(&report["boot"]["modules"]);
    is_report.then_some(report)
}

fn provenance_summary(predicate: &Value) -> ProvenanceSummary {
    let text = |value: &Value, limit: usize| -> String {
        value.as_str().unwrap_or_default().chars().take(limit).collect()
    };
    let (definition, details) = (&predicate["buildDefinition"], &predicate["runDetails"]);
    let inputs = definition["resolvedDependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
    let dependency = |input: &Value| Dependency {
        role: text(&input["annotations"]["role"], MAX_TEXT_CHARS),
        name: text(&input["name"], MAX_TEXT_CHARS),
        uri: text(&input["uri"], MAX_TEXT_CHARS),
        digest: text(&input["digest"]["sha256"], MAX_TEXT_CHARS),
    };
    let farrier_version = match text(&details["builder"]["version"]["farrier"], 40) {
        version if version.is_empty() => "of unknown version".to_owned(),
        version => version,
    };
    ProvenanceSummary {
        summary: format!("SLSA v1: farrier {farrier_version}, {} inputs", inputs.len()),
        builder: text(&details["builder"]["id"], MAX_TEXT_CHARS),
        kind: text(&definition["buildType"], MAX_TEXT_CHARS),
        inputs: Listed::unfolded(inputs.iter().collect(), MAX_INPUTS).map(dependency),
    }
}

#[cfg(test)]
mod tests {
    use farrier_builder::testing::Bench;
    use farrier_core::{facts::CheckReportDocument, kernel::Architecture, plan::testing::Fleet};
    use kmod::{BootOutcome, BootReport, CheckReport, ModuleBoot, Verdict};

    use super::*;

    #[test]
    fn the_report_that_a_build_stores_is_shown() {
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

    #[tokio::test(start_paused = true)]
    async fn many_viewers_are_no_load_for_the_registry() {
        let bench = Bench::new(&serde_json::json!({}));
        let (images, plan) = (Images::of(bench.services.clone()), Fleet::new(&["6.1.0-47-amd64"]).plan());
        let of_others =
            images.lookups.acquire_many(MAX_CONCURRENT_REQUESTS.try_into().unwrap()).await.unwrap();
        let lookup = || tokio::time::timeout(Duration::from_mins(1), images.cell_data(&plan, &plan.cells[0]));
        assert!(lookup().await.is_err());
        drop(of_others);
        assert!(lookup().await.is_ok());
    }

    #[test]
    fn a_provenance_is_summarized() {
        let input = serde_json::json!({
            "name": "mft", "uri": "https://x.test/mft.tgz", "digest": {"sha256": "ab"}, "annotations": {"role": "source"},
        });
        let found = provenance_summary(&serde_json::json!({
            "buildDefinition": {"buildType": "kind", "resolvedDependencies": [input, {}]},
            "runDetails": {"builder": {"id": "builder", "version": {"farrier": "1".repeat(500)}}},
        }));
        assert_eq!(found.summary, format!("SLSA v1: farrier {}, 2 inputs", "1".repeat(40)));
        assert_eq!((found.builder.as_str(), found.kind.as_str()), ("builder", "kind"));
        let Dependency { role, name, uri, digest } = &found.inputs.items[0];
        assert_eq!([role, name, uri, digest], ["source", "mft", "https://x.test/mft.tgz", "ab"]);
        assert_eq!(provenance_summary(&Value::Null).summary, "SLSA v1: farrier of unknown version, 0 inputs");
    }
}
