//! Periodic refresh and removal of private flows.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use holdfast_bpf::shared_with_c::{FlowState, Translation};
use holdfast_sys::sock_diag;
use holdfast_wire::{Flow, Frame, NodeId, OwnershipRecord, Protocol, RecordState};
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use super::super::Engine;
use crate::dataplane::{FilterEntry, flow_from_key, flow_key};

/// Bit set in the request numbers of this module's queries to the holder, and clear in the machines' numbers.
const REQUEST_BIT: u64 = 1 << 62;

/// Maximum number of flows in one query.
const FLOWS_PER_QUERY: usize = 4096;

/// Subject of a query to the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QuerySubject {
    /// Location of this flow, which moved away from here.
    MovedFlow(Flow),
    /// Location of the remote end of this flow, which is here.
    RemoteEnd(Flow),
}

impl QuerySubject {
    fn queried_flow(&self) -> Flow {
        match self {
            QuerySubject::MovedFlow(flow) => *flow,
            QuerySubject::RemoteEnd(flow) => flow.mirrored(),
        }
    }
}

impl Engine {
    /// Forgets ended private flows, and asks the holder about the others; called periodically.
    pub(in crate::engine) fn sweep_private_flows(&mut self) {
        self.forget_closed_flows();
        self.reserve_ports();
        self.query_private_flows();
    }

    /// Reserves the ports of flows that moved away.
    pub(in crate::engine) fn reserve_ports(&mut self) {
        let own_address = self.config.node.address;
        let moved = self
            .list_private_flows()
            .into_iter()
            .filter(|(flow, state)| *state == FlowState::Moved && flow.local.ip() == own_address);
        let moved: BTreeSet<SocketAddr> = moved.map(|(flow, _)| flow.local).collect();
        let reserved = &mut self.private_flows.reserved;
        reserved.retain(|address, _| moved.contains(address));
        for address in moved {
            // A port with a listener here is not given to new connections anyway.
            if !reserved.contains_key(&address)
                && let Ok(socket) = reserve_port(address)
            {
                reserved.insert(address, socket);
            }
        }
    }

    fn translated_flows(&self) -> Vec<(Flow, Translation)> {
        let entries = self.dataplane.programs.translations.entries().into_iter();
        entries
            .filter_map(|(key, translation)| Some((flow_from_key(&key)?, translation)))
            .collect()
    }

    fn list_private_flows(&self) -> Vec<(Flow, FlowState)> {
        let addresses = self.migrations.addresses();
        let flows = self.dataplane.flows().into_iter();
        let private = flows.filter(|(flow, ..)| addresses.is_private(flow));
        private.map(|(flow, state, _)| (flow, state)).collect()
    }

    /// Forgets connections whose sockets no longer exist.
    fn forget_closed_flows(&mut self) {
        let owned: Vec<Flow> = self
            .list_private_flows()
            .into_iter()
            .filter(|(flow, state)| {
                *state == FlowState::Owned && !self.migrations.machine().is_moving(flow)
            })
            .map(|(flow, _)| flow)
            .collect();
        let translated: Vec<Flow> = self
            .translated_flows()
            .into_iter()
            .map(|(flow, _)| flow)
            .collect();
        let Some(open_sockets) = open_connections(owned.iter().chain(&translated)) else {
            return;
        };
        let is_open = |flow: &&Flow| open_sockets.contains(&(flow.local, flow.remote));
        let mut changes = Vec::new();
        for flow in owned.iter().filter(|flow| !is_open(flow)) {
            let Some((_, value)) = self.dataplane.flow(flow) else {
                continue;
            };
            let closing = FilterEntry::from_value(*flow, &value);
            if self
                .dataplane
                .set_flows(&[closing], FlowState::Closing)
                .is_ok()
            {
                changes.extend(self.remove_closed_flow(flow));
            }
        }
        for flow in translated.iter().filter(|flow| !is_open(flow)) {
            // A flow that is being moved away will soon have its socket elsewhere, so its translation here can go.
            let _ = self.dataplane.programs.translations.remove(&flow_key(flow));
        }
        if !changes.is_empty() {
            self.report_changes(changes);
        }
    }

    /// Asks the holder for the location of moved flows, and of the remote ends of flows that are here.
    pub(in crate::engine) fn query_private_flows(&mut self) {
        let mut subjects: BTreeSet<QuerySubject> = BTreeSet::new();
        for (flow, state) in self.list_private_flows() {
            let between_nodes = self.migrations.addresses().is_private(&flow.mirrored());
            match state {
                FlowState::Moved => {
                    subjects.insert(QuerySubject::MovedFlow(flow));
                }
                FlowState::Owned if between_nodes => {
                    subjects.insert(QuerySubject::RemoteEnd(flow));
                }
                _ => {}
            }
        }
        subjects.extend(
            self.translated_flows()
                .iter()
                .map(|(flow, _)| QuerySubject::RemoteEnd(*flow)),
        );
        self.private_flows.open_queries.clear();
        let subjects: Vec<QuerySubject> = subjects.into_iter().collect();
        for chunk in subjects.chunks(FLOWS_PER_QUERY) {
            self.send_query(chunk);
        }
    }

    fn send_query(&mut self, subjects: &[QuerySubject]) {
        let flows: Vec<Flow> = subjects.iter().map(QuerySubject::queried_flow).collect();
        if self.holder.is_some() {
            let records = self.records_of(&flows);
            return self.on_locations(subjects, &records);
        }
        self.private_flows.last_request += 1;
        let request = REQUEST_BIT | self.private_flows.last_request;
        self.private_flows
            .open_queries
            .insert(request, subjects.to_vec());
        let frame = Frame::Query { request, flows };
        // If the holder cannot be reached, the next sweep asks again.
        let _ = self.peers.send(self.config.group.contact, &frame);
    }

    /// Handles an answer to this module's queries. Returns any other frame.
    pub(in crate::engine) fn on_query_answer(
        &mut self,
        from: NodeId,
        frame: Frame,
    ) -> Option<Frame> {
        match frame {
            Frame::QueryResponse { request, records }
                if request & !(REQUEST_BIT - 1) == REQUEST_BIT =>
            {
                let subjects = self
                    .private_flows
                    .open_queries
                    .remove(&request)
                    .unwrap_or_default();
                if from == self.config.group.contact && subjects.len() == records.len() {
                    self.on_locations(&subjects, &records);
                }
                None
            }
            other => Some(other),
        }
    }

    fn on_locations(&mut self, subjects: &[QuerySubject], records: &[Option<OwnershipRecord>]) {
        for (subject, record) in subjects.iter().zip(records) {
            let owner = match record.map(|record| record.state) {
                Some(RecordState::Transit { .. }) => continue,
                Some(RecordState::Owned { owner }) => Some(owner),
                None => None,
            };
            let result = match subject {
                QuerySubject::MovedFlow(flow) => self.update_moved_flow(flow, owner),
                QuerySubject::RemoteEnd(flow) => self.update_remote_end(flow, owner),
            };
            if let Err(error) = result {
                tracing::warn!(flow = %subject.queried_flow(), %error, "cannot update a flow's node in the filters");
            }
        }
    }

    fn update_moved_flow(
        &self,
        flow: &Flow,
        owner: Option<NodeId>,
    ) -> Result<(), holdfast_bpf::Error> {
        let Some((FlowState::Moved, value)) = self.dataplane.flow(flow) else {
            return Ok(());
        };
        match owner {
            None => self.dataplane.remove_flow(flow),
            Some(owner) if owner == self.config.node.id || owner.0 == value.peer => Ok(()),
            Some(peer) => {
                let entry = FilterEntry {
                    peer,
                    ..FilterEntry::from_value(*flow, &value)
                };
                self.dataplane.set_flows(&[entry], FlowState::Moved)
            }
        }
    }

    fn update_remote_end(
        &self,
        flow: &Flow,
        owner: Option<NodeId>,
    ) -> Result<(), holdfast_bpf::Error> {
        let table = &self.dataplane.programs.translations;
        let current = table.get(&flow_key(flow))?;
        let hops = current.map_or(0, |translation| translation.hops);
        match owner {
            Some(owner) => self.set_translation(flow, owner, hops),
            None => table.remove(&flow_key(flow)),
        }
    }
}

/// Returns a socket that keeps new connections from a port, but does not keep a server from it.
fn reserve_port(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    Ok(socket)
}

/// Returns local and remote addresses of all connections at these flows' ports; `None` if the sockets cannot be listed.
fn open_connections<'a>(
    flows: impl Iterator<Item = &'a Flow>,
) -> Option<BTreeSet<(SocketAddr, SocketAddr)>> {
    let tcp = flows.filter(|flow| flow.protocol == Protocol::Tcp);
    let ports: BTreeSet<u16> = tcp.map(|flow| flow.local.port()).collect();
    let mut connections = BTreeSet::new();
    for port in ports {
        match sock_diag::tcp_connections(None, port) {
            Ok(found) => connections.extend(
                found
                    .into_iter()
                    .map(|connection| (connection.local, connection.remote)),
            ),
            Err(error) => {
                tracing::warn!(%error, "cannot list sockets");
                return None;
            }
        }
    }
    Some(connections)
}
