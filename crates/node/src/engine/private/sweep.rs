//! Periodic refresh and removal of private flows.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use holdfast_bpf::shared::{FlowState, Translation};
use holdfast_sys::sock_diag;
use holdfast_wire::{Flow, Frame, NodeId, Protocol, Record, RecordState};
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

use super::super::Engine;
use crate::dataplane::{Entry, flow_of, key_of};

/// Bit set in the request numbers of this module's queries to the holder, and clear in the machines' numbers.
const REQUESTS: u64 = 1 << 62;

/// Maximum number of flows in one query.
const ASKED_MAX: usize = 4096;

/// Subject of a query to the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanted {
    /// Location of this flow, which moved away from here.
    Left(Flow),
    /// Location of the remote end of this flow, which is here.
    OtherEnd(Flow),
}

impl Wanted {
    fn asked(&self) -> Flow {
        match self {
            Wanted::Left(flow) => *flow,
            Wanted::OtherEnd(here) => here.mirrored(),
        }
    }
}

impl Engine {
    /// Forgets ended private flows, and asks the holder about the others; called periodically.
    pub(in crate::engine) fn sweep_private(&mut self) {
        self.forget_closed();
        self.reserve_ports();
        self.ask_about_private();
    }

    /// Reserves the ports of flows that moved away.
    pub(in crate::engine) fn reserve_ports(&mut self) {
        let own = self.config.node.address;
        let left = self
            .private_flows()
            .into_iter()
            .filter(|(flow, state)| *state == FlowState::Moved && flow.local.ip() == own);
        let left: BTreeSet<SocketAddr> = left.map(|(flow, _)| flow.local).collect();
        let reserved = &mut self.private.reserved;
        reserved.retain(|address, _| left.contains(address));
        for address in left {
            // A port with a listener here is not given to new connections anyway.
            if !reserved.contains_key(&address)
                && let Ok(socket) = reserve(address)
            {
                reserved.insert(address, socket);
            }
        }
    }

    fn translated(&self) -> Vec<(Flow, Translation)> {
        let entries = self.dataplane.programs.translations.entries().into_iter();
        entries
            .filter_map(|(key, of)| Some((flow_of(&key)?, of)))
            .collect()
    }

    fn private_flows(&self) -> Vec<(Flow, FlowState)> {
        let addresses = self.moves.addresses();
        let flows = self.dataplane.flows().into_iter();
        let private = flows.filter(|(flow, ..)| addresses.is_private(flow));
        private.map(|(flow, state, _)| (flow, state)).collect()
    }

    /// Forgets connections whose sockets no longer exist.
    fn forget_closed(&mut self) {
        let owned: Vec<Flow> = self
            .private_flows()
            .into_iter()
            .filter(|(flow, state)| {
                *state == FlowState::Owned && !self.moves.machine().is_moving(flow)
            })
            .map(|(flow, _)| flow)
            .collect();
        let translated: Vec<Flow> = self
            .translated()
            .into_iter()
            .map(|(flow, _)| flow)
            .collect();
        let Some(open) = open_connections(owned.iter().chain(&translated)) else {
            return;
        };
        let is_open = |flow: &&Flow| open.contains(&(flow.local, flow.remote));
        let mut changes = Vec::new();
        for flow in owned.iter().filter(|flow| !is_open(flow)) {
            let Some((_, value)) = self.dataplane.flow(flow) else {
                continue;
            };
            let closing = Entry::of(*flow, &value);
            if self
                .dataplane
                .set_flows(&[closing], FlowState::Closing)
                .is_ok()
            {
                changes.extend(self.removal(flow));
            }
        }
        for flow in translated.iter().filter(|flow| !is_open(flow)) {
            // A flow that is being moved away will soon have its socket elsewhere, so its translation here can go.
            let _ = self.dataplane.programs.translations.remove(&key_of(flow));
        }
        if !changes.is_empty() {
            self.report(changes);
        }
    }

    /// Asks the holder for the location of moved flows, and of the remote ends of flows that are here.
    pub(in crate::engine) fn ask_about_private(&mut self) {
        let mut wanted: BTreeSet<Wanted> = BTreeSet::new();
        for (flow, state) in self.private_flows() {
            let between_nodes = self.moves.addresses().is_private(&flow.mirrored());
            match state {
                FlowState::Moved => drop(wanted.insert(Wanted::Left(flow))),
                FlowState::Owned if between_nodes => drop(wanted.insert(Wanted::OtherEnd(flow))),
                _ => {}
            }
        }
        wanted.extend(
            self.translated()
                .iter()
                .map(|(flow, _)| Wanted::OtherEnd(*flow)),
        );
        self.private.open.clear();
        let wanted: Vec<Wanted> = wanted.into_iter().collect();
        for part in wanted.chunks(ASKED_MAX) {
            self.ask_private(part);
        }
    }

    fn ask_private(&mut self, wanted: &[Wanted]) {
        let flows: Vec<Flow> = wanted.iter().map(Wanted::asked).collect();
        if self.holder.is_some() {
            let records = self.records_of(&flows);
            return self.located(wanted, &records);
        }
        self.private.last += 1;
        let request = REQUESTS | self.private.last;
        self.private.open.insert(request, wanted.to_vec());
        let frame = Frame::Query { request, flows };
        // If the holder cannot be reached, the next sweep asks again.
        let _ = self.peers.send(self.config.group.contact, &frame);
    }

    /// Handles an answer to this module's queries. Returns any other frame.
    pub(in crate::engine) fn private_answer(
        &mut self,
        from: NodeId,
        frame: Frame,
    ) -> Option<Frame> {
        match frame {
            Frame::QueryAnswer { request, records } if request & !(REQUESTS - 1) == REQUESTS => {
                let wanted = self.private.open.remove(&request).unwrap_or_default();
                if from == self.config.group.contact && wanted.len() == records.len() {
                    self.located(&wanted, &records);
                }
                None
            }
            other => Some(other),
        }
    }

    fn located(&mut self, wanted: &[Wanted], records: &[Option<Record>]) {
        for (wanted, record) in wanted.iter().zip(records) {
            let owner = match record.map(|record| record.state) {
                Some(RecordState::Transit { .. }) => continue,
                Some(RecordState::Owned { owner }) => Some(owner),
                None => None,
            };
            let done = match wanted {
                Wanted::Left(flow) => self.left_to(flow, owner),
                Wanted::OtherEnd(here) => self.other_end_is(here, owner),
            };
            if let Err(error) = done {
                tracing::warn!(flow = %wanted.asked(), %error, "where it is, is not known to the filters");
            }
        }
    }

    fn left_to(&self, flow: &Flow, owner: Option<NodeId>) -> Result<(), holdfast_bpf::Error> {
        let Some((FlowState::Moved, value)) = self.dataplane.flow(flow) else {
            return Ok(());
        };
        match owner {
            None => self.dataplane.forget(flow),
            Some(owner) if owner == self.config.node.id || owner.0 == value.peer => Ok(()),
            Some(peer) => {
                let entry = Entry {
                    peer,
                    ..Entry::of(*flow, &value)
                };
                self.dataplane.set_flows(&[entry], FlowState::Moved)
            }
        }
    }

    fn other_end_is(&self, here: &Flow, owner: Option<NodeId>) -> Result<(), holdfast_bpf::Error> {
        let table = &self.dataplane.programs.translations;
        let known = table.get(&key_of(here))?;
        let hops = known.map_or(0, |of| of.hops);
        match owner {
            Some(owner) => self.send_to(here, owner, hops),
            None => table.remove(&key_of(here)),
        }
    }
}

/// Returns a socket that keeps new connections from a port, but does not keep a server from it.
fn reserve(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
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
    let mut open = BTreeSet::new();
    for port in ports {
        match sock_diag::tcp_connections(None, port) {
            Ok(found) => open.extend(found.into_iter().map(|of| (of.local, of.remote))),
            Err(error) => {
                tracing::warn!(%error, "sockets cannot be listed");
                return None;
            }
        }
    }
    Some(open)
}
