//! The metrics that `/metrics` shows, in Prometheus' text format.
//!
//! Label cardinality is bounded, so that no cluster can exhaust the memory of a monitoring system. Label values are:
//!
//! - names of enum variants,
//! - validated names of driver images and rollouts, one for each definition,
//! - validated kernel targets, at most [`MAX_KERNELS`].

use std::{fmt, sync::atomic::AtomicU64, time::Duration};

use farrier_cluster::kube::KubeStats;
use farrier_core::{
    image::Strategy,
    plan::{self, Activity, Plan, RolloutWait},
};
use jiff::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::{Metric, Registry, Unit},
};
use strum::{IntoStaticStr, VariantArray};

/// Maximum number of kernel targets with their own time series. A fleet rarely changes to more than a few kernels at once.
const MAX_KERNELS: usize = 50;
/// Histogram buckets for builds, in seconds: reuse of a payload takes seconds, a large driver on a small
/// machine takes an hour.
const BUILD_SECONDS: [f64; 10] = [5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3600.0];
/// Histogram buckets for reconciles, in seconds: a reconcile without lookups takes milliseconds.
const RECONCILE_SECONDS: [f64; 10] = [0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];

type DecimalGauge = Gauge<f64, AtomicU64>;

type Labels<const N: usize> = [(&'static str, &'static str); N];

/// Outcome of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum BuildOutcomeLabel {
    /// Compiled and published.
    Built,
    /// Published with another kernel's payload.
    Reused,
    /// Failed permanently: the same inputs fail again.
    Failed,
    /// A build step forged messages of the runner.
    Tampered,
    /// Failed because of a transient fault.
    Faulted,
    /// Canceled.
    Stopped,
}

/// Outcome of a rewrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum RewriteOutcomeLabel {
    /// The rollout target was rewritten.
    Made,
    /// The rewrite was refused or failed.
    Failed,
}

/// Outcome of a reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum ReconcileOutcomeLabel {
    /// Everything could be observed.
    Done,
    /// Everything could be observed, and a write was refused or failed.
    Refused,
    /// A source could not be reached.
    Unreachable,
    /// The reconcile did not complete.
    Failed,
}

fn label(outcome: impl Into<&'static str>) -> (&'static str, &'static str) {
    ("outcome", outcome.into())
}

/// Strategies that rewrite a target.
const WRITING_STRATEGIES: &[Strategy] = &[
    Strategy::Image,
    Strategy::PerKernel,
    Strategy::Union,
    Strategy::CustomResource,
    Strategy::File,
    Strategy::Git,
];

fn strategy_label(strategy: Strategy) -> (&'static str, &'static str) {
    ("strategy", strategy.as_str())
}

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    images: Family<[(&'static str, String); 2], Gauge>,
    kernels: Family<[(&'static str, String); 1], DecimalGauge>,
    kernels_without_series: Gauge,
    nodes_skipped: Gauge,
    upgrade_nodes: Family<[(&'static str, String); 2], Gauge>,
    rollouts: Family<[(&'static str, String); 3], DecimalGauge>,
    certificates: Family<[(&'static str, String); 1], DecimalGauge>,
    build_seconds: Histogram,
    builds: Family<Labels<1>, Counter>,
    builds_running: Gauge,
    builds_waiting: Gauge,
    rewrites: Family<Labels<2>, Counter>,
    reconciles: Family<Labels<1>, Counter>,
    reconcile_seconds: Histogram,
    leader: Gauge,
    configuration_valid: Gauge,
}

impl Default for Metrics {
    /// Registers all families at zero. The configuration counts as valid, because an invalid one fails startup.
    fn default() -> Self {
        let mut registry = Registry::with_prefix("farrier");
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        registry.register("build", "The running farrier", Info::new(version));
        let mut registrar = Registrar(registry);
        let metrics = Self {
            images: registrar.add("images", "Driver images for kernel targets, by phase"),
            kernels: registrar.seconds(
                "kernel_unresolved",
                "How long a kernel target that nodes run has lacked an image or its rollout",
                Family::default(),
            ),
            kernels_without_series: registrar.add(
                "kernels_unresolved_left_out",
                "Kernel targets without a separate time series, because there are too many",
            ),
            nodes_skipped: registrar.add(
                "nodes_skipped",
                "Nodes whose kernel target is unknown or contradictory",
            ),
            upgrade_nodes: registrar.add(
                "upgrade_nodes",
                "Nodes of DaemonSets that are upgraded in order, by stage",
            ),
            rollouts: registrar.seconds(
                "rollout_unresolved",
                "How long a rollout has been held, or has made no progress",
                Family::default(),
            ),
            certificates: registrar.seconds(
                "certificate_expiry_timestamp",
                "Unix time at which a certificate expires that farrier presents, trusts or signs modules with, or a file of OpenPGP \
                 keys in definitions, as read at startup and with definitions",
                Family::default(),
            ),
            build_seconds: registrar.seconds(
                "build_duration",
                "How long builds took, published or failed, but not those that were stopped",
                Histogram::new(BUILD_SECONDS),
            ),
            builds: registrar.add("builds", "Finished builds, by outcome"),
            builds_running: registrar.add("builds_running", "Builds in progress"),
            builds_waiting: registrar.add("builds_waiting", "Builds that wait for a free slot or for their next attempt"),
            rewrites: registrar.add("rewrites", "Rewrites, by strategy and outcome"),
            reconciles: registrar.add("reconciles", "Reconciles, by outcome"),
            reconcile_seconds: registrar.seconds(
                "reconcile_duration",
                "How long reconciles took, without builds",
                Histogram::new(RECONCILE_SECONDS),
            ),
            leader: registrar.add("leader", "1 if this replica may write"),
            configuration_valid: registrar.add(
                "configuration_valid",
                "0 while the definitions on disk are invalid and the last good ones are in use",
            ),
            registry: Mutex::new(registrar.0),
        };
        metrics.configuration_valid.set(1);
        // Initialize all label values. A counter that first appears with its first event has no increase to alert on.
        for outcome in BuildOutcomeLabel::VARIANTS {
            let _ = metrics.builds.get_or_create(&[label(outcome)]);
        }
        for outcome in ReconcileOutcomeLabel::VARIANTS {
            let _ = metrics.reconciles.get_or_create(&[label(outcome)]);
        }
        for strategy in WRITING_STRATEGIES {
            for outcome in RewriteOutcomeLabel::VARIANTS {
                let _ = metrics.rewrites.get_or_create(&[strategy_label(*strategy), label(outcome)]);
            }
        }
        metrics
    }
}

impl Metrics {
    /// Adds the request counters of a connection to an API server.
    pub fn add_api(&self, stats: &KubeStats) {
        let help = "Requests to the Kubernetes API server, by answer";
        self.registry.lock().register("api_requests", help, stats.requests.clone());
    }

    /// Holds back [`Self::text`] while the series of a family are replaced. A scrape in between would see none or only some of
    /// them, and alerts on them would end and begin again.
    fn lock_out_scrapes(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock()
    }

    /// Records the matrix of images, with the progress of builds, and the upgrades of a plan.
    pub fn plan(&self, plan: &Plan, activity: &Activity) {
        let _replacing = self.lock_out_scrapes();
        self.images.clear();
        for row in plan::status_at(plan, activity, Timestamp::UNIX_EPOCH) {
            let labels = [("image", row.image), ("phase", row.phase.as_str().to_owned())];
            self.images.get_or_create(&labels).inc();
        }
        self.nodes_skipped.set(count(plan.skipped_nodes.len()));
        self.upgrade_nodes.clear();
        for upgrade in plan.rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref()) {
            for node in &upgrade.nodes {
                let stage: &'static str = node.stage.into();
                let labels = [("rollout", upgrade.rollout.clone()), ("stage", stage.to_owned())];
                self.upgrade_nodes.get_or_create(&labels).inc();
            }
        }
    }

    /// Records the kernels that wait for images or rollouts, and for how long.
    pub fn kernels(&self, mut waiting: Vec<(String, Duration)>) {
        // Kernels that have waited for longest come first.
        waiting.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let _replacing = self.lock_out_scrapes();
        self.kernels_without_series.set(count(waiting.len().saturating_sub(MAX_KERNELS)));
        self.kernels.clear();
        for (kernel, wait) in waiting.into_iter().take(MAX_KERNELS) {
            self.kernels.get_or_create(&[("kernel", kernel)]).set(wait.as_secs_f64());
        }
    }

    /// Records the unfinished rollouts (image, target, state), and how long each has been unfinished. The definitions bound their
    /// number.
    pub fn rollouts<'a>(&self, unfinished: impl Iterator<Item = (&'a str, &'a str, RolloutWait, Duration)>) {
        let _replacing = self.lock_out_scrapes();
        self.rollouts.clear();
        for (image, target, state, wait) in unfinished {
            let state: &'static str = state.into();
            let labels =
                [("image", image.to_owned()), ("rollout", target.to_owned()), ("state", state.to_owned())];
            self.rollouts.get_or_create(&labels).set(wait.as_secs_f64());
        }
    }

    /// Records when certificates and keys expire, by purpose. There are a few for each host in `site.yaml`, and one for each key
    /// file that definitions name.
    pub fn certificates(&self, ends: impl IntoIterator<Item = (String, Timestamp)>) {
        let _replacing = self.lock_out_scrapes();
        self.certificates.clear();
        for (purpose, end) in ends {
            self.certificates.get_or_create(&[("certificate", purpose)]).set(end.as_duration().as_secs_f64());
        }
    }

    /// Records the end of a build.
    pub fn build(&self, outcome: BuildOutcomeLabel, took: Duration) {
        self.builds.get_or_create(&[label(outcome)]).inc();
        if outcome != BuildOutcomeLabel::Stopped {
            self.build_seconds.observe(took.as_secs_f64());
        }
    }

    /// Records the numbers of running and waiting builds.
    pub fn queue(&self, running: usize, waiting: usize) {
        self.builds_running.set(count(running));
        self.builds_waiting.set(count(waiting));
    }

    /// Records an attempted rewrite.
    pub fn rewrite(&self, strategy: Strategy, outcome: RewriteOutcomeLabel) {
        self.rewrites.get_or_create(&[strategy_label(strategy), label(outcome)]).inc();
    }

    /// Records the end of a reconcile.
    pub fn reconciled(&self, outcome: ReconcileOutcomeLabel, took: Duration) {
        self.reconciles.get_or_create(&[label(outcome)]).inc();
        self.reconcile_seconds.observe(took.as_secs_f64());
    }

    /// Records whether this farrier may write.
    pub fn leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// Records whether the definitions on disk are in use.
    pub fn configuration(&self, valid: bool) {
        self.configuration_valid.set(i64::from(valid));
    }

    /// Renders all metrics in the OpenMetrics text format.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry.lock())?;
        Ok(text)
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Creates and registers metrics.
struct Registrar(Registry);

impl Registrar {
    fn add<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.0.register(name, help, metric.clone());
        metric
    }

    fn seconds<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register_with_unit(name, help, Unit::Seconds, metric.clone());
        metric
    }
}

#[cfg(test)]
mod tests {
    use farrier_core::plan::{BuildActivity, Phase, Stage, UpgradeStage, testing::Fleet};

    use super::*;

    #[test]
    fn metrics_are_rendered_with_bounded_labels() {
        let metrics = Metrics::default();
        let stats = KubeStats::default();
        stats.requests.get_or_create(&[("verb", "list"), ("kind", "nodes"), ("outcome", "success")]).inc();
        metrics.add_api(&stats);
        metrics.build(BuildOutcomeLabel::Faulted, Duration::from_secs(7));
        metrics.rewrite(Strategy::PerKernel, RewriteOutcomeLabel::Made);
        metrics.reconciled(ReconcileOutcomeLabel::Unreachable, Duration::from_millis(30));
        metrics.queue(1, 4);
        metrics.leader(true);
        metrics.configuration(false);
        let waiting = (0..60).map(|n| (format!("debian 12 6.1.{n} amd64"), Duration::from_secs(n)));
        metrics.kernels(waiting.collect());
        let held = ("mofed", "DaemonSet a/b, container c", RolloutWait::Held, Duration::from_secs(90));
        metrics.rollouts([held].into_iter());
        metrics.certificates([(
            "caFile of r.example".to_owned(),
            Timestamp::from_second(1_900_000_000).unwrap(),
        )]);
        let text = metrics.text().unwrap();
        for line in [
            "# TYPE farrier_api_requests counter",
            "farrier_api_requests_total{verb=\"list\",kind=\"nodes\",outcome=\"success\"} 1",
            "farrier_builds_total{outcome=\"faulted\"} 1",
            "farrier_build_duration_seconds_bucket{le=\"15.0\"} 1",
            "farrier_rewrites_total{strategy=\"per-kernel\",outcome=\"made\"} 1",
            "farrier_reconciles_total{outcome=\"unreachable\"} 1",
            "farrier_builds_running 1",
            "farrier_builds_waiting 4",
            "farrier_leader 1",
            "farrier_configuration_valid 0",
            "farrier_kernel_unresolved_seconds{kernel=\"debian 12 6.1.59 amd64\"} 59.0",
            "farrier_kernels_unresolved_left_out 10",
            "farrier_rollout_unresolved_seconds{image=\"mofed\",rollout=\"DaemonSet a/b, container c\",state=\"held\"} 90.0",
            "farrier_certificate_expiry_timestamp_seconds{certificate=\"caFile of r.example\"} 1900000000.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(text.contains("farrier_build_info{version="), "{text}");
        assert_eq!(text.matches("farrier_kernel_unresolved_seconds{").count(), MAX_KERNELS);
        // Resolved kernels and rollouts have no time series.
        metrics.kernels(Vec::new());
        metrics.rollouts(std::iter::empty());
        assert!(!metrics.text().unwrap().contains("_unresolved_seconds{"));
    }

    #[test]
    fn images_are_counted_by_the_phase_that_the_page_shows() {
        let (metrics, plan) = (Metrics::default(), Fleet::new(&["6.1.0-47-amd64"]).plan());
        let building = BuildActivity { stage: Some(Stage::Compile), ..BuildActivity::default() };
        for (activity, phase) in [(None, "missing"), (Some(building), "building")] {
            let cells = plan.cells.iter().map(|planned| (planned.image.clone(), planned.target.clone()));
            let activity = cells.filter_map(|key| Some((key, activity.clone()?))).collect();
            metrics.plan(&plan, &activity);
            let (text, wanted) = (metrics.text().unwrap(), format!("phase=\"{phase}\"}} 1"));
            assert!(text.contains(&wanted), "{wanted} is not in\n{text}");
        }
    }

    #[test]
    fn a_scrape_sees_all_series_of_a_family() {
        let metrics = Metrics::default();
        let record = || {
            let waiting =
                (0..MAX_KERNELS).map(|n| (format!("debian 12 6.1.{n} amd64"), Duration::from_secs(1)));
            metrics.kernels(waiting.collect());
        };
        record();
        std::thread::scope(|scope| {
            let recording = scope.spawn(|| {
                for _ in 0..1000 {
                    record();
                }
            });
            while !recording.is_finished() {
                let text = metrics.text().unwrap();
                assert_eq!(text.matches("farrier_kernel_unresolved_seconds{").count(), MAX_KERNELS);
            }
        });
    }

    /// Every metric and label value that a dashboard or alert queries exists in farrier.
    #[test]
    fn dashboard_and_alerts_query_existing_metrics() {
        let metrics = Metrics::default();
        let stats = KubeStats::default();
        metrics.add_api(&stats);
        // A family without a sample is not rendered.
        stats.requests.get_or_create(&[("verb", "list"), ("kind", "nodes"), ("outcome", "success")]).inc();
        metrics
            .images
            .get_or_create(&[("image", "mofed".to_owned()), ("phase", "published".to_owned())])
            .inc();
        metrics
            .upgrade_nodes
            .get_or_create(&[("rollout", "drivers/mofed".to_owned()), ("stage", "begins".to_owned())])
            .inc();
        metrics.kernels(vec![("debian 12 6.1.0-1 amd64".to_owned(), Duration::from_secs(1))]);
        metrics.rollouts([("mofed", "tags", RolloutWait::Held, Duration::from_secs(1))].into_iter());
        metrics.certificates([("moduleSigning".to_owned(), Timestamp::UNIX_EPOCH)]);
        let text = metrics.text().unwrap();
        let families: Vec<(&str, &str)> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
        let is_there = |queried: &str| {
            families.iter().any(|(name, kind)| match *kind {
                "counter" => queried.strip_suffix("_total") == Some(name),
                "histogram" => queried.strip_suffix("_bucket") == Some(name),
                "info" => queried.strip_suffix("_info") == Some(name),
                _ => queried == *name,
            })
        };
        let values = |label: &str| -> Vec<&'static str> {
            match label {
                "phase" => Phase::VARIANTS.iter().map(|phase| phase.as_str()).collect(),
                "state" => RolloutWait::VARIANTS.iter().map(<&'static str>::from).collect(),
                "stage" => [UpgradeStage::Begins, UpgradeStage::UnderWay].map(Into::into).into(),
                _ => ReconcileOutcomeLabel::VARIANTS
                    .iter()
                    .map(<&'static str>::from)
                    .chain(RewriteOutcomeLabel::VARIANTS.iter().map(<&'static str>::from))
                    .chain(BuildOutcomeLabel::VARIANTS.iter().map(<&'static str>::from))
                    .collect(),
            }
        };
        let name = regex::Regex::new("farrier_[a-z_]+").unwrap();
        let value = regex::Regex::new(r#"(phase|outcome|state|stage)=~?\\?"([a-z|-]+)\\?""#).unwrap();
        for (file, text) in [
            ("dashboard", include_str!("../../../../../deploy/dashboard/farrier.json")),
            (
                "alerts",
                include_str!("../../../../../deploy/kustomize/components/alerts/prometheus-rule.yaml"),
            ),
        ] {
            let queried: Vec<&str> = name.find_iter(text).map(|found| found.as_str()).collect();
            assert!(queried.len() > 5, "{file} asks for {queried:?}");
            for queried in queried {
                assert!(is_there(queried), "{file} asks for {queried}, which is not in\n{families:?}");
            }
            for found in value.captures_iter(text) {
                for wanted in found[2].split('|') {
                    assert!(
                        values(&found[1]).contains(&wanted),
                        "{file}: no {} is called {wanted}",
                        &found[1]
                    );
                }
            }
        }
    }
}
