//! Adapter: what a registry lists page by page.

use reqwest::{Response, header::LINK};
use serde::Deserialize;
use url::Url;

use super::{RegistryError, RemoteRegistry, error::excerpt, http::Call, name::RemoteName, remote::header};
use crate::{
    image::{Repository, Tag},
    oci::MAX_MANIFEST,
};

/// Tags asked for at once.
const TAGS_PAGE: usize = 1000;
/// Pages of tags; a registry that gives more goes in circles.
const MAX_TAG_PAGES: usize = 1000;

#[derive(Deserialize)]
struct TagList {
    tags: Option<Vec<String>>,
}

impl RemoteRegistry {
    pub(super) async fn tags_at(&self, repository: &Repository) -> Result<Vec<Tag>, RegistryError> {
        let name = &RemoteName::of(repository);
        let action = format!("list tags of {}", name.path);
        let first = self.http.url(name, &format!("tags/list?n={TAGS_PAGE}"), &action).await?;
        let mut next = Some(first);
        let mut tags = Vec::new();
        let mut pages = 0;
        while let Some(url) = next.take() {
            let call = Call::get(name, &action, url).accepting("application/json");
            let protocol = |reason: String| RegistryError::Protocol {
                host: name.host.clone(),
                action: action.clone(),
                reason,
            };
            let mut response = self.http.send(&call).await?;
            match response.status().as_u16() {
                200 => {}
                404 => return Ok(tags),
                _ => return Err(self.http.unexpected(&call, response).await),
            }
            pages += 1;
            if pages > MAX_TAG_PAGES {
                return Err(protocol(format!("more than {MAX_TAG_PAGES} pages")));
            }
            next = next_page(&response);
            let body = self.http.body(&call, &mut response, MAX_MANIFEST).await?;
            let list: TagList = serde_json::from_slice(&body)
                .map_err(|_| protocol(format!("not a list of tags: {}", excerpt(&body))))?;
            // What is no tag cannot be one that farrier looks for.
            tags.extend(list.tags.unwrap_or_default().iter().filter_map(|tag| tag.parse::<Tag>().ok()));
        }
        Ok(tags)
    }
}

/// The address of the next page (RFC 8288), on the same host only.
pub(super) fn next_page(response: &Response) -> Option<Url> {
    let link = header(response.headers(), &LINK)?;
    let (target, parameters) = link.strip_prefix('<')?.split_once('>')?;
    let next = parameters.replace('"', "").split(';').any(|p| p.trim() == "rel=next");
    let url = response.url().join(target).ok()?;
    (next && url.origin() == response.url().origin()).then_some(url)
}
