//! Deliberate bugs, each of which breaks one rule of the state machines: the oracle must detect every one.

use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::PoolProtocol;
use holdfast_wire::rserpool::asap;
use holdfast_wire::rserpool::enrp::{EnrpBody, Message, UpdateAction};

/// A deliberate bug: the rule of the pools that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolBug {
    /// No registrar requests a handle table.
    NoTables,
    /// Handle tables end after their first block.
    OneBlock,
    /// Removals are not announced, and checksums are missing.
    NoRemovals,
    /// Additions are not announced, and checksums are missing.
    NoAdditions,
    /// Registrars neither send nor request presences.
    NoPresences,
    /// A request for a registrar's own elements returns all known elements.
    AllElements,
    /// Elements' answers to keep-alives are ignored.
    KeepAliveAcksIgnored,
    /// Elements get no keep-alives, and registrations do not expire.
    NoMonitoring,
    /// Registrars' timers do not fire.
    NoRegistrarTimers,
    /// Elements' timers do not fire.
    NoElementTimers,
    /// Users' timers do not fire.
    NoUserTimers,
}

impl PoolBug {
    /// All deliberate bugs of the pools.
    pub const ALL: [PoolBug; 11] = [
        PoolBug::NoTables,
        PoolBug::OneBlock,
        PoolBug::NoRemovals,
        PoolBug::NoAdditions,
        PoolBug::NoPresences,
        PoolBug::AllElements,
        PoolBug::KeepAliveAcksIgnored,
        PoolBug::NoMonitoring,
        PoolBug::NoRegistrarTimers,
        PoolBug::NoElementTimers,
        PoolBug::NoUserTimers,
    ];

    /// Returns a message as a node with the bug sends the message; none if the node does not send it.
    #[must_use]
    pub fn apply(self, protocol: PoolProtocol, bytes: Bytes) -> Option<Bytes> {
        match protocol {
            PoolProtocol::Asap => self.apply_to_asap(bytes),
            PoolProtocol::Enrp => self.apply_to_enrp(bytes),
        }
    }

    fn apply_to_asap(self, bytes: Bytes) -> Option<Bytes> {
        let mut message = asap::Message::parse(&bytes).ok()?.message;
        match (self, &mut message) {
            (PoolBug::KeepAliveAcksIgnored, asap::Message::EndpointKeepAliveAck { .. })
            | (PoolBug::NoMonitoring, asap::Message::EndpointKeepAlive { .. }) => return None,
            (PoolBug::NoMonitoring, asap::Message::Registration { element, .. }) => {
                element.registration_life = -1;
            }
            _ => return Some(bytes),
        }
        let mut buffer = BytesMut::new();
        message.encode(&mut buffer).ok()?;
        Some(buffer.freeze())
    }

    fn apply_to_enrp(self, bytes: Bytes) -> Option<Bytes> {
        let mut message = Message::parse(&bytes).ok()?.message;
        match (self, &mut message.body) {
            (PoolBug::NoTables, EnrpBody::HandleTableRequest { .. })
            | (PoolBug::NoPresences, EnrpBody::Presence { .. }) => return None,
            (PoolBug::AllElements, EnrpBody::HandleTableRequest { own_only }) => *own_only = false,
            (PoolBug::OneBlock, EnrpBody::HandleTableResponse { more, .. }) => *more = false,
            (PoolBug::NoRemovals, EnrpBody::HandleUpdate { action, .. })
                if *action == UpdateAction::Delete =>
            {
                return None;
            }
            (PoolBug::NoAdditions, EnrpBody::HandleUpdate { action, .. })
                if *action == UpdateAction::Add =>
            {
                return None;
            }
            (PoolBug::NoRemovals | PoolBug::NoAdditions, EnrpBody::Presence { checksum, .. }) => {
                *checksum = None;
            }
            _ => return Some(bytes),
        }
        let mut buffer = BytesMut::new();
        message.encode(&mut buffer).ok()?;
        Some(buffer.freeze())
    }
}
