//! The session as a state machine without sockets, threads and clock. Inputs are calls of the program and messages of
//! the daemon; outputs are messages ([`SessionCore::poll_transmit`]) and events ([`SessionCore::poll_event`]). Both
//! interfaces of the library and both kinds of socket share it.

mod messages;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::SharedDescriptor;
use super::to_daemon_queue::{MessageToDaemon, ToDaemonQueue};
use crate::app::{APPLICATION_STATE_BYTES_MAX, DatagramPiece, HandOffItem, ToDaemon, split_pieces};
use crate::{Destination, FlowText, Protocol};

/// Data that the library's interface stores for each flow.
pub(crate) trait FlowTag: Clone + Default {
    /// Returns true if both belong to the same instance of a flow: a flow that moved away may return under the same
    /// name.
    fn is_same_flow(&self, other: &Self) -> bool;
}

/// An event for the program. `T` is the data stored for each flow.
pub(crate) enum SessionCoreEvent<T> {
    /// The daemon opened the session. Name of its node.
    Opened { node: String },
    /// The operator or the balancer requests that the flow move.
    HandoffRequested {
        service: u32,
        flow: FlowText,
        tag: T,
        destination: Destination,
    },
    /// Datagrams for this UDP flow may soon be in the service's socket; they wait until the flow has arrived.
    Arriving { service: u32, flow: FlowText },
    /// The announced flow does not arrive.
    Cancelled { service: u32, flow: FlowText },
    /// The flow belongs to this program.
    Arrived {
        service: u32,
        flow: FlowText,
        tag: T,
        descriptor: Option<Arc<OwnedFd>>,
        state: Vec<u8>,
        unread: Vec<Vec<u8>>,
    },
    /// UDP: requests the datagrams left in the service's socket for this flow. Answered by [`SessionCore::send_collected`].
    Collect { service: u32, flow: FlowText },
    /// The flow moved to another node.
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
    /// A problem for the log.
    Problem { text: String },
}

/// A violation of the protocol by the daemon: the session ends and starts again.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the daemon broke the protocol: {0}")]
pub(crate) struct DaemonViolation(pub(crate) String);

#[derive(Clone, Copy, PartialEq, Eq)]
enum DaemonLinkState {
    Down,
    Opening,
    Open,
}

/// A service for which the program has a socket.
pub(crate) struct RegisteredService {
    pub(crate) pool: String,
    pub(crate) protocol: Protocol,
    pub(crate) addresses: Vec<SocketAddr>,
    /// The reason that the service's flows stay and that no other node's flows are taken, if so.
    pub(crate) handoff_refusal: Option<Arc<str>>,
}

struct RegisteredFlow<T> {
    service: u32,
    tag: T,
    handoff: Option<OutboundHandoff>,
    /// The reason that the flow stays, if its service gives no flow away. Outlives the service.
    handoff_refusal: Option<Arc<str>>,
}

struct OutboundHandoff {
    to: String,
    descriptor: Option<SharedDescriptor>,
    /// The program does not wait for the result: if the flow stays, it is closed.
    is_abandoned: bool,
}

struct InboundHandoff {
    service: u32,
    flow: FlowText,
    descriptor: Option<Arc<OwnedFd>>,
    state: Vec<u8>,
    pieces: Vec<DatagramPiece>,
    /// `None` until the state is complete.
    unread: Option<Vec<Vec<u8>>>,
}

pub(crate) struct SessionCore<T> {
    name: String,
    link: DaemonLinkState,
    services: BTreeMap<u32, RegisteredService>,
    last_service: u32,
    flows: HashMap<FlowText, RegisteredFlow<T>>,
    incoming: BTreeMap<u64, InboundHandoff>,
    outbox: ToDaemonQueue,
    events: VecDeque<SessionCoreEvent<T>>,
}

impl<T: FlowTag> SessionCore<T> {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            link: DaemonLinkState::Down,
            services: BTreeMap::new(),
            last_service: 0,
            flows: HashMap::new(),
            incoming: BTreeMap::new(),
            outbox: ToDaemonQueue::default(),
            events: VecDeque::new(),
        }
    }

    /// Returns the next message to send.
    pub(crate) fn poll_transmit(&mut self) -> Option<MessageToDaemon> {
        self.outbox.pop()
    }

    /// Puts back a message that did not fit into the socket.
    pub(crate) fn put_back(&mut self, transmit: MessageToDaemon) {
        self.outbox.put_back(transmit);
    }

    /// Returns true if [`SessionCore::poll_transmit`] has a message.
    pub(crate) fn has_transmit(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Returns the next event for the program.
    pub(crate) fn poll_event(&mut self) -> Option<SessionCoreEvent<T>> {
        self.events.pop_front()
    }

    /// Returns true if handoffs are possible.
    pub(crate) fn is_open(&self) -> bool {
        self.link == DaemonLinkState::Open
    }

    /// Handles a new socket to the daemon.
    pub(crate) fn handle_connected(&mut self) {
        self.link = DaemonLinkState::Opening;
        self.outbox.clear();
        self.outbox.push_single(ToDaemon::Open {
            name: self.name.clone(),
        });
    }

    /// Handles the loss of the socket to the daemon. Flows in transit wait.
    pub(crate) fn handle_disconnected(&mut self) {
        self.link = DaemonLinkState::Down;
        self.outbox.clear();
    }

    /// Registers a service for which the program has a socket.
    pub(crate) fn serve(&mut self, service: RegisteredService) -> u32 {
        self.last_service += 1;
        if self.link == DaemonLinkState::Open {
            self.outbox.push_single(service.message(self.last_service));
        }
        self.services.insert(self.last_service, service);
        self.last_service
    }

    /// Stops accepting flows for this service.
    pub(crate) fn withdraw(&mut self, service: u32) {
        if self.services.remove(&service).is_some() && self.link == DaemonLinkState::Open {
            self.outbox.push_single(ToDaemon::Withdraw { service });
        }
    }

    /// Registers a flow that the program accepted.
    pub(crate) fn register_flow(&mut self, service: u32, flow: FlowText, tag: T) {
        if self.link == DaemonLinkState::Open {
            self.outbox.push_accepted(service, [flow]);
        }
        let served = self.services.get(&service);
        let handoff_refusal = served.and_then(|served| served.handoff_refusal.clone());
        self.flows.insert(
            flow,
            RegisteredFlow {
                service,
                tag,
                handoff: None,
                handoff_refusal,
            },
        );
    }

    /// Handles the program closing this flow. A handoff in progress continues; if the flow then stays, it is closed.
    pub(crate) fn handle_closed(&mut self, flow: FlowText, tag: &T) {
        match self
            .flows
            .get_mut(&flow)
            .filter(|entry| entry.tag.is_same_flow(tag))
        {
            Some(RegisteredFlow {
                handoff: Some(leaving),
                ..
            }) => leaving.is_abandoned = true,
            Some(_) => {
                self.flows.remove(&flow);
                if self.link == DaemonLinkState::Open {
                    self.outbox.push_closed(flow);
                }
            }
            None => {}
        }
    }

    /// Declines a requested handoff of this flow.
    pub(crate) fn decline(&mut self, flow: FlowText, reason: &str) {
        if self.link == DaemonLinkState::Open {
            self.outbox.push_declined(flow, reason);
        }
    }

    /// Starts a handoff. Returns the reason if it fails at once; otherwise `Moved` or `Kept` follows.
    pub(crate) fn hand_off(
        &mut self,
        flow: FlowText,
        destination: &Destination,
        application_state: Vec<u8>,
        descriptor: Option<SharedDescriptor>,
    ) -> Result<(), String> {
        if self.link != DaemonLinkState::Open {
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
        if entry.handoff.is_some() {
            return Err("the flow is moving already".into());
        }
        let to = destination.to.clone();
        entry.handoff = Some(OutboundHandoff {
            to,
            descriptor: descriptor.clone(),
            is_abandoned: false,
        });
        let item = HandOffItem {
            flow,
            application_state,
            descriptor: descriptor.is_some(),
        };
        self.outbox.push_hand_off(destination, item, descriptor);
        Ok(())
    }

    /// Answers [`SessionCoreEvent::Collect`].
    pub(crate) fn send_collected<'a>(
        &mut self,
        flow: FlowText,
        unread: impl IntoIterator<Item = &'a [u8]>,
    ) {
        if self.link != DaemonLinkState::Open {
            return;
        }
        let mut runs = split_pieces(unread).into_iter().peekable();
        while let Some(unread) = runs.next() {
            self.outbox.push_single(ToDaemon::Collected {
                flow,
                unread,
                last: runs.peek().is_none(),
            });
        }
    }
}

impl RegisteredService {
    fn message(&self, service: u32) -> ToDaemon {
        let RegisteredService {
            pool,
            protocol,
            addresses,
            handoff_refusal: _,
        } = self;
        ToDaemon::Serve {
            service,
            pool: pool.clone(),
            protocol: *protocol,
            addresses: addresses.clone(),
        }
    }
}
