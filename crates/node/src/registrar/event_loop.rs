//! The event loop: feeds events to the machine, carries out its outputs, and flushes all sockets.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_proto::registrar::{AssociationId, DialId, Output, Protocol, Registrar};
use holdfast_sys::transport::{AssocId, Endpoint, Event, Message, PathState};

use super::backlog::Backlog;
use super::control::{ControlRequest, Reread};
use super::links::{Found, Links, number, of_number};
use super::pace::Pace;
use super::report::report;
use super::streams::StreamsSeen;
use crate::mailbox::Inbox;
use crate::multicast::Groups;

/// A registrar with its sockets.
pub(super) struct Daemon {
    pub(super) machine: Registrar,
    pub(super) started: Instant,
    pub(super) asap: Box<dyn Endpoint>,
    pub(super) enrp: Box<dyn Endpoint>,
    pub(super) groups: Groups<Protocol>,
    pub(super) links: Links,
    /// UDP ports of peers with their own, and of all other hosts.
    pub(super) encapsulations: HashMap<SocketAddr, u16>,
    pub(super) remote_encapsulation: Option<u16>,
    /// Messages to peers.
    pub(super) backlog: Backlog,
    pub(super) pace: Pace,
    pub(super) requests: Inbox<ControlRequest>,
    /// State of TCP and TLS of `asap`.
    pub(super) streams: StreamsSeen,
    /// Number of messages to elements and users for which an association's buffer had no room.
    pub(super) sends_refused: u64,
    pub(super) next_round_trips: Duration,
    /// Buffer that is reused.
    pub(super) events: Vec<Event>,
}

impl Daemon {
    /// Runs until a stop request.
    ///
    /// # Errors
    /// The sockets of the transport are unusable.
    pub(super) fn run(&mut self) -> io::Result<()> {
        loop {
            self.carry_out();
            self.hand_over();
            self.asap.flush()?;
            self.enrp.flush()?;
            let ready = match self.pace.pause(self.now()) {
                Some(pause) => self.pause(pause)?,
                None => self.wait()?,
            };
            let now = self.now();
            if ready.asap {
                self.receive(now, Protocol::Asap)?;
            }
            if ready.enrp {
                self.receive(now, Protocol::Enrp)?;
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
            if self.next_round_trips <= now {
                self.ask_round_trips(now);
            }
            if ready.wake && !self.serve() {
                return self.leave();
            }
        }
    }

    /// Sends messages to peers. A peer that does not take them loses its association, and resynchronises over the next
    /// one.
    fn hand_over(&mut self) {
        let now = self.now();
        let enrp = self.enrp.as_mut();
        self.backlog.hand_over(now, &mut |assocs, messages, taken| {
            enrp.send_bundles(assocs, messages, taken);
        });
        while let Some(stuck) = self.backlog.give_up(now) {
            tracing::warn!("a registrar does not take its updates: its association ends");
            self.abort(number(Protocol::Enrp, stuck));
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn end(&mut self, protocol: Protocol) -> &mut dyn Endpoint {
        match protocol {
            Protocol::Asap => self.asap.as_mut(),
            Protocol::Enrp => self.enrp.as_mut(),
        }
    }

    fn receive(&mut self, now: Duration, protocol: Protocol) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        self.end(protocol).recv_batch(&mut events)?;
        let mut coming = events.drain(..);
        for ahead in 0..Registrar::AHEAD {
            self.expect(protocol, coming.as_slice().get(ahead));
        }
        while let Some(event) = coming.next() {
            let ahead = coming.as_slice().get(Registrar::AHEAD - 1);
            self.expect(protocol, ahead);
            self.feed(now, protocol, event);
            // Carried out after each event, because the next event may reuse an association's number.
            self.carry_out();
        }
        drop(coming);
        self.events = events;
        Ok(())
    }

    fn expect(&mut self, protocol: Protocol, event: Option<&Event>) {
        self.machine.expect(match event {
            Some(Event::Message { message, .. }) => Some((protocol, &message.data)),
            _ => None,
        });
    }

    fn feed(&mut self, now: Duration, protocol: Protocol, event: Event) {
        match event {
            Event::Message { assoc, message } => {
                let from = number(protocol, assoc);
                if protocol == Protocol::Asap {
                    self.pace.heard(from);
                }
                match protocol {
                    _ if message.ppid != protocol.ppid() && message.ppid != 0 => {
                        self.machine.handle_stray(now, from);
                    }
                    Protocol::Asap => self.machine.handle_asap(now, from, &message.data),
                    Protocol::Enrp => self.machine.handle_enrp(now, from, &message.data),
                }
            }
            Event::Up { assoc, .. } => self.up(now, protocol, assoc),
            Event::Restarted { assoc } => {
                self.forget(protocol, assoc);
                self.machine.handle_restarted(now, number(protocol, assoc));
            }
            Event::Down { assoc, .. } => {
                self.forget(protocol, assoc);
                let id = number(protocol, assoc);
                let (dials, was_up) = self.links.down(id);
                if was_up {
                    self.machine.handle_down(now, id);
                }
                for dial in dials {
                    self.machine.handle_dial_failed(now, dial);
                }
            }
            Event::SendFailed { assoc, message, .. } => {
                let to = number(protocol, assoc);
                self.machine.handle_send_failed(to, protocol, &message.data);
            }
            Event::Refused { remote, why } => self.streams.refusals.tell(remote, &why),
            Event::Path { assoc, state, .. } => {
                use PathState::{Added, Confirmed, Removed};
                if matches!(state, Added | Confirmed | Removed) {
                    self.readdress(now, protocol, assoc);
                }
            }
        }
    }

    /// Drops messages for an association that has ended, so that its number's next user does not get them.
    fn forget(&mut self, protocol: Protocol, assoc: AssocId) {
        if protocol == Protocol::Enrp {
            self.backlog.forget(assoc);
        }
    }

    fn up(&mut self, now: Duration, protocol: Protocol, assoc: AssocId) {
        // An association without addresses is already gone, and an event will report it.
        let Ok(addresses) = self.end(protocol).confirmed_addresses(assoc) else {
            return;
        };
        let id = number(protocol, assoc);
        let dials = self.links.up(id, &addresses);
        if dials.is_empty() {
            self.machine.handle_up(now, id, protocol, &addresses, None);
        }
        for dial in dials {
            let dial = Some(dial);
            self.machine.handle_up(now, id, protocol, &addresses, dial);
        }
        if let Some(name) = self.end(protocol).name(assoc) {
            self.machine.handle_name(id, name);
        }
        // The handshake's round trip counts for an element's first registration. Only the dialling side measured it
        // during the handshake; the accepting side starts a measurement.
        self.tell_round_trip(now, protocol, assoc);
        self.end(protocol).measure(assoc);
        self.tell_addresses(now, protocol, assoc, &addresses);
    }

    /// Handles a change in an association's addresses.
    fn readdress(&mut self, now: Duration, protocol: Protocol, assoc: AssocId) {
        let id = number(protocol, assoc);
        // An association that is not up yet reports its addresses when it is.
        if !self.links.is_up(id) {
            return;
        }
        if let Ok(addresses) = self.end(protocol).confirmed_addresses(assoc) {
            self.links.readdress(id, &addresses);
            self.tell_addresses(now, protocol, assoc, &addresses);
        }
    }

    /// Reports an association's addresses, with the confirmed ones, to the machine, if there are several.
    fn tell_addresses(
        &mut self,
        now: Duration,
        protocol: Protocol,
        assoc: AssocId,
        confirmed: &[SocketAddr],
    ) {
        let Ok(mut claims) = self.end(protocol).remote_addresses(assoc) else {
            return;
        };
        if claims.len() > 1 {
            claims.retain(|address| !confirmed.contains(address));
            let id = number(protocol, assoc);
            self.machine.handle_addresses(now, id, confirmed, &claims);
        }
    }

    /// Carries out the machine's outputs, including those that follow from them.
    fn carry_out(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send {
                    to,
                    protocol,
                    message,
                } => self.send(to, protocol, message),
                Output::SendMany {
                    to,
                    protocol: Protocol::Enrp,
                    message,
                } => {
                    let message = Message::new(Protocol::Enrp.ppid(), message);
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
                Output::Measure(id) => self.links.measure(id),
                Output::Abort(id) => self.abort(id),
                Output::Event(event) => report(&event),
            }
        }
    }

    fn send(&mut self, to: AssociationId, protocol: Protocol, message: Bytes) {
        let (_, assoc) = of_number(to);
        let message = Message::new(protocol.ppid(), message);
        match protocol {
            Protocol::Asap => {
                let refused = self.asap.send(assoc, &message).is_err();
                self.sends_refused += u64::from(refused);
            }
            Protocol::Enrp => self.backlog.push(assoc, message),
        }
    }

    fn connect(&mut self, dial: DialId, protocol: Protocol, addresses: Vec<SocketAddr>) {
        let now = self.now();
        match self.links.find(protocol, &addresses, dial) {
            Found::Coming => return,
            Found::Up(id, addresses) => {
                let dial = Some(dial);
                return self.machine.handle_up(now, id, protocol, &addresses, dial);
            }
            Found::Nothing => {}
        }
        let own = |address| self.encapsulations.get(address).copied();
        let port = addresses.iter().find_map(own).or(self.remote_encapsulation);
        match self.end(protocol).connect(&addresses, port) {
            Ok(assoc) => self.links.begun(number(protocol, assoc), addresses, dial),
            Err(error) => {
                tracing::debug!(%error, ?addresses, "connecting");
                self.machine.handle_dial_failed(now, dial);
            }
        }
    }

    fn abort(&mut self, id: AssociationId) {
        let (protocol, assoc) = of_number(id);
        // If the association is already gone, an event reports it.
        let _ = self.end(protocol).abort(assoc);
    }

    /// Answers operators' requests. Returns false for a stop request.
    fn serve(&mut self) -> bool {
        self.requests.clear();
        while let Some(request) = self.requests.take() {
            if !self.answer(request) {
                return false;
            }
        }
        true
    }

    pub(super) fn reload(&mut self, (settings, security): Reread) {
        tracing::info!("the settings were read anew");
        if let Some(security) = security {
            self.asap.secure_anew(security);
        }
        self.machine.handle_settings(self.now(), settings);
    }

    /// Aborts all associations, so that elements, users and peers learn of the end at once.
    fn leave(&mut self) -> io::Result<()> {
        let enrp = self.enrp.as_mut();
        self.backlog.finish(&mut |assocs, messages, taken| {
            enrp.send_bundles(assocs, messages, taken);
        });
        let all: Vec<_> = self.links.each().collect();
        for id in all {
            self.abort(id);
        }
        self.asap.flush()?;
        self.enrp.flush()
    }
}
