//! Splits a Dockerfile's text into words as builders do, with quotes, escapes and variables. The rules follow BuildKit's lexer
//! (`frontend/dockerfile/shell/lex.go`), which the classic builder also uses.

use std::{iter::Peekable, str::Chars};

/// Blanks between an instruction and its words. A line break is not a blank, because it ends the instruction.
pub(super) const BLANKS: [char; 5] = ['\t', '\u{b}', '\u{c}', '\r', ' '];
/// Maximum nesting depth of `${x:-${y:-...}}`.
const MAX_DEPTH: usize = 64;
/// Size limit of an expanded text. Linux limits arguments and variables to 128 KiB.
pub(super) const MAX_EXPANDED_SIZE: usize = 1 << 20;

/// Reason why a text cannot be split into words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// An error in every builder.
    Mistake(String),
    /// Syntax that only some builders support.
    Unsupported(String),
}

pub(super) fn mistake(reason: impl Into<String>) -> Refusal {
    Refusal::Mistake(reason.into())
}

/// Treatment of quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quotes {
    /// Quotes group words and are removed.
    Removed,
    /// Quotes group words and are kept.
    Kept,
    /// Quotes are ordinary characters.
    Plain,
}

/// Looks up the value of a variable.
pub(super) type Values<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Rules for reading a text.
#[derive(Clone, Copy)]
pub(super) struct Lexer<'a> {
    /// Removes the special meaning of the next character.
    pub(super) escape: char,
    pub(super) quotes: Quotes,
    /// Whether escape characters are kept at the outermost nesting level.
    pub(super) raw_escapes: bool,
    /// Lookup of variables; `None` leaves `$X` unchanged.
    pub(super) variables: Option<Values<'a>>,
}

impl<'a> Lexer<'a> {
    /// Creates a lexer that expands variables and removes quotes and escapes.
    pub(super) fn expanding(escape: char, variables: Values<'a>) -> Self {
        Self { escape, quotes: Quotes::Removed, raw_escapes: false, variables: Some(variables) }
    }

    /// Returns the expanded text.
    pub(super) fn text(self, text: &str) -> Result<String, Refusal> {
        Cursor::of(self, text).read_level(None, self.raw_escapes, 0).map(|(text, _)| text)
    }

    /// Returns the expanded words.
    pub(super) fn words(self, text: &str) -> Result<Vec<String>, Refusal> {
        Cursor::of(self, text).read_level(None, self.raw_escapes, 0).map(|(_, words)| words)
    }
}

struct Cursor<'a> {
    lexer: Lexer<'a>,
    /// Whether escape characters are kept at the current nesting level.
    raw_escapes: bool,
    chars: Peekable<Chars<'a>>,
    /// The current word. All nesting depths share it, as in BuildKit, so text before `${x:-y}` is lost.
    word: String,
}

impl<'a> Cursor<'a> {
    fn of<'t: 'a>(lexer: Lexer<'a>, text: &'t str) -> Self {
        Self { lexer, raw_escapes: lexer.raw_escapes, chars: text.chars().peekable(), word: String::new() }
    }

    /// Reads one nesting level, up to the `stop` character or to the end. Returns the text and its words.
    fn read_level(
        &mut self,
        stop: Option<char>,
        raw_escapes: bool,
        depth: usize,
    ) -> Result<(String, Vec<String>), Refusal> {
        if depth > MAX_DEPTH {
            return Err(mistake("variables are nested too deep"));
        }
        let outer = std::mem::replace(&mut self.raw_escapes, raw_escapes);
        let level = self.read_until(stop, depth);
        self.raw_escapes = outer;
        level
    }

    fn read_until(&mut self, stop: Option<char>, depth: usize) -> Result<(String, Vec<String>), Refusal> {
        let (escape, quotes) = (self.lexer.escape, self.lexer.quotes);
        let mut text = String::new();
        let mut words = Vec::new();
        self.word.clear();
        while let Some(&c) = self.chars.peek()
            && stop != Some(c)
        {
            let (piece, may_end_word) = match c {
                '$' => (self.variable(depth)?, true),
                '<' => (self.here_document(), false),
                '\'' if quotes != Quotes::Plain => (self.single_quoted()?, false),
                '"' if quotes != Quotes::Plain => (self.double_quoted(depth)?, false),
                _ if c == escape => (self.escaped(), false),
                _ => {
                    self.chars.next();
                    (c.to_string(), true)
                }
            };
            text.push_str(&piece);
            if text.len() > MAX_EXPANDED_SIZE {
                return Err(mistake("expanded text exceeds 1 MiB"));
            }
            if may_end_word {
                piece.chars().for_each(|c| self.add_char(c, &mut words));
            } else {
                self.word.push_str(&piece);
            }
        }
        match (self.chars.next(), stop) {
            (None, Some('}')) => return Err(mistake("`${` is not closed")),
            (None, Some(_)) => return Err(mistake("`${x/` has no second `/`")),
            (Some(_), _) | (None, None) => {}
        }
        self.end_word(&mut words);
        Ok((text, words))
    }

    fn add_char(&mut self, c: char, words: &mut Vec<String>) {
        if c.is_whitespace() {
            self.end_word(words);
        } else {
            self.word.push(c);
        }
    }

    fn end_word(&mut self, words: &mut Vec<String>) {
        if !self.word.is_empty() {
            words.push(std::mem::take(&mut self.word));
        }
    }

    /// Keeps `<< EOF`, including its blanks, in one word.
    fn here_document(&mut self) -> String {
        self.chars.next();
        if self.chars.next_if_eq(&'<').is_none() {
            return "<".to_owned();
        }
        let mut text = "<<".to_owned();
        while let Some(blank) = self.chars.next_if(|c| ['\t', '\r', ' '].contains(c)) {
            text.push(blank);
        }
        text
    }

    /// Reads an escaped character. An escape character at the end of the text escapes nothing.
    fn escaped(&mut self) -> String {
        let escape = self.chars.next().filter(|_| self.raw_escapes);
        escape.into_iter().chain(self.chars.next()).collect()
    }

    fn single_quoted(&mut self) -> Result<String, Refusal> {
        self.chars.next();
        let mut text = self.quote_if_kept("'");
        loop {
            match self.chars.next() {
                None => return Err(mistake("a ' is not closed")),
                Some('\'') => return Ok(text + &self.quote_if_kept("'")),
                Some(c) => text.push(c),
            }
        }
    }

    fn double_quoted(&mut self, depth: usize) -> Result<String, Refusal> {
        self.chars.next();
        let mut text = self.quote_if_kept("\"");
        loop {
            match self.chars.peek() {
                None => return Err(mistake("a \" is not closed")),
                Some('"') => {
                    self.chars.next();
                    return Ok(text + &self.quote_if_kept("\""));
                }
                Some('$') => text.push_str(&self.variable(depth)?),
                Some(&c) => {
                    self.chars.next();
                    let escape = self.lexer.escape;
                    if c == escape {
                        if self.raw_escapes {
                            text.push(c);
                        }
                        let escaped = self.chars.next_if(|c| ['"', '$', escape].contains(c));
                        // An escape character at the end of the text is dropped.
                        if self.chars.peek().is_some() || escaped.is_some() {
                            text.push(escaped.unwrap_or(c));
                        }
                    } else {
                        text.push(c);
                    }
                }
            }
            if text.len() > MAX_EXPANDED_SIZE {
                return Err(mistake("expanded text exceeds 1 MiB"));
            }
        }
    }

    fn quote_if_kept(&self, quote: &str) -> String {
        if self.lexer.quotes == Quotes::Kept { quote.to_owned() } else { String::new() }
    }

    /// Expands `$x`, `${x}` or `${x:-y}`.
    fn variable(&mut self, depth: usize) -> Result<String, Refusal> {
        self.chars.next();
        if self.chars.next_if_eq(&'{').is_none() {
            let name = self.read_name();
            return Ok(match self.lexer.variables {
                _ if name.is_empty() => "$".to_owned(),
                None => format!("${name}"),
                Some(values) => values(&name).unwrap_or_default(),
            });
        }
        if matches!(self.chars.peek(), None | Some('{' | '}' | ':')) {
            return Err(mistake("a `${` has no name"));
        }
        let name = self.read_name();
        let colon = self.chars.next_if_eq(&':').is_some();
        match self.chars.next() {
            Some('}') if !colon => Ok(match self.lexer.variables {
                None => format!("${{{name}}}"),
                Some(values) => values(&name).unwrap_or_default(),
            }),
            Some(operator @ ('-' | '+' | '?')) => self.conditional_value(&name, colon, operator, depth),
            Some(operator @ ('#' | '%')) if !colon => {
                let (pattern, _) = self.read_level(Some('}'), true, depth + 1)?;
                self.pattern_operation(&format!("${{{name}{operator}{pattern}}}"))
            }
            Some('/') if !colon => {
                let all = if self.chars.next_if_eq(&'/').is_some() { "/" } else { "" };
                let (pattern, _) = self.read_level(Some('/'), true, depth + 1)?;
                let (new, _) = self.read_level(Some('}'), true, depth + 1)?;
                self.pattern_operation(&format!("${{{name}/{all}{pattern}/{new}}}"))
            }
            _ => Err(mistake(format!("`${{{name}` is followed by an unknown operator"))),
        }
    }

    /// Expands `${x-word}`, `${x+word}` or `${x?word}`. With a colon before the operator, an empty value counts as no value.
    fn conditional_value(
        &mut self,
        name: &str,
        colon: bool,
        operator: char,
        depth: usize,
    ) -> Result<String, Refusal> {
        let (word, _) = self.read_level(Some('}'), false, depth + 1)?;
        let Some(values) = self.lexer.variables else {
            return Ok(format!("${{{name}{}{operator}{word}}}", if colon { ":" } else { "" }));
        };
        let value = values(name).filter(|value| !(colon && value.is_empty()));
        match (operator, value) {
            ('-', value) => Ok(value.unwrap_or(word)),
            ('+', value) => Ok(value.map(|_| word).unwrap_or_default()),
            (_, Some(value)) => Ok(value),
            (_, None) if word.is_empty() => Err(mistake(format!("{name} has no value"))),
            (_, None) => Err(mistake(format!("{name}: {word}"))),
        }
    }

    /// Refuses to expand pattern operations, which the classic builder does not support. Without variables, returns `text`.
    fn pattern_operation(&self, text: &str) -> Result<String, Refusal> {
        match self.lexer.variables {
            None => Ok(text.to_owned()),
            Some(_) => Err(Refusal::Unsupported(format!("{text} replaces parts of a value"))),
        }
    }

    /// Reads a name: digits, a single special character, or letters, digits and `_`.
    fn read_name(&mut self) -> String {
        let mut name = String::new();
        match self.chars.peek() {
            Some(c) if c.is_ascii_digit() => {
                while let Some(digit) = self.chars.next_if(char::is_ascii_digit) {
                    name.push(digit);
                }
            }
            Some(c) if "@*#?-$!".contains(*c) => name.extend(self.chars.next()),
            _ => {
                while let Some(c) = self.chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    name.push(c);
                }
            }
        }
        name
    }
}

/// Returns the words of `ENV` and `ARG`, including quotes and escapes.
pub(super) fn quoted_words(text: &str, escape: char) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote: Option<char> = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if quote.is_none() && c.is_whitespace() {
            words.extend(word.take());
            continue;
        }
        if c == escape && quote != Some('\'') {
            // A trailing escape character is dropped.
            let Some(escaped) = chars.next() else { break };
            word.get_or_insert_default().extend([c, escaped]);
            continue;
        }
        quote = match quote {
            None if c == '\'' || c == '"' => Some(c),
            Some(open) if open == c => None,
            other => other,
        };
        word.get_or_insert_default().push(c);
    }
    words.extend(word);
    words
}

/// Returns the options before an instruction's words (`--chmod=755`), without quotes and escapes, and the remaining text.
pub(super) fn options(text: &str, escape: char) -> (Vec<String>, &str) {
    let mut options = Vec::new();
    let mut rest = text.trim_start();
    while rest.starts_with("--") {
        let mut option = String::new();
        let mut quote: Option<char> = None;
        let mut end = rest.len();
        let mut chars = rest.char_indices();
        while let Some((index, c)) = chars.next() {
            if c == escape {
                option.extend(chars.next().map(|(_, escaped)| escaped));
            } else if let Some(open) = quote {
                if c == open {
                    quote = None;
                } else {
                    option.push(c);
                }
            } else if c.is_whitespace() {
                end = index;
                break;
            } else if c == '\'' || c == '"' {
                quote = Some(c);
            } else {
                option.push(c);
            }
        }
        rest = rest[end..].trim_start();
        if option == "--" {
            break;
        }
        options.push(option);
    }
    (options, rest.trim())
}

/// Parses a list in JSON form, such as `["sh", "-c", "x"]`; `None` if the text is not a list. Fails if an item is not a string.
pub(super) fn json_list(text: &str) -> Option<Result<Vec<String>, ()>> {
    let text = text.trim_start();
    let items: Vec<serde_json::Value> =
        text.starts_with('[').then(|| serde_json::from_str(text).ok()).flatten()?;
    let strings = items.into_iter().map(|item| match item {
        serde_json::Value::String(text) => Ok(text),
        _ => Err(()),
    });
    Some(strings.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(name: &str) -> Option<String> {
        [("x", "1"), ("empty", "")]
            .into_iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.to_owned())
    }

    fn expand(text: &str) -> Result<String, String> {
        Lexer::expanding('\\', &value).text(text).map_err(|error| match error {
            Refusal::Mistake(reason) => reason,
            Refusal::Unsupported(reason) => format!("unsupported: {reason}"),
        })
    }

    #[test]
    fn variables_quotes_and_escapes_are_read_as_builders_do() {
        for (text, wanted) in [
            ("a$x.b", "a1.b"),
            ("${x}y$xy", "1y"),
            ("$nonesuch-", "-"),
            (r"\$x \\ \a", r"$x \ a"),
            (r#"'$x\' "$x\a\"\$x""#, r#"$x\ 1\a"$x"#),
            ("${x:-d}${empty:-d}${empty-d}${nonesuch-d}", "1dd"),
            ("${x:+a}${empty:+a}${empty+a}${nonesuch+a}", "aa"),
            ("${nonesuch:-${empty:-${x}}}", "1"),
            ("${nonesuch:-'a b'}", "a b"),
            ("${x?no} $ $1 $@", "1 $  "),
            ("${x:?no}", "1"),
            ("a\\", "a"),
            ("<<x", "<<x"),
        ] {
            assert_eq!(expand(text).as_deref(), Ok(wanted), "{text}");
        }
        for (text, reason) in [
            ("${x", "is followed by an unknown operator"),
            ("${", "has no name"),
            ("${}", "has no name"),
            ("${x:-", "is not closed"),
            ("${x:}", "is followed by an unknown operator"),
            ("${x^y}", "is followed by an unknown operator"),
            ("${empty:?is needed}", "empty: is needed"),
            ("${nonesuch?}", "nonesuch has no value"),
            ("'a", "is not closed"),
            ("\"a", "is not closed"),
            ("\"a\\", "is not closed"),
            ("${x%1}", "unsupported: ${x%1}"),
            ("${x##1}", "unsupported"),
            ("${x/a/b}", "unsupported"),
            ("${x/a}", "no second"),
        ] {
            assert!(expand(text).unwrap_err().contains(reason), "{text}: {:?}", expand(text));
        }
    }

    #[test]
    fn nesting_and_length_have_a_bound() {
        assert!(expand(&"${y:-".repeat(100_000)).unwrap_err().contains("too deep"));
        let long = "z".repeat(MAX_EXPANDED_SIZE / 2);
        let long = |_: &str| Some(long.clone());
        for text in ["$x$x$x", "\"$x$x$x\""] {
            assert!(Lexer::expanding('\\', &long).text(text).is_err());
        }
    }

    #[test]
    fn words_keep_their_quotes_and_escapes() {
        let words = |text| quoted_words(text, '\\');
        assert_eq!(
            words(r#"a="b c" d='e f'g h=i\ j "" k\"#),
            [r#"a="b c""#, "d='e f'g", r"h=i\ j", r#""""#, "k"]
        );
        assert_eq!(words("  "), [""; 0]);
    }

    #[test]
    fn options_end_where_words_begin() {
        let split = |text| options(text, '\\');
        assert_eq!(split("--a=1 --b='x y' c --d"), (vec!["--a=1".into(), "--b=x y".into()], "c --d"));
        assert_eq!(split("-x --a"), (vec![], "-x --a"));
        assert_eq!(split("--a -- --b c "), (vec!["--a".into()], "--b c"));
        assert_eq!(split("--\\a"), (vec!["--a".into()], ""));
    }

    #[test]
    fn a_list_is_json_or_no_list() {
        assert_eq!(json_list(r#" ["a", "b\u0020"] "#), Some(Ok(vec!["a".into(), "b ".into()])));
        assert_eq!(json_list(r#"["a", 1]"#), Some(Err(())));
        assert_eq!(json_list("[ -e x ] && y"), None);
        assert_eq!(json_list("['a']"), None);
    }
}
