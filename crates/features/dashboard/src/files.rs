//! Writes the status pages as files with relative links, for pipelines and sites without a server.

use std::{io, path::Path};

use farrier_builder::services::{BuildServices, MAX_CONCURRENT_REQUESTS};
use farrier_core::plan::Phase;
use fs_err as fs;
use futures::{StreamExt as _, stream};
use strum::VariantArray as _;

use super::{
    action::ActionLinks,
    facts::Facts,
    fleet::{Fleet, cell_link, log_link, node_link},
    history::History,
    html::{self, HtmlError, ICON, STYLE},
    image::{CellData, Images},
    log::{Excerpts, Log},
    matrix::{Filter, OPEN},
};

/// Error of writing the status pages as files.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The directory cannot be written.
    #[error("cannot write the status pages")]
    Io(#[from] io::Error),
    /// A page could not be rendered.
    #[error(transparent)]
    Html(#[from] HtmlError),
}

/// Writes `index.html` and all pages that it links to. Replaces the pages of an earlier run and keeps other
/// files.
pub async fn write_files(
    directory: &Path,
    facts: &Facts,
    services: &BuildServices,
) -> Result<(), FilesError> {
    let history = History::default();
    let fleet = Fleet::new(facts, &history.since);
    for pages in ["c", "n"] {
        fs::create_dir_all(directory.join(pages))?;
        remove_pages(&directory.join(pages))?;
    }
    let write = |name: &str, text: String| fs::write(directory.join(name), text);
    write("style.css", STYLE.to_owned())?;
    write("icon.svg", ICON.to_owned())?;
    write("nodes.html", html::nodes_page(&fleet, String::new())?)?;
    write("rollouts.html", html::rollouts_page(facts, &ActionLinks::new(), &[])?)?;
    for name in facts.nodes.keys() {
        if let Some(page) = html::node_page(&fleet, name) {
            write(&node_link(name).link, page?)?;
        }
    }
    let images = &Images::of(services.clone());
    // `entries` and `cells` correspond to each other by index.
    let cells = fleet.entries.iter().zip(&facts.plan.cells);
    let lookups =
        cells.map(|(entry, cell)| async move { (entry, images.cell_data(&facts.plan, cell).await) });
    let mut results = stream::iter(lookups).buffered(MAX_CONCURRENT_REQUESTS);
    let excerpts = Excerpts::default();
    while let Some((entry, data)) = results.next().await {
        let log = excerpts.find(&services.cache, entry);
        if let Some(Log { path, .. }) = &log {
            fs::copy(path, directory.join(log_link(entry)))?;
        }
        write(
            &cell_link(entry.image, entry.target),
            html::cell_page(&fleet, entry, CellData { log, ..data })?,
        )?;
    }
    // Also a state without images has a page, because an earlier run may have left one.
    for state in Phase::VARIANTS.iter().map(|phase| phase.as_str()).chain([OPEN]) {
        let filter = Filter { state: state.to_owned(), ..Filter::default() };
        write(&format!("state-{state}.html"), html::fleet_page(&fleet, filter, &[])?)?;
    }
    // Write the index last, so that its links always lead to existing pages.
    write("index.html", html::fleet_page(&fleet, Filter::default(), &[])?)?;
    Ok(())
}

/// Removes the pages of an earlier run. Their cells and nodes may no longer exist.
fn remove_pages(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let stem = name.to_str().and_then(|name| name.strip_suffix(".html").or(name.strip_suffix(".txt")));
        if stem.is_some_and(|stem| stem.len() == 16 && stem.bytes().all(|byte| byte.is_ascii_hexdigit())) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
