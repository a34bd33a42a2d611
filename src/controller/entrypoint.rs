//! Adapter: the `driver-entrypoint` that images get: read once, so that the plan's digest and the image's layer are
//! of the same bytes whatever becomes of the file meanwhile.

use std::{path::PathBuf, sync::Arc};

use tokio::sync::OnceCell;

use super::{TargetError, build::blocking};
use crate::{boot, kernel::Architecture, oci::Layer, payload::Entrypoint};

/// The binary and its layer, each made when the first image asks for it, and once for all clones.
#[derive(Clone, Debug, Default)]
pub struct LazyEntrypoint {
    given: Option<PathBuf>,
    binary: Arc<OnceCell<Arc<Entrypoint>>>,
    layer: Arc<OnceCell<(Layer, Vec<u8>)>>,
}

impl LazyEntrypoint {
    /// The given file; without one, that beside farrier's own program.
    pub fn new(given: Option<PathBuf>) -> Self {
        Self { given, ..Self::default() }
    }

    /// The binary, read now if it was not.
    pub(super) async fn binary(&self) -> Result<&Arc<Entrypoint>, TargetError> {
        let read = || async {
            let path = boot::find_entrypoint(self.given.as_deref())?;
            blocking(move || Ok(Arc::new(Entrypoint::read(&path)?))).await
        };
        self.binary.get_or_try_init(read).await
    }

    /// Writes the layer for an image of the architecture.
    pub(super) async fn write_layer(&self, arch: Architecture, out: PathBuf) -> Result<Layer, TargetError> {
        let binary = self.binary().await?;
        binary.runs_on(arch)?;
        let binary = Arc::clone(binary);
        let made = self.layer.get_or_try_init(|| blocking(move || Ok(binary.layer()?)));
        let (layer, bytes) = made.await?;
        tokio::fs::write(&out, bytes).await.map_err(|source| TargetError::Input { path: out, source })?;
        Ok(layer.clone())
    }
}
