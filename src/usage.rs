//! Hints for mistakes on the command line, in place of clap's where those mislead.

use clap::{
    Command, Error,
    error::{ContextKind, ContextValue, ErrorKind},
};

/// Number of commands to name for an option.
const NAMED: usize = 4;

/// Returns a hint for a mistake on the command line, and removes clap's own tip if it misleads.
pub fn explain(error: &mut Error, commands: &Command) -> Option<String> {
    match (error.kind(), error.get(ContextKind::InvalidArg)) {
        // Most users set these once.
        (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(missing))) => {
            let is_common =
                |name: &String| ["--cluster ", "--registry "].iter().any(|option| name.starts_with(option));
            missing.iter().any(is_common).then(|| {
                "to omit these options, set FARRIER_CLUSTER and FARRIER_REGISTRY, or `cluster` and `registry` in farrier.yaml"
                    .to_owned()
            })
        }
        (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) if option.starts_with("--") => {
            let option = option.clone();
            // clap suggests `-- --option`, but nobody means an option as a value.
            error.remove(ContextKind::Suggested);
            let mut found = Vec::new();
            commands_with(commands, option.trim_start_matches('-'), "", &mut found);
            if found.is_empty() {
                return None;
            }
            for kind in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::Usage] {
                error.remove(kind);
            }
            let more = if found.len() > NAMED { " and others" } else { "" };
            found.truncate(NAMED);
            Some(format!("{option} is an option of {}{more}", found.join(", ")))
        }
        _ => None,
    }
}

/// Adds the names of all commands that have an option.
fn commands_with(command: &Command, option: &str, path: &str, found: &mut Vec<String>) {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = format!("{path}{}", command.get_name());
        if command.get_arguments().any(|argument| argument.get_long() == Some(option)) {
            found.push(format!("`{name}`"));
        }
        commands_with(command, option, &format!("{name} "), found);
    }
}
