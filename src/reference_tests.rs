//! docs/reference/commands.md lists every command and option.
use std::{env, fmt::Write as _, fs, path::Path};

use clap::{Arg, Command, CommandFactory};

use crate::command::Cli;

/// Returns a text as a cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|").replace('<', "\\<")
}

/// Returns an argument as people write it: `-o, --output <OUTPUT>`, `[IMAGE]...`.
fn written(argument: &Arg) -> String {
    let name = argument.get_value_names().and_then(|names| names.first());
    let value = name.map_or_else(|| argument.get_id().to_string().to_uppercase(), ToString::to_string);
    let takes_value = argument.get_action().takes_values();
    let Some(long) = argument.get_long() else {
        return if argument.is_required_set() { format!("<{value}>") } else { format!("[{value}]") };
    };
    let short = argument.get_short().map(|short| format!("-{short}, ")).unwrap_or_default();
    format!("{short}--{long}{}", if takes_value { format!(" <{value}>") } else { String::new() })
}

/// Writes the table of some arguments.
fn table<'a>(arguments: impl Iterator<Item = &'a Arg>, text: &mut String) {
    let mut rows = String::new();
    for argument in arguments.filter(|argument| !argument.is_hide_set() && argument.get_id() != "help") {
        let help = argument.get_long_help().or(argument.get_help()).map(|help| cell(&help.to_string()));
        let help = help.unwrap_or_default();
        assert!(!help.is_empty(), "{} has no help", argument.get_id());
        let values = argument.get_possible_values();
        let values = values.iter().filter(|value| !value.is_hide_set()).map(|value| {
            let help = value.get_help().map(|help| format!(": {}", cell(&help.to_string())));
            format!("<br>`{}`{}", value.get_name(), help.unwrap_or_default())
        });
        let values: String =
            if argument.get_action().takes_values() { values.collect() } else { String::new() };
        let default: Vec<_> =
            argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let default = if default.is_empty() || !argument.get_action().takes_values() {
            String::new()
        } else {
            format!("`{}`", default.join(","))
        };
        let variable =
            argument.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
        let written = written(argument).replace('|', "\\|");
        writeln!(rows, "| `{written}` | {help}{values} | {default} | {variable} |").unwrap();
    }
    if !rows.is_empty() {
        write!(text, "\n| argument | meaning | default | variable |\n|---|---|---|---|\n{rows}").unwrap();
    }
}

/// Writes a command and its subcommands.
fn describe(command: &mut Command, path: &str, text: &mut String) {
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string);
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim().to_owned();
    write!(text, "\n## {path}\n\n{}\n\n```text\n{usage}\n```\n", about.unwrap_or_default().trim()).unwrap();
    // Every command has --version.
    let own =
        |argument: &&Arg| !argument.is_global_set() && (path == "farrier" || argument.get_id() != "version");
    table(command.get_arguments().filter(own), text);
    for subcommand in command.get_subcommands_mut().filter(|subcommand| !subcommand.is_hide_set()) {
        if subcommand.get_name() != "help" {
            let path = format!("{path} {}", subcommand.get_name());
            describe(subcommand, &path, text);
        }
    }
}

#[test]
fn the_page_of_commands_is_current() {
    let mut cli = Cli::command();
    cli.build();
    let mut text =
        "# Commands\n\n<!-- Generated: UPDATE_SCHEMA=1 cargo nextest run --bin farrier reference -->\n\n\
                    [Use the command line](../commands.md) says which command does what.\n"
            .to_owned();
    let mut commands = String::new();
    describe(&mut cli, "farrier", &mut commands);
    let (first, others) = commands.split_once("\n## farrier ").unwrap();
    text.push_str(first);
    text.push_str("\n## Options of every command\n");
    table(cli.get_arguments().filter(|argument| argument.is_global_set()), &mut text);
    write!(text, "\n## farrier {others}").unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/commands.md");
    if env::var_os("UPDATE_SCHEMA").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    assert!(
        committed == text,
        "docs/reference/commands.md is not current; run UPDATE_SCHEMA=1 cargo nextest run --bin farrier reference"
    );
}
