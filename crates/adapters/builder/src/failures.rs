//! Records failures and attempts, by input hash, in the cache.
//!
//! - A recorded permanent failure stops retries until an input changes.
//! - A recorded attempt without an outcome shows that farrier was killed during the build, and limits further attempts.
//!
//! If the records are lost, farrier attempts a failing build again.

use std::{collections::BTreeMap, time::Instant};

use farrier_core::{
    image::InputHash,
    plan::{Activity, BuildActivity, Cell, Failure, Plan},
};
use farrier_local::{
    cache::{Cache, CacheError},
    run_notes::{Note, Notes},
};
use jiff::Timestamp;
use oci::error_chain;

use super::pipeline::{BuildOptions, Built, build};
use crate::{
    images::{build_times, record_build},
    services::{BuildServices, Result, Stage},
};

const KIND: &str = "failures";

/// Builds one cell or reuses a published payload, and records the attempt and its outcome.
pub async fn attempt(
    services: &BuildServices,
    cell: &Cell,
    options: BuildOptions,
) -> Result<Result<Built>, CacheError> {
    // Cache entries that this build uses are released when it ends.
    let services = &services.in_use();
    services.make_room().await;
    let began = Instant::now();
    if let Some(usual) = build_times(&services.images).await.usual_duration(&cell.image, cell.target.arch) {
        services.process.reporter.usual_duration(&cell.subject(), usual);
    }
    let attempts = Attempts::in_cache(&services.cache);
    let (outcome, note) = match attempts.begin(cell.input_hash) {
        Ok(note) => (Box::pin(build(services, cell, options)).await, Some(note)),
        Err(error) => (Err(error.into()), None),
    };
    record_outcome(services, cell, &outcome)?;
    // The duration of a reuse would not predict the duration of a compilation.
    if options.push && outcome.as_ref().is_ok_and(|built| built.reused_from.is_none()) {
        record_build(services, cell, began.elapsed()).await;
    }
    if let Some(note) = note {
        attempts.end(cell.input_hash, note);
    }
    Ok(outcome)
}

/// Attempts at builds. An attempt is recorded at the start and removed once the outcome is recorded. An attempt that
/// remains belongs to a farrier process that was killed, perhaps because the build's compiler exhausted the memory.
pub struct Attempts(Notes);

impl Attempts {
    /// Attempts recorded in a cache.
    pub fn in_cache(cache: &Cache) -> Self {
        Self(Notes::in_directory(cache.root().join("attempts")))
    }

    /// Records the start of an attempt.
    pub fn begin(&self, inputs: InputHash) -> std::io::Result<Note> {
        self.0.begin(&format!("{inputs}.{:016x}", fastrand::u64(..)))
    }

    /// Removes an attempt that had an outcome, along with abandoned attempts at the same inputs.
    fn end(&self, inputs: InputHash, note: Note) {
        note.remove();
        self.remove_abandoned(inputs);
    }

    /// Removes attempts at these inputs that ended without an outcome.
    fn remove_abandoned(&self, inputs: InputHash) {
        for (_, note) in self.0.abandoned().into_iter().filter(|(name, _)| inputs_of(name) == Some(inputs)) {
            note.remove();
        }
    }

    /// Returns the start times of running attempts, by inputs.
    fn start_times(&self) -> BTreeMap<InputHash, Timestamp> {
        let start_time = |(name, note): (String, fs_err::File)| {
            let modified = note.metadata().and_then(|metadata| metadata.modified()).ok()?;
            Some((inputs_of(&name)?, modified.try_into().ok()?))
        };
        self.0.running().into_iter().flatten().filter_map(start_time).collect()
    }

    /// Returns the number of attempts that ended without an outcome, by inputs.
    pub fn without_outcome(&self) -> BTreeMap<InputHash, u32> {
        let mut counts = BTreeMap::new();
        for inputs in self.0.abandoned().iter().filter_map(|(name, _)| inputs_of(name)) {
            *counts.entry(inputs).or_default() += 1;
        }
        counts
    }
}

/// Returns the activity of a plan's builds: which builds other processes on this machine run, and how long each build
/// usually takes. For commands that run no controller loop.
pub async fn builds_elsewhere(services: &BuildServices, plan: &Plan) -> Activity {
    let mut builds = plan.builds().peekable();
    if builds.peek().is_none() {
        return Activity::new();
    }
    let running = Attempts::in_cache(&services.cache).start_times();
    let times = build_times(&services.images).await;
    let activity = |cell: &std::sync::Arc<Cell>| {
        let began = running.get(&cell.input_hash).copied();
        let usual = times.usual_duration(&cell.image, cell.target.arch);
        let stage = began.map(|_| Stage::Elsewhere);
        let build = BuildActivity { stage, since: began, began, usual, ..BuildActivity::default() };
        ((cell.image.clone(), cell.target.clone()), build)
    };
    builds.map(activity).collect()
}

/// Parses the input hash of an attempt from the name of its note.
fn inputs_of(name: &str) -> Option<InputHash> {
    name.split_once('.')?.0.parse().ok()
}

/// Returns the recorded failures of the given inputs; `None` for inputs without one.
pub fn known_failures(
    cache: &Cache,
    hashes: impl IntoIterator<Item = InputHash>,
) -> Result<BTreeMap<InputHash, Option<Failure>>, CacheError> {
    let look_up = |hash: InputHash| Ok((hash, cache.read_record(KIND, &hash.to_string())?));
    hashes.into_iter().map(look_up).collect()
}

/// Removes the failure recorded for these inputs, and their attempts without an outcome.
pub fn forget_failure(cache: &Cache, inputs: InputHash) -> Result<(), CacheError> {
    Attempts::in_cache(cache).remove_abandoned(inputs);
    cache.remove_record(KIND, &inputs.to_string())
}

/// Records a permanent failure; removes the record after a success.
pub(super) fn record_outcome(
    services: &BuildServices,
    cell: &Cell,
    outcome: &Result<Built>,
) -> Result<(), CacheError> {
    let key = cell.input_hash.to_string();
    match outcome {
        Ok(_) => services.cache.remove_record(KIND, &key),
        Err(error) if error.is_permanent() => {
            let spec = services.definitions.images.get(&cell.image).map(|image| &image.spec);
            let failure = Failure {
                at: jiff::Timestamp::now(),
                message: error_chain(error),
                permanent: true,
                under: spec.filter(|_| error.is_caused_by_policy()).map(|spec| spec.check),
                under_site: error.is_caused_by_policy().then_some(services.definitions.site.check),
                memory: spec.filter(|_| error.is_caused_by_limit()).map(|spec| spec.build.memory),
                deadline: spec.filter(|_| error.is_caused_by_deadline()).map(|spec| spec.build.deadline),
            };
            services.cache.write_record(KIND, &key, &failure)
        }
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use farrier_core::image::FieldHasher;

    use super::*;

    #[test]
    fn attempts_without_an_outcome_are_counted_until_there_is_one() {
        let directory = tempfile::tempdir().unwrap();
        let attempts = Attempts::in_cache(&Cache::open(directory.path().to_owned()).unwrap());
        let [inputs, others] = ["1", "2"].map(|format| FieldHasher::new(format).finish());
        assert!(attempts.without_outcome().is_empty());
        for killed in [inputs, inputs, others] {
            drop(attempts.begin(killed).unwrap());
        }
        let running = attempts.begin(inputs).unwrap();
        assert_eq!(attempts.without_outcome(), [(inputs, 2), (others, 1)].into());
        let began = attempts.start_times();
        assert_eq!(began.keys().collect::<Vec<_>>(), [&inputs]);
        assert!(Timestamp::now().duration_since(began[&inputs]).as_secs() < 60, "{began:?}");
        attempts.end(inputs, running);
        assert!(attempts.start_times().is_empty());
        assert_eq!(attempts.without_outcome(), [(others, 1)].into());
    }
}
