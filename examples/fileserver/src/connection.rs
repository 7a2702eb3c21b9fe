//! Serves one connection step by step. Between two steps its whole state is a [`State`]: a safe point for a handoff. A
//! waiting step is interrupted when the operator requests a handoff.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use holdfast_api::TcpConnection;
use tokio::time::{Instant, sleep_until};

use crate::Site;
use crate::head::{self, Parsed};
use crate::response;
use crate::source::{Reader, Source};
use crate::state::{State, Work};
use crate::upload::{Failure, Receiver};

/// Maximum size of a generated or read piece, in bytes.
const PIECE_BYTES: usize = 256 * 1024;
/// Maximum size of one write with a rate limit, in bytes.
const PACED_BYTES: usize = 16 * 1024;

/// Result of a step.
enum Step {
    /// The step is complete.
    Done,
    /// The operator requested a handoff; no data was lost.
    HandoffRequested,
    /// The connection has ended.
    Ended,
}

/// Serves a connection until it ends or moves.
pub async fn serve(mut connection: TcpConnection, mut state: State, site: Arc<Site>) {
    let flow = connection.flow();
    loop {
        let mut worker = match Worker::new(&connection, state, &site) {
            Ok(worker) => worker,
            Err(error) => {
                return tracing::warn!(%flow, %error, "cannot open the file of a handed-off upload");
            }
        };
        let destination = loop {
            if let Some(destination) = connection.handoff_request() {
                break destination;
            }
            match worker.step().await {
                Ok(Step::Done | Step::HandoffRequested) => {}
                Ok(Step::Ended) => return worker.end(),
                Err(error) => {
                    tracing::debug!(%flow, %error, "the connection broke");
                    return worker.end();
                }
            }
        };
        state = worker.save();
        match connection.hand_off(destination, state.encode()).await {
            Ok(moved) => return tracing::debug!(%flow, to = %moved.to, "handed off"),
            Err(kept) => {
                tracing::debug!(%flow, reason = %kept.reason, "handoff failed");
                connection = kept.connection;
            }
        }
    }
}

/// A connection with its open files.
struct Worker<'a> {
    connection: &'a TcpConnection,
    site: &'a Site,
    state: State,
    piece: Option<Piece>,
    receiver: Option<Receiver>,
    /// With a rate limit: earliest time of the next write.
    next_write: Instant,
}

/// A part of the data being sent, in memory.
struct Piece {
    source: Source,
    reader: Reader,
    offset: u64,
    bytes: Vec<u8>,
}

impl<'a> Worker<'a> {
    fn new(connection: &'a TcpConnection, mut state: State, site: &'a Site) -> io::Result<Self> {
        let receiving = match std::mem::take(&mut state.work) {
            Work::Receiving(upload) => Some(upload.open(site.root.as_deref())?),
            other => {
                state.work = other;
                None
            }
        };
        Ok(Self {
            connection,
            site,
            state,
            piece: None,
            receiver: receiving,
            next_write: Instant::now(),
        })
    }

    fn save(self) -> State {
        match self.receiver {
            Some(receiver) => State {
                work: Work::Receiving(receiver.save()),
                ..self.state
            },
            None => self.state,
        }
    }

    fn end(self) {
        if let Some(receiver) = self.receiver {
            receiver.abandon(self.site.root.as_deref());
        }
    }

    async fn step(&mut self) -> io::Result<Step> {
        if !self.state.output.is_empty() {
            return self.write_output().await;
        }
        if self.receiver.is_some() {
            return self.receive().await;
        }
        match &self.state.work {
            Work::Sending { at, end, .. } if at < end => self.send().await,
            Work::Sending { .. } => {
                self.state.work = Work::Idle;
                self.piece = None;
                Ok(Step::Done)
            }
            _ if self.state.close => Ok(Step::Ended),
            _ => self.parse_request().await,
        }
    }

    async fn write_output(&mut self) -> io::Result<Step> {
        match write(self.connection, &self.state.output).await? {
            Some(length) => {
                self.state.output.drain(..length);
                Ok(Step::Done)
            }
            None => Ok(Step::HandoffRequested),
        }
    }

    /// Parses a request from the input, or reads more input.
    async fn parse_request(&mut self) -> io::Result<Step> {
        match head::parse(&self.state.input) {
            Parsed::Partial => self.read().await,
            Parsed::Invalid => {
                response::queue_last(
                    &mut self.state,
                    "400 Bad Request",
                    "not a valid HTTP/1.1 request, or not supported\n",
                );
                Ok(Step::Done)
            }
            Parsed::Head(head, length) => {
                self.state.input.drain(..length);
                let remote = self.connection.flow().remote();
                let unique = format!("{}-{}", remote.ip(), remote.port());
                response::start(&mut self.state, head, self.site, &unique).await;
                if let Work::Receiving(upload) = &self.state.work {
                    self.receiver = Some(upload.clone().open(self.site.root.as_deref())?);
                    self.state.work = Work::Idle;
                }
                Ok(Step::Done)
            }
        }
    }

    async fn read(&mut self) -> io::Result<Step> {
        let mut buffer = [0; 16 * 1024];
        match read(self.connection, &mut buffer).await? {
            None => Ok(Step::HandoffRequested),
            Some(0) => Ok(Step::Ended),
            Some(length) => {
                self.state.input.extend(&buffer[..length]);
                Ok(Step::Done)
            }
        }
    }

    async fn send(&mut self) -> io::Result<Step> {
        let Work::Sending { source, at, end } = &mut self.state.work else {
            return Ok(Step::Done);
        };
        let reusable = |piece: &Piece| {
            piece.source == *source
                && (piece.offset..piece.offset + piece.bytes.len() as u64).contains(at)
        };
        if !self.piece.as_ref().is_some_and(reusable) {
            let previous = self.piece.take();
            self.piece = Some(Piece::load(previous, source, self.site, *at, *end)?);
        }
        let Some(piece) = &self.piece else {
            return Ok(Step::Done);
        };
        let mut bytes = &piece.bytes[(*at - piece.offset) as usize..];
        if let Some(rate) = self.site.rate_bytes_per_s {
            bytes = &bytes[..bytes.len().min(PACED_BYTES)];
            tokio::select! {
                biased;
                _ = self.connection.wait_handoff_request() => return Ok(Step::HandoffRequested),
                () = sleep_until(self.next_write) => {}
            }
            // Time lost while the client was slow is not made up for.
            let pause = Duration::from_nanos(bytes.len() as u64 * 1_000_000_000 / rate.max(1));
            self.next_write = self
                .next_write
                .max(Instant::now() - Duration::from_millis(20))
                + pause;
        }
        match write(self.connection, bytes).await? {
            Some(length) => {
                *at += length as u64;
                Ok(Step::Done)
            }
            None => Ok(Step::HandoffRequested),
        }
    }

    async fn receive(&mut self) -> io::Result<Step> {
        let Some(receiver) = &mut self.receiver else {
            return Ok(Step::Done);
        };
        if !receiver.is_done() && self.state.input.is_empty() {
            let mut buffer = vec![0; receiver.next_read_bytes(PIECE_BYTES)];
            return match read(self.connection, &mut buffer).await? {
                None => Ok(Step::HandoffRequested),
                Some(0) => Ok(Step::Ended),
                Some(length) => {
                    self.state.input.extend(&buffer[..length]);
                    self.feed_upload()
                }
            };
        }
        self.feed_upload()
    }

    /// Passes the input to the upload. Afterwards the remaining input belongs to the next request.
    fn feed_upload(&mut self) -> io::Result<Step> {
        let Some(mut receiver) = self.receiver.take() else {
            return Ok(Step::Done);
        };
        let root = self.site.root.as_deref();
        let fed = match tokio::task::block_in_place(|| receiver.feed(&self.state.input)) {
            Ok(used) => {
                self.state.input.drain(..used);
                if !receiver.is_done() {
                    self.receiver = Some(receiver);
                    return Ok(Step::Done);
                }
                receiver.finish(root).map_err(Failure::Storage)
            }
            Err(failure) => {
                receiver.abandon(root);
                Err(failure)
            }
        };
        match fed {
            Ok((digest, length)) => {
                response::queue_short(&mut self.state, "200 OK", &format!("{digest}  {length}\n"))
            }
            Err(Failure::Malformed) => {
                response::queue_last(&mut self.state, "400 Bad Request", "malformed chunk\n")
            }
            Err(Failure::Storage(error)) => {
                response::queue_last(
                    &mut self.state,
                    "507 Insufficient Storage",
                    &format!("{error}\n"),
                );
            }
        }
        Ok(Step::Done)
    }
}

impl Piece {
    fn load(
        previous: Option<Piece>,
        source: &Source,
        site: &Site,
        at: u64,
        end: u64,
    ) -> io::Result<Self> {
        let (reader, mut bytes) = match previous {
            Some(piece) if piece.source == *source => (piece.reader, piece.bytes),
            _ => (source.open(site.root.as_deref())?, Vec::new()),
        };
        bytes.resize(
            usize::try_from(end - at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES)),
            0,
        );
        tokio::task::block_in_place(|| reader.read(at, &mut bytes))?;
        Ok(Self {
            source: source.clone(),
            reader,
            offset: at,
            bytes,
        })
    }
}

/// Writes some of `bytes`; `None` when the operator requested a handoff first.
async fn write(connection: &TcpConnection, bytes: &[u8]) -> io::Result<Option<usize>> {
    loop {
        match connection.stream().try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other.map(Some),
        }
        tokio::select! {
            biased;
            _ = connection.wait_handoff_request() => return Ok(None),
            ready = connection.stream().writable() => ready?,
        }
    }
}

/// Reads some bytes; `None` when the operator requested a handoff first.
async fn read(connection: &TcpConnection, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match connection.stream().try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other.map(Some),
        }
        tokio::select! {
            biased;
            _ = connection.wait_handoff_request() => return Ok(None),
            ready = connection.stream().readable() => ready?,
        }
    }
}
