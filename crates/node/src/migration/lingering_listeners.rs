//! Unaccepted connections of a process that has moved away. Its listeners stay here until all handshakes that began
//! with them have ended. Each connection is handed off into the queue of its listener at the other node.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use holdfast_checkpoint::donor::StoppedTree;
use holdfast_checkpoint::sockets::SocketStaticState;
use holdfast_sys::sock_diag;
use holdfast_wire::{Flow, MoveId, NodeId, Protocol};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::socket_endpoints::{MovableAddresses, SocketEndpoint, endpoint_of};
use super::worker_events::{EventSender, WorkerEvent};

/// Time limit for handshakes, polling interval, and pause before a refused connection is tried again.
const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Listeners of a process that moves away.
pub(super) struct LingeringListeners {
    listeners: Vec<TcpListener>,
    endpoints: Vec<SocketEndpoint>,
    /// Its processes, which keep the listeners open until they have ended.
    processes: Vec<OwnedFd>,
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

    /// Hands off the unaccepted connections, in a thread that ends when none are left.
    pub(super) fn hand_off_all(
        self,
        id: MoveId,
        to: NodeId,
        (addresses, events): (MovableAddresses, EventSender),
    ) {
        if self.listeners.is_empty() {
            return;
        }
        let run = move || {
            let lost_count = self.hand_off_until_quiet(to, &addresses, &events);
            if lost_count > 0 {
                tracing::warn!(%id, lost_count, "lost unaccepted connections");
            }
            let LingeringListeners {
                listeners,
                endpoints: places,
                processes,
            } = self;
            // The listeners are closed first: a client that reaches a listener which is still to be closed would be
            // reset.
            drop(listeners);
            wait_for_exit(&processes);
            events.send(WorkerEvent::HandshakesDrained {
                to,
                endpoints: places,
            });
        };
        let builder = std::thread::Builder::new().name("listener-drain".to_owned());
        if let Err(error) = builder.spawn(run) {
            tracing::warn!(%id, %error, "cannot start a thread: unaccepted connections are lost");
        }
    }

    /// Hands off all connections. Returns the number of lost ones.
    fn hand_off_until_quiet(
        &self,
        to: NodeId,
        addresses: &MovableAddresses,
        events: &EventSender,
    ) -> usize {
        let started_at = Instant::now();
        for listener in &self.listeners {
            // A blocking listener would delay the others. No other process uses it any more.
            let _ = listener.set_nonblocking(true);
        }
        let (mut refused, mut pending) = (Vec::new(), Vec::new());
        // A handshake that completes is briefly neither half-open nor in the queue, so the loop needs two quiet passes.
        let mut is_quiet = false;
        loop {
            // Checked before accepting, so that a handshake that completes in between is seen in the next pass.
            let half_open = self.has_half_open();
            let due = refused.extract_if(.., |(at, ..): &mut RefusedHandoff| {
                at.elapsed() > RETRY_PAUSE
            });
            let due: Vec<_> = due.map(|(_, flow, socket)| (flow, socket)).collect();
            for (flow, socket) in due.into_iter().chain(self.accept_all(addresses)) {
                pending.extend(start_handoff(flow, socket, to, events));
            }
            let was_quiet = std::mem::replace(
                &mut is_quiet,
                pending.is_empty() && refused.is_empty() && !half_open,
            );
            if is_quiet && was_quiet && !self.has_arrivals(events) {
                return 0;
            }
            if started_at.elapsed() > HANDSHAKE_WAIT_MAX {
                return pending.len() + refused.len();
            }
            std::thread::sleep(POLL_INTERVAL);
            for mut handoff in std::mem::take(&mut pending) {
                match handoff.answer.try_recv() {
                    Ok(Err(why)) => {
                        tracing::debug!(flow = %handoff.flow, why, "retrying an unaccepted connection");
                        refused.push((Instant::now(), handoff.flow, handoff.socket));
                    }
                    Err(oneshot::error::TryRecvError::Empty) => pending.push(handoff),
                    // The connection was handed off, or the daemon is ending.
                    Ok(Ok(())) | Err(oneshot::error::TryRecvError::Closed) => {}
                }
            }
        }
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
