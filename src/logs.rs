//! `farrier logs`: prints the log of an image's latest build for a kernel.

use std::{collections::BTreeSet, slice, time::Duration};

use clap::Args;
use farrier_builder::{LogReader, logs_for};
use farrier_core::kernel::KernelRelease;
use oci::error_chain;

use super::{
    CliError, Exit, Result,
    args::KernelArg,
    output,
    session::Session,
    settings::{self, Settings, open_cache, parse},
};

/// Interval at which a growing log is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the driver image
    pub image: String,
    #[command(flatten)]
    pub kernel: KernelArg,
    /// Platform, if builds for several platforms have this release: debian-12-arm64
    #[arg(long)]
    pub platform: Option<String>,
    /// Continue until the build ends
    #[arg(long, short)]
    pub follow: bool,
}

/// Prints the log; with `--follow`, until the build ends.
pub async fn logs(session: &Session, args: LogsArgs) -> Result<Exit> {
    let LogsArgs { image, kernel, platform, follow } = args;
    let cache = open_cache(&session.global)?;
    let mut logs = logs_for(&cache, &parse("image", &image)?)?;
    let absent = |build: &str| {
        CliError::absent(
            format!("the cache {} has no log of a build of {build}", cache.root().display()),
            "the log is on the machine that built the image: pass its cache with --cache-dir, or run this command in the pod that \
             builds (kubectl exec); an image pulled from a registry has no log",
        )
    };
    if let Some(given) = kernel.get() {
        parse::<KernelRelease>("--kernel", given)?;
    }
    if logs.is_empty() {
        // Only readable definitions show that the name is wrong.
        if let Ok(definitions) = Settings::definitions(session.global.definitions.as_deref()) {
            settings::images(slice::from_ref(&image), &definitions)?;
        }
        return Err(absent(&image));
    }
    let kernel =
        kernel.or_only(&format!("the cache has logs of {image}"), logs.iter().map(|log| &log.release))?;
    let known: BTreeSet<String> = logs.iter().map(|log| log.release.to_string()).collect();
    logs.retain(|log| log.release == kernel);
    if logs.is_empty() {
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        let message = format!("the cache {} has no log of {image} for {kernel}", cache.root().display());
        return Err(CliError::absent(message, format!("kernels with logs: {known}")));
    }
    if let Some(platform) = &platform {
        let available: BTreeSet<String> = logs.iter().map(|log| log.platform.clone()).collect();
        logs.retain(|log| log.platform == *platform);
        if logs.is_empty() {
            let available = available.into_iter().collect::<Vec<_>>().join(", ");
            let message = format!("there is no log of {image} for {kernel} on platform {platform}");
            return Err(CliError::absent(message, format!("available platforms: {available}")));
        }
    }
    let platforms: BTreeSet<&str> = logs.iter().map(|log| log.platform.as_str()).collect();
    if platforms.len() > 1 {
        let platforms = platforms.into_iter().collect::<Vec<_>>().join(", ");
        return Err(CliError::hinted(
            format!("{image} was built for {kernel} on several platforms: {platforms}"),
            "choose one with --platform",
        ));
    }
    let newest = logs.into_iter().next().map(|log| log.path);
    let path = newest.ok_or_else(|| absent(&format!("{image} for {kernel}")))?;
    let unreadable = |error| CliError::usage(format!("log of {image} for {kernel}: {}", error_chain(&error)));
    let mut reader = LogReader::open(&path, 0).map_err(unreadable)?;
    loop {
        let (text, may_grow) = reader.read_new().map_err(unreadable)?;
        output::part(&output::look::with_short_steps(String::from_utf8_lossy(&text).into_owned()))?;
        if !(follow && may_grow) {
            return Ok(Exit::Done);
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = session.stop.cancel.cancelled() => return Ok(Exit::Interrupted),
        }
    }
}
