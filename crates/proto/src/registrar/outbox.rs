//! Outputs of the registrar, each encoded once.

use super::{AssociationId, Event, Output, Protocol};
use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::{EncodeError, RegistrarId, asap, enrp};
use std::collections::VecDeque;
use std::sync::Arc;

/// Size of the chunks into which messages are written one behind the other; the slices of a chunk share it.
const CHUNK: usize = 64 * 1024;

#[derive(Debug)]
pub(super) struct Outbox {
    id: RegistrarId,
    queue: VecDeque<Output>,
    buffer: BytesMut,
    /// The associations of all connected peers.
    pub(super) everybody: Arc<[AssociationId]>,
    /// Changes with every change of `everybody`.
    pub(super) audience: u32,
}

impl Outbox {
    pub(super) fn new(id: RegistrarId) -> Outbox {
        Outbox {
            id,
            queue: VecDeque::new(),
            buffer: BytesMut::with_capacity(CHUNK),
            everybody: Arc::new([]),
            audience: 0,
        }
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<Output> {
        self.queue.pop_front()
    }

    #[inline]
    pub(super) fn push(&mut self, output: Output) {
        self.queue.push_back(output);
    }

    pub(super) fn event(&mut self, event: Event) {
        self.push(Output::Event(event));
    }

    /// Returns the bytes that `write` appends.
    #[inline]
    fn encoded(
        &mut self,
        write: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
    ) -> Result<Bytes, EncodeError> {
        write(&mut self.buffer)?;
        Ok(self.buffer.split().freeze())
    }

    /// Sends an ASAP message.
    #[inline]
    pub(super) fn asap(
        &mut self,
        to: AssociationId,
        message: &asap::Message,
    ) -> Result<(), EncodeError> {
        self.asap_with(to, |buffer| message.encode(buffer))
    }

    /// Sends the ASAP message that `write` appends.
    #[inline]
    pub(super) fn asap_with(
        &mut self,
        to: AssociationId,
        write: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let message = self.encoded(write)?;
        self.push(Output::Send {
            to,
            protocol: Protocol::Asap,
            message,
        });
        Ok(())
    }

    /// Returns the last message, if it was the last output.
    #[inline]
    pub(super) fn newest(&self) -> Option<&Bytes> {
        match self.queue.back()? {
            Output::Send { message, .. } | Output::SendMany { message, .. } => Some(message),
            _ => None,
        }
    }

    /// Sends the bytes of an earlier ASAP message.
    #[inline]
    pub(super) fn repeat(&mut self, to: AssociationId, message: &[u8]) {
        let _ = self.asap_with(to, |buffer| {
            buffer.extend_from_slice(message);
            Ok(())
        });
    }

    /// Sends the bytes of an earlier ENRP message to all peers.
    #[inline]
    pub(super) fn repeat_to_all(&mut self, message: &[u8]) {
        if !self.everybody.is_empty() {
            self.buffer.extend_from_slice(message);
            let message = self.buffer.split().freeze();
            self.send_all(message);
        }
    }

    #[inline]
    fn send_all(&mut self, message: Bytes) {
        self.push(Output::SendMany {
            to: self.everybody.clone(),
            protocol: Protocol::Enrp,
            message,
        });
    }

    /// Sends the ENRP message that `write` appends.
    pub(super) fn enrp_with(
        &mut self,
        to: AssociationId,
        write: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
    ) {
        // Messages of a registrar about itself are short and have addresses: encoding cannot fail.
        if let Ok(message) = self.encoded(write) {
            self.push(Output::Send {
                to,
                protocol: Protocol::Enrp,
                message,
            });
        }
    }

    /// Sends an ENRP message to one peer.
    pub(super) fn enrp(&mut self, to: AssociationId, receiver: RegistrarId, body: enrp::Body) {
        let message = enrp::Message {
            sender: self.id,
            receiver,
            body,
        };
        self.enrp_with(to, |buffer| message.encode(buffer));
    }

    /// Sends an ENRP message to all peers, encoded once, and returns its body. RFC 5353 section 3.3.1: "leave the
    /// Receiving Server's ID blank".
    pub(super) fn announce(&mut self, body: enrp::Body) -> enrp::Body {
        let message = enrp::Message {
            sender: self.id,
            receiver: RegistrarId(0),
            body,
        };
        if let [_, ..] = *self.everybody
            && let Ok(bytes) = self.encoded(|buffer| message.encode(buffer))
        {
            self.send_all(bytes);
        }
        message.body
    }

    /// Sends an ENRP message by multicast.
    pub(super) fn multicast_enrp(&mut self, body: enrp::Body) {
        let message = enrp::Message {
            sender: self.id,
            receiver: RegistrarId(0),
            body,
        };
        if let Ok(message) = self.encoded(|buffer| message.encode(buffer)) {
            let protocol = Protocol::Enrp;
            self.push(Output::Multicast { protocol, message });
        }
    }

    /// Sends an ASAP message by multicast.
    pub(super) fn multicast_asap(&mut self, message: &asap::Message) {
        if let Ok(message) = self.encoded(|buffer| message.encode(buffer)) {
            let protocol = Protocol::Asap;
            self.push(Output::Multicast { protocol, message });
        }
    }
}
