//! Unaccepted connections of a process that has moved away. Its listeners stay here until all handshakes that began
//! with them have ended. Each connection is handed off into the queue of its listener at the other node.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use holdfast_sys::process::donor::StoppedTree;
use holdfast_sys::process::sockets::SocketStatic;
use holdfast_sys::sock_diag;
use holdfast_wire::{Flow, MoveId, NodeId, Protocol};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::places::{Addresses, Place, place};
use super::told::{Teller, Told};

/// Time limit for handshakes, polling interval, and pause before a refused connection is tried again.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
const AGAIN: Duration = Duration::from_millis(200);

/// Listeners of a process that moves away.
pub(super) struct Leftovers {
    listeners: Vec<TcpListener>,
    places: Vec<Place>,
    /// Its processes, which keep the listeners open until they have ended.
    processes: Vec<OwnedFd>,
}

/// A connection being handed off.
struct Going {
    flow: Flow,
    socket: OwnedFd,
    answer: oneshot::Receiver<Result<(), String>>,
}

/// A connection that the other node refused for the moment.
type Refused = (Instant, Flow, OwnedFd);

impl Leftovers {
    /// Returns the listeners of a stopped tree.
    pub(super) fn of(stopped: &StoppedTree) -> Leftovers {
        let listens = |(_, fd, socket): (_, _, &SocketStatic)| match socket {
            SocketStatic::Unconnected(fixed) if fixed.waiting.is_some() => {
                let listener: std::os::fd::BorrowedFd<'_> = fd;
                let listener = listener.try_clone_to_owned().ok().map(TcpListener::from)?;
                Some((listener, place(socket)?))
            }
            _ => None,
        };
        let (listeners, places) = stopped.sockets().filter_map(listens).unzip();
        let processes = stopped.process_descriptors();
        let processes = processes.filter_map(|fd| fd.try_clone_to_owned().ok());
        Leftovers {
            listeners,
            places,
            processes: processes.collect(),
        }
    }

    /// Hands off the unaccepted connections, in a thread that ends when none are left.
    pub(super) fn follow(self, id: MoveId, to: NodeId, (addresses, teller): (Addresses, Teller)) {
        if self.listeners.is_empty() {
            return;
        }
        let run = move || {
            let lost = self.give_all(to, &addresses, &teller);
            if lost > 0 {
                tracing::warn!(%id, lost, "connections that nobody accepted have ended");
            }
            let Leftovers {
                listeners,
                places,
                processes,
            } = self;
            // The listeners are closed first: a client that reaches a listener which is still to be closed would be
            // reset.
            drop(listeners);
            wait_for_end(&processes);
            teller.tell(Told::Drained { to, places });
        };
        let named = std::thread::Builder::new().name("leftovers".to_owned());
        if let Err(error) = named.spawn(run) {
            tracing::warn!(%id, %error, "connections that nobody accepted end: no thread for them");
        }
    }

    /// Hands off all connections. Returns the number of lost ones.
    fn give_all(&self, to: NodeId, addresses: &Addresses, teller: &Teller) -> usize {
        let began = Instant::now();
        for listener in &self.listeners {
            // A blocking listener would delay the others. No other process uses it any more.
            let _ = listener.set_nonblocking(true);
        }
        let (mut refused, mut going) = (Vec::new(), Vec::new());
        // A handshake that completes is briefly neither half-open nor in the queue, so the loop needs two quiet passes.
        let mut quiet = false;
        loop {
            // Checked before accepting, so that a handshake that completes in between is seen in the next pass.
            let half_open = self.is_half_open();
            let due = refused.extract_if(.., |(at, ..): &mut Refused| at.elapsed() > AGAIN);
            let due: Vec<_> = due.map(|(_, flow, socket)| (flow, socket)).collect();
            for (flow, socket) in due.into_iter().chain(self.accept_all(addresses)) {
                going.extend(give(flow, socket, to, teller));
            }
            let was_quiet = std::mem::replace(
                &mut quiet,
                going.is_empty() && refused.is_empty() && !half_open,
            );
            if quiet && was_quiet {
                return 0;
            }
            if began.elapsed() > PATIENCE {
                return going.len() + refused.len();
            }
            std::thread::sleep(PAUSE);
            for mut one in std::mem::take(&mut going) {
                match one.answer.try_recv() {
                    Ok(Err(why)) => {
                        tracing::debug!(flow = %one.flow, why, "not yet");
                        refused.push((Instant::now(), one.flow, one.socket));
                    }
                    Err(oneshot::error::TryRecvError::Empty) => going.push(one),
                    // The connection was handed off, or the daemon is ending.
                    Ok(Ok(())) | Err(oneshot::error::TryRecvError::Closed) => {}
                }
            }
        }
    }

    fn accept_all(&self, addresses: &Addresses) -> Vec<(Flow, OwnedFd)> {
        let mut found = Vec::new();
        for listener in &self.listeners {
            while let Ok((socket, remote)) = listener.accept() {
                let flow = socket.local_addr().ok().and_then(|local| {
                    let plain = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
                    Flow::new(Protocol::Tcp, plain(local), plain(remote)).ok()
                });
                // A connection at another address cannot exist at another host, so it is closed.
                if let Some(flow) = flow.filter(|flow| addresses.is_service(flow.local.ip())) {
                    found.push((flow, OwnedFd::from(socket)));
                }
            }
        }
        found
    }

    fn is_half_open(&self) -> bool {
        let mut ports = self.places.iter().map(|place| place.local.port());
        ports.any(|port| sock_diag::tcp_half_open(port).unwrap_or(false))
    }
}

/// Waits until killed processes have ended, because they close their descriptors some milliseconds after the signal.
fn wait_for_end(processes: &[OwnedFd]) {
    for process in processes {
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        while let Err(Errno::INTR) = poll(&mut ended, None) {}
    }
}

fn give(flow: Flow, socket: OwnedFd, to: NodeId, teller: &Teller) -> Option<Going> {
    let (reply, answer) = oneshot::channel();
    let copy = socket.as_fd().try_clone_to_owned().ok()?;
    teller.tell(Told::Unaccepted {
        of: (flow, to),
        socket: copy,
        reply,
    });
    Some(Going {
        flow,
        socket,
        answer,
    })
}
