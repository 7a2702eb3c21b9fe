//! Sockets that share an address and a port (`SO_REUSEPORT`). After a move, each client stays with its UDP socket, and
//! a group of sockets keeps the classic BPF program that selects among them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use holdfast_bpf::Error;
use holdfast_bpf::shared_port::{Choice, SharedPorts, Sharing};
use holdfast_wire::{Flow, Protocol};

use super::key_of;

/// Maximum number of flows recorded for the sockets of a process; the kernel selects the socket of further flows.
const FLOWS_MAX: usize = 1 << 16;

static PINS: OnceLock<PathBuf> = OnceLock::new();
static PORTS: OnceLock<Option<SharedPorts>> = OnceLock::new();

/// Sets the directory in which sockets and clients outlive the daemon.
pub fn keep_at(pins: &Path) {
    // A process has only one data plane, so a second call changes nothing.
    let _ = PINS.set(pins.to_owned());
}

/// Loads the programs once. If the kernel refuses them, logs the consequence.
pub fn load() -> Option<&'static SharedPorts> {
    let load = || {
        let loaded = SharedPorts::load(PINS.get()?);
        let report = |error: &_| {
            tracing::warn!(%error, "clients of UDP sockets that share a port may come to another of them after a move");
        };
        loaded.inspect_err(report).ok()
    };
    PORTS.get_or_init(load).as_ref()
}

/// Reasons why a group cannot exist at another node.
const UNREADABLE: &str = "a program chooses among the sockets of its port (SO_ATTACH_REUSEPORT_EBPF), which the kernel does not give out: \
                          use a classic one (SO_ATTACH_REUSEPORT_CBPF), or none";
const OTHER_ORDER: &str = "a program chooses among the sockets of its port by their order (SO_ATTACH_REUSEPORT_CBPF), and they were bound in \
                           another order than that of their descriptors: bind them in that order";

/// A socket that may share its port with others.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a, Id> {
    /// Id of the socket in the image.
    pub id: Id,
    /// The socket.
    pub socket: BorrowedFd<'a>,
    /// TCP for a listener, or UDP.
    pub protocol: Protocol,
    /// Address to which the socket is bound.
    pub local: SocketAddr,
}

impl<Id> Member<'_, Id> {
    /// Returns true if datagrams of this flow may reach the socket.
    pub fn may_have(&self, flow: &Flow) -> bool {
        let any = self.local.ip().is_unspecified();
        flow.protocol == Protocol::Udp
            && self.protocol == Protocol::Udp
            && flow.local.port() == self.local.port()
            && (any || flow.local.ip() == self.local.ip())
    }
}

/// State of sockets that share ports, besides their options.
#[derive(Debug)]
pub struct Shared<Id> {
    /// Flows of UDP sockets.
    pub clients: BTreeMap<Id, Vec<Flow>>,
    /// Instructions of the groups' programs, each keyed by one member.
    pub programs: BTreeMap<Id, Vec<u64>>,
}

impl<Id> Default for Shared<Id> {
    fn default() -> Self {
        Self {
            clients: BTreeMap::new(),
            programs: BTreeMap::new(),
        }
    }
}

/// Returns the obstacles to moving the socket groups of these processes: process, descriptor and reason.
///
/// # Errors
/// The kernel's refusal.
pub fn obstacles(pids: &[i32]) -> Result<Vec<(i32, u32, &'static str)>, Error> {
    let mut found = Vec::new();
    let Some(ports) = load() else {
        return Ok(found);
    };
    // Last index found in each group.
    let mut places: BTreeMap<u64, Option<u32>> = BTreeMap::new();
    let mut known = std::collections::BTreeSet::new();
    for pid in pids {
        for sharing in ports.list(*pid)? {
            if !known.insert(sharing.cookie) {
                continue;
            }
            let last = places.insert(sharing.group, sharing.place);
            match sharing.choice {
                Choice::Kernel => {}
                Choice::Unreadable => found.push((*pid, sharing.fd, UNREADABLE)),
                Choice::Classic(_) => {
                    if sharing.place.is_none() || last.is_some_and(|last| last > sharing.place) {
                        found.push((*pid, sharing.fd, OTHER_ORDER));
                    }
                }
            }
        }
    }
    Ok(found)
}

/// Returns the shared-port state of `members`, sockets of stopped processes: among `flows` the clients of each UDP
/// socket that shares its port with another, and the programs of groups.
///
/// # Errors
/// A group cannot exist at another node.
pub fn read<'a, Id: Copy + Ord>(
    members: Vec<Member<'_, Id>>,
    pids: &[i32],
    flows: impl Iterator<Item = &'a Flow>,
) -> Result<Shared<Id>, String> {
    let mut shared = Shared::default();
    if members.is_empty() {
        return Ok(shared);
    }
    let Some(ports) = load() else {
        return Ok(shared);
    };
    let text = |error: Error| error.to_string();
    let mut sharing: BTreeMap<u64, Sharing> = BTreeMap::new();
    for pid in pids {
        let list = ports.list(*pid).map_err(text)?;
        sharing.extend(list.into_iter().map(|one| (one.cookie, one)));
    }
    let mut groups: BTreeMap<u64, Vec<(Member<'_, Id>, Sharing)>> = BTreeMap::new();
    for member in members {
        let cookie = holdfast_bpf::shared_port::cookie(member.socket).map_err(text)?;
        // A socket that is not bound to a port yet is in no group.
        if let Some(one) = sharing.remove(&cookie) {
            groups.entry(one.group).or_default().push((member, one));
        }
    }
    let flows: Vec<Flow> = flows
        .filter(|flow| flow.protocol == Protocol::Udp)
        .take(FLOWS_MAX)
        .copied()
        .collect();
    for mut group in groups.into_values() {
        // The order in which the other node creates the sockets.
        group.sort_by_key(|(member, _)| member.id);
        let (first, Sharing { choice, .. }) = &group[0];
        match choice {
            Choice::Unreadable => return Err(UNREADABLE.to_owned()),
            Choice::Classic(code) => {
                let places = group.iter().map(|(_, sharing)| sharing.place);
                if !places.is_sorted() || group.iter().any(|(_, one)| one.place.is_none()) {
                    return Err(OTHER_ORDER.to_owned());
                }
                shared.programs.insert(first.id, code.clone());
            }
            Choice::Kernel if group.len() > 1 => {
                let its: Vec<Flow> = flows
                    .iter()
                    .filter(|flow| first.may_have(flow))
                    .copied()
                    .collect();
                let keys: Vec<_> = its.iter().map(key_of).collect();
                let sockets: Vec<_> = group.iter().map(|(member, _)| member.socket).collect();
                let places = ports.ask(&sockets, &keys).map_err(text)?;
                for (flow, place) in its.into_iter().zip(places) {
                    if let Some((member, _)) = place.and_then(|place| group.get(place)) {
                        shared.clients.entry(member.id).or_default().push(flow);
                    }
                }
            }
            Choice::Kernel => {}
        }
    }
    Ok(shared)
}

/// Gives new sockets the shared-port state of the original ones.
///
/// # Errors
/// The kernel's refusal.
pub fn give<Id: Copy + Ord>(members: &[Member<'_, Id>], shared: &Shared<Id>) -> Result<(), String> {
    if shared.clients.is_empty() && shared.programs.is_empty() {
        return Ok(());
    }
    let Some(ports) = load() else {
        return Err("this kernel cannot give sockets of a shared port their clients and programs; the log says why".to_owned());
    };
    for member in members {
        if let Some(code) = shared.programs.get(&member.id) {
            let set = ports.set_classic(member.socket, code);
            set.map_err(|error| error.to_string())?;
        }
        if let Some(flows) = shared.clients.get(&member.id) {
            let its = flows.iter().filter(|flow| member.may_have(flow));
            let keys: Vec<_> = its.take(FLOWS_MAX).map(key_of).collect();
            let named = ports.name(member.socket, &keys);
            named.map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}
