//! Registries that speak the OCI distribution protocol (distribution-spec 1.1; Docker's registry from version 2).

use std::{path::Path, sync::Arc};

use jiff::Timestamp;
use reqwest::{
    Method,
    header::{ACCEPT, CONTENT_TYPE, DATE, HeaderName},
};
use serde::{Deserialize, de::IgnoredAny};

use super::{
    auth::Scope,
    error::{RegistryError, Result},
    http::{Http, Payload, body, header, unexpected},
    mirrored::ReadLocations,
    referrers::RecentEntries,
    registry::{Access, BlobContent, BlobStream, Registry, StoredManifest, Upload},
    stream::{digest_of, save},
    transport::{RemoteName, next_chunk},
    upload::post_upload,
    versioned_tags::IsMovingTag,
};
use crate::{AnyManifest, Descriptor, Digest, Repository, Tag, Version, error_chain, media_type};

/// Header of registries that list referrers themselves (distribution spec, "Pushing Manifests with Subject").
const OCI_SUBJECT: HeaderName = HeaderName::from_static("oci-subject");
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");
/// Error code for a missing blob, or a missing manifest of an index, that a pushed manifest names (distribution-spec
/// 1.1, "Error Codes").
const BLOB_UNKNOWN: &str = "MANIFEST_BLOB_UNKNOWN";
/// Signed manifest in Docker's schema 1. Some registries send it although the client does not accept it.
const DOCKER_SCHEMA_1: &str = "application/vnd.docker.distribution.manifest.v1+prettyjws";
/// Page size of tag lists.
const TAGS_PAGE: usize = 1000;

/// Client for registries over HTTP. One client serves all hosts.
pub struct RemoteRegistry {
    description: String,
    pub(super) http: Http,
    /// Recently added referrers. The lock is held while a list of referrers is read and written back.
    pub(super) recent_entries: tokio::sync::Mutex<Option<RecentEntries>>,
    pub(super) locations: ReadLocations,
    /// Set if the registry of published images has immutable tags.
    pub(super) moving_tags: Option<IsMovingTag>,
}

impl RemoteRegistry {
    /// Creates the client without contacting any host. `description` is for messages.
    pub fn new(description: String, access: &(impl Access + Clone + 'static)) -> Self {
        let access: Arc<dyn Access> = Arc::new(access.clone());
        Self {
            description,
            http: Http::new(Arc::clone(&access)),
            recent_entries: tokio::sync::Mutex::default(),
            locations: ReadLocations { access, publish_prefix: None },
            moving_tags: None,
        }
    }

    /// Sets the location (`host[:port][/prefix]`) of published images. Repositories below it are never read from
    /// mirrors, because farrier pushes there directly.
    #[must_use]
    pub fn publishing_below(mut self, prefix: String) -> Self {
        self.locations.publish_prefix = Some(prefix);
        self
    }

    /// Never moves a tag below the location of published images. Where `is_moving` returns `true`, each content of a tag gets a
    /// separate tag. Referrers are found by their keep tags, without a list.
    #[must_use]
    pub fn with_immutable_tags(mut self, is_moving: IsMovingTag) -> Self {
        self.moving_tags = Some(is_moving);
        self
    }

    pub(super) async fn blob_exists(&self, name: &RemoteName, digest: &Digest, scope: Scope) -> Result<bool> {
        let action = format!("look for blob {digest} in {}", name.path);
        let call = self.http.call(Method::HEAD, name, scope, &format!("blobs/{digest}"), &action).await?;
        Ok(self.http.expect(&call, &[200, 404]).await?.status().as_u16() == 200)
    }

    pub(super) async fn manifest_at(
        &self,
        repository: &Repository,
        version: &Version,
    ) -> Result<Option<StoredManifest>> {
        let name = &RemoteName::of(repository);
        let action = format!("fetch manifest of {}{version}", name.path);
        let call = self.http.call(Method::GET, name, Scope::Pull, &manifest_path(version), &action).await?;
        let call = call.with(ACCEPT, media_type::MANIFESTS.join(", "));
        let mut response = self.http.expect(&call, &[200, 404]).await?;
        if response.status().as_u16() == 404 {
            return Ok(None);
        }
        let content_type = header(response.headers(), &CONTENT_TYPE)
            .and_then(|value| value.split(';').next())
            .map(|value| value.trim().to_owned());
        // The stated digest of such a manifest excludes its signatures, so that it does not match the bytes.
        if content_type.as_deref() == Some(DOCKER_SCHEMA_1) {
            return Err(call.protocol("an image in Docker's schema 1, which farrier does not read"));
        }
        let stated_digest = header(response.headers(), &CONTENT_DIGEST).and_then(|value| value.parse().ok());
        let bytes = body(&call, &mut response).await?;
        let digest = digest_of(&bytes, version.digest().or(stated_digest.as_ref()), &action)?;
        let media_type = media_type_of(&bytes, content_type.as_deref())
            .ok_or_else(|| call.unusable("not a manifest", &response, &bytes))?;
        Ok(Some(StoredManifest { digest, media_type, bytes }))
    }

    /// Whether the repository has the manifest.
    pub(super) async fn has_manifest(&self, repository: &Repository, version: &Version) -> Result<bool> {
        let name = &RemoteName::of(repository);
        let action = format!("look for manifest {}{version}", name.path);
        let call = self.http.call(Method::HEAD, name, Scope::Pull, &manifest_path(version), &action).await?;
        let call = call.with(ACCEPT, media_type::MANIFESTS.join(", "));
        Ok(self.http.expect(&call, &[200, 404]).await?.status().as_u16() == 200)
    }

    /// Pushes a manifest. Returns its digest, and its subject if the registry lists the manifest as a referrer of that subject.
    pub(super) async fn put_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<(Digest, Option<Digest>)> {
        let name = &RemoteName::of(repository);
        let action = format!("push manifest to {}{version}", name.path);
        let digest = digest_of(bytes, version.digest(), &action)?;
        let call = self.http.call(Method::PUT, name, Scope::Push, &manifest_path(version), &action).await?;
        let call = call.with(CONTENT_TYPE, media_type).sending(Payload::Bytes(bytes));
        let response = self.http.send(&call).await?;
        if !matches!(response.status().as_u16(), 200..=202) {
            return Err(match unexpected(&call, response).await {
                RegistryError::Protocol { host, action, reason } if reason.contains(BLOB_UNKNOWN) => {
                    RegistryError::Missed { host, action, reason }
                }
                error => error,
            });
        }
        let subject = header(response.headers(), &OCI_SUBJECT).and_then(|text| text.parse().ok());
        Ok((digest, subject))
    }

    pub(super) async fn tags_at(&self, repository: &Repository) -> Result<Vec<Tag>> {
        #[derive(Deserialize)]
        struct TagList {
            tags: Option<Vec<String>>,
        }
        let name = &RemoteName::of(repository);
        let action = format!("list tags of {}", name.path);
        let path = format!("tags/list?n={TAGS_PAGE}");
        let call = self.http.call(Method::GET, name, Scope::Pull, &path, &action).await?;
        let mut tags = Vec::new();
        let parse_page = |page: &[u8]| {
            let list: TagList = serde_json::from_slice(page).map_err(|_| "not a list of tags".to_owned())?;
            // Skip invalid tags, which nothing looks up.
            tags.extend(list.tags.unwrap_or_default().iter().filter_map(|tag| tag.parse::<Tag>().ok()));
            Ok(())
        };
        self.http.pages(call.with(ACCEPT, "application/json"), &[404], parse_page).await?;
        Ok(tags)
    }

    /// Requests a blob and streams its bytes.
    async fn blob_at(&self, repository: &Repository, digest: &Digest) -> Result<BlobStream> {
        let name = RemoteName::of(repository);
        let action = fetch_action(&name, digest);
        let path = format!("blobs/{digest}");
        let call = self.http.call(Method::GET, &name, Scope::Pull, &path, &action).await?;
        let response = self.http.expect(&call, &[200]).await?;
        let host = name.host;
        Ok(Box::pin(futures::stream::try_unfold(response, move |mut response| {
            let (host, action) = (host.clone(), action.clone());
            async move {
                let chunk = next_chunk(&mut response, &host, &action).await?;
                Ok(chunk.map(|chunk| (chunk, response)))
            }
        })))
    }
}

fn fetch_action(name: &RemoteName, digest: &Digest) -> String {
    format!("fetch blob {digest} of {}", name.path)
}

fn manifest_path(version: &Version) -> String {
    match version {
        Version::Tag(tag) => format!("manifests/{tag}"),
        Version::Digest(digest) => format!("manifests/{digest}"),
    }
}

#[async_trait::async_trait]
impl Registry for RemoteRegistry {
    fn describe(&self) -> String {
        self.description.clone()
    }

    async fn manifest(&self, repository: &Repository, version: &Version) -> Result<Option<StoredManifest>> {
        let version = &self.newest_version(repository, version).await?;
        let read = |location| async move { self.manifest_at(&location, version).await };
        self.locations.first_of(repository, read).await
    }

    async fn tags(&self, repository: &Repository) -> Result<Vec<Tag>> {
        let list = |location| async move { self.tags_at(&location).await };
        let tags = self.locations.first_list_of(repository, list).await?;
        Ok(self.without_versions(repository, tags))
    }

    async fn has_blob(&self, repository: &Repository, digest: &Digest) -> Result<bool> {
        let look_up = |location| async move {
            let found = self.blob_exists(&RemoteName::of(&location), digest, Scope::Pull).await?;
            Ok(found.then_some(()))
        };
        Ok(self.locations.first_of(repository, look_up).await?.is_some())
    }

    async fn push(
        &self,
        repository: &Repository,
        digest: &Digest,
        content: BlobContent<'_>,
    ) -> Result<Upload> {
        self.upload(repository, digest, content).await
    }

    async fn mount_blob(&self, repository: &Repository, digest: &Digest, from: &Repository) -> Result<bool> {
        let (name, source) = (&RemoteName::of(repository), RemoteName::of(from));
        if name.host != source.host {
            return Ok(false);
        }
        let action = format!("mount blob {digest} of {} in {}", source.path, name.path);
        let other_repository = Some(source.path.as_str()).filter(|source| *source != name.path);
        let mut call = self.http.call(Method::POST, name, Scope::Push, "blobs/uploads/", &action).await?;
        call.source = other_repository;
        call.url.query_pairs_mut().append_pair("mount", digest.as_str()).append_pair("from", &source.path);
        // 202 means that the registry has opened an upload session instead (distribution spec, "Mounting a blob"). Unused sessions
        // expire.
        match post_upload(&self.http, &call).await {
            Ok(response) => Ok(response.status().as_u16() == 201),
            // The client may lack read access to the other repository, the token server may issue no tokens for two repositories, or
            // the registry may refuse the name of the other repository (Harbor issue 22078).
            Err(error) if other_repository.is_some() && !error.is_transient() => {
                tracing::debug!(error = %error_chain(&error), "cross-repository mount failed, uploading the blob");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    async fn fetch_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        max_size: u64,
        to: &Path,
    ) -> Result<()> {
        let fetch = |location| async move {
            let action = fetch_action(&RemoteName::of(&location), digest);
            save(self.blob_at(&location, digest).await?, digest, max_size, to, action).await.map(Some)
        };
        self.locations.first_of(repository, fetch).await.map(drop)
    }

    async fn open_blob(&self, repository: &Repository, digest: &Digest) -> Result<BlobStream> {
        let open = |location| async move { self.blob_at(&location, digest).await.map(Some) };
        self.locations.first_of(repository, open).await?.ok_or_else(|| {
            let action = format!("fetch blob {digest} of {repository}");
            let reason = "access to the registry and to all mirrors is forbidden";
            RegistryError::protocol(RemoteName::of(repository).host, action, reason)
        })
    }

    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest> {
        let digest = self.put_version(repository, version, media_type, bytes).await?;
        if let (Version::Tag(_), Ok(AnyManifest::Index(index))) = (version, AnyManifest::parse(bytes)) {
            self.tag_images_of(repository, &index).await?;
        }
        Ok(digest)
    }

    async fn push_referrer(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest> {
        self.push_with_subject(repository, bytes).await
    }

    async fn referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        let list = |location| async move { self.list_referrers(&location, subject, artifact_type).await };
        self.locations.first_list_of(repository, list).await
    }

    async fn clock(&self, repository: &Repository) -> Result<Option<Timestamp>> {
        let name = &RemoteName::of(repository);
        let action = format!("ask for the time at {}", name.path);
        let call = self.http.call(Method::GET, name, Scope::Pull, "tags/list?n=1", &action).await?;
        let response = self.http.expect(&call, &[200, 404]).await?;
        let date = header(response.headers(), &DATE).and_then(|text| jiff::fmt::rfc2822::parse(text).ok());
        Ok(date.map(|date| date.timestamp()))
    }

    async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool> {
        let name = &RemoteName::of(repository);
        let action = format!("delete manifest {digest} of {}", name.path);
        let path = format!("manifests/{digest}");
        let call = self.http.call(Method::DELETE, name, Scope::Delete, &path, &action).await?;
        let response = self.http.send(&call).await?;
        match response.status().as_u16() {
            200..=204 => Ok(true),
            404 => Ok(false),
            status => match unexpected(&call, response).await {
                // The specification uses status 405. Some registries use the error code instead.
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

/// Returns the media type in the manifest, or else in the header. Returns `None` if the bytes are not a manifest in JSON.
fn media_type_of(bytes: &[u8], content_type: Option<&str>) -> Option<String> {
    // Other fields stay unparsed: as a `serde_json::Value`, four hostile mebibytes take a hundred times as much memory.
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Fields {
        schema_version: IgnoredAny,
        media_type: Option<String>,
    }
    let Fields { schema_version: IgnoredAny, media_type } = serde_json::from_slice(bytes).ok()?;
    let content_type = content_type.filter(|content_type| media_type::MANIFESTS.contains(content_type));
    Some(media_type.unwrap_or_else(|| content_type.unwrap_or(media_type::OCI_MANIFEST).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_types_of_manifests() {
        let found = |bytes: &str, content_type| media_type_of(bytes.as_bytes(), content_type);
        let (oci, docker) = (Some(media_type::OCI_INDEX), Some(media_type::DOCKER_MANIFEST));
        let declared = format!(r#"{{"mediaType":"{}","x":[{{}}],"schemaVersion":2}}"#, media_type::OCI_INDEX);
        assert_eq!(found(&declared, docker).as_deref(), oci);
        assert_eq!(found(r#"{"schemaVersion":2}"#, docker).as_deref(), docker);
        let unknown = found(r#"{"schemaVersion":2,"mediaType":null}"#, Some("text/html"));
        assert_eq!(unknown.as_deref(), Some(media_type::OCI_MANIFEST));
        for invalid in ["", "{}", r#"{"mediaType":"x"}"#, r#"{"schemaVersion":2,"mediaType":1}"#, "<html>"] {
            assert_eq!(found(invalid, docker), None, "{invalid}");
        }
    }
}
