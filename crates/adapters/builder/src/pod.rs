//! The compile stage in a cluster publishes the root file system of a build as an image, and compiles in a pod of this
//! image.
//!
//! The toolchain, the headers and each entry of the build context are separate layers, which builds share in the
//! registry and on nodes. The top layer is specific to the build: it holds the runner, the plan and the ownership of
//! directories.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::{
    facts::media_type,
    image::{ImageReference, Tag, Version},
    kernel::KernelLabel,
    provenance::Confinement,
};
use farrier_engines::{
    BuildRequest, ContextEntry, EngineError, InCluster, JobSpec, Kubernetes, Phase, USER, environment,
    job_name, write_tar,
};
use farrier_inputs::{RootFs, root_fs_layer};
use farrier_local::{blocking::blocking, cache::LockMode};
use farrier_payload::Entrypoint;
use farrier_store::registry::RegistryLocation;
use fs_err::{self as fs, File};
use oci::{Assembly, Base, Layer, error_chain};
use runner::{
    plan::{Action, Plan},
    pod::{CONTEXT, PLAN, RUNNER, RUNNER_DIR},
    wire::encode,
};
use serde_json::Value;
use tar::{Builder, EntryType, Header};
use tokio_util::sync::CancellationToken;
use walkdir::WalkDir;

use super::{base::InPlaceBase, cell_build::CellBuild};
use crate::{
    images::{BaseImage, layer_files},
    services::{BuildError, Result, Stage},
};

/// Fast compression: each image is pulled only a few times, so time matters more than size.
const GZIP_LEVEL: u32 = 1;
/// Kind of the cache entries that hold headers as layers.
const HEADER_LAYERS: &str = "header-layers";
/// Kind of the cache locks that serialize the push of a layer.
const PUSHES: &str = "pushes";
/// Directories that every build writes to.
const WRITTEN: [&str; 2] = ["out", "tmp"];

/// Runs the build in a pod and unpacks the payload into `tree`. Cancels the token `steps_started` to tell the caller that the
/// pod runs.
pub(super) async fn compile(
    build: &CellBuild<'_>,
    cluster: &Kubernetes,
    base: &InPlaceBase,
    toolchain: &BaseImage,
    request: BuildRequest,
    steps_started: &CancellationToken,
    tree: &Path,
) -> Result<Confinement> {
    let CellBuild { services, cell, image, .. } = build;
    let spec = image.spec.build;
    let mut plan = base.plan(spec);
    for step in &mut plan.steps {
        if let Action::Run(run) = &mut step.action {
            run.env.push(environment(spec));
        }
    }
    build.stage(Stage::Base);
    let reference = publish(build, cluster, base, toolchain, &request.context, &plan).await?;
    build.stage(Stage::Waiting);
    let (reporter, subject, log) =
        (Arc::clone(&services.process.reporter), cell.subject(), Arc::clone(&request.log));
    let phases = |phase: Phase<'_>| match phase {
        Phase::Waiting(why) => log.line(&format!("The build waits for the cluster: {why}")),
        Phase::Running => {
            if !steps_started.is_cancelled() {
                reporter.stage(&subject, Stage::Compile);
                steps_started.cancel();
            }
        }
    };
    let limits = plan.limits;
    // With leader election, another replica adopts the Job when this replica stops.
    let keep_job = if services.process.fence.is_some() {
        services.process.cancel.clone()
    } else {
        CancellationToken::new()
    };
    let in_cluster = InCluster {
        job: JobSpec {
            builds: &services.definitions.site.builds,
            instance: &services.process.instance,
            driver: &cell.image,
            inputs: cell.declared_hash,
            kernel: KernelLabel::of(&cell.target.release),
            arch: cell.target.arch,
            image: &reference,
            build: spec,
            limits,
        },
        min_landlock_abi: services.definitions.site.builds.landlock,
        plan,
        log: Arc::clone(&request.log),
        phases: &phases,
        cancel: request.cancel.clone(),
        keep_job: keep_job.clone(),
    };
    let outcome = Box::pin(cluster.compile(in_cluster, tree)).await;
    if !keep_job.is_cancelled() {
        delete_image(build, &reference).await;
    }
    Ok(outcome?)
}

/// Publishes the image and returns its reference by digest.
async fn publish(
    build: &CellBuild<'_>,
    cluster: &Kubernetes,
    base: &InPlaceBase,
    toolchain: &BaseImage,
    context: &[ContextEntry],
    plan: &Plan,
) -> Result<ImageReference> {
    let CellBuild { services, cell, .. } = build;
    let RegistryLocation::Remote { .. } = services.images.location else {
        let message = "builds in a cluster need a registry that its nodes can pull from";
        let hint = "name one with --registry; for `farrier build`, also pass --push";
        return Err(BuildError::usage(message.to_owned(), hint));
    };
    let runner = cluster.runner(cell.target.arch);
    let runner = blocking(move || Entrypoint::read(&runner)).await?;
    runner.check_arch(cell.target.arch)?;
    let headers = headers_layer(build, base).await?;
    let (work, lowers, entries, plan) =
        (services.cache.scratch()?, base.lowers.clone(), context.to_vec(), plan.clone());
    let write = move || {
        let layers = write_layers(&lowers, &entries, &plan, runner.bytes(), work.path())?;
        Ok::<_, EngineError>((layers, work))
    };
    let (mut layers, work) = blocking(write).await?;
    layers.insert(0, headers);
    let new_layers: Vec<Layer> = layers.iter().map(|(layer, _)| layer.clone()).collect();
    let name = job_name(&services.process.instance, &cell.image, cell.declared_hash);
    // Builds can have identical root file systems, and the first build to end deletes its image. The label gives each Job a
    // distinct image. All replicas use the same label for a cell, so a replica finds a Job that another replica created.
    let labels = BTreeMap::from([("farrier.dev/build".to_owned(), name.clone())]);
    let base = pod_base(&toolchain.image);
    let image = oci::assemble(&Assembly {
        base: Some(&base),
        entrypoint_layer: None,
        layers: &new_layers,
        entrypoint: &[RUNNER.to_owned(), "pod".to_owned()],
        env: &BTreeMap::new(),
        labels: &labels,
        annotations: &BTreeMap::new(),
        architecture: cell.target.arch.as_str(),
    })?;
    services.process.ensure_may_write()?;
    let (repository, registry) =
        (services.images.location.repository(farrier_store::BUILDS)?, &services.images.registry);
    let from = Some(&toolchain.repository).filter(|from| services.images.location.can_address(from));
    let base_layers = toolchain.image.layers.iter().zip(layer_files(&services.images, toolchain).await?);
    let base_blobs = base_layers.map(|(layer, file)| (&layer.digest, file, from));
    let new_blobs = layers.iter().map(|(layer, file)| (&layer.digest, file.clone(), None));
    for (digest, file, from) in base_blobs.chain(new_blobs) {
        if registry.has_blob(&repository, digest).await? {
            continue;
        }
        // Concurrent builds share most layers. One build pushes each layer, and the others then find it in the
        // registry.
        let _lock = services.cache.lock(PUSHES, digest.hex(), LockMode::Exclusive).await?;
        let is_mounted = match from {
            Some(from) => registry.mount_blob(&repository, digest, from).await?,
            None => false,
        };
        if !is_mounted {
            registry.push_blob(&repository, digest, &file).await?;
        }
    }
    drop(work);
    registry.push_bytes(&repository, &image.config).await?;
    // The tag protects the image from garbage collection, and shows users which build owns it. It never moves: another version of
    // farrier, or a farrier of another cluster, can build the same inputs in another image.
    let tag: Tag = format!("{name}-{}", image.digest.short()).parse()?;
    let version = Version::Tag(tag);
    // A registry with immutable tags refuses even the same content, from a farrier that was killed or from another replica.
    let existing = registry.manifest(&repository, &version).await?;
    if existing.is_none_or(|existing| existing.digest != image.digest) {
        registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &image.manifest).await?;
    }
    Ok(ImageReference { repository, version: Version::Digest(image.digest) })
}

/// Returns the toolchain's image as the base of a pod. The runner starts in the image's working directory, which must
/// be a directory that no step can replace. Volumes are removed, because a volume would hide the image's content.
fn pod_base(base: &Base) -> Base {
    let mut base = base.clone();
    if let Some(Value::Object(config)) = base.config.get_mut("config") {
        for name in ["User", "Volumes"] {
            config.remove(name);
        }
        config.insert("WorkingDir".to_owned(), "/".into());
    }
    base
}

/// Deletes the image, if the registry supports deletion. Its layers stay useful to other builds.
async fn delete_image(build: &CellBuild<'_>, ImageReference { repository, version }: &ImageReference) {
    if let Version::Digest(digest) = version
        && let Err(error) = build.services.images.registry.delete_manifest(repository, digest).await
    {
        tracing::debug!(%repository, %digest, error = %error_chain(&error), "the image of a build could not be deleted");
    }
}

/// Returns the headers as a layer, which is made once per kernel.
async fn headers_layer(build: &CellBuild<'_>, base: &InPlaceBase) -> Result<(Layer, PathBuf)> {
    let (cache, [headers, _]) = (&build.services.cache, base.lowers.clone());
    let make = |entry: PathBuf| {
        blocking(move || {
            let mut contents = Vec::new();
            for item in fs::read_dir(&headers)? {
                let item = item?;
                contents.push(ContextEntry {
                    dest: item.file_name().to_string_lossy().into_owned(),
                    from: item.path(),
                });
            }
            contents.sort_by(|a, b| a.dest.cmp(&b.dest));
            let layer = write_layer(&entry.join(root_fs_layer::FILE), |out| write_tar(None, &contents, out))?;
            root_fs_layer::record(&entry, &layer)?;
            Ok::<_, BuildError>(())
        })
    };
    let entry = cache.get_or_make(HEADER_LAYERS, &base.headers, make).await?;
    let RootFs { file, layer } = root_fs_layer::read(&entry)?;
    Ok((layer, file))
}

/// Writes the layers above toolchain and headers, the lowest first. Blocking.
fn write_layers(
    lowers: &[PathBuf; 2],
    context: &[ContextEntry],
    plan: &Plan,
    runner: &[u8],
    work: &Path,
) -> Result<Vec<(Layer, PathBuf)>, EngineError> {
    let mut layers = Vec::new();
    for (number, entry) in context.iter().enumerate() {
        let path = work.join(format!("context-{number}"));
        layers.push((write_layer(&path, |out| write_context(entry, out))?, path));
    }
    let path = work.join("top");
    layers.push((write_layer(&path, |out| Ok(write_top_layer(lowers, plan, runner, out)?))?, path));
    Ok(layers)
}

/// Writes a layer: the tar archive that `write` produces, compressed.
fn write_layer(
    path: &Path,
    write: impl FnOnce(&mut io::BufWriter<File>) -> Result<(), EngineError>,
) -> Result<Layer, EngineError> {
    let tar = path.with_extension("tar");
    let mut out = io::BufWriter::with_capacity(256 << 10, File::create_new(&tar)?);
    write(&mut out)?;
    out.flush()?;
    let layer = oci::compress_at(GZIP_LEVEL, File::open(&tar)?, File::create_new(path)?)?;
    fs::remove_file(&tar)?;
    Ok(layer)
}

/// Writes an entry of the build context. Its parent directories are listed explicitly, owned by root: container
/// runtimes differ in the mode that they give to unlisted directories.
fn write_context(
    ContextEntry { dest, from }: &ContextEntry,
    out: &mut impl Write,
) -> Result<(), EngineError> {
    let dest = format!("{}/{dest}", CONTEXT.trim_start_matches('/'));
    let mut parents: Vec<&Path> = Path::new(&dest).ancestors().skip(1).collect();
    // The empty path is the last ancestor.
    parents.pop();
    for parent in parents.into_iter().rev() {
        let mut header = header(EntryType::Directory, 0o755, 0);
        header.set_path(parent.join(""))?;
        header.set_cksum();
        out.write_all(header.as_bytes())?;
    }
    write_tar(None, &[ContextEntry { dest, from: from.clone() }], out)
}

/// Writes the top layer. It makes the build's user the owner of all directories of the lower layers and the plan, so that
/// steps can write where root could. Exceptions are `/`, whose owner no layer sets, and the runner's own directory.
fn write_top_layer(lowers: &[PathBuf; 2], plan: &Plan, runner: &[u8], out: impl Write) -> io::Result<()> {
    let mut directories: BTreeMap<PathBuf, u32> = BTreeMap::new();
    for lower in lowers {
        for entry in WalkDir::new(lower).min_depth(1) {
            let entry = entry?;
            if entry.file_type().is_dir() {
                let path = entry.path().strip_prefix(lower).map_err(io::Error::other)?.to_owned();
                directories.entry(path).or_insert(entry.metadata()?.mode() & 0o1777);
            }
        }
    }
    let paths = plan.steps.iter().filter_map(|step| match &step.action {
        Action::Directory(path) => Some(path.as_str()),
        Action::Copy { dest, .. } => Some(dest.trim_end_matches('/')),
        Action::Run(_) => None,
    });
    // Use only the first path component: a copy's destination may be a file, in a directory that already exists.
    let tops =
        paths.filter_map(|path| path.trim_start_matches('/').split('/').next()).filter(|top| !top.is_empty());
    for top in tops.chain(WRITTEN) {
        let exists = lowers.iter().any(|lower| lower.join(top).symlink_metadata().is_ok());
        if !exists {
            directories.insert(top.into(), 0o755);
        }
    }
    let runner_dir = Path::new(RUNNER_DIR.trim_start_matches('/'));
    directories.retain(|path, _| !path.starts_with(runner_dir));
    let mut tar = Builder::new(out);
    for (path, mode) in directories {
        let mut header = header(EntryType::Directory, mode, USER);
        tar.append_data(&mut header, path.join(""), io::empty())?;
    }
    for path in [RUNNER_DIR, CONTEXT] {
        let path = Path::new(path.trim_start_matches('/')).join("");
        tar.append_data(&mut header(EntryType::Directory, 0o755, 0), path, io::empty())?;
    }
    // A process whose executable its user cannot read is never dumpable. The kernel therefore denies steps, which run
    // as the same user, access to the runner's memory and descriptors.
    for (path, mode, bytes) in [(PLAN, 0o444, encode(plan)?.as_slice()), (RUNNER, 0o111, runner)] {
        let mut header = header(EntryType::Regular, mode, 0);
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, path.trim_start_matches('/'), bytes)?;
    }
    tar.into_inner()?.flush()
}

fn header(kind: EntryType, mode: u32, owner: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(owner.into());
    header.set_gid(owner.into());
    header.set_mtime(0);
    header.set_size(0);
    header
}

#[cfg(test)]
mod tests {
    use std::{fs::DirBuilder, os::unix::fs::DirBuilderExt as _};

    use farrier_core::image::Digest;
    use runner::plan::Step;
    use serde_json::json;

    use super::*;

    /// Path, owner and mode of each entry of an archive.
    fn entries(archive: &[u8]) -> Vec<String> {
        let mut archive = tar::Archive::new(archive);
        let entries = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            let (path, header) = (entry.path().unwrap().display().to_string(), entry.header());
            format!("{path} {} {:o}", header.uid().unwrap(), header.mode().unwrap() & 0o7777)
        });
        entries.collect()
    }

    #[test]
    fn version_control_data_is_in_no_layer() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for directory in ["headers", "toolchain", "work", "source/sub/.git"] {
            fs::create_dir_all(at(directory)).unwrap();
        }
        fs::write(at("source/.git"), "gitdir: elsewhere\n").unwrap();
        fs::write(at("source/sub/.git/config"), "token").unwrap();
        fs::write(at("source/sub/a.c"), "int x;\n").unwrap();
        let context = [ContextEntry { dest: "sources/x".to_owned(), from: at("source") }];
        let lowers = [at("headers"), at("toolchain")];
        let layers = write_layers(&lowers, &context, &Plan::default(), b"runner", &at("work")).unwrap();
        let layer = oci::LayerReader::new(File::open(&layers[0].1).unwrap()).unwrap();
        let mut archive = tar::Archive::new(layer);
        let entries = archive.entries().unwrap();
        let places: Vec<_> =
            entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect();
        let below = CONTEXT.trim_start_matches('/');
        let above = [".farrier/", ".farrier/context/", ".farrier/context/sources/"].map(str::to_owned);
        let expected = ["", "/sub", "/sub/a.c"].map(|place| format!("{below}/sources/x{place}"));
        assert_eq!(places, [above, expected].concat());
    }

    #[test]
    fn the_build_owns_the_directories_and_nothing_of_the_runner() {
        let dir = tempfile::tempdir().unwrap();
        let [headers, toolchain] = ["headers", "toolchain"].map(|name| dir.path().join(name));
        let make = |path: PathBuf| DirBuilder::new().recursive(true).mode(0o755).create(path).unwrap();
        make(headers.join("usr/src/linux"));
        make(toolchain.join("usr/bin"));
        make(toolchain.join("tmp"));
        fs::write(toolchain.join("usr/bin/make"), "").unwrap();
        fs_err::os::unix::fs::symlink("usr/bin", toolchain.join("bin")).unwrap();
        let copy = Action::Copy { sources: vec![], dest: "/build/".to_owned(), mode: None };
        let step = |action| Step { line: 1, text: String::new(), action };
        let work = Action::Directory("/bin/work".to_owned());
        // Neither a toolchain nor a step gives the runner's directory to the build.
        make(toolchain.join(".farrier/context"));
        let runners = Action::Directory("/.farrier/work".to_owned());
        let plan = Plan { steps: vec![step(copy), step(work), step(runners)], ..Plan::default() };
        let mut bytes = Vec::new();
        write_top_layer(&[headers, toolchain], &plan, b"runner", &mut bytes).unwrap();
        let entries = entries(&bytes);
        let owned = ["build/", "out/", "tmp/", "usr/", "usr/bin/", "usr/src/", "usr/src/linux/"];
        let owned = owned.map(|name| format!("{name} {USER} 755"));
        // The runner's executable is not readable, so its process can be neither read nor traced.
        let runners =
            [".farrier/ 0 755", ".farrier/context/ 0 755", ".farrier/plan 0 444", ".farrier/runner 0 111"];
        assert_eq!(entries, [owned.as_slice(), &runners.map(str::to_owned)].concat());
    }

    #[test]
    fn directories_around_the_context_are_roots() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("hello")).unwrap();
        let entry = ContextEntry { dest: "sources/hello".to_owned(), from: dir.path().join("hello") };
        let mut bytes = Vec::new();
        write_context(&entry, &mut bytes).unwrap();
        let names = [".farrier/", ".farrier/context/", ".farrier/context/sources/"];
        let names = names.map(|name| format!("{name} 0 755"));
        assert_eq!(entries(&bytes)[..3], names);
        assert!(entries(&bytes)[3].starts_with(".farrier/context/sources/hello"));
    }

    #[test]
    fn the_pod_starts_in_the_root_and_has_no_volume() {
        let config = json!({"config": {
            "WorkingDir": "/build", "Volumes": {"/.farrier": {}}, "User": "me", "Env": ["PATH=/bin"],
        }});
        let Value::Object(config) = config else { panic!("not an object") };
        let base = Base { digest: Digest::of(b""), layers: vec![], config, diff_ids: vec!["x".to_owned()] };
        let base = pod_base(&base);
        assert_eq!(Value::from(base.config), json!({"config": {"WorkingDir": "/", "Env": ["PATH=/bin"]}}));
        assert_eq!(base.diff_ids, ["x"]);
    }
}
