//! Commands that must succeed are repeated for the flows that failed.
//!
//! A `Resume` is repeated until it succeeds: the record says that this node owns the flow, or nobody has decided yet, and no
//! other node serves it. The waits grow after the attempts that all commands have.

use super::command::FlowEpoch;
use super::donor_resume_or_close::EndingFlow;
use super::event::Event;
use super::handoff_core::{CommandPurpose, HandoffCore};
use super::{CommandToken, Handoff};
use core::time::Duration;
use holdfast_wire::Flow;
use holdfast_wire::failure::Failure;

/// Attempts after which a failure is reported. Most attempts of other commands than `Resume`.
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

    /// Returns the wait before this attempt: `min` at first, then twice as long each time up to `max`.
    fn wait(&self, min: Duration, max: Duration) -> Duration {
        let doublings = self.attempt.saturating_sub(ATTEMPTS_MAX).min(16);
        (min * 2_u32.pow(doublings)).min(max)
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
    /// ended, and an event reports it. If the command is repeated until it succeeds (`has_last_attempt` is false), the event
    /// reports that attempt, and no failed flow has ended.
    pub(super) fn split_ended<T: HasFlow>(
        &mut self,
        retryable: Retryable<T>,
        results: Vec<Result<(), Failure>>,
        command: &'static str,
        has_last_attempt: bool,
    ) -> (Vec<T>, Option<Retryable<T>>) {
        let attempt = retryable.attempt;
        let mut ended = Vec::with_capacity(retryable.flows.len());
        let mut to_retry = Vec::new();
        for (entry, result) in retryable.flows.into_iter().zip(results) {
            match result {
                Ok(()) => ended.push(entry),
                Err(error) => {
                    if attempt == ATTEMPTS_MAX {
                        let flow = entry.flow();
                        self.outputs.push_event(Event::CommandFailed {
                            flow,
                            command,
                            error,
                        });
                    }
                    match has_last_attempt && attempt >= ATTEMPTS_MAX {
                        true => ended.push(entry),
                        false => to_retry.push(entry),
                    }
                }
            }
        }
        let next_attempt = (!to_retry.is_empty()).then_some(Retryable {
            flows: to_retry,
            attempt: attempt.saturating_add(1),
        });
        (ended, next_attempt)
    }

    /// Returns the wait before a failed command is repeated.
    pub(super) fn retry_wait(&self, purpose: &CommandPurpose) -> Duration {
        let min = self.config.command_retry_interval;
        match purpose {
            CommandPurpose::Resume(repeat) => repeat.wait(min, self.config.holder_retry_max),
            _ => min,
        }
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
