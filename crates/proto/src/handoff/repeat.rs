//! Commands that must succeed are repeated for the flows that failed.

use super::command::FlowEpoch;
use super::core::{Core, Purpose};
use super::event::Event;
use super::settle::Settling;
use super::{Handoff, Token};
use holdfast_wire::Flow;

/// Most attempts of such a command.
const ATTEMPTS_MAX: u32 = 5;

/// The flows of a command, and the number of its attempts.
#[derive(Debug)]
pub(super) struct Repeat<T> {
    pub flows: Vec<T>,
    attempt: u32,
}

impl<T> Repeat<T> {
    pub(super) fn first(flows: Vec<T>) -> Repeat<T> {
        Repeat { flows, attempt: 1 }
    }
}

/// The flow of an entry that a command keeps.
pub(super) trait HasFlow {
    fn flow(&self) -> Flow;
}

impl HasFlow for FlowEpoch {
    fn flow(&self) -> Flow {
        self.flow
    }
}

impl HasFlow for (Settling, FlowEpoch) {
    fn flow(&self) -> Flow {
        self.0.flow
    }
}

impl Core {
    /// Splits the flows of a command into ended and retryable ones. A flow that fails at the last attempt counts as
    /// ended, and an event reports it.
    pub(super) fn sort_ended<T: HasFlow>(
        &mut self,
        repeat: Repeat<T>,
        results: Vec<Result<(), String>>,
        command: &'static str,
    ) -> (Vec<T>, Option<Repeat<T>>) {
        let attempt = repeat.attempt;
        let mut ended = Vec::with_capacity(repeat.flows.len());
        let mut again = Vec::new();
        for (entry, result) in repeat.flows.into_iter().zip(results) {
            match result {
                Ok(()) => ended.push(entry),
                Err(_) if attempt < ATTEMPTS_MAX => again.push(entry),
                Err(why) => {
                    let flow = entry.flow();
                    self.event(Event::Failed { flow, command, why });
                    ended.push(entry);
                }
            }
        }
        let again = (!again.is_empty()).then_some(Repeat {
            flows: again,
            attempt: attempt + 1,
        });
        (ended, again)
    }
}

impl Handoff {
    /// Repeats a failed command.
    pub(super) fn command_again(&mut self, token: Token) {
        match self.core.again.remove(&token) {
            Some(Purpose::Resume(repeat)) => self.command_resume(repeat),
            Some(Purpose::Close(repeat)) => self.command_close(repeat),
            Some(Purpose::Activate(batch, repeat)) => self.command_activate(batch, repeat),
            _ => {}
        }
    }
}
