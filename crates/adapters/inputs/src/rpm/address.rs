//! Addresses of RPM repositories, and checks of the locations that their metadata names.

use farrier_net::Net;
use url::Url;

use crate::{FetchError, Result};

/// Parses an address. The address of a directory gets a trailing `/`, so that paths can be joined to it.
pub(super) fn directory(text: &str, is_directory: bool) -> Result<Url> {
    let wrong = || FetchError::value("the address of an RPM repository", text, "it is not an address");
    let mut url = Url::parse(text).map_err(|_| wrong())?;
    if is_directory && !url.path().ends_with('/') {
        url.set_path(&format!("{}/", url.path()));
    }
    Ok(url)
}

/// Returns the addresses of another repository named in a repository's metadata. Such an address is untrusted input, like a
/// mirror list.
pub(super) fn based(net: &Net, base: &str) -> Result<Vec<String>> {
    let url = directory(base, true)?;
    if !matches!(url.scheme(), "https" | "http") {
        let why = "metadata may only name addresses with http or https";
        return Err(FetchError::value("the address of an RPM repository", base, why));
    }
    Ok(net.url_candidates(&url).iter().map(Url::to_string).collect())
}

/// Joins a location in a repository to the repository's address; the result must be below that address.
pub(super) fn below(place: &Url, location: &str) -> Result<Url> {
    let url = place.join(location).ok().filter(|url| {
        url.origin() == place.origin() && url.path().starts_with(place.path()) && url.path() != place.path()
    });
    url.ok_or_else(|| {
        FetchError::value("a place in an RPM repository", location, "it is not below the repository")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_repository_names_is_below_it() {
        let place = directory("https://a.test/os", true).unwrap();
        assert_eq!(below(&place, "Packages/x+1.rpm").unwrap().as_str(), "https://a.test/os/Packages/x+1.rpm");
        for location in ["", "/x", "../x", "https://b.test/os/x", "//b.test/os/x", "a/../../x"] {
            assert!(below(&place, location).is_err(), "{location:?}");
        }
    }

    #[test]
    fn a_merged_repository_names_others_by_http_alone() {
        let based = |base: &str| based(&Net::default(), base);
        assert_eq!(based("https://b.test/os").unwrap(), ["https://b.test/os/"]);
        for base in ["", "../other", "file:///etc/", "ftp://b.test/os/", "/os"] {
            assert!(based(base).is_err(), "{base:?}");
        }
    }
}
