//! Addresses of RPM repositories, and checks of the locations that their metadata names.

use farrier_net::Net;
use url::Url;

use crate::{FetchError, Result};

/// Parses an address. The address of a directory gets a trailing `/`, so that paths can be joined to it.
pub(super) fn parse_address(text: &str, is_directory: bool) -> Result<Url> {
    let invalid = || FetchError::value("the address of an RPM repository", text, "it is not an address");
    let mut url = Url::parse(text).map_err(|_| invalid())?;
    if is_directory && !url.path().ends_with('/') {
        url.set_path(&format!("{}/", url.path()));
    }
    Ok(url)
}

/// Returns the addresses of another repository named in a repository's metadata. Such an address is untrusted input, like a
/// mirror list.
pub(super) fn base_urls(net: &Net, base: &str) -> Result<Vec<String>> {
    let url = parse_address(base, true)?;
    if !matches!(url.scheme(), "https" | "http") {
        let why = "metadata may only name addresses with http or https";
        return Err(FetchError::value("the address of an RPM repository", base, why));
    }
    Ok(net.url_candidates(&url).iter().map(Url::to_string).collect())
}

/// Joins a location in a repository to the repository's address; the result must be below that address.
pub(super) fn join_below(base: &Url, location: &str) -> Result<Url> {
    let url = base.join(location).ok().filter(|url| {
        url.origin() == base.origin() && url.path().starts_with(base.path()) && url.path() != base.path()
    });
    url.ok_or_else(|| {
        FetchError::value("a location in an RPM repository", location, "it is not below the repository")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_repository_names_is_below_it() {
        let place = parse_address("https://a.test/os", true).unwrap();
        assert_eq!(
            join_below(&place, "Packages/x+1.rpm").unwrap().as_str(),
            "https://a.test/os/Packages/x+1.rpm"
        );
        for location in ["", "/x", "../x", "https://b.test/os/x", "//b.test/os/x", "a/../../x"] {
            assert!(join_below(&place, location).is_err(), "{location:?}");
        }
    }

    #[test]
    fn a_merged_repository_names_others_by_http_alone() {
        let base_urls = |base: &str| base_urls(&Net::default(), base);
        assert_eq!(base_urls("https://b.test/os").unwrap(), ["https://b.test/os/"]);
        for base in ["", "../other", "file:///etc/", "ftp://b.test/os/", "/os"] {
            assert!(base_urls(base).is_err(), "{base:?}");
        }
    }
}
