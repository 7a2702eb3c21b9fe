//! The known registrars, and the choice of the next one to try.

use super::{HuntConfig, Random};
use holdfast_wire::rserpool::{RegistrarId, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Debug)]
struct Server {
    id: Option<RegistrarId>,
    /// End of the announce's life; none for a configured registrar, which is never forgotten.
    until: Option<Duration>,
    /// Number of the last attempt, 0 for none: "It SHOULD attempt to select a different set of transport addresses"
    /// (SH5.2).
    tried: u64,
}

/// List of known registrars. "Each PU and PE manages a list of transport addresses of ENRP servers it knows about"
/// (RFC 5352 section 3.6).
#[derive(Debug)]
pub(super) struct Servers {
    known: BTreeMap<Transport, Server>,
    tries: u64,
    /// Number of the last attempt of earlier rounds.
    round: u64,
    announced_max: usize,
    reach: Reach,
}

impl Servers {
    pub(super) fn new(config: &HuntConfig, reach: Reach) -> Servers {
        let known = config.registrars.iter().map(|transport| {
            let server = Server {
                id: None,
                until: None,
                tried: 0,
            };
            (transport.clone(), server)
        });
        Servers {
            known: known.collect(),
            tries: 0,
            round: 0,
            announced_max: config.registrars.len() + ANNOUNCED_MAX,
            reach,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn id(&self, address: &Transport) -> Option<RegistrarId> {
        self.known.get(address)?.id
    }

    /// Learns an announced address: "insert all new included transport addresses into its list [...] and start a
    /// T7-ENRPoutdate timer for each".
    pub(super) fn announced(&mut self, address: Transport, id: RegistrarId, until: Duration) {
        if let Some(server) = self.known.get_mut(&address) {
            server.id = Some(id);
            server.until = server.until.map(|_| until);
        } else if self.known.len() < self.announced_max && self.reach.includes(&address) {
            let server = Server {
                id: Some(id),
                until: Some(until),
                tried: 0,
            };
            self.known.insert(address, server);
        }
    }

    pub(super) fn forget(&mut self, now: Duration) {
        self.known
            .retain(|_, server| server.until.is_none_or(|until| until > now));
    }

    pub(super) fn new_round(&mut self) {
        self.round = self.tries;
    }

    pub(super) fn tried(&mut self, address: &Transport) {
        self.tries += 1;
        if let Some(server) = self.known.get_mut(address) {
            server.tried = self.tries;
        }
    }

    /// Returns the registrar to try next: of the ones not tried in this round, the one with the oldest last attempt; a
    /// random one of the never tried.
    pub(super) fn next(&mut self, random: &mut Random) -> Option<Transport> {
        let open = |server: &Server| server.tried <= self.round;
        let first = self
            .known
            .values()
            .filter(|server| open(server))
            .map(|server| server.tried)
            .min()?;
        let alike: Vec<&Transport> = self
            .known
            .iter()
            .filter(|(_, server)| server.tried == first)
            .map(|(address, _)| address)
            .collect();
        let address = alike[random.below(alike.len())].clone();
        self.tried(&address);
        Some(address)
    }
}

/// Most announced registrars remembered at once, so that a flood of announces cannot fill the memory.
const ANNOUNCED_MAX: usize = 64;

/// Transports for registrars: "all ASAP messages exchanged between an ENRP server and a PE MUST use SCTP as transport,
/// while ASAP messages exchanged between an ENRP server and a PU MUST use either SCTP or TCP" (RFC 5352 section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    Sctp,
    SctpAndTcp,
}

impl Reach {
    fn includes(self, transport: &Transport) -> bool {
        match transport {
            Transport::Sctp(_) => true,
            Transport::Tcp { .. } => self == Reach::SctpAndTcp,
            _ => false,
        }
    }
}
