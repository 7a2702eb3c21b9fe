//! Offers of arriving connections to the programs that take them: descriptors and application state.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use holdfast_api::app::{DESCRIPTORS_MAX, FromDaemon, IncomingItem, StateItem, split};
use holdfast_wire::Flow;
use holdfast_wire::failure::Failure;

use super::super::flow_text;
use super::super::program_messages::ProgramMessages;
use super::{ArrivalSocket, ArrivingConnections};
use crate::app_server::SessionId;
use crate::failure_conversion::system_call;

impl ArrivingConnections {
    /// Sends descriptors and application state to the programs that take the flows. Returns the flows whose descriptors
    /// could not be copied, with the error.
    pub fn offer_to_programs(
        &self,
        messages: &mut ProgramMessages,
        states: Vec<(Flow, Vec<u8>)>,
    ) -> BTreeMap<Flow, Failure> {
        let mut failed = BTreeMap::new();
        let mut by_session: BTreeMap<SessionId, (Vec<Flow>, Vec<StateItem>)> = BTreeMap::new();
        for (flow, application_state) in states {
            let Some(arrival) = self.connections.get(&flow) else {
                continue;
            };
            let (flows, items) = by_session.entry(arrival.session).or_default();
            flows.push(flow);
            items.push(StateItem {
                id: arrival.id,
                application_state,
            });
        }
        for (session, (flows, items)) in by_session {
            for flows in flows.chunks(DESCRIPTORS_MAX) {
                failed.extend(self.offer_to_program(messages, session, flows));
            }
            let mut items = items;
            let is_offered = |item: &StateItem| {
                let arrival = self.ids.get(&item.id);
                arrival.is_none_or(|(flow, _)| !failed.contains_key(flow))
            };
            items.retain(is_offered);
            for items in split(items, usize::MAX) {
                messages.send(session, &states_message(items), Vec::new());
            }
        }
        failed
    }

    fn offer_to_program(
        &self,
        messages: &mut ProgramMessages,
        session: SessionId,
        flows: &[Flow],
    ) -> Vec<(Flow, Failure)> {
        let mut failed = Vec::new();
        let mut descriptors: Vec<OwnedFd> = Vec::with_capacity(flows.len());
        let mut items = Vec::with_capacity(flows.len());
        for flow in flows {
            let Some(arrival) = self.connections.get(flow) else {
                continue;
            };
            let service = self.ids.get(&arrival.id).map_or(0, |(_, service)| *service);
            let duplicate = match &arrival.socket {
                ArrivalSocket::Prepared(socket) => match socket.as_fd().try_clone_to_owned() {
                    Ok(duplicate) => Some(duplicate),
                    Err(error) => {
                        failed.push((
                            *flow,
                            system_call("cannot copy the socket's descriptor", &error),
                        ));
                        continue;
                    }
                },
                _ => None,
            };
            items.push(IncomingItem {
                id: arrival.id,
                service,
                flow: flow_text(flow),
                descriptor: duplicate.is_some(),
            });
            descriptors.extend(duplicate);
        }
        if !items.is_empty() {
            messages.send(session, &FromDaemon::Incoming { items }, descriptors);
        }
        failed
    }
}

/// Returns a `State` message for a single item, else a `States` message.
fn states_message(mut items: Vec<StateItem>) -> FromDaemon {
    match items.pop() {
        Some(StateItem {
            id,
            application_state,
        }) if items.is_empty() => FromDaemon::State {
            id,
            application_state,
            unread: Vec::new(),
            last: true,
        },
        single => {
            items.extend(single);
            FromDaemon::States { items }
        }
    }
}
