//! What programs and the pool daemon say to each other, over [`Channel`](crate::app::Channel) in [`encode`](crate::app::encode)'s
//! form.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::control::PolicyDetail;

/// The longest message or state of a session, bytes.
pub const DATA_BYTES_MAX: usize = 48 * 1024;

/// From a program. The first message says what the channel is for: `Register` or `Open`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToPool {
    /// An element of a pool.
    Register(Registration),
    /// How things stand with the element: figures of the policy that it registered with.
    Policy(PolicyDetail),
    /// The element leaves its pool; [`ElementEvent::Left`] follows.
    Deregister,
    /// A session with an element of the pool that has this handle, in the text form of the control API.
    Open {
        /// The handle.
        handle: String,
        /// How its element is chosen.
        options: SessionOptions,
    },
    /// A message of a session, [`DATA_BYTES_MAX`] at most.
    Data {
        /// The element's number for the session; from a user, the number of the connection. Where that is over, the message is
        /// dropped: it never goes to another element.
        session: u64,
        /// The message.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// From an element: the state that the user is to keep; the last one counts.
    Keep {
        /// The session.
        session: u64,
        /// The state, [`DATA_BYTES_MAX`] at most.
        #[serde(with = "serde_bytes")]
        state: Vec<u8>,
    },
    /// From a user: nothing more will be sent on this connection. Over TCP the element sees the end of the stream.
    Finish {
        /// The number of the connection.
        connection: u64,
    },
    /// From an element: the session ends.
    Close {
        /// The element's number for it.
        session: u64,
    },
    /// From a user: the element does not do what it should. The session takes another.
    Fail {
        /// The number of the connection with that element.
        connection: u64,
    },
}

/// From the pool daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromPool {
    /// To an element.
    Element(ElementEvent),
    /// To the user of a session.
    Session(SessionEvent),
    /// The program broke the rules; the channel is closed.
    Error(String),
}

/// What a program says to become an element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Registration {
    /// The pool's handle, in the text form of the control API.
    pub handle: String,
    /// The policy's name and figures. Distance is the registrar's to measure.
    pub policy: PolicyDetail,
    /// Where users reach it.
    pub service: Service,
    /// How long a registration holds, milliseconds; none: as the daemon has it.
    pub life_ms: Option<u64>,
    /// What the states that users keep are signed with (the first) and may be signed with (any): the same at all elements of the
    /// pool. Without any, whatever a user brings is believed.
    pub cookie_keys: Vec<[u8; 32]>,
}

/// Where users reach an element. An unspecified address stands for the one that registrars are reached from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// The program's own TCP listener.
    Tcp(SocketAddr),
    /// The program's own UDP socket.
    Udp(SocketAddr),
    /// The program's own SCTP endpoint, without a control channel. One port.
    Sctp(Vec<SocketAddr>),
    /// The daemon takes sessions for the program, over SCTP.
    Sessions {
        /// All addresses of one family; none: the one that registrars are reached from.
        addresses: Vec<IpAddr>,
        /// 0 lets the system choose.
        port: u16,
    },
}

/// What happens to an element.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ElementEvent {
    /// It is in its pool.
    Registered {
        /// Its number.
        id: String,
        /// Where users are sent.
        at: Vec<SocketAddr>,
        /// What the registrar warns of.
        warnings: Vec<String>,
    },
    /// The registrar refused; the channel is closed.
    Refused {
        /// Why.
        reason: String,
    },
    /// Its registration's life has ended; the daemon goes on trying.
    Expired,
    /// It has another home registrar.
    Home {
        /// Whose number, if it is known yet.
        registrar: Option<String>,
    },
    /// Its home registrar is lost; another is sought.
    HomeLost,
    /// No registrar was reached; the daemon goes on trying.
    NoRegistrar,
    /// It has left its pool; the channel is closed.
    Left(Departure),
    /// A user has come.
    Connected {
        /// The session's number.
        session: u64,
        /// From where.
        from: Vec<SocketAddr>,
    },
    /// The user had this session with another element, which gave it this state last. Comes before any message.
    Resumed {
        /// The session.
        session: u64,
        /// The state.
        #[serde(with = "serde_bytes")]
        state: Vec<u8>,
    },
    /// A message of the user.
    Data {
        /// The session.
        session: u64,
        /// The message.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// The user is gone.
    Closed {
        /// The session.
        session: u64,
    },
}

/// How an element left its pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// The registrar confirmed it.
    Confirmed,
    /// No registrar did in time: it may be listed until its registration's life ends.
    TimedOut,
    /// The registrar refused.
    Refused {
        /// Why.
        reason: String,
    },
}

/// What happens to a user's session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionEvent {
    /// It has an element.
    Up {
        /// The number of the connection with it, which what is sent to it names.
        connection: u64,
        /// The element's number.
        element: String,
        /// The transport of its service: `sctp`, `tcp` or `udp`.
        transport: String,
        /// Where it is.
        addresses: Vec<SocketAddr>,
        /// It was given the state of the session at the element before.
        resumed: bool,
    },
    /// It has no element any more; another is sought. What has no answer may be lost.
    Broken {
        /// The element's number.
        element: String,
        /// The element has ended the connection in order; else it is lost.
        in_order: bool,
    },
    /// A message of the element; over TCP a piece of the stream.
    Data {
        /// The message.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// Over TCP: the element has ended the connection in order after the user had finished ([`ToPool::Finish`]), whatever it has
    /// answered; the channel is closed.
    Finished,
    /// No element was found in time; the channel is closed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// How the element of a session is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionOptions {
    /// A registrar is asked first, whatever is known of the pool.
    pub anew: bool,
    /// Who chooses.
    pub choose: Choose,
}

/// Who chooses the element of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Choose {
    /// The registrar, by the pool's policy.
    #[default]
    Registrar,
    /// The user's daemon: of two elements drawn by chance the one that answers its users here sooner, a moving average of latencies
    /// times the requests under way (power of two choices).
    P2c,
    /// The user's daemon: by what it is told by a few elements' daemons that it asks beside each choice, requests in flight and latency
    /// (Prequal). Elements that do not answer get their share of the sessions, chosen as with [`Choose::P2c`].
    Prequal,
}

impl Registration {
    /// An element with round robin and the daemon's defaults.
    pub fn new(handle: &str, service: Service) -> Registration {
        Registration {
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
    fn the_longest_messages_fit() {
        let (session, bytes) = (u64::MAX, vec![7; DATA_BYTES_MAX]);
        let data = ToPool::Data { session, bytes };
        let encoded = encode(&data).expect("an encoding");
        assert!(encoded.len() <= MESSAGE_BYTES_MAX);
        assert_eq!(decode::<ToPool>(&encoded).expect("a message"), data);
    }

    #[test]
    fn a_registration_comes_through() {
        let service = Service::Sctp(vec!["10.0.0.1:7".parse().expect("an address")]);
        let mut registration = Registration::new("p", service);
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
