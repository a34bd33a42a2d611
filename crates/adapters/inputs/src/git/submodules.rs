//! Addresses of submodules. A `.gitmodules` file is untrusted: it must not name files of this machine or options of git.

use std::{collections::BTreeMap, path::Path};

use farrier_core::image::checked::GitAddress;
use url::Url;

use super::super::{FetchError, Result};

/// A submodule that `.gitmodules` declares.
#[derive(Default)]
pub(super) struct Submodule {
    path: String,
    url: String,
}

/// Parses the output of `git config --null --list`.
pub(super) fn parse(listed: &str) -> Vec<Submodule> {
    let mut declared: BTreeMap<&str, Submodule> = BTreeMap::new();
    for (key, value) in listed.split('\0').filter_map(|line| line.split_once('\n')) {
        let Some((name, field)) = key.strip_prefix("submodule.").and_then(|rest| rest.rsplit_once('.'))
        else {
            continue;
        };
        match field {
            "path" => value.clone_into(&mut declared.entry(name).or_default().path),
            "url" => value.clone_into(&mut declared.entry(name).or_default().url),
            _ => {}
        }
    }
    declared.into_values().collect()
}

/// Returns the address of the submodule at `path`. `parent` is the repository that declares it, and `top` the source.
pub(super) fn address(declared: &[Submodule], path: &Path, parent: &Url, top: &Url) -> Result<GitAddress> {
    let refuse = |why: &str| {
        let message = format!("submodule {} of {parent}: {why}", path.display());
        FetchError::unusable(message, "set `submodules: false`, and list the repository in `sources`")
    };
    let submodule = declared.iter().find(|submodule| Path::new(&submodule.path) == path);
    let url = &submodule.ok_or_else(|| refuse(".gitmodules does not declare it"))?.url;
    let address = relative(parent.as_str(), url).unwrap_or_else(|| url.clone());
    let address: GitAddress =
        address.parse().map_err(|_| refuse(&format!("{url:?} is not an `https://` or `ssh://` address")))?;
    let parsed = Url::parse(&address).map_err(|_| refuse(&format!("{url:?} is not an address")))?;
    let is_same_host = (parsed.scheme(), parsed.host()) == (top.scheme(), top.host());
    match parsed.scheme() {
        "https" => Ok(address),
        "http" | "ssh" if is_same_host => Ok(address),
        "file" => Err(refuse(&format!("{address} is a local path"))),
        _ => Err(refuse(&format!("{address} is on another host than the source, so it must be `https://`"))),
    }
}

/// Resolves an address that begins with `./` or `../` (gitmodules(5)).
fn relative(parent: &str, url: &str) -> Option<String> {
    if !url.starts_with("./") && !url.starts_with("../") {
        return None;
    }
    let (mut base, mut rest) = (parent.trim_end_matches('/'), url);
    loop {
        if let Some(more) = rest.strip_prefix("./") {
            rest = more;
        } else if let Some(more) = rest.strip_prefix("../") {
            (base, rest) = (base.rsplit_once('/')?.0, more);
        } else {
            return Some(format!("{base}/{rest}"));
        }
    }
}
