//! Mutations of the signature that follows the ELF object.

use fastrand::Rng;
use kmod::Signature;

use super::{Context, Mutant};

/// Changes the record or the PKCS#7 message at the end of a signed module.
pub(super) fn signature(context: &Context<'_>, random: &mut Rng) -> Option<Mutant> {
    const MARKER: usize = 28;
    const RECORD: usize = 12;
    let signed = &context.base.signed;
    if context.base.module.signature != Signature::None || signed.len() <= context.base.object.bytes.len() {
        return None;
    }
    let message = context.base.object.bytes.len();
    let record = signed.len().checked_sub(MARKER + RECORD)?;
    // The base has no init function, so the signature does not match it. A kernel that has the key would detect that.
    let mut bytes = [&context.base.object.bytes[..], signed.get(message..)?].concat();
    let description = match random.u8(0..7) {
        0 => {
            bytes.truncate(message);
            "no signature".to_owned()
        }
        1 => {
            let more = random.usize(1..4);
            bytes.extend(vec![b'\n'; more]);
            format!("{more} bytes after the signature")
        }
        2 => {
            let offset = record + RECORD + random.usize(0..MARKER);
            *bytes.get_mut(offset)? ^= 1;
            "a damaged marker".to_owned()
        }
        3 => {
            let (offset, value) = (random.usize(0..RECORD), random.u8(..));
            *bytes.get_mut(record + offset)? = value;
            format!("byte {offset} of the record = {value}")
        }
        4 => {
            let length = u32::from_be_bytes(bytes.get(record + 8..record + 12)?.try_into().ok()?);
            let new = random.choice([0, 1, length - 1, length + 1, u32::try_from(record).ok()?, u32::MAX])?;
            bytes.get_mut(record + 8..record + 12)?.copy_from_slice(&new.to_be_bytes());
            format!("a message of {new} bytes instead of {length}")
        }
        5 => {
            bytes.truncate(signed.len() - random.usize(1..MARKER + RECORD));
            "a truncated end".to_owned()
        }
        _ => {
            let offset = random.usize(0..(record - message).min(120));
            let value = random.u8(..);
            *bytes.get_mut(message + offset)? = value;
            format!("byte {offset} of the message = {value}")
        }
    };
    // The kernel has the key and refuses a signature of another object. The check does not have the key, so such mutants are
    // skipped.
    let key = |bytes: &[u8]| match kmod::without_signature(bytes).1 {
        Signature::By(by) => Some(by.key_id),
        _ => None,
    };
    let has_original_key = key(&bytes).is_some_and(|key_id| Some(key_id) == key(signed));
    (!has_original_key).then_some(Mutant { rule: "signature", description, bytes })
}
