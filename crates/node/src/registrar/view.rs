//! The operator's view: the machine's state in the types of the control API.

use std::net::SocketAddr;

use holdfast_api::control::{
    ErrorBody, PeerEntry, PeerList, PoolDetail, PoolEntry, PoolList, PoolQuery, RegistrarCounters,
    RegistrarStatus,
};
use holdfast_handlespace::PoolRef;

use super::control::ControlRequest;
use super::event_loop::Daemon;
use crate::entries::{element_entry, handle_of, sctp_addresses, sctp_provider};
use crate::mailbox::Reply;

/// Default and maximum number of pools in an answer.
const POOLS: usize = 1_000;
const POOLS_MAX: usize = 10_000;
/// Maximum number of table slots inspected for one answer; a slot may be empty.
const PLACES_MAX: usize = 100_000;
/// Maximum number of elements in an answer; an arbitrary selection if a pool has more.
const ELEMENTS_MAX: usize = 10_000;

impl Daemon {
    /// Answers a request. Returns false for a stop request.
    pub(super) fn answer(&mut self, request: ControlRequest) -> bool {
        match request {
            ControlRequest::Status(reply) => send(reply, self.status()),
            ControlRequest::Pools(query, reply) => send(reply, self.pools(&query)),
            ControlRequest::Pool(handle, reply) => send(reply, self.pool(&handle)),
            ControlRequest::Peers(reply) => send(reply, Ok(self.peers())),
            ControlRequest::Reload(reread) => self.reload(*reread),
            ControlRequest::Stop => return false,
        }
        true
    }

    fn status(&self) -> Result<RegistrarStatus, ErrorBody> {
        let addresses = |addresses: std::io::Result<Vec<SocketAddr>>| {
            addresses.map_err(|error| ErrorBody {
                error: format!("the transport's addresses: {error}"),
                what_to_do: "look into the daemon's log".to_owned(),
            })
        };
        let machine = &self.machine;
        Ok(RegistrarStatus {
            id: machine.id().to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.now().as_secs(),
            ready: machine.is_ready(),
            sctp: sctp_provider(),
            raw: self.asap.is_raw(),
            encapsulation_port: self.asap.encapsulation_port(),
            asap: addresses(self.asap.local_addresses())?,
            tcp: self.streams.at.0.clone(),
            tls: self.streams.at.1.clone(),
            enrp: addresses(self.enrp.local_addresses())?,
            associations: self.links.len() as u64,
            pools: machine.pools() as u64,
            elements: machine.elements() as u64,
            own_elements: machine.elements_owned_by(machine.id()) as u64,
            checksum: machine.checksum(machine.id()),
            counters: self.counters(),
        })
    }

    fn counters(&self) -> RegistrarCounters {
        let counted = self.machine.counters();
        RegistrarCounters {
            registrations: counted.registrations,
            reregistrations: counted.reregistrations,
            refusals: counted.refusals,
            deregistrations: counted.deregistrations,
            resolutions: counted.resolutions,
            resolutions_refused: counted.resolutions_refused,
            keep_alives: counted.keep_alives,
            unreachable_reports: counted.unreachable_reports,
            updates_sent: counted.updates_sent,
            updates_received: counted.updates_received,
            resynchronisations: counted.resynchronisations,
            takeovers: counted.takeovers,
            malformed: counted.malformed,
            limited: counted.limited,
            denied: counted.denied,
            over_limit: counted.over_limit,
            reports_unheeded: counted.reports_unheeded,
            associations_refused: counted.associations_refused,
            connections_refused: self.streams.refusals.count(),
            aborted: counted.aborted,
            multicast_unheeded: counted.multicast_unheeded,
            sends_refused: self.sends_refused,
        }
    }

    fn pools(&self, query: &PoolQuery) -> Result<PoolList, ErrorBody> {
        let limit = query.limit.map_or(POOLS, |limit| {
            usize::try_from(limit)
                .unwrap_or(POOLS_MAX)
                .clamp(1, POOLS_MAX)
        });
        let from = query.after.as_deref().unwrap_or("0");
        let mut place: usize = from.parse().map_err(|_| ErrorBody {
            error: format!("`{from}` is no place to go on from"),
            what_to_do: "give `after` the `next` of the answer before".to_owned(),
        })?;
        let mut pools = Vec::new();
        let mut entry = |pool: PoolRef<'_>| {
            pools.push(PoolEntry {
                handle: pool.handle.to_string(),
                policy: pool.policy.to_string(),
                elements: pool.elements as u64,
            });
        };
        // Inspects slots in steps that cannot exceed the limit, since slots of removed pools are empty.
        let (mut shown, mut looked, mut next) = (0, 0, Some(place));
        while let Some(at) = next.filter(|_| shown < limit && looked < PLACES_MAX) {
            let step = limit - shown;
            next = self.machine.pools_from(at, step, |pool| {
                shown += 1;
                entry(pool);
            });
            looked += step;
            place = next.unwrap_or(place);
        }
        Ok(PoolList {
            next: next.map(|_| place.to_string()),
            pools,
            total: self.machine.pools() as u64,
        })
    }

    fn pool(&self, text: &str) -> Result<PoolDetail, ErrorBody> {
        let wanted = handle_of(text)?;
        let Some(pool) = self.machine.pool(&wanted) else {
            return Err(ErrorBody {
                error: format!("there is no pool `{text}`"),
                what_to_do: "`holdfast pool list` shows those that there are".to_owned(),
            });
        };
        let mut elements = Vec::new();
        self.machine.each_of(&wanted, ELEMENTS_MAX, |element| {
            elements.push(element_entry(element));
        });
        elements.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        Ok(PoolDetail {
            handle: wanted.to_string(),
            policy: pool.policy.to_string(),
            total: pool.elements as u64,
            elements,
        })
    }

    fn peers(&self) -> PeerList {
        let now = self.now();
        let peers = self.machine.peers().map(|peer| PeerEntry {
            id: peer.id.to_string(),
            addresses: peer
                .transport
                .as_ref()
                .map_or_else(Vec::new, sctp_addresses),
            connected: peer.connected,
            active: peer.active,
            last_heard_ms: u64::try_from(now.saturating_sub(peer.last_heard).as_millis())
                .unwrap_or(u64::MAX),
            elements: peer.elements as u64,
            checksum: peer.checksum.0,
            announced_checksum: peer.checksum.1,
        });
        PeerList {
            peers: peers.collect(),
        }
    }
}

fn send<T>(reply: Reply<T>, answer: Result<T, ErrorBody>) {
    // A failure means that the caller has gone.
    let _ = reply.send(answer);
}
