//! Thread of the load: one loop drives all connections, with two system calls per message and answer.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    HANG_TIMEOUT, LoadConnection, LongestWaits, MESSAGE_BYTES, RequestProtocol,
    VerifiedByteCounters, fill_message,
};

/// Events taken at a time.
const EVENTS_MAX: usize = 256;

/// Interval at which due messages are sent and answers are read.
const TICK_INTERVAL: Duration = Duration::from_millis(1);

/// Interval at which the loop checks for hung connections.
const HANG_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// State of one connection.
struct ConnectionState {
    stream: TcpStream,
    message_number: u64,
    /// The request, the expected answer, and the answer received.
    request: Vec<u8>,
    expected: Vec<u8>,
    answer: Vec<u8>,
    /// Bytes of the request that were sent, and of the answer that were received.
    sent: usize,
    received: usize,
    /// Start of the current message, while its answer is awaited.
    awaiting_since: Option<Instant>,
    /// Time of the next message.
    due: Instant,
}

/// Counters of a load that other threads read.
#[derive(Clone, Copy)]
pub(super) struct WatchedLoad<'a> {
    pub compared: &'a VerifiedByteCounters,
    pub waits: &'a LongestWaits,
    pub members: &'a [LoadConnection],
}

/// All connections of the load.
struct LoadLoop<'a> {
    epoll: Epoll,
    /// `None` once the connection has ended.
    connections: Vec<Option<ConnectionState>>,
    /// Connections that wait only for the time of their next message.
    due: BinaryHeap<Reverse<(Instant, usize)>>,
    interval: Duration,
    protocol: RequestProtocol,
    watched: WatchedLoad<'a>,
}

/// Runs the load until it is stopped and every message has its answer.
pub(super) fn run_load(
    streams: Vec<TcpStream>,
    interval: Duration,
    protocol: RequestProtocol,
    watched: WatchedLoad<'_>,
) -> Result<()> {
    let mut drive = LoadLoop::new(streams, interval, protocol, watched)?;
    let mut next_hang_check = Instant::now() + HANG_CHECK_INTERVAL;
    loop {
        let now = Instant::now();
        let stopped = watched.compared.is_stopped();
        if stopped && !drive.is_waiting() {
            return Ok(());
        }
        drive.send_due(now, stopped);
        // One wake-up per packet would cost more than the packet.
        std::thread::sleep(TICK_INTERVAL);
        drive.receive()?;
        if now >= next_hang_check {
            drive.drop_hung(now);
            next_hang_check = now + HANG_CHECK_INTERVAL;
        }
    }
}

impl<'a> LoadLoop<'a> {
    fn new(
        streams: Vec<TcpStream>,
        interval: Duration,
        protocol: RequestProtocol,
        watched: WatchedLoad<'a>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let (begin, count) = (Instant::now(), streams.len().max(1) as u32);
        let mut due = BinaryHeap::with_capacity(streams.len());
        let mut connections = Vec::with_capacity(streams.len());
        for (number, stream) in streams.into_iter().enumerate() {
            stream.set_nonblocking(true)?;
            epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, number as u64))?;
            let first = begin + interval * number as u32 / count;
            due.push(Reverse((first, number)));
            connections.push(Some(ConnectionState::new(stream, first)));
        }
        Ok(Self {
            epoll,
            connections,
            due,
            interval,
            protocol,
            watched,
        })
    }

    /// Returns true if an answer is awaited.
    fn is_waiting(&self) -> bool {
        let mut open = self.connections.iter().flatten();
        open.any(|connection| connection.awaiting_since.is_some())
    }

    /// Sends due messages; once the load is stopped, only the rest of a message already begun.
    fn send_due(&mut self, now: Instant, stopped: bool) {
        while let Some(Reverse((due, number))) = self.due.peek().copied() {
            if due > now {
                return;
            }
            self.due.pop();
            let Some(connection) = &mut self.connections[number] else {
                continue;
            };
            if stopped && connection.awaiting_since.is_none() {
                continue;
            }
            match connection.send(number as u64, now, self.interval, self.protocol) {
                Ok(true) => {}
                Ok(false) => self.due.push(Reverse((now + TICK_INTERVAL, number))),
                Err(_) => self.record_end(number),
            }
        }
    }

    /// Reads the answers that have arrived.
    fn receive(&mut self) -> io::Result<()> {
        loop {
            let mut events = [EpollEvent::empty(); EVENTS_MAX];
            let ready = match self.epoll.wait(&mut events, EpollTimeout::ZERO) {
                Err(Errno::EINTR) => continue,
                ready => ready?,
            };
            for event in &events[..ready] {
                self.receive_from(event.data() as usize);
            }
            if ready < EVENTS_MAX {
                return Ok(());
            }
        }
    }

    fn receive_from(&mut self, number: usize) {
        let Some(connection) = &mut self.connections[number] else {
            return;
        };
        match connection.receive() {
            Ok(Some(sent_at)) => {
                let (expected, answer) = (&connection.expected, &connection.answer);
                let wrong = self.protocol.count_wrong_bytes(expected, answer);
                self.watched.compared.count(expected.len(), wrong);
                let now = Instant::now();
                let wait = now.saturating_duration_since(sent_at);
                self.watched.waits.record(now, wait);
                self.watched.members[number]
                    .answers_received
                    .fetch_add(1, Ordering::Relaxed);
                self.due.push(Reverse((connection.due, number)));
            }
            Ok(None) => {}
            Err(_) => self.record_end(number),
        }
    }

    fn drop_hung(&mut self, now: Instant) {
        for number in 0..self.connections.len() {
            let connection = self.connections[number].as_ref();
            let since = connection.and_then(|connection| connection.awaiting_since);
            if since.is_some_and(|since| now.saturating_duration_since(since) >= HANG_TIMEOUT) {
                self.record_end(number);
            }
        }
    }

    /// Records that a connection ended before the load did.
    fn record_end(&mut self, number: usize) {
        self.connections[number] = None;
        let member = &self.watched.members[number];
        member.broken.store(true, Ordering::Relaxed);
        self.watched.compared.count_lost();
    }
}

impl ConnectionState {
    fn new(stream: TcpStream, due: Instant) -> Self {
        Self {
            stream,
            message_number: 0,
            request: Vec::new(),
            expected: vec![0; MESSAGE_BYTES],
            answer: vec![0; MESSAGE_BYTES],
            sent: 0,
            received: 0,
            awaiting_since: None,
            due,
        }
    }

    /// Begins the next message or continues the current one; returns false if some bytes are left. The following
    /// message is due one interval after this one was due, or after the send if the send was late.
    fn send(
        &mut self,
        number: u64,
        now: Instant,
        interval: Duration,
        dialect: RequestProtocol,
    ) -> io::Result<bool> {
        if self.awaiting_since.is_none() {
            let mut message = [0; MESSAGE_BYTES];
            fill_message(&mut message, number, self.message_number);
            self.request.clear();
            self.request
                .extend_from_slice(&(dialect.make_request)(number, &message));
            self.expected.clear();
            self.expected
                .extend_from_slice(&(dialect.expected_answer)(number, &message));
            self.answer.resize(self.expected.len(), 0);
            self.message_number += 1;
            (self.sent, self.received) = (0, 0);
            self.awaiting_since = Some(now);
            let next = self.due + interval;
            self.due = if next > now { next } else { now + interval };
        }
        match self.stream.write(&self.request[self.sent..]) {
            Ok(count) => self.sent += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        Ok(self.sent == self.request.len())
    }

    /// Reads available bytes; returns the time at which the message was sent if the answer is complete.
    fn receive(&mut self) -> io::Result<Option<Instant>> {
        match self.stream.read(&mut self.answer[self.received..]) {
            // Unexpected bytes would also end here: their buffer has length 0, so the read returns 0.
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.received += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        if self.received < self.expected.len() {
            return Ok(None);
        }
        Ok(self.awaiting_since.take())
    }
}
