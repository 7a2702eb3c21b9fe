//! The program's interface to its pool element.

use std::io;
use std::path::Path;

use super::{
    ElementEvent, FromPool, RegistrationRequest, ToPool, invalid_data, unexpected_message,
};
use crate::app::{Channel, decode, encode};
use crate::control::PolicyDetail;

/// An element of a pool. The element leaves the pool when this value is dropped, or when the process ends.
///
/// One thread takes events ([`Element::next_event`]); any thread may call the other functions.
#[derive(Debug)]
pub struct Element {
    channel: Channel,
}

impl Element {
    /// Requests that the daemon at `path` register the element, and keep it registered; [`ElementEvent::Registered`] or
    /// [`ElementEvent::Refused`] follows.
    ///
    /// # Errors
    /// No daemon listens, or the channel breaks.
    pub fn register(
        path: impl AsRef<Path>,
        registration: RegistrationRequest,
    ) -> io::Result<Element> {
        let channel = Channel::connect(path)?;
        let element = Element { channel };
        element.send_to_daemon(&ToPool::Register(registration))?;
        Ok(element)
    }

    /// Waits for the next event; none when the daemon has ended the channel.
    ///
    /// # Errors
    /// The channel breaks, or the daemon refuses a request.
    pub fn next_event(&self) -> io::Result<Option<ElementEvent>> {
        let Some(packet) = self.channel.receive()? else {
            return Ok(None);
        };
        match decode(&packet.bytes).map_err(invalid_data)? {
            FromPool::Element(event) => Ok(Some(event)),
            FromPool::Error(text) => Err(io::Error::other(text)),
            other => Err(unexpected_message(&other)),
        }
    }

    /// Updates the element's policy figures.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn set_policy(&self, policy: PolicyDetail) -> io::Result<()> {
        self.send_to_daemon(&ToPool::Policy(policy))
    }

    /// Sends a message to a user.
    ///
    /// # Errors
    /// The channel is broken, or the message longer than [`DATA_BYTES_MAX`](super::DATA_BYTES_MAX).
    pub fn send(&self, session: u64, bytes: &[u8]) -> io::Result<()> {
        let (receiver, bytes) = (session, bytes.to_vec());
        self.send_to_daemon(&ToPool::Data { receiver, bytes })
    }

    /// Gives a user the state of its session to store. Must be called before sending the answer that the state
    /// includes: then a user that has the answer has the state.
    ///
    /// # Errors
    /// The channel is broken, or the state longer than [`DATA_BYTES_MAX`](super::DATA_BYTES_MAX).
    pub fn store_state(&self, session: u64, state: &[u8]) -> io::Result<()> {
        let state = state.to_vec();
        self.send_to_daemon(&ToPool::StoreState { session, state })
    }

    /// Ends a user's session.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn close(&self, session: u64) -> io::Result<()> {
        self.send_to_daemon(&ToPool::Close { session })
    }

    /// Leaves the pool; [`ElementEvent::Deregistered`] follows.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn deregister(&self) -> io::Result<()> {
        self.send_to_daemon(&ToPool::Deregister)
    }

    fn send_to_daemon(&self, message: &ToPool) -> io::Result<()> {
        self.channel
            .send(&encode(message).map_err(invalid_data)?, &[])
    }
}
