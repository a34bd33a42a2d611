//! A node's connections to API servers.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
};

use super::word;
use crate::{
    files::{entries, text},
    node::Paths,
};

/// Default port of API servers.
const API_PORT: u16 = 6443;
/// HTTPS port, which API servers of managed clusters and many other servers use.
const HTTPS_PORT: u16 = 443;
/// Programs that are or contain a kubelet.
const KUBELETS: [&str; 5] = ["kubelet", "k3s-agent", "k3s-server", "rke2", "kubelite"];

/// API servers that the node is connected to: at port 6443, and those of the kubelet at any port. Without `hostPID` the
/// kubelet's connections are unknown. Connections of root at port 443, and those to the server of the kubelet's
/// configuration, count instead.
pub(super) fn api_servers(paths: &Paths, sockets: &[String]) -> Vec<SocketAddr> {
    let sockets: Vec<Socket> = sockets.iter().filter_map(|line| parse_socket(line)).collect();
    let listening: BTreeSet<u16> =
        sockets.iter().filter(|socket| socket.state == LISTENING).map(|socket| socket.local.port()).collect();
    let kubelets = kubelet_processes(paths);
    let kubelet_inodes: BTreeSet<String> = kubelets.iter().flat_map(|path| socket_inodes(path)).collect();
    let configured = kubeconfig_servers(paths);
    let is_api = |socket: &&Socket| {
        let Socket { local, remote, state, user, inode } = socket;
        let is_remote = !remote.ip().is_loopback() && remote.ip() != local.ip();
        let is_client = state == ESTABLISHED && is_remote && !listening.contains(&local.port());
        let is_guess = kubelets.is_empty() && user == "0" && remote.port() == HTTPS_PORT;
        let is_configured = configured.iter().any(|(address, port)| {
            *port == remote.port() && address.is_none_or(|address| address == remote.ip())
        });
        state == ESTABLISHED && remote.port() == API_PORT
            || is_client && (kubelet_inodes.contains(inode) || is_guess || is_configured)
    };
    let connected = sockets.iter().filter(is_api).map(|socket| socket.remote);
    // The configured servers count even if the node is not connected at the moment.
    let configured_servers =
        configured.iter().filter_map(|(address, port)| Some(SocketAddr::new((*address)?, *port)));
    connected.chain(configured_servers).collect()
}

/// Lists the servers in the kubelet's configuration on the host, if the manifest mounts the host's `/etc`. Each entry has
/// the server's address, or `None` for a host name, and its port.
fn kubeconfig_servers(paths: &Paths) -> Vec<(Option<IpAddr>, u16)> {
    let files = ["kubelet.conf", "kubelet/kubeconfig", "kubeconfig"];
    // The guard runs on the host itself.
    let roots = ["/host", ""].into_iter();
    let paths_of_files =
        roots.flat_map(|root| files.iter().map(move |file| format!("{root}/etc/kubernetes/{file}")));
    let texts = paths_of_files.filter_map(|path| text(paths.at(&path)));
    let server = |line: &str| {
        let rest = line.trim().strip_prefix("server:")?.trim().trim_matches('"').strip_prefix("https://")?;
        let authority = rest.split('/').next()?;
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
            _ => (authority, HTTPS_PORT),
        };
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        address.is_none_or(|address| !address.is_loopback()).then_some((address, port))
    };
    texts.flat_map(|text| text.lines().filter_map(server).collect::<Vec<_>>()).collect()
}

/// States of a socket (`include/net/tcp_states.h`).
const ESTABLISHED: &str = "01";
const LISTENING: &str = "0A";

struct Socket {
    local: SocketAddr,
    remote: SocketAddr,
    state: String,
    /// ID of the user that owns the socket.
    user: String,
    inode: String,
}

/// Parses a line of `/proc/net/tcp` or `/proc/net/tcp6`.
fn parse_socket(line: &str) -> Option<Socket> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (local, remote) = (parse_endpoint(fields.get(1)?)?, parse_endpoint(fields.get(2)?)?);
    let field = |index: usize| fields.get(index).copied().unwrap_or_default().to_owned();
    Some(Socket { local, remote, state: field(3), user: field(7), inode: field(9) })
}

/// Parses an address and a port.
fn parse_endpoint(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let address = if address.len() == 32 {
        let words = (0..4).map(|index| word(address.get(index * 8..index * 8 + 8)?));
        let bytes: Vec<[u8; 4]> = words.collect::<Option<_>>()?;
        Ipv6Addr::from(<[u8; 16]>::try_from(bytes.concat()).ok()?).to_canonical()
    } else {
        Ipv4Addr::from(word(address)?).into()
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}

/// Processes of kubelets that this container sees.
fn kubelet_processes(paths: &Paths) -> Vec<PathBuf> {
    let is_kubelet =
        |process: &PathBuf| text(process.join("comm")).is_some_and(|name| KUBELETS.contains(&name.as_str()));
    entries(paths.at("/proc")).into_iter().filter(is_kubelet).collect()
}

/// Inodes of a process's sockets.
fn socket_inodes(process: &Path) -> Vec<String> {
    let inode = |file: PathBuf| {
        let link = fs::read_link(file).ok()?;
        Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    entries(process.join("fd")).into_iter().filter_map(inode).collect()
}
