//! Elements and users: their machines, and the programs above.

use crate::fault::Fault;
use crate::registrar_model;
use crate::world::{Packet, World, WorldEvent, parse};
use holdfast_proto::pool_element::{
    self, CookieKey, PoolElement, UserSessions, UserSessionsConfig,
};
use holdfast_proto::pool_element::{LinkId, ServerHuntConfig};
use holdfast_proto::pool_user::{self, PoolUser, SessionId};
use holdfast_sim::associations::{AssociationNumber, AssociationSide};
use holdfast_sim::pools::node_numbers::NodeRole;
use holdfast_sim::{MachineTimer, Random, Time};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{Policy, PoolHandle, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

pub struct Element {
    pub machine: PoolElement,
    pub sessions: UserSessions,
    /// State of each user's session.
    pub counts: BTreeMap<LinkId, u64>,
    known_registrars: Vec<Transport>,
    pub policy: Policy,
    pub timer: MachineTimer,
}

pub struct User {
    pub machine: PoolUser,
    /// The link of each session, while it has one.
    pub sessions: BTreeMap<SessionId, Option<LinkId>>,
    /// Time of each session's last answer.
    pub last_answers: BTreeMap<SessionId, Duration>,
    pub timer: MachineTimer,
}

/// Returns hunt settings: with registrars known beforehand, with trust in announces, or both.
fn hunt_config(known: &[Transport], random: &mut Random) -> ServerHuntConfig {
    let announces = random.chance(0.4);
    let configured = if announces && random.chance(0.5) {
        &[][..]
    } else {
        known
    };
    let mut config = ServerHuntConfig::new(configured.to_vec());
    config.trust_announces = announces;
    config.parallel = random.between(1, 4) as usize;
    config
}

impl Element {
    /// Returns the element with this index, which users reach at `transport`.
    pub fn new(
        index: usize,
        transport: Transport,
        known: Vec<Transport>,
        random: &mut Random,
    ) -> Element {
        let policy = Policy::LeastUsed { load: 0 };
        let handle = PoolHandle::from("pool");
        let mut config = pool_element::PoolElementConfig::new(
            handle.clone(),
            transport,
            policy,
            hunt_config(&known, random),
            random.seed(),
        );
        config.life = Some(Duration::from_secs(random.between(5, 30)));
        // Some elements start with another's identifier, which registrars refuse.
        if index > 0 && random.chance(0.2) {
            config.seed = [9; 32];
        }
        let keys = vec![CookieKey([3; 32])];
        Element {
            machine: PoolElement::new(config),
            sessions: UserSessions::new(UserSessionsConfig {
                handle,
                policy,
                keys,
            }),
            counts: BTreeMap::new(),
            known_registrars: known,
            policy,
            timer: MachineTimer::default(),
        }
    }
}

impl User {
    pub fn new(known: &[Transport], random: &mut Random) -> User {
        let config = pool_user::PoolUserConfig::new(hunt_config(known, random), random.seed());
        User {
            machine: PoolUser::new(config),
            sessions: BTreeMap::new(),
            last_answers: BTreeMap::new(),
            timer: MachineTimer::default(),
        }
    }
}

impl World {
    pub fn restart_node(&mut self, node: NodeRole) {
        let (life, alive) = self.boots[&node];
        if alive {
            return;
        }
        self.boots.insert(node, (life + 1, true));
        if let NodeRole::Element(index) = node {
            let known = self.elements[index].known_registrars.clone();
            let transport = self.transport(node);
            self.elements[index] = Element::new(index, transport, known, &mut self.random);
            let now = self.now;
            self.elements[index].machine.handle_register(now);
            self.carry_out_outputs(node);
        }
    }

    pub fn on_connected(&mut self, node: NodeRole, link: LinkId) {
        let now = self.now;
        match node {
            NodeRole::Element(index) => self.elements[index].machine.handle_connected(now, link),
            NodeRole::User(index) => self.users[index].machine.handle_connected(now, link),
            NodeRole::Registrar(_) => {}
        }
        self.carry_out_outputs(node);
    }

    /// Handles a new association at its accepting end.
    pub fn on_accepted(&mut self, association: AssociationNumber) {
        let [from, to] = [0, 1].map(|side| self.node_at_end(association, side));
        let link = self.association(association).data[1].link;
        if let (NodeRole::User(_), NodeRole::Element(index)) = (from, to) {
            self.elements[index].counts.insert(link, 0);
            self.elements[index].sessions.handle_connected(link);
            self.carry_out_outputs(to);
        }
    }

    pub fn on_link_lost(&mut self, node: NodeRole, link: LinkId) {
        let now = self.now;
        match node {
            NodeRole::Element(index) => {
                let element = &mut self.elements[index];
                element.machine.handle_lost(now, link);
                element.sessions.handle_lost(link);
                element.counts.remove(&link);
            }
            NodeRole::User(_) if self.fault == Fault::UserMissesLinkLoss => {}
            NodeRole::User(index) => self.users[index].machine.handle_lost(now, link),
            NodeRole::Registrar(_) => {}
        }
        self.carry_out_outputs(node);
    }

    pub fn on_announce(&mut self, registrar: usize, to: NodeRole) {
        let (now, id) = (self.now, registrar_model::id_of(registrar));
        let transports = vec![self.transport(NodeRole::Registrar(registrar))];
        match to {
            NodeRole::Element(index) if self.lives(to) => {
                self.elements[index]
                    .machine
                    .handle_announce(now, id, transports, None);
            }
            NodeRole::User(index) => self.users[index]
                .machine
                .handle_announce(now, id, transports, None),
            _ => return,
        }
        self.carry_out_outputs(to);
    }

    /// Handles a wake-up, unless an earlier one has replaced this wake-up.
    pub fn wake(&mut self, node: NodeRole, at: Time) {
        let now = self.now;
        match node {
            NodeRole::Element(index) if self.elements[index].timer.take(at) => {
                self.elements[index].machine.handle_timeout(now);
            }
            NodeRole::User(index) if self.users[index].timer.take(at) => {
                self.users[index].machine.handle_timeout(now);
            }
            _ => return,
        }
        self.carry_out_outputs(node);
    }

    pub fn change_policy(&mut self, index: usize) {
        if !self.lives(NodeRole::Element(index)) {
            return;
        }
        let policy = Policy::LeastUsed {
            load: self.random.number() as u32,
        };
        let (now, element) = (self.now, &mut self.elements[index]);
        element.policy = policy;
        element
            .machine
            .handle_policy(now, policy)
            .expect("the same policy type");
        self.carry_out_outputs(NodeRole::Element(index));
    }

    pub fn on_element_packet(
        &mut self,
        index: usize,
        association: AssociationNumber,
        side: AssociationSide,
        packet: Packet,
    ) {
        let now = self.now;
        let link = self.association(association).data[usize::from(side)].link;
        let from_user = matches!(self.node_at_end(association, 0), NodeRole::User(_));
        match packet {
            Packet::Asap(_)
                if !from_user
                    && matches!(link, LinkId::Accepted(_))
                    && self.fault == Fault::ElementMissesKeepAlives => {}
            Packet::Asap(bytes) if from_user => self.elements[index]
                .sessions
                .handle_message(link, parse(&bytes)),
            Packet::Asap(bytes) => {
                self.elements[index]
                    .machine
                    .handle_message(now, link, parse(&bytes))
            }
            Packet::Request { session } => {
                let Some(count) = self.elements[index].counts.get_mut(&link) else {
                    return;
                };
                *count += 1;
                let count = *count;
                let cookie_count = self.cookies.get(&session).copied().unwrap_or(0);
                assert!(
                    count > cookie_count,
                    "{session:?}: count {count} is not above its cookie's {cookie_count}"
                );
                let state = format!("{} {} {count}", session.0, session.1);
                self.elements[index]
                    .sessions
                    .handle_state(link, state.as_bytes());
                self.send(NodeRole::Element(index), link, Packet::Response { session });
            }
            Packet::Response { .. } => panic!("an element received a response"),
        }
        self.carry_out_outputs(NodeRole::Element(index));
    }

    pub fn on_user_packet(&mut self, index: usize, link: LinkId, packet: Packet) {
        match packet {
            Packet::Asap(bytes) => {
                let message = parse(&bytes);
                if let Message::Cookie(cookie) = &message {
                    // A cookie as signed by its element: 32 bytes, then the state.
                    let (key, count) = read_state(&cookie[32..]);
                    let before = self.cookies.insert(key, count);
                    if before.is_some() && self.fault == Fault::FirstCookieOnly {
                        return;
                    }
                }
                let now = self.now;
                self.users[index].machine.handle_message(now, link, message);
                self.carry_out_outputs(NodeRole::User(index));
            }
            Packet::Response { session } => {
                let now = self.now;
                self.users[index]
                    .last_answers
                    .insert(SessionId(session.1), now);
            }
            Packet::Request { .. } => panic!("a user received a request"),
        }
    }

    /// Sends the next step of each session, and opens failed sessions anew.
    pub fn run_users(&mut self) {
        let now = self.now;
        for index in 0..self.users.len() {
            if self.users[index].sessions.len() < 3 && self.random.chance(0.3) {
                let user = &mut self.users[index];
                let id = user
                    .machine
                    .handle_open(now, self.handlespace.handle.clone(), None);
                user.sessions.insert(id, None);
                self.carry_out_outputs(NodeRole::User(index));
            }
            for (id, link) in self.users[index].sessions.clone() {
                if let Some(link) = link {
                    self.send(
                        NodeRole::User(index),
                        link,
                        Packet::Request {
                            session: (index, id.0),
                        },
                    );
                }
            }
        }
    }

    pub fn run_periodic_work(&mut self) {
        self.run_users();
        if self.now.as_millis().is_multiple_of(1_000) {
            self.run_registrars();
        }
        self.schedule(Duration::from_millis(250), WorldEvent::Tick);
    }
}

pub fn read_state(state: &[u8]) -> ((usize, u64), u64) {
    let text = std::str::from_utf8(state).expect("a valid state");
    let numbers: Vec<u64> = text
        .split(' ')
        .map(|number| number.parse().expect("a valid state"))
        .collect();
    ((numbers[0] as usize, numbers[1]), numbers[2])
}
