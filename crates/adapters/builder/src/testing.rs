//! Test bench that needs neither network nor engine. Images go to a layout directory, headers are trees that the test
//! writes, and payloads come from [`ModuleFile`].

mod fleet;
mod logs;

use std::{
    collections::BTreeMap,
    fs,
    sync::{Arc, Mutex},
};

use farrier_core::{
    image::{Definitions, DriverImage, ImageName, ImageReference},
    kernel::{KernelFamily, KernelTarget},
    plan::{Cell, Instance},
    provenance::Confinement,
    site::{ExistingImages, ImageSigning, KeySource},
};
use farrier_engines::{EngineChoice, EngineEnv};
use farrier_inputs::{FetchOptions, Fetcher};
use farrier_local::cache::Cache;
use farrier_payload::DecompressionBudget;
use farrier_signing::testing::OpensslDir;
use farrier_store::registry::{Keyring, RegistryLocation, RegistryOptions, RemoteRegistry, connect};
use kmod::{BootReport, testing::ModuleFile};
use serde_json::{Value, json};

pub use self::{
    fleet::{FIRST, Fleet, Gate, State},
    logs::Logs,
};
use super::{
    assemble, cell,
    cell_build::{CellBuild, CompileInputs, Payload},
    check, document, headers, needs,
    pipeline::{BuildOptions, Built, build},
    publish,
};
use crate::services::{
    BootCheck, BootChecker, BuildError, BuildLimits, BuildServices, BuildTools, ImageAccess, LazyEngine,
    LazyEntrypoint, ProcessControl, Reporter, Stage,
};

/// Three kernels. [`ModuleFile`] writes modules for the first.
pub const K9: &str = "6.1.0-9-amd64";
pub const K10: &str = "6.1.0-10-amd64";
pub const K11: &str = "6.1.0-11-amd64";
/// Symbols that all three kernels export.
pub const SYMBOLS: &str =
    "0x0000aaaa\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\t\n0x00000001\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n";

/// [`BuildServices`] over temporary directories.
pub struct Bench {
    pub services: BuildServices,
    heard: Arc<Heard>,
    directory: tempfile::TempDir,
}

/// Stages and notes that the reporter received.
#[derive(Default)]
struct Heard(Mutex<Vec<String>>);

impl Reporter for Heard {
    fn stage(&self, _: &str, stage: Stage) {
        self.0.lock().unwrap().push(stage.to_string());
    }

    fn output(&self, _: &str, _: &str) {}

    fn note(&self, _: &str, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }

    fn finished(&self, _: &str, _: &str) {}
}

/// A boot checker that returns a scripted answer and records the modules of each request.
pub struct Scripted {
    pub answer: fn() -> Result<BootReport, BuildError>,
    pub asked: Mutex<Vec<Vec<String>>>,
}

#[async_trait::async_trait]
impl BootChecker for Scripted {
    async fn boot_check(&self, check: &BootCheck<'_>) -> Result<BootReport, BuildError> {
        for module in &check.modules {
            assert!(check.payload.join(module).is_file(), "{module}");
        }
        self.asked.lock().unwrap().push(check.modules.clone());
        (self.answer)()
    }
}

fn image(name: &str, spec: &Value) -> DriverImage {
    let mut whole = json!({"version": "1.0", "template": "t", "modules": ["m"]});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "apiVersion": "farrier.dev/v1alpha1", "kind": "DriverImage", "metadata": {"name": name}, "spec": whole,
    }))
    .unwrap()
}

fn family(headers: &str) -> KernelFamily {
    serde_json::from_value(json!({
        "apiVersion": "farrier.dev/v1alpha1", "kind": "KernelFamily", "metadata": {"name": "debian-12"},
        "spec": {
            "match": {"os": ["debian"]},
            "headers": {"tarball": {"path": headers}},
            "toolchain": {"image": format!("registry.test/toolchain@sha256:{:0>64}", 0)},
        },
    }))
    .unwrap()
}

impl Bench {
    /// Creates a bench with one image `x`, whose definition has these additional fields.
    pub fn new(spec: &Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let cache = Cache::open(at("cache")).unwrap();
        let location = RegistryLocation::Layout(at("layout"));
        let options = RegistryOptions::default();
        let image = image("x", spec);
        let heard = Arc::new(Heard::default());
        // Nothing listens on this socket, so a build that needs the engine fails.
        let env = EngineEnv {
            docker_host: Some(format!("unix://{}", at("none.sock").display())),
            ..EngineEnv::default()
        };
        let services = BuildServices {
            definitions: Definitions {
                images: [(image.metadata.name.clone(), image)].into(),
                families: vec![family(&at("headers-{{release}}").display().to_string())],
                templates: [(
                    "t".to_owned(),
                    "FROM {{toolchain}} AS modules\nRUN make K={{kernel.release}}\nFROM scratch\n".to_owned(),
                )]
                .into(),
                root: directory.path().to_owned(),
                ..Definitions::default()
            },
            fetcher: Fetcher::new(cache.clone(), FetchOptions::default())
                .with_definitions(directory.path().to_owned()),
            cache: cache.clone(),
            images: ImageAccess {
                cache,
                registry: connect(&location, &options),
                needs_from: None,
                remote: Arc::new(RemoteRegistry::new("none".to_owned(), &options)),
                credentials: Keyring::default(),
                location,
            },
            tools: BuildTools {
                engine: LazyEngine::new(EngineChoice::Docker, env),
                entrypoint: LazyEntrypoint::new(Some(at("driver-entrypoint"))),
                limits: BuildLimits { at_once: 1, budget: farrier_local::machine::budget() },
                module_signer: None,
                boot_checker: None,
                output_maker: None,
            },
            process: ProcessControl {
                reporter: Arc::clone(&heard) as Arc<dyn Reporter>,
                instance: Instance::default(),
                fence: None,
                cancel: tokio_util::sync::CancellationToken::new(),
            },
        };
        let bench = Self { services, heard, directory };
        for release in [K9, K10, K11] {
            bench.headers(release, SYMBOLS);
        }
        bench
    }

    /// Adds another image, whose definition has these additional fields.
    pub fn add(&mut self, name: &str, spec: &Value) {
        let image = image(name, spec);
        self.services.definitions.images.insert(image.metadata.name.clone(), image);
    }

    /// Writes a kernel's headers.
    pub fn headers(&self, release: &str, symvers: &str) {
        self.headers_with(release, symvers, "");
    }

    /// Writes a kernel's headers with additional configuration options.
    pub fn headers_with(&self, release: &str, symvers: &str, options: &str) {
        let build = self.directory.path().join(format!("headers-{release}"));
        for (file, text) in [
            ("Makefile", String::new()),
            ("Module.symvers", symvers.to_owned()),
            ("include/config/kernel.release", format!("{release}\n")),
            ("include/generated/utsrelease.h", format!("#define UTS_RELEASE \"{release}\"\n")),
            (
                "include/config/auto.conf",
                format!(
                    "CONFIG_MODULES=y\nCONFIG_X86_64=y\nCONFIG_64BIT=y\nCONFIG_SMP=y\nCONFIG_PREEMPT_BUILD=y\n\
                     CONFIG_MODULE_UNLOAD=y\nCONFIG_MODVERSIONS=y\n\
                     CONFIG_CC_VERSION_TEXT=\"gcc (GCC) 12.2.0\"\n{options}"
                ),
            ),
        ] {
            let path = build.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    /// Gives the site a key for signing images.
    pub fn sign_images_with(&mut self, openssl_dir: &OpensslDir) {
        for (file, name) in [("k.pem", "images.pem"), ("p.pem", "images.pub")] {
            fs::copy(openssl_dir.path(file), self.root().join(name)).unwrap();
        }
        self.services.definitions.site.image_signing = Some(ImageSigning {
            key: KeySource::File(self.root().join("images.pem").to_str().unwrap().parse().unwrap()),
            passphrase: None,
            public_key: Some("images.pub".parse().unwrap()),
            existing: ExistingImages::Leave,
            trust_registry_writers: false,
        });
    }

    /// Directory that holds the definitions, the cache and the layout.
    pub fn root(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// Adds a boot check that returns this answer.
    pub fn with_boot(mut self, answer: fn() -> Result<BootReport, BuildError>) -> (Self, Arc<Scripted>) {
        let scripted = Arc::new(Scripted { answer, asked: Mutex::default() });
        self.services.tools.boot_checker = Some(Arc::clone(&scripted) as Arc<dyn BootChecker>);
        (self, scripted)
    }

    pub fn image(&mut self) -> &mut DriverImage {
        self.services.definitions.images.values_mut().next().unwrap()
    }

    pub fn definition(&self) -> (&DriverImage, &KernelFamily) {
        let definitions = &self.services.definitions;
        (definitions.images.values().next().unwrap(), &definitions.families[0])
    }

    pub fn target(release: &str) -> KernelTarget {
        KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: release.parse().unwrap(),
            arch: farrier_core::kernel::Architecture::Amd64,
        }
    }

    pub async fn cell(&self, release: &str) -> Cell {
        self.cell_of("x", release).await
    }

    async fn cell_of(&self, image: &str, release: &str) -> Cell {
        let name: ImageName = image.parse().unwrap();
        cell::plan_cell(&self.services, &name, &Self::target(release)).await.unwrap()
    }

    /// Returns a payload with these modules, as a build for the kernel produces it.
    pub(super) fn payload(&self, release: &str, modules: &[&ModuleFile]) -> Payload {
        let work = self.services.cache.scratch().unwrap();
        let tree = work.path().join("payload");
        let extra = tree.join(format!("lib/modules/{release}/extra"));
        fs::create_dir_all(&extra).unwrap();
        for module in modules {
            fs::write(extra.join(format!("{}.ko", module.module().name)), module.build()).unwrap();
        }
        fs::write(tree.join(format!("lib/modules/{release}/modules.dep")), "extra/m.ko:\n").unwrap();
        let family = &self.services.definitions.families[0].spec.toolchain;
        let farrier_core::kernel::Toolchain::Image(toolchain) = family else { panic!("an image") };
        Payload {
            tree,
            image: None,
            sources: vec!["src: here".to_owned()],
            toolchain: toolchain.to_string(),
            exposed: None,
            reused_from: None,
            confinement: Confinement {
                refused: vec!["a mount".to_owned()],
                landlock: 7,
                ..Confinement::default()
            },
            decompression: Arc::new(DecompressionBudget::without_build()),
            work,
        }
    }

    /// Checks and publishes a payload, as a build does.
    pub async fn publish(&self, release: &str, modules: &[&ModuleFile]) -> Result<Built, BuildError> {
        self.publish_of("x", release, modules).await
    }

    /// Checks and publishes a payload of another image. Each exposed path gets one header file.
    pub async fn publish_of(
        &self,
        image: &str,
        release: &str,
        modules: &[&ModuleFile],
    ) -> Result<Built, BuildError> {
        let cell = self.cell_of(image, release).await;
        let build = CellBuild::of(&self.services, &cell).unwrap();
        let compile_inputs =
            CompileInputs { headers: headers::fetch(&build).await?, needed: needs::fetch(&build).await? };
        let mut payload = self.payload(release, modules);
        let exposes = &build.image.spec.exposes;
        for place in exposes {
            let place = payload.tree.join(AsRef::<str>::as_ref(place).trim_start_matches('/'));
            fs::create_dir_all(&place).unwrap();
            fs::write(place.join("header.h"), release).unwrap();
        }
        if !exposes.is_empty() {
            payload.exposed = Some(farrier_payload::expose(&payload.tree, exposes).unwrap().digest);
        }
        let checked = check::check(&build, &compile_inputs, payload, None).await?;
        let image = assemble::assemble(&build, &checked).await?;
        let documents = document::document(&build, &checked, &image).await?;
        let pushed_bytes = publish::publish(&build, &image, &documents).await?;
        let digest = image.assembled.digest.clone();
        Ok(Built { digest, report: checked.report, reused_from: None, pushed_bytes })
    }

    /// Builds the image for a kernel, as the controller does. Compiling fails, because there is no engine.
    pub async fn build(&self, release: &str) -> Result<Built, BuildError> {
        let cell = self.cell(release).await;
        // Box the future, because its size would add to the future of every test.
        Box::pin(build(&self.services, &cell, BuildOptions { push: true, compile: false })).await
    }

    /// Returns the annotations of the image that is published for a kernel.
    pub async fn annotations(&self, release: &str) -> BTreeMap<String, String> {
        let reference = self.cell(release).await.reference;
        let registry = &self.services.images.registry;
        let stored = registry.manifest(&reference.repository, &reference.version).await.unwrap().unwrap();
        oci::ImageManifest::parse(&stored.bytes).unwrap().annotations
    }

    /// Removes a tag from the registry, as garbage collection does.
    pub fn lose(&self, reference: &ImageReference) {
        let path = self.directory.path().join("layout/index.json");
        let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let manifests = index["manifests"].as_array_mut().unwrap();
        let name = reference.to_string();
        manifests.retain(|found| found["annotations"]["org.opencontainers.image.ref.name"] != name.as_str());
        fs::write(&path, serde_json::to_vec(&index).unwrap()).unwrap();
    }

    /// Takes the stages and notes received so far.
    pub fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.heard.0.lock().unwrap())
    }
}

/// A module that loads on all three kernels.
pub fn module() -> ModuleFile {
    ModuleFile::named("m").needs("printk", 1)
}
