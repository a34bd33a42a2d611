//! `kubectl farrier`: this program under the name by which kubectl finds it. The default cluster is the live
//! one. A command that needs the registry and the definitions, but names no registry, runs in the pod of the
//! farrier that leads in the cluster.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, IsTerminal as _},
    os::unix::process::CommandExt as _,
    path::Path,
    process,
};

use clap::{
    ArgMatches, Command, CommandFactory as _,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::{CliError, command::Cli, config, env_vars as vars, session::kube_options};

/// Name under which kubectl runs the program. kubectl turns the first `-` into a space.
const PLUGIN: &str = "kubectl-farrier";
/// Name under which kubectl requests completions.
const COMPLETER: &str = "kubectl_complete-farrier";

fn program_is(name: &str) -> bool {
    let program = env::args_os().next();
    program.as_deref().map(Path::new).and_then(Path::file_stem) == Some(OsStr::new(name))
}

/// Whether kubectl requests completions.
pub fn is_completer() -> bool {
    program_is(COMPLETER)
}

/// Whether kubectl started the program.
pub fn is_called() -> bool {
    program_is(PLUGIN) || is_completer()
}

/// Returns the commands; as a plug-in, with its defaults.
pub fn command() -> Command {
    let command = Cli::command().args(config::options());
    if !is_called() {
        // This parse only decides the default of `--cluster`, so ignore errors.
        let matches = command.clone().ignore_errors(true).try_get_matches();
        let is_live = matches.is_ok_and(|matches| selects_context(&matches));
        return if is_live { command.mut_subcommands(default_to_live_cluster) } else { command };
    }
    let command = command.bin_name("kubectl farrier").display_name("kubectl farrier");
    command.mut_subcommands(default_to_live_cluster)
}

/// Whether a command line names a context or a kubeconfig.
fn selects_context(matches: &ArgMatches) -> bool {
    ["context", "kubeconfig"].iter().any(|option| matches.try_contains_id(option).unwrap_or_default())
        || matches.subcommand().is_some_and(|(_, command)| selects_context(command))
}

fn default_to_live_cluster(command: Command) -> Command {
    let command = command.mut_subcommands(default_to_live_cluster);
    let has_cluster = command.get_arguments().any(|argument| argument.get_id() == "cluster");
    // `doctor` also works without a cluster.
    if !has_cluster || command.get_name() == "doctor" {
        return command;
    }
    command.mut_arg("cluster", |argument| argument.required(false).default_value("kube"))
}

/// Replaces this process with kubectl for a command that has to run in the pod of the leading farrier: a
/// command that needs a registry and names none, or `logs`. Returns if the command runs on this machine.
pub fn become_kubectl(command: &Command) -> Result<(), CliError> {
    if !is_called() {
        return Ok(());
    }
    let mut args: Vec<OsString> = env::args_os().collect();
    let cluster = take_option(&mut args, "--cluster").or_else(|| env::var(vars::FARRIER_CLUSTER).ok());
    let namespace = take_option(&mut args, "--namespace").or_else(|| take_option(&mut args, "-n"));
    let context = take_option(&mut args, "--context");
    let kubeconfig = take_option(&mut args, "--kubeconfig");
    let instance = take_option(&mut args, "--instance").or_else(|| env::var(vars::FARRIER_INSTANCE).ok());
    let runs_in_pod = match command.clone().try_get_matches_from(&args) {
        // A log is in the cache of the farrier that ran the build.
        Ok(matches) => matches.subcommand_matches("logs").is_some_and(|logs| !logs.contains_id("cache_dir")),
        Err(error) => error.kind() == ErrorKind::MissingRequiredArgument && lacks_registry_alone(&error),
    };
    let options = kube_options(cluster.as_deref().unwrap_or("kube")).filter(|_| runs_in_pod);
    let Some(options) = options else { return Ok(()) };
    let kubectl = || {
        let mut kubectl = process::Command::new("kubectl");
        let context = context.as_ref().or(options.context.as_ref());
        kubectl.args(context.iter().flat_map(|context| ["--context", context]));
        kubectl.args(kubeconfig.iter().flat_map(|file| ["--kubeconfig", file]));
        kubectl.args(["--namespace", namespace.as_deref().unwrap_or("farrier")]);
        kubectl
    };
    let run_error =
        |error| CliError::usage(format!("cannot run kubectl, which asks farrier in its pod: {error}"));
    let lease = instance.map_or_else(|| "farrier".to_owned(), |instance| format!("farrier-{instance}"));
    let get = ["get", "lease", &lease, "--output", "jsonpath={.spec.holderIdentity}"];
    // kubectl reports errors itself.
    let output = kubectl().args(get).stderr(process::Stdio::inherit()).output().map_err(run_error)?;
    // The holder is the pod's name and a number.
    let holder = String::from_utf8_lossy(&output.stdout);
    let (pod, _) = holder.rsplit_once('_').ok_or_else(|| {
        CliError::hinted(
            "no farrier is the leader there",
            "pass -n NAMESPACE with farrier's namespace (default: `farrier`), or --registry and --definitions to run the command here",
        )
    })?;
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let terminal: &[&str] = if is_terminal { &["--stdin", "--tty"] } else { &[] };
    let mut exec = kubectl();
    exec.arg("exec").args(terminal).args([pod, "--container", "farrier", "--", "farrier"]).args(&args[1..]);
    Err(run_error(exec.exec()))
}

fn lacks_registry_alone(error: &clap::Error) -> bool {
    let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) else { return false };
    missing.iter().all(|argument| argument.starts_with("--registry"))
}

/// Removes an option with its value from a command line.
pub fn take_option(arguments: &mut Vec<OsString>, option: &str) -> Option<String> {
    let is_option =
        |text: &str| text.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='));
    let index = arguments.iter().position(|argument| argument.to_str().is_some_and(is_option))?;
    let argument = arguments.remove(index).into_string().ok()?;
    match argument.split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None if index < arguments.len() => arguments.remove(index).into_string().ok(),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_option_itself_selects_a_context() {
        let is_selected = |words: &[&str]| {
            let command = Cli::command().ignore_errors(true);
            let words = [&["farrier"], words].concat();
            selects_context(&command.try_get_matches_from(words).unwrap())
        };
        for words in [
            &["plan", "--context", "x"][..],
            &["plan", "--registry", "oci:r", "--kubeconfig=f"],
            &["--context=x", "upgrade", "history"],
        ] {
            assert!(is_selected(words), "{words:?}");
        }
        for words in [&["plan"][..], &["init", "--", "--context"], &["init", "--source=--context", "-v"]] {
            assert!(!is_selected(words), "{words:?}");
        }
    }
}
