//! Handlers of the daemon's messages.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{
    DaemonLinkState, DaemonViolation, FlowTag, InboundHandoff, RegisteredFlow, SessionCore,
    SessionCoreEvent,
};
use crate::app::{
    DatagramPiece, FromDaemon, IncomingItem, ReclaimItem, ReclaimedFlowState, ToDaemon, join_pieces,
};
use crate::session::SharedDescriptor;
use crate::{Destination, FlowText, Protocol};

/// Answer to a request for a flow that has ended.
const NO_SUCH_FLOW: &str = "the program no longer has this connection";
/// Reason for refusing a flow with a descriptor that the kernel could not give to this process.
const NO_DESCRIPTOR: &str =
    "the program has no descriptor left; raise its limit of open files (RLIMIT_NOFILE)";

impl<T: FlowTag> SessionCore<T> {
    /// Handles a message of the daemon. `descriptors_lost`: as in [`ChannelMessage`](crate::app::ChannelMessage).
    pub(crate) fn handle_message(
        &mut self,
        message: FromDaemon,
        descriptors: Vec<OwnedFd>,
        descriptors_lost: bool,
    ) -> Result<(), DaemonViolation> {
        let expected = match &message {
            FromDaemon::Incoming { items } => items.iter().filter(|item| item.descriptor).count(),
            _ => 0,
        };
        let is_lacking = descriptors_lost && descriptors.len() < expected;
        if descriptors.len() != expected && !is_lacking {
            return Err(DaemonViolation(format!(
                "{} descriptors instead of {expected}",
                descriptors.len()
            )));
        }
        match message {
            FromDaemon::Opened { node } => self.on_opened(node),
            _ if self.link != DaemonLinkState::Open => {
                return Err(DaemonViolation("a message before Opened".into()));
            }
            FromDaemon::HandoffRequested { flows, to, drain } => {
                self.on_handoff_requested(flows, &Destination { to, drain })
            }
            FromDaemon::Incoming { items } => self.on_incoming(items, descriptors),
            FromDaemon::State {
                id,
                application_state,
                unread,
                last,
            } => {
                return self.on_state(id, application_state, unread, last);
            }
            FromDaemon::States { items } => {
                return items.into_iter().try_for_each(|item| {
                    self.on_state(item.id, item.application_state, Vec::new(), true)
                });
            }
            FromDaemon::Activate { ids } => {
                return ids.into_iter().try_for_each(|id| self.on_activate(id));
            }
            FromDaemon::Cancel { ids, .. } => ids.into_iter().for_each(|id| self.on_cancel(id)),
            FromDaemon::Collect { flows } => self.on_collect(flows),
            FromDaemon::Moved { flows, to } => {
                flows.into_iter().for_each(|flow| self.on_moved(flow, &to))
            }
            FromDaemon::Kept { flows, reason } => flows
                .into_iter()
                .for_each(|flow| self.on_kept(flow, &reason)),
            FromDaemon::Error { text } => self.events.push_back(SessionCoreEvent::Problem { text }),
        }
        Ok(())
    }

    /// Sends everything that a daemon must know of this session, whether the session is new or not.
    fn on_opened(&mut self, node: String) {
        self.link = DaemonLinkState::Open;
        for (id, service) in &self.services {
            self.outbox.push_single(service.message(*id));
        }
        let mut owned_flows: BTreeMap<u32, Vec<FlowText>> = BTreeMap::new();
        let mut reclaim_items = Vec::new();
        for (flow, entry) in &self.flows {
            match &entry.handoff {
                None => owned_flows.entry(entry.service).or_default().push(*flow),
                Some(leaving) => {
                    let state = ReclaimedFlowState::Donated {
                        to: leaving.to.clone(),
                    };
                    reclaim_items.push((
                        reclaim_item(*flow, entry.service, state, &leaving.descriptor),
                        leaving.descriptor.clone(),
                    ));
                }
            }
        }
        for (id, incoming) in &self.incoming {
            let state = ReclaimedFlowState::Incoming {
                id: *id,
                received: incoming.unread.is_some(),
            };
            let descriptor = incoming.descriptor.clone().map(|fd| fd as SharedDescriptor);
            reclaim_items.push((
                reclaim_item(incoming.flow, incoming.service, state, &descriptor),
                descriptor,
            ));
        }
        owned_flows
            .into_iter()
            .for_each(|(service, flows)| self.outbox.push_accepted(service, flows));
        if !reclaim_items.is_empty() {
            self.outbox.push_reclaim(reclaim_items);
        }
        self.events.push_back(SessionCoreEvent::Opened { node });
    }

    fn on_handoff_requested(&mut self, flows: Vec<FlowText>, destination: &Destination) {
        for flow in flows {
            match self.flows.get(&flow) {
                Some(RegisteredFlow {
                    handoff_refusal: Some(reason),
                    ..
                }) => self.outbox.push_declined(flow, reason),
                Some(RegisteredFlow {
                    handoff: None,
                    tag,
                    service,
                    ..
                }) => self.events.push_back(SessionCoreEvent::HandoffRequested {
                    service: *service,
                    flow,
                    tag: tag.clone(),
                    destination: destination.clone(),
                }),
                Some(_) => {}
                None => self.outbox.push_declined(flow, NO_SUCH_FLOW),
            }
        }
    }

    fn on_incoming(&mut self, items: Vec<IncomingItem>, descriptors: Vec<OwnedFd>) {
        let mut descriptors = descriptors.into_iter();
        for IncomingItem {
            id,
            service,
            flow,
            descriptor,
        } in items
        {
            let is_socket_expected = descriptor;
            let descriptor = is_socket_expected
                .then(|| descriptors.next())
                .flatten()
                .map(Arc::new);
            let refusal = match self.services.get(&service) {
                _ if is_socket_expected && descriptor.is_none() => Some(NO_DESCRIPTOR),
                None => Some("the program no longer offers the service"),
                Some(served) if served.protocol != flow.protocol() => {
                    Some("the service has another protocol")
                }
                Some(_) if self.flows.contains_key(&flow) => {
                    Some("the program already has this connection")
                }
                Some(served) => served.handoff_refusal.as_deref(),
            };
            if let Some(reason) = refusal {
                self.outbox.push_single(ToDaemon::Refused {
                    ids: vec![id],
                    reason: reason.into(),
                });
                continue;
            }
            let incoming = InboundHandoff {
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

    fn on_state(
        &mut self,
        id: u64,
        state: Vec<u8>,
        pieces: Vec<DatagramPiece>,
        last: bool,
    ) -> Result<(), DaemonViolation> {
        // An unknown flow was refused, and the daemon had not processed the refusal.
        let Some(incoming) = self.incoming.get_mut(&id) else {
            return Ok(());
        };
        incoming.state.extend(state);
        incoming.pieces.extend(pieces);
        if !last {
            return Ok(());
        }
        let pieces = std::mem::take(&mut incoming.pieces);
        incoming.unread =
            Some(join_pieces(pieces).map_err(|error| DaemonViolation(error.to_string()))?);
        if incoming.flow.protocol() == Protocol::Udp {
            self.events.push_back(SessionCoreEvent::Arriving {
                service: incoming.service,
                flow: incoming.flow,
            });
        }
        self.outbox.push_received(id);
        Ok(())
    }

    fn on_activate(&mut self, id: u64) -> Result<(), DaemonViolation> {
        match self.incoming.remove(&id) {
            None => Ok(()),
            Some(InboundHandoff { unread: None, .. }) => {
                Err(DaemonViolation("Activate without State".into()))
            }
            Some(InboundHandoff {
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
                    RegisteredFlow {
                        service,
                        tag: tag.clone(),
                        handoff: None,
                        handoff_refusal: None,
                    },
                );
                self.events.push_back(SessionCoreEvent::Arrived {
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

    fn on_cancel(&mut self, id: u64) {
        if let Some(InboundHandoff { service, flow, .. }) = self.incoming.remove(&id) {
            self.events
                .push_back(SessionCoreEvent::Cancelled { service, flow });
        }
    }

    fn on_collect(&mut self, flows: Vec<FlowText>) {
        for flow in flows {
            match self.flows.get(&flow) {
                Some(RegisteredFlow {
                    handoff: Some(_),
                    service,
                    ..
                }) => {
                    self.events.push_back(SessionCoreEvent::Collect {
                        service: *service,
                        flow,
                    });
                }
                _ => self.send_collected(flow, []),
            }
        }
    }

    fn on_moved(&mut self, flow: FlowText, to: &str) {
        if self
            .flows
            .get(&flow)
            .is_some_and(|entry| entry.handoff.is_some())
        {
            let Some(RegisteredFlow { service, tag, .. }) = self.flows.remove(&flow) else {
                return;
            };
            self.events.push_back(SessionCoreEvent::Moved {
                service,
                flow,
                tag,
                to: to.to_owned(),
            });
        }
    }

    fn on_kept(&mut self, flow: FlowText, reason: &str) {
        let Some(entry) = self.flows.get_mut(&flow) else {
            return;
        };
        let Some(leaving) = entry.handoff.take() else {
            return;
        };
        let (service, tag) = (entry.service, entry.tag.clone());
        if leaving.is_abandoned {
            self.handle_closed(flow, &tag);
        }
        self.events.push_back(SessionCoreEvent::Kept {
            service,
            flow,
            tag,
            reason: reason.to_owned(),
        });
    }
}

fn reclaim_item(
    flow: FlowText,
    service: u32,
    state: ReclaimedFlowState,
    descriptor: &Option<SharedDescriptor>,
) -> ReclaimItem {
    ReclaimItem {
        flow,
        service,
        state,
        descriptor: descriptor.is_some(),
    }
}
