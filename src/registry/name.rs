//! Pure: where a repository is in the distribution protocol.

use crate::{image::Repository, site::is_docker_hub};

/// The host that serves what is named after Docker Hub.
const HUB_API: &str = "registry-1.docker.io";

/// A repository as the protocol needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteName {
    /// `host[:port]` as people write it.
    pub host: String,
    /// `host[:port]` that is talked to.
    pub authority: String,
    /// The path below `/v2/`.
    pub path: String,
}

impl RemoteName {
    /// A repository without a host is Docker Hub's, as everywhere.
    pub(super) fn of(repository: &Repository) -> Self {
        let (host, path) = match repository.as_str().split_once('/') {
            Some((first, rest)) if is_host(first) => (first, rest),
            _ => ("docker.io", repository.as_str()),
        };
        let hub = is_docker_hub(host);
        Self {
            host: host.to_owned(),
            authority: if hub { HUB_API } else { host }.to_owned(),
            path: if hub && !path.contains('/') { format!("library/{path}") } else { path.to_owned() },
        }
    }
}

/// Is the first component of a reference a host? Docker's rule (distribution/reference, `splitDockerDomain`).
pub(super) fn is_host(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_hub() {
        let name = |text: &str| {
            let RemoteName { host, authority, path } = RemoteName::of(&text.parse().unwrap());
            (host, authority, path)
        };
        let texts = |h: &str, a: &str, p: &str| (h.to_owned(), a.to_owned(), p.to_owned());
        assert_eq!(name("127.0.0.1:5000/a/b"), texts("127.0.0.1:5000", "127.0.0.1:5000", "a/b"));
        assert_eq!(name("localhost/a"), texts("localhost", "localhost", "a"));
        assert_eq!(name("docker.io/debian"), texts("docker.io", "registry-1.docker.io", "library/debian"));
        assert_eq!(name("acme/x"), texts("docker.io", "registry-1.docker.io", "acme/x"));
    }
}
