//! Registrars heard of by multicast, which are called to verify that they exist.
//!
//! A forger of datagrams can name any number of registrars. Therefore only a few are called at the same time, and
//! none that failed to answer recently. Registrars at the usual port have call slots of their own: of these there are
//! no more than allowed addresses.

use super::associations::{endpoints, is_registrar};
use super::dial::Purpose;
use super::{Protocol, Registrar};
use holdfast_wire::rserpool::{SctpTransport, enrp};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Most calls at the same time, separately for the usual port and others.
const CALLED_MAX: usize = 16;
/// Most addresses remembered as silent.
const SILENT_MAX: usize = 4_096;
/// Time for which an address counts as silent, in pauses between two attempts.
const SILENT_FOR: u32 = 10;

/// Addresses that did not answer, and the time until which they are not called again.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    silent: BTreeMap<SocketAddr, Duration>,
}

impl Registrar {
    /// Calls a registrar heard of. Returns false if too many are called already, if it failed to answer recently, or if
    /// no registrar is permitted at its addresses.
    pub(super) fn call_stranger(&mut self, now: Duration, transport: &SctpTransport) -> bool {
        let config = &self.config;
        let allowed = |at: &SocketAddr| is_registrar(at.ip(), &config.settings, &config.mentors);
        let addresses: Vec<_> = endpoints(transport).filter(allowed).collect();
        let Some(&first) = addresses.first() else {
            return false;
        };
        if self.associations.find(Protocol::Enrp, &addresses).is_some() {
            return true;
        }
        if self
            .strangers
            .silent
            .get(&first)
            .is_some_and(|until| now < *until)
        {
            return false;
        }
        let own = config.transport.port;
        let usual = |at: SocketAddr| at.port() == own || at.port() == enrp::PORT;
        let mut called = 0;
        for purpose in self.dials.open.values() {
            match purpose {
                Purpose::Heard(at) if *at == first => return true,
                Purpose::Heard(at) if usual(*at) == usual(first) => called += 1,
                _ => {}
            }
        }
        if called >= CALLED_MAX {
            return false;
        }
        self.dial(Protocol::Enrp, addresses, Purpose::Heard(first));
        true
    }

    /// Handles a failed call.
    pub(super) fn stranger_unreached(&mut self, now: Duration, at: SocketAddr) {
        let until = now + self.config.settings.retry * SILENT_FOR;
        let silent = &mut self.strangers.silent;
        if silent.len() >= SILENT_MAX {
            silent.retain(|_, until| now < *until);
        }
        if silent.len() < SILENT_MAX {
            silent.insert(at, until);
        }
    }
}
