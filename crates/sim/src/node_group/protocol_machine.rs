//! A common interface to the handoff machine and the migration machine of `proto`, for the simulated world.

use holdfast_proto::{handoff, migration};
use holdfast_wire::{Frame, NodeId};
use std::fmt::Debug;
use std::time::Duration;

/// An output of a state machine.
#[derive(Debug)]
pub(crate) enum MachineOutput<C, E> {
    Send { to: NodeId, frame: Frame },
    Do(C),
    Event(E),
}

/// A state machine of `proto`, as the simulated world drives it.
pub(crate) trait ProtocolMachine: Debug {
    type Command: Debug;
    type Event: Debug;

    fn timeout(&mut self, now: Duration);
    fn peer_lost(&mut self, now: Duration, peer: NodeId);
    fn peer_connected(&mut self, now: Duration, peer: NodeId);
    fn next_output(&mut self) -> Option<MachineOutput<Self::Command, Self::Event>>;
    fn next_timeout(&self) -> Option<Duration>;
    fn is_idle(&self) -> bool;
}

macro_rules! machine {
    ($module:ident, $machine:ident) => {
        impl ProtocolMachine for $module::$machine {
            type Command = $module::Command;
            type Event = $module::Event;

            fn timeout(&mut self, now: Duration) {
                self.handle_timeout(now);
            }

            fn peer_lost(&mut self, now: Duration, peer: NodeId) {
                self.handle_peer_lost(now, peer);
            }

            fn peer_connected(&mut self, now: Duration, peer: NodeId) {
                self.handle_peer_connected(now, peer);
            }

            fn next_output(&mut self) -> Option<MachineOutput<Self::Command, Self::Event>> {
                Some(match self.poll_output()? {
                    $module::Output::Send { to, frame } => MachineOutput::Send { to, frame },
                    $module::Output::Execute(command) => MachineOutput::Do(command),
                    $module::Output::Event(event) => MachineOutput::Event(event),
                })
            }

            fn next_timeout(&self) -> Option<Duration> {
                self.poll_timeout()
            }

            fn is_idle(&self) -> bool {
                self.is_idle()
            }
        }
    };
}

machine!(handoff, Handoff);
machine!(migration, Migration);
