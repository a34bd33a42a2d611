//! Adapter: remembers permanent failures by input hash, so that they are not tried again until an input
//! changes. They are kept in the cache: losing them costs one more attempt, nothing else.

use std::{collections::BTreeMap, path::PathBuf};

use super::pipeline::Built;
use crate::{
    cache::{Cache, CacheError},
    error_chain,
    image::InputHash,
    parts::{Parts, TargetError},
    plan::{Cell, Failure},
};

const KIND: &str = "failures";

/// The recorded failures of the given inputs; `None` where there is none.
pub(crate) fn known_failures(
    cache: &Cache,
    hashes: impl IntoIterator<Item = InputHash>,
) -> Result<BTreeMap<InputHash, Option<Failure>>, CacheError> {
    let look_up = |hash: InputHash| Ok((hash, cache.read_record(KIND, &hash.to_string())?));
    hashes.into_iter().map(look_up).collect()
}

/// Remembers a permanent failure, forgets it after a success.
pub(crate) fn record_outcome(
    parts: &Parts,
    cell: &Cell,
    outcome: &Result<Built, TargetError>,
) -> Result<(), CacheError> {
    let key = cell.input_hash.to_string();
    match outcome {
        Ok(_) => parts.cache.remove_record(KIND, &key),
        Err(error) if error.is_permanent() => {
            let image = parts.definitions.images.get(&cell.image).filter(|_| error.is_of_policy());
            let failure = Failure {
                at: jiff::Timestamp::now(),
                message: error_chain(error),
                permanent: true,
                under: image.map(|image| image.spec.check),
            };
            parts.cache.write_record(KIND, &key, &failure)
        }
        Err(_) => Ok(()),
    }
}

/// Where the log of a build goes.
pub(super) fn log_path(cache: &Cache, cell: &Cell) -> PathBuf {
    let (image, release, hash) = (&cell.image, &cell.target.release, cell.input_hash.short());
    cache.root().join("logs").join(format!("{image}-{release}-{hash}.log"))
}
