//! The session of one program.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use holdfast_api::app::{Channel, ChannelMessage, FromDaemon, ToDaemon, decode, encode};
use holdfast_daemon::polled_socket::PolledSocket;
use holdfast_wire::failure::OperatorFault;
use tokio::sync::Notify;

use super::{AppEvent, SessionId, SessionTable};

/// Maximum queue for a program that does not read. Beyond it the session is closed; the program keeps its connections.
const QUEUED_BYTES_MAX: usize = 64 << 20;
const QUEUED_DESCRIPTORS_MAX: usize = 32_768;

/// Retry interval. The kernel limits the descriptors in unread messages, and does not signal when the limit permits
/// more.
const DESCRIPTOR_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Time limit for a program from connecting to its first message.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct AppSession {
    /// User that runs the program.
    pub(super) uid: u32,
    /// True if the first message has arrived.
    pub(super) opened: Cell<bool>,
    channel: PolledSocket<Channel>,
    queue: RefCell<VecDeque<(Vec<u8>, Vec<OwnedFd>)>>,
    queued_bytes: Cell<usize>,
    queued_descriptors: Cell<usize>,
    stall_begins: Notify,
    closing: RefCell<Option<String>>,
    close_begins: Notify,
}

impl AppSession {
    pub(super) fn new(channel: Channel, uid: u32) -> io::Result<AppSession> {
        Ok(AppSession {
            uid,
            opened: Cell::new(false),
            channel: PolledSocket::new(channel)?,
            queue: RefCell::default(),
            queued_bytes: Cell::new(0),
            queued_descriptors: Cell::new(0),
            stall_begins: Notify::new(),
            closing: RefCell::default(),
            close_begins: Notify::new(),
        })
    }

    pub(super) fn queued_messages(&self) -> usize {
        self.queue.borrow().len()
    }

    /// Sends or queues a message. Returns false if the session ends.
    pub(super) fn send(&self, bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> bool {
        if self.closing.borrow().is_some() {
            return false;
        }
        if self.queue.borrow().is_empty() {
            match send(self.channel.get(), &bytes, &descriptors) {
                Ok(()) => return true,
                Err(error) if is_full(&error) => {}
                Err(error) => {
                    self.close(format!("sending failed: {error}"));
                    return false;
                }
            }
        }
        self.add_to_queue_size(bytes.len() as isize, descriptors.len() as isize);
        self.queue.borrow_mut().push_back((bytes, descriptors));
        self.stall_begins.notify_one();
        if self.queued_bytes.get() > QUEUED_BYTES_MAX
            || self.queued_descriptors.get() > QUEUED_DESCRIPTORS_MAX
        {
            self.close("the program does not read its messages".to_owned());
            return false;
        }
        true
    }

    fn add_to_queue_size(&self, bytes: isize, descriptors: isize) {
        let queued = self.queued_bytes.get();
        self.queued_bytes.set(queued.saturating_add_signed(bytes));
        let queued = self.queued_descriptors.get();
        self.queued_descriptors
            .set(queued.saturating_add_signed(descriptors));
    }

    /// Sends queued messages, and waits for more when none are left. Returns only with an error.
    async fn send_queued(&self) -> io::Error {
        loop {
            if self.queue.borrow().is_empty() {
                self.stall_begins.notified().await;
                continue;
            }
            match self.channel.write(|channel| self.send_front(channel)).await {
                Ok(()) => {}
                Err(error) if is_full(&error) => {
                    tokio::time::sleep(DESCRIPTOR_RETRY_INTERVAL).await
                }
                Err(error) => return error,
            }
        }
    }

    fn send_front(&self, channel: &Channel) -> io::Result<()> {
        let mut queue = self.queue.borrow_mut();
        let Some((bytes, descriptors)) = queue.front() else {
            return Ok(());
        };
        send(channel, bytes, descriptors)?;
        self.add_to_queue_size(-(bytes.len() as isize), -(descriptors.len() as isize));
        queue.pop_front();
        Ok(())
    }

    async fn receive(&self) -> io::Result<Option<ChannelMessage>> {
        self.channel.read(Channel::receive).await
    }

    pub(super) fn close(&self, reason: String) {
        self.closing.borrow_mut().get_or_insert(reason);
        self.close_begins.notify_one();
    }

    async fn wait_closed(&self) -> String {
        loop {
            if let Some(reason) = self.closing.borrow().clone() {
                return reason;
            }
            self.close_begins.notified().await;
        }
    }
}

/// Serves a session until it ends.
pub(super) async fn run(table: &SessionTable, id: SessionId, pid: u32, session: &AppSession) {
    let until = tokio::time::Instant::now() + OPEN_TIMEOUT;
    let reason = loop {
        let packet = tokio::select! {
            packet = session.receive() => packet,
            error = session.send_queued() => Err(error),
            reason = session.wait_closed() => break Some(reason),
            () = tokio::time::sleep_until(until), if !session.opened.get() => {
                let text = format!("no session was opened within {OPEN_TIMEOUT:?}");
                send_refusal(session.channel.get(), &text);
                break Some(text);
            }
        };
        let message = match packet {
            Ok(Some(packet)) => decode_packet(packet, session.opened.get()),
            Ok(None) => break None,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(error.to_string()),
            Err(error) => break Some(error.to_string()),
        };
        match message {
            Ok((ToDaemon::Open { name }, _)) => {
                session.opened.set(true);
                let node = table.node.clone();
                if let Ok(answer) = encode(&FromDaemon::Opened { node }) {
                    session.send(answer, Vec::new());
                }
                let session = id;
                table.events.push(AppEvent::Opened { session, name, pid });
            }
            Ok((message, descriptors)) => table.events.push(AppEvent::Message {
                session: id,
                message,
                descriptors,
            }),
            Err(text) => {
                send_refusal(session.channel.get(), &text);
                break Some(text);
            }
        }
        tokio::select! {
            () = table.events.wait_room() => {}
            reason = session.wait_closed() => break Some(reason),
        }
    };
    if let Some(reason) = reason {
        tracing::warn!(
            session = id.0,
            pid,
            reason,
            "closed a server program's session"
        );
    }
    table.sessions.borrow_mut().remove(&id);
    if session.opened.get() {
        table.events.push(AppEvent::Closed { session: id });
    }
}

/// Decodes a packet and checks the properties that the engine relies on.
fn decode_packet(packet: ChannelMessage, opened: bool) -> Result<(ToDaemon, Vec<OwnedFd>), String> {
    let ChannelMessage {
        bytes,
        descriptors,
        descriptors_lost,
    } = packet;
    let message: ToDaemon = decode(&bytes).map_err(|error| error.to_string())?;
    match (&message, opened) {
        (ToDaemon::Open { .. }, true) => return Err("the session is already open".to_owned()),
        (ToDaemon::Open { .. }, false) | (_, true) => {}
        (_, false) => return Err("the first message of a session must be Open".to_owned()),
    }
    let named_descriptors = match &message {
        ToDaemon::HandOff { items, .. } => items.iter().filter(|item| item.descriptor).count(),
        ToDaemon::Reclaim { items } => items.iter().filter(|item| item.descriptor).count(),
        _ => 0,
    };
    let is_lacking = descriptors_lost && descriptors.len() < named_descriptors;
    match (&message, is_lacking) {
        (ToDaemon::HandOff { .. }, true) => Ok((message, descriptors)),
        // The program keeps its descriptors and repeats the message in its next session.
        (_, true) => Err(OperatorFault::NoDescriptorLeft.to_string()),
        (_, false) if descriptors.len() == named_descriptors => Ok((message, descriptors)),
        (_, false) => Err(format!(
            "a message that names {named_descriptors} descriptors arrived with {}",
            descriptors.len()
        )),
    }
}

/// Sends the reason for the session's end to the program, in case it reads.
pub(super) fn send_refusal(channel: &Channel, text: &str) {
    let text = format!("{text}; the session is closed");
    if let Ok(bytes) = encode(&FromDaemon::Error { text }) {
        let _ = channel.send(&bytes, &[]);
    }
    // Data left unread when the socket closes would reset the session, and the reset would hide the error.
    let _ = rustix::net::shutdown(channel, rustix::net::Shutdown::Read);
    while let Ok(Some(_)) = channel.receive() {}
}

fn send(channel: &Channel, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    channel.send(bytes, &borrowed)
}

/// Returns true if a message may be sent later: the socket is full, or too many descriptors are in transit.
fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
        || error.raw_os_error() == Some(rustix::io::Errno::TOOMANYREFS.raw_os_error())
}
