//! Presentation of results on a terminal: colors and symbols for states, rows that fit the width, short
//! digests. Elsewhere results are plain and complete, for programs.

use std::{
    io::{self, IsTerminal as _},
    sync::OnceLock,
};

use clap::ColorChoice;
use regex::{Captures, Regex};
use rustix::termios::tcgetwinsize;

use crate::{
    args::{Global, OutputFormat},
    env_vars,
};

const RED: &str = "\u{1b}[31m";
const YELLOW: &str = "\u{1b}[33m";
const GREEN: &str = "\u{1b}[32m";
const CYAN: &str = "\u{1b}[36m";
const DIM: &str = "\u{1b}[2m";
const RESET: &str = "\u{1b}[0m";

/// Words for states, each with its color and its symbol. The pages use the same symbols
/// (`crates/features/dashboard/src/html/style.css`).
const STATES: [(&str, &str, &str); 5] = [
    ("loads|published|up to date|already set|settled|ready|ok|good|passed", GREEN, "✓"),
    ("refused|failed|conflict|wrong", RED, "✕"),
    ("build|building|rewrite|rewrite later|change", CYAN, "▶"),
    ("queued|missing|wait|waiting", CYAN, "○"),
    ("unknown|unproven|retrying|hold|skip|skipped|warning", YELLOW, "▲"),
];

/// Patterns of colored text: verdicts before reasons, a report's verdict, hints, and states that fill a
/// column. The last pattern is applied twice, because the separator after one column is also the separator
/// before the next.
fn color_patterns() -> [String; 5] {
    // Two spaces separate columns.
    let words = STATES.map(|(words, ..)| words).join("|");
    let column = format!(r"(?m)(  )((?:[✓✕▶○▲] )?(?:{words}))(  |$)");
    [
        r"(?m)(^|  )((?:refused|unknown|unproven|warning)\[[a-z-]+\])()".to_owned(),
        r"(?m)(\A.*: )(loads|unknown|refused)($)".to_owned(),
        r"(?m)(^|  )(help: .*)($)".to_owned(),
        column.clone(),
        column,
    ]
}

/// Returns the color and symbol of a state.
fn color_and_symbol(word: &str) -> Option<(&'static str, &'static str)> {
    let entry = STATES.iter().find(|(words, ..)| words.split('|').any(|state| state == word));
    entry.map(|(_, color, symbol)| (*color, *symbol))
}

/// Width of tables. Without a width, rows have any length and digests are complete.
static WIDTH: OnceLock<Option<u16>> = OnceLock::new();
static COLORS: OnceLock<bool> = OnceLock::new();
static SYMBOLS: OnceLock<bool> = OnceLock::new();

/// Whether a stream gets colors. `is_terminal` decides unless the user has chosen.
pub fn has_colors(choice: ColorChoice, is_terminal: bool) -> bool {
    match choice {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => env_vars::forced_colors().unwrap_or(is_terminal),
    }
}

/// Sets the presentation from the command line, the environment and the terminal, once.
pub fn set(global: &Global) {
    let is_terminal = io::stdout().is_terminal();
    let colors = has_colors(global.color, is_terminal);
    let has_width = is_terminal && global.output == OutputFormat::Table;
    // A terminal with an unknown width reports 0.
    let columns = || tcgetwinsize(io::stdout()).ok().map(|size| size.ws_col).filter(|columns| *columns > 0);
    // The values are set before anything is printed. A second call has no effect.
    let _ = (
        COLORS.set(colors),
        SYMBOLS.set(is_terminal && env_vars::is_utf8()),
        WIDTH.set(has_width.then(columns).flatten()),
    );
}

/// Space at which no line is broken.
pub const NO_BREAK: char = '\u{a0}';

/// Returns the text of a cell after the first column, with a symbol in front of a state.
pub fn with_symbol(text: String) -> String {
    match color_and_symbol(&text).filter(|_| SYMBOLS.get().copied().unwrap_or_default()) {
        Some((_, symbol)) => format!("{symbol}{NO_BREAK}{text}"),
        None => text,
    }
}

/// Returns the width of tables.
pub fn width() -> Option<u16> {
    WIDTH.get().copied().flatten()
}

/// Wraps a result with its own column layout to the terminal's width.
pub fn wrapped(text: String) -> String {
    match width() {
        Some(width) => wrap(&text, width.into()),
        None => text,
    }
}

/// Wraps lines at spaces. A line continues below the beginning of its last column, if that leaves half of the width.
fn wrap(text: &str, width: usize) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let column = line.rfind("  ").map_or(2, |gap| line[..gap].chars().count() + 2);
        let indent = " ".repeat(if column * 2 > width { 2 } else { column });
        let mut current = String::new();
        for word in line.split_inclusive(' ') {
            let length = current.chars().count() + word.trim_end().chars().count();
            if length > width && !current.trim().is_empty() {
                lines.push(current.trim_end().to_owned());
                current.clone_from(&indent);
            }
            current += word;
        }
        lines.push(current);
    }
    lines.join("\n")
}

/// Shortens the commands of a build log's steps to one line of the terminal. A command may be a script.
pub fn with_short_steps(log: String) -> String {
    let Some(width) = width().map(usize::from) else { return log };
    let shorten = |line: &str| {
        if !line.starts_with("Step ") || line.trim_end().chars().count() <= width {
            return line.to_owned();
        }
        let start: String = line.chars().take(width.saturating_sub(4)).collect();
        format!("{} ...\n", start.trim_end())
    };
    log.split_inclusive('\n').map(shorten).collect()
}

/// Shortens references of images to their last component: `hello@sha256:0123456789ab` with a digest, else `hello:TAG`. If
/// that is longer than `longest` characters, only the digest or the beginning is shown.
pub fn with_short_references(text: &str, longest: usize) -> String {
    let host = r"(?P<host>[A-Za-z0-9][\w.-]*(?::\d+)?)";
    let pattern = format!(
        r"(?P<before>^|\s){host}(?:/[a-z0-9._-]+)*/(?P<name>[a-z0-9._-]+)(?P<tag>:\w[\w.-]*)?(?:\s?(?P<digest>@sha256:[0-9a-f]+))?"
    );
    let shorten = |captures: &Captures<'_>| {
        let part = |name: &str| captures.name(name).map_or("", |part| part.as_str());
        let version = if part("digest").is_empty() { part("tag") } else { part("digest") };
        if version.is_empty() || !(part("host").contains(['.', ':']) || part("host") == "localhost") {
            return captures[0].to_owned();
        }
        let mut short = format!("{}{version}", part("name"));
        if short.len() > longest && part("digest").is_empty() {
            short.truncate(longest.saturating_sub(3));
            short += "...";
        } else if short.len() > longest {
            version.clone_into(&mut short);
        }
        format!("{}{short}", part("before"))
    };
    Regex::new(&pattern)
        .map_or_else(|_| text.to_owned(), |regex| regex.replace_all(text, shorten).into_owned())
}

/// Adds colors to the text of a result, if they are enabled.
pub fn with_colors(text: String) -> String {
    if COLORS.get().copied().unwrap_or_default() { colored(&text) } else { text }
}

/// Adds colors without changing any letter.
fn colored(text: &str) -> String {
    color_patterns().iter().filter_map(|pattern| Regex::new(pattern).ok()).fold(
        text.to_owned(),
        |text, pattern| {
            let paint = |captures: &Captures<'_>| {
                let symbols = STATES.map(|(.., symbol)| symbol).concat() + " ";
                let word = captures[2].trim_start_matches(|c| symbols.contains(c)).split('[').next();
                let color = word.and_then(color_and_symbol).map_or(DIM, |(color, _)| color);
                format!("{}{color}{}{RESET}{}", &captures[1], &captures[2], &captures[3])
            };
            pattern.replace_all(&text, paint).into_owned()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_references_get_short() {
        let short = |text| with_short_references(text, usize::MAX);
        assert_eq!(short("after r.example:5000/a/b/x:1-2 -> x"), "after x:1-2 -> x");
        assert_eq!(short("r.example/a/x:1\n@sha256:0123"), "x@sha256:0123");
        assert_eq!(short("localhost/x@sha256:0123 and r.example/y:2"), "x@sha256:0123 and y:2");
        for other in [
            "see /src/a.d/x.c:3:1: error",
            "src/hello/x.c:3",
            "r.example/drivers",
            "kube-system/mofed, container x",
        ] {
            assert_eq!(short(other), other);
        }
        assert_eq!(with_short_references("after r.example/x:1-6.1.0 -> x", 8), "after x:1-6... -> x");
        assert_eq!(with_short_references("r.example/x:1-6.1.0\n@sha256:0123", 12), "@sha256:0123");
    }

    const REPORT: &str = "\
payload on 6.1.0-9-amd64 (amd64): refused
MODULE      VERDICT  REASON
nvidia      refused  refused[symbol-version]: disagrees about version of symbol ib_free: found 0x00000004, wanted 0x00000005
                       help: rebuild it against the exposed headers of mofed
nvidia_uvm  loads
warning[signature], 2 modules: the module is not signed
  help: sign it
load order: nvidia, nvidia_uvm
";

    #[test]
    fn colors_change_no_letter() {
        let colored = colored(REPORT);
        let mut bare = colored.clone();
        for code in [RED, YELLOW, GREEN, DIM, RESET] {
            bare = bare.replace(code, "");
        }
        assert_eq!(bare, REPORT);
        assert!(colored.starts_with("payload on 6.1.0-9-amd64 (amd64): \u{1b}[31mrefused\u{1b}[0m\n"));
        assert!(colored.contains("\nnvidia_uvm  \u{1b}[32mloads\u{1b}[0m"), "{colored}");
        assert!(colored.contains("\u{1b}[31mrefused[symbol-version]\u{1b}[0m: disagrees"), "{colored}");
        assert!(colored.contains("\u{1b}[33mwarning[signature]\u{1b}[0m, 2 modules"), "{colored}");
        assert!(colored.contains("\u{1b}[2m"), "{colored}");
    }

    #[test]
    fn a_report_is_wrapped_below_its_columns() {
        let wrapped = wrap(REPORT, 60);
        let expected = "MODULE      VERDICT  REASON\n\
                        nvidia      refused  refused[symbol-version]: disagrees\n                     \
                        about version of symbol ib_free: found\n                     \
                        0x00000004, wanted 0x00000005\n                       \
                        help: rebuild it against the exposed\n                       headers of mofed\n\
                        nvidia_uvm  loads\n";
        assert!(wrapped.contains(expected), "{wrapped}");
        for width in [20, 40, 60] {
            let wrapped = wrap(REPORT, width);
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(&wrapped), words(REPORT));
            // The longest words have no space at which to break.
            let fits = |line: &str| line.chars().count() <= width.max(32);
            assert!(wrapped.lines().all(fits), "{width}: {wrapped}");
        }
    }

    #[test]
    fn a_word_that_stands_alone_in_its_column_is_painted() {
        let status =
            "IMAGE   KERNEL  PHASE      CHECK\nfailed  6.1.0   published  loads\nmissing images: 2\n";
        let with_colors = "IMAGE   KERNEL  PHASE      CHECK\n\
                       failed  6.1.0   \u{1b}[32mpublished\u{1b}[0m  \u{1b}[32mloads\u{1b}[0m\nmissing images: 2\n";
        assert_eq!(colored(status), with_colors, "neither a name nor a sentence");
        let symbol = "IMAGE  PHASE\nmofed  ✓ published\n";
        assert_eq!(colored(symbol), "IMAGE  PHASE\nmofed  \u{1b}[32m✓ published\u{1b}[0m\n");
    }

    #[test]
    fn symbols_are_those_of_the_page() {
        let style = include_str!("../../crates/features/dashboard/src/html/style.css");
        for (class, word) in [
            ("ok", "loads"),
            ("bad", "failed"),
            ("run", "building"),
            ("wait", "missing"),
            ("warn", "retrying"),
        ] {
            let (_, symbol) = color_and_symbol(word).unwrap();
            let rule = style.lines().flat_map(|line| line.split('}')).find(|rule| {
                rule.contains("::before")
                    && rule.contains(&format!("{symbol} "))
                    && rule.contains(&format!(".{class}:"))
            });
            assert!(rule.is_some(), "{word}: {symbol} is not the shape of .{class}");
        }
    }
}
