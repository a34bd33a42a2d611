//! Adapter: downloads over HTTP, verified while they arrive.

use std::path::PathBuf;

use futures::StreamExt;
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt;
use url::Url;

use super::{FetchError, Fetcher, io_error};

impl Fetcher {
    /// The file at an address, in the cache under its sha256 (64 lower-case hexadecimal digits).
    pub(super) async fn download(&self, url: &str, sha256: &str) -> Result<PathBuf, FetchError> {
        let url = parse(url)?;
        // The name matters for a file that is no archive: the source is then a tree of that one file.
        let last = url.path_segments().and_then(|mut parts| parts.next_back()).unwrap_or_default();
        let plain = |c: &char| c.is_ascii_alphanumeric() || "._+~-".contains(*c);
        let name: String = last.chars().filter(plain).take(200).collect();
        let name = if name.trim_matches('.').is_empty() { "download".to_owned() } else { name };
        let make = |dir: PathBuf| self.transfer(&url, sha256, dir.join(&name));
        let place = self.cache.get_or_make("downloads", sha256, make).await?;
        // Another address may have given the same content another name.
        let mut names = super::source::names_in(&place)?.into_iter();
        Ok(place.join(names.next().unwrap_or_else(|| name.into())))
    }

    async fn transfer(&self, url: &Url, wanted: &str, path: PathBuf) -> Result<(), FetchError> {
        let shown = shown(url);
        let failed = |e: reqwest::Error| FetchError::Transfer { url: shown.clone(), source: e.without_url() };
        let client = self.client().map_err(failed)?;
        let response = client.get(url.clone()).send().await.map_err(failed)?;
        if !response.status().is_success() {
            return Err(FetchError::Status { url: shown, status: response.status().as_u16() });
        }
        let announced = response.content_length();
        let mut file = tokio::fs::File::create(&path).await.map_err(io_error("create", &path))?;
        let (mut hasher, mut got, mut broken) = (Sha256::new(), 0, None);
        let mut chunks = response.bytes_stream();
        while let Some(chunk) = chunks.next().await {
            match chunk {
                Ok(chunk) => {
                    hasher.update(&chunk);
                    got += chunk.len() as u64;
                    file.write_all(&chunk).await.map_err(io_error("write", &path))?;
                }
                Err(e) => {
                    broken = Some(e);
                    break;
                }
            }
        }
        match (announced, broken) {
            (Some(announced), _) if got < announced => {
                return Err(FetchError::Truncated { url: shown, got, wanted: announced });
            }
            (_, Some(e)) => return Err(failed(e)),
            _ => {}
        }
        // The last write may still be under way, and fail on a full disk.
        file.flush().await.map_err(io_error("write", &path))?;
        let found = hex::encode(hasher.finalize());
        if found == wanted {
            Ok(())
        } else {
            Err(FetchError::Checksum { what: shown, found, wanted: wanted.to_owned() })
        }
    }

    /// Made at the first download: reading the system's certificates takes longer than a warm pass may.
    fn client(&self) -> Result<reqwest::Client, reqwest::Error> {
        if let Some(client) = self.http.get() {
            return Ok(client.clone());
        }
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Losing the race to another thread is as good as winning it.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let client = reqwest::Client::builder()
            .user_agent(concat!("farrier/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(std::time::Duration::from_secs(30))
            .read_timeout(std::time::Duration::from_mins(1))
            .build()?;
        Ok(self.http.get_or_init(|| client).clone())
    }
}

fn parse(text: &str) -> Result<Url, FetchError> {
    let wrong = |why| FetchError::Value {
        what: "the address of a source",
        value: text.chars().take(200).collect(),
        why,
    };
    let url = Url::parse(text).map_err(|_| wrong("it is not an address"))?;
    if matches!(url.scheme(), "http" | "https") {
        Ok(url)
    } else {
        Err(wrong("only http and https are possible"))
    }
}

/// The address without its password.
fn shown(url: &Url) -> String {
    let mut url = url.clone();
    if url.password().is_some() {
        // Cannot fail for an address that has one.
        let _ = url.set_password(Some("***"));
    }
    url.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(
            shown(&parse("https://me:secret@host.test/x.tgz").unwrap()),
            "https://me:***@host.test/x.tgz"
        );
        for text in ["", "file:///etc/passwd", "host.test/x", "ftp://host.test/x"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
