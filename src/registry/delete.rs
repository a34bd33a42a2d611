//! Adapter: deleting manifests (distribution-spec 1.1, "Deleting Manifests").

use reqwest::Method;

use super::{
    RegistryError, RemoteRegistry,
    auth::Access,
    http::{Call, Payload},
    name::RemoteName,
};
use crate::image::{Digest, Repository};

impl RemoteRegistry {
    /// Deletes a manifest by its digest, and so all its tags. `false` where there was none.
    pub(super) async fn delete(
        &self,
        repository: &Repository,
        digest: &Digest,
    ) -> Result<bool, RegistryError> {
        let name = &RemoteName::of(repository);
        let action = format!("delete manifest {digest} of {}", name.path);
        let call = Call {
            name,
            access: Access::Delete,
            action: &action,
            method: Method::DELETE,
            url: self.http.url(name, &format!("manifests/{digest}"), &action).await?,
            headers: Vec::new(),
            payload: Payload::None,
        };
        let response = self.http.send(&call).await?;
        match response.status().as_u16() {
            200..=204 => Ok(true),
            404 => Ok(false),
            status => match self.http.unexpected(&call, response).await {
                // The specification's status for this is 405; the code is the same everywhere.
                RegistryError::Protocol { host, action, reason }
                    if status == 405 || reason.contains("UNSUPPORTED") =>
                {
                    Err(RegistryError::NoDeletion { host, action })
                }
                error => Err(error),
            },
        }
    }
}
