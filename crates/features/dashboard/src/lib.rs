//! The page of the fleet: the state of every image for every kernel, problems, and nodes at risk.
//!
//! `facts` keeps what pages show. `fleet`, `matrix`, `details`, `rollouts`, `materials` and `history` are
//! pure and derive models from the facts; `html` renders the models. The adapters [`write_files`] and
//! [`PageServer`] write a directory, and serve routes of farrier's HTTP server. [`Actions`] carries out what
//! users request on the page, if actions are enabled.
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
pub use log::built;
pub use server::PageServer;
