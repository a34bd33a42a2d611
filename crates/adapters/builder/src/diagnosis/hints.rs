//! Advice about failures whose cause is outside the file that the message names.

/// Advice about a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// The sources use the headers of this kernel release.
    Release(String),
    /// General advice.
    Text(&'static str),
}

impl Hint {
    /// Returns the advice for a build for the kernel `target`.
    pub fn text(self, target: &str) -> Option<String> {
        let release = match self {
            Self::Text(text) => return Some(text.to_owned()),
            Self::Release(release) => release,
        };
        let host = fs_err::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let origin = if host.trim() == release { " of the build host" } else { "" };
        let advice = format!(
            "the sources use kernel {release}{origin} instead of {target}: pass the release in vars.makeArgs"
        );
        (release != target).then(|| format!("{advice}, such as KVER={{{{kernel.release}}}}, or patch them"))
    }
}

const NETWORK: &str = "builds have no network: add what the build downloads to `sources`";
const PACKAGE: &str = "`buildPackages` of the definition adds packages to the toolchain";
const SUBDIR: &str = "set vars.directory, or `subdir` of the source, to the directory with the Makefile";
const NOT_EXECUTABLE: &str = "the script is not executable in the sources, and dkms does not run it either: make it executable, or run it through \
                              a patch of dkms.conf";

/// Parts of messages about hosts that cannot be reached.
const UNREACHABLE: [&str; 6] = [
    "Could not resolve host",
    "unable to resolve host address",
    "Temporary failure in name resolution",
    "Temporary failure resolving",
    "Network is unreachable",
    "bad address '",
];

/// Returns the advice for a line, if there is one.
pub(super) fn hint_for(line: &str) -> Option<Hint> {
    let line = line.trim_end();
    if let Some(release) = missing_build_release(line) {
        return Some(Hint::Release(release.to_owned()));
    }
    let is_missing = line.ends_with(": not found")
        || line.ends_with(": command not found")
        || line.starts_with("make") && line.ends_with(": No such file or directory");
    let names_tool =
        |tool: &str| line.contains(&format!(" {tool}: ")) || line.starts_with(&format!("{tool}: "));
    let text = if says_unreachable(line) || is_missing && ["wget", "curl", "git"].into_iter().any(names_tool)
    {
        NETWORK
    } else if is_missing {
        PACKAGE
    } else if line.contains("is left out: ") && line.ends_with(" is not executable") {
        NOT_EXECUTABLE
    } else if line.contains("No rule to make target '/") && line.contains("/Makefile'") {
        SUBDIR
    } else {
        return None;
    };
    Some(Hint::Text(text))
}

/// Whether the line says that a host cannot be reached.
pub(super) fn says_unreachable(line: &str) -> bool {
    UNREACHABLE.iter().any(|words| line.contains(words))
}

/// Returns the release in a message about a missing `/lib/modules/RELEASE/build`.
fn missing_build_release(line: &str) -> Option<&str> {
    let (release, message) = line.split_once("/lib/modules/")?.1.split_once("/build")?;
    let is_missing = message.contains("No such file or directory") || line.contains("No rule to make target");
    (is_missing && !release.is_empty() && !release.contains(['/', ' ', '$'])).then_some(release)
}
