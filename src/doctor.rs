//! `farrier doctor`: reports missing prerequisites on this machine, at the registry and in the cluster, with
//! remedies.

mod network;
mod probe;

use std::{collections::BTreeMap, path::Path};

use clap::Args;
use farrier_builder::{
    images,
    services::{BuildError, BuildServices},
};
use farrier_cluster::{ClusterError, KubeCluster};
use farrier_controller::{Planned, observe_and_plan};
#[cfg(feature = "bootcheck")]
use farrier_core::image::Definitions;
use farrier_core::{
    image::{Digest, ImageName, Repository},
    plan::{
        ClusterSnapshot, NoNodeReason, NodeReason, Outcome, Plan, PlannedCell, SnapshotScope, UnusedImage,
        WriteNamespaces,
    },
    provenance::Confinement,
    text::and_more,
};
use farrier_engines::Engine;
use farrier_local::{cache::CacheError, machine::native};
use farrier_payload::Entrypoint;
use farrier_store::registry::{RegistryLocation, free_space};
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

#[cfg(feature = "bootcheck")]
use super::check::emulator;
use super::{
    CliError, Exit, Result,
    args::EngineArg,
    env_vars as vars, output, secure_boot,
    session::{Connection, Session},
    settings::parse,
};

/// A certificate or an OpenPGP key that expires within this time is a finding, as for the alert
/// FarrierCertificateEnds.
const EXPIRY_WARNING: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Free space of the cache's disk, in bytes, below which builds of large drivers may fail. Twice the size of
/// a GPU driver's build tree with its objects.
const MIN_FREE_SPACE: u64 = 10 << 30;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub engine: EngineArg,
    /// Also check the registry of the published images: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
    /// Also check a cluster, and plan for it: kube or kube:CONTEXT, or dir:PATH
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: Option<String>,
    /// Also push an image with a document to the registry, move its tag, and delete all that again
    #[arg(long, requires = "registry")]
    pub probe_writes: bool,
    /// Namespaces in which DaemonSets are to be written, as for `farrier run`
    #[arg(long, env = vars::FARRIER_WRITE_NAMESPACES, value_name = "NAMESPACES", hide_env_values = true)]
    pub write_namespaces: Option<WriteNamespaces>,
}

/// Result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    /// Name of the check.
    check: &'static str,
    /// Whether the check passed.
    ok: bool,
    /// Result in words.
    says: String,
    /// Remedy; empty if none is known or needed.
    #[serde(skip_serializing_if = "String::is_empty")]
    hint: String,
}

/// Findings so far, and the resulting exit code.
struct Diagnosis {
    findings: Vec<Finding>,
    exit: Exit,
    /// Offsets of other clocks, by host; positive if a clock is ahead of this machine's.
    clocks: BTreeMap<String, SignedDuration>,
}

/// Runs all checks and prints the findings. Changes nothing, except for `--probe-writes`.
pub async fn doctor(session: &Session, args: DoctorArgs) -> Result<Exit> {
    let DoctorArgs { engine, registry, cluster, probe_writes, write_namespaces } = args;
    // As with other commands, the wrong value of an option is no finding.
    registry.as_deref().map(|location| parse::<RegistryLocation>("--registry", location)).transpose()?;
    let mut diagnosis = Diagnosis { findings: Vec::new(), exit: Exit::Done, clocks: BTreeMap::new() };
    match session.services(registry.as_deref(), engine.engine) {
        Err(error) => {
            let check = if error.error.is::<CacheError>() { "cache" } else { "definitions" };
            diagnosis.add_result(check, Err(error));
        }
        Ok(services) => {
            diagnosis.check_machine(session, &services).await;
            if registry.is_some() {
                diagnosis.check_registry(&services, probe_writes).await;
            }
            let is_faulty = diagnosis.findings.iter().any(|entry| entry.check == "registry" && !entry.ok);
            let faulty_registry = services.images.location.repository("farrier").ok().filter(|_| is_faulty);
            let faulty_host = faulty_registry.as_ref().and_then(Repository::host);
            let mut plan = None;
            if let Some(cluster) = cluster {
                let scope = SnapshotScope::of(&services.definitions);
                match session.connect(&cluster, write_namespaces.unwrap_or_default(), scope).await {
                    Err(error) => diagnosis.add_result("cluster", Err(error)),
                    Ok(connection) => {
                        plan = diagnosis.check_cluster(&services, &connection, faulty_host).await;
                    }
                }
            }
            if let Some(plan) = &plan
                && let Some(says) = secure_boot::warning(&services, plan).await
            {
                diagnosis.add_warning("secure boot", says, secure_boot::HINT);
            }
            diagnosis.check_network(&services, plan.as_ref()).await;
            diagnosis.compare_clocks();
        }
    }
    session.show(&diagnosis.findings, |findings| text(findings))?;
    Ok(diagnosis.exit)
}

/// Describes the sandbox of this machine: the confinement besides namespaces, and the mechanism that enforces
/// each limit.
fn describe(Confinement { refused: _, landlock, limits }: &Confinement) -> String {
    let confinement = match landlock {
        0 => "no Landlock in this kernel, only a seccomp filter".to_owned(),
        abi => format!("Landlock ABI {abi}"),
    };
    let limits: Vec<String> = limits.iter().map(|(limit, by)| format!("{limit} ({by})")).collect();
    format!("sandbox: namespaces of this machine, {confinement}; limits: {}", limits.join(", "))
}

impl Diagnosis {
    fn add_result(&mut self, check: &'static str, result: Result<String, impl Into<CliError>>) {
        match result {
            Ok(says) => self.add_ok(check, says),
            Err(error) => self.add_error(check, &error.into(), ""),
        }
    }

    fn add_ok(&mut self, check: &'static str, says: impl Into<String>) {
        self.findings.push(Finding { check, ok: true, says: says.into(), hint: String::new() });
    }

    /// Adds a passed check with a remedy for what may become a problem.
    fn add_warning(&mut self, check: &'static str, says: String, hint: &str) {
        self.findings.push(Finding { check, ok: true, says, hint: hint.to_owned() });
    }

    /// Adds a failed check. `default_hint` is used if the error has no hint.
    fn add_error(&mut self, check: &'static str, error: &CliError, default_hint: &str) {
        self.exit = self.exit.max(error.exit());
        let (says, hint) = error.message_and_hint();
        let hint = if hint.is_empty() { default_hint.to_owned() } else { hint };
        self.findings.push(Finding { check, ok: false, says, hint });
    }

    /// Adds a failed check that has no error value.
    fn add_problem(&mut self, check: &'static str, says: impl Into<String>, hint: &str) {
        self.exit = self.exit.max(Exit::Failed);
        self.findings.push(Finding { check, ok: false, says: says.into(), hint: hint.to_owned() });
    }

    async fn check_machine(&mut self, session: &Session, services: &BuildServices) {
        let definitions = &services.definitions;
        let (images, families) = (definitions.images.len(), definitions.families.len());
        let origin =
            session.global.definitions.as_ref().map_or("; all built-in, without --definitions", |_| "");
        self.add_ok("definitions", format!("driver images: {images}, kernel families: {families}{origin}"));
        self.check_free_space(services.cache.root());
        self.check_certificates(&services.certificate_expiries());
        if !definitions.site.revoked.is_empty() {
            let unused = images::check_revoked_keys(services).await;
            let unused = unused.map(|count| format!("{count}, none of which the site uses"));
            self.add_result("revoked keys", unused);
        }
        let engine = services.tools.engine.get().await.map_err(BuildError::from);
        let described = engine.and_then(|engine| match engine {
            Engine::Sandbox(sandbox) => Ok(describe(sandbox.confinement())),
            Engine::Docker(engine) => Ok(engine.describe().to_owned()),
            Engine::Kubernetes(cluster) => {
                Entrypoint::read(&cluster.runner(native()))?;
                Ok("kubernetes: Jobs in the cluster".to_owned())
            }
        });
        self.add_result("engine", described);
        let entrypoint = services.tools.entrypoint.binary(native()).await;
        self.add_result("driver-entrypoint", entrypoint.map(|binary| binary.path.display().to_string()));
        #[cfg(feature = "bootcheck")]
        self.check_emulator(definitions).await;
    }

    #[cfg(feature = "bootcheck")]
    async fn check_emulator(&mut self, definitions: &Definitions) {
        let booted = definitions.images.iter().filter(|(_, image)| image.spec.check.boot);
        let booted: Vec<&str> = booted.map(|(name, _)| name.as_str()).collect();
        if !booted.is_empty() {
            let result = emulator().await;
            self.add_result("boot checks", result.map(|name| format!("{name}, for {}", booted.join(", "))));
        }
    }

    fn check_free_space(&mut self, cache: &Path) {
        if let Err(error) = tempfile::NamedTempFile::new_in(cache) {
            return self.add_result("cache", Err(CacheError::from(error)));
        }
        let path = cache.display();
        match free_space(cache) {
            Err(error) => self.add_result("cache", Err(error)),
            Ok(free) if free < MIN_FREE_SPACE => self.add_problem(
                "cache",
                format!("{path} has {} GiB left", free >> 30),
                "set FARRIER_CACHE_DIR to a directory on a larger disk: a large driver's build takes several GiB; or delete \
                 farrier's cache while no build runs: farrier then fetches its inputs again, which --offline forbids",
            ),
            Ok(free) => self.add_ok("cache", format!("{path}, {} GiB free", free >> 30)),
        }
    }

    /// Checks when the certificates that the site names and the OpenPGP keys of definitions expire.
    fn check_certificates(&mut self, ends: &[(String, Timestamp)]) {
        let now = Timestamp::now();
        let mut all_valid = true;
        for (subject, end) in ends {
            if end.duration_since(now) < EXPIRY_WARNING {
                all_valid = false;
                let ends = if *end < now { "expired" } else { "expires" };
                let hint = "renew it, or install the newer keys of the archive's publisher, then restart farrier: kubectl -n \
                            farrier rollout restart deployment farrier";
                self.add_problem("certificates", format!("{subject}: it {ends} at {end:.0}"), hint);
            }
        }
        if let Some((_, first)) = ends.iter().min_by_key(|(_, end)| *end).filter(|_| all_valid) {
            self.add_ok("certificates", format!("{}, the first expires at {first:.0}", ends.len()));
        }
    }

    /// Checks that images can be read and pushed. The check begins an upload and abandons it; registries drop
    /// abandoned uploads.
    async fn check_registry(&mut self, services: &BuildServices, probe_writes: bool) {
        let (location, registry) = (&services.images.location, services.images.registry.as_ref());
        let names: Vec<&str> = services.definitions.images.keys().map(ImageName::as_str).collect();
        let name = names.first().copied().unwrap_or("farrier");
        let repository = match location.repository(name) {
            Ok(repository) => repository,
            Err(error) => return self.add_result("registry", Err(CliError::usage(error.to_string()))),
        };
        let tags = registry.tags(&repository).await;
        let is_readable = tags.is_ok();
        let found = tags.map(|tags| {
            let (count, all) = (tags.len(), names.join(", "));
            format!("{location} is readable; tags in {name}: {count}; repositories of the definitions: {all}")
        });
        self.add_result("registry", found);
        if is_readable && matches!(location, RegistryLocation::Remote { .. }) {
            let absent_blob = Digest::of(b"farrier doctor");
            let upload = registry.mount_blob(&repository, &absent_blob, &repository).await;
            self.add_result("push", upload.map(|_| format!("{location} accepts pushes")));
        }
        if is_readable && probe_writes {
            self.probe_writes(registry, &repository).await;
        }
    }

    /// Checks the cluster and returns the plan for it. Does not report images that are skipped because of
    /// `faulty_host`, whose failure is already reported.
    async fn check_cluster(
        &mut self,
        services: &BuildServices,
        connection: &Connection,
        faulty_host: Option<&str>,
    ) -> Option<Plan> {
        let Connection { cluster, kube } = connection;
        let planned = observe_and_plan(services, cluster.as_ref()).await;
        let planned = planned.map_err(|error| self.add_result("cluster", Err(error))).ok()?;
        let Planned { plan, snapshot, .. } = &planned;
        self.add_ok("cluster", format!("{}; its nodes: {}", cluster.describe(), snapshot.nodes.len()));
        self.check_snapshot(snapshot, kube.is_some());
        if let Some(kube) = kube {
            let ahead = kube.stats().clock_ahead();
            self.clocks.extend(ahead.map(|ahead| ("the API server".to_owned(), ahead)));
            self.check_permissions(services, kube).await;
        }
        self.check_skipped_nodes(plan, snapshot.read_only_nodes);
        for drivers in &plan.host_drivers {
            let [node, others @ ..] = &drivers.nodes[..] else { continue };
            let more = and_more(others.len());
            self.add_ok("host drivers", format!("{node}{more}: farrier-host {drivers}"));
        }
        self.check_unused_images(plan);
        self.check_inputs(&planned, faulty_host);
        Some(planned.plan)
    }

    /// Checks that the snapshot has nodes, and that everything in it could be read.
    fn check_snapshot(&mut self, snapshot: &ClusterSnapshot, is_live: bool) {
        if snapshot.nodes.is_empty() {
            let hint = if is_live {
                "check that --cluster and --context name the right cluster"
            } else {
                "put what `kubectl get nodes,daemonsets -A -o yaml` prints into the directory"
            };
            self.add_problem("nodes", "there is no node, so no image is needed", hint);
        }
        // Each message names the missing right and the command that grants it.
        for (_, reason) in snapshot.all_unseen() {
            self.add_problem("cluster", reason.clone(), "");
        }
        for (stream, found) in &snapshot.image_streams {
            match found {
                Ok(tags) => self.add_ok("image stream", format!("{stream}: {} tags", tags.len())),
                Err(reason) => self.add_problem("image stream", reason.clone(), ""),
            }
        }
    }

    /// Checks the rights to write rollout targets and, if Jobs build the images, the rights to run Jobs.
    async fn check_permissions(&mut self, services: &BuildServices, kube: &KubeCluster) {
        let rollouts = services.definitions.images.values().flat_map(|image| &image.spec.rollout);
        let missing = kube.missing_permissions(rollouts).await;
        self.add_permissions(missing, "all rollout targets may be written");
        if let Ok(Engine::Kubernetes(_)) = services.tools.engine.get().await {
            let namespace = services.definitions.site.builds.namespace();
            let missing = kube.missing_build_permissions(namespace).await;
            self.add_permissions(missing, &format!("builds may run in namespace {namespace}"));
        }
    }

    fn add_permissions(&mut self, missing: Result<Vec<ClusterError>, ClusterError>, ok_message: &str) {
        match missing {
            Err(error) => self.add_result("rights", Err(error)),
            Ok(missing) if missing.is_empty() => self.add_ok("rights", ok_message),
            Ok(missing) => missing.into_iter().for_each(|error| self.add_result("rights", Err(error))),
        }
    }

    /// Adds a problem for each reason that nodes are skipped.
    fn check_skipped_nodes(&mut self, plan: &Plan, read_only_nodes: bool) {
        let mut skipped_nodes: BTreeMap<&NodeReason, Vec<&str>> = BTreeMap::new();
        for node in &plan.skipped_nodes {
            skipped_nodes.entry(&node.why).or_default().push(&node.node);
        }
        for (why, nodes) in skipped_nodes {
            let says = match nodes[..] {
                [node] => format!("{node} is skipped: {why}"),
                [node, ..] => format!("{} are skipped, {node} among them: {why}", nodes.len()),
                [] => continue,
            };
            self.add_problem("nodes", says, &why.remedy(nodes[0], read_only_nodes));
        }
    }

    /// Reports images that no node needs. Some unused images are normal. If all are unused, or a label almost matches,
    /// the definition is probably wrong.
    fn check_unused_images(&mut self, plan: &Plan) {
        for UnusedImage { image, why } in &plan.unused_images {
            let says = format!("image {image}: {why}");
            if plan.cells.is_empty() || matches!(why, NoNodeReason::NoLabel { nearest: Some(_), .. }) {
                let hint = "correct `nodes` of the definition, or label the nodes: kubectl label node NODE LABEL=VALUE";
                self.add_problem("nodes", says, hint);
            } else {
                self.add_ok("nodes", says);
            }
        }
    }

    /// Adds a problem for each reason that cells are skipped, unless the reason is the fault of `faulty_host`.
    fn check_inputs(&mut self, planned: &Planned, faulty_host: Option<&str>) {
        let plan = &planned.plan;
        let mut skipped_cells: BTreeMap<String, Vec<&PlannedCell>> = BTreeMap::new();
        for cell in &plan.cells {
            if let Outcome::Skipped { why } = &cell.outcome
                && !why.is_not_applicable()
            {
                skipped_cells.entry(why.to_string()).or_default().push(cell);
            }
        }
        if skipped_cells.is_empty() && !planned.unreachable && !plan.cells.is_empty() {
            self.add_ok("inputs", "the headers, sources and toolchains of all needed images were found");
        }
        skipped_cells.retain(|why, _| faulty_host.is_none_or(|host| !why.contains(host)));
        for (why, cells) in skipped_cells {
            let (first, more) = (cells[0], and_more(cells.len() - 1));
            let (image, release) = (&first.image, &first.target.release);
            let hint = format!("run farrier why {image} --kernel {release} to see which nodes call for it");
            self.add_problem("inputs", format!("{}{more}: {why}", first.subject()), &hint);
        }
        if planned.unreachable {
            self.exit = self.exit.max(Exit::Unreachable);
            if faulty_host.is_none() {
                let hint = "run `farrier plan` to see which one";
                self.add_problem("inputs", "an external system was unreachable", hint);
            }
        }
    }
}

fn text(findings: &[Finding]) -> String {
    let row = |Finding { check, ok, says, hint }: &Finding| {
        let result = match (ok, hint.is_empty()) {
            (true, true) => "ok",
            (true, false) => "warning",
            (false, _) => "wrong",
        };
        let hint = (!hint.is_empty()).then(|| format!("-> {}", output::printable(hint)));
        let lines = says.lines().map(output::printable).chain(hint);
        [(*check).to_owned(), result.to_owned(), lines.collect::<Vec<_>>().join("\n")]
    };
    output::table(["CHECK", "RESULT", "FOUND"], findings.iter().map(row))
}
