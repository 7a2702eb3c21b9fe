//! The session as a machine without sockets, threads and clock: calls of the program and messages of the daemon go in,
//! messages ([`Core::poll_transmit`]) and events ([`Core::poll_event`]) come out. Both faces of the library and both
//! kinds of socket share it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Descriptor;
use super::outbox::{Outbox, Transmit};
use crate::app::{
    APPLICATION_STATE_BYTES_MAX, FromDaemon, HandOffItem, IncomingItem, Piece, ReclaimItem,
    StillWaiting, ToDaemon, join_pieces, split_pieces,
};
use crate::{Destination, FlowText, Protocol};

/// What the face keeps for each flow.
pub(crate) trait Tag: Clone + Default {
    /// Whether both stand for the same life of a flow: one that left may come back under the same name.
    fn is(&self, other: &Self) -> bool;
}

/// What the program must be told. `T` is what the face keeps for each flow.
pub(crate) enum Event<T> {
    /// The daemon is there. Its node's name.
    Opened { node: String },
    /// Someone wants the flow elsewhere.
    Asked {
        service: u32,
        flow: FlowText,
        tag: T,
        destination: Destination,
    },
    /// Datagrams for this UDP flow may soon be in the service's socket; they wait until it has arrived.
    Arriving { service: u32, flow: FlowText },
    /// It does not arrive.
    Cancelled { service: u32, flow: FlowText },
    /// The flow is this program's.
    Arrived {
        service: u32,
        flow: FlowText,
        tag: T,
        descriptor: Option<Arc<OwnedFd>>,
        state: Vec<u8>,
        unread: Vec<Vec<u8>>,
    },
    /// UDP: what is left in the service's socket for this flow? Answered by [`Core::collected`].
    Collect { service: u32, flow: FlowText },
    /// The flow went.
    Moved {
        service: u32,
        flow: FlowText,
        tag: T,
        to: String,
    },
    /// The flow stays.
    Kept {
        service: u32,
        flow: FlowText,
        tag: T,
        reason: String,
    },
    /// Something for the log.
    Problem { text: String },
}

/// The daemon broke the protocol: the session ends, and begins anew.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the daemon broke the protocol: {0}")]
pub(crate) struct Violation(pub(crate) String);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    Down,
    Opening,
    Open,
}

struct Service {
    pool: String,
    protocol: Protocol,
    addresses: Vec<SocketAddr>,
}

struct Flow<T> {
    service: u32,
    tag: T,
    leaving: Option<Leaving>,
}

struct Leaving {
    to: String,
    descriptor: Option<Descriptor>,
    /// The program waits no longer: if the flow stays, it is closed.
    abandoned: bool,
}

struct Incoming {
    service: u32,
    flow: FlowText,
    descriptor: Option<Arc<OwnedFd>>,
    state: Vec<u8>,
    pieces: Vec<Piece>,
    /// `None` until the state is complete.
    unread: Option<Vec<Vec<u8>>>,
}

pub(crate) struct Core<T> {
    name: String,
    link: Link,
    services: BTreeMap<u32, Service>,
    services_ever: u32,
    flows: HashMap<FlowText, Flow<T>>,
    incoming: BTreeMap<u64, Incoming>,
    outbox: Outbox,
    events: VecDeque<Event<T>>,
}

/// What the daemon hears when it asks for a flow that ended meanwhile.
const NO_SUCH_FLOW: &str = "the program no longer has this connection";

impl<T: Tag> Core<T> {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            link: Link::Down,
            services: BTreeMap::new(),
            services_ever: 0,
            flows: HashMap::new(),
            incoming: BTreeMap::new(),
            outbox: Outbox::default(),
            events: VecDeque::new(),
        }
    }

    /// The next message to send.
    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.outbox.pop()
    }

    /// The message did not fit into the socket: it comes again.
    pub(crate) fn not_sent(&mut self, transmit: Transmit) {
        self.outbox.put_back(transmit);
    }

    /// Whether [`Core::poll_transmit`] has something.
    pub(crate) fn wants_to_transmit(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// The next thing to tell the program.
    pub(crate) fn poll_event(&mut self) -> Option<Event<T>> {
        self.events.pop_front()
    }

    /// Whether handoffs are possible.
    pub(crate) fn is_open(&self) -> bool {
        self.link == Link::Open
    }

    /// There is a new socket to the daemon.
    pub(crate) fn handle_connected(&mut self) {
        self.link = Link::Opening;
        self.outbox.clear();
        self.outbox.whole(ToDaemon::Open {
            name: self.name.clone(),
        });
    }

    /// The socket to the daemon is gone. What was on its way waits.
    pub(crate) fn handle_disconnected(&mut self) {
        self.link = Link::Down;
        self.outbox.clear();
    }

    /// The program has a socket for a service.
    pub(crate) fn serve(
        &mut self,
        pool: &str,
        protocol: Protocol,
        addresses: Vec<SocketAddr>,
    ) -> u32 {
        self.services_ever += 1;
        let service = Service {
            pool: pool.to_owned(),
            protocol,
            addresses,
        };
        if self.link == Link::Open {
            self.outbox.whole(service.message(self.services_ever));
        }
        self.services.insert(self.services_ever, service);
        self.services_ever
    }

    /// The program takes no more flows of this service.
    pub(crate) fn withdraw(&mut self, service: u32) {
        if self.services.remove(&service).is_some() && self.link == Link::Open {
            self.outbox.whole(ToDaemon::Withdraw { service });
        }
    }

    /// The program accepted this flow.
    pub(crate) fn accepted(&mut self, service: u32, flow: FlowText, tag: T) {
        if self.link == Link::Open {
            self.outbox.accepted(service, [flow]);
        }
        self.flows.insert(
            flow,
            Flow {
                service,
                tag,
                leaving: None,
            },
        );
    }

    /// The program has this flow no longer. One that is on its way goes on; should it stay, it is closed then.
    pub(crate) fn closed(&mut self, flow: FlowText, tag: &T) {
        match self.flows.get_mut(&flow).filter(|entry| entry.tag.is(tag)) {
            Some(Flow {
                leaving: Some(leaving),
                ..
            }) => leaving.abandoned = true,
            Some(_) => {
                self.flows.remove(&flow);
                if self.link == Link::Open {
                    self.outbox.closed(flow);
                }
            }
            None => {}
        }
    }

    /// The program does not hand this flow off, although it was asked to.
    pub(crate) fn decline(&mut self, flow: FlowText, reason: &str) {
        if self.link == Link::Open {
            self.outbox.declined(flow, reason);
        }
    }

    /// The program hands a flow off. A reason when that fails at once; otherwise `Moved` or `Kept` follows.
    pub(crate) fn hand_off(
        &mut self,
        flow: FlowText,
        destination: &Destination,
        application_state: Vec<u8>,
        descriptor: Option<Descriptor>,
    ) -> Result<(), String> {
        if self.link != Link::Open {
            return Err("there is no connection to the daemon".into());
        }
        if application_state.len() > APPLICATION_STATE_BYTES_MAX {
            let length = application_state.len();
            return Err(format!(
                "{length} bytes of application state, more than {APPLICATION_STATE_BYTES_MAX}"
            ));
        }
        let entry = self
            .flows
            .get_mut(&flow)
            .ok_or("the session does not know this flow")?;
        if entry.leaving.is_some() {
            return Err("it is on its way already".into());
        }
        let to = destination.to.clone();
        entry.leaving = Some(Leaving {
            to,
            descriptor: descriptor.clone(),
            abandoned: false,
        });
        let item = HandOffItem {
            flow,
            application_state,
            descriptor: descriptor.is_some(),
        };
        self.outbox.hand_off(destination, item, descriptor);
        Ok(())
    }

    /// Answers [`Event::Collect`].
    pub(crate) fn collected<'a>(
        &mut self,
        flow: FlowText,
        unread: impl IntoIterator<Item = &'a [u8]>,
    ) {
        if self.link != Link::Open {
            return;
        }
        let mut runs = split_pieces(unread).into_iter().peekable();
        while let Some(unread) = runs.next() {
            self.outbox.whole(ToDaemon::Collected {
                flow,
                unread,
                last: runs.peek().is_none(),
            });
        }
    }

    /// A message of the daemon.
    pub(crate) fn handle_message(
        &mut self,
        message: FromDaemon,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), Violation> {
        let expected = match &message {
            FromDaemon::Incoming { items } => items.iter().filter(|item| item.descriptor).count(),
            _ => 0,
        };
        if descriptors.len() != expected {
            return Err(Violation(format!(
                "{} descriptors, {expected} expected",
                descriptors.len()
            )));
        }
        match message {
            FromDaemon::Opened { node } => self.opened(node),
            _ if self.link != Link::Open => return Err(Violation("it spoke before Opened".into())),
            FromDaemon::Asked { flows, to, drain } => self.asked(flows, &Destination { to, drain }),
            FromDaemon::Incoming { items } => self.incoming(items, descriptors),
            FromDaemon::State {
                id,
                application_state,
                unread,
                last,
            } => {
                return self.state(id, application_state, unread, last);
            }
            FromDaemon::Go { ids } => return ids.into_iter().try_for_each(|id| self.go(id)),
            FromDaemon::Cancel { ids, .. } => ids.into_iter().for_each(|id| self.cancel(id)),
            FromDaemon::Collect { flows } => self.collect(flows),
            FromDaemon::Gone { flows, to } => {
                flows.into_iter().for_each(|flow| self.gone(flow, &to))
            }
            FromDaemon::Kept { flows, reason } => {
                flows.into_iter().for_each(|flow| self.kept(flow, &reason))
            }
            FromDaemon::Error { text } => self.events.push_back(Event::Problem { text }),
        }
        Ok(())
    }

    /// Everything that a daemon must know of this session, be it new or not.
    fn opened(&mut self, node: String) {
        self.link = Link::Open;
        for (id, service) in &self.services {
            self.outbox.whole(service.message(*id));
        }
        let mut here: BTreeMap<u32, Vec<FlowText>> = BTreeMap::new();
        let mut waiting = Vec::new();
        for (flow, entry) in &self.flows {
            match &entry.leaving {
                None => here.entry(entry.service).or_default().push(*flow),
                Some(leaving) => {
                    let was = StillWaiting::Donated {
                        to: leaving.to.clone(),
                    };
                    waiting.push((
                        reclaim(*flow, entry.service, was, &leaving.descriptor),
                        leaving.descriptor.clone(),
                    ));
                }
            }
        }
        for (id, incoming) in &self.incoming {
            let was = StillWaiting::Incoming {
                id: *id,
                received: incoming.unread.is_some(),
            };
            let descriptor = incoming.descriptor.clone().map(|fd| fd as Descriptor);
            waiting.push((
                reclaim(incoming.flow, incoming.service, was, &descriptor),
                descriptor,
            ));
        }
        here.into_iter()
            .for_each(|(service, flows)| self.outbox.accepted(service, flows));
        if !waiting.is_empty() {
            self.outbox.reclaim(waiting);
        }
        self.events.push_back(Event::Opened { node });
    }

    fn asked(&mut self, flows: Vec<FlowText>, destination: &Destination) {
        for flow in flows {
            match self.flows.get(&flow) {
                Some(Flow {
                    leaving: None,
                    tag,
                    service,
                }) => self.events.push_back(Event::Asked {
                    service: *service,
                    flow,
                    tag: tag.clone(),
                    destination: destination.clone(),
                }),
                Some(_) => {}
                None => self.outbox.declined(flow, NO_SUCH_FLOW),
            }
        }
    }

    fn incoming(&mut self, items: Vec<IncomingItem>, descriptors: Vec<OwnedFd>) {
        let mut descriptors = descriptors.into_iter();
        for IncomingItem {
            id,
            service,
            flow,
            descriptor,
        } in items
        {
            let descriptor = descriptor
                .then(|| descriptors.next())
                .flatten()
                .map(Arc::new);
            let refusal = match self.services.get(&service) {
                None => Some("the program no longer serves this"),
                Some(served) if served.protocol != flow.protocol() => {
                    Some("the service has another protocol")
                }
                Some(_) if self.flows.contains_key(&flow) => {
                    Some("the program has this connection already")
                }
                Some(_) => None,
            };
            if let Some(reason) = refusal {
                self.outbox.whole(ToDaemon::Refused {
                    ids: vec![id],
                    reason: reason.into(),
                });
                continue;
            }
            let incoming = Incoming {
                service,
                flow,
                descriptor,
                state: Vec::new(),
                pieces: Vec::new(),
                unread: None,
            };
            self.incoming.insert(id, incoming);
        }
    }

    fn state(
        &mut self,
        id: u64,
        state: Vec<u8>,
        pieces: Vec<Piece>,
        last: bool,
    ) -> Result<(), Violation> {
        // One that was refused: the daemon had not heard yet.
        let Some(incoming) = self.incoming.get_mut(&id) else {
            return Ok(());
        };
        incoming.state.extend(state);
        incoming.pieces.extend(pieces);
        if !last {
            return Ok(());
        }
        let pieces = std::mem::take(&mut incoming.pieces);
        incoming.unread = Some(join_pieces(pieces).map_err(|error| Violation(error.to_string()))?);
        if incoming.flow.protocol() == Protocol::Udp {
            self.events.push_back(Event::Arriving {
                service: incoming.service,
                flow: incoming.flow,
            });
        }
        self.outbox.received(id);
        Ok(())
    }

    fn go(&mut self, id: u64) -> Result<(), Violation> {
        match self.incoming.remove(&id) {
            None => Ok(()),
            Some(Incoming { unread: None, .. }) => Err(Violation("Go without State".into())),
            Some(Incoming {
                service,
                flow,
                descriptor,
                state,
                unread: Some(unread),
                ..
            }) => {
                let tag = T::default();
                self.flows.insert(
                    flow,
                    Flow {
                        service,
                        tag: tag.clone(),
                        leaving: None,
                    },
                );
                self.events.push_back(Event::Arrived {
                    service,
                    flow,
                    tag,
                    descriptor,
                    state,
                    unread,
                });
                Ok(())
            }
        }
    }

    fn cancel(&mut self, id: u64) {
        if let Some(Incoming { service, flow, .. }) = self.incoming.remove(&id) {
            self.events.push_back(Event::Cancelled { service, flow });
        }
    }

    fn collect(&mut self, flows: Vec<FlowText>) {
        for flow in flows {
            match self.flows.get(&flow) {
                Some(Flow {
                    leaving: Some(_),
                    service,
                    ..
                }) => {
                    self.events.push_back(Event::Collect {
                        service: *service,
                        flow,
                    });
                }
                _ => self.collected(flow, []),
            }
        }
    }

    fn gone(&mut self, flow: FlowText, to: &str) {
        if self
            .flows
            .get(&flow)
            .is_some_and(|entry| entry.leaving.is_some())
        {
            let Some(Flow { service, tag, .. }) = self.flows.remove(&flow) else {
                return;
            };
            self.events.push_back(Event::Moved {
                service,
                flow,
                tag,
                to: to.to_owned(),
            });
        }
    }

    fn kept(&mut self, flow: FlowText, reason: &str) {
        let Some(entry) = self.flows.get_mut(&flow) else {
            return;
        };
        let Some(leaving) = entry.leaving.take() else {
            return;
        };
        let (service, tag) = (entry.service, entry.tag.clone());
        if leaving.abandoned {
            self.closed(flow, &tag);
        }
        self.events.push_back(Event::Kept {
            service,
            flow,
            tag,
            reason: reason.to_owned(),
        });
    }
}

impl Service {
    fn message(&self, service: u32) -> ToDaemon {
        let Service {
            pool,
            protocol,
            addresses,
        } = self;
        ToDaemon::Serve {
            service,
            pool: pool.clone(),
            protocol: *protocol,
            addresses: addresses.clone(),
        }
    }
}

fn reclaim(
    flow: FlowText,
    service: u32,
    was: StillWaiting,
    descriptor: &Option<Descriptor>,
) -> ReclaimItem {
    ReclaimItem {
        flow,
        service,
        was,
        descriptor: descriptor.is_some(),
    }
}
