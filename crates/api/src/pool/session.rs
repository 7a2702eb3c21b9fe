//! A session, as its user has it.

use std::io;
use std::path::Path;

use super::{FromPool, SessionEvent, SessionOptions, ToPool, invalid, strange};
use crate::app::{Channel, decode, encode};

/// A session with an element of a pool, at one after another if need be. It ends when this is dropped.
///
/// One thread takes events ([`PoolSession::next`]), any may do the rest. What is sent names the connection that it is for
/// ([`SessionEvent::Up`]); where that is over it is dropped, and [`SessionEvent::Broken`] is there or under way.
///
/// So what no element has answered is known to the program alone. One that waits for each answer loses nothing: after
/// [`SessionEvent::Up`] it sends what has no answer to the next element again, which has the state if it `resumed`. One with several messages
/// under way must tell which of them an answer is for, from what the answer says or since its elements answer each message
/// with one. In either case an element may have taken a message into the state just before its end, and gets it again: where
/// that must not count twice, messages carry a number.
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
        PoolSession::open_with(path, handle, SessionOptions::default())
    }

    /// The same, with a say in how the element is chosen.
    ///
    /// # Errors
    /// As of [`PoolSession::open`].
    pub fn open_with(
        path: impl AsRef<Path>,
        handle: &str,
        options: SessionOptions,
    ) -> io::Result<PoolSession> {
        let channel = Channel::connect(path)?;
        let session = PoolSession { channel };
        let handle = handle.to_owned();
        session.say(&ToPool::Open { handle, options })?;
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

    /// Sends a message to the element.
    ///
    /// # Errors
    /// The channel is broken, or the message longer than [`DATA_BYTES_MAX`](super::DATA_BYTES_MAX).
    pub fn send(&self, connection: u64, bytes: &[u8]) -> io::Result<()> {
        let (session, bytes) = (connection, bytes.to_vec());
        self.say(&ToPool::Data { session, bytes })
    }

    /// Says that nothing more will be sent on the connection; on the next it is to be said again.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn finish(&self, connection: u64) -> io::Result<()> {
        self.say(&ToPool::Finish { connection })
    }

    /// Says that the element does not do what it should: the session takes another.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn fail(&self, connection: u64) -> io::Result<()> {
        self.say(&ToPool::Fail { connection })
    }

    fn say(&self, message: &ToPool) -> io::Result<()> {
        self.channel.send(&encode(message).map_err(invalid)?, &[])
    }
}
