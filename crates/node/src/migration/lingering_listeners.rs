//! Unaccepted connections of a process that has moved away. Its listeners stay here until all handshakes that began
//! with them have ended. Each connection is handed off into the queue of its listener at the other node.
//!
//! The stopped process keeps its listeners open meanwhile, for up to a second: if this daemon dies then, the next one
//! finds them, and no client is reset. Only a connection that is being handed off at that moment is lost.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use holdfast_checkpoint::donor::{ProcessRef, StoppedTree};
use holdfast_checkpoint::sockets::SocketStaticState;
use holdfast_sys::address::local_address;
use holdfast_sys::sock_diag;
use holdfast_sys::tcp_info::TcpInfo;
use holdfast_wire::{Flow, MoveId, NodeId, Protocol};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::socket_endpoints::{MovableAddresses, SocketEndpoint, endpoint_of};
use super::worker_events::{EventSender, WorkerEvent};

/// Time limit for handshakes, polling interval, and pause before a refused connection is tried again.
const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(10);
/// Time for which a stopped process may be kept only for its listeners.
pub(super) const DRAIN_BEFORE_RELEASE_MAX: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Listeners of a process that moves away.
pub(super) struct LingeringListeners {
    listeners: Vec<TcpListener>,
    endpoints: Vec<SocketEndpoint>,
    /// Its processes, which keep the listeners open until they have ended.
    processes: Vec<OwnedFd>,
}

/// The handoff of the connections that listeners of a process get which has moved away.
pub(super) struct ListenerDrain {
    listeners: LingeringListeners,
    id: MoveId,
    /// The node where the process runs.
    to: NodeId,
    addresses: MovableAddresses,
    events: EventSender,
    pending: Vec<PendingConnectionHandoff>,
    refused: Vec<RefusedHandoff>,
    /// True if the last pass found nothing to do.
    is_quiet: bool,
}

/// A connection being handed off.
struct PendingConnectionHandoff {
    flow: Flow,
    socket: OwnedFd,
    answer: oneshot::Receiver<Result<(), String>>,
}

/// A connection that the other node refused for the moment.
type RefusedHandoff = (Instant, Flow, OwnedFd);

impl LingeringListeners {
    /// Returns the listeners of a stopped tree.
    pub(super) fn of_tree(stopped: &StoppedTree) -> LingeringListeners {
        let to_listener = |(_, fd, socket): (_, _, &SocketStaticState)| match socket {
            SocketStaticState::Unconnected(static_state) if static_state.listen.is_some() => {
                let listener: std::os::fd::BorrowedFd<'_> = fd;
                let listener = listener.try_clone_to_owned().ok().map(TcpListener::from)?;
                Some((listener, endpoint_of(socket)?))
            }
            _ => None,
        };
        let (listeners, endpoints) = stopped.sockets().filter_map(to_listener).unzip();
        let processes = stopped.pidfds();
        let processes = processes.filter_map(|fd| fd.try_clone_to_owned().ok());
        LingeringListeners {
            listeners,
            endpoints,
            processes: processes.collect(),
        }
    }

    /// Returns the listeners of stopped processes that an earlier daemon has left. UDP sockets have no queues to hand off, but
    /// endpoints that new clients reach.
    pub(super) fn of_processes(processes: &[ProcessRef]) -> LingeringListeners {
        let (mut listeners, mut endpoints) = (Vec::new(), Vec::new());
        let sockets = processes
            .iter()
            .flat_map(|process| process.sockets_for_new_clients().unwrap_or_default());
        for socket in sockets {
            let Ok(local) = local_address(socket.as_fd()) else {
                continue;
            };
            let is_tcp = TcpInfo::read(socket.as_fd()).is_ok();
            endpoints.push(SocketEndpoint {
                protocol: if is_tcp { Protocol::Tcp } else { Protocol::Udp },
                local,
                remote: None,
            });
            if is_tcp {
                listeners.push(TcpListener::from(socket));
            }
        }
        let opened = processes.iter().filter_map(|process| process.open().ok()?);
        LingeringListeners {
            listeners,
            endpoints,
            processes: opened.collect(),
        }
    }

    /// Returns the addresses of the listeners.
    pub(super) fn endpoints(&self) -> &[SocketEndpoint] {
        &self.endpoints
    }

    fn accept_all(&self, addresses: &MovableAddresses) -> Vec<(Flow, OwnedFd)> {
        let mut found = Vec::new();
        for listener in &self.listeners {
            while let Ok((socket, remote)) = listener.accept() {
                let flow = socket.local_addr().ok().and_then(|local| {
                    let canonical = |address: SocketAddr| {
                        SocketAddr::new(address.ip().to_canonical(), address.port())
                    };
                    Flow::new(Protocol::Tcp, canonical(local), canonical(remote)).ok()
                });
                // A connection at another address cannot exist at another host, so it is closed.
                if let Some(flow) = flow.filter(|flow| addresses.is_service(flow.local.ip())) {
                    found.push((flow, OwnedFd::from(socket)));
                }
            }
        }
        found
    }

    /// Returns true if another node, which the process had left before, still hands connections off into these queues.
    fn has_arrivals(&self, events: &EventSender) -> bool {
        let (reply, answer) = oneshot::channel();
        events.send(WorkerEvent::HasUnacceptedArrivals {
            listeners: self.endpoints.clone(),
            reply,
        });
        // Without an answer the daemon is ending.
        answer.blocking_recv().unwrap_or(false)
    }

    fn has_half_open(&self) -> bool {
        let mut ports = self.endpoints.iter().map(|endpoint| endpoint.local.port());
        ports.any(|port| sock_diag::has_half_open_tcp(port).unwrap_or(false))
    }
}

impl ListenerDrain {
    /// Begins to hand off the connections that the listeners of a process get, which runs at node `to`.
    pub(super) fn new(
        listeners: LingeringListeners,
        (id, to): (MoveId, NodeId),
        (addresses, events): (MovableAddresses, EventSender),
    ) -> ListenerDrain {
        for listener in &listeners.listeners {
            // A blocking listener would delay the others. No other process uses it any more.
            let _ = listener.set_nonblocking(true);
        }
        ListenerDrain {
            listeners,
            id,
            to,
            addresses,
            events,
            pending: Vec::new(),
            refused: Vec::new(),
            is_quiet: false,
        }
    }

    /// Hands off connections until none is left and no handshake is under way, for a limited time. Returns true if all are
    /// gone.
    pub(super) fn run(&mut self, limit: Duration) -> bool {
        if self.listeners.listeners.is_empty() {
            return true;
        }
        let started_at = Instant::now();
        loop {
            // Checked before accepting, so that a handshake that completes in between is seen in the next pass.
            let half_open = self.listeners.has_half_open();
            self.begin_handoffs();
            // A handshake that completes is briefly neither half-open nor in the queue, so two passes must be quiet.
            let is_idle = self.pending.is_empty() && self.refused.is_empty();
            let was_quiet = std::mem::replace(&mut self.is_quiet, is_idle && !half_open);
            if self.is_quiet && was_quiet && !self.listeners.has_arrivals(&self.events) {
                return true;
            }
            if started_at.elapsed() > limit {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
            self.take_answers();
        }
    }

    fn begin_handoffs(&mut self) {
        let is_due = |(at, ..): &mut RefusedHandoff| at.elapsed() > RETRY_PAUSE;
        let due = self.refused.extract_if(.., is_due);
        let due: Vec<_> = due.map(|(_, flow, socket)| (flow, socket)).collect();
        let accepted = self.listeners.accept_all(&self.addresses);
        for (flow, socket) in due.into_iter().chain(accepted) {
            let begun = start_handoff(flow, socket, self.to, &self.events);
            self.pending.extend(begun);
        }
    }

    fn take_answers(&mut self) {
        for mut handoff in std::mem::take(&mut self.pending) {
            match handoff.answer.try_recv() {
                Ok(Err(why)) => {
                    tracing::debug!(flow = %handoff.flow, why, "retrying an unaccepted connection");
                    self.refused
                        .push((Instant::now(), handoff.flow, handoff.socket));
                }
                Err(oneshot::error::TryRecvError::Empty) => self.pending.push(handoff),
                // The connection was handed off, or the daemon is ending.
                Ok(Ok(())) | Err(oneshot::error::TryRecvError::Closed) => {}
            }
        }
    }

    /// Hands off what is left in a thread, and closes the listeners. The process may be killed now.
    pub(super) fn finish(mut self) {
        if self.listeners.listeners.is_empty() {
            return;
        }
        let id = self.id;
        let run = move || {
            if !self.run(HANDSHAKE_WAIT_MAX) {
                let lost_count = self.pending.len() + self.refused.len();
                tracing::warn!(%id, lost_count, "lost unaccepted connections");
            }
            let LingeringListeners {
                listeners,
                endpoints,
                processes,
            } = self.listeners;
            // The listeners are closed first: a client that reaches a listener which is still to be closed would be
            // reset.
            drop(listeners);
            wait_for_exit(&processes);
            let to = self.to;
            self.events
                .send(WorkerEvent::HandshakesDrained { to, endpoints });
        };
        let builder = std::thread::Builder::new().name("listener-drain".to_owned());
        if let Err(error) = builder.spawn(run) {
            tracing::warn!(%id, %error, "cannot start a thread: unaccepted connections are lost");
        }
    }
}

/// Waits until killed processes have ended, because they close their descriptors some milliseconds after the signal.
fn wait_for_exit(processes: &[OwnedFd]) {
    for process in processes {
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        while let Err(Errno::INTR) = poll(&mut ended, None) {}
    }
}

fn start_handoff(
    flow: Flow,
    socket: OwnedFd,
    to: NodeId,
    events: &EventSender,
) -> Option<PendingConnectionHandoff> {
    let (reply, answer) = oneshot::channel();
    let copy = socket.as_fd().try_clone_to_owned().ok()?;
    events.send(WorkerEvent::HandOffUnaccepted {
        flow_and_acceptor: (flow, to),
        socket: copy,
        reply,
    });
    Some(PendingConnectionHandoff {
        flow,
        socket,
        answer,
    })
}
