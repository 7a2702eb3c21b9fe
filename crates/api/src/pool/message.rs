//! The messages between programs and the pool daemon, over [`Channel`](crate::app::Channel) in the form of
//! [`encode`](crate::app::encode).

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::control::PolicyDetail;

/// Maximum length of a session's message or state, in bytes.
pub const DATA_BYTES_MAX: usize = 48 * 1024;

/// A message from a program. The first message gives the channel's purpose: `Register` or `Open`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToPool {
    /// Register an element of a pool.
    Register(RegistrationRequest),
    /// New policy figures of the element, for the policy that it registered with.
    Policy(PolicyDetail),
    /// The element leaves its pool; [`ElementEvent::Deregistered`] follows.
    Deregister,
    /// Open a session with an element of the pool that has this handle, in the text form of the control API.
    Open {
        /// Handle of the pool, in text form.
        handle: String,
        /// Options for choosing the element.
        options: SessionOptions,
    },
    /// A message of a session, [`DATA_BYTES_MAX`] at most.
    Data {
        /// From an element: its number for the session; from a user: the number of the connection. If the connection
        /// has ended, the message is dropped: it never goes to another element.
        receiver: u64,
        /// Content of the message.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// From an element: the state for the user to store; the last one counts.
    StoreState {
        /// The element's number for the session.
        session: u64,
        /// The state, [`DATA_BYTES_MAX`] at most.
        #[serde(with = "serde_bytes")]
        state: Vec<u8>,
    },
    /// From a user: no more messages follow on this connection. Over TCP the element sees the end of the stream.
    Finish {
        /// The number of the connection.
        connection: u64,
    },
    /// From an element: the session ends.
    Close {
        /// The element's number for the session.
        session: u64,
    },
    /// From a user: the element has failed. The session switches to another.
    ReportFailure {
        /// The number of the connection with that element.
        connection: u64,
    },
}

/// A message from the pool daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromPool {
    /// Event for the program of an element.
    Element(ElementEvent),
    /// Event for the user of a session.
    Session(SessionEvent),
    /// The program broke the rules; the channel is closed.
    Error(String),
}

/// A request to register an element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegistrationRequest {
    /// The pool's handle, in the text form of the control API.
    pub handle: String,
    /// Name and figures of the policy. The registrar measures the distance.
    pub policy: PolicyDetail,
    /// Address of the element for users.
    pub service: ElementService,
    /// Lifetime of a registration in milliseconds; none: the daemon's default.
    pub life_ms: Option<u64>,
    /// Keys of the pool, the same at all its elements: the first one signs the states that users store, and any may
    /// verify them. Without a key, any state from a user is trusted.
    pub cookie_keys: Vec<[u8; 32]>,
}

/// The service address of an element. An unspecified address stands for the one used towards registrars.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ElementService {
    /// The program's own TCP listener.
    Tcp(SocketAddr),
    /// The program's own UDP socket.
    Udp(SocketAddr),
    /// The program's own SCTP endpoint, without a control channel. One port.
    Sctp(Vec<SocketAddr>),
    /// The daemon accepts sessions for the program, over SCTP.
    Sessions {
        /// All addresses of one family; none: the address used towards registrars.
        addresses: Vec<IpAddr>,
        /// 0 lets the system choose.
        port: u16,
    },
}

/// An event of an element.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ElementEvent {
    /// The element is registered in its pool.
    Registered {
        /// The element's number.
        id: String,
        /// Addresses of the element that users get.
        addresses: Vec<SocketAddr>,
        /// Warnings of the registrar.
        warnings: Vec<String>,
    },
    /// The registrar refused the registration; the channel is closed.
    Refused {
        /// The registrar's reason for refusing the registration.
        reason: String,
    },
    /// The registration's lifetime has ended; the daemon continues to try.
    Expired,
    /// The element has another home registrar.
    Home {
        /// Number of the registrar, if known.
        registrar: Option<String>,
    },
    /// The home registrar is lost; the daemon looks for another.
    HomeLost,
    /// No registrar was reached; the daemon continues to try.
    NoRegistrar,
    /// The element has left its pool; the channel is closed.
    Deregistered(DeregistrationResult),
    /// A user opened a session.
    Connected {
        /// The session's number.
        session: u64,
        /// The user's addresses.
        from: Vec<SocketAddr>,
    },
    /// The user had this session with another element, and this is its last state from there. Precedes any message.
    Resumed {
        /// The element's number for the session.
        session: u64,
        /// Last state that the former element gave to the user.
        #[serde(with = "serde_bytes")]
        state: Vec<u8>,
    },
    /// A message from the user.
    Data {
        /// The element's number for the session.
        session: u64,
        /// Content of the user's message.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// The user closed the session.
    Closed {
        /// The element's number for the session.
        session: u64,
    },
}

/// Result of an element's deregistration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeregistrationResult {
    /// The registrar confirmed the deregistration.
    Confirmed,
    /// No registrar confirmed in time: the element may be listed until its registration's lifetime ends.
    TimedOut,
    /// The registrar refused the deregistration.
    Refused {
        /// The registrar's reason for refusing the deregistration.
        reason: String,
    },
}

/// An event of a user's session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionEvent {
    /// The session has an element.
    Up {
        /// Number of the connection with the element, for messages sent to it.
        connection: u64,
        /// The element's number.
        element: String,
        /// Transport protocol of the element's service: `sctp`, `tcp` or `udp`.
        transport: String,
        /// Addresses of the element.
        addresses: Vec<SocketAddr>,
        /// True if the element received the session's state from the previous element.
        resumed: bool,
    },
    /// The session has lost its element; another is being sought. Unanswered messages may be lost.
    ElementLost {
        /// The element's number.
        element: String,
        /// True if the element closed the connection in order; false if it was lost.
        closed_in_order: bool,
    },
    /// A message from the element; over TCP a part of the stream.
    Data {
        /// Content of the element's message, or a part of the TCP stream.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// Over TCP: the element closed the connection in order after the user had finished ([`ToPool::Finish`]), with or
    /// without an answer; the channel is closed.
    Finished,
    /// No element was found in time; the channel is closed.
    Failed {
        /// Reason why no element was found.
        reason: String,
    },
}

/// Options for choosing the element of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionOptions {
    /// Ask a registrar first, even if a cached answer about the pool is available.
    pub ask_registrar: bool,
    /// Rule for choosing the element.
    pub rule: SelectionRule,
}

/// The rule for choosing the element of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SelectionRule {
    /// The registrar, by the pool's policy.
    #[default]
    Registrar,
    /// The user's daemon chooses, of two elements drawn at random, the one that answers this host's users sooner: a
    /// moving average of latencies times the number of requests in progress (power of two choices).
    PowerOfTwoChoices,
    /// The user's daemon chooses by requests in progress and latency, as reported by the daemons of a few
    /// elements that it probes with each choice (Prequal). Elements that do not answer get their share of the sessions,
    /// chosen as with [`SelectionRule::PowerOfTwoChoices`].
    Prequal,
}

impl RegistrationRequest {
    /// Returns a registration with round robin and the daemon's defaults.
    pub fn new(handle: &str, service: ElementService) -> RegistrationRequest {
        RegistrationRequest {
            handle: handle.to_owned(),
            policy: PolicyDetail {
                name: "RR".to_owned(),
                ..PolicyDetail::default()
            },
            service,
            life_ms: None,
            cookie_keys: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::{MESSAGE_BYTES_MAX, decode, encode};

    #[test]
    fn longest_messages_fit_a_packet() {
        let (receiver, bytes) = (u64::MAX, vec![7; DATA_BYTES_MAX]);
        let data = ToPool::Data { receiver, bytes };
        let encoded = encode(&data).expect("an encoding");
        assert!(encoded.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(decode::<ToPool>(&encoded).expect("a message"), data);
    }

    #[test]
    fn registration_survives_encoding() {
        let service = ElementService::Sctp(vec!["10.0.0.1:7".parse().expect("an address")]);
        let mut registration = RegistrationRequest::new("p", service);
        registration.policy.load = Some(0.25);
        registration.cookie_keys = vec![[9; 32]];
        let message = ToPool::Register(registration);
        let encoded = encode(&message).expect("an encoding");
        assert_eq!(decode::<ToPool>(&encoded).expect("a message"), message);
        for cut in 0..encoded.len() {
            assert!(decode::<ToPool>(&encoded[..cut]).is_err(), "{cut}");
        }
    }
}
