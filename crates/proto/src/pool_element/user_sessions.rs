//! The element's side of the session layer (RFC 5352 sections 3.8 and 3.9): the control channels to its users.
//!
//! A channel is the ASAP part of a link; its data passes directly between the daemon and the server program. No
//! operation waits here, so there are no timers.
//!
//! The data also shows how busy the element is ([`UserSessions::probe_report`]): a request lasts from a user's first message
//! until the program's next message to that user.

use super::cookie::{self, CookieError, CookieKey};
use crate::element_choice::ServerLoad;
use crate::server_hunt::{self, LinkId};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{Policy, PoolElement as Description, PoolHandle};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// An action for the daemon: only `Send` and `Event`.
pub type SessionOutput = server_hunt::Output<UserSessionEvent>;

/// The settings of [`UserSessions`].
#[derive(Debug, Clone)]
pub struct UserSessionsConfig {
    /// Handle of the element's pool.
    pub handle: PoolHandle,
    /// The pool's policy, which rsplib requires in a business card.
    pub policy: Policy,
    /// Keys of cookies: the first one signs, any one verifies. All elements of the pool need the same keys. Without
    /// keys, cookies are unsigned and any cookie is accepted.
    pub keys: Vec<CookieKey>,
}

/// An event on the control channel between an element and a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UserSessionEvent {
    /// A user with a session at another element continues it here.
    Resumed {
        /// The user's link.
        link: LinkId,
        /// Last state that the other element gave the user.
        state: Bytes,
    },
    /// The user presented an invalid cookie: its session starts anew, if at all.
    CookieRejected {
        /// The user's link.
        link: LinkId,
        /// Reason for the rejection.
        error: CookieError,
    },
    /// The user sent a second cookie. Only one is allowed, as the first message.
    UnexpectedCookie {
        /// The user's link.
        link: LinkId,
    },
    /// The user is an element too: of the pool `handle`, with the elements to fail over to, in that order.
    BusinessCard {
        /// The user's link.
        link: LinkId,
        /// The user's own pool.
        handle: PoolHandle,
        /// Elements to fail over to.
        elements: Vec<Description>,
    },
}

#[derive(Debug, Default)]
struct ControlChannel {
    /// True once the user has sent its cookie, which must be "the first message on the control channel".
    cookie_received: bool,
    /// The open request: the number of others in flight at its start, and its start time.
    request: Option<(u32, Duration)>,
}

/// Control channels of an element; see the module documentation.
#[derive(Debug)]
pub struct UserSessions {
    config: UserSessionsConfig,
    channels: BTreeMap<LinkId, ControlChannel>,
    /// Elements for users to fail over to.
    failover_order: Vec<Description>,
    load: ServerLoad,
    outputs: VecDeque<SessionOutput>,
}

impl UserSessions {
    /// Returns a machine without users.
    pub fn new(config: UserSessionsConfig) -> UserSessions {
        UserSessions {
            config,
            channels: BTreeMap::new(),
            failover_order: Vec::new(),
            load: ServerLoad::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Handles a new user, over a transport that has a control channel.
    pub fn handle_connected(&mut self, link: LinkId) {
        self.channels.insert(link, ControlChannel::default());
        // "When communication begins between a PU and a PE [...] a PE should always send an ASAP_BUSINESS_CARD
        // message".
        let card = self.business_card();
        self.send(link, card);
    }

    /// Handles the loss of the link to a user.
    pub fn handle_lost(&mut self, link: LinkId) {
        let channel = self.channels.remove(&link);
        if channel.is_some_and(|channel| channel.request.is_some()) {
            self.load.fail_request();
        }
    }

    /// Notes data from a user to the program.
    pub fn handle_received(&mut self, now: Duration, link: LinkId) {
        if let Some(channel) = self.channels.get_mut(&link)
            && channel.request.is_none()
        {
            channel.request = Some((self.load.begin_request(), now));
        }
    }

    /// Notes data from the program to a user.
    pub fn handle_sent(&mut self, now: Duration, link: LinkId) {
        let channel = self.channels.get_mut(&link);
        if let Some((others_in_flight, since)) = channel.and_then(|channel| channel.request.take())
        {
            self.load
                .end_request(others_in_flight, now.saturating_sub(since));
        }
    }

    /// Returns the answer to a probe: the requests in flight, and the estimated latency of a request that arrives
    /// at this load, if any request has ended.
    #[must_use]
    pub fn probe_report(&self) -> (u32, Option<Duration>) {
        self.load.probe_report()
    }

    /// Handles a message on a user's control channel.
    pub fn handle_message(&mut self, link: LinkId, message: Message) {
        let Some(channel) = self.channels.get_mut(&link) else {
            return;
        };
        let event = match message {
            Message::CookieEcho(_) if channel.cookie_received => {
                UserSessionEvent::UnexpectedCookie { link }
            }
            Message::CookieEcho(cookie) => {
                channel.cookie_received = true;
                match cookie::verify_cookie(&self.config.keys, &self.config.handle, &cookie) {
                    Ok(state) => UserSessionEvent::Resumed { link, state },
                    Err(error) => UserSessionEvent::CookieRejected { link, error },
                }
            }
            Message::BusinessCard {
                handle, elements, ..
            } => UserSessionEvent::BusinessCard {
                link,
                handle,
                elements,
            },
            _ => return,
        };
        self.outputs.push_back(server_hunt::Output::Event(event));
    }

    /// Gives a user the session's state to keep; the last one counts. A disconnected user gets nothing.
    pub fn handle_state(&mut self, link: LinkId, state: &[u8]) {
        if self.channels.contains_key(&link) {
            let cookie = cookie::sign_cookie(&self.config.keys, &self.config.handle, state);
            self.send(link, Message::Cookie(cookie));
        }
    }

    /// Sends all current and later users the failover order; an empty list leaves it to the pool's policy.
    pub fn handle_failover_order(&mut self, order: Vec<Description>) {
        self.failover_order = order;
        let links: Vec<LinkId> = self.channels.keys().copied().collect();
        for link in links {
            let card = self.business_card();
            self.send(link, card);
        }
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<SessionOutput> {
        self.outputs.pop_front()
    }

    fn business_card(&self) -> Message {
        Message::BusinessCard {
            handle: self.config.handle.clone(),
            policy: Some(self.config.policy),
            elements: self.failover_order.clone(),
        }
    }

    fn send(&mut self, link: LinkId, message: Message) {
        self.outputs
            .push_back(server_hunt::Output::Send { link, message });
    }
}
