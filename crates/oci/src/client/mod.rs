//! Adapter: storage of images: a registry (OCI distribution protocol) or a layout directory, behind one trait.

mod auth;
mod challenge;
mod error;
mod http;
mod layout;
mod layout_sweep;
mod location;
mod mirrored;
mod pace;
mod referrers;
mod registry;
mod remote;
mod rest;
mod retry;
mod retrying;
mod room;
mod stream;
mod transport;
mod upload;

pub use self::{
    error::{ConnectionProblem, RegistryError, Result, causes, chain, connection_problem, excerpt},
    layout::LayoutRegistry,
    location::{LocationError, RegistryLocation},
    pace::{Pace, Pacer, TooSlow},
    registry::{Access, BlobContent, BlobSource, BlobStream, Credential, Registry, StoredManifest, Upload},
    remote::RemoteRegistry,
    retry::{MAX_TRIES, delay_after, pause_before, retry_delay},
    retrying::Retrying,
    room::{Room, free_space},
};
