//! Messages with a process's image, on their way to the acceptor.
//!
//! A donor's thread cuts messages into pieces and passes them to the event loop, which sends them. The bytes in transit
//! are limited by a window, which opens as the acceptor reports the bytes that it has taken. So neither the event loop
//! nor the channel fills up on a slow link or acceptor, and other frames find a short queue.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_sys::process::image::{MESSAGE_MAX, Pages};
use holdfast_sys::process::judge as conversation;
use holdfast_wire::{MoveId, NodeId};

use super::pack::{Pace, Packer};
use super::told::{Teller, Told};

/// Bytes of a piece; short enough not to delay the event loop.
const PIECE_BYTES: usize = 256 << 10;

/// Maximum number of bytes in transit.
pub(super) const WINDOW_BYTES: usize = 8 << 20;

/// Kind of message that a piece belongs to, with the type or content of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// `sys::process::image::Tree`.
    Tree = 1,
    /// `Pages`.
    Pages = 2,
    /// `Frozen`.
    Frozen = 3,
    /// `Descriptors`.
    Descriptors = 4,
    /// `Descriptors` of the stopped tree.
    LastDescriptors = 5,
    /// Socket states of the stopped tree; more follow.
    Sockets = 6,
    /// Socket states of the stopped tree, the last ones.
    LastSockets = 7,
    /// Snapshots of connections, taken while the tree ran.
    Seen = 8,
    /// `Pages`, compressed.
    PackedPages = 9,
    /// Checksums of the stopped tree.
    Digest = 10,
    /// Empty: the tree is about to be stopped.
    Freezing = 11,
    /// `Missing`: pages that are absent when the tree resumes and are sent afterwards (post-copy).
    Missing = 12,
    /// Missing `Pages`. Without any pages, a question for the pages still missing.
    Follows = 13,
    /// Reason, as text, why no more missing pages are sent.
    Lost = 14,
    /// Preview of `Frozen` from the running tree: the question whether the acceptor takes the process.
    Outlook = 15,
    /// A [`LockAnswer`](super::locks::LockAnswer).
    Locks = 16,
}

impl Kind {
    /// Returns the kind with this number, if there is one.
    pub(super) fn from_number(number: u8) -> Option<Kind> {
        let all = [
            Kind::Tree,
            Kind::Pages,
            Kind::Frozen,
            Kind::Descriptors,
            Kind::LastDescriptors,
            Kind::Sockets,
            Kind::LastSockets,
            Kind::Seen,
            Kind::PackedPages,
            Kind::Digest,
            Kind::Freezing,
            Kind::Missing,
            Kind::Follows,
            Kind::Lost,
            Kind::Outlook,
            Kind::Locks,
        ];
        all.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Returns the message type by which the order of messages is checked.
    pub(super) fn message(self) -> conversation::Message {
        use conversation::Message;
        match self {
            Kind::Tree => Message::Tree,
            Kind::Pages | Kind::PackedPages => Message::Pages,
            Kind::Frozen => Message::Frozen,
            Kind::Descriptors => Message::Descriptors,
            Kind::LastDescriptors => Message::LastDescriptors,
            Kind::Sockets => Message::Sockets,
            Kind::LastSockets => Message::LastSockets,
            Kind::Seen => Message::Seen,
            Kind::Digest => Message::Digest,
            Kind::Freezing => Message::Freezing,
            Kind::Missing => Message::Missing,
            Kind::Follows => Message::Follows,
            Kind::Lost => Message::Lost,
            Kind::Outlook => Message::Outlook,
            Kind::Locks => Message::Locks,
        }
    }

    /// Returns the name for the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Tree => "tree",
            Kind::Pages | Kind::PackedPages => "pages",
            Kind::Frozen | Kind::Outlook => "state",
            Kind::Descriptors | Kind::LastDescriptors => "descriptors",
            Kind::Sockets | Kind::LastSockets => "sockets",
            Kind::Seen => "seen",
            Kind::Digest => "checksums",
            Kind::Freezing => "hurry",
            Kind::Missing => "missing",
            Kind::Follows | Kind::Lost => "follows",
            Kind::Locks => "locks",
        }
    }
}

/// Number of bytes that may still be sent; shared by a donor's thread and the event loop.
#[derive(Debug)]
pub(super) struct Window {
    room: Mutex<Room>,
    changed: Condvar,
}

#[derive(Debug)]
struct Room {
    free: usize,
    /// Reason why nothing more may be sent.
    closed: Option<String>,
    /// The acceptor's verdict, once received: its refusals; empty if it takes the process.
    verdict: Option<Vec<String>>,
    pace: Pace,
}

impl Window {
    fn new() -> Window {
        let room = Room {
            free: WINDOW_BYTES,
            closed: None,
            verdict: None,
            pace: Pace::default(),
        };
        Window {
            room: Mutex::new(room),
            changed: Condvar::new(),
        }
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the acceptor has taken bytes after `busy` of work.
    pub(super) fn taken(&self, bytes: u64, busy: Duration) {
        let mut room = self.room();
        let bytes = usize::try_from(bytes).unwrap_or(WINDOW_BYTES);
        room.free = room.free.saturating_add(bytes).min(WINDOW_BYTES);
        let more = room.free < WINDOW_BYTES;
        room.pace.taken(Instant::now(), (bytes, busy), more);
        self.changed.notify_all();
    }

    /// Records the acceptor's verdict.
    pub(super) fn judged(&self, refusals: Vec<String>) {
        self.room().verdict.get_or_insert(refusals);
        self.changed.notify_all();
    }

    /// Closes the window; waiting senders get the reason. The first reason stays.
    pub(super) fn close(&self, why: &str) {
        self.room().closed.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }

    /// Reopens the window for a new channel, on which nothing is in transit.
    fn reopen(&self) {
        let mut room = self.room();
        (room.free, room.closed) = (WINDOW_BYTES, None);
    }

    /// Returns the link's rate in bytes/s, if known.
    fn rate(&self) -> Option<f64> {
        self.room().pace.rate()
    }

    /// Waits until `bytes` bytes are free.
    fn wait(&self, bytes: usize) -> Result<MutexGuard<'_, Room>, String> {
        let mut room = self.room();
        loop {
            if let Some(why) = &room.closed {
                return Err(why.clone());
            }
            if room.free >= bytes {
                return Ok(room);
            }
            let waited = self.changed.wait(room);
            room = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Channel from a donor's thread to the acceptor.
pub(super) struct Outgoing {
    id: MoveId,
    to: NodeId,
    window: Arc<Window>,
    teller: Teller,
    packer: Packer,
    /// Bytes sent.
    pub(super) sent: u64,
    /// Bytes saved by compression.
    pub(super) saved: u64,
}

impl Outgoing {
    pub(super) fn new(id: MoveId, to: NodeId, teller: Teller) -> (Outgoing, Arc<Window>) {
        let window = Arc::new(Window::new());
        let outgoing = Outgoing {
            id,
            to,
            window: window.clone(),
            teller,
            packer: Packer::default(),
            sent: 0,
            saved: 0,
        };
        (outgoing, window)
    }

    /// Returns the bytes sent and the bytes saved by compression.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.sent, self.saved)
    }

    /// Sends memory, compressed if that is faster.
    pub(super) fn send_pages(&mut self, pages: Pages) -> Result<(), String> {
        let (front, content) = pages.into_message().map_err(|error| error.to_string())?;
        match self.packer.pack(&[&front, &content], self.window.rate()) {
            Some(packed) => {
                self.saved += (front.len() + content.len() - packed.len()) as u64;
                self.send(Kind::PackedPages, packed)
            }
            None => {
                self.send_some(Kind::Pages, !content.is_empty(), front.into())?;
                match content.is_empty() {
                    true => Ok(()),
                    false => self.send(Kind::Pages, content),
                }
            }
        }
    }

    /// Sends a message, as the window opens for each of its pieces.
    pub(super) fn send(&mut self, kind: Kind, message: Vec<u8>) -> Result<(), String> {
        self.send_some(kind, false, message.into())
    }

    /// Sends a message, or with `more` a part of it that is not its last.
    fn send_some(&mut self, kind: Kind, more: bool, mut rest: Bytes) -> Result<(), String> {
        loop {
            let bytes = rest.split_to(rest.len().min(PIECE_BYTES));
            let mut room = self.window.wait(bytes.len())?;
            room.free -= bytes.len();
            room.pace.sends(Instant::now());
            drop(room);
            self.sent += bytes.len() as u64;
            let last = rest.is_empty();
            self.teller.tell(Told::Piece {
                id: self.id,
                to: self.to,
                kind: kind as u8,
                more: more || !last,
                bytes,
            });
            if last {
                return Ok(());
            }
        }
    }

    /// Sends a short message regardless of the window.
    pub(super) fn send_anyway(&self, kind: Kind, message: Vec<u8>) {
        self.teller.tell(Told::Piece {
            id: self.id,
            to: self.to,
            kind: kind as u8,
            more: false,
            bytes: message.into(),
        });
    }

    /// Returns true if at most `most` bytes are in transit and more may be sent.
    pub(super) fn has_room(&self, most: usize) -> bool {
        let room = self.window.room();
        room.closed.is_none() && WINDOW_BYTES - room.free <= most
    }

    /// Returns the number of bytes that the link carries in `time`, if known.
    pub(super) fn bytes_in(&self, time: Duration) -> Option<usize> {
        (self.window.rate()).map(|rate| (rate * time.as_secs_f64()) as usize)
    }

    /// Reopens the window after the acceptor has listed its missing pages: bytes in transit no longer count.
    pub(super) fn begin_again(&self) {
        self.window.reopen();
    }

    /// Waits for the acceptor's verdict on the process. Returns its refusals.
    pub(super) fn verdict(&self) -> Result<Vec<String>, String> {
        let mut room = self.window.room();
        loop {
            if let Some(refusals) = room.verdict.take() {
                return Ok(refusals);
            }
            if let Some(why) = &room.closed {
                return Err(why.clone());
            }
            let waited = self.window.changed.wait(room);
            room = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the acceptor has taken everything.
    pub(super) fn taken(&self) -> Result<(), String> {
        self.window.wait(WINDOW_BYTES).map(drop)
    }
}

/// Reassembles messages from received pieces.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    begun: Option<Kind>,
    pieces: Vec<Bytes>,
    bytes: usize,
}

/// A received message, as a list of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message(pub(super) Vec<Bytes>);

impl Message {
    /// Returns the message in one piece.
    pub(super) fn whole(self) -> Bytes {
        let Message(mut pieces) = self;
        match pieces.len() {
            1 => pieces.swap_remove(0),
            _ => pieces.concat().into(),
        }
    }
}

impl Incoming {
    /// Adds a piece. Returns the message after its last piece.
    pub(super) fn take(
        &mut self,
        number: u8,
        more: bool,
        bytes: Bytes,
    ) -> Result<Option<(Kind, Message)>, String> {
        let kind = Kind::from_number(number)
            .ok_or("a piece of a kind that is not known: run the same release on both nodes")?;
        if *self.begun.get_or_insert(kind) != kind {
            return Err("pieces of two messages are mixed".to_owned());
        }
        self.bytes += bytes.len();
        if self.bytes > MESSAGE_MAX {
            return Err("a message is too long".to_owned());
        }
        self.pieces.push(bytes);
        if more {
            return Ok(None);
        }
        (self.begun, self.bytes) = (None, 0);
        Ok(Some((kind, Message(std::mem::take(&mut self.pieces)))))
    }
}

#[cfg(test)]
mod tests {
    use super::super::told;
    use super::*;

    fn id() -> MoveId {
        MoveId {
            donor: NodeId(1),
            boot: 2,
            seq: 3,
        }
    }

    /// The sender waits until the receiver has taken its bytes, and the reassembled message equals the original.
    #[test]
    fn no_more_than_a_window_is_on_its_way() {
        let (teller, mut listener) = told::way();
        let (mut outgoing, window) = Outgoing::new(id(), NodeId(2), teller);
        let message: Vec<u8> = (0..3 * WINDOW_BYTES).map(|at| (at % 251) as u8).collect();
        let expected = message.clone();
        let sender = std::thread::spawn(move || {
            outgoing.send(Kind::Pages, message)?;
            outgoing.taken()
        });
        let (mut incoming, mut on_its_way) = (Incoming::default(), 0);
        let received = loop {
            let Some(Told::Piece {
                kind, more, bytes, ..
            }) = listener.blocking_recv()
            else {
                panic!("no piece");
            };
            on_its_way += bytes.len();
            assert!(on_its_way <= WINDOW_BYTES);
            if let Some(message) = incoming.take(kind, more, bytes).expect("a piece") {
                window.taken(on_its_way as u64, Duration::ZERO);
                break message;
            }
            if on_its_way == WINDOW_BYTES {
                window.taken(on_its_way as u64, Duration::ZERO);
                on_its_way = 0;
            }
        };
        let (kind, message) = received;
        assert!((kind, message.whole()) == (Kind::Pages, expected.into()));
        assert_eq!(sender.join().expect("it does not panic"), Ok(()));
    }

    #[test]
    fn who_waits_is_told_why_nothing_more_is_taken() {
        let (teller, _listener) = told::way();
        let (mut outgoing, window) = Outgoing::new(id(), NodeId(2), teller);
        let sender =
            std::thread::spawn(move || outgoing.send(Kind::Tree, vec![0; 2 * WINDOW_BYTES]));
        window.close("no room");
        window.close("the channel was lost");
        let why = Err("no room".to_owned());
        assert_eq!(sender.join().expect("it does not panic"), why);
    }

    #[test]
    fn pieces_that_do_not_fit_are_refused() {
        let mut incoming = Incoming::default();
        assert!(incoming.take(99, false, Bytes::new()).is_err());
        let mut take = |kind: Kind, more| incoming.take(kind as u8, more, Bytes::from("a"));
        assert_eq!(take(Kind::Tree, true), Ok(None));
        assert!(take(Kind::Pages, false).is_err());
    }
}
