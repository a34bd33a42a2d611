//! The fleet on one page: how every image stands for every kernel, what is wrong, which nodes are at risk.
//!
//! `facts` keeps what pages show; `fleet`, `matrix`, `details`, `rollouts`, `materials` and `history` are pure and make models of it; `html` writes
//! those as HTML. [`write_files`] and [`PageServer`] are the adapters: a directory, and routes of farrier's HTTP server; [`Actions`]
//! is what a person may ask for there, where that is switched on.

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
