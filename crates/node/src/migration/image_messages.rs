//! Messages with a process's image, on their way to the acceptor.
//!
//! A donor's thread cuts messages into pieces and passes them to the event loop, which sends them. The bytes in transit
//! are limited by a window, which opens as the acceptor reports the bytes that it has taken. So neither the event loop
//! nor the channel fills up on a slow link or acceptor, and other frames find a short queue.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_checkpoint::image::{MESSAGE_MAX, PagesMessage};
use holdfast_checkpoint::image_judge as conversation;
use holdfast_wire::failure::{Failure, ProtocolViolation};
use holdfast_wire::{MoveId, NodeId};

use super::compression::{Compressor, LinkRate};
use super::worker_events::{EventSender, WorkerEvent};
use crate::failure_conversion::IntoFailure;

/// Bytes of a piece; short enough not to delay the event loop.
const PIECE_BYTES: usize = 256 << 10;

/// Maximum number of bytes in transit.
pub(super) const WINDOW_BYTES: usize = 8 << 20;

/// Kind of message that a piece belongs to, with the type or content of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum MessageKind {
    /// `holdfast_checkpoint::image::TreeLayout`.
    Tree = 1,
    /// `PagesMessage`.
    Pages = 2,
    /// `holdfast_checkpoint::image::ProcessTreeState`.
    Frozen = 3,
    /// `DescriptorUpdate`.
    Descriptors = 4,
    /// `DescriptorUpdate` of the stopped tree.
    LastDescriptors = 5,
    /// Socket states of the stopped tree; more follow.
    Sockets = 6,
    /// Socket states of the stopped tree, the last ones.
    LastSockets = 7,
    /// Snapshots of connections, taken while the tree ran.
    Snapshots = 8,
    /// `PagesMessage`, compressed.
    CompressedPages = 9,
    /// Checksums of the stopped tree.
    Digest = 10,
    /// Notice that the tree is about to be stopped; empty.
    FreezeNotice = 11,
    /// `MissingPages`: pages that are absent when the tree resumes and are sent afterwards (post-copy).
    MissingPages = 12,
    /// Missing `PagesMessage`. Without any pages, a question for the pages still missing.
    PostcopyPages = 13,
    /// Reason, as text, why no more missing pages are sent.
    PostcopyFailed = 14,
    /// Preview of `ProcessTreeState` from the running tree: the question whether the acceptor takes the process.
    StatePreview = 15,
    /// A [`LockAnswer`](super::locks::LockAnswer).
    Locks = 16,
}

impl MessageKind {
    /// Returns the kind with this number, if there is one.
    pub(super) fn from_number(number: u8) -> Option<MessageKind> {
        let all = [
            MessageKind::Tree,
            MessageKind::Pages,
            MessageKind::Frozen,
            MessageKind::Descriptors,
            MessageKind::LastDescriptors,
            MessageKind::Sockets,
            MessageKind::LastSockets,
            MessageKind::Snapshots,
            MessageKind::CompressedPages,
            MessageKind::Digest,
            MessageKind::FreezeNotice,
            MessageKind::MissingPages,
            MessageKind::PostcopyPages,
            MessageKind::PostcopyFailed,
            MessageKind::StatePreview,
            MessageKind::Locks,
        ];
        all.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Returns the message type by which the order of messages is checked.
    pub(super) fn conversation_message(self) -> conversation::DonorMessageKind {
        use conversation::DonorMessageKind;
        match self {
            MessageKind::Tree => DonorMessageKind::Tree,
            MessageKind::Pages | MessageKind::CompressedPages => DonorMessageKind::Pages,
            MessageKind::Frozen => DonorMessageKind::State,
            MessageKind::Descriptors => DonorMessageKind::Descriptors,
            MessageKind::LastDescriptors => DonorMessageKind::LastDescriptors,
            MessageKind::Sockets => DonorMessageKind::Sockets,
            MessageKind::LastSockets => DonorMessageKind::LastSockets,
            MessageKind::Snapshots => DonorMessageKind::TcpSnapshots,
            MessageKind::Digest => DonorMessageKind::Digest,
            MessageKind::FreezeNotice => DonorMessageKind::FreezeStart,
            MessageKind::MissingPages => DonorMessageKind::MissingPages,
            MessageKind::PostcopyPages => DonorMessageKind::PostcopyPages,
            MessageKind::PostcopyFailed => DonorMessageKind::PostcopyLost,
            MessageKind::StatePreview => DonorMessageKind::StatePreview,
            MessageKind::Locks => DonorMessageKind::Locks,
        }
    }

    /// Returns the name for the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            MessageKind::Tree => "tree",
            MessageKind::Pages | MessageKind::CompressedPages => "pages",
            MessageKind::Frozen | MessageKind::StatePreview => "state",
            MessageKind::Descriptors | MessageKind::LastDescriptors => "descriptors",
            MessageKind::Sockets | MessageKind::LastSockets => "sockets",
            MessageKind::Snapshots => "seen",
            MessageKind::Digest => "checksums",
            MessageKind::FreezeNotice => "hurry",
            MessageKind::MissingPages => "missing",
            MessageKind::PostcopyPages | MessageKind::PostcopyFailed => "follows",
            MessageKind::Locks => "locks",
        }
    }
}

/// Number of bytes that may still be sent; shared by a donor's thread and the event loop.
#[derive(Debug)]
pub(super) struct SendWindow {
    state: Mutex<SendWindowState>,
    changed: Condvar,
}

#[derive(Debug)]
struct SendWindowState {
    free_bytes: usize,
    /// Reason why the donor may send no more of the image.
    closed: Option<Failure>,
    /// The acceptor's verdict, once received: its refusals; empty if it takes the process.
    verdict: Option<Vec<Failure>>,
    link_rate: LinkRate,
}

impl SendWindow {
    fn new() -> SendWindow {
        let state = SendWindowState {
            free_bytes: WINDOW_BYTES,
            closed: None,
            verdict: None,
            link_rate: LinkRate::default(),
        };
        SendWindow {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SendWindowState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the acceptor has taken bytes after `busy` of work.
    pub(super) fn on_taken(&self, bytes: u64, busy: Duration) {
        let mut state = self.lock();
        let bytes = usize::try_from(bytes).unwrap_or(WINDOW_BYTES);
        state.free_bytes = state.free_bytes.saturating_add(bytes).min(WINDOW_BYTES);
        let is_more_in_transit = state.free_bytes < WINDOW_BYTES;
        state
            .link_rate
            .on_taken(Instant::now(), (bytes, busy), is_more_in_transit);
        self.changed.notify_all();
    }

    /// Records the acceptor's verdict on the process.
    pub(super) fn set_verdict(&self, refusals: Vec<Failure>) {
        self.lock().verdict.get_or_insert(refusals);
        self.changed.notify_all();
    }

    /// Closes the window; waiting senders get the reason. The first reason stays.
    pub(super) fn close(&self, why: Failure) {
        self.lock().closed.get_or_insert(why);
        self.changed.notify_all();
    }

    /// Reopens the window for a new channel, on which nothing is in transit.
    fn reopen(&self) {
        let mut state = self.lock();
        (state.free_bytes, state.closed) = (WINDOW_BYTES, None);
    }

    /// Returns the link's rate in bytes/s, if known.
    fn link_rate(&self) -> Option<f64> {
        self.lock().link_rate.bytes_per_s()
    }

    /// Waits until `bytes` more bytes may be sent.
    fn wait_for_bytes(&self, bytes: usize) -> Result<MutexGuard<'_, SendWindowState>, Failure> {
        let mut state = self.lock();
        loop {
            if let Some(why) = &state.closed {
                return Err(why.clone());
            }
            if state.free_bytes >= bytes {
                return Ok(state);
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Channel from a donor's thread to the acceptor.
pub(super) struct ImageSender {
    id: MoveId,
    to: NodeId,
    window: Arc<SendWindow>,
    events: EventSender,
    compressor: Compressor,
    /// Bytes sent to the acceptor.
    pub(super) sent_bytes: u64,
    /// Bytes saved by compression.
    pub(super) saved_bytes: u64,
}

impl ImageSender {
    pub(super) fn new(
        id: MoveId,
        to: NodeId,
        events: EventSender,
    ) -> (ImageSender, Arc<SendWindow>) {
        let window = Arc::new(SendWindow::new());
        let sender = ImageSender {
            id,
            to,
            window: window.clone(),
            events,
            compressor: Compressor::default(),
            sent_bytes: 0,
            saved_bytes: 0,
        };
        (sender, window)
    }

    /// Returns the bytes sent and the bytes saved by compression.
    pub(super) fn byte_counts(&self) -> (u64, u64) {
        (self.sent_bytes, self.saved_bytes)
    }

    /// Sends memory, compressed if that is faster.
    pub(super) fn send_pages(&mut self, pages: PagesMessage) -> Result<(), Failure> {
        let (header, content) = pages
            .into_message()
            .map_err(IntoFailure::into_own_failure)?;
        match self
            .compressor
            .compress(&[&header, &content], self.window.link_rate())
        {
            Some(packed) => {
                self.saved_bytes += (header.len() + content.len() - packed.len()) as u64;
                self.send(MessageKind::CompressedPages, packed)
            }
            None => {
                self.send_pieces(MessageKind::Pages, !content.is_empty(), header.into())?;
                match content.is_empty() {
                    true => Ok(()),
                    false => self.send(MessageKind::Pages, content),
                }
            }
        }
    }

    /// Sends a message, as the window opens for each of its pieces.
    pub(super) fn send(&mut self, kind: MessageKind, message: Vec<u8>) -> Result<(), Failure> {
        self.send_pieces(kind, false, message.into())
    }

    /// Sends a message, or with `more` a part of it that is not its last.
    fn send_pieces(
        &mut self,
        kind: MessageKind,
        more: bool,
        mut remaining: Bytes,
    ) -> Result<(), Failure> {
        loop {
            let bytes = remaining.split_to(remaining.len().min(PIECE_BYTES));
            let mut state = self.window.wait_for_bytes(bytes.len())?;
            state.free_bytes -= bytes.len();
            state.link_rate.on_send(Instant::now());
            drop(state);
            self.sent_bytes += bytes.len() as u64;
            let is_last = remaining.is_empty();
            self.events.send(WorkerEvent::SendPiece {
                id: self.id,
                to: self.to,
                kind: kind as u8,
                more: more || !is_last,
                bytes,
            });
            if is_last {
                return Ok(());
            }
        }
    }

    /// Sends a short message regardless of the window.
    pub(super) fn send_unwindowed(&self, kind: MessageKind, message: Vec<u8>) {
        self.events.send(WorkerEvent::SendPiece {
            id: self.id,
            to: self.to,
            kind: kind as u8,
            more: false,
            bytes: message.into(),
        });
    }

    /// Returns true if at most `max_bytes` bytes are in transit and more may be sent.
    pub(super) fn has_room(&self, max_bytes: usize) -> bool {
        let state = self.window.lock();
        state.closed.is_none() && WINDOW_BYTES - state.free_bytes <= max_bytes
    }

    /// Returns the number of bytes that the link carries in `time`, if known.
    pub(super) fn bytes_in(&self, time: Duration) -> Option<usize> {
        (self.window.link_rate()).map(|rate| (rate * time.as_secs_f64()) as usize)
    }

    /// Reopens the window after the acceptor has listed its missing pages: bytes in transit no longer count.
    pub(super) fn reopen_window(&self) {
        self.window.reopen();
    }

    /// Waits for the acceptor's verdict on the process. Returns its refusals.
    pub(super) fn wait_for_verdict(&self) -> Result<Vec<Failure>, Failure> {
        let mut state = self.window.lock();
        loop {
            if let Some(refusals) = state.verdict.take() {
                return Ok(refusals);
            }
            if let Some(why) = &state.closed {
                return Err(why.clone());
            }
            let waited = self.window.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the acceptor has taken everything.
    pub(super) fn wait_until_taken(&self) -> Result<(), Failure> {
        self.window.wait_for_bytes(WINDOW_BYTES).map(drop)
    }
}

/// Reassembles messages from received pieces.
#[derive(Debug, Default)]
pub(super) struct MessageAssembler {
    kind: Option<MessageKind>,
    pieces: Vec<Bytes>,
    bytes: usize,
}

/// A received message, as a list of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ImageMessage(pub(super) Vec<Bytes>);

impl ImageMessage {
    /// Returns the message in one piece.
    pub(super) fn into_bytes(self) -> Bytes {
        let ImageMessage(mut pieces) = self;
        match pieces.len() {
            1 => pieces.swap_remove(0),
            _ => pieces.concat().into(),
        }
    }
}

impl MessageAssembler {
    /// Adds a piece. Returns the message after its last piece.
    pub(super) fn add_piece(
        &mut self,
        number: u8,
        more: bool,
        bytes: Bytes,
    ) -> Result<Option<(MessageKind, ImageMessage)>, Failure> {
        let kind = MessageKind::from_number(number).ok_or(ProtocolViolation::UnknownMessageKind)?;
        if *self.kind.get_or_insert(kind) != kind {
            return Err(ProtocolViolation::MixedMessages.into());
        }
        self.bytes += bytes.len();
        if self.bytes > MESSAGE_MAX {
            return Err(ProtocolViolation::MessageTooLong.into());
        }
        self.pieces.push(bytes);
        if more {
            return Ok(None);
        }
        (self.kind, self.bytes) = (None, 0);
        Ok(Some((kind, ImageMessage(std::mem::take(&mut self.pieces)))))
    }
}

#[cfg(test)]
mod tests {
    use holdfast_wire::failure::PeerFault;

    use super::super::worker_events;
    use super::*;

    fn move_id() -> MoveId {
        MoveId {
            donor: NodeId(1),
            boot: 2,
            seq: 3,
        }
    }

    /// The sender waits until the receiver has taken its bytes, and the reassembled message equals the original.
    #[test]
    fn sender_keeps_at_most_one_window_in_transit() {
        let (events, mut listener) = worker_events::event_channel();
        let (mut image_sender, window) = ImageSender::new(move_id(), NodeId(2), events);
        let message: Vec<u8> = (0..3 * WINDOW_BYTES).map(|at| (at % 251) as u8).collect();
        let expected = message.clone();
        let thread = std::thread::spawn(move || {
            image_sender.send(MessageKind::Pages, message)?;
            image_sender.wait_until_taken()
        });
        let (mut assembler, mut in_transit) = (MessageAssembler::default(), 0);
        let received = loop {
            let Some(WorkerEvent::SendPiece {
                kind, more, bytes, ..
            }) = listener.blocking_recv()
            else {
                panic!("no piece");
            };
            in_transit += bytes.len();
            assert!(in_transit <= WINDOW_BYTES);
            if let Some(message) = assembler.add_piece(kind, more, bytes).expect("a piece") {
                window.on_taken(in_transit as u64, Duration::ZERO);
                break message;
            }
            if in_transit == WINDOW_BYTES {
                window.on_taken(in_transit as u64, Duration::ZERO);
                in_transit = 0;
            }
        };
        let (kind, message) = received;
        assert!((kind, message.into_bytes()) == (MessageKind::Pages, expected.into()));
        assert_eq!(thread.join().expect("it does not panic"), Ok(()));
    }

    #[test]
    fn closed_window_fails_waiting_sender_with_first_reason() {
        let (events, _listener) = worker_events::event_channel();
        let (mut image_sender, window) = ImageSender::new(move_id(), NodeId(2), events);
        let thread = std::thread::spawn(move || {
            image_sender.send(MessageKind::Tree, vec![0; 2 * WINDOW_BYTES])
        });
        window.close(PeerFault::MoveGivenUp.into());
        window.close(PeerFault::AcceptorChannelLost.into());
        let why = Err(PeerFault::MoveGivenUp.into());
        assert_eq!(thread.join().expect("it does not panic"), why);
    }

    #[test]
    fn unknown_or_mixed_pieces_are_refused() {
        let mut assembler = MessageAssembler::default();
        assert!(assembler.add_piece(99, false, Bytes::new()).is_err());
        let mut add =
            |kind: MessageKind, more| assembler.add_piece(kind as u8, more, Bytes::from("a"));
        assert_eq!(add(MessageKind::Tree, true), Ok(None));
        assert!(add(MessageKind::Pages, false).is_err());
    }
}
