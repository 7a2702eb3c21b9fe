//! The library through which a program uses the local daemon, `holdfastd`.
//!
//! - [`Session`] and the services that [`Session::serve`] makes of sockets: a server accepts connections from its
//!   listener, hands a connection with its application state to another node, and receives connections handed to it.
//!   The asynchronous interface ([`Service`], [`TcpConnection`], [`UdpService`], over tokio) is in this module, the
//!   interface for threads in [`blocking`].
//! - [`control`]: the types of the HTTP/JSON control API, its OpenAPI description, and a client.
//! - [`pool`]: registration as an element of a Reliable Server Pooling pool, and sessions with pool elements.
//! - [`app`]: the protocol between server programs and the daemon, and its channel.
//! - [`ca`]: the group's certificate authority; [`enrolment`]: hosts that join the group get a certificate.
//!
//! Every request goes through the daemon on the same host; the library never decides a connection's owner.
//!
//! ```no_run
//! # use std::{io::{Read, Write}, net::TcpListener};
//! # use holdfast_api::{Arrival, Session, app, blocking::WaitResult};
//! let session = Session::connect(app::SOCKET_PATH).unwrap_or_else(|error| {
//!     eprintln!("{error}; serving without Holdfast");
//!     Session::detached()
//! });
//! let service = session.serve("counter", TcpListener::bind("10.80.255.1:7000")?)?;
//! loop {
//!     let (mut connection, mut lines) = match service.accept()? {
//!         Arrival::New(connection) => (connection, 0),
//!         Arrival::HandedOff { connection, state } => (connection, state[0]),
//!     };
//!     std::thread::spawn(move || -> std::io::Result<()> {
//!         loop {
//!             match connection.wait(None)? {
//!                 // A safe point: `lines` is all that another process needs to go on.
//!                 WaitResult::HandoffRequested(destination) => {
//!                     match connection.hand_off(destination, vec![lines]) {
//!                         Ok(_moved) => return Ok(()),
//!                         Err(kept) => connection = kept.connection,
//!                     }
//!                 }
//!                 _ => {
//!                     if connection.read(&mut [0; 80])? == 0 {
//!                         return Ok(());
//!                     }
//!                     lines += 1;
//!                     connection.write_all(&[lines])?;
//!                 }
//!             }
//!         }
//!     });
//! }
//! # #[allow(unreachable_code)] Ok::<(), std::io::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod app;
#[cfg(feature = "tokio")]
mod asynchronous;
pub mod blocking;
pub mod ca;
pub mod control;
pub mod enrolment;
mod flow;
pub mod pool;
mod program_handoff;
mod send_queue_drain;
mod session;

#[cfg(feature = "tokio")]
pub use asynchronous::{Service, TcpConnection, UdpService};
pub use flow::{FlowText, FlowTextError, Protocol};
pub use program_handoff::{Arrival, Destination, Kept, Moved};
pub use send_queue_drain::Drain;
pub use session::{Association, ConnectError, Session, Socket, UdpEvent};
