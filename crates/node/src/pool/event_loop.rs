//! The event loop: feeds events to the machines, carries out their outputs, and flushes all sockets.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use holdfast_proto::pool_element::Link;
use holdfast_proto::pool_user::PoolUser;
use holdfast_sys::transport::{DownReason, Endpoint, Event, PathState, Provider, provider};
use holdfast_wire::rserpool::asap::{self, Message};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tokio::runtime::Handle;

use super::callers::Callers;
use super::elements::Element;
use super::links::{Links, Owner, Place};
use super::machines::Input;
use super::names::Names;
use super::probes::Probes;
use super::requests::Request;
use super::roles::Programs;
use super::streams::StreamHandle;
use super::users::Users;
use crate::asap::Refusals;
use crate::config::pool::PoolConfig;
use crate::mailbox::{Inbox, Mailbox};
use crate::multicast::Groups;

/// Retry interval for messages without room in the buffer, for stacks that do not signal room.
const RETRY: Duration = Duration::from_millis(10);
/// Time limit for elements to leave their pools when the daemon ends.
const LEAVE: Duration = Duration::from_secs(3);

/// A pool daemon with its sockets.
pub(super) struct Daemon {
    pub(super) config: PoolConfig,
    pub(super) started: Instant,
    /// Endpoint towards registrars and elements.
    pub(super) own: Box<dyn Endpoint>,
    pub(super) groups: Groups<()>,
    pub(super) requests: Inbox<Request>,
    /// Mailbox for tasks of the other thread.
    pub(super) to_self: Mailbox<Request>,
    pub(super) tasks: Handle,
    pub(super) user: PoolUser,
    pub(super) users: Users,
    pub(super) elements: BTreeMap<u64, Element>,
    pub(super) names: Names,
    /// Addresses of elements whose sessions this daemon accepts.
    pub(super) services: HashSet<SocketAddr>,
    pub(super) programs: Programs,
    pub(super) links: Links,
    pub(super) callers: Callers,
    pub(super) probes: Probes,
    pub(super) streams: HashMap<u64, StreamHandle>,
    pub(super) streams_made: u64,
    /// Hosts that could not be reached, and whether the next attempt is inside UDP.
    pub(super) ways: HashMap<SocketAddr, bool>,
    /// Inputs for the machines.
    pub(super) inputs: VecDeque<Input>,
    /// Wake-up times of the machines.
    pub(super) wakes: BTreeSet<(Duration, Owner)>,
    pub(super) woken_at: HashMap<Owner, Duration>,
    /// Associations with messages for which the buffer had no room.
    pub(super) stalled: BTreeSet<Place>,
    /// Time at which the daemon ends even if elements are left.
    pub(super) ends_at: Option<Duration>,
    pub(super) events: Vec<Event>,
    /// Registrars over TCP that were not reached.
    pub(super) refusals: Refusals,
}

/// Descriptors that are ready.
struct Ready {
    own: bool,
    requests: bool,
    groups: bool,
    services: Vec<u64>,
}

impl Daemon {
    /// Runs until a stop request.
    ///
    /// # Errors
    /// The sockets of the transport are unusable.
    pub(super) fn run(&mut self) -> io::Result<()> {
        loop {
            self.settle();
            self.send_stalled();
            self.flush()?;
            let now = self.now();
            let over = self.ends_at.is_some_and(|at| at <= now);
            if over || self.ends_at.is_some() && self.elements.is_empty() {
                return self.leave();
            }
            let ready = self.wait()?;
            if ready.own {
                self.receive(0)?;
            }
            for number in ready.services {
                self.receive(number)?;
            }
            if ready.groups {
                self.hear_announces();
            }
            self.wake_machines();
            self.end_callers();
            self.end_guests();
            if ready.requests {
                self.serve();
            }
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn wait(&self) -> io::Result<Ready> {
        let mut until = self.wakes.first().map(|(due, _)| *due);
        let mut sooner = |at: Duration| until = Some(until.map_or(at, |until| until.min(at)));
        if !self.stalled.is_empty() && provider() == Provider::Kernel {
            sooner(self.now() + RETRY);
        }
        self.ends_at.into_iter().for_each(&mut sooner);
        let looks = [self.callers.next(), self.probes.next()];
        looks.into_iter().flatten().for_each(sooner);
        let timeout = until.map(|at| TimeSpec::from(at.saturating_sub(self.now())));
        let services: Vec<(u64, &dyn Endpoint)> = self
            .elements
            .iter()
            .filter_map(|(number, element)| {
                Some((*number, element.service.as_ref()?.endpoint.as_ref()))
            })
            .collect();
        let poll = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![poll(self.own.fd()), poll(self.requests.fd())];
        fds.extend(services.iter().map(|(_, endpoint)| poll(endpoint.fd())));
        fds.extend(self.groups.fds().map(poll));
        match ppoll(&mut fds, timeout, None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| fd.any() == Some(true);
        let behind = 2 + services.len();
        let ready_services = services
            .iter()
            .zip(&fds[2..])
            .filter(|(_, fd)| is_ready(fd))
            .map(|((number, _), _)| *number);
        Ok(Ready {
            own: is_ready(&fds[0]),
            requests: is_ready(&fds[1]),
            services: ready_services.collect(),
            groups: fds[behind..].iter().any(is_ready),
        })
    }

    fn receive(&mut self, endpoint: u64) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        let Some(from) = self.endpoint(endpoint) else {
            return Ok(());
        };
        from.recv_batch(&mut events)?;
        for event in events.drain(..) {
            self.take_in(endpoint, event);
            // Settled after each event, because the next event may reuse an association's number.
            self.settle();
        }
        self.events = events;
        Ok(())
    }

    /// Returns the endpoint with this number; 0 is the daemon's own.
    pub(super) fn endpoint(&mut self, number: u64) -> Option<&mut dyn Endpoint> {
        if number == 0 {
            return Some(self.own.as_mut());
        }
        let service = self.elements.get_mut(&number)?.service.as_mut()?;
        Some(service.endpoint.as_mut())
    }

    pub(super) fn take_in(&mut self, endpoint: u64, event: Event) {
        let at = |assoc| Place { endpoint, assoc };
        match event {
            Event::Message { assoc, message } if message.ppid == asap::PPID => {
                let place = at(assoc);
                if !self.callers.park(place, &message.data) {
                    self.control_came(place, &message.data);
                }
            }
            // A guest must not send data.
            Event::Message { assoc, .. } if self.probes.is_guest(at(assoc)) => {
                self.abort(at(assoc))
            }
            Event::Message { assoc, message } => self.data_came(at(assoc), &message.data),
            Event::Up { assoc, .. } => self.up(at(assoc)),
            Event::Restarted { assoc } => {
                let owners = self.links.owners_end(at(assoc));
                self.lost(owners);
                self.up(at(assoc));
            }
            Event::Down { assoc, reason } => {
                let place = at(assoc);
                self.remember_way(place);
                self.stalled.remove(&place);
                self.callers.forget(place);
                self.probes.forget(place);
                let owners = self.links.down(place);
                match reason {
                    DownReason::Shutdown => self.ended(owners),
                    DownReason::Lost | DownReason::NotStarted => self.lost(owners),
                }
            }
            Event::Path { assoc, state, .. } => {
                use PathState::{Added, Confirmed, Removed};
                if matches!(state, Added | Confirmed | Removed) {
                    self.readdress(at(assoc));
                }
            }
            // Needs no action: either the association ends, or its registrar does not answer, and both are noticed.
            Event::SendFailed { .. } => {}
            Event::Refused { remote, why } => self.refusals.tell(remote, &why),
        }
    }

    fn up(&mut self, place: Place) {
        let Some(endpoint) = self.endpoint(place.endpoint) else {
            return;
        };
        // An association without addresses is already gone, and an event will report it.
        let Ok(addresses) = endpoint.confirmed_addresses(place.assoc) else {
            return;
        };
        match self.links.up(place, &addresses) {
            Some(owners) => {
                let connected = |(owner, link)| Input::Connected(owner, link);
                self.inputs.extend(owners.into_iter().map(connected));
            }
            None if place.endpoint != 0 => self.user_came(place, addresses),
            None => self.called(place),
        }
    }

    fn lost(&mut self, owners: Vec<(Owner, Link)>) {
        let lost = |(owner, link)| Input::Lost(owner, link);
        self.inputs.extend(owners.into_iter().map(lost));
    }

    fn ended(&mut self, owners: Vec<(Owner, Link)>) {
        let ended = |(owner, link)| Input::Ended(owner, link);
        self.inputs.extend(owners.into_iter().map(ended));
    }

    fn hear_announces(&mut self) {
        let mut came = Vec::new();
        self.groups
            .receive(|source, (), bytes| came.push((source, bytes.clone())));
        for (source, bytes) in came {
            let Ok(parsed) = Message::parse(&bytes) else {
                continue;
            };
            if let Message::ServerAnnounce {
                registrar,
                transports,
            } = parsed.message
            {
                self.announced(source, registrar, transports);
            }
        }
    }

    /// Aborts an association.
    pub(super) fn abort(&mut self, place: Place) {
        if let Some(endpoint) = self.endpoint(place.endpoint) {
            // If the association is already gone, an event reports it.
            let _ = endpoint.abort(place.assoc);
        }
    }

    fn serve(&mut self) {
        self.requests.clear();
        while let Some(request) = self.requests.take() {
            match request {
                Request::Stop => {
                    let numbers: Vec<u64> = self.elements.keys().copied().collect();
                    for number in numbers {
                        self.deregister(number);
                    }
                    self.ends_at = Some(self.now() + LEAVE);
                }
                Request::Secure(security) => self.own.secure_anew(security),
                request => self.answer(request),
            }
            self.settle();
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.own.flush()?;
        for element in self.elements.values_mut() {
            if let Some(service) = &mut element.service {
                service.endpoint.flush()?;
            }
        }
        Ok(())
    }

    /// Aborts all associations, so that registrars and users learn of the end at once.
    fn leave(&mut self) -> io::Result<()> {
        for place in self.links.places() {
            self.abort(place);
        }
        self.flush()
    }
}
