//! Elements and users: their machines, and the programs above.

use crate::fault::Fault;
use crate::net::{Node, Packet};
use crate::registrar_model;
use crate::rng::Rng;
use crate::world::{World, WorldEvent, parse};
use holdfast_proto::pool_element::{
    self, CookieKey, PoolElement, UserSessions, UserSessionsConfig,
};
use holdfast_proto::pool_element::{LinkId, ServerHuntConfig};
use holdfast_proto::pool_user::{self, PoolUser, SessionId};
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
    pub next_wake: Option<Duration>,
}

pub struct User {
    pub machine: PoolUser,
    /// The link of each session, while it has one.
    pub sessions: BTreeMap<SessionId, Option<LinkId>>,
    /// Time of each session's last answer.
    pub last_answers: BTreeMap<SessionId, Duration>,
    pub next_wake: Option<Duration>,
}

/// Returns hunt settings: with registrars known beforehand, with trust in announces, or both.
fn hunt_config(known: &[Transport], rng: &mut Rng) -> ServerHuntConfig {
    let announces = rng.percent(40);
    let configured = if announces && rng.percent(50) {
        &[][..]
    } else {
        known
    };
    let mut config = ServerHuntConfig::new(configured.to_vec());
    config.trust_announces = announces;
    config.parallel = rng.range(1, 4) as usize;
    config
}

fn seed(rng: &mut Rng) -> [u8; 32] {
    std::array::from_fn(|_| rng.next() as u8)
}

impl Element {
    pub fn new(index: usize, known: Vec<Transport>, rng: &mut Rng) -> Element {
        let policy = Policy::LeastUsed { load: 0 };
        let at = Node::Element(index).transport();
        let handle = PoolHandle::from("pool");
        let mut config = pool_element::PoolElementConfig::new(
            handle.clone(),
            at,
            policy,
            hunt_config(&known, rng),
            seed(rng),
        );
        config.life = Some(Duration::from_secs(rng.range(5, 30)));
        // Some elements start with another's identifier, which registrars refuse.
        if index > 0 && rng.percent(20) {
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
            next_wake: None,
        }
    }
}

impl User {
    pub fn new(known: &[Transport], rng: &mut Rng) -> User {
        let config = pool_user::PoolUserConfig::new(hunt_config(known, rng), seed(rng));
        User {
            machine: PoolUser::new(config),
            sessions: BTreeMap::new(),
            last_answers: BTreeMap::new(),
            next_wake: None,
        }
    }
}

impl World {
    pub fn restart_node(&mut self, node: Node) {
        let (life, alive) = self.boots[&node];
        if alive {
            return;
        }
        self.boots.insert(node, (life + 1, true));
        if let Node::Element(index) = node {
            let known = self.elements[index].known_registrars.clone();
            self.elements[index] = Element::new(index, known, &mut self.rng);
            let now = self.now;
            self.elements[index].machine.handle_register(now);
            self.carry_out_outputs(node);
        }
    }

    pub fn on_connected(&mut self, node: Node, link: LinkId) {
        let now = self.now;
        match node {
            Node::Element(index) => self.elements[index].machine.handle_connected(now, link),
            Node::User(index) => self.users[index].machine.handle_connected(now, link),
            Node::Registrar(_) => {}
        }
        self.carry_out_outputs(node);
    }

    pub fn on_accepted(&mut self, conn: usize) {
        let [from, to] = self.conns[conn].ends;
        if let (Node::User(_), Node::Element(index)) = (from.node, to.node) {
            self.elements[index].counts.insert(to.link, 0);
            self.elements[index].sessions.handle_connected(to.link);
            self.carry_out_outputs(to.node);
        }
    }

    pub fn on_link_lost(&mut self, node: Node, link: LinkId) {
        let now = self.now;
        match node {
            Node::Element(index) => {
                let element = &mut self.elements[index];
                element.machine.handle_lost(now, link);
                element.sessions.handle_lost(link);
                element.counts.remove(&link);
            }
            Node::User(_) if self.fault == Fault::UserMissesLinkLoss => {}
            Node::User(index) => self.users[index].machine.handle_lost(now, link),
            Node::Registrar(_) => {}
        }
        self.carry_out_outputs(node);
    }

    pub fn on_announce(&mut self, registrar: usize, to: Node) {
        let (now, id) = (self.now, registrar_model::id_of(registrar));
        let transports = vec![Node::Registrar(registrar).transport()];
        match to {
            Node::Element(index) if self.is_alive(to) => {
                self.elements[index]
                    .machine
                    .handle_announce(now, id, transports, None);
            }
            Node::User(index) => self.users[index]
                .machine
                .handle_announce(now, id, transports, None),
            _ => return,
        }
        self.carry_out_outputs(to);
    }

    pub fn wake(&mut self, node: Node) {
        let now = self.now;
        match node {
            Node::Element(index) => self.elements[index].machine.handle_timeout(now),
            Node::User(index) => self.users[index].machine.handle_timeout(now),
            Node::Registrar(_) => return,
        }
        self.carry_out_outputs(node);
    }

    pub fn change_policy(&mut self, index: usize) {
        if !self.is_alive(Node::Element(index)) {
            return;
        }
        let policy = Policy::LeastUsed {
            load: self.rng.next() as u32,
        };
        let (now, element) = (self.now, &mut self.elements[index]);
        element.policy = policy;
        element
            .machine
            .handle_policy(now, policy)
            .expect("the same policy type");
        self.carry_out_outputs(Node::Element(index));
    }

    pub fn on_element_packet(&mut self, index: usize, conn: usize, link: LinkId, packet: Packet) {
        let now = self.now;
        let from_user = matches!(self.conns[conn].ends[0].node, Node::User(_));
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
                self.send(Node::Element(index), link, Packet::Response { session });
            }
            Packet::Response { .. } => panic!("an element received a response"),
        }
        self.carry_out_outputs(Node::Element(index));
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
                self.carry_out_outputs(Node::User(index));
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
            if self.users[index].sessions.len() < 3 && self.rng.percent(30) {
                let user = &mut self.users[index];
                let id = user
                    .machine
                    .handle_open(now, self.handlespace.handle.clone(), None);
                user.sessions.insert(id, None);
                self.carry_out_outputs(Node::User(index));
            }
            for (id, link) in self.users[index].sessions.clone() {
                if let Some(link) = link {
                    self.send(
                        Node::User(index),
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
