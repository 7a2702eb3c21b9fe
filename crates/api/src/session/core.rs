//! The session as a machine without sockets, threads and clock: calls of the program and messages of the daemon go in,
//! messages ([`Core::poll_transmit`]) and events ([`Core::poll_event`]) come out. Both faces of the library and both
//! kinds of socket share it.

mod messages;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Descriptor;
use super::outbox::{Outbox, Transmit};
use crate::app::{APPLICATION_STATE_BYTES_MAX, HandOffItem, Piece, ToDaemon, split_pieces};
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
