//! Help, and hints about options of other commands.

use crate::support::site::Site;

#[test]
fn an_option_of_another_command_is_named_with_that_command() {
    let site = Site::new();
    for (args, hint) in [
        (&["build", "hello", "--once"][..], "hint: --once is an option of `run`"),
        (&["plan", "--push"], "hint: --push is an option of `build`"),
        (&["lint", "--cluster", "x"], " and others"),
        (&["plan", "--split", "1"], "hint: --split is an option of `bundle export`"),
    ] {
        let run = site.farrier(args).exits(2);
        run.line(hint);
        assert!(!run.stderr.contains("similar argument") && !run.stderr.contains("as a value"), "{run}");
    }
    site.farrier(&["run", "--onec"]).exits(2).line("a similar argument exists: '--once'");
    let run = site.farrier(&["why", "--nothing"]).exits(2);
    assert!(!run.stderr.contains("as a value") && !run.stderr.contains("hint"), "{run}");
}

#[test]
fn help_shows_a_commands_own_options_first() {
    let site = Site::new();
    for command in ["plan", "run", "build", "check", "init", "bundle"] {
        let help = site.farrier(&[command, "--help"]).exits(0).stdout;
        let own = help.find("\nOptions:\n").unwrap_or(0);
        let global = help.find("\nGlobal options:\n").unwrap();
        assert!(own < global && !help.contains("--cache-dir"), "{help}");
        let examples = help.lines().filter(|line| line.starts_with(&format!("  farrier {command} ")));
        assert!((2..=3).contains(&examples.count()), "{help}");
        let all = site.farrier(&[command, "--help-all"]).exits(0).stdout;
        assert!(all.contains("--cache-dir") && all.contains("--no-config"), "{all}");
    }
}

/// Each example of the help is a command line that farrier accepts, but for the cluster, files and images in it.
#[test]
fn examples_of_the_help_are_accepted() {
    let site = Site::new();
    let mut examples = 0;
    for command in ["plan", "run", "build", "check", "init", "bundle"] {
        let help = site.farrier(&[command, "--help"]).exits(0).stdout;
        for line in help.lines().filter(|line| line.starts_with(&format!("  farrier {command} "))) {
            // `--help` at the end lets clap check the words before it, and runs nothing.
            let words: Vec<&str> = line.split_whitespace().skip(1).chain(["--help"]).collect();
            site.farrier(&words).exits(0);
            examples += 1;
        }
    }
    assert!(examples >= 15, "{examples}");
}
