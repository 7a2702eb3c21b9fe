//! Server programs on this node: their sessions, services and flows.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;

use holdfast_wire::{Flow, Protocol};

use super::program_messages::NO_SESSION;
use crate::app_server::SessionId;

/// A server program.
#[derive(Debug, Default)]
pub struct ConnectedProgram {
    /// Name given by the program.
    pub name: String,
    /// Process id as reported by the kernel.
    pub pid: u32,
    services: BTreeMap<u32, ServedService>,
    flows: HashSet<Flow>,
}

#[derive(Debug)]
struct ServedService {
    pool: String,
    protocol: Protocol,
    addresses: Vec<SocketAddr>,
}

/// All server programs.
#[derive(Debug, Default)]
pub struct ConnectedPrograms {
    programs: BTreeMap<SessionId, ConnectedProgram>,
    owners: HashMap<Flow, SessionId>,
}

impl ConnectedPrograms {
    /// Adds a program that has opened a session.
    pub fn add(&mut self, session: SessionId, name: String, pid: u32) {
        self.programs.insert(
            session,
            ConnectedProgram {
                name,
                pid,
                ..ConnectedProgram::default()
            },
        );
    }

    /// Removes a program whose session has closed. Returns its flows.
    pub fn remove(&mut self, session: SessionId) -> Vec<Flow> {
        let Some(program) = self.programs.remove(&session) else {
            return Vec::new();
        };
        for flow in &program.flows {
            self.owners.remove(flow);
        }
        let mut flows: Vec<Flow> = program.flows.into_iter().collect();
        flows.sort_unstable();
        flows
    }

    /// Records that a program takes flows of a service.
    pub fn add_service(
        &mut self,
        session: SessionId,
        service: u32,
        (pool, protocol): (String, Protocol),
        addresses: Vec<SocketAddr>,
    ) {
        if let Some(program) = self.programs.get_mut(&session) {
            program.services.insert(
                service,
                ServedService {
                    pool,
                    protocol,
                    addresses,
                },
            );
        }
    }

    /// Records that a program takes no more flows of a service.
    pub fn remove_service(&mut self, session: SessionId, service: u32) {
        if let Some(program) = self.programs.get_mut(&session) {
            program.services.remove(&service);
        }
    }

    /// Records that a program has this flow.
    pub fn set_owner(&mut self, session: SessionId, flow: Flow) {
        if let Some(program) = self.programs.get_mut(&session) {
            program.flows.insert(flow);
            self.owners.insert(flow, session);
        }
    }

    /// Records that no program has this flow.
    pub fn clear_owner(&mut self, flow: &Flow) {
        if let Some(session) = self.owners.remove(flow)
            && let Some(program) = self.programs.get_mut(&session)
        {
            program.flows.remove(flow);
        }
    }

    /// Returns the session of the program that has this flow.
    pub fn owner(&self, flow: &Flow) -> Option<SessionId> {
        self.owners.get(flow).copied()
    }

    /// Returns the flows of all programs.
    pub fn owned_flows(&self) -> impl Iterator<Item = &Flow> {
        self.owners.keys()
    }

    /// Returns the program of a session.
    pub fn get(&self, session: SessionId) -> Option<&ConnectedProgram> {
        self.programs.get(&session)
    }

    /// Returns true if the program that was to take a flow has ended. An unaccepted connection needs no program.
    pub fn has_ended(&self, session: SessionId) -> bool {
        session != NO_SESSION && self.get(session).is_none()
    }

    /// Returns all server programs with an open session.
    pub fn iter(&self) -> impl Iterator<Item = &ConnectedProgram> {
        self.programs.values()
    }

    /// Returns the program that takes this flow, and the program's number for the service; of several, the one with the
    /// fewest flows.
    pub fn program_for(&self, flow: &Flow) -> Option<(SessionId, u32)> {
        self.programs
            .iter()
            .flat_map(|(session, program)| {
                let accepting = program
                    .services
                    .iter()
                    .filter(|(_, served)| served.accepts(flow));
                accepting.map(move |(service, _)| (program.flows.len(), *session, *service))
            })
            .min()
            .map(|(_, session, service)| (session, service))
    }
}

impl ConnectedProgram {
    /// Returns the pools that the program serves.
    pub fn pools(&self) -> Vec<String> {
        let pools: BTreeSet<&String> = self.services.values().map(|served| &served.pool).collect();
        pools.into_iter().cloned().collect()
    }

    /// Returns the number of the program's flows.
    pub fn flow_count(&self) -> usize {
        self.flows.len()
    }
}

impl ServedService {
    fn accepts(&self, flow: &Flow) -> bool {
        let is_match = |address: &SocketAddr| {
            address.port() == flow.local.port()
                && (address.ip().is_unspecified() || address.ip().to_canonical() == flow.local.ip())
        };
        self.protocol == flow.protocol && self.addresses.iter().any(is_match)
    }
}
