//! Reliable Server Pooling for programs: registration as a pool element, and sessions with pool elements (RFC 5352).
//!
//! A program opens a channel to the pool daemon of its host (`rserpoold pool`): one for each element, one for
//! each session. The element or session lives as long as the channel: when the program ends, for any reason, the
//! element leaves its pool. The daemon finds registrars and handles their failures.
//!
//! An element with [`ElementService::Sessions`] as its [`ElementService`] uses the session layer: the daemon accepts its users'
//! associations (SCTP, control and data in one) and passes messages on. After each step the program gives the user the
//! state of the session to store ([`Element::store_state`]), before its answer. When the element dies, the user's daemon
//! continues at another element, which first receives that state ([`ElementEvent::Resumed`]).
//!
//! ```no_run
//! use holdfast_api::pool::{Element, ElementEvent, ElementService, RegistrationRequest};
//! # fn main() -> std::io::Result<()> {
//! let service = ElementService::Sessions { addresses: Vec::new(), port: 0 };
//! let element = Element::register(holdfast_api::pool::SOCKET_PATH, RegistrationRequest::new("counter", service))?;
//! let mut counts = std::collections::HashMap::new();
//! while let Some(event) = element.next_event()? {
//!     match event {
//!         ElementEvent::Resumed { session, state } => {
//!             counts.insert(session, u64::from_be_bytes(state.try_into().unwrap_or_default()));
//!         }
//!         ElementEvent::Data { session, .. } => {
//!             let count = counts.entry(session).or_insert(0);
//!             *count += 1;
//!             element.store_state(session, &count.to_be_bytes())?;
//!             element.send(session, format!("{count}\n").as_bytes())?;
//!         }
//!         _ => {}
//!     }
//! }
//! # Ok(()) }
//! ```

mod element;
mod message;
mod session;

pub use element::Element;
pub use message::{
    DATA_BYTES_MAX, DeregistrationResult, ElementEvent, ElementService, FromPool,
    RegistrationRequest, SelectionRule, SessionEvent, SessionOptions, ToPool,
};
pub use session::PoolSession;

/// Default path of the pool daemon's socket for programs.
pub const SOCKET_PATH: &str = "/run/holdfast/pool-app.sock";

/// Returns an error for a message that the daemon must not send to this kind of channel.
fn unexpected_message(message: &FromPool) -> std::io::Error {
    let text = format!("unexpected message from the daemon: {message:?}");
    std::io::Error::new(std::io::ErrorKind::InvalidData, text)
}

fn invalid_data(error: impl std::fmt::Display) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, error.to_string())
}
