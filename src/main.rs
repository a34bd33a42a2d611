//! Builds, checks, publishes and rolls out driver-container images for the kernels of a Kubernetes fleet.
//!
//! This crate is the program `farrier`: a file for each command, and the settings that join the other crates.
#![forbid(unsafe_code)]

mod args;
mod build;
#[cfg(feature = "bundle")]
mod bundle;
mod check;
mod collect_driver;
mod command;
mod completion;
mod config;
mod doctor;
mod env_vars;
mod error;
#[cfg(feature = "gc")]
mod gc;
mod headers;
#[cfg(feature = "migrate")]
mod init;
mod lint;
mod logs;
#[cfg(feature = "bundle")]
mod mirror;
mod output;
#[cfg(feature = "dashboard")]
mod page;
mod plan;
mod plugin;
mod prebuild;
mod preflight;
#[cfg(feature = "host-artifacts")]
mod pull;
#[cfg(feature = "radar")]
mod radar;
#[cfg(test)]
mod reference_tests;
mod render;
mod retry;
mod rollback;
mod rotate;
mod run;
mod schema;
mod secure_boot;
mod serve;
mod session;
mod settings;
mod stop;
#[cfg(feature = "dashboard")]
mod ui;
mod upgrade;
mod usage;
mod verify;
mod version;
mod why;

use std::{process::ExitCode, time::Duration};

use clap::{ArgMatches, FromArgMatches as _};

use args::{Global, LogFormat, LogLevel};
use command::{Cli, Command};
use error::{CliError, Exit, Result};
use session::Session;
use stop::Stop;

/// Parses the command line, runs the command and returns the exit code.
fn main() -> ExitCode {
    // A provider can be installed once in a process. Ignore the error of a further call.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match completion::answer() {
        Ok(false) => {}
        result => return exit_code(result.map(|_| Exit::Done).map_err(CliError::from)),
    }
    let command = match configured_command() {
        Ok(command) => command,
        Err(error) => return exit_code(Err(error)),
    };
    let commands = command.clone();
    let parsed = command.try_get_matches().and_then(|matches| {
        let mut cli = Cli::from_arg_matches(&matches)?;
        let options = cluster_option(&matches).and_then(|cluster| cli.global.kube_options(cluster));
        cli.global.kube = options.unwrap_or_default();
        Ok(cli)
    });
    let cli = match parsed {
        Ok(cli) => cli,
        Err(mut error) => {
            let hint = usage::explain(&mut error, &commands);
            // Help and version go to standard output with code 0, usage errors to standard error with code 2.
            let _ = error.print();
            if let Some(hint) = hint {
                output::message(&format!("hint: {hint}"));
            }
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Done.into() };
        }
    };
    output::look::set(&cli.global);
    start_logs(&cli.global);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::message(&format!("error: cannot start the runtime: {error}"));
            return Exit::Failed.into();
        }
    };
    let outcome = runtime.block_on(async {
        let stop = Stop::default();
        stop.on_signals(cli.global.log_format);
        Box::pin(dispatch(cli, stop)).await
    });
    // A thread that hangs in a system call, such as a read from a dead network file system, must not keep the program alive.
    runtime.shutdown_timeout(Duration::from_secs(5));
    exit_code(outcome)
}

/// Returns the commands with the defaults of `farrier.yaml`. As a plug-in, runs a command in the cluster instead.
fn configured_command() -> Result<clap::Command> {
    let defaults = config::Defaults::find()?;
    let command = defaults.apply(defaults.require(plugin::command()));
    plugin::become_kubectl(&command)?;
    if std::env::args_os().any(|word| word == "--help-all") {
        return Ok(command);
    }
    // Show the global options that every user needs.
    let is_shown = |id: &str| ["definitions", "output", "verbose", "help-all"].contains(&id);
    Ok(command.mut_args(|argument| {
        let hides = argument.get_help_heading() == Some(args::GLOBAL_OPTIONS)
            && !is_shown(argument.get_id().as_str());
        argument.hide_short_help(hides).hide_long_help(hides)
    }))
}

fn exit_code(outcome: Result<Exit, CliError>) -> ExitCode {
    match outcome {
        Ok(exit) => exit.into(),
        Err(error) => {
            output::message(&error.render());
            error.exit().into()
        }
    }
}

/// Returns the value of `--cluster`, if the command has this option.
fn cluster_option(matches: &ArgMatches) -> Option<&str> {
    let (_, command) = matches.subcommand()?;
    let value = command.try_get_one::<String>("cluster").ok().flatten();
    value.map(String::as_str).or_else(|| cluster_option(command))
}

async fn dispatch(Cli { global, command }: Cli, stop: Stop) -> Result<Exit> {
    let session = Session { global, stop };
    let cleans_up = command.cleans_up();
    let work = async {
        match command {
            Command::Plan(args) => plan::plan(&session, args).await,
            Command::Status(args) => plan::status(&session, args).await,
            #[cfg(feature = "dashboard")]
            Command::Ui(args) => ui::ui(&session, args).await,
            Command::Why(args) => why::why(&session, args).await,
            Command::Render(args) => render::render(&session, args).await,
            Command::Headers(command) => headers::headers(&session, command).await,
            Command::Build(args) => Box::pin(build::build(&session, args)).await,
            Command::Logs(args) => logs::logs(&session, args).await,
            Command::Prebuild(args) => Box::pin(prebuild::prebuild(&session, args)).await,
            Command::Preflight(args) => preflight::preflight(&session, args).await,
            #[cfg(feature = "radar")]
            Command::Radar(args) => Box::pin(radar::radar(&session, args)).await,
            Command::Retry(args) => retry::retry(&session, args).await,
            #[cfg(feature = "bundle")]
            Command::Mirror(args) => mirror::mirror(&session, args).await,
            #[cfg(feature = "migrate")]
            Command::Init(args) => init::init(&session, args).await,
            Command::Doctor(args) => doctor::doctor(&session, args).await,
            Command::Check(args) => check::check(&session, args).await,
            Command::Verify(args) => verify::verify(&session, args).await,
            #[cfg(feature = "host-artifacts")]
            Command::Pull(args) => pull::pull(&session, args).await,
            #[cfg(feature = "bundle")]
            Command::Bundle(command) => bundle::bundle(&session, command).await,
            Command::Run(args) => run::run(&session, args).await,
            Command::Rollback(args) => rollback::rollback(&session, args).await,
            Command::Rotate(args) => rotate::rotate(&session, args).await,
            Command::Upgrade(command) => upgrade::upgrade(&session, command).await,
            #[cfg(feature = "gc")]
            Command::Gc(args) => gc::gc(&session, args).await,
            Command::Lint(args) => lint::lint(&session, args).await,
            Command::Version => version::version(&session),
            Command::Schema(args) => schema::schema(args.kind),
            Command::Completions { shell } => {
                output::result(&completion::script(shell)?)?;
                Ok(Exit::Done)
            }
            Command::Man { directory } => {
                fs_err::create_dir_all(&directory)?;
                clap_mangen::generate_to(plugin::command(), directory)?;
                Ok(Exit::Done)
            }
        }
    };
    let mut work = Box::pin(until_stopped(&session.stop, cleans_up, work));
    let Some(seconds) = session.global.timeout else { return work.await };
    if let Ok(result) = tokio::time::timeout(Duration::from_secs(seconds), &mut work).await {
        return result;
    }
    session.stop.cancel.cancel();
    let _ = work.await;
    Err(CliError {
        exit: Exit::Unreachable,
        ..CliError::usage(format!("not done after {seconds} s (--timeout)"))
    })
}

/// Runs a command until it is done or stopped. A command that cleans up handles the stop itself.
async fn until_stopped(
    stop: &Stop,
    cleans_up: bool,
    work: impl Future<Output = Result<Exit>>,
) -> Result<Exit> {
    if cleans_up {
        return work.await;
    }
    tokio::select! {
        // Poll the cancellation first, so that the work is dropped at once.
        biased;
        () = stop.cancel.cancelled() => Ok(Exit::Interrupted),
        result = work => result,
    }
}

fn start_logs(global: &Global) {
    let filter = match (global.log_level, global.verbose) {
        (Some(LogLevel::Error), _) => "error,kube_client=off",
        (Some(LogLevel::Warn), _) => "warn,kube_client=off",
        // kube's client logs every failed request as an error; farrier reports failures itself.
        (Some(LogLevel::Info), _) | (None, 0) => "warn,kube_client=off,farrier=info",
        (Some(LogLevel::Debug), _) | (None, 1) => "info,farrier=debug",
        (Some(LogLevel::Trace) | None, _) => "debug,farrier=trace",
    };
    let env_filter = tracing_subscriber::EnvFilter::try_from_env(env_vars::FARRIER_LOG).ok();
    let filter = env_filter.filter(|_| global.log_level.is_none()).unwrap_or_else(|| filter.into());
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(output::LogWriter::stderr);
    let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let colors = is_terminal && output::look::has_colors(global.color, is_terminal);
    match global.log_format {
        LogFormat::Text => subscriber.with_ansi(colors).with_target(false).init(),
        LogFormat::Json => subscriber.json().init(),
    }
}
