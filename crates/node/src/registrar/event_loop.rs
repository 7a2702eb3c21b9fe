//! The event loop: what came goes into the machine, what the machine says is carried out, and all leaves at once.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use holdfast_proto::registrar::{AssociationId, DialId, Output, Protocol, Registrar, Settings};
use holdfast_sys::transport::{AssocId, Endpoint, Event, Message, PathState};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::control::ControlRequest;
use super::links::{Found, Links, number, of_number};
use super::report::report;
use crate::mailbox::Inbox;
use crate::multicast::Groups;

/// How often some associations are asked for their round trips, and in how many turns all of them are.
const ROUND_TRIP_TURN: Duration = Duration::from_millis(250);
const ROUND_TRIP_TURNS: usize = 20;

/// A registrar with its sockets.
pub(super) struct Daemon {
    pub(super) machine: Registrar,
    pub(super) started: Instant,
    pub(super) asap: Box<dyn Endpoint>,
    pub(super) enrp: Box<dyn Endpoint>,
    pub(super) groups: Groups<Protocol>,
    pub(super) links: Links,
    /// UDP ports of peers, and of everybody else.
    pub(super) encapsulations: HashMap<SocketAddr, u16>,
    pub(super) remote_encapsulation: Option<u16>,
    /// Whether the transport takes a message for several peers at once.
    pub(super) one_send: bool,
    /// How long requests are let come where there are many.
    pub(super) pause: Duration,
    /// Messages and notices that came.
    pub(super) heard: u64,
    pub(super) requests: Inbox<ControlRequest>,
    /// Messages that an association's buffer had no room for.
    pub(super) sends_refused: u64,
    pub(super) next_round_trips: Duration,
    /// Room that is used again.
    pub(super) events: Vec<Event>,
    pub(super) receivers: Vec<AssocId>,
}

/// Which descriptors have something.
struct Ready {
    asap: bool,
    enrp: bool,
    wake: bool,
    groups: bool,
}

impl Daemon {
    /// Runs until a request says stop.
    ///
    /// # Errors
    /// The sockets of the transport are unusable.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let mut gathers = false;
        loop {
            self.carry_out();
            self.asap.flush()?;
            self.enrp.flush()?;
            if gathers {
                std::thread::sleep(self.pause);
            }
            let before = self.now();
            let ready = self.wait()?;
            let now = self.now();
            let heard = self.heard;
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
            // Waking up costs several times what a request does. So where little time is between requests, some are let come
            // before it looks again; unless that has just brought no more than one, who may wait for each answer.
            let in_vain = gathers && self.heard - heard < 2;
            gathers = now - before < self.pause && !in_vain;
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn wait(&self) -> io::Result<Ready> {
        let timer = self.machine.poll_timeout();
        let until = timer.map_or(self.next_round_trips, |at| at.min(self.next_round_trips));
        let timeout = TimeSpec::from(until.saturating_sub(self.now()));
        let poll = |fd| PollFd::new(fd, PollFlags::POLLIN);
        // At most the five that there can be: no allocation.
        let mut fds = smallvec::SmallVec::<[PollFd<'_>; 5]>::new();
        fds.extend([self.asap.fd(), self.enrp.fd(), self.requests.fd()].map(poll));
        fds.extend(self.groups.fds().map(poll));
        match ppoll(&mut fds, Some(timeout), None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| fd.any() == Some(true);
        Ok(Ready {
            asap: is_ready(&fds[0]),
            enrp: is_ready(&fds[1]),
            wake: is_ready(&fds[2]),
            groups: fds[3..].iter().any(is_ready),
        })
    }

    fn end(&mut self, protocol: Protocol) -> &mut dyn Endpoint {
        match protocol {
            Protocol::Asap => self.asap.as_mut(),
            Protocol::Enrp => self.enrp.as_mut(),
        }
    }

    fn receive(&mut self, now: Duration, protocol: Protocol) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        self.end(protocol).recv_batch(&mut events)?;
        self.heard += events.len() as u64;
        let mut coming = events.drain(..);
        for ahead in 0..Registrar::AHEAD {
            self.expect(protocol, coming.as_slice().get(ahead));
        }
        while let Some(event) = coming.next() {
            let ahead = coming.as_slice().get(Registrar::AHEAD - 1);
            self.expect(protocol, ahead);
            self.feed(now, protocol, event);
            // At once: a number may belong to another association after the next event.
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
                self.machine.handle_restarted(now, number(protocol, assoc));
            }
            Event::Down { assoc, .. } => {
                let id = number(protocol, assoc);
                let (dials, was_up) = self.links.down(id);
                if was_up {
                    self.machine.handle_down(now, id);
                }
                for dial in dials {
                    self.machine.handle_dial_failed(now, dial);
                }
            }
            Event::SendFailed { message, .. } => {
                self.machine.handle_send_failed(protocol, &message.data);
            }
            Event::Path { assoc, state, .. } => {
                use PathState::{Added, Confirmed, Removed};
                if matches!(state, Added | Confirmed | Removed) {
                    self.readdress(now, protocol, assoc);
                }
            }
        }
    }

    fn up(&mut self, now: Duration, protocol: Protocol, assoc: AssocId) {
        // Without addresses it is gone already, and an event will say so.
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
        self.tell_addresses(now, protocol, assoc, &addresses);
    }

    /// Something has changed in an association's addresses.
    fn readdress(&mut self, now: Duration, protocol: Protocol, assoc: AssocId) {
        let id = number(protocol, assoc);
        // What is not up yet says all when it is.
        if !self.links.is_up(id) {
            return;
        }
        if let Ok(addresses) = self.end(protocol).confirmed_addresses(assoc) {
            self.links.readdress(id, &addresses);
            self.tell_addresses(now, protocol, assoc, &addresses);
        }
    }

    /// Tells the machine of an association's addresses, of which these are confirmed, where there are several.
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

    /// Does what the machine says, and what it says to that.
    fn carry_out(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send {
                    to,
                    protocol,
                    message,
                } => {
                    let (_, assoc) = of_number(to);
                    let message = Message::new(protocol.ppid(), message);
                    if self.end(protocol).send(assoc, &message).is_err() {
                        self.sends_refused += 1;
                    }
                }
                Output::SendMany {
                    to,
                    protocol,
                    message,
                } => {
                    let mut receivers = std::mem::take(&mut self.receivers);
                    receivers.clear();
                    receivers.extend(to.iter().map(|id| of_number(*id).1));
                    let message = Message::new(protocol.ppid(), message);
                    let one_send = self.one_send;
                    let end = self.end(protocol);
                    let sent = if one_send {
                        end.send_many(&receivers, &message)
                    } else {
                        let each = receivers.iter();
                        each.filter(|to| end.send(**to, &message).is_ok()).count()
                    };
                    self.sends_refused += (receivers.len() - sent) as u64;
                    self.receivers = receivers;
                }
                Output::Connect {
                    dial,
                    protocol,
                    addresses,
                } => self.connect(dial, protocol, addresses),
                Output::Multicast { protocol, message } => self.groups.send(protocol, &message),
                Output::Abort(id) => self.abort(id),
                Output::Event(event) => report(&event),
            }
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
        // If it is gone already, an event says so.
        let _ = self.end(protocol).abort(assoc);
    }

    fn ask_round_trips(&mut self, now: Duration) {
        self.next_round_trips = now + ROUND_TRIP_TURN;
        for _ in 0..self.links.len().div_ceil(ROUND_TRIP_TURNS) {
            let Some(id) = self.links.next_in_rota() else {
                return;
            };
            let (protocol, assoc) = of_number(id);
            if let Ok(round_trip) = self.end(protocol).round_trip(assoc) {
                self.machine.handle_round_trip(id, round_trip);
            }
        }
    }

    /// Answers what operators ask. False: one of them says stop.
    fn serve(&mut self) -> bool {
        self.requests.clear();
        while let Some(request) = self.requests.take() {
            if !self.answer(request) {
                return false;
            }
        }
        true
    }

    pub(super) fn reload(&mut self, settings: Settings) {
        tracing::info!("the settings were read anew");
        self.machine.handle_settings(self.now(), settings);
    }

    /// Elements, users and peers hear at once that it is gone.
    fn leave(&mut self) -> io::Result<()> {
        let all: Vec<_> = self.links.each().collect();
        for id in all {
            self.abort(id);
        }
        self.asap.flush()?;
        self.enrp.flush()
    }
}
