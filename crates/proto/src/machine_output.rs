//! Outputs of the handoff machine and the migration machine: frames, commands and events for the daemon.

use holdfast_wire::{Epoch, Flow, Frame, NodeId};
use std::collections::VecDeque;

/// An action for the daemon. `C` is the machine's command, `E` its event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineOutput<C, E> {
    /// Send a frame.
    Send {
        /// Node that receives the frame, never this one.
        to: NodeId,
        /// Frame for the receiver's machines.
        frame: Frame,
    },
    /// Carry out a command and answer with the machine's `Completion`.
    Execute(C),
    /// Report an event to its observers.
    Event(E),
}

/// A flow and the epoch its entry gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowEpoch {
    /// Flow whose entry gets the epoch.
    pub flow: Flow,
    /// Epoch of the flow's entry on this node from then on.
    pub epoch: Epoch,
}

/// A frame or completion that was ignored: late, repeated, or never requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IgnoredInput {
    /// Node that sent the frame; this node for a completion.
    pub from: NodeId,
    /// Name of the frame.
    pub frame: &'static str,
    /// Reason for ignoring the frame or completion.
    pub reason: &'static str,
}

/// Outputs that the daemon has not taken yet.
#[derive(Debug)]
pub(crate) struct OutputQueue<C, E>(VecDeque<MachineOutput<C, E>>);

impl<C, E> OutputQueue<C, E> {
    pub fn new() -> Self {
        Self(VecDeque::new())
    }

    /// Returns true if the daemon has taken all outputs.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the next output.
    pub fn pop(&mut self) -> Option<MachineOutput<C, E>> {
        self.0.pop_front()
    }

    pub fn send(&mut self, to: NodeId, frame: Frame) {
        self.0.push_back(MachineOutput::Send { to, frame });
    }

    pub fn execute(&mut self, command: C) {
        self.0.push_back(MachineOutput::Execute(command));
    }

    pub fn push_event(&mut self, event: E) {
        self.0.push_back(MachineOutput::Event(event));
    }
}

impl<C, E: From<IgnoredInput>> OutputQueue<C, E> {
    /// Reports that an input was ignored.
    pub fn report_ignored(&mut self, from: NodeId, frame: &'static str, reason: &'static str) {
        let ignored = IgnoredInput {
            from,
            frame,
            reason,
        };
        self.push_event(ignored.into());
    }
}
