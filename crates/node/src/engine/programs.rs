//! The server programs on this node: their sessions, the services they serve, the flows they have.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;

use holdfast_wire::{Flow, Protocol};

use crate::app::SessionId;

/// A server program.
#[derive(Debug, Default)]
pub struct Program {
    /// As it calls itself.
    pub name: String,
    /// Its process id, as the kernel says.
    pub pid: u32,
    services: BTreeMap<u32, Served>,
    flows: HashSet<Flow>,
}

#[derive(Debug)]
struct Served {
    pool: String,
    protocol: Protocol,
    addresses: Vec<SocketAddr>,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Programs {
    programs: BTreeMap<SessionId, Program>,
    owners: HashMap<Flow, SessionId>,
}

impl Programs {
    /// A program has come.
    pub fn opened(&mut self, session: SessionId, name: String, pid: u32) {
        self.programs.insert(
            session,
            Program {
                name,
                pid,
                ..Program::default()
            },
        );
    }

    /// A program has gone; gives the flows it had.
    pub fn closed(&mut self, session: SessionId) -> Vec<Flow> {
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

    /// A program takes flows of a service from now on.
    pub fn serve(
        &mut self,
        session: SessionId,
        service: u32,
        (pool, protocol): (String, Protocol),
        addresses: Vec<SocketAddr>,
    ) {
        if let Some(program) = self.programs.get_mut(&session) {
            program.services.insert(
                service,
                Served {
                    pool,
                    protocol,
                    addresses,
                },
            );
        }
    }

    /// It takes no more.
    pub fn withdraw(&mut self, session: SessionId, service: u32) {
        if let Some(program) = self.programs.get_mut(&session) {
            program.services.remove(&service);
        }
    }

    /// A program has this flow.
    pub fn has(&mut self, session: SessionId, flow: Flow) {
        if let Some(program) = self.programs.get_mut(&session) {
            program.flows.insert(flow);
            self.owners.insert(flow, session);
        }
    }

    /// No program has this flow (any more).
    pub fn lost(&mut self, flow: &Flow) {
        if let Some(session) = self.owners.remove(flow)
            && let Some(program) = self.programs.get_mut(&session)
        {
            program.flows.remove(flow);
        }
    }

    /// Which program has this flow.
    pub fn owner(&self, flow: &Flow) -> Option<SessionId> {
        self.owners.get(flow).copied()
    }

    /// The program of a session.
    pub fn get(&self, session: SessionId) -> Option<&Program> {
        self.programs.get(&session)
    }

    /// All programs.
    pub fn iter(&self) -> impl Iterator<Item = &Program> {
        self.programs.values()
    }

    /// The program that takes this flow and its number for the service; of several, the one with the fewest flows.
    pub fn taker(&self, flow: &Flow) -> Option<(SessionId, u32)> {
        self.programs
            .iter()
            .flat_map(|(session, program)| {
                let served = program
                    .services
                    .iter()
                    .filter(|(_, served)| served.takes(flow));
                served.map(move |(service, _)| (program.flows.len(), *session, *service))
            })
            .min()
            .map(|(_, session, service)| (session, service))
    }
}

impl Program {
    /// The pools it serves.
    pub fn pools(&self) -> Vec<String> {
        let pools: BTreeSet<&String> = self.services.values().map(|served| &served.pool).collect();
        pools.into_iter().cloned().collect()
    }

    /// How many flows it has.
    pub fn flow_count(&self) -> usize {
        self.flows.len()
    }
}

impl Served {
    fn takes(&self, flow: &Flow) -> bool {
        let fits = |address: &SocketAddr| {
            address.port() == flow.local.port()
                && (address.ip().is_unspecified() || address.ip().to_canonical() == flow.local.ip())
        };
        self.protocol == flow.protocol && self.addresses.iter().any(fits)
    }
}
