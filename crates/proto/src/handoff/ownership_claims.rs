//! What this node knows about the owners of flows, and the filters' map does not show yet, for a new holder of the
//! steering table.

use super::Handoff;
use super::handoff_core::CommandPurpose;
use holdfast_wire::{Flow, OwnershipRecord};

impl Handoff {
    /// Returns the flows about which a former holder has decided and whose commands are not carried out yet, with this
    /// node's claim ([`crate::table_rebuild::Claim`]); none for a flow that ended at another node. For all other flows the
    /// state in the map is the claim.
    pub fn ownership_claims(&self) -> Vec<(Flow, Option<OwnershipRecord>)> {
        let node = self.core.config.node;
        let open = self.core.open_commands.values().map(|(purpose, _)| purpose);
        let mut claims = Vec::new();
        for purpose in open.chain(self.core.failed_commands.values()) {
            match purpose {
                CommandPurpose::Activate(_, retryable) => {
                    let owned = retryable
                        .flows
                        .iter()
                        .map(|flow| (flow.flow, Some(OwnershipRecord::owned(node, flow.epoch))));
                    claims.extend(owned);
                }
                CommandPurpose::Resume(retryable) => {
                    let decided = retryable
                        .flows
                        .iter()
                        .filter(|(ending, _)| !ending.in_doubt);
                    claims.extend(decided.map(|(_, flow)| {
                        (flow.flow, Some(OwnershipRecord::owned(node, flow.epoch)))
                    }));
                }
                CommandPurpose::Close(retryable) => {
                    let yielded = retryable.flows.iter().map(|(ending, flow)| {
                        let owned = OwnershipRecord::owned(ending.acceptor, flow.epoch);
                        (flow.flow, (flow.epoch > 0).then_some(owned))
                    });
                    claims.extend(yielded);
                }
                CommandPurpose::ReadStatic { .. }
                | CommandPurpose::Drain(_)
                | CommandPurpose::Freeze(_)
                | CommandPurpose::Prepare(_)
                | CommandPurpose::Restore(_)
                | CommandPurpose::Discard(_)
                | CommandPurpose::ArbitrateForPeer { .. }
                | CommandPurpose::ArbitrateOwn { .. }
                | CommandPurpose::Lookup { .. } => {}
            }
        }
        claims
    }
}
