//! Players with sockets, driven by one thread.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use holdfast_lab::Lab;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::TimeSpec;

use super::client::{ClientPhase, ClientSettings, GameClient};
use super::trace::PlayerTrace;

/// Bytes of the longest datagram.
const DATAGRAM_MAX: usize = 65536;
/// Longest time between two checks of the stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Returns the machine's time since the epoch, as used in traces.
#[must_use]
pub fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Players of one server; they leave when this value is dropped.
#[derive(Debug)]
pub struct Players {
    shared: Arc<SharedClients>,
    thread: Option<JoinHandle<Result<()>>>,
}

#[derive(Debug)]
struct SharedClients {
    clients: Mutex<Vec<GameClient>>,
    stop: AtomicBool,
}

impl SharedClients {
    fn clients(&self) -> MutexGuard<'_, Vec<GameClient>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of a player.
#[derive(Clone, Debug, PartialEq)]
pub struct PlayerReport {
    /// Progress of the player.
    pub phase: ClientPhase,
    /// Events that the player has seen.
    pub trace: PlayerTrace,
}

impl Players {
    /// Lets one player join from each of these hosts; the first has number 1.
    ///
    /// # Errors
    /// A host does not exist, or the system gives no socket.
    pub fn join_all(
        lab: &Lab,
        hosts: &[String],
        server: SocketAddr,
        settings: impl Fn(u16) -> ClientSettings,
    ) -> Result<Self> {
        let open = || -> io::Result<UdpSocket> {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(server)?;
            socket.set_nonblocking(true)?;
            setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
            Ok(socket)
        };
        let sockets = hosts.iter().map(|host| {
            let opened = lab.run_in_net_namespace(host, open)?;
            opened.with_context(|| format!("open a socket in {host}"))
        });
        let sockets: Vec<UdpSocket> = sockets.collect::<Result<_>>()?;
        let clients = (1..).take(sockets.len());
        let clients = clients.map(|number| GameClient::new(settings(number), unix_time()));
        let shared = Arc::new(SharedClients {
            clients: Mutex::new(clients.collect()),
            stop: AtomicBool::new(false),
        });
        let thread = {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name("players".into())
                .spawn(move || run(&sockets, &shared))?
        };
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Waits until all players play.
    ///
    /// # Errors
    /// A player is refused, or the wait takes longer than `limit`.
    pub fn wait_until_all_play(&self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            let phases: Vec<ClientPhase> = self
                .shared
                .clients()
                .iter()
                .map(GameClient::phase)
                .collect();
            let refused = phases
                .iter()
                .find(|phase| matches!(phase, ClientPhase::Disconnected(_)));
            if let Some(phase) = refused {
                bail!("a player cannot join the game: {phase:?}");
            }
            let playing = phases
                .iter()
                .filter(|phase| **phase == ClientPhase::Playing);
            let playing = playing.count();
            if playing == phases.len() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "exceeded time: after {limit:?}, {playing} of {} players are in the game",
                    phases.len()
                );
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Returns the result of each player so far.
    #[must_use]
    pub fn reports(&self) -> Vec<PlayerReport> {
        let clients = self.shared.clients();
        let report = |client: &GameClient| PlayerReport {
            phase: client.phase(),
            trace: client.trace().clone(),
        };
        clients.iter().map(report).collect()
    }

    /// Stops all players and returns their reports.
    ///
    /// # Errors
    /// A socket has failed.
    pub fn stop(mut self) -> Result<Vec<PlayerReport>> {
        self.stop_thread()?;
        Ok(self.reports())
    }

    fn stop_thread(&mut self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => ended,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Drop for Players {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // Callers that need the result call `stop`.
            let _ = self.stop_thread();
        }
    }
}

fn run(sockets: &[UdpSocket], shared: &SharedClients) -> Result<()> {
    let mut buffer = vec![0; DATAGRAM_MAX];
    while !shared.stop.load(Ordering::Relaxed) {
        let mut wake = unix_time() + STOP_CHECK_INTERVAL;
        for (socket, client) in sockets.iter().zip(shared.clients().iter_mut()) {
            while let Some((at, length)) = receive(socket, &mut buffer)? {
                client.handle_datagram(at, &buffer[..length]);
            }
            client.handle_timeout(unix_time());
            while let Some(datagram) = client.poll_transmit() {
                send(socket, &datagram)?;
            }
            wake = client.poll_timeout().map_or(wake, |due| due.min(wake));
        }
        let left = wake.saturating_sub(unix_time()).as_micros().div_ceil(1000);
        let mut waiting: Vec<PollFd<'_>> = sockets
            .iter()
            .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
            .collect();
        poll(
            &mut waiting,
            PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO),
        )?;
    }
    Ok(())
}

/// Receives a datagram, with the kernel's receive time.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Result<Option<(Duration, usize)>> {
    let mut parts = [IoSliceMut::new(buffer)];
    let mut control = nix::cmsg_space!(TimeSpec);
    let flags = MsgFlags::empty();
    let received = match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags) {
        Ok(received) => received,
        Err(error) => return ignore_transient(error.into()).map(|()| None),
    };
    let stamp = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::ScmTimestampns(time) => Some(Duration::from(time)),
        _ => None,
    });
    Ok(Some((stamp.unwrap_or_else(unix_time), received.bytes)))
}

fn send(socket: &UdpSocket, datagram: &[u8]) -> Result<()> {
    match socket.send(datagram) {
        Ok(_) => Ok(()),
        Err(error) => ignore_transient(error),
    }
}

/// Ignores errors that say nothing about the socket: no datagram is there, or a network or host is away for some time.
/// A player notices a lost server by its silence.
fn ignore_transient(error: io::Error) -> Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock
        | ErrorKind::Interrupted
        | ErrorKind::ConnectionRefused
        | ErrorKind::HostUnreachable
        | ErrorKind::NetworkUnreachable => Ok(()),
        _ => Err(error.into()),
    }
}
