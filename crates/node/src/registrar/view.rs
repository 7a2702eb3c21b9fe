//! What operators see: the machine's state in the types of the control API.

use std::net::SocketAddr;

use holdfast_api::control::{
    ErrorBody, PeerEntry, PeerList, PoolDetail, PoolEntry, PoolList, PoolQuery, RegistrarCounters,
    RegistrarStatus,
};
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

use super::control::ControlRequest;
use super::event_loop::Daemon;
use crate::entries::{element_entry, handle_of, sctp_addresses, sctp_provider};
use crate::mailbox::Reply;

/// Pools in an answer to who does not say how many, and to anybody.
const POOLS: usize = 1_000;
const POOLS_MAX: usize = 10_000;

impl Daemon {
    /// Answers a request. False: it says stop.
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
            pools: machine.pools().count() as u64,
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
        let after = query.after.as_deref().map(handle_of).transpose()?;
        let follows = |handle: &PoolHandle| after.as_ref().is_none_or(|after| handle > after);
        let (mut found, mut total) = (Vec::new(), 0);
        for pool in self.machine.pools() {
            total += 1;
            if follows(pool.handle) {
                found.push(pool);
            }
        }
        let more = found.len() > limit;
        if more {
            found.select_nth_unstable_by_key(limit, |pool| pool.handle);
            found.truncate(limit);
        }
        found.sort_unstable_by_key(|pool| pool.handle);
        let entry = |pool: &holdfast_handlespace::PoolRef<'_>| PoolEntry {
            handle: pool.handle.to_string(),
            policy: pool.policy.to_string(),
            elements: pool.elements as u64,
        };
        let pools: Vec<_> = found.iter().map(entry).collect();
        let next = pools.last().filter(|_| more);
        Ok(PoolList {
            next: next.map(|pool| pool.handle.clone()),
            pools,
            total,
        })
    }

    fn pool(&self, text: &str) -> Result<PoolDetail, ErrorBody> {
        let wanted = handle_of(text)?;
        let mut policy: Option<PolicyKind> = None;
        let mut elements = Vec::new();
        self.machine.each_element(|handle, element| {
            if *handle == wanted {
                policy = Some(element.policy.kind());
                elements.push(element_entry(element));
            }
        });
        let Some(policy) = policy else {
            return Err(ErrorBody {
                error: format!("there is no pool `{text}`"),
                what_to_do: "`holdfast pool list` shows those that there are".to_owned(),
            });
        };
        elements.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        Ok(PoolDetail {
            handle: wanted.to_string(),
            policy: policy.to_string(),
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
    // Who asked may have gone.
    let _ = reply.send(answer);
}
