//! State machine of one TCP connection, with or without TLS.

use super::message_splitter::MessageSplitter;
use super::security::{ReadOutcome, SecurityLayer};
use super::{ConnectionRules, StreamProtocol};
use crate::{AssocId, MessageToSend, TransportEvent};
use bytes::Bytes;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Instant;

/// Most bytes received from one connection per turn, so that others get their turn.
const READ_BYTES_PER_TURN: usize = 16 * 1024;
/// Number of bytes that an empty TLS record counts for.
const EMPTY_RECORD_BYTES: usize = 1024;
/// Most messages passed to the system in one call.
const WRITE_PIECES_MAX: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Handshaking,
    Up,
    /// All queued data is sent, then the connection ends.
    Finishing,
    /// The local side has finished sending; the other side has not.
    Finished,
}

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) enum ConnectionEndReason {
    /// Both sides finished sending.
    Orderly,
    /// The connection failed, or the other side broke the rules.
    Broken(String),
    /// The local side ended the connection.
    LocalClose,
}

impl From<io::Error> for ConnectionEndReason {
    fn from(error: io::Error) -> Self {
        ConnectionEndReason::Broken(error.to_string())
    }
}

pub(super) struct StreamConnection {
    pub(super) socket: TcpStream,
    pub(super) remote: SocketAddr,
    /// TCP or TLS, as asked for when this side opened the connection; `None` if the other side opened it.
    pub(super) outgoing: Option<StreamProtocol>,
    /// Name in the peer's certificate.
    pub(super) name: Option<String>,
    /// True if the poller watches for send buffer space.
    pub(super) awaits_send_space: bool,
    /// Deadline registered with the poller.
    pub(super) deadline: Option<Instant>,
    layer: SecurityLayer,
    phase: Phase,
    splitter: MessageSplitter,
    send_queue: VecDeque<Bytes>,
    /// Number of bytes of the first message in `send_queue` that were sent.
    first_sent: usize,
    queued_bytes: usize,
    started_at: Instant,
    /// Time since which a message has been incomplete.
    incomplete_since: Option<Instant>,
    /// Time since which the other side has accepted no data.
    send_blocked_since: Option<Instant>,
    finished_at: Option<Instant>,
}

impl StreamConnection {
    pub(super) fn new(
        socket: TcpStream,
        remote: SocketAddr,
        outgoing: Option<StreamProtocol>,
        layer: SecurityLayer,
        rules: &ConnectionRules,
        now: Instant,
    ) -> Self {
        let phase = match outgoing {
            Some(_) => Phase::Connecting,
            None => Phase::Handshaking,
        };
        Self {
            socket,
            remote,
            awaits_send_space: outgoing.is_some(),
            outgoing,
            name: None,
            deadline: None,
            layer,
            phase,
            splitter: MessageSplitter::new(rules.length_of, rules.message_len_max),
            send_queue: VecDeque::new(),
            first_sent: 0,
            queued_bytes: 0,
            started_at: now,
            incomplete_since: None,
            send_blocked_since: None,
            finished_at: None,
        }
    }

    /// Returns true if the connection was reported as up.
    pub(super) fn is_up(&self) -> bool {
        !matches!(self.phase, Phase::Connecting | Phase::Handshaking)
    }

    /// Returns the peer's certificates; `None` without TLS.
    pub(super) fn chain(&self) -> Option<&[rustls::pki_types::CertificateDer<'static>]> {
        self.layer.chain()
    }

    /// Receives available data, and sends queued data.
    pub(super) fn process(
        &mut self,
        id: AssocId,
        rules: &ConnectionRules,
        now: Instant,
        buffer: &mut [u8],
        events: &mut Vec<TransportEvent>,
    ) -> Result<(), ConnectionEndReason> {
        if self.phase == Phase::Connecting && !self.is_connected()? {
            return Ok(());
        }
        let mut received = 0;
        loop {
            self.report_up(id, rules, events)?;
            let may_read = received < READ_BYTES_PER_TURN;
            match self.layer.read(&mut self.socket, buffer, may_read)? {
                ReadOutcome::Pending => break,
                ReadOutcome::End => return Err(self.end_of_peer()),
                ReadOutcome::Bytes(length) => {
                    received += length.max(EMPTY_RECORD_BYTES);
                    self.receive(id, rules, now, &buffer[..length], events)?;
                }
            }
        }
        self.write_queued(now)
    }

    fn is_connected(&mut self) -> io::Result<bool> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        if self.socket.peer_addr().is_err() {
            return Ok(false);
        }
        self.phase = Phase::Handshaking;
        Ok(true)
    }

    /// Reports the connection as up once the handshake is complete and the certificate is valid.
    fn report_up(
        &mut self,
        id: AssocId,
        rules: &ConnectionRules,
        events: &mut Vec<TransportEvent>,
    ) -> Result<(), ConnectionEndReason> {
        if self.phase != Phase::Handshaking || !self.layer.is_established() {
            return Ok(());
        }
        self.name = self
            .admitted_peer_name(rules)
            .map_err(ConnectionEndReason::Broken)?;
        self.phase = Phase::Up;
        events.push(TransportEvent::Up {
            assoc: id,
            outbound_streams: 1,
            inbound_streams: 1,
        });
        Ok(())
    }

    /// Returns the name in the peer's certificate if it is admitted; `None` without TLS.
    pub(super) fn admitted_peer_name(
        &self,
        rules: &ConnectionRules,
    ) -> Result<Option<String>, String> {
        let Some(chain) = self.layer.chain() else {
            return Ok(None);
        };
        let security = rules
            .security
            .as_ref()
            .ok_or("TLS is no longer configured")?;
        let name = security.admitted_name(chain)?;
        match &self.outgoing {
            Some(StreamProtocol::Tls(Some(expected))) if *expected != name => Err(format!(
                "the certificate names {name} instead of {expected}"
            )),
            _ => Ok(Some(name)),
        }
    }

    fn end_of_peer(&self) -> ConnectionEndReason {
        match self.is_up() && !self.splitter.has_incomplete() {
            true => ConnectionEndReason::Orderly,
            false => ConnectionEndReason::Broken("the peer closed the connection".to_owned()),
        }
    }

    fn receive(
        &mut self,
        id: AssocId,
        rules: &ConnectionRules,
        now: Instant,
        bytes: &[u8],
        events: &mut Vec<TransportEvent>,
    ) -> Result<(), ConnectionEndReason> {
        self.report_up(id, rules, events)?;
        self.splitter.push(bytes);
        while let Some(data) = self.splitter.next_message()? {
            self.incomplete_since = None;
            events.push(TransportEvent::Message {
                assoc: id,
                message: MessageToSend::new(rules.ppid, data),
            });
        }
        if self.splitter.has_incomplete() {
            self.incomplete_since.get_or_insert(now);
        }
        Ok(())
    }

    /// Queues a message; returns false if the send buffer is full.
    pub(super) fn queue_message(&mut self, data: &Bytes, rules: &ConnectionRules) -> bool {
        let has_space = self.queued_bytes + data.len() <= rules.send_buffer;
        if has_space && !data.is_empty() {
            self.queued_bytes += data.len();
            self.send_queue.push_back(data.clone());
        }
        has_space
    }

    /// Ends the connection after the queued data was sent.
    pub(super) fn finish_sending(&mut self) {
        self.phase = Phase::Finishing;
    }

    /// Writes queued data until the socket's buffer is full.
    pub(super) fn write_queued(&mut self, now: Instant) -> Result<(), ConnectionEndReason> {
        if self.phase == Phase::Connecting {
            return Ok(());
        }
        loop {
            let mut pieces = [IoSlice::new(&[]); WRITE_PIECES_MAX];
            for (index, (piece, data)) in pieces.iter_mut().zip(&self.send_queue).enumerate() {
                let start = if index == 0 { self.first_sent } else { 0 };
                *piece = IoSlice::new(&data[start..]);
            }
            let (written, is_blocked) = self.layer.write(&mut self.socket, &pieces)?;
            self.remove_sent(written);
            if written > 0 {
                self.send_blocked_since = None;
            }
            let waits =
                is_blocked || !self.send_queue.is_empty() && self.phase != Phase::Handshaking;
            self.awaits_send_space = waits;
            if !waits {
                self.send_blocked_since = None;
                break;
            }
            if written == 0 {
                self.send_blocked_since.get_or_insert(now);
                return Ok(());
            }
        }
        if self.phase == Phase::Finishing {
            self.phase = Phase::Finished;
            self.finished_at = Some(now);
            self.layer.send_close_notify();
            self.layer.write(&mut self.socket, &[])?;
            self.socket.shutdown(Shutdown::Write)?;
        }
        Ok(())
    }

    fn remove_sent(&mut self, bytes: usize) {
        self.queued_bytes -= bytes;
        self.first_sent += bytes;
        while let Some(first) = self.send_queue.front()
            && self.first_sent >= first.len()
        {
            self.first_sent -= first.len();
            self.send_queue.pop_front();
        }
    }

    /// Returns the time at which the connection is ended unless it makes progress.
    pub(super) fn next_deadline(&self, rules: &ConnectionRules) -> Option<Instant> {
        if !self.is_up() {
            return Some(self.started_at + rules.handshake_timeout);
        }
        let since = [
            self.incomplete_since,
            self.send_blocked_since,
            self.finished_at,
        ];
        Some(since.into_iter().flatten().min()? + rules.message_timeout)
    }
}
