//! Registrars, elements and users in virtual time.

use crate::fault::Fault;
use crate::machines::{Element, User};
use crate::net::{Connection, LinkEnd, Node, Packet};
use crate::registrar_model::ModelHandlespace;
use crate::rng::Rng;
use bytes::Bytes;
use holdfast_proto::pool_element::LinkId;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{PoolHandle, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Debug)]
pub enum WorldEvent {
    /// The third packet of a handshake arrives; then the fourth.
    Accepted {
        conn: usize,
    },
    Connected {
        conn: usize,
    },
    /// The end with that number notices that the link is lost.
    Lost {
        conn: usize,
        end: usize,
    },
    PacketArrived {
        conn: usize,
        to: usize,
        packet: Packet,
    },
    Announce {
        registrar: usize,
        to: Node,
    },
    Wake {
        node: Node,
    },
    /// Work of the users, and maintenance of the registrars.
    Tick,
    Crash {
        node: Node,
    },
    Restart {
        node: Node,
    },
    Policy {
        element: usize,
    },
}

pub struct World {
    pub now: Duration,
    pub rng: Rng,
    pub queue: BTreeMap<(Duration, u64), WorldEvent>,
    sequence: u64,
    pub conns: Vec<Connection>,
    ends_by_link: BTreeMap<(Node, u64, LinkId), (usize, usize)>,
    /// Number of starts of each node, and its running state.
    pub boots: BTreeMap<Node, (u64, bool)>,
    pub handlespace: ModelHandlespace,
    pub elements: Vec<Element>,
    pub users: Vec<User>,
    pub registrars: usize,
    /// Links for keep-alives, by registrar and element.
    pub keep_alive_links: BTreeMap<(usize, usize), usize>,
    pub fault: Fault,
    /// True if registrars lose and repeat messages.
    pub registrars_lose_messages: bool,
    pub delay_us: (u64, u64),
    /// The count in each session's cookie.
    pub cookies: BTreeMap<(usize, u64), u64>,
    pub tally: BTreeMap<&'static str, u64>,
    /// Times at which sessions were broken, resumed at an element, and up again.
    pub trace: Vec<(Duration, String)>,
}

impl World {
    pub fn new(seed: u64, registrars: usize, elements: usize, users: usize) -> World {
        let mut rng = Rng::new(seed);
        let items = rng.range(2, 5) as usize;
        let mut world = World {
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            sequence: 0,
            conns: Vec::new(),
            ends_by_link: BTreeMap::new(),
            boots: BTreeMap::new(),
            handlespace: ModelHandlespace {
                handle: PoolHandle::from("pool"),
                entries: BTreeMap::new(),
                next_element: 0,
                items_per_answer: items,
            },
            elements: Vec::new(),
            users: Vec::new(),
            registrars,
            keep_alive_links: BTreeMap::new(),
            fault: Fault::None,
            registrars_lose_messages: true,
            delay_us: (100, 20_000),
            cookies: BTreeMap::new(),
            tally: BTreeMap::new(),
            trace: Vec::new(),
            rng,
        };
        let known: Vec<Transport> = (0..registrars)
            .map(|index| Node::Registrar(index).transport())
            .collect();
        for index in 0..registrars {
            world.boots.insert(Node::Registrar(index), (1, true));
        }
        for index in 0..elements {
            world
                .elements
                .push(Element::new(index, known.clone(), &mut world.rng));
            world.boots.insert(Node::Element(index), (0, false));
            let at = Duration::from_millis(world.rng.range(0, 1_000));
            world.schedule(
                at,
                WorldEvent::Restart {
                    node: Node::Element(index),
                },
            );
        }
        for index in 0..users {
            world.users.push(User::new(&known, &mut world.rng));
            world.boots.insert(Node::User(index), (1, true));
        }
        world.schedule(Duration::ZERO, WorldEvent::Tick);
        world
    }

    pub fn schedule(&mut self, after: Duration, event: WorldEvent) {
        self.sequence += 1;
        self.queue.insert((self.now + after, self.sequence), event);
    }

    pub fn count(&mut self, name: &'static str) {
        *self.tally.entry(name).or_default() += 1;
    }

    pub fn is_alive(&self, node: Node) -> bool {
        self.boots[&node].1
    }

    pub fn run(&mut self, span: Duration) {
        let end = self.now + span;
        let mut steps = 0u64;
        while let Some((&(due, _), _)) = self.queue.first_key_value()
            && due <= end
        {
            let Some((_, event)) = self.queue.pop_first() else {
                break;
            };
            self.now = due;
            self.step(event);
            steps += 1;
            assert!(steps < 3_000_000, "no end of steps at {:?}", self.now);
        }
        self.now = end;
    }

    fn step(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::Accepted { conn } => {
                if self.is_live_end(conn, 1) && self.conns[conn].open {
                    self.on_accepted(conn);
                }
            }
            WorldEvent::Connected { conn } => {
                if self.is_live_end(conn, 0) && self.conns[conn].open {
                    let LinkEnd { node, link, .. } = self.conns[conn].ends[0];
                    self.on_connected(node, link);
                }
            }
            WorldEvent::Lost { conn, end } => {
                if self.is_live_end(conn, end) {
                    self.conns[conn].open = false;
                    let LinkEnd { node, link, .. } = self.conns[conn].ends[end];
                    self.on_link_lost(node, link);
                }
            }
            WorldEvent::PacketArrived { conn, to, packet } => {
                if self.is_live_end(conn, to) && self.conns[conn].open {
                    self.on_packet(conn, to, packet);
                }
            }
            WorldEvent::Announce { registrar, to } => self.on_announce(registrar, to),
            WorldEvent::Wake { node } => {
                if self.is_alive(node) {
                    self.wake(node);
                }
            }
            WorldEvent::Tick => self.run_periodic_work(),
            WorldEvent::Crash { node } => self.crash(node),
            WorldEvent::Restart { node } => self.restart_node(node),
            WorldEvent::Policy { element } => self.change_policy(element),
        }
    }

    pub fn is_live_end(&self, conn: usize, end: usize) -> bool {
        let LinkEnd {
            node, boot: life, ..
        } = self.conns[conn].ends[end];
        self.boots[&node] == (life, true)
    }

    /// Opens a link for the machine of `node`.
    pub fn connect(&mut self, node: Node, link: LinkId, to: &Transport) -> usize {
        let other = Node::at_transport(to);
        let number = self.conns.len();
        let delay = Duration::from_micros(self.rng.range(self.delay_us.0, self.delay_us.1));
        let (boot, alive) = self.boots[&other];
        let ends = [
            LinkEnd {
                node,
                boot: self.boots[&node].0,
                link,
            },
            LinkEnd {
                node: other,
                boot,
                link: LinkId::Accepted(number as u64),
            },
        ];
        for (end, at) in ends.iter().enumerate() {
            self.ends_by_link
                .insert((at.node, at.boot, at.link), (number, end));
        }
        self.conns.push(Connection {
            ends,
            delay,
            last_arrivals: [Duration::ZERO; 2],
            open: true,
        });
        if alive {
            self.schedule(delay * 3, WorldEvent::Accepted { conn: number });
            self.schedule(delay * 4, WorldEvent::Connected { conn: number });
            self.conns[number].last_arrivals[0] = self.now + delay * 3;
        } else {
            self.count("connect to a dead node");
            // The node's host refuses, or is dead too and never answers.
            if self.rng.percent(60) {
                self.schedule(
                    delay * 2,
                    WorldEvent::Lost {
                        conn: number,
                        end: 0,
                    },
                );
            }
        }
        number
    }

    fn connection_of(&self, node: Node, link: LinkId) -> (usize, usize) {
        let life = self.boots[&node].0;
        let found = self.ends_by_link.get(&(node, life, link)).copied();
        let (number, end) = found.unwrap_or_else(|| panic!("{node:?} has no {link:?}"));
        let open = self.conns[number].ends[end].boot == life;
        assert!(open, "{node:?} uses {link:?}, which it has closed");
        (number, end)
    }

    pub fn element_of(&self, user: Node, link: LinkId) -> Node {
        let (number, _) = self.connection_of(user, link);
        self.conns[number].ends[1].node
    }

    pub fn send(&mut self, node: Node, link: LinkId, packet: Packet) {
        let (number, end) = self.connection_of(node, link);
        let connection = &mut self.conns[number];
        let arrival = (self.now + connection.delay).max(connection.last_arrivals[end]);
        connection.last_arrivals[end] = arrival;
        let registrar = connection
            .ends
            .iter()
            .any(|end| matches!(end.node, Node::Registrar(_)));
        let copies = match self.rng.range(0, 100) {
            0..8 if registrar && self.registrars_lose_messages => 0,
            8..12 if registrar && self.registrars_lose_messages => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let event = WorldEvent::PacketArrived {
                conn: number,
                to: 1 - end,
                packet: packet.clone(),
            };
            self.schedule(arrival - self.now, event);
        }
    }

    pub fn close(&mut self, node: Node, link: LinkId) {
        let (number, end) = self.connection_of(node, link);
        let connection = &mut self.conns[number];
        // Packets sent before still arrive; then the other end notices the close.
        let after = (self.now + connection.delay).max(connection.last_arrivals[end]) - self.now;
        connection.ends[end].boot = u64::MAX;
        self.schedule(
            after,
            WorldEvent::Lost {
                conn: number,
                end: 1 - end,
            },
        );
    }

    fn crash(&mut self, node: Node) {
        let (life, alive) = self.boots[&node];
        if !alive {
            return;
        }
        self.boots.insert(node, (life, false));
        self.count(match node {
            Node::Registrar(_) => "registrar crashed",
            _ => "element crashed",
        });
        // Other nodes notice it at once, or after their transport's timeout.
        let notice_delay = Duration::from_millis(if self.rng.percent(50) {
            0
        } else {
            self.rng.range(200, 3_000)
        });
        for number in 0..self.conns.len() {
            let connection = &self.conns[number];
            let end = connection
                .ends
                .iter()
                .position(|end| end.node == node && end.boot == life);
            if let Some(end) = end {
                let after = connection.delay + notice_delay;
                self.schedule(
                    after,
                    WorldEvent::Lost {
                        conn: number,
                        end: 1 - end,
                    },
                );
            }
        }
    }

    fn on_packet(&mut self, conn: usize, to: usize, packet: Packet) {
        let LinkEnd { node, link, .. } = self.conns[conn].ends[to];
        match (node, packet) {
            (Node::Registrar(index), Packet::Asap(bytes)) => {
                let message = parse(&bytes);
                if let Some(answer) = self.handlespace.answer(self.now, index, message) {
                    self.send(node, link, Packet::asap(&answer));
                }
            }
            (Node::Element(index), packet) => self.on_element_packet(index, conn, link, packet),
            (Node::User(index), packet) => self.on_user_packet(index, link, packet),
            (Node::Registrar(_), packet) => panic!("a registrar got {packet:?}"),
        }
    }
}

pub fn parse(bytes: &Bytes) -> Message {
    Message::parse(bytes).expect("encoded by this test").message
}
