//! State machine of one TCP connection, with or without TLS.

use super::frames::Frames;
use super::security::{Found, Layer};
use super::{Over, Rules};
use crate::transport::{AssocId, Event, Message};
use bytes::Bytes;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Instant;

/// Most bytes received from one connection per turn, so that others get their turn.
const TURN_BYTES: usize = 16 * 1024;
/// Number of bytes that an empty TLS record counts for.
const RECORD_BYTES: usize = 1024;
/// Most messages passed to the system in one call.
const PIECES: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Securing,
    Up,
    /// All queued data is sent, then the connection ends.
    Finishing,
    /// The local side has finished sending; the other side has not.
    Finished,
}

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) enum End {
    /// Both sides finished sending.
    Orderly,
    /// The connection failed, or the other side broke the rules.
    Broken(String),
    /// The local side ended the connection.
    Here,
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        End::Broken(error.to_string())
    }
}

pub(super) struct Connection {
    pub(super) socket: TcpStream,
    pub(super) remote: SocketAddr,
    /// Protocol of an outgoing connection; `None` for an incoming one.
    pub(super) made: Option<Over>,
    /// Name in the peer's certificate.
    pub(super) name: Option<String>,
    /// True if the poller watches for send buffer space.
    pub(super) awaits_room: bool,
    /// Deadline registered with the poller.
    pub(super) due: Option<Instant>,
    layer: Layer,
    phase: Phase,
    frames: Frames,
    out: VecDeque<Bytes>,
    /// Number of bytes of the first message in `out` that were sent.
    left: usize,
    queued: usize,
    begun: Instant,
    /// Time since which a message has been incomplete.
    part_since: Option<Instant>,
    /// Time since which the other side has accepted no data.
    stuck_since: Option<Instant>,
    finished_at: Option<Instant>,
}

impl Connection {
    pub(super) fn new(
        socket: TcpStream,
        remote: SocketAddr,
        made: Option<Over>,
        layer: Layer,
        rules: &Rules,
        now: Instant,
    ) -> Self {
        let phase = match made {
            Some(_) => Phase::Connecting,
            None => Phase::Securing,
        };
        Self {
            socket,
            remote,
            awaits_room: made.is_some(),
            made,
            name: None,
            due: None,
            layer,
            phase,
            frames: Frames::new(rules.length_of, rules.message_len_max),
            out: VecDeque::new(),
            left: 0,
            queued: 0,
            begun: now,
            part_since: None,
            stuck_since: None,
            finished_at: None,
        }
    }

    /// Returns true if the connection was reported as up.
    pub(super) fn is_up(&self) -> bool {
        !matches!(self.phase, Phase::Connecting | Phase::Securing)
    }

    /// Returns the peer's certificates; `None` without TLS.
    pub(super) fn chain(&self) -> Option<&[rustls::pki_types::CertificateDer<'static>]> {
        self.layer.chain()
    }

    /// Receives available data, and sends queued data.
    pub(super) fn turn(
        &mut self,
        id: AssocId,
        rules: &Rules,
        now: Instant,
        buffer: &mut [u8],
        events: &mut Vec<Event>,
    ) -> Result<(), End> {
        if self.phase == Phase::Connecting && !self.is_connected()? {
            return Ok(());
        }
        let mut came = 0;
        loop {
            self.come_up(id, rules, events)?;
            let may = came < TURN_BYTES;
            match self.layer.read(&mut self.socket, buffer, may)? {
                Found::Nothing => break,
                Found::End => return Err(self.other_end()),
                Found::Bytes(length) => {
                    came += length.max(RECORD_BYTES);
                    self.take_in(id, rules, now, &buffer[..length], events)?;
                }
            }
        }
        self.let_out(now)
    }

    fn is_connected(&mut self) -> io::Result<bool> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        if self.socket.peer_addr().is_err() {
            return Ok(false);
        }
        self.phase = Phase::Securing;
        Ok(true)
    }

    /// Reports the connection as up once the handshake is complete and the certificate is valid.
    fn come_up(&mut self, id: AssocId, rules: &Rules, events: &mut Vec<Event>) -> Result<(), End> {
        if self.phase != Phase::Securing || !self.layer.is_made() {
            return Ok(());
        }
        self.name = self.checked_name(rules).map_err(End::Broken)?;
        self.phase = Phase::Up;
        events.push(Event::Up {
            assoc: id,
            outbound_streams: 1,
            inbound_streams: 1,
        });
        Ok(())
    }

    /// Returns the name in the peer's certificate if it is admitted; `None` without TLS.
    pub(super) fn checked_name(&self, rules: &Rules) -> Result<Option<String>, String> {
        let Some(chain) = self.layer.chain() else {
            return Ok(None);
        };
        let security = rules.security.as_ref().ok_or("there is no TLS any more")?;
        let name = security.name(chain)?;
        match &self.made {
            Some(Over::Tls(Some(wanted))) if *wanted != name => {
                Err(format!("the certificate is {name}'s, not {wanted}'s"))
            }
            _ => Ok(Some(name)),
        }
    }

    fn other_end(&self) -> End {
        match self.is_up() && !self.frames.has_part() {
            true => End::Orderly,
            false => End::Broken("the other side hung up".to_owned()),
        }
    }

    fn take_in(
        &mut self,
        id: AssocId,
        rules: &Rules,
        now: Instant,
        bytes: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), End> {
        self.come_up(id, rules, events)?;
        self.frames.push(bytes);
        while let Some(data) = self.frames.next_message()? {
            self.part_since = None;
            events.push(Event::Message {
                assoc: id,
                message: Message::new(rules.ppid, data),
            });
        }
        if self.frames.has_part() {
            self.part_since.get_or_insert(now);
        }
        Ok(())
    }

    /// Queues a message; returns false if the send buffer is full.
    pub(super) fn queue(&mut self, data: &Bytes, rules: &Rules) -> bool {
        let has_room = self.queued + data.len() <= rules.send_buffer;
        if has_room && !data.is_empty() {
            self.queued += data.len();
            self.out.push_back(data.clone());
        }
        has_room
    }

    /// Ends the connection after the queued data was sent.
    pub(super) fn finish(&mut self) {
        self.phase = Phase::Finishing;
    }

    /// Writes queued data until the socket's buffer is full.
    pub(super) fn let_out(&mut self, now: Instant) -> Result<(), End> {
        if self.phase == Phase::Connecting {
            return Ok(());
        }
        loop {
            let mut pieces = [IoSlice::new(&[]); PIECES];
            for (index, (piece, data)) in pieces.iter_mut().zip(&self.out).enumerate() {
                let from = if index == 0 { self.left } else { 0 };
                *piece = IoSlice::new(&data[from..]);
            }
            let (wrote, is_stuck) = self.layer.write(&mut self.socket, &pieces)?;
            self.sent(wrote);
            if wrote > 0 {
                self.stuck_since = None;
            }
            let waits = is_stuck || !self.out.is_empty() && self.phase != Phase::Securing;
            self.awaits_room = waits;
            if !waits {
                self.stuck_since = None;
                break;
            }
            if wrote == 0 {
                self.stuck_since.get_or_insert(now);
                return Ok(());
            }
        }
        if self.phase == Phase::Finishing {
            self.phase = Phase::Finished;
            self.finished_at = Some(now);
            self.layer.finish();
            self.layer.write(&mut self.socket, &[])?;
            self.socket.shutdown(Shutdown::Write)?;
        }
        Ok(())
    }

    fn sent(&mut self, bytes: usize) {
        self.queued -= bytes;
        self.left += bytes;
        while let Some(first) = self.out.front()
            && self.left >= first.len()
        {
            self.left -= first.len();
            self.out.pop_front();
        }
    }

    /// Returns the time at which the connection is ended unless it makes progress.
    pub(super) fn over_at(&self, rules: &Rules) -> Option<Instant> {
        if !self.is_up() {
            return Some(self.begun + rules.handshake);
        }
        let since = [self.part_since, self.stuck_since, self.finished_at];
        Some(since.into_iter().flatten().min()? + rules.message)
    }
}
