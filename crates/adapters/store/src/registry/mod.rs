//! Access to registries: address, network and credentials. The client is [`oci::client`].

mod access;
mod annotated;
mod keyring;
mod signatures;

pub use ::oci::client::{
    Access, BlobContent, BlobSource, BlobStream, Bounded, ConnectionProblem, Credential, DiskLimit,
    LayoutRegistry, LocationError, MAX_TRIES, NotListening, Pace, Pacer, Registry, RegistryError,
    RegistryLocation, RemoteRegistry, Retrying, StoredManifest, TooSlow, Upload, connection_problem, excerpt,
    free_space, log_retry, pause_before, retry_delay, root_cause,
};

pub use self::signatures::{Joined, is_joined, join};
pub use self::{
    access::{RegistryOptions, connect, hint, is_forbidden, not_sent},
    annotated::{read_annotation, write_annotations},
    keyring::{CredentialFile, Keyring},
};
