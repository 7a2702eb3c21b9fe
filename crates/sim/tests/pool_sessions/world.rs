//! Registrars, elements and users in virtual time, and the associations between them.

use crate::fault::Fault;
use crate::machines::{Element, User};
use crate::registrar_model::ModelHandlespace;
use bytes::{Bytes, BytesMut};
use holdfast_proto::pool_element::LinkId;
use holdfast_proto::registrar::PoolProtocol;
use holdfast_sim::associations::{
    Association, AssociationEvent, AssociationNumber, AssociationSide, AssociationWorld, NodeNumber,
};
use holdfast_sim::pools::node_numbers::{self, NodeNumbers, NodeRole};
use holdfast_sim::{FutureEvents, Random, Time};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{PoolHandle, SctpTransport, Transport, TransportUse};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Debug)]
pub enum WorldEvent {
    Association(AssociationEvent<Packet>),
    Announce {
        registrar: usize,
        to: NodeRole,
    },
    Wake {
        node: NodeRole,
        at: Time,
    },
    /// Work of the users, and maintenance of the registrars.
    Tick,
    Crash {
        node: NodeRole,
    },
    Restart {
        node: NodeRole,
    },
    Policy {
        element: usize,
    },
}

impl From<AssociationEvent<Packet>> for WorldEvent {
    fn from(event: AssociationEvent<Packet>) -> WorldEvent {
        WorldEvent::Association(event)
    }
}

/// A packet on an association.
#[derive(Debug, Clone)]
pub enum Packet {
    /// An ASAP message as bytes.
    Asap(Bytes),
    /// User data: the next step of the session.
    Request { session: (usize, u64) },
    /// The element's answer to a step.
    Response { session: (usize, u64) },
}

impl Packet {
    pub fn asap(message: &Message) -> Packet {
        let mut buffer = BytesMut::new();
        message
            .encode(&mut buffer)
            .expect("machines send encodable messages");
        Packet::Asap(buffer.freeze())
    }
}

/// An end of an association: the link's identifier at its node, and the life of the node that has the link.
#[derive(Debug, Clone, Copy)]
pub struct LinkEnd {
    pub link: LinkId,
    boot: u64,
}

/// The life of an end that its node has closed.
const CLOSED: u64 = u64::MAX;

pub struct World {
    pub now: Duration,
    pub random: Random,
    queue: FutureEvents<WorldEvent>,
    nodes: NodeNumbers,
    associations: Vec<Association<[LinkEnd; 2], Packet>>,
    ends_by_link: BTreeMap<(NodeRole, u64, LinkId), (AssociationNumber, AssociationSide)>,
    /// Number of starts of each node, and its running state.
    pub boots: BTreeMap<NodeRole, (u64, bool)>,
    pub handlespace: ModelHandlespace,
    pub elements: Vec<Element>,
    pub users: Vec<User>,
    pub registrars: usize,
    /// Associations for keep-alives, by registrar and element.
    pub keep_alive_links: BTreeMap<(usize, usize), AssociationNumber>,
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
        let mut random = Random::new(seed);
        let items = random.between(2, 5) as usize;
        let mut world = World {
            now: Duration::ZERO,
            queue: FutureEvents::default(),
            nodes: NodeNumbers::in_one_zone(registrars, elements, users),
            associations: Vec::new(),
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
            random,
        };
        let known: Vec<Transport> = (0..registrars)
            .map(|index| world.transport(NodeRole::Registrar(index)))
            .collect();
        for index in 0..registrars {
            world.boots.insert(NodeRole::Registrar(index), (1, true));
        }
        for index in 0..elements {
            let node = NodeRole::Element(index);
            let transport = world.transport(node);
            let element = Element::new(index, transport, known.clone(), &mut world.random);
            world.elements.push(element);
            world.boots.insert(node, (0, false));
            let at = Duration::from_millis(world.random.between(0, 1_000));
            world.schedule(at, WorldEvent::Restart { node });
        }
        for index in 0..users {
            world.users.push(User::new(&known, &mut world.random));
            world.boots.insert(NodeRole::User(index), (1, true));
        }
        world.schedule(Duration::ZERO, WorldEvent::Tick);
        world
    }

    pub fn schedule(&mut self, after: Duration, event: WorldEvent) {
        self.queue.push((self.now + after).into(), event);
    }

    pub fn count(&mut self, name: &'static str) {
        *self.tally.entry(name).or_default() += 1;
    }

    pub fn lives(&self, node: NodeRole) -> bool {
        self.boots[&node].1
    }

    /// Returns the transport of a node, for registrations, sessions and control channels.
    pub fn transport(&self, node: NodeRole) -> Transport {
        let number = self.nodes.number(node);
        Transport::Sctp(SctpTransport {
            usage: TransportUse::DataAndControl,
            ..node_numbers::sctp_transport(number, PoolProtocol::Asap)
        })
    }

    /// Returns the node at a transport.
    pub fn role_at(&self, transport: &Transport) -> NodeRole {
        let number = node_numbers::node_of(transport);
        self.nodes.role(number.expect("the transport of a node"))
    }

    pub fn run(&mut self, span: Duration) {
        let end = self.now + span;
        let mut steps = 0u64;
        while let Some((due, event)) = self.queue.pop_until(end.into()) {
            self.now = due.into();
            self.step(event);
            steps += 1;
            assert!(steps < 3_000_000, "no end of steps at {:?}", self.now);
        }
        self.now = end;
    }

    fn step(&mut self, event: WorldEvent) {
        match event {
            WorldEvent::Association(event) => self.handle_association_event(event),
            WorldEvent::Announce { registrar, to } => self.on_announce(registrar, to),
            WorldEvent::Wake { node, at } => {
                if self.lives(node) {
                    self.wake(node, at);
                }
            }
            WorldEvent::Tick => self.run_periodic_work(),
            WorldEvent::Crash { node } => self.crash(node),
            WorldEvent::Restart { node } => self.restart_node(node),
            WorldEvent::Policy { element } => self.change_policy(element),
        }
    }

    pub fn association(
        &self,
        association: AssociationNumber,
    ) -> &Association<[LinkEnd; 2], Packet> {
        &self.associations[association as usize]
    }

    /// Returns an unused identifier for a link of a registrar.
    pub fn new_registrar_link(&self) -> LinkId {
        LinkId::Initiated(self.associations.len() as u64)
    }

    pub fn node_at_end(&self, association: AssociationNumber, side: AssociationSide) -> NodeRole {
        self.nodes.role(self.association(association).end(side))
    }

    /// Returns true if the node at an end still is in the life that has the link, and has not closed the link.
    pub fn is_live_end(&self, association: AssociationNumber, side: AssociationSide) -> bool {
        let LinkEnd { boot, .. } = self.association(association).data[usize::from(side)];
        self.boots[&self.node_at_end(association, side)] == (boot, true)
    }

    /// Opens a link for the machine of `node`.
    pub fn connect(&mut self, node: NodeRole, link: LinkId, to: &Transport) -> AssociationNumber {
        let other = self.role_at(to);
        let association = self.associations.len() as AssociationNumber;
        let (boot, alive) = self.boots[&other];
        let accepted = LinkId::Accepted(u64::from(association));
        let ends = [
            LinkEnd {
                link,
                boot: self.boots[&node].0,
            },
            LinkEnd {
                link: accepted,
                boot,
            },
        ];
        for (side, (node, end)) in (0..).zip([(node, ends[0]), (other, ends[1])]) {
            let key = (node, end.boot, end.link);
            self.ends_by_link.insert(key, (association, side));
        }
        if !alive {
            self.count("connect to a dead node");
        }
        self.associate(self.nodes.number(node), self.nodes.number(other), ends)
    }

    fn end_of_link(&self, node: NodeRole, link: LinkId) -> (AssociationNumber, AssociationSide) {
        let life = self.boots[&node].0;
        let found = self.ends_by_link.get(&(node, life, link)).copied();
        let (association, side) = found.unwrap_or_else(|| panic!("{node:?} has no {link:?}"));
        let boot = self.association(association).data[usize::from(side)].boot;
        assert_eq!(boot, life, "{node:?} uses {link:?}, which it has closed");
        (association, side)
    }

    pub fn element_of(&self, user: NodeRole, link: LinkId) -> NodeRole {
        let (association, _) = self.end_of_link(user, link);
        self.node_at_end(association, 1)
    }

    pub fn send(&mut self, node: NodeRole, link: LinkId, packet: Packet) {
        let (association, side) = self.end_of_link(node, link);
        self.transmit(association, side, packet);
    }

    pub fn close_link(&mut self, node: NodeRole, link: LinkId) {
        let (association, side) = self.end_of_link(node, link);
        self.associations[association as usize].data[usize::from(side)].boot = CLOSED;
        self.close(association, side);
    }

    fn crash(&mut self, node: NodeRole) {
        let (life, alive) = self.boots[&node];
        if !alive {
            return;
        }
        self.boots.insert(node, (life, false));
        self.count(match node {
            NodeRole::Registrar(_) => "registrar crashed",
            _ => "element crashed",
        });
        // Other nodes notice the crash at once, or after their transport's timeout.
        let notice_delay = Duration::from_millis(if self.random.chance(0.5) {
            0
        } else {
            self.random.between(200, 3_000)
        });
        self.close_all(self.nodes.number(node), |_| notice_delay.into());
    }

    fn on_packet(&mut self, association: AssociationNumber, side: AssociationSide, packet: Packet) {
        let link = self.association(association).data[usize::from(side)].link;
        let node = self.node_at_end(association, side);
        match (node, packet) {
            (NodeRole::Registrar(index), Packet::Asap(bytes)) => {
                let message = parse(&bytes);
                if let Some(answer) = self.handlespace.answer(self.now, index, message) {
                    self.send(node, link, Packet::asap(&answer));
                }
            }
            (NodeRole::Element(index), packet) => {
                self.on_element_packet(index, association, side, packet);
            }
            (NodeRole::User(index), packet) => self.on_user_packet(index, link, packet),
            (NodeRole::Registrar(_), packet) => panic!("a registrar got {packet:?}"),
        }
    }
}

impl AssociationWorld for World {
    type Data = [LinkEnd; 2];
    type Message = Packet;
    type Event = WorldEvent;

    fn now(&self) -> Time {
        self.now.into()
    }

    fn queue(&mut self) -> &mut FutureEvents<WorldEvent> {
        &mut self.queue
    }

    fn associations(&mut self) -> &mut Vec<Association<[LinkEnd; 2], Packet>> {
        &mut self.associations
    }

    fn is_alive(&self, node: NodeNumber) -> bool {
        self.lives(self.nodes.role(node))
    }

    /// Never used: every packet arrives.
    fn association_timeout(&self) -> Time {
        Time::ZERO
    }

    fn arrival(
        &mut self,
        at: Time,
        _: (NodeNumber, NodeNumber),
        _: Option<&Packet>,
    ) -> Option<Time> {
        let (min, max) = self.delay_us;
        Some(at + Time::from_micros(self.random.between(min, max)))
    }

    fn copies(&mut self, association: AssociationNumber, _: AssociationSide) -> usize {
        let nodes = [0, 1].map(|side| self.node_at_end(association, side));
        let has_registrar = nodes
            .iter()
            .any(|node| matches!(node, NodeRole::Registrar(_)));
        if !has_registrar || !self.registrars_lose_messages {
            return 1;
        }
        match self.random.below(100) {
            0..8 => 0,
            8..12 => 2,
            _ => 1,
        }
    }

    /// The node's host refuses, or is dead too and never answers.
    fn refuses_connection(&mut self, _: NodeNumber) -> bool {
        self.random.chance(0.6)
    }

    fn handle_up(&mut self, association: AssociationNumber, side: AssociationSide) {
        if !self.is_live_end(association, side) {
            return;
        }
        if side == 1 {
            return self.on_accepted(association);
        }
        let link = self.association(association).data[0].link;
        self.on_connected(self.node_at_end(association, 0), link);
    }

    fn handle_lost(&mut self, association: AssociationNumber, side: AssociationSide, _: bool) {
        if self.is_live_end(association, side) {
            let link = self.association(association).data[usize::from(side)].link;
            self.on_link_lost(self.node_at_end(association, side), link);
        }
    }

    fn handle_message(
        &mut self,
        association: AssociationNumber,
        side: AssociationSide,
        message: &Packet,
    ) {
        if self.is_live_end(association, side) {
            self.on_packet(association, side, message.clone());
        }
    }
}

pub fn parse(bytes: &Bytes) -> Message {
    Message::parse(bytes).expect("encoded by this test").message
}
