//! The acceptor's commands: receiving connections at this node.

use holdfast_api::app::FromDaemon;
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{CommandToken, Completion, FlowToRestore, Results};
use holdfast_wire::failure::{
    Failure, NodeFault, OperatorFault, ProgramFault, ProtocolViolation, Text,
};
use holdfast_wire::frame::{BatchId, FlowToPrepare};
use holdfast_wire::{Flow, NodeId};

use super::Engine;
use super::arrivals::AnnouncedConnection;
use super::program_messages::NO_SESSION;
use super::recovered_flows::RecoveryVerdict;
use super::state_blobs::{StaticBlob, decode};
use crate::app_server::SessionId;
use crate::dataplane::FilterEntry;

/// Maximum number of ids in an `Activate` or `Cancel` message; at most 10 bytes each, so that the message fits.
pub(super) const IDS_PER_MESSAGE: usize = 4096;

impl Engine {
    /// Continues a `PrepareSockets` command after the sockets are made: waits until the programs have taken them.
    pub(super) fn await_programs(
        &mut self,
        token: CommandToken,
        flows: Vec<Flow>,
        results: Vec<Result<(), Failure>>,
    ) {
        for (flow, result) in flows.iter().zip(&results) {
            if result.is_err() {
                self.arrivals.remove(flow, &self.dataplane, &mut self.hold);
            }
        }
        let now = self.now();
        self.arrivals.await_programs(now, token, flows, results);
        self.poll_prepares();
    }

    pub(super) fn prepare_flow(
        &mut self,
        donor: NodeId,
        prepare: &FlowToPrepare,
    ) -> Result<(FilterEntry, Vec<u8>), Failure> {
        self.refuse_owned_flow(&prepare.flow)?;
        let epoch = prepare
            .epoch
            .checked_add(1)
            .ok_or(ProtocolViolation::EpochOverflow)?;
        let blob: StaticBlob = decode(&prepare.static_state)?;
        let (session, service) = self.program_or_queue_for(&prepare.flow, blob.is_unaccepted)?;
        let announced = AnnouncedConnection {
            flow: prepare.flow,
            session,
            service,
            static_state: blob.tcp,
            is_unaccepted: blob.is_unaccepted,
        };
        let slot = self
            .arrivals
            .add(&self.dataplane, &mut self.hold, announced)?;
        Ok((
            FilterEntry {
                flow: prepare.flow,
                epoch,
                peer: donor,
                hold_slot: slot,
            },
            blob.application_state.into_vec(),
        ))
    }

    /// Refuses a flow that this node owns, since no other node may give it. A flow that the holder refused to record
    /// as this node's is accepted, since another node may own it.
    pub(super) fn refuse_owned_flow(&self, flow: &Flow) -> Result<(), Failure> {
        use FlowState::{Flushing, Owned, Prepared, RedirectingData, TransitOut};
        match self.dataplane.flow(flow) {
            Some((Owned | Prepared | RedirectingData | Flushing | TransitOut, _))
                if !self.flow_history.is_unrecorded(flow) =>
            {
                Err(NodeFault::AcceptorOwnsFlow.into())
            }
            _ => Ok(()),
        }
    }

    /// Returns the session that takes a flow, and the program's number for the service.
    fn program_or_queue_for(
        &self,
        flow: &Flow,
        unaccepted: bool,
    ) -> Result<(SessionId, u32), Failure> {
        if unaccepted {
            let listener = self.arrivals.check_listener(&self.config, flow.local);
            return listener.map(|()| (NO_SESSION, 0));
        }
        self.programs.program_for(flow).ok_or_else(|| {
            OperatorFault::NoProgramServes {
                node: Text::of(&self.config.node.name),
                address: flow.local,
            }
            .into()
        })
    }

    /// Handles a program's `Received`: the program has descriptor and state of these arrivals.
    pub(super) fn on_program_received(&mut self, ids: &[u64]) {
        self.arrivals.on_received(ids);
        self.poll_prepares();
    }

    /// Handles a program's `Refused`: the program does not take these arrivals.
    pub(super) fn on_program_refused(&mut self, ids: &[u64], reason: &str) {
        self.arrivals.on_refused(ids, reason);
        self.poll_prepares();
    }

    /// Completes the prepare commands for which every program has answered, has ended, or is late.
    pub(super) fn poll_prepares(&mut self) {
        let now = self.now();
        let prepared =
            self.arrivals
                .poll_prepares(now, &self.programs, &self.dataplane, &mut self.hold);
        for completion in prepared.completions {
            self.complete_handoff_command(completion);
        }
        for (session, id) in prepared.overdue {
            let cancel = FromDaemon::Cancel {
                ids: vec![id],
                reason: "the flow was not taken in time".into(),
            };
            self.program_messages.send(session, &cancel, Vec::new());
        }
    }

    pub(super) fn restore_flows(
        &mut self,
        token: CommandToken,
        batch: BatchId,
        flows: &[FlowToRestore],
    ) {
        let results = flows
            .iter()
            .map(|restore| self.restore_flow(restore))
            .collect();
        self.arrivals.journal().record_dynamic(batch, flows);
        self.complete_handoff_command(Completion {
            token,
            results: Results::Restored(results),
        });
    }

    fn restore_flow(&mut self, restore: &FlowToRestore) -> Result<(), Failure> {
        let session = self.arrivals.session_of(&restore.flow);
        if self
            .programs
            .has_ended(session.ok_or(NodeFault::FlowNotPrepared)?)
        {
            return Err(ProgramFault::AcceptingProgramEnded.into());
        }
        self.arrivals.restore(&self.dataplane, restore)
    }

    pub(super) fn discard_arrivals(&mut self, token: CommandToken, flows: &[Flow]) {
        let reason = "the handoff was given up";
        for (session, ids) in self.arrivals.ids_by_session(flows.iter().copied()) {
            for ids in ids.chunks(IDS_PER_MESSAGE) {
                let cancel = FromDaemon::Cancel {
                    ids: ids.to_vec(),
                    reason: reason.into(),
                };
                self.program_messages.send(session, &cancel, Vec::new());
            }
        }
        for flow in flows {
            self.arrivals.remove(flow, &self.dataplane, &mut self.hold);
            self.set_recovery_verdict(flow, RecoveryVerdict::Cancelled);
        }
        self.complete_handoff_command(Completion {
            token,
            results: Results::Discarded,
        });
    }
}
