//! The event loop: feeds events to the machines, carries out their outputs, and flushes all sockets.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use holdfast_proto::pool_element::LinkId;
use holdfast_proto::pool_user::PoolUser;
use holdfast_sctp::{
    DownReason, PathState, SctpProvider, TransportEndpoint, TransportEvent, provider,
};
use holdfast_wire::rserpool::asap::{self, Message};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tokio::runtime::Handle;

use super::element_index::ElementIndex;
use super::elements::HostedElement;
use super::links::{AssociationKey, LinkOwner, LinkTable};
use super::machine_io::MachineInput;
use super::probes::Probes;
use super::program_roles::PoolPrograms;
use super::requests::PoolRequest;
use super::session_streams::StreamHandle;
use super::unconfirmed_callers::UnconfirmedCallers;
use super::user_sessions::UserSessions;
use crate::asap_over_tcp::Refusals;
use crate::config::pool::PoolConfig;
use crate::mailbox::{Inbox, Mailbox};
use crate::multicast::MulticastGroups;

/// Retry interval for messages without room in the buffer, for stacks that do not signal room.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Time limit for elements to leave their pools when the daemon ends.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);

/// A pool daemon with its sockets.
pub(super) struct PoolEventLoop {
    pub(super) config: PoolConfig,
    pub(super) started: Instant,
    /// Endpoint towards registrars and elements.
    pub(super) own_endpoint: Box<dyn TransportEndpoint>,
    pub(super) groups: MulticastGroups<()>,
    pub(super) requests: Inbox<PoolRequest>,
    /// Mailbox for tasks of the other thread.
    pub(super) to_self: Mailbox<PoolRequest>,
    pub(super) runtime: Handle,
    pub(super) user: PoolUser,
    pub(super) users: UserSessions,
    pub(super) elements: BTreeMap<u64, HostedElement>,
    pub(super) element_index: ElementIndex,
    /// Addresses of elements whose sessions this daemon accepts.
    pub(super) services: HashSet<SocketAddr>,
    pub(super) programs: PoolPrograms,
    pub(super) links: LinkTable,
    pub(super) pending_callers: UnconfirmedCallers,
    pub(super) probes: Probes,
    pub(super) streams: HashMap<u64, StreamHandle>,
    pub(super) streams_opened: u64,
    /// Hosts that could not be reached, and whether the next attempt is inside UDP.
    pub(super) next_inside_udp: HashMap<SocketAddr, bool>,
    /// Inputs for the machines.
    pub(super) inputs: VecDeque<MachineInput>,
    /// Wake-up times of the machines.
    pub(super) wakes: BTreeSet<(Duration, LinkOwner)>,
    pub(super) wake_time_of: HashMap<LinkOwner, Duration>,
    /// Associations with messages for which the buffer had no room.
    pub(super) stalled: BTreeSet<AssociationKey>,
    /// Time at which the daemon ends even if elements are left.
    pub(super) stop_deadline: Option<Duration>,
    pub(super) events: Vec<TransportEvent>,
    /// Registrars over TCP that were not reached.
    pub(super) refusals: Refusals,
}

/// Descriptors that are ready.
struct ReadyDescriptors {
    own_endpoint: bool,
    requests: bool,
    groups: bool,
    services: Vec<u64>,
}

impl PoolEventLoop {
    /// Runs until a stop request.
    ///
    /// # Errors
    /// The sockets of the transport are unusable.
    pub(super) fn run(&mut self) -> io::Result<()> {
        loop {
            self.process_inputs();
            self.retry_stalled();
            self.flush()?;
            let now = self.now();
            let is_overdue = self.stop_deadline.is_some_and(|at| at <= now);
            if is_overdue || self.stop_deadline.is_some() && self.elements.is_empty() {
                return self.abort_all();
            }
            let ready = self.wait()?;
            if ready.own_endpoint {
                self.receive(0)?;
            }
            for number in ready.services {
                self.receive(number)?;
            }
            if ready.groups {
                self.receive_announces();
            }
            self.wake_machines();
            self.expire_callers();
            self.expire_guests();
            if ready.requests {
                self.handle_requests();
            }
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn wait(&self) -> io::Result<ReadyDescriptors> {
        let mut deadline = self.wakes.first().map(|(due, _)| *due);
        let mut wake_by =
            |at: Duration| deadline = Some(deadline.map_or(at, |until| until.min(at)));
        if !self.stalled.is_empty() && provider() == SctpProvider::Kernel {
            wake_by(self.now() + RETRY_INTERVAL);
        }
        self.stop_deadline.into_iter().for_each(&mut wake_by);
        let check_times = [
            self.pending_callers.next_deadline(),
            self.probes.next_check(),
        ];
        check_times.into_iter().flatten().for_each(wake_by);
        let timeout = deadline.map(|at| TimeSpec::from(at.saturating_sub(self.now())));
        let services: Vec<(u64, &dyn TransportEndpoint)> = self
            .elements
            .iter()
            .filter_map(|(number, element)| {
                Some((*number, element.service.as_ref()?.endpoint.as_ref()))
            })
            .collect();
        let poll = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![poll(self.own_endpoint.fd()), poll(self.requests.fd())];
        fds.extend(services.iter().map(|(_, endpoint)| poll(endpoint.fd())));
        fds.extend(self.groups.fds().map(poll));
        match ppoll(&mut fds, timeout, None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| fd.any() == Some(true);
        let groups_start = 2 + services.len();
        let ready_services = services
            .iter()
            .zip(&fds[2..])
            .filter(|(_, fd)| is_ready(fd))
            .map(|((number, _), _)| *number);
        Ok(ReadyDescriptors {
            own_endpoint: is_ready(&fds[0]),
            requests: is_ready(&fds[1]),
            services: ready_services.collect(),
            groups: fds[groups_start..].iter().any(is_ready),
        })
    }

    fn receive(&mut self, endpoint: u64) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        let Some(from) = self.endpoint(endpoint) else {
            return Ok(());
        };
        from.recv_batch(&mut events)?;
        for event in events.drain(..) {
            self.on_endpoint_event(endpoint, event);
            // Settled after each event, because the next event may reuse an association's number.
            self.process_inputs();
        }
        self.events = events;
        Ok(())
    }

    /// Returns the endpoint with this number; 0 is the daemon's own.
    pub(super) fn endpoint(&mut self, number: u64) -> Option<&mut dyn TransportEndpoint> {
        if number == 0 {
            return Some(self.own_endpoint.as_mut());
        }
        let service = self.elements.get_mut(&number)?.service.as_mut()?;
        Some(service.endpoint.as_mut())
    }

    pub(super) fn on_endpoint_event(&mut self, endpoint: u64, event: TransportEvent) {
        let key_of = |assoc| AssociationKey { endpoint, assoc };
        match event {
            TransportEvent::Message { assoc, message } if message.ppid == asap::PPID => {
                let assoc_key = key_of(assoc);
                if !self.pending_callers.hold_message(assoc_key, &message.data) {
                    self.on_asap_message(assoc_key, &message.data);
                }
            }
            // A guest must not send data.
            TransportEvent::Message { assoc, .. } if self.probes.is_guest(key_of(assoc)) => {
                self.abort(key_of(assoc))
            }
            TransportEvent::Message { assoc, message } => {
                self.on_data(key_of(assoc), &message.data)
            }
            TransportEvent::Up { assoc, .. } => self.on_association_up(key_of(assoc)),
            TransportEvent::Restarted { assoc } => {
                let owners = self.links.end_links(key_of(assoc));
                self.push_lost(owners);
                self.on_association_up(key_of(assoc));
            }
            TransportEvent::Down { assoc, reason } => {
                let assoc_key = key_of(assoc);
                self.toggle_encapsulation(assoc_key);
                self.stalled.remove(&assoc_key);
                self.pending_callers.forget(assoc_key);
                self.probes.forget(assoc_key);
                let owners = self.links.remove(assoc_key);
                match reason {
                    DownReason::Shutdown => self.push_ended(owners),
                    DownReason::Lost | DownReason::NotStarted => self.push_lost(owners),
                }
            }
            TransportEvent::Path { assoc, state, .. } => {
                use PathState::{Added, Confirmed, Removed};
                if matches!(state, Added | Confirmed | Removed) {
                    self.on_addresses_changed(key_of(assoc));
                }
            }
            // Needs no action: either the association ends, or its registrar does not answer, and both are noticed.
            TransportEvent::SendFailed { .. } => {}
            TransportEvent::Refused {
                remote,
                reason: why,
            } => self.refusals.record(remote, &why),
        }
    }

    fn on_association_up(&mut self, assoc_key: AssociationKey) {
        let Some(endpoint) = self.endpoint(assoc_key.endpoint) else {
            return;
        };
        // An association without addresses is already gone, and an event will report it.
        let Ok(addresses) = endpoint.confirmed_addresses(assoc_key.assoc) else {
            return;
        };
        match self.links.mark_up(assoc_key, &addresses) {
            Some(owners) => {
                let connected = |(owner, link)| MachineInput::Connected(owner, link);
                self.inputs.extend(owners.into_iter().map(connected));
            }
            None if assoc_key.endpoint != 0 => self.on_user_association(assoc_key, addresses),
            None => self.on_incoming_association(assoc_key),
        }
    }

    fn push_lost(&mut self, owners: Vec<(LinkOwner, LinkId)>) {
        let lost = |(owner, link)| MachineInput::Lost(owner, link);
        self.inputs.extend(owners.into_iter().map(lost));
    }

    fn push_ended(&mut self, owners: Vec<(LinkOwner, LinkId)>) {
        let ended = |(owner, link)| MachineInput::Ended(owner, link);
        self.inputs.extend(owners.into_iter().map(ended));
    }

    fn receive_announces(&mut self) {
        let mut received = Vec::new();
        self.groups
            .receive(|source, (), bytes| received.push((source, bytes.clone())));
        for (source, bytes) in received {
            let Ok(parsed) = Message::parse(&bytes) else {
                continue;
            };
            if let Message::ServerAnnounce {
                registrar,
                transports,
            } = parsed.message
            {
                self.on_announce(source, registrar, transports);
            }
        }
    }

    /// Aborts an association.
    pub(super) fn abort(&mut self, assoc_key: AssociationKey) {
        if let Some(endpoint) = self.endpoint(assoc_key.endpoint) {
            // If the association is already gone, an event reports it.
            let _ = endpoint.abort(assoc_key.assoc);
        }
    }

    fn handle_requests(&mut self) {
        self.requests.clear_wakeup();
        while let Some(request) = self.requests.pop() {
            match request {
                PoolRequest::Stop => {
                    let numbers: Vec<u64> = self.elements.keys().copied().collect();
                    for number in numbers {
                        self.deregister(number);
                    }
                    self.stop_deadline = Some(self.now() + LEAVE_TIMEOUT);
                }
                PoolRequest::ReloadTls(security) => self.own_endpoint.replace_security(security),
                request => self.handle_request(request),
            }
            self.process_inputs();
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.own_endpoint.flush()?;
        for element in self.elements.values_mut() {
            if let Some(service) = &mut element.service {
                service.endpoint.flush()?;
            }
        }
        Ok(())
    }

    /// Aborts all associations, so that registrars and users learn of the end at once.
    fn abort_all(&mut self) -> io::Result<()> {
        for assoc_key in self.links.associations() {
            self.abort(assoc_key);
        }
        self.flush()
    }
}
