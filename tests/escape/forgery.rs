//! Forged messages of the runner, as a hostile step would write them.

use runner::wire::{Canary, Message, Outcome, frame};
use sha2::{Digest as _, Sha256};

/// Frames of a complete build: the self-test (canary), a payload, and a successful end.
pub fn ends(word: &str) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(word.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, "out/forged", word.as_bytes()).unwrap();
    let payload = tar.into_inner().unwrap();
    let end = Outcome::Done { size: payload.len() as u64, sha256: Sha256::digest(&payload).into() };
    let messages = [canary(word), Message::Payload(payload), Message::End(end)];
    messages.iter().flat_map(|message| frame(message).unwrap()).collect()
}

/// Frames of a failed build, which are valid text, for places that only hold text.
pub fn fails(word: &str) -> String {
    let end = Message::End(Outcome::Failed { step: 0, why: word.to_owned() });
    let frames = [frame(&canary(word)).unwrap(), frame(&end).unwrap()].concat();
    String::from_utf8(frames).unwrap()
}

fn canary(word: &str) -> Message {
    Message::Canary(Canary { refused: vec![word.to_owned()], landlock: 99 })
}
