//! Checks the hosts that the definitions name: whether they answer, and how far their clocks are off.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use farrier_builder::services::BuildServices;
use farrier_core::{
    image::{Definitions, DriverImage},
    kernel::{KernelFamily, match_family},
    plan::Plan,
};
use farrier_inputs::{
    FetchError,
    upstream::{Answer, Upstream, ask, mirrors, registry, upstreams},
};
use farrier_net::NetError;
use farrier_store::registry::RegistryLocation;
use futures::{StreamExt as _, stream};
use jiff::SignedDuration;
use oci::error_chain;

use super::Diagnosis;
use crate::CliError;

/// Maximum number of concurrent requests.
const MAX_CONCURRENT_REQUESTS: usize = 16;
/// Clock skew that counts as a finding. A larger skew breaks logins: verifiers of tokens tolerate one minute
/// (distribution's `auth/token`, `Leeway`). Certificates and package lists that have just become valid are
/// refused at an even smaller skew by a machine whose clock is behind.
const SKEW: SignedDuration = SignedDuration::from_secs(60);

impl Diagnosis {
    /// Contacts the hosts that the site's own definitions name, and the hosts of definitions that the
    /// cluster's nodes need.
    pub(super) async fn check_network(&mut self, services: &BuildServices, plan: Option<&Plan>) {
        let net = services.fetcher.net();
        let rules = &services.definitions.site.mirrors;
        let mut targets: BTreeSet<Upstream> = rules.iter().flat_map(|rule| mirrors(net, rule)).collect();
        let (images, families) = in_use(&services.definitions, plan);
        targets.extend(images.into_iter().flat_map(|image| upstreams(net, image)));
        targets.extend(families.into_iter().flat_map(|family| upstreams(net, family)));
        let answers = stream::iter(&targets).map(|upstream| ask(&services.fetcher, upstream));
        let (mut hosts, mut forbidden, mut failed) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        for outcome in answers.buffer_unordered(MAX_CONCURRENT_REQUESTS).collect::<Vec<_>>().await {
            match outcome {
                Ok(answer) => {
                    hosts.insert(answer.host.clone());
                    self.note_clock(answer);
                }
                Err(FetchError::Net(NetError::Offline { host, .. })) => {
                    forbidden.insert(host);
                }
                // Report an unreachable host once, whatever the requests were for.
                Err(error) => {
                    failed.insert(error_chain(&error), error);
                }
            }
        }
        for error in failed.into_values() {
            let default_hint = "make sure that this machine can resolve and reach the host, or set a proxy (`proxy` in site.yaml) or a \
                             mirror (`mirrors` there)";
            self.add_error("network", &CliError::from(error), default_hint);
        }
        let list = |hosts: BTreeSet<String>| hosts.into_iter().collect::<Vec<_>>().join(", ");
        let skipped_hosts =
            (!forbidden.is_empty()).then(|| format!("skipped because of --offline: {}", list(forbidden)));
        let answered = (!hosts.is_empty()).then(|| format!("answered: {}", list(hosts)));
        let says: Vec<String> = answered.into_iter().chain(skipped_hosts).collect();
        if !says.is_empty() {
            self.add_ok("network", says.join("; "));
        }
        // An unreachable registry was reported before.
        if let RegistryLocation::Remote { host, .. } = &services.images.location
            && let Ok(answer) = ask(&services.fetcher, &registry(net, [host.as_str()])).await
        {
            self.note_clock(answer);
        }
    }

    fn note_clock(&mut self, Answer { host, clock_ahead }: Answer) {
        self.clocks.extend(clock_ahead.map(|ahead| (host, ahead)));
    }

    /// Compares this machine's clock with the other clocks.
    pub(super) fn compare_clocks(&mut self) {
        let clocks = std::mem::take(&mut self.clocks);
        let off: Vec<_> = clocks.iter().filter(|(_, ahead)| ahead.abs() >= SKEW).collect();
        let all_differ = off.len() == clocks.len() && clocks.len() > 1;
        for (host, ahead) in &off {
            let difference = SignedDuration::from_secs(ahead.abs().as_secs());
            let direction = if ahead.is_negative() { "behind" } else { "ahead of" };
            let hint = if all_differ {
                "all other clocks agree: set this machine's clock (timedatectl set-ntp true)"
            } else {
                "set the clock there, or this machine's if that is the wrong one (timedatectl set-ntp true): certificates, tokens \
                 and package lists are valid only from a certain time"
            };
            let problem = format!("the clock of {host} is {difference:#} {direction} this machine's");
            self.add_problem("clock", problem, hint);
        }
        if off.is_empty() && !clocks.is_empty() {
            let hosts: Vec<&str> = clocks.keys().map(String::as_str).collect();
            self.add_ok("clock", format!("less than a minute from the clock of {}", hosts.join(", ")));
        }
    }
}

/// Returns the definitions of the site's own directory and those that a node needs. Other built-in
/// definitions are omitted, because together they name the hosts of all distributions.
fn in_use<'a>(
    definitions: &'a Definitions,
    plan: Option<&Plan>,
) -> (Vec<&'a DriverImage>, Vec<&'a KernelFamily>) {
    let root = &definitions.root;
    let is_own = |file: &str| !root.as_os_str().is_empty() && root.join(Path::new(file)).exists();
    let cells = || plan.iter().flat_map(|plan| &plan.cells);
    let is_needed = |family: &KernelFamily| {
        cells().any(|cell| {
            let matching = match_family(&definitions.families, &cell.target);
            let planned = cell.outcome.cell().map(|cell| &cell.family);
            planned.or(matching.map(|family| &family.metadata.name)) == Some(&family.metadata.name)
        })
    };
    let images = definitions.images.values();
    let images =
        images.filter(|image| is_own("images") || cells().any(|cell| cell.image == image.metadata.name));
    let families = definitions.families.iter().filter(|family| is_own(&family.file) || is_needed(family));
    (images.collect(), families.collect())
}
