//! Command line of `generic`.

use std::{fmt, path::Path, time::Duration};

use crate::{
    connectivity::read_limit,
    disruption::{Disruption, read_allowed},
    error::Error,
    files,
    guard::client::read_directory,
    module_file::{ModuleFile, Origin, kernel_name},
    modules::is_module_name,
    node::{Node, Paths, is_plain_path},
};

/// Usage text of `generic`.
pub(crate) const USAGE: &str = "\
usage: driver-entrypoint generic [OPTION...] [MODULE...]

Without a MODULE, loads those that the image's modules.order lists, as a dkms.conf names them.

  --replace NAME            a module of the host to unload first and restore at the end; those that use it are
                            named, too
  --firmware                make the image's firmware available to the kernel while the container runs
  --wait-for PATH[=TEXT]    load once the path exists, or once its text is TEXT
  --then PROGRAM            run this after the modules are loaded, with their names as arguments
  --ready-when PATH[=TEXT]  become ready once the path exists, or once its text is TEXT
  --keep                    leave the modules loaded at the end";

/// Parsed arguments of `generic`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Modules in load order. Empty: the modules of the image's `modules.order`.
    pub(super) modules: Vec<String>,
    /// Modules of the host to replace: unloaded at the start, loaded again at the end.
    pub(super) replace: Vec<String>,
    /// Whether to make the image's firmware available to the kernel.
    pub(super) firmware: bool,
    /// Conditions to wait for before loading.
    pub(super) wait_for: Vec<Condition>,
    /// Conditions to wait for after loading, before the container is ready.
    pub(super) ready_when: Vec<Condition>,
    /// Program to run after the modules are loaded.
    pub(super) then: Option<String>,
    /// Whether the modules stay loaded when the container ends.
    pub(super) keep: bool,
    /// Disruptions that the replacement of the host's modules, and the unload at the end, may cause.
    pub(super) allowed: Vec<Disruption>,
    /// Maximum time until the API servers answer after the host's modules were replaced.
    pub(super) api_server_limit: Duration,
    /// Directory of the guard that replaces the host's modules; `None` if the container does so itself.
    pub(super) guard: Option<String>,
}

/// Condition that a path exists, or that the file's text equals `text`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    path: String,
    text: Option<String>,
}

impl Options {
    /// Reads the arguments and the environment. The error names the invalid argument or variable.
    pub(crate) fn read(
        arguments: &[&str],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let (api_server_limit, guard) = (read_limit(&variable)?, read_directory(&variable)?);
        Ok(Self { allowed: read_allowed(variable)?, api_server_limit, guard, ..Self::parse(arguments)? })
    }

    /// Parses the arguments. The error names the invalid argument.
    pub(super) fn parse(arguments: &[&str]) -> Result<Self, String> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(&argument) = arguments.next() {
            let mut value = || arguments.next().copied().ok_or_else(|| format!("{argument} needs a value"));
            match argument {
                "--keep" => options.keep = true,
                "--firmware" => options.firmware = true,
                "--replace" => options.replace.push(parse_module(value()?)?),
                "--wait-for" => options.wait_for.push(Condition::parse(value()?)?),
                "--ready-when" => options.ready_when.push(Condition::parse(value()?)?),
                "--then" => options.then = Some(parse_path(value()?)?),
                name => options.modules.push(parse_module(name)?),
            }
        }
        Ok(options)
    }

    /// Fills in the modules of the image's `modules.order` if no module is named. Template `dkms` writes that file from
    /// dkms.conf.
    pub(super) fn complete(&self, node: &Node<'_>) -> Result<Self, Error> {
        let mut options = self.clone();
        if options.modules.is_empty() {
            let order = node.paths.image_modules(&node.kernel.release()).join("modules.order");
            let order = files::text(order).unwrap_or_default();
            let files = order.lines().filter_map(|line| ModuleFile::of(Path::new(line), Origin::Image));
            options.modules.extend(files.map(|(name, _)| name));
        }
        if options.modules.is_empty() {
            let message = "no module is named, and the image has no modules.order for this kernel";
            let hint = "name the modules in the definition's entrypoint, after generic";
            return Err(Error::new(message, hint));
        }
        Ok(options)
    }

    /// Name of the container: its first module.
    pub(super) fn name(&self) -> &str {
        self.modules.first().map_or("none", String::as_str)
    }

    /// Path of a file of this container, for example `/run/farrier/<name>.ready`.
    pub(super) fn file(&self, ending: &str) -> String {
        format!("/run/farrier/{}.{ending}", self.name())
    }
}

fn parse_module(name: &str) -> Result<String, String> {
    if !is_module_name(name) || name.starts_with(['-', '_']) {
        return Err(format!("{name:?} is neither an option of generic nor a module name"));
    }
    Ok(kernel_name(name))
}

fn parse_path(path: &str) -> Result<String, String> {
    if !is_plain_path(path) {
        return Err(format!("{path:?} is not an absolute path without .."));
    }
    Ok(path.to_owned())
}

impl Condition {
    fn parse(text: &str) -> Result<Self, String> {
        let (path, text) = text.split_once('=').map_or((text, None), |(path, text)| (path, Some(text)));
        Ok(Self { path: parse_path(path)?, text: text.map(str::to_owned) })
    }

    pub(super) fn is_met(&self, paths: &Paths) -> bool {
        let path = paths.at(&self.path);
        match &self.text {
            None => path.exists(),
            Some(text) => files::text(path).as_ref() == Some(text),
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)?;
        self.text.as_ref().map_or(Ok(()), |text| write!(f, " with {text:?} in it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_modules_in_any_order() {
        let options = Options::parse(&[
            "--replace",
            "dummy-holder",
            "acme-core",
            "--firmware",
            "--wait-for",
            "/dev/acme",
            "--ready-when",
            "/sys/class/acme/state=up",
            "--then",
            "/usr/bin/acme-setup",
            "acme",
        ])
        .unwrap();
        assert_eq!(options.modules, ["acme_core", "acme"]);
        assert_eq!((options.replace.as_slice(), options.firmware), (&["dummy_holder".to_owned()][..], true));
        assert_eq!(options.wait_for[0].to_string(), "/dev/acme");
        assert_eq!(options.ready_when[0].to_string(), "/sys/class/acme/state with \"up\" in it");
        assert_eq!(options.then.as_deref(), Some("/usr/bin/acme-setup"));
        assert_eq!(options.file("ready"), "/run/farrier/acme_core.ready");
    }

    /// The digest of a failed replacement covers this text: with another text, nodes would try the replacement again.
    #[test]
    fn the_text_for_the_record_of_a_failure_is_stable() {
        let parsed = Options::parse(&["--replace", "old", "--ready-when", "/dev/x=up", "new"]).unwrap();
        let options = Options { allowed: vec![Disruption::Uplink], ..parsed };
        assert_eq!(
            format!("{options:?}"),
            "Options { modules: [\"new\"], replace: [\"old\"], firmware: false, wait_for: [], ready_when: [Condition \
             { path: \"/dev/x\", text: Some(\"up\") }], then: None, keep: false, allowed: [Uplink], api_server_limit: \
             0ns, guard: None }"
        );
    }

    #[test]
    fn invalid_arguments_are_named() {
        let wrong = |arguments: &[&str]| Options::parse(arguments).unwrap_err();
        assert_eq!(wrong(&["x", "--replace"]), "--replace needs a value");
        assert_eq!(wrong(&["x", "--then", "setup"]), "\"setup\" is not an absolute path without ..");
        assert_eq!(
            wrong(&["x", "--wait-for", "/dev/../x"]),
            "\"/dev/../x\" is not an absolute path without .."
        );
        for name in ["../x", "--force", "a b", "_x"] {
            let expected = format!("{name:?} is neither an option of generic nor a module name");
            assert_eq!(wrong(&[name]), expected);
            assert_eq!(wrong(&["--replace", name]), expected);
        }
    }
}
