//! The connection to API servers while drivers are replaced. A replacement is kept once the API servers that answered
//! before the replacement answer again. Otherwise the host's drivers are restored, because a driver without a working
//! link would cut the node off.

use std::{
    collections::BTreeSet,
    fs,
    net::SocketAddr,
    str::FromStr,
    time::{Duration, Instant},
};

use crate::{error::Error, files, forecast::interfaces_of, node::Node, routes::Network, signals::Signals};

/// Environment variable with the time limit in seconds. 0 disables the check.
const VARIABLE: &str = "API_SERVER_TIMEOUT_SEC";
/// Default of [`VARIABLE`].
const DEFAULT_LIMIT_SECONDS: u64 = 120;
/// Time limit for one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between connections.
const PAUSE: Duration = Duration::from_secs(1);
/// Number of successive connections after which a server counts as reached: a link that has just come up may go down again.
const REQUIRED_CONNECTIONS: u32 = 3;

/// The API servers that have to answer before a replacement of drivers is kept.
pub(crate) struct ApiServers<'a> {
    pub(crate) node: &'a Node<'a>,
    /// File with the servers' addresses, one per line. The file outlives a container that is killed before the servers
    /// answer.
    pub(crate) file: String,
    /// Time limit for the answers of all servers. Zero disables the check.
    pub(crate) limit: Duration,
}

/// Reads the time limit from the environment. The error names the variable.
pub(crate) fn read_limit(variable: impl Fn(&str) -> Option<String>) -> Result<Duration, String> {
    read_seconds(VARIABLE, variable(VARIABLE), DEFAULT_LIMIT_SECONDS).map(Duration::from_secs)
}

/// Parses the value of an environment variable as a number of seconds. The error names the variable.
pub(crate) fn read_seconds<T: FromStr>(name: &str, value: Option<String>, default: T) -> Result<T, String> {
    let Some(text) = value.filter(|text| !text.trim().is_empty()) else { return Ok(default) };
    text.trim().parse().map_err(|_| format!("{name} must be a number of seconds, not {text}"))
}

impl ApiServers<'_> {
    /// Records the API servers that answer, and that the node reaches through interfaces of these modules. Call this
    /// before the modules are unloaded. If the modules have no interface, a killed container has already unloaded them,
    /// so the record of that container is kept. Returns the servers that do not answer.
    pub(crate) fn record(&self, modules: &[String]) -> Result<Vec<SocketAddr>, Error> {
        let Self { node, file, limit } = self;
        let interfaces = interfaces_of(node, modules);
        if limit.is_zero() || interfaces.is_empty() {
            return Ok(Vec::new());
        }
        let network = Network::read(&node.paths);
        let mut servers: BTreeSet<SocketAddr> =
            interfaces.iter().flat_map(|interface| network.servers_through(interface)).collect();
        // Routes and connections were read in the namespace of process 1.
        let namespace = |process: &str| fs::read_link(node.paths.at(&format!("/proc/{process}/ns/net"))).ok();
        if !servers.is_empty() && namespace("self") != namespace("1") {
            node.log.warn(
                "this container is not in the host's network: it cannot check that the API server answers. Set hostNetwork: true",
            );
            servers.clear();
        }
        let (answering, silent): (Vec<SocketAddr>, Vec<SocketAddr>) =
            servers.into_iter().partition(|server| node.kernel.connects(*server, CONNECT_TIMEOUT));
        for server in &silent {
            node.log
                .step(format!("the API server at {server} does not answer now, and is not waited for later"));
        }
        if answering.is_empty() {
            self.forget()?;
        } else {
            let lines: Vec<String> = answering.iter().map(SocketAddr::to_string).collect();
            files::write(node, file, &lines.join("\n"))?;
        }
        Ok(silent)
    }

    /// Waits until each recorded server answers. At the time limit, one server of each uplink is enough, because API servers
    /// restart and move. An uplink is an interface of these modules through which the node reaches API servers. With
    /// `any_uplink`, one server of any uplink is enough, or one recorded server.
    pub(crate) fn confirm(
        &self,
        modules: &[String],
        any_uplink: bool,
        signals: &mut dyn Signals,
    ) -> Result<(), Error> {
        let Self { node, .. } = self;
        let error = match self.await_answers(signals) {
            Err(error) if !matches!(error, Error::Interrupted(_)) => error,
            result => return result,
        };
        let network = Network::read(&node.paths);
        let interfaces = interfaces_of(node, modules).into_iter();
        let mut uplinks: Vec<Vec<SocketAddr>> =
            interfaces.map(|interface| network.servers_through(&interface).collect()).collect();
        uplinks.retain(|servers| !servers.is_empty());
        let recorded = if any_uplink { self.recorded() } else { Vec::new() };
        let servers: BTreeSet<SocketAddr> = uplinks.concat().into_iter().chain(recorded).collect();
        let mut answering = Vec::new();
        for server in servers {
            signals.check()?;
            let answers = (0..REQUIRED_CONNECTIONS).all(|_| {
                node.kernel.pause(PAUSE);
                node.kernel.connects(server, CONNECT_TIMEOUT)
            });
            if answers {
                answering.push(server);
            } else {
                node.log.warn(format!("the API server at {server} does not answer"));
            }
        }
        let all_reached =
            uplinks.iter().all(|servers| servers.iter().any(|server| answering.contains(server)));
        if answering.is_empty() || !(any_uplink || all_reached) {
            return Err(error);
        }
        let others: Vec<String> = answering.iter().map(SocketAddr::to_string).collect();
        node.log.step(format!("{error}; but other API servers do: {}", others.join(", ")));
        self.forget()
    }

    /// Waits until each recorded server answers. Fails at the time limit.
    fn await_answers(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, limit, .. } = self;
        let (start, seconds) = (Instant::now(), limit.as_secs());
        // Without a limit, ignore a record that an earlier container with a limit left.
        let servers = if limit.is_zero() { Vec::new() } else { self.recorded() };
        for server in servers {
            node.log.step(format!(
                "waiting for the API server at {server}: without an answer within {seconds} s the host's drivers come back"
            ));
            let (mut successive, mut attempts) = (0, 0);
            while successive < REQUIRED_CONNECTIONS {
                signals.check()?;
                if attempts >= seconds || start.elapsed() >= *limit {
                    return Err(Error::new(
                        format!(
                            "the API server at {server} did not answer within {seconds} s after the drivers were replaced"
                        ),
                        format!(
                            "look for the link and the address of the node's interface in the logs of the kernel and of the \
                             network manager; {VARIABLE} sets the time limit"
                        ),
                    ));
                }
                attempts += 1;
                successive = if node.kernel.connects(server, CONNECT_TIMEOUT) { successive + 1 } else { 0 };
                node.kernel.pause(PAUSE);
            }
        }
        self.forget()
    }

    /// Removes the record.
    pub(crate) fn forget(&self) -> Result<(), Error> {
        files::remove(self.node, &self.file).map(drop)
    }

    /// Returns the recorded servers.
    pub(crate) fn recorded(&self) -> Vec<SocketAddr> {
        files::lines(self.node, &self.file).iter().filter_map(|line| line.parse().ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_limit_is_a_number_of_seconds() {
        let limit = |text: &'static str| read_limit(move |_| Some(text.to_owned()));
        assert_eq!(read_limit(|_| None), Ok(Duration::from_mins(2)));
        assert_eq!(limit(" "), Ok(Duration::from_mins(2)));
        assert_eq!(limit(" 30 "), Ok(Duration::from_secs(30)));
        assert_eq!(limit("0"), Ok(Duration::ZERO));
        assert_eq!(limit("2m"), Err("API_SERVER_TIMEOUT_SEC must be a number of seconds, not 2m".to_owned()));
    }
}
