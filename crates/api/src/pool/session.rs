//! A session, as its user has it.

use std::io;
use std::path::Path;

use super::{FromPool, SessionEvent, ToPool, invalid, strange};
use crate::app::{Channel, decode, encode};

/// A session with an element of a pool, at one after another if need be. It ends when this is dropped.
///
/// One thread takes events ([`PoolSession::next`]), any may do the rest.
#[derive(Debug)]
pub struct PoolSession {
    channel: Channel,
}

impl PoolSession {
    /// Asks the daemon at `path` for a session with the pool `handle`; [`SessionEvent::Up`] follows, or [`SessionEvent::Failed`].
    ///
    /// # Errors
    /// No daemon is there, or the channel breaks.
    pub fn open(path: impl AsRef<Path>, handle: &str) -> io::Result<PoolSession> {
        let channel = Channel::connect(path)?;
        let session = PoolSession { channel };
        let handle = handle.to_owned();
        session.say(&ToPool::Open { handle })?;
        Ok(session)
    }

    /// Waits for the next event; none when the daemon has ended the channel.
    ///
    /// # Errors
    /// The channel breaks, or the daemon refuses what was said to it.
    pub fn next(&self) -> io::Result<Option<SessionEvent>> {
        let Some(packet) = self.channel.receive()? else {
            return Ok(None);
        };
        match decode(&packet.bytes).map_err(invalid)? {
            FromPool::Session(event) => Ok(Some(event)),
            FromPool::Error(text) => Err(io::Error::other(text)),
            other => Err(strange(&other)),
        }
    }

    /// Sends a message to the element. Without one it is dropped: what was sent since the last answer is to be sent again after
    /// [`SessionEvent::Up`].
    ///
    /// # Errors
    /// The channel is broken, or the message longer than [`DATA_BYTES_MAX`](super::DATA_BYTES_MAX).
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let bytes = bytes.to_vec();
        self.say(&ToPool::Data { session: 0, bytes })
    }

    /// Says that nothing more will be sent.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn finish(&self) -> io::Result<()> {
        self.say(&ToPool::Finish)
    }

    /// Says that the element does not do what it should: the session takes another.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn fail(&self) -> io::Result<()> {
        self.say(&ToPool::Fail)
    }

    fn say(&self, message: &ToPool) -> io::Result<()> {
        self.channel.send(&encode(message).map_err(invalid)?, &[])
    }
}
