//! `farrier headers collect-driver`: packs the headers that a host's own driver exposes into one archive.

use std::path::PathBuf;

use clap::Args;
use farrier_inputs::{self as inputs, Collected, Collection};
use serde::Serialize;

use super::{Result, output, session::Session, settings};

#[derive(Debug, Args)]
pub struct CollectDriverArgs {
    /// Files and directories to collect, as paths on the host, such as /usr/src/ofa_kernel
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Mount point of the host's file system
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Release of the kernel that the headers are for, exactly as `uname -r` prints it
    #[arg(long, value_name = "RELEASE")]
    pub kernel: String,
    /// Archive to write, a .tar.gz; name it as the `tree` of the definition's need does
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
}

/// JSON output of `farrier headers collect-driver`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CollectReport {
    path: String,
    digest: String,
    size: u64,
    symbol_tables: Vec<String>,
    left_out: Vec<String>,
}

/// Writes the archive and prints a report.
pub async fn collect_driver(session: &Session, args: CollectDriverArgs) -> Result<()> {
    let CollectDriverArgs { paths, root, kernel, to } = args;
    let release = settings::parse("kernel release", &kernel)?;
    let Collected { digest, size, symvers, omitted_links } =
        inputs::collect(Collection { root, release, paths }, to.clone()).await?;
    let texts = |paths: Vec<PathBuf>| paths.iter().map(|path| path.display().to_string()).collect();
    let report = CollectReport {
        path: to.display().to_string(),
        digest: digest.to_string(),
        size,
        symbol_tables: texts(symvers),
        left_out: texts(omitted_links),
    };
    for link in &report.left_out {
        output::message(&format!("note: {link} is a dangling link on the host and was skipped"));
    }
    session.show(&report, |CollectReport { path, digest, size, symbol_tables, left_out: _ }| {
        format!("{path} ({size} bytes, {digest})\n{}", symbol_tables.join("\n"))
    })?;
    Ok(())
}
