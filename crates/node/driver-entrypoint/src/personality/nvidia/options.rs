//! Command line and environment variables of `nvidia-driver`.

use std::ffi::OsString;

/// Usage text of `nvidia-driver`.
pub(crate) const USAGE: &str = "\
usage: nvidia-driver COMMAND [OPTION...]

commands:
  init                   unload the old driver, load this image's, expose the root at /run/nvidia/driver,
                         wait for a signal and unload (`load` is the same)
  update [-k RELEASE]    show whether this image has modules for a kernel; nothing is compiled on a node
  reload_nvidia_peermem  load nvidia-peermem as soon as OFED and the GPU driver are ready, and again
                         whenever OFED was replaced
  probe_nvidia_peermem   exit code 1 if OFED is loaded and nvidia-peermem is not

options of init and update from other images, accepted without effect:
  -a, --accept-license   -m, --max-threads N   -s, --sign KEYID   -t, --tag TAG";

/// Command of `nvidia-driver`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Load the driver, wait for a signal, and unload the driver.
    Init,
    /// Report whether the image has modules for a kernel: the validated release of `-k`, or the running one.
    Update(Option<String>),
    /// Keep nvidia-peermem loaded.
    ReloadPeermem,
    /// Check once that nvidia-peermem is loaded.
    ProbePeermem,
}

impl Command {
    /// Parses the arguments after `nvidia-driver`, which come from a pod's specification. The error names the wrong
    /// argument.
    pub(crate) fn parse(arguments: &[&str]) -> Result<Self, String> {
        let (&command, rest) = arguments.split_first().ok_or("missing command")?;
        match command {
            "init" | "load" => options(command, rest, &["-m", "--max-threads"]).map(|_| Self::Init),
            "update" => {
                let with_value = ["-k", "--kernel", "-m", "--max-threads", "-s", "--sign", "-t", "--tag"];
                match options(command, rest, &with_value)? {
                    Some(release) if !is_release(&release) => {
                        Err(format!("{release:?} is not a kernel release"))
                    }
                    kernel => Ok(Self::Update(kernel)),
                }
            }
            "reload_nvidia_peermem" => options(command, rest, &[]).map(|_| Self::ReloadPeermem),
            "probe_nvidia_peermem" => options(command, rest, &[]).map(|_| Self::ProbePeermem),
            other => Err(format!("{other:?} is not a command of nvidia-driver")),
        }
    }
}

/// Parses a command's options and returns the value of `-k`. `with_value` lists the options that take a value.
fn options(command: &str, arguments: &[&str], with_value: &[&str]) -> Result<Option<String>, String> {
    let mut kernel = None;
    let mut words = arguments.iter();
    while let Some(&word) = words.next() {
        let (option, attached_value) = match word.split_once('=') {
            Some((option, value)) if option.starts_with("--") => (option, Some(value)),
            _ => (word, None),
        };
        if with_value.contains(&option) {
            let value = attached_value.or_else(|| words.next().copied());
            let value = value.ok_or_else(|| format!("option {option} needs a value"))?;
            if matches!(option, "-k" | "--kernel") {
                kernel = Some(value.to_owned());
            }
        } else if with_value.is_empty() || !matches!(word, "-a" | "--accept-license") {
            return Err(format!("{command} does not take {word:?}"));
        }
    }
    Ok(kernel)
}

/// Whether the text is a plausible kernel release. It becomes part of a path, so `/` is not allowed.
fn is_release(release: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '~');
    release.len() <= 64 && release.starts_with(|c: char| c.is_ascii_digit()) && release.chars().all(allowed)
}

/// Settings that the operator passes in the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    /// `DRIVER_CONFIG_DIGEST`: digest of the driver's whole configuration by the operator, including its image.
    pub(crate) config_digest: Option<String>,
    /// `GPU_DIRECT_RDMA_ENABLED`.
    pub(crate) rdma: bool,
    /// `USE_HOST_MOFED`: use the host's own OFED instead of a container's.
    pub(crate) host_ofed: bool,
    /// `LOAD_NVIDIA_DRM`: also load nvidia-drm, which the operators' images never load. For GPUs with a display.
    pub(crate) drm: bool,
    /// `KERNEL_MODULE_TYPE`: whether the open modules are asked for, or the proprietary ones.
    pub(crate) open_modules: Option<bool>,
    /// `NVFM_CONFIG_<FIELD>`: fields of the fabric manager's configuration, with their values.
    pub(crate) fabric_fields: Vec<(String, String)>,
}

/// Returns the fabric manager's fields among the variables of the environment.
pub(crate) fn fabric_fields(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<(String, String)> {
    let field = |(name, value): (OsString, OsString)| {
        let field = name.to_str()?.strip_prefix("NVFM_CONFIG_").filter(|field| !field.is_empty())?;
        Some((field.to_owned(), value.into_string().ok()?))
    };
    variables.filter_map(field).collect()
}

impl Settings {
    /// Reads the variables.
    pub(crate) fn from(variable: impl Fn(&str) -> Option<String>) -> Self {
        // The operators' scripts compare with "true" only.
        let is_set = |name| variable(name).is_some_and(|value| value == "true");
        Self {
            config_digest: variable("DRIVER_CONFIG_DIGEST").filter(|digest| !digest.is_empty()),
            rdma: is_set("GPU_DIRECT_RDMA_ENABLED"),
            host_ofed: is_set("USE_HOST_MOFED"),
            drm: is_set("LOAD_NVIDIA_DRM"),
            open_modules: match variable("KERNEL_MODULE_TYPE").as_deref() {
                Some("open") => Some(true),
                Some("proprietary") => Some(false),
                _ => None,
            },
            fabric_fields: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_commands_are_known() {
        let parse = |words: &str| Command::parse(&words.split(' ').collect::<Vec<_>>());
        assert_eq!(parse("init"), Ok(Command::Init));
        assert_eq!(parse("init --accept-license -m 4"), Ok(Command::Init));
        assert_eq!(parse("init -a --max-threads=4"), Ok(Command::Init));
        assert_eq!(parse("load"), Ok(Command::Init));
        assert_eq!(parse("update"), Ok(Command::Update(None)));
        let kernel = Some("6.1.0-47-amd64".to_owned());
        assert_eq!(parse("update -k 6.1.0-47-amd64 -t builtin"), Ok(Command::Update(kernel.clone())));
        assert_eq!(parse("update --kernel=6.1.0-47-amd64"), Ok(Command::Update(kernel)));
        assert_eq!(parse("reload_nvidia_peermem"), Ok(Command::ReloadPeermem));
        assert_eq!(parse("probe_nvidia_peermem"), Ok(Command::ProbePeermem));
    }

    #[test]
    fn other_words_are_refused_by_name() {
        let refused = |words: &[&str]| Command::parse(words).unwrap_err();
        assert_eq!(refused(&[]), "missing command");
        assert_eq!(refused(&["install"]), r#""install" is not a command of nvidia-driver"#);
        assert_eq!(refused(&["init", "-k", "6.1"]), r#"init does not take "-k""#);
        assert_eq!(refused(&["init", "now"]), r#"init does not take "now""#);
        assert_eq!(refused(&["probe_nvidia_peermem", "-a"]), r#"probe_nvidia_peermem does not take "-a""#);
        assert_eq!(refused(&["update", "--kernel"]), "option --kernel needs a value");
        for release in ["../../etc", "6.1/../x", "", "6.1 x", "x6"] {
            assert_eq!(refused(&["update", "-k", release]), format!("{release:?} is not a kernel release"));
        }
    }

    #[test]
    fn a_variable_is_true_by_that_word_only() {
        let settings = Settings::from(|name| match name {
            "DRIVER_CONFIG_DIGEST" => Some("1234".into()),
            "GPU_DIRECT_RDMA_ENABLED" | "LOAD_NVIDIA_DRM" => Some("true".into()),
            "USE_HOST_MOFED" => Some("yes".into()),
            "KERNEL_MODULE_TYPE" => Some("proprietary".into()),
            _ => None,
        });
        let expected = Settings {
            config_digest: Some("1234".into()),
            rdma: true,
            drm: true,
            open_modules: Some(false),
            ..Settings::default()
        };
        assert_eq!(settings, expected);
        let empty = Settings::from(|_| Some(String::new()));
        assert_eq!(empty, Settings::default());
    }

    #[test]
    fn fields_of_the_fabric_manager_are_found_by_their_prefix() {
        let variables = [("NVFM_CONFIG_FABRIC_MODE", "1"), ("NVFM_CONFIG_", "2"), ("PATH", "/bin")];
        let fields = fabric_fields(
            variables.map(|(name, value)| (OsString::from(name), OsString::from(value))).into_iter(),
        );
        assert_eq!(fields, [("FABRIC_MODE".to_owned(), "1".to_owned())]);
    }
}
