//! The UDP socket of a node, and for each other node the question whether datagrams pass.
//!
//! Datagrams need the keys of a pair of nodes, which a channel between the two must have brought in the present lives of
//! both daemons, and a network may block UDP. A small frame to a node whose datagrams have not arrived of late therefore
//! travels over the peer channel too. A frame that came over the channel is answered there, since the sender may not hear
//! the datagrams of this node.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::time::Duration;

use holdfast_daemon::log_limit::LogLimit;
use holdfast_wire::authenticated_datagram::{
    DATAGRAM_BYTES_MAX, DatagramError, DatagramFrame, DatagramReceiver, DatagramSender, SENDERS_MAX,
};
use holdfast_wire::membership_frames::{MembershipFrame, NodeName};
use tokio::net::UdpSocket;
use tokio::sync::watch;

use crate::metrics::Metrics;
use crate::peer_channel::DatagramKeyTable;

/// Time for which a received frame says that its path works: two heartbeat intervals and a little more.
const PATH_LIFETIME: Duration = Duration::from_millis(120);

/// Maximum number of datagrams that are read before timers are looked at.
const DATAGRAMS_AT_ONCE_MAX: usize = 64;

/// Opens the socket at the daemon's address.
pub(super) fn bind(address: SocketAddr) -> io::Result<StdUdpSocket> {
    let socket = StdUdpSocket::bind(address)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The datagrams of a node.
pub(super) struct Datagrams {
    sender: DatagramSender,
    receiver: DatagramReceiver,
    keys: watch::Receiver<DatagramKeyTable>,
    paths: BTreeMap<NodeName, Paths>,
    metrics: Metrics,
    refusal_log: LogLimit,
}

/// Times at which small frames of a node arrived.
#[derive(Debug, Clone, Copy, Default)]
struct Paths {
    by_datagram: Option<Duration>,
    by_channel: Option<Duration>,
}

impl Datagrams {
    pub fn new(
        name: NodeName,
        boot: u64,
        keys: watch::Receiver<DatagramKeyTable>,
        metrics: Metrics,
    ) -> Datagrams {
        Datagrams {
            sender: DatagramSender::new(name.clone(), boot),
            receiver: DatagramReceiver::new(name, boot),
            keys,
            paths: BTreeMap::new(),
            metrics,
            refusal_log: LogLimit::default(),
        }
    }

    /// Sends a frame. Returns true if that is enough: the receiver's datagrams arrive here, so its socket works, and the
    /// receiver has not used the channel.
    pub fn send(
        &mut self,
        socket: &UdpSocket,
        now: Duration,
        to: (&NodeName, SocketAddr),
        frame: &DatagramFrame,
    ) -> bool {
        let (name, address) = to;
        let keys = self.keys.borrow().get(name);
        let Some((boot, key)) = keys.and_then(|keys| Some((keys.boot, keys.outbound?))) else {
            return false;
        };
        let bytes = self.sender.seal(name, boot, &key, frame);
        if let Err(error) = socket.try_send_to(&bytes, address) {
            tracing::debug!(to = %name, %address, %error, "cannot send a datagram");
            return false;
        }
        let is_recent = |at: Option<Duration>| at.is_some_and(|at| now < at + PATH_LIFETIME);
        let paths = self.paths.get(name).copied().unwrap_or_default();
        is_recent(paths.by_datagram) && !is_recent(paths.by_channel)
    }

    /// Notes a frame that came over the peer channel.
    pub fn note_channel_frame(&mut self, now: Duration, from: &NodeName, frame: &MembershipFrame) {
        if DatagramFrame::of(frame).is_some() {
            self.paths_of(from).by_channel = Some(now);
        }
    }

    /// Reads the datagrams that have arrived, up to a limit. Returns the authentic ones.
    pub fn receive(
        &mut self,
        socket: &UdpSocket,
        now: Duration,
    ) -> Vec<(NodeName, MembershipFrame)> {
        let mut frames = Vec::new();
        let mut buffer = [0; DATAGRAM_BYTES_MAX + 1];
        for _ in 0..DATAGRAMS_AT_ONCE_MAX {
            let (length, source) = match socket.try_recv_from(&mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An earlier datagram was answered by "port unreachable".
                Err(_) => continue,
            };
            let keys_of = |sender: &NodeName| self.keys.borrow().get(sender);
            match self.receiver.open(keys_of, &buffer[..length]) {
                Ok(datagram) => {
                    self.paths_of(&datagram.sender).by_datagram = Some(now);
                    frames.push((datagram.sender, datagram.frame.into()));
                }
                Err(error) => {
                    self.metrics.count_refused_datagram(error.label());
                    match error {
                        // Usual for a moment after a restart.
                        DatagramError::UnknownSender | DatagramError::Stale => {
                            tracing::debug!(%source, %error, "refused a datagram");
                        }
                        _ if self.refusal_log.admits() => {
                            tracing::warn!(%source, %error, "refused a datagram");
                        }
                        _ => {}
                    }
                }
            }
        }
        frames
    }

    fn paths_of(&mut self, name: &NodeName) -> &mut Paths {
        if self.paths.len() >= SENDERS_MAX && !self.paths.contains_key(name) {
            self.paths.clear();
        }
        self.paths.entry(name.clone()).or_default()
    }
}
