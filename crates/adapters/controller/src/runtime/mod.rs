//! Runtime of a service: leader election, metrics, health, the HTTP server, and reloading of definitions.

mod configuration;
mod connections;
mod health;
mod http;
pub mod lease;
mod metrics;

pub use configuration::{Configuration, watch_configuration};
pub use health::Health;
pub use http::{HttpError, HttpServer, names_loopback};
pub use metrics::{BuildOutcomeLabel, Metrics, ReconcileOutcomeLabel, RewriteOutcomeLabel};
