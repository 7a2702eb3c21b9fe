//! Registrars heard of by multicast, which are called to learn whether they are there.
//!
//! Who forges datagrams can name any number of them. So few are called at the same time, none that did not answer just now, and those at
//! the usual port have places of their own: of these there are no more than allowed addresses.

use super::associations::{endpoints, is_registrar};
use super::dial::Purpose;
use super::{Protocol, Registrar};
use holdfast_wire::rserpool::{SctpTransport, enrp};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Called at the same time, at the usual port and at others.
const CALLED_MAX: usize = 16;
/// Remembered for not having answered.
const SILENT_MAX: usize = 4_096;
/// For so many times the pause between two attempts.
const SILENT_FOR: u32 = 10;

/// Who did not answer, and until when that is held against it.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    silent: BTreeMap<SocketAddr, Duration>,
}

impl Registrar {
    /// False: too many are called already, it did not answer just now, or it is nowhere where a registrar may be.
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

    /// One that was called does not answer.
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
