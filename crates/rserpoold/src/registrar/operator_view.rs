//! The operator's view: the machine's state in the types of the control API.

use std::net::SocketAddr;

use holdfast_api::control::{
    ErrorBody, PeerEntry, PeerList, PoolDetail, PoolEntry, PoolList, PoolQuery, RegistrarCounters,
    RegistrarStatus,
};
use holdfast_handlespace::PoolRef;

use super::control::RegistrarRequest;
use super::event_loop::RegistrarEventLoop;
use crate::api_conversion::{element_entry, parse_handle, sctp_addresses, sctp_provider};
use crate::mailbox::ReplySender;

/// Default and maximum number of pools in an answer.
const POOLS_DEFAULT: usize = 1_000;
const POOLS_MAX: usize = 10_000;
/// Maximum number of table slots inspected for one answer; a slot may be empty.
const SLOTS_MAX: usize = 100_000;
/// Maximum number of elements in an answer; an arbitrary selection if a pool has more.
const ELEMENTS_MAX: usize = 10_000;

impl RegistrarEventLoop {
    /// Answers a request. Returns false for a stop request.
    pub(super) fn handle_request(&mut self, request: RegistrarRequest) -> bool {
        match request {
            RegistrarRequest::Status(reply) => send_reply(reply, self.status()),
            RegistrarRequest::Pools(query, reply) => send_reply(reply, self.pools(&query)),
            RegistrarRequest::Pool(handle, reply) => send_reply(reply, self.pool(&handle)),
            RegistrarRequest::Peers(reply) => send_reply(reply, Ok(self.peers())),
            RegistrarRequest::Reload(reread) => self.reload(*reread),
            RegistrarRequest::Stop => return false,
        }
        true
    }

    fn status(&self) -> Result<RegistrarStatus, ErrorBody> {
        let addresses = |addresses: std::io::Result<Vec<SocketAddr>>| {
            addresses.map_err(|error| ErrorBody {
                error: format!("cannot read the transport's addresses: {error}"),
                what_to_do: "look at the daemon's log".to_owned(),
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
            tcp: self.streams.addresses.0.clone(),
            tls: self.streams.addresses.1.clone(),
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
            rate_limited: counted.rate_limited,
            access_denied: counted.access_denied,
            limit_refusals: counted.limit_refusals,
            reports_ignored: counted.reports_ignored,
            associations_refused: counted.associations_refused,
            connections_refused: self.streams.failed_connections.count(),
            associations_aborted: counted.associations_aborted,
            multicast_ignored: counted.multicast_ignored,
            sends_refused: self.sends_refused,
        }
    }

    fn pools(&self, query: &PoolQuery) -> Result<PoolList, ErrorBody> {
        let limit = query.limit.map_or(POOLS_DEFAULT, |limit| {
            usize::try_from(limit)
                .unwrap_or(POOLS_MAX)
                .clamp(1, POOLS_MAX)
        });
        let from = query.after.as_deref().unwrap_or("0");
        let mut slot: usize = from.parse().map_err(|_| ErrorBody {
            error: format!("`{from}` is not a valid `after`"),
            what_to_do: "set `after` to the `next` of the previous answer".to_owned(),
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
        let (mut shown, mut inspected, mut next) = (0, 0, Some(slot));
        while let Some(at) = next.filter(|_| shown < limit && inspected < SLOTS_MAX) {
            let step = limit - shown;
            next = self.machine.pools_from(at, step, |pool| {
                shown += 1;
                entry(pool);
            });
            inspected += step;
            slot = next.unwrap_or(slot);
        }
        Ok(PoolList {
            next: next.map(|_| slot.to_string()),
            pools,
            total: self.machine.pools() as u64,
        })
    }

    fn pool(&self, text: &str) -> Result<PoolDetail, ErrorBody> {
        let handle = parse_handle(text)?;
        let Some(pool) = self.machine.pool(&handle) else {
            return Err(ErrorBody {
                error: format!("there is no pool `{text}`"),
                what_to_do: "`holdfast pool list` shows those there are".to_owned(),
            });
        };
        let mut elements = Vec::new();
        self.machine
            .visit_elements_of(&handle, ELEMENTS_MAX, |element| {
                elements.push(element_entry(element));
            });
        elements.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        Ok(PoolDetail {
            handle: handle.to_string(),
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

fn send_reply<T>(reply: ReplySender<T>, answer: Result<T, ErrorBody>) {
    // A failure means that the caller has gone.
    let _ = reply.send(answer);
}
