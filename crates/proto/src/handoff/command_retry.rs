//! Commands that must succeed are repeated for the flows that failed.

use super::command::FlowEpoch;
use super::donor_resume_or_close::EndingFlow;
use super::event::Event;
use super::handoff_core::{CommandPurpose, HandoffCore};
use super::{CommandToken, Handoff};
use holdfast_wire::Flow;
use holdfast_wire::failure::Failure;

/// Most attempts of such a command.
const ATTEMPTS_MAX: u32 = 5;

/// The flows of a command, and the number of its attempts.
#[derive(Debug)]
pub(super) struct Retryable<T> {
    pub flows: Vec<T>,
    attempt: u32,
}

impl<T> Retryable<T> {
    pub(super) fn first_attempt(flows: Vec<T>) -> Retryable<T> {
        Retryable { flows, attempt: 1 }
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

impl HasFlow for (EndingFlow, FlowEpoch) {
    fn flow(&self) -> Flow {
        self.0.flow
    }
}

impl HandoffCore {
    /// Splits the flows of a command into ended and retryable ones. A flow that fails at the last attempt counts as
    /// ended, and an event reports it.
    pub(super) fn split_ended<T: HasFlow>(
        &mut self,
        retryable: Retryable<T>,
        results: Vec<Result<(), Failure>>,
        command: &'static str,
    ) -> (Vec<T>, Option<Retryable<T>>) {
        let attempt = retryable.attempt;
        let mut ended = Vec::with_capacity(retryable.flows.len());
        let mut to_retry = Vec::new();
        for (entry, result) in retryable.flows.into_iter().zip(results) {
            match result {
                Ok(()) => ended.push(entry),
                Err(_) if attempt < ATTEMPTS_MAX => to_retry.push(entry),
                Err(error) => {
                    let flow = entry.flow();
                    self.outputs.push_event(Event::CommandFailed {
                        flow,
                        command,
                        error,
                    });
                    ended.push(entry);
                }
            }
        }
        let next_attempt = (!to_retry.is_empty()).then_some(Retryable {
            flows: to_retry,
            attempt: attempt + 1,
        });
        (ended, next_attempt)
    }
}

impl Handoff {
    /// Repeats a failed command.
    pub(super) fn retry_command(&mut self, token: CommandToken) {
        match self.core.failed_commands.remove(&token) {
            Some(CommandPurpose::Resume(repeat)) => self.command_resume(repeat),
            Some(CommandPurpose::Close(repeat)) => self.command_close(repeat),
            Some(CommandPurpose::Activate(batch, repeat)) => self.command_activate(batch, repeat),
            _ => {}
        }
    }
}
