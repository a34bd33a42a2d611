//! Landlock, which restricts a build together with the seccomp filter (`filter`). Landlock denies access to files
//! outside the root, even to a process that holds a descriptor of a directory outside.

use std::io;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, LandlockStatus, PathBeneath, PathFd,
    Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetError, Scope,
};

/// Newest Landlock ABI that this program uses. An older kernel enforces only the access rights that it knows.
const NEWEST: ABI = ABI::V8;

/// First Landlock ABI that restricts `truncate(2)` of a path.
pub const FIRST_ABI_WITH_TRUNCATE: u32 = 3;

/// Restricts this process and its children. They can access only files below their root, cannot use TCP, and cannot send signals
/// or connect abstract sockets to processes outside. Returns the kernel's Landlock ABI, or 0 if no ruleset was installed.
///
/// ABI 1 counts as 0, because it denies every rename and link between two directories.
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
    let all_access = AccessFs::from_all(NEWEST);
    let restricted = Ruleset::default()
        .handle_access(all_access)?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rule(PathBeneath::new(root, all_access))?
        .restrict_self()?;
    Ok(restricted.landlock)
}
