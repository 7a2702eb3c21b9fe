//! Deliberate faults, each of which breaks one rule of registrars. The oracles must find every one.

use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::PoolProtocol;
use holdfast_wire::rserpool::enrp::{EnrpBody, Message, UpdateAction};
use holdfast_wire::rserpool::{RegistrarId, asap};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// No handle tables are requested.
    NoTableRequests,
    /// Handle tables end after their first block.
    FirstBlockOnly,
    /// Removals are not announced, and checksums do not show them.
    NoRemovals,
    /// Additions are not announced, and checksums do not show them.
    NoAdditions,
    /// No presence is sent or requested.
    NoPresence,
    /// Elements' answers to keep-alives do not count.
    IgnoresAcks,
    /// Elements get no keep-alives, and registrations do not expire.
    NoSupervision,
}

pub const ALL_FAULTS: [Fault; 7] = [
    Fault::NoTableRequests,
    Fault::FirstBlockOnly,
    Fault::NoRemovals,
    Fault::NoAdditions,
    Fault::NoPresence,
    Fault::IgnoresAcks,
    Fault::NoSupervision,
];

impl Fault {
    /// Applies the fault to a message from a registrar.
    pub fn apply_to_registrar_message(self, protocol: PoolProtocol, bytes: Bytes) -> Option<Bytes> {
        match (self, protocol) {
            (Fault::None, _) => Some(bytes),
            (_, PoolProtocol::Enrp) => self.apply_to_enrp(bytes),
            (Fault::NoSupervision, PoolProtocol::Asap) => {
                let parsed = asap::Message::parse(&bytes).ok()?;
                let asks = matches!(parsed.message, asap::Message::EndpointKeepAlive { .. });
                (!asks).then_some(bytes)
            }
            _ => Some(bytes),
        }
    }

    fn apply_to_enrp(self, bytes: Bytes) -> Option<Bytes> {
        let mut message = Message::parse(&bytes).ok()?.message;
        match (self, &mut message.body) {
            (Fault::NoTableRequests, EnrpBody::HandleTableRequest { .. })
            | (Fault::NoPresence, EnrpBody::Presence { .. }) => return None,
            (Fault::FirstBlockOnly, EnrpBody::HandleTableResponse { more, .. }) => *more = false,
            (Fault::NoRemovals, EnrpBody::HandleUpdate { action, .. })
                if *action == UpdateAction::Delete =>
            {
                return None;
            }
            (Fault::NoAdditions, EnrpBody::HandleUpdate { action, .. })
                if *action == UpdateAction::Add =>
            {
                return None;
            }
            (Fault::NoRemovals | Fault::NoAdditions, EnrpBody::Presence { checksum, .. }) => {
                *checksum = None;
            }
            _ => {}
        }
        let mut buffer = BytesMut::new();
        message.encode(&mut buffer).ok()?;
        Some(buffer.freeze())
    }

    /// Applies the fault to a message from an element.
    pub fn apply_to_element_message(self, mut message: asap::Message) -> Option<asap::Message> {
        match (self, &mut message) {
            (Fault::IgnoresAcks, asap::Message::EndpointKeepAliveAck { .. }) => None,
            (Fault::NoSupervision, asap::Message::Registration { element, .. }) => {
                element.registration_life = -1;
                Some(message)
            }
            _ => Some(message),
        }
    }
}

/// Returns the registrar's number in one of its lives.
pub fn registrar_id(random: u64) -> RegistrarId {
    RegistrarId((random as u32).max(1))
}
