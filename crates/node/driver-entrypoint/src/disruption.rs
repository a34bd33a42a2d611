//! Effects that the unload of a driver has on the node, and the effects that the definition allows.

/// Environment variable with the allowed disruptions, separated by spaces or commas.
pub(crate) const VARIABLE: &str = "ALLOW_DISRUPTION";

/// A part of the node that stops working while a driver is not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disruption {
    /// The default route, or the route to an API server.
    Uplink,
    /// A file system or swap space on the driver's devices, or reached through its interfaces.
    Storage,
    /// A network interface in another network namespace, such as a pod's.
    Pods,
}

impl Disruption {
    pub(crate) const ALL: [Self; 3] = [Self::Uplink, Self::Storage, Self::Pods];

    /// Name in [`VARIABLE`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uplink => "uplink",
            Self::Storage => "storage",
            Self::Pods => "pods",
        }
    }
}

/// Reads the disruptions that the definition or the DaemonSet allows from [`VARIABLE`]; the error names the unknown word.
pub(crate) fn read_allowed(variable: impl Fn(&str) -> Option<String>) -> Result<Vec<Disruption>, String> {
    let text = variable(VARIABLE).unwrap_or_default();
    let words = text.split([' ', ',', '\n']).map(str::trim).filter(|word| !word.is_empty());
    let parse = |word: &str| {
        let disruption = Disruption::ALL.into_iter().find(|disruption| disruption.name() == word);
        disruption.ok_or_else(|| format!("{VARIABLE} lists uplink, storage or pods, not {word}"))
    };
    words.map(parse).collect()
}

/// A disruption that the unload of a module would cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Loss {
    pub(crate) disruption: Disruption,
    /// UID of the affected pod; `None` for the node.
    pub(crate) pod: Option<String>,
    pub(crate) resource: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disruptions_are_allowed_by_name() {
        let read = |text: &str| read_allowed(|name| (name == VARIABLE).then(|| text.to_owned()));
        assert_eq!(read(""), Ok(Vec::new()));
        let two = read(" uplink, pods\n").unwrap();
        assert!(two.contains(&Disruption::Uplink) && two.contains(&Disruption::Pods));
        assert!(!two.contains(&Disruption::Storage));
        assert_eq!(read("all").unwrap_err(), "ALLOW_DISRUPTION lists uplink, storage or pods, not all");
    }
}
