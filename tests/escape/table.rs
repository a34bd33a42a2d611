//! The table of attacks: each attack, its position, and its verdict.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Display},
};

/// Prefix of a row, which marks it among other output.
const ROW: &str = "ROW";

/// Verdict on an attack, the worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    Denied,
    /// Without the seccomp filter the call succeeds but leads nowhere.
    Allowed,
    Metadata,
    Escaped,
}

impl Verdict {
    const ALL: [(Self, &str); 4] = [
        (Self::Denied, "denied"),
        (Self::Allowed, "allowed"),
        (Self::Metadata, "metadata"),
        (Self::Escaped, "ESCAPED"),
    ];

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, word)| *word == text).map(|(verdict, _)| *verdict)
    }

    pub fn of(is_reached: bool) -> Self {
        if is_reached { Self::Escaped } else { Self::Denied }
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, word) = Self::ALL.iter().find(|(verdict, _)| verdict == self).unwrap_or(&Self::ALL[3]);
        f.write_str(word)
    }
}

/// One attack from one position.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    pub attack: String,
    pub place: String,
    pub verdict: Verdict,
}

impl Row {
    pub fn new(place: &str, attack: &str, verdict: Verdict) -> Self {
        Self { attack: attack.to_owned(), place: place.to_owned(), verdict }
    }

    /// Parses a line of the attacking program: `PLACE: ATTACK: RESULT`.
    pub fn attacked(line: &str) -> Option<Self> {
        let (before, verdict) = line.rsplit_once(": ")?;
        let (place, attack) = before.split_once(": ")?;
        Some(Self::new(place, attack, Verdict::parse(verdict)?))
    }

    /// Parses the printed form of a [`Row`].
    pub fn printed(line: &str) -> Option<Self> {
        let mut fields = line.trim_end().strip_prefix(ROW)?.split('|').skip(1);
        let (place, attack, verdict) = (fields.next()?, fields.next()?, fields.next()?);
        Some(Self::new(place, attack, Verdict::parse(verdict)?))
    }
}

impl Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ROW}|{}|{}|{}", self.place, self.attack, self.verdict)
    }
}

/// Verdicts by attack and position. For an attack that ran several times from one position, the worst verdict counts.
pub struct Table(BTreeMap<String, BTreeMap<String, Verdict>>);

impl Table {
    pub fn new(rows: impl IntoIterator<Item = Row>) -> Self {
        let mut table: BTreeMap<String, BTreeMap<String, Verdict>> = BTreeMap::new();
        for row in rows {
            let worst = table.entry(row.attack).or_default().entry(row.place).or_insert(Verdict::Denied);
            *worst = row.verdict.max(*worst);
        }
        Self(table)
    }

    /// Attacks that escaped, with their positions.
    pub fn escapes(&self) -> Vec<String> {
        self.with(Verdict::Escaped)
    }

    /// Attacks and positions with this verdict.
    pub fn with(&self, verdict: Verdict) -> Vec<String> {
        let all = self.0.iter().flat_map(|(attack, places)| places.iter().map(move |place| (attack, place)));
        all.filter(|(_, (_, found))| **found == verdict)
            .map(|(attack, (place, _))| format!("{attack} ({place})"))
            .collect()
    }

    /// Whether an attack ran from a position.
    pub fn has(&self, attack: &str, place: &str) -> bool {
        self.0.get(attack).is_some_and(|places| places.contains_key(place))
    }

    /// Number of attacks that ran from a position.
    pub fn count(&self, place: &str) -> usize {
        self.0.values().filter(|places| places.contains_key(place)).count()
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: BTreeSet<&String> = self.0.values().flat_map(BTreeMap::keys).collect();
        for (attack, found) in &self.0 {
            let verdicts: BTreeSet<Verdict> = found.values().copied().collect();
            write!(f, "{attack:44}")?;
            if let (1, Some(verdict)) = (verdicts.len(), verdicts.first()) {
                write!(f, "{verdict} in {}", found.len())?;
            } else {
                for place in &places {
                    if let Some(verdict) = found.get(*place) {
                        write!(f, "{place}: {verdict}; ")?;
                    }
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
