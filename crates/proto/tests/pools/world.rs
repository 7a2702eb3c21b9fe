//! Registrars, elements and users in virtual time.

use crate::fault::Fault;
use crate::net::{Conn, End, Node, Packet};
use crate::people::{Element, User};
use crate::registrar::Space;
use crate::rng::Rng;
use bytes::Bytes;
use holdfast_proto::pool_element::Link;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{PoolHandle, Transport};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Debug)]
pub enum What {
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
    Packet {
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
    pub queue: BTreeMap<(Duration, u64), What>,
    number: u64,
    pub conns: Vec<Conn>,
    links: BTreeMap<(Node, u64, Link), (usize, usize)>,
    /// Number of starts of each node, and its running state.
    pub lives: BTreeMap<Node, (u64, bool)>,
    pub space: Space,
    pub elements: Vec<Element>,
    pub users: Vec<User>,
    pub registrars: usize,
    /// Links for keep-alives, by registrar and element.
    pub monitors: BTreeMap<(usize, usize), usize>,
    pub fault: Fault,
    /// True if registrars lose and repeat messages.
    pub hostile: bool,
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
            number: 0,
            conns: Vec::new(),
            links: BTreeMap::new(),
            lives: BTreeMap::new(),
            space: Space {
                handle: PoolHandle::from("pool"),
                entries: BTreeMap::new(),
                turn: 0,
                items,
            },
            elements: Vec::new(),
            users: Vec::new(),
            registrars,
            monitors: BTreeMap::new(),
            fault: Fault::None,
            hostile: true,
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
            world.lives.insert(Node::Registrar(index), (1, true));
        }
        for index in 0..elements {
            world
                .elements
                .push(Element::new(index, known.clone(), &mut world.rng));
            world.lives.insert(Node::Element(index), (0, false));
            let at = Duration::from_millis(world.rng.range(0, 1_000));
            world.at(
                at,
                What::Restart {
                    node: Node::Element(index),
                },
            );
        }
        for index in 0..users {
            world.users.push(User::new(&known, &mut world.rng));
            world.lives.insert(Node::User(index), (1, true));
        }
        world.at(Duration::ZERO, What::Tick);
        world
    }

    pub fn at(&mut self, after: Duration, what: What) {
        self.number += 1;
        self.queue.insert((self.now + after, self.number), what);
    }

    pub fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    pub fn is_alive(&self, node: Node) -> bool {
        self.lives[&node].1
    }

    pub fn run(&mut self, span: Duration) {
        let end = self.now + span;
        let mut steps = 0u64;
        while let Some((&(due, _), _)) = self.queue.first_key_value()
            && due <= end
        {
            let Some((_, what)) = self.queue.pop_first() else {
                break;
            };
            self.now = due;
            self.step(what);
            steps += 1;
            assert!(steps < 3_000_000, "no end of steps at {:?}", self.now);
        }
        self.now = end;
    }

    fn step(&mut self, what: What) {
        match what {
            What::Accepted { conn } => {
                if self.live_end(conn, 1) && self.conns[conn].open {
                    self.accepted(conn);
                }
            }
            What::Connected { conn } => {
                if self.live_end(conn, 0) && self.conns[conn].open {
                    let End { node, link, .. } = self.conns[conn].ends[0];
                    self.connected(node, link);
                }
            }
            What::Lost { conn, end } => {
                if self.live_end(conn, end) {
                    self.conns[conn].open = false;
                    let End { node, link, .. } = self.conns[conn].ends[end];
                    self.lost(node, link);
                }
            }
            What::Packet { conn, to, packet } => {
                if self.live_end(conn, to) && self.conns[conn].open {
                    self.arrive(conn, to, packet);
                }
            }
            What::Announce { registrar, to } => self.announced(registrar, to),
            What::Wake { node } => {
                if self.is_alive(node) {
                    self.wake(node);
                }
            }
            What::Tick => self.tick(),
            What::Crash { node } => self.crash(node),
            What::Restart { node } => self.restart(node),
            What::Policy { element } => self.new_policy(element),
        }
    }

    pub fn live_end(&self, conn: usize, end: usize) -> bool {
        let End { node, life, .. } = self.conns[conn].ends[end];
        self.lives[&node] == (life, true)
    }

    /// Opens a link for the machine of `node`.
    pub fn connect(&mut self, node: Node, link: Link, to: &Transport) -> usize {
        let other = Node::of(to);
        let number = self.conns.len();
        let delay = Duration::from_micros(self.rng.range(self.delay_us.0, self.delay_us.1));
        let (life, alive) = self.lives[&other];
        let ends = [
            End {
                node,
                life: self.lives[&node].0,
                link,
            },
            End {
                node: other,
                life,
                link: Link::Theirs(number as u64),
            },
        ];
        for (end, at) in ends.iter().enumerate() {
            self.links
                .insert((at.node, at.life, at.link), (number, end));
        }
        self.conns.push(Conn {
            ends,
            delay,
            last: [Duration::ZERO; 2],
            open: true,
        });
        if alive {
            self.at(delay * 3, What::Accepted { conn: number });
            self.at(delay * 4, What::Connected { conn: number });
            self.conns[number].last[0] = self.now + delay * 3;
        } else {
            self.count("connect to a dead node");
            // The node's host refuses, or is dead too and never answers.
            if self.rng.percent(60) {
                self.at(
                    delay * 2,
                    What::Lost {
                        conn: number,
                        end: 0,
                    },
                );
            }
        }
        number
    }

    fn conn(&self, node: Node, link: Link) -> (usize, usize) {
        let life = self.lives[&node].0;
        let found = self.links.get(&(node, life, link)).copied();
        let (number, end) = found.unwrap_or_else(|| panic!("{node:?} has no {link:?}"));
        let open = self.conns[number].ends[end].life == life;
        assert!(open, "{node:?} uses {link:?}, which it has closed");
        (number, end)
    }

    pub fn element_of(&self, user: Node, link: Link) -> Node {
        let (number, _) = self.conn(user, link);
        self.conns[number].ends[1].node
    }

    pub fn send(&mut self, node: Node, link: Link, packet: Packet) {
        let (number, end) = self.conn(node, link);
        let conn = &mut self.conns[number];
        let arrival = (self.now + conn.delay).max(conn.last[end]);
        conn.last[end] = arrival;
        let registrar = conn
            .ends
            .iter()
            .any(|end| matches!(end.node, Node::Registrar(_)));
        let times = match self.rng.range(0, 100) {
            0..8 if registrar && self.hostile => 0,
            8..12 if registrar && self.hostile => 2,
            _ => 1,
        };
        for _ in 0..times {
            let what = What::Packet {
                conn: number,
                to: 1 - end,
                packet: packet.clone(),
            };
            self.at(arrival - self.now, what);
        }
    }

    pub fn close(&mut self, node: Node, link: Link) {
        let (number, end) = self.conn(node, link);
        let conn = &mut self.conns[number];
        // Packets sent before still arrive; then the other end notices the close.
        let after = (self.now + conn.delay).max(conn.last[end]) - self.now;
        conn.ends[end].life = u64::MAX;
        self.at(
            after,
            What::Lost {
                conn: number,
                end: 1 - end,
            },
        );
    }

    fn crash(&mut self, node: Node) {
        let (life, alive) = self.lives[&node];
        if !alive {
            return;
        }
        self.lives.insert(node, (life, false));
        self.count(match node {
            Node::Registrar(_) => "registrar crashed",
            _ => "element crashed",
        });
        // Other nodes notice it at once, or after their transport's timeout.
        let late = Duration::from_millis(if self.rng.percent(50) {
            0
        } else {
            self.rng.range(200, 3_000)
        });
        for number in 0..self.conns.len() {
            let conn = &self.conns[number];
            let end = conn
                .ends
                .iter()
                .position(|end| end.node == node && end.life == life);
            if let Some(end) = end {
                let after = conn.delay + late;
                self.at(
                    after,
                    What::Lost {
                        conn: number,
                        end: 1 - end,
                    },
                );
            }
        }
    }

    fn arrive(&mut self, conn: usize, to: usize, packet: Packet) {
        let End { node, link, .. } = self.conns[conn].ends[to];
        match (node, packet) {
            (Node::Registrar(index), Packet::Asap(bytes)) => {
                let message = parse(&bytes);
                if let Some(answer) = self.space.answer(self.now, index, message) {
                    self.send(node, link, Packet::asap(&answer));
                }
            }
            (Node::Element(index), packet) => self.element_gets(index, conn, link, packet),
            (Node::User(index), packet) => self.user_gets(index, link, packet),
            (Node::Registrar(_), packet) => panic!("a registrar got {packet:?}"),
        }
    }
}

pub fn parse(bytes: &Bytes) -> Message {
    Message::parse(bytes).expect("what was encoded").message
}
