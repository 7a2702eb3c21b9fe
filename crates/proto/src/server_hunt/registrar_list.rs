//! The known registrars, and the choice of the next one to try.

use super::{SecretSeedRng, ServerHuntConfig};
use holdfast_wire::rserpool::{RegistrarId, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Debug)]
struct KnownRegistrar {
    id: Option<RegistrarId>,
    /// End of the announce's life; none for a configured registrar, which is never forgotten.
    expires: Option<Duration>,
    /// Number of the last attempt, 0 for none: "It SHOULD attempt to select a different set of transport addresses"
    /// (SH5.2).
    last_attempt: u64,
}

/// List of known registrars. "Each PU and PE manages a list of transport addresses of ENRP servers it knows about"
/// (RFC 5352 section 3.6).
#[derive(Debug)]
pub(super) struct KnownRegistrars {
    by_transport: BTreeMap<Transport, KnownRegistrar>,
    attempts: u64,
    /// Number of the last attempt of earlier rounds.
    last_round_attempt: u64,
    announced_max: usize,
    transport_support: RegistrarTransports,
}

impl KnownRegistrars {
    pub(super) fn new(config: &ServerHuntConfig, reach: RegistrarTransports) -> KnownRegistrars {
        let configured = config.registrars.iter().map(|transport| {
            let server = KnownRegistrar {
                id: None,
                expires: None,
                last_attempt: 0,
            };
            (transport.clone(), server)
        });
        KnownRegistrars {
            by_transport: configured.collect(),
            attempts: 0,
            last_round_attempt: 0,
            announced_max: config.registrars.len() + ANNOUNCED_MAX,
            transport_support: reach,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_transport.len()
    }

    pub(super) fn id(&self, address: &Transport) -> Option<RegistrarId> {
        self.by_transport.get(address)?.id
    }

    /// Learns an announced address: "insert all new included transport addresses into its list [...] and start a
    /// T7-ENRPoutdate timer for each".
    pub(super) fn learn_announced(&mut self, address: Transport, id: RegistrarId, until: Duration) {
        if let Some(server) = self.by_transport.get_mut(&address) {
            server.id = Some(id);
            server.expires = server.expires.map(|_| until);
        } else if self.by_transport.len() < self.announced_max
            && self.transport_support.includes(&address)
        {
            let server = KnownRegistrar {
                id: Some(id),
                expires: Some(until),
                last_attempt: 0,
            };
            self.by_transport.insert(address, server);
        }
    }

    pub(super) fn remove_expired(&mut self, now: Duration) {
        self.by_transport
            .retain(|_, server| server.expires.is_none_or(|until| until > now));
    }

    pub(super) fn start_round(&mut self) {
        self.last_round_attempt = self.attempts;
    }

    pub(super) fn record_attempt(&mut self, address: &Transport) {
        self.attempts += 1;
        if let Some(server) = self.by_transport.get_mut(address) {
            server.last_attempt = self.attempts;
        }
    }

    /// Returns the registrar to try next: of the ones not tried in this round, the one with the oldest last attempt; a
    /// random one of the never tried.
    pub(super) fn choose_next(&mut self, random: &mut SecretSeedRng) -> Option<Transport> {
        let is_untried = |server: &KnownRegistrar| server.last_attempt <= self.last_round_attempt;
        let oldest_attempt = self
            .by_transport
            .values()
            .filter(|server| is_untried(server))
            .map(|server| server.last_attempt)
            .min()?;
        let candidates: Vec<&Transport> = self
            .by_transport
            .iter()
            .filter(|(_, server)| server.last_attempt == oldest_attempt)
            .map(|(address, _)| address)
            .collect();
        let address = candidates[random.below(candidates.len())].clone();
        self.record_attempt(&address);
        Some(address)
    }
}

/// Most announced registrars remembered at once, so that a flood of announces cannot fill the memory.
const ANNOUNCED_MAX: usize = 64;

/// Transports for registrars: "all ASAP messages exchanged between an ENRP server and a PE MUST use SCTP as transport,
/// while ASAP messages exchanged between an ENRP server and a PU MUST use either SCTP or TCP" (RFC 5352 section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegistrarTransports {
    Sctp,
    SctpAndTcp,
}

impl RegistrarTransports {
    fn includes(self, transport: &Transport) -> bool {
        match transport {
            Transport::Sctp(_) => true,
            Transport::Tcp { .. } => self == RegistrarTransports::SctpAndTcp,
            _ => false,
        }
    }
}
