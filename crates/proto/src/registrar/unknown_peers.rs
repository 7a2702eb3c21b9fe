//! Registrars heard of by multicast, which are called to verify that they exist.
//!
//! A forger of datagrams can name any number of registrars. Therefore only a few are called at the same time, and
//! none that failed to answer recently. Registrars at the usual port have call slots of their own: of these there are
//! no more than allowed addresses.

use super::associations::{endpoints, is_registrar_permitted};
use super::dials::DialPurpose;
use super::{PoolProtocol, Registrar};
use holdfast_wire::rserpool::{SctpTransport, enrp};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Most calls at the same time, separately for the usual port and others.
const DIALS_MAX: usize = 16;
/// Most addresses remembered as silent.
const SILENT_MAX: usize = 4_096;
/// Time for which an address counts as silent, in pauses between two attempts.
const SILENT_RETRIES: u32 = 10;

/// Addresses that did not answer, and the time until which they are not called again.
#[derive(Debug, Default)]
pub(super) struct UnknownPeers {
    silent_until: BTreeMap<SocketAddr, Duration>,
}

impl UnknownPeers {
    /// Returns true if a call of this address failed recently.
    fn is_silent(&self, now: Duration, at: SocketAddr) -> bool {
        let until = self.silent_until.get(&at);
        until.is_some_and(|until| now < *until)
    }

    /// Remembers an address that did not answer, if there is room.
    fn mark_silent(&mut self, now: Duration, at: SocketAddr, until: Duration) {
        let silent = &mut self.silent_until;
        if silent.len() >= SILENT_MAX {
            silent.retain(|_, until| now < *until);
        }
        if silent.len() < SILENT_MAX {
            silent.insert(at, until);
        }
    }
}

impl Registrar {
    /// Calls a registrar heard of. Returns false if too many are called already, if it failed to answer recently, or if
    /// no registrar is permitted at its addresses.
    pub(super) fn dial_unknown_peer(&mut self, now: Duration, transport: &SctpTransport) -> bool {
        let config = &self.config;
        let allowed =
            |at: &SocketAddr| is_registrar_permitted(at.ip(), &config.settings, &config.mentors);
        let addresses: Vec<_> = endpoints(transport).filter(allowed).collect();
        let Some(&first) = addresses.first() else {
            return false;
        };
        if self
            .associations
            .find(PoolProtocol::Enrp, &addresses)
            .is_some()
        {
            return true;
        }
        if self.unknown_peers.is_silent(now, first) {
            return false;
        }
        let own_port = config.transport.port;
        let has_usual_port = |at: SocketAddr| at.port() == own_port || at.port() == enrp::PORT;
        let mut open_dials = 0;
        for purpose in self.dials.purposes() {
            match purpose {
                DialPurpose::MulticastPeer(at) if *at == first => return true,
                DialPurpose::MulticastPeer(at) if has_usual_port(*at) == has_usual_port(first) => {
                    open_dials += 1
                }
                _ => {}
            }
        }
        if open_dials >= DIALS_MAX {
            return false;
        }
        self.dial(
            PoolProtocol::Enrp,
            addresses,
            DialPurpose::MulticastPeer(first),
        );
        true
    }

    /// Handles a failed attempt to connect to an unknown peer.
    pub(super) fn on_unknown_peer_unreached(&mut self, now: Duration, at: SocketAddr) {
        let until = now + self.config.settings.retry_interval * SILENT_RETRIES;
        self.unknown_peers.mark_silent(now, at, until);
    }
}
