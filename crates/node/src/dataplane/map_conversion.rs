//! Conversion between the types of `wire` and the maps' bytes.

use holdfast_bpf::shared_with_c::{FlowKey, RECORD_OWNED, RECORD_TRANSIT, Record as MapRecord};
use holdfast_wire::{Flow, NodeId, OwnershipRecord, Protocol, RecordState};

/// Returns the map key of a flow.
#[must_use]
pub fn flow_key(flow: &Flow) -> FlowKey {
    FlowKey::new(flow.protocol.number(), flow.local, flow.remote)
}

/// Returns the flow of a map key; `None` for a protocol that no program writes.
#[must_use]
pub fn flow_from_key(key: &FlowKey) -> Option<Flow> {
    Flow::new(
        Protocol::from_number(key.protocol)?,
        key.local(),
        key.remote(),
    )
    .ok()
}

/// Converts the holder's record for the steering table. Packets in transit go to the acceptor, or with `via_donor` to
/// the donor.
#[must_use]
pub fn record_to_map(record: &OwnershipRecord, via_donor: bool) -> MapRecord {
    let (state, owner, acceptor) = match record.state {
        RecordState::Owned { owner } => (RECORD_OWNED, owner, NodeId(0)),
        RecordState::Transit { donor, acceptor } => (RECORD_TRANSIT, donor, acceptor),
    };
    MapRecord {
        epoch: record.epoch,
        owner: owner.0,
        acceptor: acceptor.0,
        state,
        via_donor: u8::from(via_donor && state == RECORD_TRANSIT),
        pad: [0; 2],
    }
}

/// Converts a record of the steering table; `None` for a state that no program writes.
#[must_use]
pub fn record_from_map(record: &MapRecord) -> Option<OwnershipRecord> {
    let state = match record.state {
        RECORD_OWNED => RecordState::Owned {
            owner: NodeId(record.owner),
        },
        RECORD_TRANSIT => RecordState::Transit {
            donor: NodeId(record.owner),
            acceptor: NodeId(record.acceptor),
        },
        _ => return None,
    };
    Some(OwnershipRecord {
        epoch: record.epoch,
        state,
    })
}
