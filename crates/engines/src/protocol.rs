//! Checks the order of a runner's messages.
//!
//! Steps run next to the process that writes the messages. A message out of order counts as forged, because a step could use
//! one to fake its result, or the confinement that the provenance states.

use runner::wire::{Message, Outcome};

/// Protocol state of a build after the messages so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Protocol {
    steps: u32,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No message yet.
    Start,
    /// The self-test (canary) was received, and this number of steps has started.
    Steps(u32),
    /// Receiving the payload.
    Payload,
    /// The last message was received.
    End,
}

impl Protocol {
    /// Starts the protocol for a build with a number of steps.
    pub(super) fn new(steps: usize) -> Self {
        Self { steps: u32::try_from(steps).unwrap_or(u32::MAX), stage: Stage::Start }
    }

    /// Accepts a message, or describes why it is out of order.
    pub(super) fn accept(&mut self, message: &Message) -> Result<(), String> {
        self.stage = self.next(message).ok_or_else(|| self.describe_violation(message))?;
        Ok(())
    }

    fn next(self, message: &Message) -> Option<Stage> {
        let Self { steps, stage } = self;
        match (stage, message) {
            // A canary without refusals proves no confinement.
            (Stage::Start, Message::Canary(canary)) if !canary.refused.is_empty() => Some(Stage::Steps(0)),
            (Stage::Start, Message::End(Outcome::Broken(_))) => Some(Stage::End),
            (Stage::Steps(started), Message::Step(step)) if *step == started && started < steps => {
                Some(Stage::Steps(started + 1))
            }
            (Stage::Steps(started), Message::Output(_)) if started > 0 => Some(stage),
            (Stage::Steps(started), Message::Payload(_)) if started == steps => Some(Stage::Payload),
            (Stage::Payload, Message::Payload(_)) => Some(stage),
            (Stage::Steps(_) | Stage::Payload, Message::End(outcome)) => {
                self.may_end(outcome).then_some(Stage::End)
            }
            _ => None,
        }
    }

    fn may_end(self, outcome: &Outcome) -> bool {
        let started = match self.stage {
            Stage::Steps(started) => started,
            Stage::Payload => self.steps,
            Stage::Start | Stage::End => return false,
        };
        match outcome {
            Outcome::Done { .. } => self.stage == Stage::Payload,
            Outcome::Failed { step, .. }
            | Outcome::MemoryLimit { step, .. }
            | Outcome::FixedLimit { step, .. }
            | Outcome::DiskFull { step, .. } => *step == started.saturating_sub(1),
            Outcome::Broken(_) => true,
        }
    }

    fn describe_violation(self, message: &Message) -> String {
        let event = match message {
            Message::Unshared => "a request for user maps".to_owned(),
            Message::Canary(canary) if canary.refused.is_empty() => "a canary without refusals".to_owned(),
            Message::Canary(_) => "a canary".to_owned(),
            Message::Step(step) => format!("the start of step {step}"),
            Message::Output(_) => "output".to_owned(),
            Message::Payload(_) => "a payload".to_owned(),
            Message::End(Outcome::Done { .. }) => "a successful end".to_owned(),
            Message::End(_) => "an end".to_owned(),
        };
        let position = match self.stage {
            Stage::Start => "before the canary".to_owned(),
            Stage::Steps(started) => format!("after the start of {started} of {} steps", self.steps),
            Stage::Payload => "within the payload".to_owned(),
            Stage::End => "after the end".to_owned(),
        };
        format!("{event} came {position}")
    }
}

#[cfg(test)]
mod tests {
    use runner::wire::Canary;

    use super::*;

    const DONE: Outcome = Outcome::Done { size: 0, sha256: [0; 32] };

    fn canary() -> Message {
        Message::Canary(Canary { refused: vec!["a mount".to_owned()], landlock: 7 })
    }

    fn failed(step: u32) -> Message {
        Message::End(Outcome::Failed { step, why: String::new() })
    }

    /// Feeds messages of a build with two steps, and returns the violation of the last one.
    fn play(messages: impl IntoIterator<Item = Message>) -> Option<String> {
        let mut protocol = Protocol::new(2);
        let mut messages: Vec<Message> = messages.into_iter().collect();
        let last = messages.pop().unwrap();
        for message in &messages {
            protocol.accept(message).unwrap();
        }
        protocol.accept(&last).err()
    }

    #[test]
    fn a_build_in_order_is_accepted() {
        let (output, payload) = (|| Message::Output(vec![1]), || Message::Payload(vec![1]));
        let started = || [canary(), Message::Step(0), output()];
        assert_eq!(play(started()), None);
        assert_eq!(play(started().into_iter().chain([failed(0)])), None);
        let rest = [Message::Step(1), output(), output(), payload(), payload(), Message::End(DONE)];
        assert_eq!(play(started().into_iter().chain(rest)), None);
        assert_eq!(play([Message::End(Outcome::Broken("no namespaces".to_owned()))]), None);
    }

    #[test]
    fn a_message_out_of_order_is_described() {
        let violation = |messages: &[Message]| play(messages.to_vec()).unwrap_or_default();
        assert_eq!(violation(&[Message::Step(0)]), "the start of step 0 came before the canary");
        assert_eq!(violation(&[canary(), canary()]), "a canary came after the start of 0 of 2 steps");
        let started = [canary(), Message::Step(0)];
        let with = |message: Message| violation(&[started.as_slice(), &[message]].concat());
        assert_eq!(with(canary()), "a canary came after the start of 1 of 2 steps");
        assert_eq!(with(Message::Payload(vec![])), "a payload came after the start of 1 of 2 steps");
        assert_eq!(with(Message::End(DONE)), "a successful end came after the start of 1 of 2 steps");
        assert_eq!(with(failed(1)), "an end came after the start of 1 of 2 steps");
        assert_eq!(with(Message::Step(0)), "the start of step 0 came after the start of 1 of 2 steps");
        assert_eq!(with(Message::Unshared), "a request for user maps came after the start of 1 of 2 steps");
        let in_payload = [canary(), Message::Step(0), Message::Step(1), Message::Payload(vec![])];
        let with = |message: Message| violation(&[in_payload.as_slice(), &[message]].concat());
        assert_eq!(with(Message::Output(vec![])), "output came within the payload");
        assert_eq!(with(Message::Step(2)), "the start of step 2 came within the payload");
        assert_eq!(
            violation(&[Message::Canary(Canary::default())]),
            "a canary without refusals came before the canary"
        );
    }
}
