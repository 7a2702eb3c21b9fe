//! Periodic refresh and removal of private flows.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use holdfast_bpf::shared_with_c::FlowState;
use holdfast_sys::sock_diag;
use holdfast_wire::{Flow, Frame, NodeId, OwnershipRecord, Protocol, RecordState};
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use super::super::Engine;
use super::PrivateFlows;
use crate::dataplane::{Dataplane, FilterEntry, flow_from_key, flow_key};

/// Bit set in the request numbers of the sweep's queries to the holder, and clear in the machines' numbers.
const SWEEP_QUERY_BIT: u64 = 1 << 62;

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

impl PrivateFlows {
    /// Reserves the ports of flows that moved away.
    pub fn reserve_ports(&mut self, dataplane: &Dataplane) {
        let moved = self.list(dataplane).into_iter().filter(|(flow, state)| {
            *state == FlowState::Moved && flow.local.ip() == self.own_address
        });
        let moved: BTreeSet<SocketAddr> = moved.map(|(flow, _)| flow.local).collect();
        let reserved = &mut self.reserved;
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

    /// Returns the private flows of this node.
    fn list(&self, dataplane: &Dataplane) -> Vec<(Flow, FlowState)> {
        let flows = dataplane.flows().into_iter();
        let private = flows.filter(|(flow, ..)| self.is_private(flow));
        private.map(|(flow, state, _)| (flow, state)).collect()
    }

    /// Starts a new round of queries about the location of moved flows, and of the remote ends of flows that are here.
    /// Returns the subjects of each query.
    fn begin_queries(&mut self, dataplane: &Dataplane) -> Vec<Vec<QuerySubject>> {
        let mut subjects: BTreeSet<QuerySubject> = BTreeSet::new();
        for (flow, state) in self.list(dataplane) {
            let between_nodes = self.is_private(&flow.mirrored());
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
            translated_flows(dataplane)
                .iter()
                .map(|flow| QuerySubject::RemoteEnd(*flow)),
        );
        self.open_queries.clear();
        let subjects: Vec<QuerySubject> = subjects.into_iter().collect();
        let queries = subjects.chunks(FLOWS_PER_QUERY);
        queries.map(<[QuerySubject]>::to_vec).collect()
    }

    /// Returns the frame that asks the holder about these subjects.
    fn open_query(&mut self, subjects: Vec<QuerySubject>) -> Frame {
        self.last_query += 1;
        let request = SWEEP_QUERY_BIT | self.last_query;
        let flows = queried_flows(&subjects);
        self.open_queries.insert(request, subjects);
        Frame::Query { request, flows }
    }

    /// Takes the subjects of a query that the holder has answered; empty if the query is not open.
    fn close_query(&mut self, request: u64) -> Vec<QuerySubject> {
        self.open_queries.remove(&request).unwrap_or_default()
    }

    /// Updates flows by the holder's records of the subjects.
    fn on_locations(
        &self,
        dataplane: &Dataplane,
        subjects: &[QuerySubject],
        records: &[Option<OwnershipRecord>],
    ) {
        for (subject, record) in subjects.iter().zip(records) {
            let owner = match record.map(|record| record.state) {
                Some(RecordState::Transit { .. }) => continue,
                Some(RecordState::Owned { owner }) => Some(owner),
                None => None,
            };
            let result = match subject {
                QuerySubject::MovedFlow(flow) => self.update_moved_flow(dataplane, flow, owner),
                QuerySubject::RemoteEnd(flow) => self.update_remote_end(dataplane, flow, owner),
            };
            if let Err(error) = result {
                tracing::warn!(flow = %subject.queried_flow(), %error, "cannot update a flow's node in the filters");
            }
        }
    }

    fn update_moved_flow(
        &self,
        dataplane: &Dataplane,
        flow: &Flow,
        owner: Option<NodeId>,
    ) -> Result<(), holdfast_bpf::Error> {
        let Some((FlowState::Moved, value)) = dataplane.flow(flow) else {
            return Ok(());
        };
        match owner {
            None => dataplane.remove_flow(flow),
            Some(owner) if owner == self.own_id || owner.0 == value.peer => Ok(()),
            Some(peer) => {
                let entry = FilterEntry {
                    peer,
                    ..FilterEntry::from_value(*flow, &value)
                };
                dataplane.set_flows(&[entry], FlowState::Moved)
            }
        }
    }

    fn update_remote_end(
        &self,
        dataplane: &Dataplane,
        flow: &Flow,
        owner: Option<NodeId>,
    ) -> Result<(), holdfast_bpf::Error> {
        let table = &dataplane.programs.translations;
        let current = table.get(&flow_key(flow))?;
        let hops = current.map_or(0, |translation| translation.hops);
        match owner {
            Some(owner) => self.set_translation(dataplane, flow, (owner, hops)),
            None => table.remove(&flow_key(flow)),
        }
    }
}

impl Engine {
    /// Forgets ended private flows, and asks the holder about the others; called periodically.
    pub(in crate::engine) fn sweep_private_flows(&mut self) {
        self.forget_closed_flows();
        self.private_flows.reserve_ports(&self.dataplane);
        self.query_private_flows();
    }

    /// Forgets connections whose sockets no longer exist.
    fn forget_closed_flows(&mut self) {
        let owned: Vec<Flow> = self
            .private_flows
            .list(&self.dataplane)
            .into_iter()
            .filter(|(flow, state)| {
                *state == FlowState::Owned && !self.migrations.machine().is_moving(flow)
            })
            .map(|(flow, _)| flow)
            .collect();
        let translated = translated_flows(&self.dataplane);
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
                changes.extend(self.removal_of_closed_flow(flow));
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
        for subjects in self.private_flows.begin_queries(&self.dataplane) {
            if self.holder.is_some() {
                if !self.admits_own_query() {
                    continue;
                }
                let records = self.records_of(&queried_flows(&subjects));
                self.private_flows
                    .on_locations(&self.dataplane, &subjects, &records);
                continue;
            }
            let frame = self.private_flows.open_query(subjects);
            // If the holder cannot be reached, the next sweep asks again.
            let _ = self.peers.send(self.group.contact(), &frame);
        }
    }

    /// Handles an answer to this module's queries. Returns any other frame.
    pub(in crate::engine) fn on_query_answer(
        &mut self,
        from: NodeId,
        frame: Frame,
    ) -> Option<Frame> {
        match frame {
            Frame::QueryResponse { request, records }
                if request & !(SWEEP_QUERY_BIT - 1) == SWEEP_QUERY_BIT =>
            {
                let subjects = self.private_flows.close_query(request);
                if from == self.group.contact() && subjects.len() == records.len() {
                    self.private_flows
                        .on_locations(&self.dataplane, &subjects, &records);
                }
                None
            }
            other => Some(other),
        }
    }
}

fn queried_flows(subjects: &[QuerySubject]) -> Vec<Flow> {
    subjects.iter().map(QuerySubject::queried_flow).collect()
}

/// Returns the flows of this node whose packets are directed to another node than the one with the remote address.
fn translated_flows(dataplane: &Dataplane) -> Vec<Flow> {
    let entries = dataplane.programs.translations.entries().into_iter();
    entries.filter_map(|(key, _)| flow_from_key(&key)).collect()
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
