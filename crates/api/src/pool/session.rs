//! The user's interface to its session.

use std::io;
use std::path::Path;

use super::{FromPool, SessionEvent, SessionOptions, ToPool, invalid_data, unexpected_message};
use crate::app::{Channel, decode, encode};

/// A session with a pool, served by one element at a time. The session ends when this value is dropped.
///
/// One thread takes events ([`PoolSession::next_event`]); any thread may call the other functions. A message names its
/// connection ([`SessionEvent::Up`]); if that connection has ended, the message is dropped, and
/// [`SessionEvent::ElementLost`] is queued or will follow.
///
/// Only the program knows its unanswered messages. A program that waits for each answer loses nothing: after
/// [`SessionEvent::Up`] it sends the unanswered message to the next element again, which has the state if it `resumed`.
/// A program with several messages in progress must match answers to messages, by the content of the answers or because
/// its elements answer each message once. In either case an element may have included a message in the state just
/// before it failed, and the next element gets the message again: if repetition matters, number the messages.
#[derive(Debug)]
pub struct PoolSession {
    channel: Channel,
}

impl PoolSession {
    /// Requests a session with the pool `handle` from the daemon at `path`; [`SessionEvent::Up`] or
    /// [`SessionEvent::Failed`] follows.
    ///
    /// # Errors
    /// No daemon listens, or the channel breaks.
    pub fn open(path: impl AsRef<Path>, handle: &str) -> io::Result<PoolSession> {
        PoolSession::open_with(path, handle, SessionOptions::default())
    }

    /// Requests a session as [`PoolSession::open`] does, with options for choosing the element.
    ///
    /// # Errors
    /// Same as [`PoolSession::open`].
    pub fn open_with(
        path: impl AsRef<Path>,
        handle: &str,
        options: SessionOptions,
    ) -> io::Result<PoolSession> {
        let channel = Channel::connect(path)?;
        let session = PoolSession { channel };
        let handle = handle.to_owned();
        session.send_to_daemon(&ToPool::Open { handle, options })?;
        Ok(session)
    }

    /// Waits for the next event; none when the daemon has ended the channel.
    ///
    /// # Errors
    /// The channel breaks, or the daemon refuses a request.
    pub fn next_event(&self) -> io::Result<Option<SessionEvent>> {
        let Some(packet) = self.channel.receive()? else {
            return Ok(None);
        };
        match decode(&packet.bytes).map_err(invalid_data)? {
            FromPool::Session(event) => Ok(Some(event)),
            FromPool::Error(text) => Err(io::Error::other(text)),
            other => Err(unexpected_message(&other)),
        }
    }

    /// Sends a message of the program to the element that serves the session, over the connection with this number.
    ///
    /// # Errors
    /// The channel is broken, or the message longer than [`DATA_BYTES_MAX`](super::DATA_BYTES_MAX).
    pub fn send(&self, connection: u64, bytes: &[u8]) -> io::Result<()> {
        let (receiver, bytes) = (connection, bytes.to_vec());
        self.send_to_daemon(&ToPool::Data { receiver, bytes })
    }

    /// Ends sending on the connection; must be repeated on each new connection.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn finish_sending(&self, connection: u64) -> io::Result<()> {
        self.send_to_daemon(&ToPool::Finish { connection })
    }

    /// Reports that the element has failed: the session switches to another.
    ///
    /// # Errors
    /// The channel is broken.
    pub fn report_failure(&self, connection: u64) -> io::Result<()> {
        self.send_to_daemon(&ToPool::ReportFailure { connection })
    }

    fn send_to_daemon(&self, message: &ToPool) -> io::Result<()> {
        self.channel
            .send(&encode(message).map_err(invalid_data)?, &[])
    }
}
