//! What the stack says to one endpoint, as events.

use super::ffi::{self, RcvInfo, SockStore, Socket};
use super::stack::INNER;
use crate::address::RawAddress;
use crate::transport::event::{AssocId, DownReason, Event, Message, PathState};
use crate::transport::layout::{u16_at, u32_at};
use bytes::{Bytes, BytesMut};
use libc::{c_int, c_void, size_t};
use std::collections::HashMap;
use std::os::fd::OwnedFd;

/// Bytes of one buffer that messages share.
const ARENA_LEN: usize = 64 * 1024;

/// Notifications (`usrsctp.h`).
mod notice {
    pub const ASSOC_CHANGE: u16 = 1;
    pub const PEER_ADDR_CHANGE: u16 = 2;
    pub const SEND_FAILED_EVENT: u16 = 14;
    pub const ALL: [u16; 3] = [ASSOC_CHANGE, PEER_ADDR_CHANGE, SEND_FAILED_EVENT];
    /// `ssfe_flags`: some of it was on the wire.
    pub const DATA_SENT: u16 = 2;
}
pub use notice::ALL as NOTICES;

/// Events of an endpoint that it has not taken yet.
pub struct Queue {
    pub events: Vec<Event>,
    /// Associations whose peer sends a message that is too long.
    pub too_long: Vec<AssocId>,
    /// Readable when another endpoint's call put events here.
    pub wake: OwnedFd,
    message_len_max: usize,
    arena: BytesMut,
    partial: HashMap<AssocId, BytesMut>,
}

impl Queue {
    pub fn new(wake: OwnedFd, message_len_max: u32) -> Self {
        Self {
            events: Vec::new(),
            too_long: Vec::new(),
            wake,
            message_len_max: message_len_max as usize,
            arena: BytesMut::new(),
            partial: HashMap::new(),
        }
    }

    fn message(&mut self, port: u32, bytes: &[u8], info: &RcvInfo, is_end: bool) {
        let assoc = AssocId::new(port, info.assoc);
        if is_end && (self.partial.is_empty() || !self.partial.contains_key(&assoc)) {
            let data = self.store(bytes);
            return self.push(assoc, info, data);
        }
        let pieces = self.partial.entry(assoc).or_default();
        if pieces.len() + bytes.len() > self.message_len_max {
            self.partial.remove(&assoc);
            self.too_long.push(assoc);
            return;
        }
        pieces.extend_from_slice(bytes);
        if is_end && let Some(whole) = self.partial.remove(&assoc) {
            self.push(assoc, info, whole.freeze());
        }
    }

    fn push(&mut self, assoc: AssocId, info: &RcvInfo, data: Bytes) {
        if data.len() > self.message_len_max {
            self.too_long.push(assoc);
            return;
        }
        let message = Message {
            ppid: u32::from_be(info.ppid),
            stream: info.sid,
            unordered: info.flags & ffi::UNORDERED != 0,
            data,
        };
        self.events.push(Event::Message { assoc, message });
    }

    /// A copy of `bytes` in the shared buffer: one allocation for hundreds of messages.
    fn store(&mut self, bytes: &[u8]) -> Bytes {
        if self.arena.capacity() < bytes.len() {
            self.arena = BytesMut::with_capacity(ARENA_LEN.max(bytes.len()));
        }
        self.arena.extend_from_slice(bytes);
        self.arena.split().freeze()
    }

    fn notice(&mut self, port: u32, bytes: &[u8]) {
        let event = match u16_at(bytes, 0) {
            Some(notice::ASSOC_CHANGE) => assoc_change(port, bytes),
            Some(notice::PEER_ADDR_CHANGE) => path_change(port, bytes),
            Some(notice::SEND_FAILED_EVENT) => send_failed(port, bytes),
            _ => None,
        };
        if let Some(Event::Down { assoc, .. } | Event::Restarted { assoc }) = event {
            self.partial.remove(&assoc);
        }
        self.events.extend(event);
    }
}

/// `struct sctp_assoc_change`.
fn assoc_change(port: u32, bytes: &[u8]) -> Option<Event> {
    let assoc = AssocId::new(port, u32_at(bytes, 16)?);
    let down = |reason| Event::Down { assoc, reason };
    Some(match u16_at(bytes, 8)? {
        1 => Event::Up {
            assoc,
            outbound_streams: u16_at(bytes, 12)?,
            inbound_streams: u16_at(bytes, 14)?,
        },
        2 => down(DownReason::Lost),
        3 => Event::Restarted { assoc },
        4 => down(DownReason::Shutdown),
        5 => down(DownReason::NotStarted),
        _ => return None,
    })
}

/// `struct sctp_paddr_change`.
fn path_change(port: u32, bytes: &[u8]) -> Option<Event> {
    const ADDRESS_AT: usize = 8;
    const STATE_AT: usize = ADDRESS_AT + size_of::<libc::sockaddr_storage>();
    let (address, _) = RawAddress::split_from(bytes.get(ADDRESS_AT..)?)?;
    Some(Event::Path {
        assoc: AssocId::new(port, u32_at(bytes, STATE_AT + 8)?),
        address: address.to_socket_addr()?,
        state: PathState::from_usrsctp(u32_at(bytes, STATE_AT)?)?,
    })
}

/// `struct sctp_send_failed_event`.
fn send_failed(port: u32, bytes: &[u8]) -> Option<Event> {
    const INFO_AT: usize = 12;
    const INFO_LEN: usize = size_of::<ffi::SndInfo>();
    const DATA_AT: usize = INFO_AT + INFO_LEN + 4;
    Some(Event::SendFailed {
        assoc: AssocId::new(port, u32_at(bytes, INFO_AT + INFO_LEN)?),
        message: Message {
            ppid: u32::from_be(u32_at(bytes, INFO_AT + 4)?),
            stream: u16_at(bytes, INFO_AT)?,
            unordered: u16_at(bytes, INFO_AT + 2)? & ffi::UNORDERED != 0,
            data: Bytes::copy_from_slice(bytes.get(DATA_AT..)?),
        },
        sent: u16_at(bytes, 2)? & notice::DATA_SENT != 0,
    })
}

/// What the stack knows a socket by: its port's number within the endpoint, and the number of the endpoint's queue.
pub fn ulp_info(port: u32, queue: u32) -> *mut c_void {
    (u64::from(port) << 32 | u64::from(queue)) as *mut c_void
}

/// The stack's receive callback.
pub unsafe extern "C" fn receive(
    _socket: *mut Socket,
    _address: SockStore,
    data: *mut c_void,
    length: size_t,
    info: RcvInfo,
    flags: c_int,
    ulp_info: *mut c_void,
) -> c_int {
    if data.is_null() {
        return 1;
    }
    // SAFETY: the stack calls back inside calls of ours only, under the lock.
    let inner = unsafe { INNER.assume_locked() };
    // SAFETY: the stack gives `length` readable bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) };
    let mut queues = inner.queues.borrow_mut();
    let (port, queue) = ((ulp_info as u64 >> 32) as u32, ulp_info as u32);
    if let Some(Some(queue)) = queues.get_mut(queue as usize) {
        if flags & ffi::MSG_NOTIFICATION != 0 {
            queue.notice(port, bytes);
        } else {
            queue.message(port, bytes, &info, flags & libc::MSG_EOR != 0);
        }
    }
    // SAFETY: `malloc` gave the buffer, and the callback owns it.
    unsafe { libc::free(data) };
    1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::File;

    fn queue() -> Queue {
        Queue::new(File::open("/dev/null").expect("a descriptor").into(), 1000)
    }

    fn info(assoc: u32) -> RcvInfo {
        RcvInfo {
            sid: 1,
            ssn: 0,
            flags: 0,
            ppid: 11u32.to_be(),
            tsn: 0,
            cumtsn: 0,
            context: 0,
            assoc,
        }
    }

    #[test]
    fn pieces_become_messages_per_association() {
        let mut queue = queue();
        queue.message(0, b"a", &info(1), false);
        queue.message(0, b"x", &info(2), true);
        queue.message(0, b"b", &info(1), true);
        let texts: Vec<_> = queue
            .events
            .iter()
            .map(|event| match event {
                Event::Message { assoc, message } => (assoc.0, message.data.to_vec()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(texts, [(2, b"x".to_vec()), (1, b"ab".to_vec())]);
    }

    #[test]
    fn a_message_without_end_is_cut_off() {
        let mut queue = queue();
        queue.message(0, &[0; 600], &info(1), false);
        queue.message(0, &[0; 600], &info(1), false);
        assert_eq!(queue.too_long, [AssocId(1)]);
        queue.message(0, &[0; 1001], &info(2), true);
        assert_eq!(queue.too_long.len(), 2);
        assert!(queue.events.is_empty() && queue.partial.is_empty());
    }

    proptest! {
        #[test]
        fn any_notice_is_read_or_left(kind in 0u16..16, rest: Vec<u8>) {
            let mut bytes = kind.to_ne_bytes().to_vec();
            bytes.extend(rest);
            queue().notice(0, &bytes);
        }
    }
}
