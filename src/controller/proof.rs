//! Adapter: guarantee 1 once more, directly before a write: what a change points at is in the registry.
//!
//! That its check passed for the kernel of every node that the change reaches was decided from the same digest, and
//! what a digest names cannot change.

use super::{Controller, TargetError};
use crate::plan::Change;

impl Controller {
    /// Looks every image up that the change points at, by digest.
    pub(super) async fn prove(&self, change: &Change) -> Result<(), TargetError> {
        for reference in change.proof() {
            let found = self.registry.manifest(&reference.repository, &reference.version).await?;
            if found.is_none() {
                return Err(TargetError::Vanished { reference: reference.to_string() });
            }
        }
        Ok(())
    }
}
