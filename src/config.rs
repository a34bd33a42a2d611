//! `farrier.yaml`: defaults of options, from the nearest file above the working directory.

use std::{
    collections::BTreeMap,
    env,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use clap::{Arg, ArgAction, Command, ValueEnum as _};
use farrier_core::plan::{Instance, WriteNamespaces};
use farrier_engines::EngineChoice;
use farrier_local::files::open_regular;
use farrier_yaml as yaml;
use fs_err as fs;
use serde::Deserialize;

use super::{CliError, Result, args::GLOBAL_OPTIONS, output};

const FILE: &str = "farrier.yaml";
const NO_CONFIG: &str = "--no-config";

/// Options that choose programs and trusted hosts, by id and field. farrier prints which of these options the file sets, because
/// the file may come from a cloned repository.
const TRUST_FIELDS: [(&str, &str); 3] =
    [("ca_file", "caFile"), ("entrypoint", "entrypoint"), ("insecure_registry", "insecureRegistry")];

/// Fields of the file, each named as its option.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Config {
    definitions: Option<String>,
    cache_dir: Option<String>,
    ca_file: Option<String>,
    entrypoint: Option<String>,
    cluster: Option<String>,
    registry: Option<String>,
    insecure_registry: Vec<String>,
    engine: Option<String>,
    instance: Option<String>,
    write_namespaces: Option<String>,
    offline: bool,
}

/// Values of options, by their ids.
#[derive(Debug, Default)]
pub struct Defaults(BTreeMap<&'static str, Vec<String>>);

impl Defaults {
    /// Reads the nearest file, unless the command line has `--no-config`.
    pub fn find() -> Result<Self> {
        if env::args_os().skip(1).take_while(|word| word != "--").any(|word| word == NO_CONFIG) {
            return Ok(Self::default());
        }
        // Without a working directory there is no file above it.
        let Ok(start) = env::current_dir() else { return Ok(Self::default()) };
        for directory in start.ancestors() {
            if let Some(defaults) = Self::read(&directory.join(FILE), directory)? {
                return Ok(defaults);
            }
        }
        Ok(Self::default())
    }

    fn read(path: &Path, directory: &Path) -> Result<Option<Self>> {
        let invalid = |message: String| {
            CliError::hinted(format!("{}{message}", path.display()), "--no-config ignores the file")
        };
        let link = match fs::symlink_metadata(path) {
            Ok(link) if fs::metadata(path).is_ok_and(|file| file.is_file()) => link,
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut file = open_regular(path)?;
        // The file names programs, so nobody else may write it. The link must also be trusted: relative paths in the file start
        // at the link's directory.
        let (target, parent) = (file.metadata()?, fs::metadata(directory)?);
        let is_trusted = |owner: u32| owner == 0 || owner == rustix::process::geteuid().as_raw();
        // In a sticky directory, others cannot replace the file.
        let others_can_replace = |mode: u32| mode & 0o002 != 0 && mode & 0o1000 == 0;
        if ![&link, &target].iter().all(|metadata| is_trusted(metadata.uid()))
            || target.mode() & 0o002 != 0
            || others_can_replace(parent.mode())
        {
            return Err(invalid(": another user may have written it".to_owned()));
        }
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let at_position = |error: &yaml::YamlError| {
            invalid(format!(":{}:{}: {}", error.position.line, error.position.column, error.message))
        };
        let documents = yaml::documents(&text).map_err(|error| at_position(&error))?;
        let Some(document) = documents.first() else { return Ok(Some(Self::default())) };
        // Ignore a Kubernetes object: krew's manifest of farrier has the same file name.
        if document.get("kind").is_some() {
            return Ok(None);
        }
        let config: Config = yaml::decode(document).map_err(|errors| match errors.first() {
            Some(error) => at_position(error),
            None => invalid(": no configuration".to_owned()),
        })?;
        config.check().map_err(|message| invalid(format!(": {message}")))?;
        let values = config.values(directory);
        let printed_fields: Vec<&str> =
            TRUST_FIELDS.iter().filter(|(id, _)| values.contains_key(id)).map(|(_, name)| *name).collect();
        if !printed_fields.is_empty() {
            output::message(&format!("{} sets {}", path.display(), printed_fields.join(", ")));
        }
        Ok(Some(Self(values)))
    }

    /// Makes the values the defaults of the options, so that a flag or a variable takes precedence.
    pub fn apply(&self, command: Command) -> Command {
        let command = command.mut_subcommands(|command| self.apply(command));
        command.mut_args(|argument| {
            let id = argument.get_id().as_str();
            // An argument with the same id may have another meaning, such as `--cluster` of `farrier mirror`. It has no variable.
            let is_option = argument.get_env().is_some() || id == "insecure_registry";
            match self.0.get(id).filter(|_| is_option) {
                // clap borrows defaults for the life of the program.
                Some(values) => {
                    argument.required(false).default_values(values.iter().map(|value| &*value.clone().leak()))
                }
                None => argument,
            }
        })
    }

    /// Makes `--push` and `doctor --cluster` require a registry if the file has none. clap's `requires` ignores defaults.
    pub fn require(&self, command: Command) -> Command {
        if self.0.contains_key("registry") {
            return command;
        }
        let require_registry = |argument: Arg| argument.requires("registry");
        command
            .mut_subcommand("build", |build| build.mut_arg("push", require_registry))
            .mut_subcommand("doctor", |doctor| doctor.mut_arg("cluster", require_registry))
    }
}

impl Config {
    /// Validates the values whose errors clap would not attribute to the file.
    fn check(&self) -> Result<(), String> {
        let Self { engine, instance, write_namespaces, .. } = self;
        if let Some(text) = engine
            && EngineChoice::from_str(text, false).is_err()
        {
            let known = EngineChoice::value_variants().iter().filter_map(EngineChoice::to_possible_value);
            let known: Vec<String> = known.map(|value| value.get_name().to_owned()).collect();
            return Err(format!("engine: {text:?} is not an engine; known: {}", known.join(", ")));
        }
        let instance = instance.as_deref().map(str::parse::<Instance>).transpose();
        instance.map_err(|error| format!("instance: {error}"))?;
        let namespaces = write_namespaces.as_deref().map(str::parse::<WriteNamespaces>).transpose();
        namespaces.map(drop).map_err(|error| format!("writeNamespaces: {error}"))
    }

    fn values(self, directory: &Path) -> BTreeMap<&'static str, Vec<String>> {
        let path = |text: String| directory.join(text).display().to_string();
        // `dir:PATH` of a cluster and `oci:PATH` of a registry.
        let location = |text: String| match text.split_once(':') {
            Some((kind @ ("dir" | "oci"), relative)) => format!("{kind}:{}", path(relative.to_owned())),
            _ => text,
        };
        let texts = [
            ("definitions", self.definitions.map(path)),
            ("cache_dir", self.cache_dir.map(path)),
            ("ca_file", self.ca_file.map(path)),
            ("entrypoint", self.entrypoint.map(path)),
            ("cluster", self.cluster.map(location)),
            ("registry", self.registry.map(location)),
            ("engine", self.engine),
            ("instance", self.instance),
            ("write_namespaces", self.write_namespaces),
            ("offline", self.offline.then(|| "true".to_owned())),
        ];
        let texts = texts.into_iter().filter_map(|(id, text)| Some((id, vec![text?])));
        let hosts = Some(self.insecure_registry).filter(|hosts| !hosts.is_empty());
        texts.chain(hosts.map(|hosts| ("insecure_registry", hosts))).collect()
    }
}

/// Options that are read before the others.
pub fn options() -> [Arg; 2] {
    [
        Arg::new("no-config")
            .long("no-config")
            .global(true)
            .help_heading(GLOBAL_OPTIONS)
            .action(ArgAction::SetTrue)
            .help("Ignore farrier.yaml, which sets defaults of options"),
        Arg::new("help-all")
            .long("help-all")
            .global(true)
            .help_heading(GLOBAL_OPTIONS)
            .action(ArgAction::HelpLong)
            .help("Print help with all global options"),
    ]
}
