//! The element's side of the session layer (RFC 5352 sections 3.8 and 3.9): the control channels to its users.
//!
//! A channel is the ASAP part of a link whose data goes straight between the daemon and the server program. Nothing
//! waits here, so there are no timers.
//!
//! How busy the element is ([`Sessions::report`]) is known from that data: a request is a user's message and all until the program's next
//! one to that user.

use super::cookie::{self, CookieError, CookieKey};
use crate::choice::Served;
use crate::hunt::{self, Link};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{Policy, PoolElement as Description, PoolHandle};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Something for the daemon to do: only `Send` and `Event`.
pub type SessionOutput = hunt::Output<SessionEvent>;

/// The settings of [`Sessions`].
#[derive(Debug, Clone)]
pub struct SessionsConfig {
    /// The element's pool.
    pub handle: PoolHandle,
    /// The pool's policy: rsplib insists on it in a business card.
    pub policy: Policy,
    /// What cookies are signed with (the first) and may be signed with (any); the same at all elements of the pool. Without
    /// keys, cookies go as they are and any is believed.
    pub keys: Vec<CookieKey>,
}

/// Something happened on a control channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionEvent {
    /// The user had a session with another element and goes on with this one.
    Resumed {
        /// The user's.
        link: Link,
        /// What the other element gave it last.
        state: Bytes,
    },
    /// The user brought a cookie that is not to be believed: its session starts anew, if at all.
    Disbelieved {
        /// The user's.
        link: Link,
        /// Why.
        error: CookieError,
    },
    /// A second cookie of a user, who may bring one, first of all.
    LateCookie {
        /// The user's.
        link: Link,
    },
    /// The user is an element too: of that pool, to be reached at these elements, in that order, should it fail.
    PeerCard {
        /// The user's.
        link: Link,
        /// Its pool.
        handle: PoolHandle,
        /// Whom to fail over to.
        elements: Vec<Description>,
    },
}

#[derive(Debug, Default)]
struct Channel {
    /// The user has brought its cookie, which is to be "the first message on the control channel".
    opened: bool,
    /// A request under way: how many others it met, and since when.
    request: Option<(u32, Duration)>,
}

/// The machine. See the module's text.
#[derive(Debug)]
pub struct Sessions {
    config: SessionsConfig,
    channels: BTreeMap<Link, Channel>,
    /// Whom users are to fail over to.
    order: Vec<Description>,
    served: Served,
    outputs: VecDeque<SessionOutput>,
}

impl Sessions {
    /// A machine without users.
    pub fn new(config: SessionsConfig) -> Sessions {
        Sessions {
            config,
            channels: BTreeMap::new(),
            order: Vec::new(),
            served: Served::default(),
            outputs: VecDeque::new(),
        }
    }

    /// A user has come, over a transport that has a control channel.
    pub fn handle_connected(&mut self, link: Link) {
        self.channels.insert(link, Channel::default());
        // "When communication begins between a PU and a PE [...] a PE should always send an ASAP_BUSINESS_CARD message".
        let card = self.card();
        self.send(link, card);
    }

    /// A user is gone.
    pub fn handle_lost(&mut self, link: Link) {
        let channel = self.channels.remove(&link);
        if channel.is_some_and(|channel| channel.request.is_some()) {
            self.served.lost();
        }
    }

    /// A user has sent the program something.
    pub fn handle_heard(&mut self, now: Duration, link: Link) {
        if let Some(channel) = self.channels.get_mut(&link)
            && channel.request.is_none()
        {
            channel.request = Some((self.served.begin(), now));
        }
    }

    /// The program has sent a user something.
    pub fn handle_said(&mut self, now: Duration, link: Link) {
        let channel = self.channels.get_mut(&link);
        if let Some((met, since)) = channel.and_then(|channel| channel.request.take()) {
            self.served.end(met, now.saturating_sub(since));
        }
    }

    /// The answer to a probe: requests in flight, and what those take that come when there are as many, if any has ended.
    #[must_use]
    pub fn report(&self) -> (u32, Option<Duration>) {
        self.served.report()
    }

    /// A message on a user's control channel.
    pub fn handle_message(&mut self, link: Link, message: Message) {
        let Some(channel) = self.channels.get_mut(&link) else {
            return;
        };
        let event = match message {
            Message::CookieEcho(_) if channel.opened => SessionEvent::LateCookie { link },
            Message::CookieEcho(cookie) => {
                channel.opened = true;
                match cookie::open(&self.config.keys, &self.config.handle, &cookie) {
                    Ok(state) => SessionEvent::Resumed { link, state },
                    Err(error) => SessionEvent::Disbelieved { link, error },
                }
            }
            Message::BusinessCard {
                handle, elements, ..
            } => SessionEvent::PeerCard {
                link,
                handle,
                elements,
            },
            _ => return,
        };
        self.outputs.push_back(hunt::Output::Event(event));
    }

    /// Gives a user the session's state to keep; the last one counts. Nothing is sent to a user who is gone.
    pub fn handle_state(&mut self, link: Link, state: &[u8]) {
        if self.channels.contains_key(&link) {
            let cookie = cookie::seal(&self.config.keys, &self.config.handle, state);
            self.send(link, Message::Cookie(cookie));
        }
    }

    /// Tells all users, and those to come, whom to fail over to; an empty list leaves it to the pool's policy.
    pub fn handle_failover_order(&mut self, order: Vec<Description>) {
        self.order = order;
        let links: Vec<Link> = self.channels.keys().copied().collect();
        for link in links {
            let card = self.card();
            self.send(link, card);
        }
    }

    /// The next thing to do, none when all is done.
    pub fn poll_output(&mut self) -> Option<SessionOutput> {
        self.outputs.pop_front()
    }

    fn card(&self) -> Message {
        Message::BusinessCard {
            handle: self.config.handle.clone(),
            policy: Some(self.config.policy),
            elements: self.order.clone(),
        }
    }

    fn send(&mut self, link: Link, message: Message) {
        self.outputs.push_back(hunt::Output::Send { link, message });
    }
}
