//! ENRP (RFC 5353): messages of peers, and multicast datagrams.

use super::associations::is_registrar;
use super::dial::Purpose;
use super::schedule::Timer;
use super::{AssociationId, Protocol, Registrar};
use bytes::Bytes;
use holdfast_wire::rserpool::enrp::{Body, Message};
use holdfast_wire::rserpool::{Cause, RegistrarId, asap};
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
            self.counters.denied += 1;
            self.ignored(Some(from), Protocol::Enrp, "not an allowed registrar");
            return self.abort(from, "not an allowed registrar");
        }
        match Message::parse(bytes) {
            Ok(parsed) => {
                self.spoke(from);
                let Message {
                    sender,
                    receiver,
                    body,
                } = parsed.message;
                let is_error = matches!(body, Body::Error(_));
                if !is_error {
                    self.enrp_report(from, sender, parsed.reports);
                }
                if self.is_peers(now, from, sender, receiver) {
                    self.enrp_message(now, from, sender, receiver, body);
                }
            }
            Err(error) => {
                // An error is never answered with an error.
                if bytes.first() != Some(&ERROR) {
                    self.enrp_report(from, RegistrarId(0), error.reports);
                }
                self.malformed(from, Protocol::Enrp, error.kind);
            }
        }
    }

    fn enrp_report(&mut self, to: AssociationId, receiver: RegistrarId, causes: Vec<Cause>) {
        if !causes.is_empty() {
            self.out.enrp(to, receiver, Body::Error(causes));
        }
    }

    /// Returns true if a message comes from a peer and is for this registrar. RFC 5353 section 3.4.1: "If a message of
    /// any type is received from a previously unknown peer, the ENRP server MUST consider this peer a new peer".
    fn is_peers(
        &mut self,
        now: Duration,
        from: AssociationId,
        sender: RegistrarId,
        receiver: RegistrarId,
    ) -> bool {
        let own = self.config.id;
        let bound = self.associations.get(from).and_then(|from| from.peer);
        let why = if sender.0 == 0 || sender == own {
            "the sender's number is none, or this registrar's"
        } else if receiver.0 != 0 && receiver != own {
            "meant for another registrar"
        } else if bound.is_some_and(|bound| bound != sender) {
            "the association is another registrar's"
        } else {
            let new = !self.peers.contains_key(&sender);
            if !self.know(now, sender) {
                self.ignored(Some(from), Protocol::Enrp, "too many registrars");
                return false;
            }
            self.bind(now, from, sender);
            self.heard(now, sender);
            if new {
                self.send_presence(from, sender, true);
            }
            return true;
        };
        self.ignored(Some(from), Protocol::Enrp, why);
        false
    }

    fn enrp_message(
        &mut self,
        now: Duration,
        from: AssociationId,
        sender: RegistrarId,
        receiver: RegistrarId,
        body: Body,
    ) {
        match body {
            Body::HandleUpdate {
                takeover_suggested,
                action,
                handle,
                element,
            } => {
                let suggested = takeover_suggested && receiver == self.config.id;
                self.update(now, from, sender, action, &handle, element, suggested);
            }
            Body::Presence {
                reply_required,
                checksum,
                server,
            } => {
                if reply_required {
                    self.send_presence(from, sender, false);
                }
                self.present(now, sender, checksum, server);
            }
            Body::HandleTableRequest { own_only } => {
                self.table_asked(now, from, sender, own_only);
            }
            Body::HandleTableResponse {
                rejected,
                more,
                entries,
            } => self.table_came(now, from, sender, (!rejected).then_some((more, entries))),
            Body::ListRequest => {
                // "MUST reject the request" while starting.
                let ready = self.is_ready();
                let servers = if ready { self.list() } else { Vec::new() };
                let rejected = !ready;
                let body = Body::ListResponse { rejected, servers };
                self.out.enrp(from, sender, body);
            }
            Body::ListResponse { rejected, servers } => {
                if !rejected {
                    self.learn_list(now, servers);
                }
                self.list_came(now, from, sender, rejected);
            }
            Body::InitTakeover { target } => self.takeover_asked(now, from, sender, target),
            Body::InitTakeoverAck { target } => self.takeover_granted(now, sender, target),
            Body::TakeoverServer { target } => self.taken_over(now, sender, target),
            Body::Error(causes) => self.told_errors(from, Protocol::Enrp, &causes),
        }
    }

    /// Handles a multicast datagram. A datagram's source can be forged: it is ignored unless the settings allow it, and
    /// then only suggests that a registrar may exist. The registrar identifies itself over an association.
    pub fn handle_multicast(
        &mut self,
        now: Duration,
        source: SocketAddr,
        protocol: Protocol,
        bytes: &Bytes,
    ) {
        let config = &self.config;
        let address = source.ip().to_canonical();
        let settings = &config.settings;
        let heeded = is_registrar(address, settings, &config.mentors)
            && match protocol {
                Protocol::Enrp => settings.enrp_multicast && self.presence_heard(now, bytes),
                Protocol::Asap => {
                    settings.announce_cycle.is_some() && self.announce_heard(now, bytes)
                }
            };
        self.counters.multicast_unheeded += u64::from(!heeded);
    }

    /// Handles a multicast presence; returns false if it has no use.
    fn presence_heard(&mut self, now: Duration, bytes: &Bytes) -> bool {
        let Ok(parsed) = Message::parse(bytes) else {
            self.counters.malformed += 1;
            return false;
        };
        let Message { sender, body, .. } = parsed.message;
        // The checksum is ignored: datagrams are not ordered with the updates, so a comparison would mean nothing.
        let Body::Presence {
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
        if self.hunts() {
            self.mentor_found(now, &server.transport);
        } else {
            match self.peers.get(&sender) {
                None => return self.call_stranger(now, &server.transport),
                Some(peer) if peer.association.is_some() => {}
                Some(_) => self.reached_at(sender, &server.transport),
            }
        }
        true
    }

    /// Handles a multicast announce; returns false if it does not count.
    fn announce_heard(&mut self, now: Duration, bytes: &Bytes) -> bool {
        let Ok(parsed) = asap::Message::parse(bytes) else {
            self.counters.malformed += 1;
            return false;
        };
        let asap::Message::ServerAnnounce { registrar, .. } = parsed.message else {
            return false;
        };
        // A registrar without an association may be made up, and each one makes this registrar's announces rarer.
        let known = self.peers.get(&registrar);
        if known.is_some_and(|peer| peer.association.is_some()) {
            self.announcers.insert(registrar, now);
            return true;
        }
        registrar == self.config.id
    }

    pub(super) fn start_announcing(&mut self, now: Duration) {
        match self.config.settings.announce_cycle {
            Some(_) => self.schedule.set(Timer::Announce, now),
            None => self.schedule.stop(Timer::Announce),
        }
    }

    /// Announces this registrar to elements and users. RFC 5352 section 3.6: "every (N+1)*T6-Serverannounce", N being
    /// the number of other registrars heard.
    pub(super) fn announce(&mut self, now: Duration) {
        let Some(cycle) = self.config.settings.announce_cycle else {
            return;
        };
        let others = self.announcers.len() as u32 + 1;
        let remembered = cycle * (2 * others);
        self.announcers
            .retain(|_, heard| *heard + remembered >= now);
        self.out.multicast_asap(&asap::Message::ServerAnnounce {
            registrar: self.config.id,
            transports: self.config.announced.clone(),
        });
        let next = now + cycle * (self.announcers.len() as u32 + 1);
        self.schedule.set(Timer::Announce, next);
    }

    /// Asks registrars with an association to identify themselves: the first request is lost if a buffer was full.
    pub(super) fn ask_unknown(&mut self) {
        for to in self.associations.unknown_registrars() {
            self.send_presence(to, RegistrarId(0), true);
        }
    }

    /// Connects to possible registrars at configured addresses.
    pub(super) fn dial_mentors(&mut self) {
        let mentors = self.config.mentors.clone();
        for mentor in mentors {
            let known = self.associations.find(Protocol::Enrp, &mentor);
            let listed = self.peers.values().any(|peer| {
                let transport = peer.transport.as_ref();
                transport.is_some_and(|transport| {
                    let has = |a: &SocketAddr| {
                        a.port() == transport.port
                            && transport.addresses.contains(&a.ip().to_canonical())
                    };
                    mentor.iter().any(has)
                })
            });
            if known.is_none() && !listed {
                self.dial(Protocol::Enrp, mentor, Purpose::Stranger);
            }
        }
    }
}
