//! The acceptor's last command: activating connections at this node.

use holdfast_api::app::FromDaemon;
use holdfast_bpf::shared_with_c::FlowState;
use holdfast_proto::handoff::{CommandToken, Completion, FlowEpoch, Results};
use holdfast_wire::failure::Failure;

use super::Engine;
use super::acceptor::IDS_PER_MESSAGE;
use crate::failure_conversion::IntoFailure;

impl Engine {
    pub(super) fn activate_arrivals(&mut self, token: CommandToken, flows: &[FlowEpoch]) {
        let results = match self.activate_flows(flows) {
            Ok(results) => results,
            Err(error) => {
                let failed = flows.iter().map(|_| Err(error.clone())).collect();
                return self.complete_handoff_command(Completion {
                    token,
                    results: Results::Activated(failed),
                });
            }
        };
        // The donor can be answered before the remaining steps.
        self.complete_handoff_command(Completion {
            token,
            results: Results::Activated(results),
        });
        self.finish_activation(flows);
    }

    /// Activates the sockets. Fails if the flow table refuses the change, in which case no socket becomes active.
    pub(super) fn activate_flows(
        &mut self,
        flows: &[FlowEpoch],
    ) -> Result<Vec<Result<(), Failure>>, Failure> {
        let entries = self.arrivals.flushing_entries(flows);
        self.dataplane
            .set_flows(&entries, FlowState::Flushing)
            .map_err(IntoFailure::into_failure)?;
        let activate = |flow_epoch: &FlowEpoch| {
            match self.arrivals.is_unaccepted(&flow_epoch.flow) {
                None => return self.on_owned_verdict(flow_epoch),
                Some(true) => return self.create_or_wait(flow_epoch),
                Some(false) => {}
            }
            self.arrivals
                .activate(self.hold.device(), &flow_epoch.flow)?;
            self.flow_history.on_taken(flow_epoch.flow);
            Ok(())
        };
        Ok(flows.iter().map(activate).collect())
    }

    /// Creates the connection of a flow that this node has just become the owner of, or lets it wait. Its packets are
    /// held until the connection exists.
    fn create_or_wait(&mut self, flow_epoch: &FlowEpoch) -> Result<(), Failure> {
        let attempt =
            self.arrivals
                .create_queued(&self.dataplane, self.hold.device(), flow_epoch)?;
        // Packets that arrived in the meantime are added to the held ones.
        self.read_hold();
        self.arrivals
            .end_queued(&self.dataplane, &mut self.hold, attempt)
    }

    /// Notifies the programs, replays held packets, and releases the arrivals' resources.
    pub(super) fn finish_activation(&mut self, flows: &[FlowEpoch]) {
        self.send_activate_messages(flows);
        self.read_hold();
        self.arrivals
            .replay_held(&self.dataplane, &self.hold, flows);
        self.read_hold();
        let owned_entries = self.arrivals.owned_entries(flows);
        if let Err(error) = self.dataplane.set_flows(&owned_entries, FlowState::Owned) {
            tracing::error!(%error, "cannot mark flows as owned: their packets stay held");
        }
        // Packets can enter the hold between the last read and the state change.
        self.read_hold();
        self.release_arrivals(flows);
    }

    /// Notifies the programs that the flows are theirs.
    fn send_activate_messages(&mut self, flows: &[FlowEpoch]) {
        let flows = flows.iter().map(|flow_epoch| flow_epoch.flow);
        for (session, ids) in self.arrivals.ids_by_session(flows) {
            for ids in ids.chunks(IDS_PER_MESSAGE) {
                let activate = FromDaemon::Activate { ids: ids.to_vec() };
                self.program_messages.send(session, &activate, Vec::new());
            }
        }
    }

    /// Releases the resources of activated connections, which their programs have from now on.
    fn release_arrivals(&mut self, flows: &[FlowEpoch]) {
        let now = self.now();
        for flow_epoch in flows {
            let flow = flow_epoch.flow;
            let released = self
                .arrivals
                .release(now, &self.dataplane, &mut self.hold, &flow);
            if let Some(session) = released {
                self.programs.set_owner(session, flow);
            }
        }
    }
}
