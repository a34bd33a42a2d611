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

/// Sets the presentation from the command line, the environment and the terminal, once.
pub fn set(global: &Global) {
    let is_terminal = io::stdout().is_terminal();
    let colors = match global.color {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => env_vars::forced_colors().unwrap_or(is_terminal),
    };
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

/// Returns the text of a cell after the first column, with a symbol in front of a state.
pub fn with_symbol(text: String) -> String {
    match color_and_symbol(&text).filter(|_| SYMBOLS.get().copied().unwrap_or_default()) {
        Some((_, symbol)) => format!("{symbol} {text}"),
        None => text,
    }
}

/// Returns the width of tables.
pub fn width() -> Option<u16> {
    WIDTH.get().copied().flatten()
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
