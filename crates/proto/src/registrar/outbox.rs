//! Outputs of the registrar, each encoded once.

use super::{AssociationId, Event, Output, PoolProtocol};
use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::{
    CauseCode, EncodeError, ErrorCause, PoolHandle, RegistrarId, asap, enrp,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// Size of the chunks into which messages are written one behind the other; the slices of a chunk share it.
const CHUNK_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(super) struct RegistrarOutbox {
    id: RegistrarId,
    queue: VecDeque<Output>,
    buffer: BytesMut,
    /// The associations of all connected peers.
    peers: Arc<[AssociationId]>,
    /// Changes with every change of `peers`.
    peers_version: u32,
}

impl RegistrarOutbox {
    pub(super) fn new(id: RegistrarId) -> RegistrarOutbox {
        RegistrarOutbox {
            id,
            queue: VecDeque::new(),
            buffer: BytesMut::with_capacity(CHUNK_BYTES),
            peers: Arc::new([]),
            peers_version: 0,
        }
    }

    /// Sets the associations of all connected peers.
    pub(super) fn set_peers(&mut self, peers: impl Iterator<Item = AssociationId>) {
        self.peers = peers.collect();
        self.peers_version = self.peers_version.wrapping_add(1);
    }

    /// Returns true if peers are connected.
    #[inline]
    pub(super) fn has_peers(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Returns a number that changes with the connected peers.
    #[inline]
    pub(super) fn peers_version(&self) -> u32 {
        self.peers_version
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<Output> {
        self.queue.pop_front()
    }

    #[inline]
    pub(super) fn push(&mut self, output: Output) {
        self.queue.push_back(output);
    }

    pub(super) fn push_event(&mut self, event: Event) {
        self.push(Output::Event(event));
    }

    /// Returns the bytes that `write` appends.
    #[inline]
    fn encode(
        &mut self,
        write: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
    ) -> Result<Bytes, EncodeError> {
        write(&mut self.buffer)?;
        Ok(self.buffer.split().freeze())
    }

    /// Sends an ASAP message.
    #[inline]
    pub(super) fn send_asap(
        &mut self,
        to: AssociationId,
        message: &asap::Message,
    ) -> Result<(), EncodeError> {
        self.send_asap_with(to, |buffer| message.encode(buffer))
    }

    /// Sends the ASAP message that `write` appends.
    #[inline]
    pub(super) fn send_asap_with(
        &mut self,
        to: AssociationId,
        write: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let message = self.encode(write)?;
        self.push(Output::Send {
            to,
            protocol: PoolProtocol::Asap,
            message,
        });
        Ok(())
    }

    /// Returns the last message, if it was the last output.
    #[inline]
    pub(super) fn last_message(&self) -> Option<&Bytes> {
        match self.queue.back()? {
            Output::Send { message, .. } | Output::SendMany { message, .. } => Some(message),
            _ => None,
        }
    }

    /// Sends the bytes of an earlier ASAP message.
    #[inline]
    pub(super) fn resend_asap(&mut self, to: AssociationId, message: &[u8]) {
        let _ = self.send_asap_with(to, |buffer| {
            buffer.extend_from_slice(message);
            Ok(())
        });
    }

    /// Sends the bytes of an earlier ENRP message to all peers.
    #[inline]
    pub(super) fn resend_to_peers(&mut self, message: &[u8]) {
        if !self.peers.is_empty() {
            self.buffer.extend_from_slice(message);
            let message = self.buffer.split().freeze();
            self.send_to_peers(message);
        }
    }

    #[inline]
    fn send_to_peers(&mut self, message: Bytes) {
        self.push(Output::SendMany {
            to: self.peers.clone(),
            protocol: PoolProtocol::Enrp,
            message,
        });
    }

    /// Sends the ENRP message that `write` appends.
    pub(super) fn send_enrp_with(
        &mut self,
        to: AssociationId,
        write: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
    ) {
        // Messages of a registrar about itself are short and have addresses: encoding cannot fail.
        if let Ok(message) = self.encode(write) {
            self.push(Output::Send {
                to,
                protocol: PoolProtocol::Enrp,
                message,
            });
        }
    }

    /// Sends an ENRP message to one peer.
    pub(super) fn send_enrp(
        &mut self,
        to: AssociationId,
        receiver: RegistrarId,
        body: enrp::EnrpBody,
    ) {
        let message = enrp::Message {
            sender: self.id,
            receiver,
            body,
        };
        self.send_enrp_with(to, |buffer| message.encode(buffer));
    }

    /// Sends an ENRP message to all peers, encoded once, and returns its body. RFC 5353 section 3.3.1: "leave the
    /// Receiving Server's ID blank".
    pub(super) fn announce_to_peers(&mut self, body: enrp::EnrpBody) -> enrp::EnrpBody {
        let message = enrp::Message {
            sender: self.id,
            receiver: RegistrarId(0),
            body,
        };
        if let [_, ..] = *self.peers
            && let Ok(bytes) = self.encode(|buffer| message.encode(buffer))
        {
            self.send_to_peers(bytes);
        }
        message.body
    }

    /// Sends an ENRP message by multicast.
    pub(super) fn multicast_enrp(&mut self, body: enrp::EnrpBody) {
        let message = enrp::Message {
            sender: self.id,
            receiver: RegistrarId(0),
            body,
        };
        if let Ok(message) = self.encode(|buffer| message.encode(buffer)) {
            let protocol = PoolProtocol::Enrp;
            self.push(Output::Multicast { protocol, message });
        }
    }

    /// Sends an ASAP message by multicast.
    pub(super) fn multicast_asap(&mut self, message: &asap::Message) {
        if let Ok(message) = self.encode(|buffer| message.encode(buffer)) {
            let protocol = PoolProtocol::Asap;
            self.push(Output::Multicast { protocol, message });
        }
    }

    /// Reports unrecognised parameters to the sender in an error message (RFC 5354 section 3).
    pub(super) fn send_asap_errors(&mut self, to: AssociationId, causes: Vec<ErrorCause>) {
        if !causes.is_empty() {
            // Causes too long for a message are dropped.
            let _ = self.send_asap(to, &asap::Message::Error(causes));
        }
    }

    /// Answers a resolution with a cause.
    pub(super) fn refuse_resolution(
        &mut self,
        to: AssociationId,
        handle: PoolHandle,
        cause: CauseCode,
    ) {
        let message = asap::Message::HandleResolutionResponse {
            updates: false,
            handle,
            policy: None,
            elements: Vec::new(),
            causes: vec![cause.into()],
        };
        let _ = self.send_asap(to, &message);
    }

    /// Reports unrecognised parameters to the sender in an error message (RFC 5354 section 3).
    pub(super) fn send_enrp_errors(
        &mut self,
        to: AssociationId,
        receiver: RegistrarId,
        causes: Vec<ErrorCause>,
    ) {
        if !causes.is_empty() {
            self.send_enrp(to, receiver, enrp::EnrpBody::Error(causes));
        }
    }

    /// Reports that a message was ignored.
    pub(super) fn report_ignored(
        &mut self,
        from: Option<AssociationId>,
        protocol: PoolProtocol,
        reason: &'static str,
    ) {
        self.push_event(Event::Ignored {
            from,
            protocol,
            reason,
        });
    }

    /// Reports errors that the other side has sent.
    pub(super) fn report_errors(
        &mut self,
        from: AssociationId,
        protocol: PoolProtocol,
        causes: &[ErrorCause],
    ) {
        let causes = causes.iter().map(|cause| cause.code).collect();
        self.push_event(Event::ErrorReported {
            from,
            protocol,
            causes,
        });
    }
}
