//! The matrix of images and kernels, with filters.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
};

use farrier_core::{
    image::ImageName,
    kernel::{KernelTarget, version_order},
    plan::{AnnouncedBy, Phase, StatusEntry},
};
use kmod::Verdict;
use serde::Serialize;

use super::fleet::{
    Fleet, StateClass, ago, cell_link, class_of, class_of_phase, is_building, nodes_in_words,
};

/// Value of [`Filter::state`] for all cells that are neither verified nor inapplicable.
pub const OPEN: &str = "open";

/// Filter of the matrix, as given in the page's address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Filter {
    /// A part of the image's name.
    pub image: String,
    /// A part of the kernel release.
    pub kernel: String,
    /// A part of the distribution's name, version or architecture.
    pub os: String,
    /// A phase as in `farrier status`, or [`OPEN`].
    pub state: String,
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { image, kernel, os, state } = self;
        let fields = [("image", image), ("kernel", kernel), ("system", os), ("state", state)];
        let conditions = fields.into_iter().filter(|(_, value)| !value.is_empty());
        for (index, (name, value)) in conditions.enumerate() {
            write!(f, "{}{name} \"{value}\"", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl Filter {
    /// Whether the matrix shows a cell.
    fn admits(&self, image: &ImageName, target: &KernelTarget, phase: Phase, class: StateClass) -> bool {
        image.as_str().contains(&self.image)
            && target.release.as_str().contains(&self.kernel)
            && (self.os.is_empty() || platform_name(target).contains(&self.os))
            && match self.state.as_str() {
                "" => true,
                OPEN => is_open(class),
                state => state == phase.as_str(),
            }
    }
}

/// Number of cells in a state.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct StateCount {
    pub state: &'static str,
    pub class: Option<StateClass>,
    pub count: usize,
    pub chosen: bool,
}

/// Matrix of images by kernels.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Matrix {
    pub images: Vec<Column>,
    pub columns: usize,
    pub groups: Vec<Group>,
}

/// An image in the matrix.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Column {
    pub name: String,
    /// Builds in the last days, if any.
    pub builds: Option<Sparkline>,
}

/// Numbers by day as bars.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Sparkline {
    pub days: usize,
    pub sum: usize,
    pub bars: Vec<Bar>,
}

/// A bar, in units of a day and of a tenth of the picture's height.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Bar {
    pub x: usize,
    pub y: usize,
    pub height: usize,
}

impl Sparkline {
    fn of(by_day: &[usize]) -> Self {
        let highest = by_day.iter().max().copied().unwrap_or_default().max(1);
        let bars = by_day.iter().enumerate().filter(|(_, count)| **count > 0);
        let bars = bars.map(|(x, count)| {
            let height = (count * 10).div_ceil(highest);
            Bar { x, y: 10 - height, height }
        });
        Self { days: by_day.len(), sum: by_day.iter().sum(), bars: bars.collect() }
    }
}

/// The kernels of one platform.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    pub name: String,
    pub rows: Vec<Row>,
}

/// One kernel in the matrix.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    pub kernel: String,
    /// Numbers of nodes that run the kernel, and of nodes that announced it.
    pub nodes: String,
    pub cells: Vec<Option<CellView>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CellView {
    pub state: &'static str,
    pub class: StateClass,
    pub link: Option<String>,
    pub note: String,
}

impl Fleet<'_> {
    pub(super) fn counts(&self, filter: &Filter) -> Vec<StateCount> {
        let mut counts: BTreeMap<Phase, usize> = BTreeMap::new();
        let mut open = 0;
        for entry in &self.entries {
            *counts.entry(entry.row.phase).or_default() += 1;
            open += usize::from(is_open(class_of(entry)));
        }
        let count = |(phase, count): (Phase, usize)| StateCount {
            state: phase.as_str(),
            class: Some(class_of_phase(phase, Some(Verdict::Loads))),
            count,
            chosen: filter.state == phase.as_str(),
        };
        let open = StateCount { state: OPEN, class: None, count: open, chosen: filter.state == OPEN };
        std::iter::once(open).chain(counts.into_iter().map(count)).collect()
    }

    pub(super) fn matrix(&self, filter: &Filter) -> Matrix {
        let running = self.running_nodes();
        let announced = self.announcing_nodes();
        let mut cells: BTreeMap<&KernelTarget, BTreeMap<&ImageName, CellView>> = BTreeMap::new();
        for own in &self.facts.plan.own_drivers {
            if filter.admits(&own.image, &own.target, Phase::OwnDriver, StateClass::Off) {
                let (state, note) = (Phase::OwnDriver.as_str(), nodes_in_words(own.nodes.len()));
                let view = CellView { state, class: StateClass::Off, link: None, note };
                cells.entry(&own.target).or_default().insert(&own.image, view);
            }
        }
        for entry in &self.entries {
            if filter.admits(entry.image, entry.target, entry.row.phase, class_of(entry)) {
                let view = self.cell_view(entry, running.get(entry.target).copied().unwrap_or(0));
                cells.entry(entry.target).or_default().insert(entry.image, view);
            }
        }
        let images: BTreeSet<&ImageName> = cells.values().flat_map(BTreeMap::keys).copied().collect();
        let mut kernels: Vec<_> = cells.into_iter().collect();
        kernels
            .sort_by(|(a, _), (b, _)| platform_key(a).cmp(&platform_key(b)).then_with(|| newest_first(a, b)));
        let mut groups: Vec<Group> = Vec::new();
        for (target, mut views) in kernels {
            let name = platform_name(target);
            if groups.last().is_none_or(|group| group.name != name) {
                groups.push(Group { name, rows: Vec::new() });
            }
            let row = Row {
                kernel: target.release.to_string(),
                nodes: row_nodes(running.get(target).copied().unwrap_or(0), announced.get(target).copied()),
                cells: images.iter().map(|image| views.remove(*image)).collect(),
            };
            if let Some(group) = groups.last_mut() {
                group.rows.push(row);
            }
        }
        let column = |image: &&ImageName| Column {
            name: image.to_string(),
            builds: self.facts.builds.by_day.get(*image).map(|days| Sparkline::of(days)),
        };
        let images: Vec<Column> = images.iter().map(column).collect();
        Matrix { columns: images.len() + 1, images, groups }
    }

    /// Returns the number of nodes that run each kernel.
    fn running_nodes(&self) -> HashMap<&KernelTarget, usize> {
        let mut running: HashMap<&KernelTarget, usize> = HashMap::new();
        for group in &self.facts.groups {
            *running.entry(&group.target).or_default() += group.nodes.len();
        }
        running
    }

    /// Returns the announced kernels, each with the number of nodes that announced it. The number is 0 for a kernel that only a
    /// list or a package suite announces.
    fn announcing_nodes(&self) -> HashMap<&KernelTarget, usize> {
        let mut announced: HashMap<&KernelTarget, usize> = HashMap::new();
        for cell in self.facts.plan.cells.iter().filter(|cell| !cell.announced_by.is_empty()) {
            let by_source = cell.announced_by.iter().map(|source| match source {
                AnnouncedBy::Nodes { count, .. } => *count,
                AnnouncedBy::Configuration { .. } | AnnouncedBy::Tracked { .. } => 0,
            });
            let count = announced.entry(&cell.target).or_default();
            *count = by_source.sum::<usize>().max(*count);
        }
        announced
    }

    /// Returns the view of a cell. `running` is the number of nodes with the cell's kernel, which the row already shows.
    fn cell_view(&self, entry: &StatusEntry<'_>, running: usize) -> CellView {
        let row = &entry.row;
        let time = self.time(entry).filter(|_| is_building(entry));
        let since = self.state_since(entry).filter(|_| time.is_none());
        let verdict = row.verdict.filter(|verdict| *verdict != Verdict::Loads);
        let note = [
            verdict.map(|verdict| verdict.as_str().to_owned()),
            (row.nodes > 0 && row.nodes != running).then(|| nodes_in_words(row.nodes)),
            time.map(|time| time.to_string()),
            since.map(|since| ago(since, self.now)),
        ];
        CellView {
            state: row.phase.as_str(),
            class: class_of(entry),
            link: Some(cell_link(entry.image, entry.target)),
            note: note.into_iter().flatten().collect::<Vec<_>>().join(" · "),
        }
    }
}

/// Whether a cell of this class matches [`OPEN`].
fn is_open(class: StateClass) -> bool {
    !matches!(class, StateClass::Ok | StateClass::Off)
}

/// Formats the numbers of nodes of a kernel: `3 nodes · 2 announced`.
fn row_nodes(running: usize, announced: Option<usize>) -> String {
    let announced = announced.map(|count| match count {
        0 => "announced".to_owned(),
        count => format!("{count} announced"),
    });
    let running = (running > 0 || announced.is_none()).then(|| nodes_in_words(running));
    running.into_iter().chain(announced).collect::<Vec<_>>().join(" · ")
}

/// Formats a platform: `debian 12, amd64`.
fn platform_name(target: &KernelTarget) -> String {
    format!("{} {}, {}", target.os, target.os_version, target.arch)
}

fn platform_key(target: &KernelTarget) -> (&str, &str, String) {
    (target.os.as_str(), target.os_version.as_str(), target.arch.to_string())
}

fn newest_first(a: &KernelTarget, b: &KernelTarget) -> Ordering {
    version_order(&a.os, a.release.as_str())(b.release.as_str(), a.release.as_str())
}
