//! Storage of images: a registry (OCI distribution protocol) or a layout directory, behind one trait.

mod auth;
mod challenge;
mod disk_limit;
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
mod retry;
mod retry_after;
mod retrying;
mod stream;
mod transport;
mod upload;
mod versioned_tags;

pub use self::{
    disk_limit::{Bounded, DiskLimit, free_space},
    error::{
        ConnectionProblem, NotListening, RegistryError, Result, connection_problem, excerpt, root_cause,
    },
    layout::LayoutRegistry,
    location::{LocationError, RegistryLocation},
    pace::{Pace, Pacer, TooSlow},
    registry::{Access, BlobContent, BlobSource, BlobStream, Credential, Registry, StoredManifest, Upload},
    remote::RemoteRegistry,
    retry::{MAX_TRIES, delay_after, log_retry, pause_before, retry_delay},
    retrying::Retrying,
    versioned_tags::IsMovingTag,
};
