//! The event loop: feeds events to the machine, carries out its outputs, and flushes all sockets.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, Output, PoolProtocol, Registrar};
use holdfast_sctp::{AssocId, MessageToSend, PathState, TransportEndpoint, TransportEvent};

use super::adaptive_batch_delay::AdaptiveBatchDelay;
use super::asap_tcp_streams::StreamsStatus;
use super::associations::{AssociationLookup, AssociationTable, association_id, endpoint_of};
use super::backlog::Backlog;
use super::control::{RegistrarRequest, ReloadedConfig};
use super::event_log::log_event;
use crate::mailbox::Inbox;
use crate::multicast::MulticastGroups;

/// A registrar with its sockets.
pub(super) struct RegistrarEventLoop {
    pub(super) machine: Registrar,
    pub(super) started: Instant,
    pub(super) asap: Box<dyn TransportEndpoint>,
    pub(super) enrp: Box<dyn TransportEndpoint>,
    pub(super) groups: MulticastGroups<PoolProtocol>,
    pub(super) links: AssociationTable,
    /// UDP ports of peers with their own, and of all other hosts.
    pub(super) encapsulations: HashMap<SocketAddr, u16>,
    pub(super) remote_encapsulation: Option<u16>,
    /// Messages that wait for room in peers' buffers.
    pub(super) backlog: Backlog,
    pub(super) batch_delay: AdaptiveBatchDelay,
    pub(super) requests: Inbox<RegistrarRequest>,
    /// State of TCP and TLS of `asap`.
    pub(super) streams: StreamsStatus,
    /// Number of messages to elements and users for which an association's buffer had no room.
    pub(super) sends_refused: u64,
    pub(super) next_round_trip_check: Duration,
    /// Buffer that is reused.
    pub(super) events: Vec<TransportEvent>,
}

impl RegistrarEventLoop {
    /// Runs until a stop request.
    ///
    /// # Errors
    /// The sockets of the transport are unusable.
    pub(super) fn run(&mut self) -> io::Result<()> {
        loop {
            self.execute_outputs();
            self.send_backlog();
            self.asap.flush()?;
            self.enrp.flush()?;
            let ready = match self.batch_delay.next_batch_delay(self.now()) {
                Some(pause) => self.collect_requests(pause)?,
                None => self.wait()?,
            };
            let now = self.now();
            if ready.asap {
                self.receive(now, PoolProtocol::Asap)?;
            }
            if ready.enrp {
                self.receive(now, PoolProtocol::Enrp)?;
            }
            if ready.groups {
                let machine = &mut self.machine;
                self.groups.receive(|source, protocol, bytes| {
                    machine.handle_multicast(now, source, protocol, bytes);
                });
            }
            if self.machine.poll_timeout().is_some_and(|at| at <= now) {
                self.machine.handle_timeout(now);
            }
            if self.next_round_trip_check <= now {
                self.measure_round_trips(now);
            }
            if ready.wake && !self.handle_requests() {
                return self.abort_all();
            }
        }
    }

    /// Sends messages to peers. A peer that does not take them loses its association, and resynchronises over the next
    /// one.
    fn send_backlog(&mut self) {
        let now = self.now();
        let enrp = self.enrp.as_mut();
        self.backlog.send_due(now, &mut |assocs, messages, taken| {
            enrp.send_bundles(assocs, messages, taken);
        });
        while let Some(stuck) = self.backlog.pop_stuck_peer(now) {
            tracing::warn!("a registrar does not take its updates: aborting its association");
            self.abort(association_id(PoolProtocol::Enrp, stuck));
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn endpoint(&mut self, protocol: PoolProtocol) -> &mut dyn TransportEndpoint {
        match protocol {
            PoolProtocol::Asap => self.asap.as_mut(),
            PoolProtocol::Enrp => self.enrp.as_mut(),
        }
    }

    fn receive(&mut self, now: Duration, protocol: PoolProtocol) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        self.endpoint(protocol).recv_batch(&mut events)?;
        let mut remaining = events.drain(..);
        for ahead in 0..Registrar::PREFETCH_DISTANCE {
            self.prefetch(protocol, remaining.as_slice().get(ahead));
        }
        while let Some(event) = remaining.next() {
            let ahead = remaining.as_slice().get(Registrar::PREFETCH_DISTANCE - 1);
            self.prefetch(protocol, ahead);
            self.handle_endpoint_event(now, protocol, event);
            // Carried out after each event, because the next event may reuse an association's number.
            self.execute_outputs();
        }
        drop(remaining);
        self.events = events;
        Ok(())
    }

    fn prefetch(&mut self, protocol: PoolProtocol, event: Option<&TransportEvent>) {
        self.machine.announce_message(match event {
            Some(TransportEvent::Message { message, .. }) => Some((protocol, &message.data)),
            _ => None,
        });
    }

    fn handle_endpoint_event(
        &mut self,
        now: Duration,
        protocol: PoolProtocol,
        event: TransportEvent,
    ) {
        match event {
            TransportEvent::Message { assoc, message } => {
                let from = association_id(protocol, assoc);
                if protocol == PoolProtocol::Asap {
                    self.batch_delay.count_request(from);
                }
                match protocol {
                    _ if message.ppid != protocol.ppid() && message.ppid != 0 => {
                        self.machine.handle_unknown_protocol(now, from);
                    }
                    PoolProtocol::Asap => self.machine.handle_asap(now, from, &message.data),
                    PoolProtocol::Enrp => self.machine.handle_enrp(now, from, &message.data),
                }
            }
            TransportEvent::Up { assoc, .. } => self.on_up(now, protocol, assoc),
            TransportEvent::Restarted { assoc } => {
                self.drop_backlog(protocol, assoc);
                self.machine
                    .handle_restarted(now, association_id(protocol, assoc));
            }
            TransportEvent::Down { assoc, .. } => {
                self.drop_backlog(protocol, assoc);
                let id = association_id(protocol, assoc);
                let (dials, was_up) = self.links.remove(id);
                if was_up {
                    self.machine.handle_association_down(now, id);
                }
                for dial in dials {
                    self.machine.handle_dial_failed(now, dial);
                }
            }
            TransportEvent::SendFailed { assoc, message, .. } => {
                let to = association_id(protocol, assoc);
                self.machine.handle_send_failed(to, protocol, &message.data);
            }
            TransportEvent::Refused {
                remote,
                reason: why,
            } => self.streams.failed_connections.record(remote, &why),
            TransportEvent::Path { assoc, state, .. } => {
                use PathState::{Added, Confirmed, Removed};
                if matches!(state, Added | Confirmed | Removed) {
                    self.on_addresses_changed(now, protocol, assoc);
                }
            }
        }
    }

    /// Drops messages for an association that has ended, so that its number's next user does not get them.
    fn drop_backlog(&mut self, protocol: PoolProtocol, assoc: AssocId) {
        if protocol == PoolProtocol::Enrp {
            self.backlog.forget(assoc);
        }
    }

    fn on_up(&mut self, now: Duration, protocol: PoolProtocol, assoc: AssocId) {
        // An association without addresses is already gone, and an event will report it.
        let Ok(addresses) = self.endpoint(protocol).confirmed_addresses(assoc) else {
            return;
        };
        let id = association_id(protocol, assoc);
        let dials = self.links.mark_up(id, &addresses);
        if dials.is_empty() {
            self.machine
                .handle_association_up(now, id, protocol, &addresses, None);
        }
        for dial in dials {
            let dial = Some(dial);
            self.machine
                .handle_association_up(now, id, protocol, &addresses, dial);
        }
        if let Some(name) = self.endpoint(protocol).peer_name(assoc) {
            self.machine.handle_certificate_name(id, name);
        }
        // The handshake's round trip counts for an element's first registration. Only the dialling side measured it
        // during the handshake; the accepting side starts a measurement.
        self.report_round_trip(now, protocol, assoc);
        self.endpoint(protocol).measure_round_trip(assoc);
        self.report_addresses(now, protocol, assoc, &addresses);
    }

    /// Handles a change in an association's addresses.
    fn on_addresses_changed(&mut self, now: Duration, protocol: PoolProtocol, assoc: AssocId) {
        let id = association_id(protocol, assoc);
        // An association that is not up yet reports its addresses when it is.
        if !self.links.is_up(id) {
            return;
        }
        if let Ok(addresses) = self.endpoint(protocol).confirmed_addresses(assoc) {
            self.links.set_addresses(id, &addresses);
            self.report_addresses(now, protocol, assoc, &addresses);
        }
    }

    /// Reports an association's addresses, with the confirmed ones, to the machine, if there are several.
    fn report_addresses(
        &mut self,
        now: Duration,
        protocol: PoolProtocol,
        assoc: AssocId,
        confirmed: &[SocketAddr],
    ) {
        let Ok(mut claimed) = self.endpoint(protocol).remote_addresses(assoc) else {
            return;
        };
        if claimed.len() > 1 {
            claimed.retain(|address| !confirmed.contains(address));
            let id = association_id(protocol, assoc);
            self.machine.handle_addresses(now, id, confirmed, &claimed);
        }
    }

    /// Carries out the machine's outputs, including those that follow from them.
    fn execute_outputs(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send {
                    to,
                    protocol,
                    message,
                } => self.send(to, protocol, message),
                Output::SendMany {
                    to,
                    protocol: PoolProtocol::Enrp,
                    message,
                } => {
                    let message = MessageToSend::new(PoolProtocol::Enrp.ppid(), message);
                    self.backlog.push_all(&to, message);
                }
                Output::SendMany {
                    to,
                    protocol,
                    message,
                } => to
                    .iter()
                    .for_each(|to| self.send(*to, protocol, message.clone())),
                Output::Connect {
                    dial,
                    protocol,
                    addresses,
                } => self.connect(dial, protocol, addresses),
                Output::Multicast { protocol, message } => self.groups.send(protocol, &message),
                Output::Measure(id) => self.links.add_to_rota(id),
                Output::Abort(id) => self.abort(id),
                Output::Event(event) => log_event(&event),
            }
        }
    }

    fn send(&mut self, to: AssociationId, protocol: PoolProtocol, message: Bytes) {
        let (_, assoc) = endpoint_of(to);
        let message = MessageToSend::new(protocol.ppid(), message);
        match protocol {
            PoolProtocol::Asap => {
                let refused = self.asap.send(assoc, &message).is_err();
                self.sends_refused += u64::from(refused);
            }
            PoolProtocol::Enrp => self.backlog.push(assoc, message),
        }
    }

    fn connect(&mut self, dial: DialId, protocol: PoolProtocol, addresses: Vec<SocketAddr>) {
        let now = self.now();
        match self.links.find(protocol, &addresses, dial) {
            AssociationLookup::Connecting => return,
            AssociationLookup::Up(id, addresses) => {
                let dial = Some(dial);
                return self
                    .machine
                    .handle_association_up(now, id, protocol, &addresses, dial);
            }
            AssociationLookup::Absent => {}
        }
        let own_port = |address| self.encapsulations.get(address).copied();
        let port = addresses
            .iter()
            .find_map(own_port)
            .or(self.remote_encapsulation);
        match self.endpoint(protocol).connect(&addresses, port) {
            Ok(assoc) => self
                .links
                .add(association_id(protocol, assoc), addresses, dial),
            Err(error) => {
                tracing::debug!(%error, ?addresses, "cannot connect");
                self.machine.handle_dial_failed(now, dial);
            }
        }
    }

    fn abort(&mut self, id: AssociationId) {
        let (protocol, assoc) = endpoint_of(id);
        // If the association is already gone, an event reports it.
        let _ = self.endpoint(protocol).abort(assoc);
    }

    /// Answers operators' requests. Returns false for a stop request.
    fn handle_requests(&mut self) -> bool {
        self.requests.clear_wakeup();
        while let Some(request) = self.requests.pop() {
            if !self.handle_request(request) {
                return false;
            }
        }
        true
    }

    pub(super) fn reload(&mut self, (settings, security): ReloadedConfig) {
        tracing::info!("reloaded the settings");
        if let Some(security) = security {
            self.asap.replace_security(security);
        }
        self.machine.handle_settings(self.now(), settings);
    }

    /// Aborts all associations, so that elements, users and peers learn of the end at once.
    fn abort_all(&mut self) -> io::Result<()> {
        let enrp = self.enrp.as_mut();
        self.backlog.send_all(&mut |assocs, messages, taken| {
            enrp.send_bundles(assocs, messages, taken);
        });
        let associations: Vec<_> = self.links.ids().collect();
        for id in associations {
            self.abort(id);
        }
        self.asap.flush()?;
        self.enrp.flush()
    }
}
