//! Conversion of a stack's output to events: message pieces become messages, notifications of either layout become
//! events.

use super::event::{AssocId, DownReason, MessageToSend, PathState, TransportEvent};
use super::socket_api_layout::{u16_at, u32_at};
use bytes::{Bytes, BytesMut};
use holdfast_sys::address::RawAddress;
use std::collections::{HashMap, HashSet};

/// Length of one shared message buffer, bytes.
const ARENA_LEN: usize = 64 * 1024;
/// Length of `struct sctp_sndinfo`, the same in both stacks.
const SNDINFO_LEN: usize = 16;

/// SCTP constants that differ between Linux and usrsctp; the layouts of their notifications agree.
#[derive(Clone, Copy, Debug)]
pub struct SctpStackConstants {
    pub assoc_change: u16,
    pub path_change: u16,
    pub send_failed: u16,
    /// Smallest value of `sac_state` and of `spc_state`.
    pub first_state: u32,
    /// `SCTP_UNORDERED`.
    pub unordered: u16,
    /// `SCTP_DATA_SENT`.
    pub data_sent: u16,
}

/// Metadata of a message (`struct sctp_rcvinfo`).
#[derive(Clone, Copy, Debug)]
pub struct MessageInfo {
    pub assoc: AssocId,
    pub stream: u16,
    pub flags: u16,
    /// Payload protocol identifier in host order.
    pub ppid: u32,
}

/// Collected events that the endpoint has not fetched yet, and incomplete messages.
pub struct EventAssembler {
    pub events: Vec<TransportEvent>,
    /// Associations with a peer that sends a message over the limit.
    pub oversized: Vec<AssocId>,
    constants: SctpStackConstants,
    message_len_max: usize,
    arena: BytesMut,
    partial: HashMap<AssocId, BytesMut>,
    /// Associations that were `oversized` and have not ended yet: the rest of their message is discarded.
    discarding: HashSet<AssocId>,
}

impl EventAssembler {
    pub fn new(constants: SctpStackConstants, message_len_max: u32) -> Self {
        Self {
            events: Vec::new(),
            oversized: Vec::new(),
            constants,
            message_len_max: message_len_max as usize,
            arena: BytesMut::new(),
            partial: HashMap::new(),
            discarding: HashSet::new(),
        }
    }

    /// Adds a message, or a piece of one that is not the last.
    pub fn add_message(&mut self, bytes: &[u8], info: &MessageInfo, is_end: bool) {
        if !self.discarding.is_empty() && self.discarding.contains(&info.assoc) {
            return;
        }
        let is_first = self.partial.is_empty() || !self.partial.contains_key(&info.assoc);
        if is_end && is_first {
            let data = self.store(bytes);
            return self.push(info, data);
        }
        let pieces = self.partial.entry(info.assoc).or_default();
        if pieces.len() + bytes.len() > self.message_len_max {
            self.partial.remove(&info.assoc);
            return self.discard_message(info.assoc);
        }
        pieces.extend_from_slice(bytes);
        if is_end && let Some(whole) = self.partial.remove(&info.assoc) {
            self.push(info, whole.freeze());
        }
    }

    fn push(&mut self, info: &MessageInfo, data: Bytes) {
        if data.len() > self.message_len_max {
            return self.discard_message(info.assoc);
        }
        self.events.push(TransportEvent::Message {
            assoc: info.assoc,
            message: MessageToSend {
                ppid: info.ppid,
                stream: info.stream,
                unordered: info.flags & self.constants.unordered != 0,
                data,
            },
        });
    }

    fn discard_message(&mut self, assoc: AssocId) {
        self.oversized.push(assoc);
        self.discarding.insert(assoc);
    }

    /// Copies `bytes` to the shared buffer: one allocation serves hundreds of messages.
    fn store(&mut self, bytes: &[u8]) -> Bytes {
        if self.arena.capacity() < bytes.len() {
            self.arena = BytesMut::with_capacity(ARENA_LEN.max(bytes.len()));
        }
        self.arena.extend_from_slice(bytes);
        self.arena.split().freeze()
    }

    /// Handles a notification to the socket of `port`; ignores unknown and truncated ones.
    pub fn on_notification(&mut self, port: u32, bytes: &[u8]) {
        let constants = self.constants;
        let event = match u16_at(bytes, 0) {
            Some(kind) if kind == constants.assoc_change => constants.assoc_change(port, bytes),
            Some(kind) if kind == constants.path_change => constants.path_change(port, bytes),
            Some(kind) if kind == constants.send_failed => constants.send_failed(port, bytes),
            _ => None,
        };
        if let Some(TransportEvent::Down { assoc, .. } | TransportEvent::Restarted { assoc }) =
            event
        {
            self.partial.remove(&assoc);
            self.discarding.remove(&assoc);
        }
        // The stack may reuse an ID.
        if let Some(TransportEvent::Up { assoc, .. }) = event {
            self.discarding.remove(&assoc);
        }
        self.events.extend(event);
    }
}

impl SctpStackConstants {
    /// Parses a `struct sctp_assoc_change`.
    fn assoc_change(&self, port: u32, bytes: &[u8]) -> Option<TransportEvent> {
        let assoc = AssocId::new(port, u32_at(bytes, 16)?);
        let down = |reason| TransportEvent::Down { assoc, reason };
        let state = u32::from(u16_at(bytes, 8)?);
        Some(match state.checked_sub(self.first_state)? {
            0 => TransportEvent::Up {
                assoc,
                outbound_streams: u16_at(bytes, 12)?,
                inbound_streams: u16_at(bytes, 14)?,
            },
            1 => down(DownReason::Lost),
            2 => TransportEvent::Restarted { assoc },
            3 => down(DownReason::Shutdown),
            4 => down(DownReason::NotStarted),
            _ => return None,
        })
    }

    /// Parses a `struct sctp_paddr_change`.
    fn path_change(&self, port: u32, bytes: &[u8]) -> Option<TransportEvent> {
        const ADDRESS_OFFSET: usize = 8;
        const STATE_OFFSET: usize = ADDRESS_OFFSET + size_of::<libc::sockaddr_storage>();
        let (address, _) = RawAddress::split_from(bytes.get(ADDRESS_OFFSET..)?)?;
        let state = u32_at(bytes, STATE_OFFSET)?.checked_sub(self.first_state)?;
        Some(TransportEvent::Path {
            assoc: AssocId::new(port, u32_at(bytes, STATE_OFFSET + 8)?),
            address: address.to_socket_addr()?,
            state: PathState::from_number(state)?,
        })
    }

    /// Parses a `struct sctp_send_failed_event`.
    fn send_failed(&self, port: u32, bytes: &[u8]) -> Option<TransportEvent> {
        const INFO_OFFSET: usize = 12;
        const DATA_OFFSET: usize = INFO_OFFSET + SNDINFO_LEN + 4;
        Some(TransportEvent::SendFailed {
            assoc: AssocId::new(port, u32_at(bytes, INFO_OFFSET + SNDINFO_LEN)?),
            message: MessageToSend {
                ppid: u32::from_be(u32_at(bytes, INFO_OFFSET + 4)?),
                stream: u16_at(bytes, INFO_OFFSET)?,
                unordered: u16_at(bytes, INFO_OFFSET + 2)? & self.unordered != 0,
                data: Bytes::copy_from_slice(bytes.get(DATA_OFFSET..)?),
            },
            was_sent: u16_at(bytes, 2)? & self.data_sent != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CONSTANTS: SctpStackConstants = SctpStackConstants {
        assoc_change: 1,
        path_change: 2,
        send_failed: 14,
        first_state: 1,
        unordered: 0x400,
        data_sent: 2,
    };

    fn assembler() -> EventAssembler {
        EventAssembler::new(CONSTANTS, 1000)
    }

    fn info_of(assoc: u64) -> MessageInfo {
        MessageInfo {
            assoc: AssocId(assoc),
            stream: 1,
            flags: 0,
            ppid: 11,
        }
    }

    #[test]
    fn pieces_become_messages_per_association() {
        let mut assembly = assembler();
        assembly.add_message(b"a", &info_of(1), false);
        assembly.add_message(b"x", &info_of(2), true);
        assembly.add_message(b"b", &info_of(1), true);
        let texts: Vec<_> = assembly
            .events
            .iter()
            .map(|event| match event {
                TransportEvent::Message { assoc, message } => (assoc.0, message.data.to_vec()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(texts, [(2, b"x".to_vec()), (1, b"ab".to_vec())]);
    }

    #[test]
    fn message_without_end_is_discarded() {
        let mut assembly = assembler();
        assembly.add_message(&[0; 600], &info_of(1), false);
        assembly.add_message(&[0; 600], &info_of(1), false);
        assert_eq!(assembly.oversized, [AssocId(1)]);
        // The rest of the message is discarded.
        assembly.add_message(&[0; 100], &info_of(1), true);
        assembly.add_message(&[0; 1001], &info_of(2), true);
        assert_eq!(assembly.oversized.len(), 2);
        assert!(assembly.events.is_empty() && assembly.partial.is_empty());
    }

    #[test]
    fn lost_association_is_reported_down() {
        let mut bytes = [0; 20];
        bytes[0] = 1;
        bytes[8] = 2;
        bytes[16] = 7;
        let mut assembly = assembler();
        assembly.on_notification(3, &bytes);
        let expected = TransportEvent::Down {
            assoc: AssocId(3 << 32 | 7),
            reason: DownReason::Lost,
        };
        assert_eq!(assembly.events, [expected]);
    }

    proptest! {
        #[test]
        fn any_notification_bytes_are_handled(kind in 0u16..16, rest: Vec<u8>) {
            let mut bytes = kind.to_ne_bytes().to_vec();
            bytes.extend(rest);
            assembler().on_notification(0, &bytes);
        }
    }
}
