//! `farrier ui`: the page of `farrier run`, on a port that only this machine reaches, for as long as it is looked at.

use std::{net::Ipv4Addr, process::Stdio, sync::Arc};

use clap::Args;
use jiff::Timestamp;
use serde_json::json;

use super::{
    CliError, Exit, Result, env_vars, output,
    plan::{PlanArgs, until_due},
    session::Session,
};
use crate::{
    controller::{
        Planned,
        live::{PassView, StatusSink as _},
    },
    page::PageServer,
    plan::Activity,
    runtime::{Health, HttpServer, Metrics},
};

#[derive(Debug, Args)]
pub struct UiArgs {
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Only print the address
    #[arg(long)]
    pub no_browser: bool,
}

/// Serves the page until it is stopped. It changes nothing: what is shown is what a plan finds.
pub async fn ui(session: &Session, args: UiArgs) -> Result<Exit> {
    let UiArgs { plan: PlanArgs { registry, cluster }, no_browser } = args;
    let (parts, cluster) = session.of_cluster(&registry, &cluster).await?;
    let page = PageServer::new(parts.clone());
    let definitions = Arc::new(parts.definitions.clone());
    let mut address = None;
    loop {
        match parts.plan(cluster.as_ref()).await {
            Ok(Planned { plan, snapshot, .. }) => {
                let (plan, snapshot, definitions) =
                    (Arc::new(plan), Arc::new(snapshot), Arc::clone(&definitions));
                let (activity, now) = (Activity::new(), Timestamp::now());
                let (rollouts, configuration_error) = (Vec::new(), None);
                let view =
                    PassView { plan, snapshot, definitions, activity, rollouts, configuration_error, now };
                page.pass(&view).await;
            }
            Err(error) if address.is_none() => return Err(error.into()),
            Err(error) => output::message(&CliError::from(error).render()),
        }
        if address.is_none() {
            let served = serve(session, &page).await?;
            session.show(&json!({"address": served}), |_| served.clone())?;
            if !no_browser && env_vars::has_display() {
                open(&served);
            }
            address = Some(served);
        }
        until_due(cluster.as_ref()).await;
    }
}

/// Answers on a free port of the loopback device; gives the address.
async fn serve(session: &Session, page: &Arc<PageServer>) -> Result<String> {
    let (health, metrics) = (Arc::new(Health::new()), Arc::new(Metrics::new()));
    let anywhere = (Ipv4Addr::LOCALHOST, 0).into();
    let server = HttpServer::bind(anywhere, health, metrics, page.local_router()).await?;
    let port = server.address().map(|address| address.port()).unwrap_or_default();
    tokio::spawn(server.serve(session.stop.cancel.clone()));
    Ok(format!("http://{}:{port}/", Ipv4Addr::LOCALHOST))
}

fn open(address: &str) {
    let mut browser = tokio::process::Command::new("xdg-open");
    let nowhere = browser.arg(address).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Err(error) = nowhere.spawn() {
        output::message(&format!("no browser was opened: start xdg-open: {error}"));
    }
}
