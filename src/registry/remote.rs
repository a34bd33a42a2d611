//! Adapter: a registry that speaks the OCI distribution protocol (distribution-spec 1.1; registries from
//! Docker's 2.x on).

use std::{path::Path, sync::Arc};

use bytes::Bytes;
use reqwest::{
    Method, Response,
    header::{CONTENT_TYPE, HeaderMap, HeaderName, LOCATION},
};
use serde::Deserialize;
use sha2::Digest as _;
use tokio::io::AsyncWriteExt as _;
use url::Url;

use super::{
    BlobSource, BlobStream, Registry, RegistryError, RegistryOptions, StoredManifest, Upload,
    auth::Access,
    error::excerpt,
    http::{Call, Http, Payload},
    mirrored::Places,
    name::RemoteName,
};
use crate::{
    image::{Digest, Repository, Tag, Version},
    oci::{Descriptor, MAX_MANIFEST, media_type},
};

/// A registry that lists referrers itself says so with this (distribution spec, "Pushing Manifests with
/// Subject").
const OCI_SUBJECT: HeaderName = HeaderName::from_static("oci-subject");

/// Registries over HTTP. One client serves every host.
pub struct RemoteRegistry {
    description: String,
    pub(super) http: Http,
    /// Held while a list of referrers is read and written back.
    pub(super) listing: tokio::sync::Mutex<()>,
    places: Places,
}

impl RemoteRegistry {
    /// Prepares the client; nothing is contacted. `description` is for people.
    pub fn new(description: String, options: &RegistryOptions) -> Self {
        Self {
            description,
            http: Http::new(options),
            listing: tokio::sync::Mutex::new(()),
            places: Places::new(options.net.clone()),
        }
    }

    /// The same, with a place (`host[:port][/prefix]`) below which nothing is looked for at mirrors: what farrier
    /// publishes is where it was put.
    #[must_use]
    pub fn publishing_below(self, place: String) -> Self {
        Self { places: self.places.but_not_below(place), ..self }
    }

    pub(super) async fn exists(
        &self,
        name: &RemoteName,
        digest: &Digest,
        access: Access,
    ) -> Result<bool, RegistryError> {
        let action = format!("look for blob {digest} in {}", name.path);
        let url = self.http.url(name, &format!("blobs/{digest}"), &action).await?;
        let call = Call {
            name,
            access,
            action: &action,
            method: Method::HEAD,
            url,
            headers: Vec::new(),
            payload: Payload::None,
        };
        let response = self.http.send(&call).await?;
        match response.status().as_u16() {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(self.http.unexpected(&call, response).await),
        }
    }

    pub(super) async fn manifest_at(
        &self,
        repository: &Repository,
        version: &Version,
    ) -> Result<Option<StoredManifest>, RegistryError> {
        let name = &RemoteName::of(repository);
        let action = format!("fetch manifest of {}{version}", name.path);
        let url = self.http.url(name, &format!("manifests/{}", reference(version)), &action).await?;
        let call = Call::get(name, &action, url).accepting(&media_type::MANIFESTS.join(", "));
        let mut response = self.http.send(&call).await?;
        match response.status().as_u16() {
            200 => {}
            404 => return Ok(None),
            _ => return Err(self.http.unexpected(&call, response).await),
        }
        let said = header(response.headers(), &CONTENT_TYPE)
            .and_then(|value| value.split(';').next())
            .map(|value| value.trim().to_owned());
        let promised = response
            .headers()
            .get("docker-content-digest")
            .and_then(|value| value.to_str().ok()?.parse::<Digest>().ok());
        let bytes = self.http.body(&call, &mut response, MAX_MANIFEST).await?;
        let digest = Digest::of(&bytes);
        let wanted = match version {
            Version::Digest(wanted) => Some(wanted.clone()),
            Version::Tag(_) => promised,
        };
        if let Some(wanted) = wanted.filter(|wanted| *wanted != digest) {
            return Err(RegistryError::Digest { action, wanted, found: digest });
        }
        let Some(media_type) = media_type_of(&bytes, said.as_deref()) else {
            let reason = format!("not a manifest: {}", excerpt(&bytes));
            return Err(RegistryError::Protocol { host: name.host.clone(), action, reason });
        };
        Ok(Some(StoredManifest { digest, media_type, bytes }))
    }

    async fn fetch_blob_at(
        &self,
        repository: &Repository,
        digest: &Digest,
        to: &Path,
    ) -> Result<(), RegistryError> {
        let name = &RemoteName::of(repository);
        let action = format!("fetch blob {digest} of {}", name.path);
        let url = self.http.url(name, &format!("blobs/{digest}"), &action).await?;
        let call = Call::get(name, &action, url);
        let mut response = self.http.send(&call).await?;
        if response.status().as_u16() != 200 {
            return Err(self.http.unexpected(&call, response).await);
        }
        let directory = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let writing = || RegistryError::io(format!("write {}", to.display()));
        let temporary = tempfile::NamedTempFile::new_in(directory).map_err(writing())?;
        let file = temporary.reopen().map_err(writing())?;
        let mut out = tokio::io::BufWriter::with_capacity(1 << 20, tokio::fs::File::from_std(file));
        let mut hash = sha2::Sha256::new();
        while let Some(chunk) = self.http.chunk(&call, &mut response).await? {
            hash.update(&chunk);
            out.write_all(&chunk).await.map_err(writing())?;
        }
        out.flush().await.map_err(writing())?;
        let found = Digest::from_sha256(&hash.finalize().into());
        if found != *digest {
            return Err(RegistryError::Digest { action, wanted: digest.clone(), found });
        }
        temporary.persist(to).map_err(|error| writing()(error.error))?;
        Ok(())
    }

    /// Puts a manifest. The second digest is that of the subject which the registry lists it under.
    pub(super) async fn put_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<(Digest, Option<Digest>), RegistryError> {
        let name = &RemoteName::of(repository);
        let action = format!("push manifest to {}{version}", name.path);
        let digest = Digest::of(bytes);
        if let Version::Digest(wanted) = version
            && *wanted != digest
        {
            return Err(RegistryError::Digest { action, wanted: wanted.clone(), found: digest });
        }
        let url = self.http.url(name, &format!("manifests/{}", reference(version)), &action).await?;
        let call = Call {
            name,
            access: Access::Push,
            action: &action,
            method: Method::PUT,
            url,
            headers: vec![(CONTENT_TYPE, media_type.to_owned())],
            payload: Payload::Bytes(Bytes::copy_from_slice(bytes)),
        };
        let response = self.http.send(&call).await?;
        let subject = header(response.headers(), &OCI_SUBJECT).and_then(|text| text.parse().ok());
        match response.status().as_u16() {
            200..=202 => Ok((digest, subject)),
            _ => Err(self.http.unexpected(&call, response).await),
        }
    }
}

/// Where the upload goes: absolute or relative, with or without a query.
pub(super) fn location(call: &Call<'_>, response: &Response) -> Result<Url, RegistryError> {
    let protocol = |reason: &str| RegistryError::Protocol {
        host: call.name.host.clone(),
        action: call.action.to_owned(),
        reason: reason.to_owned(),
    };
    let text = header(response.headers(), &LOCATION).ok_or_else(|| protocol("202 without a location"))?;
    let url = response.url().join(text).map_err(|_| protocol("its upload location is no address"))?;
    match (call.url.scheme(), url.scheme()) {
        (_, "https") | ("http", "http") => Ok(url),
        _ => Err(protocol("its upload location is not reached through https")),
    }
}

pub(super) fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

#[async_trait::async_trait]
impl Registry for RemoteRegistry {
    fn describe(&self) -> String {
        self.description.clone()
    }

    async fn manifest(
        &self,
        repository: &Repository,
        version: &Version,
    ) -> Result<Option<StoredManifest>, RegistryError> {
        self.places.first_of(repository, |place| async move { self.manifest_at(&place, version).await }).await
    }

    async fn tags(&self, repository: &Repository) -> Result<Vec<Tag>, RegistryError> {
        self.places.first_list_of(repository, |place| async move { self.tags_at(&place).await }).await
    }

    async fn has_blob(&self, repository: &Repository, digest: &Digest) -> Result<bool, RegistryError> {
        let ask = |place| async move {
            let found = self.exists(&RemoteName::of(&place), digest, Access::Pull).await?;
            Ok(found.then_some(()))
        };
        Ok(self.places.first_of(repository, ask).await?.is_some())
    }

    async fn push_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        file: &Path,
    ) -> Result<Upload, RegistryError> {
        self.upload_file(repository, digest, file).await
    }

    async fn push_blob_from(
        &self,
        repository: &Repository,
        digest: &Digest,
        source: Arc<dyn BlobSource>,
    ) -> Result<Upload, RegistryError> {
        let size = source.size();
        self.upload_whole(repository, digest, size, Payload::Source(source)).await
    }

    async fn mount_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        from: &Repository,
    ) -> Result<bool, RegistryError> {
        let (name, source) = (&RemoteName::of(repository), RemoteName::of(from));
        if name.host != source.host {
            return Ok(false);
        }
        let action = format!("mount blob {digest} of {} in {}", source.path, name.path);
        let mut url = self.http.url(name, "blobs/uploads/", &action).await?;
        url.query_pairs_mut().append_pair("mount", digest.as_str()).append_pair("from", &source.path);
        let call = Call {
            name,
            access: Access::Push,
            action: &action,
            method: Method::POST,
            url,
            headers: Vec::new(),
            payload: Payload::None,
        };
        let response = self.http.send(&call).await?;
        match response.status().as_u16() {
            201 => Ok(true),
            // An upload was begun instead (distribution spec, "Mounting a blob"); registries drop it in time.
            202 => Ok(false),
            _ => Err(self.http.unexpected(&call, response).await),
        }
    }

    async fn push_bytes(&self, repository: &Repository, bytes: &[u8]) -> Result<Upload, RegistryError> {
        let payload = Payload::Bytes(Bytes::copy_from_slice(bytes));
        self.upload_whole(repository, &Digest::of(bytes), bytes.len() as u64, payload).await
    }

    async fn fetch_blob(
        &self,
        repository: &Repository,
        digest: &Digest,
        to: &Path,
    ) -> Result<(), RegistryError> {
        let fetch = |place| async move { self.fetch_blob_at(&place, digest, to).await.map(Some) };
        self.places.first_of(repository, fetch).await.map(|_| ())
    }

    async fn open_blob(&self, repository: &Repository, digest: &Digest) -> Result<BlobStream, RegistryError> {
        let open = |place| async move { self.stream_blob(&place, digest).await.map(Some) };
        self.places.first_of(repository, open).await?.ok_or_else(|| RegistryError::Protocol {
            host: RemoteName::of(repository).host,
            action: format!("fetch blob {digest} of {repository}"),
            reason: "no place to look for it".to_owned(),
        })
    }

    async fn push_manifest(
        &self,
        repository: &Repository,
        version: &Version,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest, RegistryError> {
        self.put_manifest(repository, version, media_type, bytes).await.map(|(digest, _)| digest)
    }

    async fn push_referrer(&self, repository: &Repository, bytes: &[u8]) -> Result<Digest, RegistryError> {
        self.push_with_subject(repository, bytes).await
    }

    async fn referrers(
        &self,
        repository: &Repository,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>, RegistryError> {
        let list = |place| async move { self.list_referrers(&place, subject, artifact_type).await };
        self.places.first_list_of(repository, list).await
    }

    async fn delete_manifest(&self, repository: &Repository, digest: &Digest) -> Result<bool, RegistryError> {
        self.delete(repository, digest).await
    }
}

fn reference(version: &Version) -> &str {
    match version {
        Version::Tag(tag) => tag.as_str(),
        Version::Digest(digest) => digest.as_str(),
    }
}

/// A manifest's own word, else the header's; `None` when the bytes are no JSON object.
fn media_type_of(bytes: &[u8], said: Option<&str>) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape {
        media_type: Option<String>,
        #[serde(rename = "schemaVersion")]
        _schema_version: serde::de::IgnoredAny,
    }
    let shape: Shape = serde_json::from_slice(bytes).ok()?;
    let said = said.filter(|said| media_type::MANIFESTS.contains(said)).map(str::to_owned);
    Some(shape.media_type.or(said).unwrap_or_else(|| media_type::OCI_MANIFEST.to_owned()))
}
