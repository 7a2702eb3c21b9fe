//! What this node knows about the records of moves, for a new holder of the steering table.

use super::Migration;
use super::acceptor::{InboundMove, InboundMoveStage};
use super::crash_recovery::COMMITTED_EPOCH;
use super::donor::{OutboundMove, OutboundMoveStage};
use super::donor_divert::OutboundFlowState;
use super::requests_to_holder::TRANSIT_EPOCH;
use holdfast_wire::{Epoch, Flow, MoveId, OwnershipRecord};

/// Flows and processes with this node's claims; none for one about which another node decides.
type Claims = Vec<(Flow, Option<OwnershipRecord>)>;

impl Migration {
    /// Returns this node's claims ([`crate::table_rebuild::Claim`]) about moving processes, and about those of their flows
    /// whose state in the filters' map says less; none for a flow about which another node decides. For all other flows
    /// the state in the map is the claim.
    pub fn ownership_claims(&self) -> Vec<(Flow, Option<OwnershipRecord>)> {
        let mut claims = Vec::new();
        for (id, outbound) in &self.outbound_moves {
            self.add_outbound_claims(*id, outbound, &mut claims);
        }
        for (id, inbound) in &self.inbound_moves {
            self.add_inbound_claims(*id, inbound, &mut claims);
        }
        claims
    }

    fn add_outbound_claims(&self, id: MoveId, outbound: &OutboundMove, claims: &mut Claims) {
        use OutboundFlowState::{Closed, Diverted, Frozen, Owned, Unrecorded};
        let (node, to) = (self.core.config.node, outbound.to);
        let is_back = match outbound.stage {
            OutboundMoveStage::Removing => return,
            OutboundMoveStage::Thawing => true,
            _ => false,
        };
        let is_gone = outbound.is_committed || outbound.stage == OutboundMoveStage::Releasing;
        let process = Flow::process_key(id);
        if is_back {
            let owned = |epoch| (process, Some(OwnershipRecord::owned(node, epoch)));
            claims.extend(outbound.record_epoch.map(owned));
        } else if is_gone {
            claims.push((process, Some(OwnershipRecord::owned(to, COMMITTED_EPOCH))));
        } else if outbound.maybe_diverted {
            let transit = OwnershipRecord::transit(node, to, TRANSIT_EPOCH);
            claims.push((process, Some(transit)));
        }
        for (flow, entry) in &outbound.flows {
            let record = match entry.state {
                Unrecorded => None,
                // The map shows the acceptor once the release is carried out.
                Diverted | Frozen if is_gone => {
                    let epoch = entry.epoch.saturating_add(TRANSIT_EPOCH);
                    Some(OwnershipRecord::owned(to, epoch))
                }
                Diverted | Frozen if !is_back => {
                    let epoch = entry.epoch.saturating_add(1);
                    Some(OwnershipRecord::transit(node, to, epoch))
                }
                Owned | Closed | Diverted | Frozen => {
                    Some(OwnershipRecord::owned(node, entry.epoch))
                }
            };
            claims.push((*flow, record));
        }
    }

    fn add_inbound_claims(&self, id: MoveId, inbound: &InboundMove, claims: &mut Claims) {
        let node = self.core.config.node;
        let process = Flow::process_key(id);
        match inbound.stage {
            // The daemon may have died before the map showed that the flows were committed with the process.
            InboundMoveStage::Committing if inbound.is_committed => {
                let owned = |epoch| Some(OwnershipRecord::owned(node, epoch));
                claims.push((process, owned(COMMITTED_EPOCH)));
                let flows = inbound.flows.iter();
                let committed = |epoch: Epoch| owned(epoch.saturating_add(TRANSIT_EPOCH));
                claims.extend(flows.map(|flow| (flow.flow, committed(flow.epoch))));
            }
            InboundMoveStage::Committing => {
                let transit = |epoch| Some(OwnershipRecord::transit(id.donor, node, epoch));
                claims.push((process, transit(TRANSIT_EPOCH)));
                let flows = inbound.flows.iter();
                claims.extend(flows.map(|flow| (flow.flow, transit(flow.epoch.saturating_add(1)))));
            }
            InboundMoveStage::Resuming | InboundMoveStage::Running => {
                let owned = |epoch| Some(OwnershipRecord::owned(node, epoch));
                claims.push((process, owned(inbound.epoch)));
                if inbound.stage == InboundMoveStage::Resuming {
                    let flows = inbound.owned_flows.iter();
                    claims.extend(flows.map(|(flow, epoch)| (*flow, owned(*epoch))));
                }
            }
            InboundMoveStage::Examining
            | InboundMoveStage::Building
            | InboundMoveStage::Waiting
            | InboundMoveStage::Restoring
            | InboundMoveStage::Forgetting => {}
        }
    }
}
