//! Adapter: what a service has around its work: leadership, metrics, health, HTTP, configuration that is read again.

mod configuration;
mod connections;
mod health;
mod http;
pub mod lease;
mod metrics;

pub use configuration::{Configuration, watch_configuration};
pub use health::Health;
pub use http::{HttpError, HttpServer, names_loopback};
pub use metrics::{BuildOutcomeLabel, Metrics, PassOutcomeLabel, RewriteOutcomeLabel};
