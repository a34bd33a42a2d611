//! Downloads over HTTP, verified as they arrive.

use std::{
    io,
    path::{Path, PathBuf},
};

use farrier_core::image::checked::Download;
use farrier_local::cache::has_content;
use farrier_net::{AccessPurpose, Net, NetError};
use farrier_store::registry::{DiskLimit, Pace, Pacer, TooSlow};
use fs_err::tokio::File;
use oci::error_chain;
use reqwest::Method;
use tokio::io::AsyncWriteExt;
use url::Url;

use super::{FetchError, Fetcher, Result, checksum::Checksum, files};

/// Maximum size of a download in bytes, ten times the size of the largest driver source.
pub(super) const MAX_DOWNLOAD_SIZE: u64 = 8 << 30;
/// Kind of the cache entries that hold downloads.
pub(super) const DOWNLOADS: &str = "downloads";

/// Downloads a file from its address or a mirror, into the cache under its SHA-256 (64 lower-case hexadecimal digits). `what`
/// names the download in messages.
pub(super) async fn download(fetcher: &Fetcher, what: &str, url: &Download, sha256: &str) -> Result<PathBuf> {
    let (urls, checksum) = (fetcher.net.url_candidates(&parse(url)?), Checksum::sha256(sha256));
    fetch(fetcher, what, &name_of(url)?, &urls, &checksum).await
}

/// Downloads a file from one of these addresses, into the cache under its checksum.
pub(super) async fn fetch_from(
    fetcher: &Fetcher,
    what: &str,
    urls: &[Url],
    checksum: &Checksum,
) -> Result<PathBuf> {
    let name = urls.first().map_or_else(|| "download".to_owned(), plain_name);
    fetch(fetcher, what, &name, urls, checksum).await
}

async fn fetch(
    fetcher: &Fetcher,
    what: &str,
    name: &str,
    urls: &[Url],
    checksum: &Checksum,
) -> Result<PathBuf> {
    let make = |dir: PathBuf| async move {
        download_from_any(&fetcher.net, what, urls, Some(checksum), MAX_DOWNLOAD_SIZE, &dir.join(name))
            .await
            .map(drop)
    };
    let entry = fetcher.cache.get_or_make_intact(DOWNLOADS, checksum.hex(), has_content, make).await?;
    // The same content from another address may be stored under another name.
    let mut names = files::names_in(&entry)?.into_iter();
    Ok(entry.join(names.next().unwrap_or_else(|| name.into())))
}

/// Returns the file name of a download. The name matters if the file is not an archive: the source is then a tree with that one
/// file.
pub(super) fn name_of(url: &Download) -> Result<String> {
    Ok(plain_name(&parse(url)?))
}

/// Returns the last path segment of an address, restricted to plain characters.
pub(super) fn plain_name(url: &Url) -> String {
    let last = url.path_segments().and_then(|mut parts| parts.next_back()).unwrap_or_default();
    let plain = |c: &char| c.is_ascii_alphanumeric() || "._+~-".contains(*c);
    let name: String = last.chars().filter(plain).take(200).collect();
    if name.trim_matches('.').is_empty() { "download".to_owned() } else { name }
}

/// Downloads a file from the first of these addresses that works, and returns its checksum.
pub(super) async fn download_from_any(
    net: &Net,
    what: &str,
    urls: &[Url],
    expected: Option<&Checksum>,
    max_size: u64,
    path: &Path,
) -> Result<Checksum> {
    let mut outcome = Err(FetchError::Status(what.to_owned(), 404));
    for url in urls {
        outcome = transfer(net, what, url, expected, max_size, path.to_owned()).await;
        match &outcome {
            Ok(_) => break,
            // A local I/O error would recur with every mirror, except for a file that exceeds its size limit.
            Err(FetchError::Io(error)) if error.kind() != io::ErrorKind::FileTooLarge => break,
            Err(error) if urls.last() != Some(url) => {
                tracing::warn!(mirror = %url, error = %error_chain(error), "mirror failed, trying the next source");
            }
            Err(_) => {}
        }
    }
    outcome
}

/// Downloads at most `max_size` bytes from an address to a file, and returns their checksum.
pub(super) async fn transfer(
    net: &Net,
    what: &str,
    url: &Url,
    expected: Option<&Checksum>,
    max_size: u64,
    path: PathBuf,
) -> Result<Checksum> {
    let label = url.to_string();
    let broken = |source: reqwest::Error| FetchError::Transfer(label.clone(), Box::new(source.without_url()));
    let too_slow = |slow: TooSlow| {
        let error = io::Error::new(io::ErrorKind::TimedOut, slow);
        FetchError::Transfer(label.clone(), Box::new(error))
    };
    let pace = Pace::default();
    let request = Net::request(Method::GET, url.clone());
    let purpose = AccessPurpose::of(what);
    let result = Pacer::new(pace).wait(net.execute(request, &purpose)).await.map_err(too_slow)?;
    let mut response = result.map_err(|error| match error {
        NetError::Http(_, source) => broken(source),
        other => FetchError::Net(other),
    })?;
    if !response.status().is_success() {
        return Err(FetchError::Status(label, response.status().as_u16()));
    }
    let announced = response.content_length();
    let mut disk_limit = DiskLimit::for_download(path.parent().unwrap_or(&path), announced, max_size)?;
    let mut file = File::create(&path).await?;
    let hasher = expected.map_or_else(|| Checksum::sha256("").hasher(), Checksum::hasher);
    let (mut hasher, mut received, mut fault) = (hasher, 0, None);
    let mut pacer = Pacer::new(pace);
    loop {
        match pacer.wait(response.chunk()).await.map_err(too_slow)? {
            Ok(Some(chunk)) => {
                pacer.moved(chunk.len() as u64);
                hasher.update(&chunk);
                received += chunk.len() as u64;
                disk_limit.take(chunk.len() as u64)?;
                file.write_all(&chunk).await?;
            }
            Ok(None) => break,
            Err(error) => {
                fault = Some(error);
                break;
            }
        }
    }
    match (announced, fault) {
        (Some(announced), _) if received < announced => {
            return Err(FetchError::Truncated { url: label, received, announced });
        }
        (_, Some(error)) => return Err(broken(error)),
        _ => {}
    }
    // The last write may still be in progress, and may fail on a full disk.
    file.flush().await?;
    let actual = hasher.finish();
    match expected {
        Some(expected) if actual != *expected => {
            let (actual, expected) = (actual.to_string(), expected.to_string());
            Err(FetchError::Checksum { what: label, actual, expected })
        }
        _ => Ok(actual),
    }
}

/// Whether an address is a placeholder for the site's own address, which `mirrors` of site.yaml name: names below `invalid` never
/// resolve (RFC 6761).
pub(super) fn is_placeholder(url: &Url) -> bool {
    url.host_str().is_some_and(|host| host.ends_with(".invalid"))
}

/// Parses the address of a source in a definition.
pub(super) fn parse(text: &str) -> Result<Url> {
    Url::parse(text).map_err(|_| FetchError::value("the address of a source", text, "it is not an address"))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// A server that sends one byte every five seconds, forever, does not block the download forever.
    #[tokio::test(start_paused = true)]
    async fn a_download_that_crawls_is_given_up() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/x.tgz", listener.local_addr().unwrap());
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            // A response before the request is not valid HTTP.
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n").await.unwrap();
            while stream.write_all(b"x").await.is_ok() {
                tokio::time::sleep(std::time::Duration::from_secs(5)).await;
            }
        });
        let (directory, url) = (tempfile::tempdir().unwrap(), url.parse().unwrap());
        let to = directory.path().join("x");
        let error = transfer(&Net::default(), "x", &url, None, MAX_DOWNLOAD_SIZE, to).await.unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        let said = error_chain(&error);
        assert!(said.ends_with("fewer than 262144 bytes moved in 60 seconds"), "{said}");
    }

    #[test]
    fn addresses() {
        let address = "https://host.test/x.tgz";
        assert_eq!(parse(address).unwrap().as_str(), address);
        for text in
            ["", "file:///etc/passwd", "host.test/x", "ftp://host.test/x", "https://me:pw@host.test/x"]
        {
            assert!(text.parse::<Download>().is_err(), "{text:?}");
        }
    }
}
