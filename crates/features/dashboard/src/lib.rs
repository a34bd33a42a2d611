//! Renders the state of the fleet as HTML, for `farrier run`, `farrier ui` and `farrier status --html`.
//!
//! The pages show the state of every image for every kernel, problems, and nodes at risk.
//!
//! `facts` holds the data of the pages. `fleet`, `matrix`, `details`, `rollouts`, `materials` and `history` are
//! pure and derive models from the facts; `html` renders the models. [`write_files`] writes the pages to a
//! directory, and [`PageServer`] serves them on farrier's HTTP port. [`Actions`] carries out the
//! actions that users request on the page, if actions are enabled.
#![forbid(unsafe_code)]

mod action;
mod actions;
mod details;
mod facts;
mod files;
mod fleet;
mod history;
mod html;
mod image;
mod log;
mod materials;
mod matrix;
mod request;
mod rollouts;
mod server;

pub use actions::Actions;
pub use facts::Facts;
pub use files::{FilesError, write_files};
pub use log::LoggedBuilds;
pub use server::PageServer;
