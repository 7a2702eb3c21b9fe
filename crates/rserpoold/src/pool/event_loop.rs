//! The event loop: feeds events to the machines, carries out their outputs, and flushes all sockets.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use holdfast_proto::pool_element::LinkId;
use holdfast_sctp::{
    DownReason, PathState, SctpProvider, TransportEndpoint, TransportEvent, provider,
};
use holdfast_wire::rserpool::asap::{self, Message};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::endpoints::PoolEndpoints;
use super::hosted_elements::HostedElements;
use super::links::{AssociationKey, LinkOwner, LinkTable, MachineInput};
use super::machine_timers::MachineTimers;
use super::pool_users::PoolUsers;
use super::probes::Probes;
use super::program_roles::PoolPrograms;
use super::requests::PoolRequest;
use super::session_streams::SessionStreams;
use super::unconfirmed_callers::UnconfirmedCallers;
use crate::config::pool::PoolConfig;
use crate::mailbox::Inbox;
use crate::multicast::MulticastGroups;

/// Retry interval for messages without room in the buffer, for stacks that do not signal room.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Time limit for elements to leave their pools when the daemon ends.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);

/// A pool daemon: its machines and sockets, and the loop that connects these.
///
/// Files beside this one have more of the loop's methods: [`machine_io`](super::machine_io) feeds the machines,
/// [`session_data`](super::session_data) moves the data of sessions, [`caller_admission`](super::caller_admission) decides
/// about callers, and [`request_handling`](super::request_handling) serves programs and operators.
pub(super) struct PoolEventLoop {
    pub(super) config: PoolConfig,
    pub(super) started: Instant,
    pub(super) endpoints: PoolEndpoints,
    pub(super) groups: MulticastGroups<()>,
    pub(super) requests: Inbox<PoolRequest>,
    pub(super) users: PoolUsers,
    pub(super) elements: HostedElements,
    pub(super) programs: PoolPrograms,
    pub(super) links: LinkTable,
    pub(super) pending_callers: UnconfirmedCallers,
    pub(super) probes: Probes,
    pub(super) streams: SessionStreams,
    /// Inputs for the machines.
    pub(super) inputs: VecDeque<MachineInput>,
    pub(super) timers: MachineTimers,
    /// Time at which the daemon ends even if elements are left.
    pub(super) stop_deadline: Option<Duration>,
    pub(super) events: Vec<TransportEvent>,
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
            self.endpoints.retry_stalled(&mut self.links);
            self.endpoints.flush()?;
            let now = self.now();
            let is_overdue = self.stop_deadline.is_some_and(|at| at <= now);
            if is_overdue || self.stop_deadline.is_some() && self.elements.len() == 0 {
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
        let mut deadline = self.timers.next();
        let mut wake_by =
            |at: Duration| deadline = Some(deadline.map_or(at, |until| until.min(at)));
        if self.endpoints.has_stalled() && provider() == SctpProvider::Kernel {
            wake_by(self.now() + RETRY_INTERVAL);
        }
        self.stop_deadline.into_iter().for_each(&mut wake_by);
        let check_times = [
            self.pending_callers.next_deadline(),
            self.probes.next_check(),
        ];
        check_times.into_iter().flatten().for_each(wake_by);
        let timeout = deadline.map(|at| TimeSpec::from(at.saturating_sub(self.now())));
        let services: Vec<(u64, &dyn TransportEndpoint)> = self.endpoints.services().collect();
        let poll = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![poll(self.endpoints.own().fd()), poll(self.requests.fd())];
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
        let Some(from) = self.endpoints.get(endpoint) else {
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
                self.endpoints.abort(key_of(assoc))
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
                self.endpoints.toggle_encapsulation(&self.links, assoc_key);
                self.endpoints.forget_stalled(assoc_key);
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
            } => self.endpoints.record_refusal(remote, &why),
        }
    }

    fn on_association_up(&mut self, assoc_key: AssociationKey) {
        let Some(endpoint) = self.endpoints.get(assoc_key.endpoint) else {
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

    fn handle_requests(&mut self) {
        self.requests.clear_wakeup();
        while let Some(request) = self.requests.pop() {
            match request {
                PoolRequest::Stop => {
                    for number in self.elements.numbers() {
                        self.deregister(number);
                    }
                    self.stop_deadline = Some(self.now() + LEAVE_TIMEOUT);
                }
                PoolRequest::ReloadTls(security) => {
                    self.endpoints.own_mut().replace_security(security);
                }
                request => self.handle_request(request),
            }
            self.process_inputs();
        }
    }

    /// Aborts all associations, so that registrars and users learn of the end at once.
    fn abort_all(&mut self) -> io::Result<()> {
        for assoc_key in self.links.associations() {
            self.endpoints.abort(assoc_key);
        }
        self.endpoints.flush()
    }
}
