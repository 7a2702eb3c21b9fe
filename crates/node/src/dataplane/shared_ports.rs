//! Sockets that share an address and a port (`SO_REUSEPORT`). After a move, each client stays with its UDP socket, and
//! a group of sockets keeps the classic BPF program that selects among them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use holdfast_bpf::Error;
use holdfast_bpf::reuseport::{ReuseportGroups, ReuseportSocket, SocketSelector};
use holdfast_wire::failure::{Failure, KernelFault, ProgramFault};
use holdfast_wire::{Flow, Protocol};

use super::flow_key;
use crate::failure_conversion::IntoFailure;

/// Maximum number of flows recorded for the sockets of a process; the kernel selects the socket of further flows.
const FLOWS_MAX: usize = 1 << 16;

static PIN_DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
static SHARED_PORTS: OnceLock<Option<ReuseportGroups>> = OnceLock::new();

/// Sets the directory in which sockets and clients outlive the daemon.
pub fn set_pin_directory(pins: &Path) {
    // A process has only one data plane, so a second call changes nothing.
    let _ = PIN_DIRECTORY.set(pins.to_owned());
}

/// Loads the programs once. If the kernel refuses them, logs the consequence.
pub fn load() -> Option<&'static ReuseportGroups> {
    let load = || {
        let loaded = ReuseportGroups::load(PIN_DIRECTORY.get()?);
        let report = |error: &_| {
            tracing::warn!(%error, "after a move, clients of UDP sockets that share a port may reach another socket");
        };
        loaded.inspect_err(report).ok()
    };
    SHARED_PORTS.get_or_init(load).as_ref()
}

/// A socket that may share its port with others.
#[derive(Clone, Copy, Debug)]
pub struct SharedPortSocket<'a, Id> {
    /// Id of the socket in the image.
    pub id: Id,
    /// Descriptor of the socket.
    pub socket: BorrowedFd<'a>,
    /// TCP for a listener, or UDP.
    pub protocol: Protocol,
    /// Address to which the socket is bound.
    pub local: SocketAddr,
}

impl<Id> SharedPortSocket<'_, Id> {
    /// Returns true if datagrams of this flow may reach the socket.
    pub fn may_receive(&self, flow: &Flow) -> bool {
        let any = self.local.ip().is_unspecified();
        flow.protocol == Protocol::Udp
            && self.protocol == Protocol::Udp
            && flow.local.port() == self.local.port()
            && (any || flow.local.ip() == self.local.ip())
    }
}

/// State of sockets that share ports, besides their options.
#[derive(Debug)]
pub struct SharedPortState<Id> {
    /// Flows of UDP sockets.
    pub clients: BTreeMap<Id, Vec<Flow>>,
    /// Instructions of the groups' programs, each keyed by one member.
    pub programs: BTreeMap<Id, Vec<u64>>,
}

impl<Id> Default for SharedPortState<Id> {
    fn default() -> Self {
        Self {
            clients: BTreeMap::new(),
            programs: BTreeMap::new(),
        }
    }
}

/// Returns the obstacles to moving the socket groups of these processes: process, descriptor and fault.
///
/// # Errors
/// The kernel's refusal.
pub fn blockers(pids: &[i32]) -> Result<Vec<(i32, u32, ProgramFault)>, Error> {
    let mut blockers_found = Vec::new();
    let Some(ports) = load() else {
        return Ok(blockers_found);
    };
    // Last index found in each group.
    let mut endpoints: BTreeMap<u64, Option<u32>> = BTreeMap::new();
    let mut known_sockets = std::collections::BTreeSet::new();
    for pid in pids {
        for sharing in ports.list(*pid)? {
            if !known_sockets.insert(sharing.cookie) {
                continue;
            }
            let last = endpoints.insert(sharing.group, sharing.index);
            match sharing.selector {
                SocketSelector::KernelHash => {}
                SocketSelector::Unreadable => {
                    blockers_found.push((*pid, sharing.fd, ProgramFault::EbpfPortSelector))
                }
                SocketSelector::ClassicBpf(_) => {
                    if sharing.index.is_none() || last.is_some_and(|last| last > sharing.index) {
                        blockers_found.push((*pid, sharing.fd, ProgramFault::PortBindingOrder));
                    }
                }
            }
        }
    }
    Ok(blockers_found)
}

/// Returns the shared-port state of `members`, sockets of stopped processes: among `flows` the clients of each UDP
/// socket that shares its port with another, and the programs of groups.
///
/// # Errors
/// A group cannot exist at another node.
pub fn extract<'a, Id: Copy + Ord>(
    members: Vec<SharedPortSocket<'_, Id>>,
    pids: &[i32],
    flows: impl Iterator<Item = &'a Flow>,
) -> Result<SharedPortState<Id>, Failure> {
    let mut shared = SharedPortState::default();
    if members.is_empty() {
        return Ok(shared);
    }
    let Some(ports) = load() else {
        return Ok(shared);
    };
    let mut sharing: BTreeMap<u64, ReuseportSocket> = BTreeMap::new();
    for pid in pids {
        let list = ports.list(*pid).map_err(IntoFailure::into_failure)?;
        sharing.extend(list.into_iter().map(|one| (one.cookie, one)));
    }
    let mut groups: BTreeMap<u64, Vec<(SharedPortSocket<'_, Id>, ReuseportSocket)>> =
        BTreeMap::new();
    for member in members {
        let cookie =
            holdfast_bpf::reuseport::cookie(member.socket).map_err(IntoFailure::into_failure)?;
        // A socket that is not bound to a port yet is in no group.
        if let Some(sharing_socket) = sharing.remove(&cookie) {
            groups
                .entry(sharing_socket.group)
                .or_default()
                .push((member, sharing_socket));
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
        let (
            first,
            ReuseportSocket {
                selector: choice, ..
            },
        ) = &group[0];
        match choice {
            SocketSelector::Unreadable => return Err(ProgramFault::EbpfPortSelector.into()),
            SocketSelector::ClassicBpf(code) => {
                let places = group.iter().map(|(_, sharing)| sharing.index);
                if !places.is_sorted() || group.iter().any(|(_, sharing)| sharing.index.is_none()) {
                    return Err(ProgramFault::PortBindingOrder.into());
                }
                shared.programs.insert(first.id, code.clone());
            }
            SocketSelector::KernelHash if group.len() > 1 => {
                let member_flows: Vec<Flow> = flows
                    .iter()
                    .filter(|flow| first.may_receive(flow))
                    .copied()
                    .collect();
                let keys: Vec<_> = member_flows.iter().map(flow_key).collect();
                let sockets: Vec<_> = group.iter().map(|(member, _)| member.socket).collect();
                let places = ports
                    .query_receivers(&sockets, &keys)
                    .map_err(IntoFailure::into_failure)?;
                for (flow, place) in member_flows.into_iter().zip(places) {
                    if let Some((member, _)) = place.and_then(|place| group.get(place)) {
                        shared.clients.entry(member.id).or_default().push(flow);
                    }
                }
            }
            SocketSelector::KernelHash => {}
        }
    }
    Ok(shared)
}

/// Gives new sockets the shared-port state of the original ones.
///
/// # Errors
/// The kernel's refusal.
pub fn restore<Id: Copy + Ord>(
    members: &[SharedPortSocket<'_, Id>],
    shared: &SharedPortState<Id>,
) -> Result<(), Failure> {
    if shared.clients.is_empty() && shared.programs.is_empty() {
        return Ok(());
    }
    let Some(ports) = load() else {
        return Err(KernelFault::SharedPortsUnsupported.into());
    };
    for member in members {
        if let Some(code) = shared.programs.get(&member.id) {
            let set = ports.attach_classic(member.socket, code);
            set.map_err(IntoFailure::into_failure)?;
        }
        if let Some(flows) = shared.clients.get(&member.id) {
            let member_flows = flows.iter().filter(|flow| member.may_receive(flow));
            let keys: Vec<_> = member_flows.take(FLOWS_MAX).map(flow_key).collect();
            let named = ports.assign(member.socket, &keys);
            named.map_err(IntoFailure::into_failure)?;
        }
    }
    Ok(())
}
