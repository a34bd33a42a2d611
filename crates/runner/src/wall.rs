//! The second wall around a build: Landlock, which refuses files outside of the root even to a process that holds a descriptor
//! of one.

use std::io;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, LandlockStatus, PathBeneath, PathFd,
    Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetError, Scope,
};

/// Newest version of Landlock whose rights are known here. An older kernel enforces the rights that it has.
const NEWEST: ABI = ABI::V8;

/// The first ABI that watches over `truncate(2)` of a path.
pub const WATCHES_TRUNCATE: u32 = 3;

/// Restricts this process and all that it starts to files below its root, without TCP, and without signals and abstract
/// sockets to processes outside. Returns the kernel's Landlock ABI, or 0 where the wall does not stand.
///
/// With ABI 1 it does not: every rename or link between two directories would fail.
pub fn restrict() -> io::Result<u32> {
    let strict = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    if strict.handle_access(AccessFs::Refer).is_err() {
        return Ok(0);
    }
    let root = PathFd::new("/").map_err(io::Error::other)?;
    let status = restrict_to(root).map_err(io::Error::other)?;
    Ok(match status {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            kernel_abi.and_then(|abi| u32::try_from(abi).ok()).unwrap_or(effective_abi as u32)
        }
        LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => 0,
    })
}

fn restrict_to(root: PathFd) -> Result<LandlockStatus, RulesetError> {
    let everything = AccessFs::from_all(NEWEST);
    let restricted = Ruleset::default()
        .handle_access(everything)?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rule(PathBeneath::new(root, everything))?
        .restrict_self()?;
    Ok(restricted.landlock)
}
