//! The kernel must accept the module's signature (`module_sig_check` in `kernel/module/signing.c`).
//!
//! Without enforcement the kernel tolerates three results of the verification: no signature (`ENODATA`), unsupported
//! kind or digest (`ENOPKG`, since Linux 5.4, commit 49fcf732bdae), and unknown key (`ENOKEY`). All other results
//! refuse the module, for example a damaged record or message (`EBADMSG`) or a wrong signature (`EKEYREJECTED`).
//! Without `CONFIG_MODULE_SIG` the kernel ignores signatures.

use super::Subject;
use crate::{FactSource, Finding, KernelFacts, Known, Rule, Signature, Verdict};

/// Advice for a module whose signing key the kernel may lack.
const COMPARE_KEYS: &str = "compare the key with the kernel's (keyctl list %:.builtin_trusted_keys, mokutil --list-enrolled), \
                            or boot the kernel";

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    if !kernel.config.is_set("MODULE_SIG") {
        return;
    }
    let finding = |verdict, message: String, remedy: &str| {
        Finding::new(Rule::Signature, verdict, "signature", message, remedy)
    };
    let sign = "sign it with a key that the kernel trusts, after everything that changes the file";
    let enforced = kernel.enforces_signatures();
    let (verdict, because) = tolerated_problem(kernel, enforced.as_ref());
    let may_lock_down = enforced.is_none() && kernel.locks_down_under_secure_boot();
    findings.push(match &subject.module.signature {
        // Drivers are rarely signed when they are built. The report's taints already show a missing signature.
        Signature::None if verdict == Verdict::Loads && !may_lock_down => return,
        Signature::None => {
            let finding = finding(verdict, format!("the module is not signed: {because}"), sign);
            // Under lockdown the kernel's message contains the name of the program that loads the module. Before Linux 5.4, there is
            // no message.
            if verdict == Verdict::Refused && !kernel.is_locked_down() && kernel.since(5, 4) {
                finding.with_kernel_message("EKEYREJECTED", "Loading of unsigned module is rejected")
            } else {
                finding
            }
        }
        Signature::TrailingBytes(after) => {
            let bytes = if *after == 1 { "1 byte follows".to_owned() } else { format!("{after} bytes follow") };
            finding(
                verdict,
                format!("{bytes} the signature, so the kernel treats the module as unsigned: {because}"),
                "sign it again, and append nothing afterwards",
            )
        }
        Signature::Malformed(problem) => finding(
            Verdict::Refused,
            format!("the signature {problem}: the kernel refuses it, whether or not it enforces signatures"),
            "sign it again with the kernel's scripts/sign-file, or remove the signature with strip",
        ),
        Signature::Unsupported(kind) => finding(
            if kernel.since(5, 4) { verdict } else { verdict.max(Verdict::Unknown) },
            format!("the signature is not in PKCS#7 form (ENOPKG): {because}"),
            "sign it with the scripts/sign-file of this kernel",
        )
        .found(format!("kind {kind}"))
        .wanted("kind 2"),
        Signature::By(signer) if kernel.beyond_headers.trusted_keys.contains(&signer.key_id) => return,
        Signature::By(signer) if verdict == Verdict::Loads => {
            // In-tree modules are signed with a key that the kernel has.
            if !may_lock_down || subject.module.field("intree").is_some() {
                return;
            }
            let signer = signer.name.as_deref().unwrap_or(&signer.key_id);
            finding(verdict, format!("the kernel may lack the key of {signer}: {because}"), COMPARE_KEYS)
        }
        Signature::Unread(_) if verdict == Verdict::Loads => return,
        Signature::By(signer) => finding(
            Verdict::Unknown,
            format!(
                "the signature is well-formed, and only the kernel's keys can tell whether it is valid (signed by {})",
                signer.name.as_deref().unwrap_or(&signer.key_id)
            ),
            COMPARE_KEYS,
        ),
        Signature::Unread(problem) => finding(
            Verdict::Unknown,
            format!("the signature {problem}, which farrier cannot read"),
            "sign it with the scripts/sign-file of this kernel, or boot the kernel",
        ),
    });
}

/// Verdict for a signature problem that the kernel tolerates without enforcement, with the reason.
fn tolerated_problem(kernel: &KernelFacts, enforced: Option<&Known<bool>>) -> (Verdict, String) {
    let loads = "the kernel loads it and taints itself";
    match enforced {
        Some(Known { value: true, source }) => {
            let source = match source {
                FactSource::Config if kernel.config.is_set("LOCK_DOWN_MANDATORY") => {
                    "CONFIG_LOCK_DOWN_MANDATORY".to_owned()
                }
                FactSource::Config if kernel.is_locked_down() => "CONFIG_LOCK_DOWN_KERNEL_FORCE_*".to_owned(),
                FactSource::Config => "CONFIG_MODULE_SIG_FORCE".to_owned(),
                other => other.to_string(),
            };
            let because =
                format!("the kernel rejects it, because it enforces signatures, according to {source}");
            (Verdict::Refused, because)
        }
        Some(Known { value: false, .. }) => (Verdict::Loads, loads.to_owned()),
        None if kernel.locks_down_under_secure_boot() => {
            let unless = "under Secure Boot it locks itself down and refuses the module";
            (Verdict::Loads, format!("{loads}, but {unless}"))
        }
        None => (Verdict::Loads, format!("{loads}, unless it is started with module.sig_enforce")),
    }
}
