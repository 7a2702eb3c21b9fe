//! What operators see: the machine's state in the types of the control API.

use std::net::{IpAddr, SocketAddr};

use holdfast_api::control::{
    ElementEntry, ErrorBody, PeerEntry, PeerList, PolicyDetail, PoolDetail, PoolEntry, PoolList,
    PoolQuery, RegistrarCounters, RegistrarStatus,
};
use holdfast_sys::transport::{Provider, provider};
use holdfast_wire::rserpool::{
    Policy, PolicyKind, PoolElement, PoolHandle, SctpTransport, Transport,
};

use super::control::{ControlRequest, Reply};
use super::event_loop::Daemon;

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
            ControlRequest::Reload(settings) => self.reload(*settings),
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
        let sctp = match provider() {
            Provider::Kernel => "kernel",
            Provider::Usrsctp => "usrsctp",
        };
        let machine = &self.machine;
        Ok(RegistrarStatus {
            id: machine.id().to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.now().as_secs(),
            ready: machine.is_ready(),
            sctp: sctp.to_owned(),
            raw: self.asap.is_raw(),
            encapsulation_port: self.asap.encapsulation_port(),
            asap: addresses(self.asap.local_addresses())?,
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

/// A handle from its text, in which other bytes than printable ASCII are escaped.
fn handle_of(text: &str) -> Result<PoolHandle, ErrorBody> {
    unescaped(text)
        .map(|bytes| PoolHandle(bytes.into()))
        .ok_or_else(|| ErrorBody {
            error: format!("`{text}` is not the text of a pool handle"),
            what_to_do: r"write a backslash as \\, other bytes than printable ASCII as \xNN"
                .to_owned(),
        })
}

fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'\\' => match rest.next()? {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'x' => {
                    let mut digit = || char::from(rest.next()?).to_digit(16);
                    let value = digit()? << 4 | digit()?;
                    u8::try_from(value).ok()?
                }
                quoted @ (b'\\' | b'\'' | b'"') => quoted,
                _ => return None,
            },
            byte => byte,
        });
    }
    Some(bytes)
}

fn element_entry(element: &PoolElement) -> ElementEntry {
    let (transport, addresses) = transport(&element.user_transport);
    ElementEntry {
        id: element.id.to_string(),
        home: element.home.to_string(),
        policy: policy(&element.policy),
        registration_life: element.registration_life,
        transport: transport.to_owned(),
        addresses,
        registrar_addresses: element
            .asap_transport
            .as_ref()
            .map_or_else(Vec::new, sctp_addresses),
    }
}

fn sctp_addresses(transport: &SctpTransport) -> Vec<SocketAddr> {
    let at = |address: &IpAddr| SocketAddr::new(*address, transport.port);
    transport.addresses.iter().map(at).collect()
}

fn transport(transport: &Transport) -> (&'static str, Vec<SocketAddr>) {
    let one = |address: &IpAddr, port: &u16| vec![SocketAddr::new(*address, *port)];
    match transport {
        Transport::Sctp(transport) => ("sctp", sctp_addresses(transport)),
        Transport::Tcp { port, address, .. } => ("tcp", one(address, port)),
        Transport::Udp { port, address } => ("udp", one(address, port)),
        Transport::UdpLite { port, address } => ("udp-lite", one(address, port)),
        Transport::Dccp { port, address, .. } => ("dccp", one(address, port)),
        Transport::Opaque(_) => ("opaque", Vec::new()),
    }
}

fn policy(policy: &Policy) -> PolicyDetail {
    let share = |value: u32| f64::from(value) / f64::from(u32::MAX);
    let (weight, priority) = match *policy {
        Policy::WeightedRoundRobin { weight }
        | Policy::WeightedRandom { weight }
        | Policy::WeightedRandomDpf { weight, .. } => (Some(weight), None),
        Policy::Priority { priority } => (None, Some(priority)),
        _ => (None, None),
    };
    let (load, degradation) = loads(policy);
    let (delay_penalty, distance_ms) = match *policy {
        Policy::WeightedRandomDpf { dpf, distance, .. }
        | Policy::LeastUsedDpf { dpf, distance, .. }
        | Policy::LeastUsedDegradationDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDpf { dpf, distance, .. }
        | Policy::PriorityLeastUsedDegradationDpf { dpf, distance, .. } => {
            (Some(dpf), Some(distance))
        }
        _ => (None, None),
    };
    PolicyDetail {
        name: policy.kind().to_string(),
        weight,
        priority,
        load: load.map(share),
        degradation: degradation.map(share),
        delay_penalty: delay_penalty.map(share),
        distance_ms,
    }
}

/// A policy's load and load degradation.
fn loads(policy: &Policy) -> (Option<u32>, Option<u32>) {
    match *policy {
        Policy::LeastUsed { load }
        | Policy::RandomizedLeastUsed { load }
        | Policy::LeastUsedDpf { load, .. } => (Some(load), None),
        Policy::LeastUsedDegradation { load, degradation }
        | Policy::PriorityLeastUsed { load, degradation }
        | Policy::RandomizedPriorityLeastUsed { load, degradation }
        | Policy::RandomizedLeastUsedDegradation { load, degradation }
        | Policy::PriorityLeastUsedDegradation { load, degradation }
        | Policy::RandomizedPriorityLeastUsedDegradation { load, degradation }
        | Policy::LeastUsedDegradationDpf {
            load, degradation, ..
        }
        | Policy::PriorityLeastUsedDpf {
            load, degradation, ..
        }
        | Policy::PriorityLeastUsedDegradationDpf {
            load, degradation, ..
        } => (Some(load), Some(degradation)),
        _ => (None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_s_text_leads_back_to_it() {
        let all = PoolHandle((0..=255).collect::<Vec<u8>>().into());
        assert_eq!(handle_of(&all.to_string()).ok(), Some(all));
        for wrong in ["\\", "\\x", "\\x1", "\\xzz", "\\q"] {
            assert!(handle_of(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_policy_shows_its_figures() {
        let (load, degradation) = (u32::MAX, 0);
        let shown = policy(&Policy::PriorityLeastUsed { load, degradation });
        assert_eq!((shown.name.as_str(), shown.load), ("PLU", Some(1.0)));
        assert_eq!((shown.degradation, shown.weight), (Some(0.0), None));
        let weights = |policy: Policy| self::policy(&policy).weight.is_some();
        let loads = |policy: Policy| self::policy(&policy).load.is_some();
        let distances = |policy: Policy| self::policy(&policy).distance_ms.is_some();
        for kind in PolicyKind::ALL {
            let (name, zeroed) = (kind.name(), kind.zeroed());
            let has_weight = name.starts_with('W');
            let has_load = name.contains('L');
            assert_eq!(weights(zeroed), has_weight, "{name}");
            assert_eq!(loads(zeroed), has_load, "{name}");
            assert_eq!(distances(zeroed), name.ends_with("-DPF"), "{name}");
        }
    }
}
