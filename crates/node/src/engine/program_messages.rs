//! Messages to the server programs. Messages about many flows are collected and sent together.
//!
//! An unaccepted connection has no program. The thread that hands such a connection off waits for the result of the
//! handoff, and receives the result in place of a program's message.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::os::fd::OwnedFd;

use holdfast_api::app::FromDaemon;
use holdfast_api::{Drain, FlowText};
use holdfast_wire::Flow;
use tokio::sync::oneshot;

use super::{flow_from_text, flow_text};
use crate::app_server::{AppEvent, AppServer, SessionId};

/// Session id of connections that no program gives or takes.
pub const NO_SESSION: SessionId = SessionId(0);

/// Flows in one message to a program; at most 40 bytes each, so that the message fits.
const FLOWS_PER_MESSAGE: usize = 1024;

/// The channel to the server programs, with the messages that wait to be sent.
pub struct ProgramMessages {
    apps: AppServer,
    /// `Moved` messages that the current command has produced so far, by session and acceptor.
    moved: BTreeMap<(SessionId, String), Vec<FlowText>>,
    /// `HandoffRequested` messages that the current input has produced so far, by session, acceptor and drain.
    requests: HashMap<(SessionId, String, Drain), Vec<FlowText>>,
    /// Unaccepted connections that are being handed off, with the sender for their result.
    reply_senders: HashMap<Flow, oneshot::Sender<Result<(), String>>>,
}

impl ProgramMessages {
    /// Returns the channel without messages.
    pub fn new(apps: AppServer) -> Self {
        Self {
            apps,
            moved: BTreeMap::new(),
            requests: HashMap::new(),
            reply_senders: HashMap::new(),
        }
    }

    /// Returns the next event of a program. Dropping the future loses nothing.
    pub async fn recv(&self) -> AppEvent {
        self.apps.recv().await
    }

    /// Sends a message at once. For [`NO_SESSION`], the message ends the wait of the thread that handed the
    /// connections off.
    pub fn send(&mut self, session: SessionId, message: &FromDaemon, descriptors: Vec<OwnedFd>) {
        if session == NO_SESSION {
            return self.on_unaccepted_message(message);
        }
        if let Err(error) = self.apps.send(session, message, descriptors) {
            tracing::debug!(?session, %error, "cannot send a message to a server program");
        }
    }

    /// Notifies a program that flows stay with the program.
    pub fn send_kept(&mut self, session: SessionId, flows: &[Flow], reason: impl Display) {
        let flows = flows.iter().map(flow_text).collect();
        let message = FromDaemon::Kept {
            flows,
            reason: reason.to_string(),
        };
        self.send(session, &message, Vec::new());
    }

    /// Notifies a program at once that a flow has moved to a node; the name is empty if the flow was closed.
    pub fn send_moved(&mut self, session: SessionId, flow: &Flow, to: &str) {
        let message = FromDaemon::Moved {
            flows: vec![flow_text(flow)],
            to: to.to_owned(),
        };
        self.send(session, &message, Vec::new());
    }

    /// Adds a flow to the `Moved` message for its program.
    pub fn add_moved(&mut self, session: SessionId, flow: &Flow, to: &str) {
        self.moved
            .entry((session, to.to_owned()))
            .or_default()
            .push(flow_text(flow));
    }

    /// Adds a flow to the `HandoffRequested` message for its program.
    pub fn add_request(&mut self, session: SessionId, flow: &Flow, (to, drain): (&str, Drain)) {
        self.requests
            .entry((session, to.to_owned(), drain))
            .or_default()
            .push(flow_text(flow));
    }

    /// Sends the collected messages, in chunks that fit one message.
    pub fn send_collected(&mut self) {
        for ((session, to), flows) in std::mem::take(&mut self.moved) {
            for flows in flows.chunks(FLOWS_PER_MESSAGE) {
                let message = FromDaemon::Moved {
                    flows: flows.to_vec(),
                    to: to.clone(),
                };
                self.send(session, &message, Vec::new());
            }
        }
        for ((session, to, drain), flows) in std::mem::take(&mut self.requests) {
            for flows in flows.chunks(FLOWS_PER_MESSAGE) {
                let message = FromDaemon::HandoffRequested {
                    flows: flows.to_vec(),
                    to: to.clone(),
                    drain,
                };
                self.send(session, &message, Vec::new());
            }
        }
    }

    /// Registers the sender for the result of an unaccepted connection's handoff.
    pub fn expect_result(&mut self, flow: Flow, reply: oneshot::Sender<Result<(), String>>) {
        self.reply_senders.insert(flow, reply);
    }

    /// Handles the messages that a program would get for its flows.
    fn on_unaccepted_message(&mut self, message: &FromDaemon) {
        let (flows, result) = match message {
            FromDaemon::Moved { flows, .. } => (flows, Ok(())),
            FromDaemon::Kept { flows, reason } => (flows, Err(reason.clone())),
            _ => return,
        };
        for flow in flows.iter().filter_map(flow_from_text) {
            if let Some(reply) = self.reply_senders.remove(&flow) {
                // If the receiver has gone, it has closed its socket.
                let _ = reply.send(result.clone());
            }
        }
    }
}
