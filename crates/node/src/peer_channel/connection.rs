//! One connection: a socket, TLS over it, and frames inside.
//!
//! Only `readable`, `drained`, `next_frame`, `linger` and `wait_closed` wait. Sending and reading are plain calls, so that
//! a frame travels from `send` to the socket, and from the socket to a decoded frame, within one task.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::io::{self, BufRead, IoSlice, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::{Buf, Bytes};
use holdfast_api::enrolment::certified_role;
use holdfast_wire::membership_frames::JoinRole;
use holdfast_wire::{Frame, FrameDecoder, FrameError, encode_in_parts};
use rustls::Connection;
use rustls::pki_types::CertificateDer;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::stats::PathRate;
use super::{PeerConnectionError, receive_buffer};
use crate::credentials::join_role;

/// Bytes read from the socket at a time. A larger buffer would only displace other data from the cache.
const READ_BYTES: usize = 128 * 1024;

/// Plain bytes encrypted at a time. Data that the socket does not accept yet stays plain, where it is counted.
const CHUNK_BYTES: usize = 128 * 1024;

/// Maximum time and number of bytes for which a refused connection is still read.
const LINGER_MAX: Duration = Duration::from_secs(1);
const LINGER_BYTES_MAX: usize = 256 * 1024;

thread_local! {
    /// Shared by all connections of the thread, because each uses it only within a call.
    static READ_BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES]);
}

pub(super) struct PeerConnection {
    socket: TcpStream,
    tls: RefCell<Connection>,
    dialled_address: Option<SocketAddr>,
    backlog: RefCell<PlaintextQueue>,
    decoder: RefCell<FrameDecoder>,
    /// True if the socket was full and the rest is still to be written.
    is_stalled: Cell<bool>,
    stall_begins: Notify,
    ended_by_peer: Cell<bool>,
    closing: RefCell<Option<PeerConnectionError>>,
    close_begins: Notify,
    /// The role that the other side's certificate names, read when a frame depends on it.
    certified_role: OnceCell<Option<JoinRole>>,
    pub(super) sent_bytes: Cell<u64>,
    pub(super) received_bytes: Cell<u64>,
    pub(super) rate: PathRate,
}

/// Encoded frames that TLS has not taken yet, in parts.
#[derive(Default)]
struct PlaintextQueue {
    parts: VecDeque<Bytes>,
    bytes: usize,
}

/// An encoded frame, in parts.
pub(super) struct EncodedFrame {
    head: Vec<u8>,
    tail: Bytes,
}

impl EncodedFrame {
    /// Encodes a frame, if it can be sent at all.
    pub(super) fn new(frame: &Frame) -> Result<EncodedFrame, FrameError> {
        let (front, rest) = encode_in_parts(frame)?;
        Ok(EncodedFrame {
            head: front,
            tail: rest,
        })
    }

    /// Returns the number of bytes.
    pub(super) fn len(&self) -> usize {
        self.head.len() + self.tail.len()
    }
}

impl PeerConnection {
    /// Returns a connection that this node has dialled at an address.
    pub(super) fn dialled(
        socket: TcpStream,
        tls: Connection,
        address: SocketAddr,
    ) -> PeerConnection {
        let mut connection = PeerConnection::new(socket, tls);
        connection.dialled_address = Some(address);
        connection
    }

    /// Returns a connection that this node has accepted.
    pub(super) fn new(socket: TcpStream, mut tls: Connection) -> PeerConnection {
        // The backlog bounds the waiting data; TLS must take every chunk whole.
        tls.set_buffer_limit(None);
        PeerConnection {
            socket,
            tls: RefCell::new(tls),
            dialled_address: None,
            backlog: RefCell::default(),
            decoder: RefCell::default(),
            is_stalled: Cell::new(false),
            stall_begins: Notify::new(),
            ended_by_peer: Cell::new(false),
            closing: RefCell::default(),
            close_begins: Notify::new(),
            certified_role: OnceCell::new(),
            sent_bytes: Cell::new(0),
            received_bytes: Cell::new(0),
            rate: PathRate::default(),
        }
    }

    /// Encodes, encrypts and writes as much as the socket accepts; the connection's task writes the rest.
    pub(super) fn send(&self, frame: &Frame) -> Result<(), PeerConnectionError> {
        self.send_encoded(EncodedFrame::new(frame)?)
    }

    pub(super) fn send_encoded(&self, frame: EncodedFrame) -> Result<(), PeerConnectionError> {
        self.backlog.borrow_mut().push(frame);
        match self.is_stalled.get() {
            true => Ok(()),
            false => self.flush(),
        }
    }

    /// Returns the bytes of frames that TLS has not taken yet.
    pub(super) fn queued_bytes(&self) -> usize {
        self.backlog.borrow().bytes
    }

    /// Writes until nothing is left or the socket is full.
    pub(super) fn flush(&self) -> Result<(), PeerConnectionError> {
        let mut tls = self.tls.borrow_mut();
        let mut backlog = self.backlog.borrow_mut();
        loop {
            while tls.wants_write() {
                match tls.write_tls(&mut NonBlockingWriter(&self.socket)) {
                    Ok(bytes) => self.sent_bytes.set(self.sent_bytes.get() + bytes as u64),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.rate.on_stall(self.sent_bytes.get());
                        self.is_stalled.set(true);
                        self.stall_begins.notify_one();
                        return Ok(());
                    }
                    Err(error) => return Err(PeerConnectionError::Io(error)),
                }
            }
            // Frames wait for the end of the handshake, because TLS would keep them in a buffer that is not counted.
            if tls.is_handshaking() || !backlog.move_into(&mut tls)? {
                self.is_stalled.set(false);
                self.rate.on_drained(self.sent_bytes.get());
                return Ok(());
            }
        }
    }

    /// Waits until the full socket is writable again, and continues to write.
    pub(super) async fn drain(&self) -> Result<(), PeerConnectionError> {
        if !self.is_stalled.get() {
            self.stall_begins.notified().await;
        }
        self.socket
            .writable()
            .await
            .map_err(PeerConnectionError::Io)?;
        self.flush()
    }

    /// Waits until there is data to read.
    pub(super) async fn wait_readable(&self) -> Result<(), PeerConnectionError> {
        self.socket
            .readable()
            .await
            .map_err(PeerConnectionError::Io)
    }

    /// Reads from the socket (up to a limit) and decrypts the data. [`PeerConnection::pop_frame`] then returns the frames.
    pub(super) fn read(&self) -> Result<(), PeerConnectionError> {
        READ_BUFFER.with_borrow_mut(|buffer| match self.socket.try_read(buffer) {
            Ok(0) => {
                self.ended_by_peer.set(true);
                Ok(())
            }
            Ok(length) => {
                let received = self.received_bytes.get() + length as u64;
                self.received_bytes.set(received);
                self.decrypt(&buffer[..length])
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(PeerConnectionError::Io(error)),
        })
    }

    fn decrypt(&self, mut bytes: &[u8]) -> Result<(), PeerConnectionError> {
        let mut tls = self.tls.borrow_mut();
        let mut decoder = self.decoder.borrow_mut();
        while !bytes.is_empty() {
            tls.read_tls(&mut bytes).map_err(PeerConnectionError::Io)?;
            if let Err(error) = tls.process_new_packets() {
                // Best effort: the alert informs the other side of the reason.
                let _ = tls.write_tls(&mut NonBlockingWriter(&self.socket));
                return Err(error.into());
            }
            let mut reader = tls.reader();
            loop {
                let length = match reader.fill_buf() {
                    Ok([]) => {
                        self.ended_by_peer.set(true);
                        return Ok(());
                    }
                    Ok(plain) => {
                        decoder.feed(plain);
                        plain.len()
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(PeerConnectionError::Io(error)),
                };
                reader.consume(length);
            }
        }
        drop((tls, decoder));
        // The handshake and a key update produce answers.
        match self.is_stalled.get() {
            true => Ok(()),
            false => self.flush(),
        }
    }

    /// Returns the next complete frame. If there is none and the other side has closed, returns an error.
    pub(super) fn pop_frame(&self) -> Result<Option<Frame>, PeerConnectionError> {
        let mut decoder = self.decoder.borrow_mut();
        match decoder.next_frame()? {
            None if self.ended_by_peer.get() => {
                decoder.check_complete()?;
                Err(PeerConnectionError::Closed)
            }
            frame => Ok(frame),
        }
    }

    /// Waits for the next frame; also drives the handshake.
    pub(super) async fn next_frame(&self) -> Result<Frame, PeerConnectionError> {
        self.flush()?;
        loop {
            if let Some(frame) = self.pop_frame()? {
                return Ok(frame);
            }
            tokio::select! {
                ready = self.wait_readable() => { ready?; self.read()?; }
                done = self.drain() => done?,
                reason = self.wait_closed() => return Err(reason),
            }
        }
    }

    /// Gives the other side time to read the reason for a refusal: closing a socket with unread bytes resets the
    /// connection, and the reset may overtake the alert.
    pub(super) async fn linger(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
        let drained = async {
            let mut buffer = [0; 4096];
            let mut bytes_left = LINGER_BYTES_MAX;
            while bytes_left > 0 && self.socket.readable().await.is_ok() {
                match self.socket.try_read(&mut buffer) {
                    Ok(0) => return,
                    Ok(length) => bytes_left = bytes_left.saturating_sub(length),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        };
        let _ = tokio::time::timeout(LINGER_MAX, drained).await;
    }

    /// Gives the receive buffer a size for the round trip that the kernel has measured during the greeting.
    pub(super) fn fix_receive_buffer_size(&self) -> io::Result<()> {
        receive_buffer::fix_size(&self.socket)
    }

    /// Returns the address that this node has dialled; none for an accepted connection.
    pub(super) fn dialled_address(&self) -> Option<SocketAddr> {
        self.dialled_address
    }

    /// Returns the address of the other side, if the socket is connected.
    pub(super) fn remote_ip(&self) -> Option<IpAddr> {
        let address = self.socket.peer_addr().ok()?;
        Some(address.ip().to_canonical())
    }

    /// Returns the certificates of the other side, its own first.
    pub(super) fn certificates(&self) -> Vec<CertificateDer<'static>> {
        let tls = self.tls.borrow();
        tls.peer_certificates()
            .map(<[_]>::to_vec)
            .unwrap_or_default()
    }

    /// Returns the role that the certificate of the other side names, once the handshake is complete.
    pub(super) fn certified_role(&self) -> Option<JoinRole> {
        let read = || {
            let role = certified_role(self.certificates().first()?)?;
            Some(join_role(role))
        };
        *self.certified_role.get_or_init(read)
    }

    /// Ends the connection; its task returns `reason`.
    pub(super) fn close(&self, reason: PeerConnectionError) {
        self.closing.borrow_mut().get_or_insert(reason);
        self.close_begins.notify_one();
    }

    /// Waits until [`PeerConnection::close`] is called. Only one task at a time may wait.
    pub(super) async fn wait_closed(&self) -> PeerConnectionError {
        loop {
            if let Some(reason) = self.closing.borrow_mut().take() {
                return reason;
            }
            self.close_begins.notified().await;
        }
    }
}

impl Drop for PeerConnection {
    /// Sends a close notification if the socket accepts it, so that the other side does not wait for more data.
    fn drop(&mut self) {
        let tls = self.tls.get_mut();
        tls.send_close_notify();
        let _ = tls.write_tls(&mut NonBlockingWriter(&self.socket));
    }
}

impl PlaintextQueue {
    fn push(
        &mut self,
        EncodedFrame {
            head: front,
            tail: rest,
        }: EncodedFrame,
    ) {
        self.bytes += front.len() + rest.len();
        let parts = [Bytes::from(front), rest];
        let parts = parts.into_iter().filter(|part| !part.is_empty());
        self.parts.extend(parts);
    }

    /// Moves a chunk into `tls`, which forms as few records as possible. Returns false if there is nothing to move.
    fn move_into(&mut self, tls: &mut Connection) -> Result<bool, PeerConnectionError> {
        let (mut slices, mut room) = (Vec::new(), CHUNK_BYTES);
        for part in &self.parts {
            let slice = &part[..part.len().min(room)];
            slices.push(IoSlice::new(slice));
            room -= slice.len();
            if room == 0 {
                break;
            }
        }
        if slices.is_empty() {
            return Ok(false);
        }
        let written = tls.writer().write_vectored(&slices);
        let mut written = written.map_err(PeerConnectionError::Io)?;
        self.bytes -= written;
        while let Some(first) = self.parts.front_mut().filter(|_| written > 0) {
            let part = first.len().min(written);
            written -= part;
            first.advance(part);
            if first.is_empty() {
                self.parts.pop_front();
            }
        }
        Ok(true)
    }
}

/// The socket as a writer that returns `WouldBlock` when it is full.
struct NonBlockingWriter<'a>(&'a TcpStream);

impl Write for NonBlockingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
