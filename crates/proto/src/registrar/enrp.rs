//! ENRP (RFC 5353): messages of peers, and multicast datagrams.

use super::associations::is_registrar_permitted;
use super::dials::DialPurpose;
use super::{AssociationId, PoolProtocol, Registrar};
use bytes::Bytes;
use holdfast_wire::rserpool::RegistrarId;
use holdfast_wire::rserpool::enrp::{EnrpBody, Message};
use std::net::SocketAddr;
use std::time::Duration;

const ERROR: u8 = 0x0a;

impl Registrar {
    /// Handles an ENRP message of an association.
    pub fn handle_enrp(&mut self, now: Duration, from: AssociationId, bytes: &Bytes) {
        let Some(association) = self.associations.get(from) else {
            return;
        };
        if !association.may_be_registrar {
            self.counters.access_denied += 1;
            self.outbox
                .report_ignored(Some(from), PoolProtocol::Enrp, "not an allowed registrar");
            return self.abort(from, "not an allowed registrar");
        }
        match Message::parse(bytes) {
            Ok(parsed) => {
                self.on_first_message(from);
                let Message {
                    sender,
                    receiver,
                    body,
                } = parsed.message;
                let is_error = matches!(body, EnrpBody::Error(_));
                if !is_error {
                    self.outbox.send_enrp_errors(from, sender, parsed.reports);
                }
                if self.is_from_peer(now, from, sender, receiver) {
                    self.on_enrp_message(now, from, sender, receiver, body);
                }
            }
            Err(error) => {
                // An error is never answered with an error.
                if bytes.first() != Some(&ERROR) {
                    self.outbox
                        .send_enrp_errors(from, RegistrarId(0), error.reports);
                }
                self.on_malformed(from, PoolProtocol::Enrp, error.kind);
            }
        }
    }

    /// Returns true if a message comes from a peer and is for this registrar. RFC 5353 section 3.4.1: "If a message of
    /// any type is received from a previously unknown peer, the ENRP server MUST consider this peer a new peer".
    fn is_from_peer(
        &mut self,
        now: Duration,
        from: AssociationId,
        sender: RegistrarId,
        receiver: RegistrarId,
    ) -> bool {
        let own_id = self.config.id;
        let bound = self.associations.get(from).and_then(|from| from.peer);
        let refusal = if sender.0 == 0 || sender == own_id {
            "the sender's registrar number is 0 or this registrar's"
        } else if receiver.0 != 0 && receiver != own_id {
            "addressed to another registrar"
        } else if bound.is_some_and(|bound| bound != sender) {
            "the association belongs to another registrar"
        } else {
            let new = !self.peers.contains(sender);
            if !self.add_peer(now, sender) {
                self.outbox
                    .report_ignored(Some(from), PoolProtocol::Enrp, "too many registrars");
                return false;
            }
            self.bind_association(now, from, sender);
            self.on_peer_heard(now, sender);
            if new {
                self.send_presence(from, sender, true);
            }
            return true;
        };
        self.outbox
            .report_ignored(Some(from), PoolProtocol::Enrp, refusal);
        false
    }

    fn on_enrp_message(
        &mut self,
        now: Duration,
        from: AssociationId,
        sender: RegistrarId,
        receiver: RegistrarId,
        body: EnrpBody,
    ) {
        match body {
            EnrpBody::HandleUpdate {
                takeover_suggested,
                action,
                handle,
                element,
            } => {
                let suggested = takeover_suggested && receiver == self.config.id;
                self.on_handle_update(now, from, sender, action, &handle, element, suggested);
            }
            EnrpBody::Presence {
                reply_required,
                checksum,
                server,
            } => {
                if reply_required {
                    self.send_presence(from, sender, false);
                }
                self.on_presence(now, sender, checksum, server);
            }
            EnrpBody::HandleTableRequest { own_only } => {
                self.on_table_request(now, from, sender, own_only);
            }
            EnrpBody::HandleTableResponse {
                rejected,
                more,
                entries,
            } => self.on_sync_table(now, from, sender, (!rejected).then_some((more, entries))),
            EnrpBody::ListRequest => {
                // "MUST reject the request" while starting.
                let ready = self.is_ready();
                let servers = if ready {
                    self.server_list()
                } else {
                    Vec::new()
                };
                let rejected = !ready;
                let body = EnrpBody::ListResponse { rejected, servers };
                self.outbox.send_enrp(from, sender, body);
            }
            EnrpBody::ListResponse { rejected, servers } => {
                if !rejected {
                    self.learn_list(now, servers);
                }
                self.on_mentor_list(now, from, sender, rejected);
            }
            EnrpBody::InitTakeover { target } => self.on_init_takeover(now, from, sender, target),
            EnrpBody::InitTakeoverAck { target } => self.on_takeover_ack(now, sender, target),
            EnrpBody::TakeoverServer { target } => self.on_takeover_server(now, sender, target),
            EnrpBody::Error(causes) => self.outbox.report_errors(from, PoolProtocol::Enrp, &causes),
        }
    }

    /// Handles a multicast datagram. A datagram's source can be forged: it is ignored unless the settings allow it, and
    /// then only suggests that a registrar may exist. The registrar identifies itself over an association.
    pub fn handle_multicast(
        &mut self,
        now: Duration,
        source: SocketAddr,
        protocol: PoolProtocol,
        bytes: &Bytes,
    ) {
        let config = &self.config;
        let address = source.ip().to_canonical();
        let settings = &config.settings;
        let accepted = is_registrar_permitted(address, settings, &config.mentors)
            && match protocol {
                PoolProtocol::Enrp => {
                    settings.enrp_multicast && self.on_multicast_presence(now, bytes)
                }
                PoolProtocol::Asap => {
                    settings.announce_cycle.is_some() && self.on_multicast_announce(now, bytes)
                }
            };
        self.counters.multicast_ignored += u64::from(!accepted);
    }

    /// Handles a multicast presence; returns false if it has no use.
    fn on_multicast_presence(&mut self, now: Duration, bytes: &Bytes) -> bool {
        let Ok(parsed) = Message::parse(bytes) else {
            self.counters.malformed += 1;
            return false;
        };
        let Message { sender, body, .. } = parsed.message;
        // The checksum is ignored: datagrams are not ordered with the updates, so a comparison would mean nothing.
        let EnrpBody::Presence {
            server: Some(server),
            ..
        } = body
        else {
            return false;
        };
        if sender == self.config.id {
            return true;
        }
        if sender.0 == 0 || server.id != sender {
            return false;
        }
        if self.startup.is_hunting() {
            self.on_mentor_found(now, &server.transport);
        } else {
            match self.peers.get(sender) {
                None => return self.dial_unknown_peer(now, &server.transport),
                Some(peer) if peer.association.is_some() => {}
                Some(_) => self.set_peer_transport(sender, &server.transport),
            }
        }
        true
    }

    /// Asks registrars with an association to identify themselves: the first request is lost if a buffer was full.
    pub(super) fn ask_unknown_registrars(&mut self) {
        for to in self.associations.unknown_registrars() {
            self.send_presence(to, RegistrarId(0), true);
        }
    }

    /// Connects to possible registrars at configured addresses.
    pub(super) fn dial_mentors(&mut self) {
        let mentors = self.config.mentors.clone();
        for mentor in mentors {
            let association = self.associations.find(PoolProtocol::Enrp, &mentor);
            let listed = self.peers.has_peer_at(&mentor);
            if association.is_none() && !listed {
                self.dial(PoolProtocol::Enrp, mentor, DialPurpose::ConfiguredPeer);
            }
        }
    }
}
