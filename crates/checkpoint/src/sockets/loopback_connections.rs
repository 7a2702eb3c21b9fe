//! Connections over the loopback device, which move with both ends or not at all.

use super::SocketStaticState;
use holdfast_sys::address::canonical;
use holdfast_sys::sock_diag::{self, ListedConnection};
use holdfast_sys::tcp_info::TcpState;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;

/// A socket of a tree, identified by its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SocketAddresses {
    /// True for TCP, false for UDP.
    pub tcp: bool,
    /// Address of the socket itself.
    pub local: SocketAddr,
    /// Address of the peer, if the socket is connected.
    pub remote: Option<SocketAddr>,
}

/// Reason why a connection over the loopback device cannot move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopbackSplitReason {
    /// The other end is a socket of another process, with this inode number in `/proc/PID/fd`; `None` if no process has
    /// accepted it yet.
    Outside(Option<u32>),
    /// The other end was closed, and the data that it sent before has not all arrived.
    DataInTransit,
}

impl LoopbackSplitReason {
    /// Returns the reason as text for a connection; `holder` is the process that has the other end, if known.
    #[must_use]
    pub fn text(&self, addresses: &SocketAddresses, holder: Option<i32>) -> String {
        let kind = if addresses.tcp {
            "connection"
        } else {
            "connected UDP socket"
        };
        let (local, remote) = (addresses.local, addresses.remote.unwrap_or(addresses.local));
        let holder_text = match (self, holder) {
            (Self::DataInTransit, _) => {
                return format!(
                    "its {kind} from {local} to {remote} was closed by the peer while data is in transit: let \
                     the program read it, and try again"
                );
            }
            (Self::Outside(_), Some(pid)) => format!("process {pid} has the other end"),
            (Self::Outside(Some(_)), None) => "another process has the other end".to_owned(),
            (Self::Outside(None), None) => "no process has accepted it".to_owned(),
        };
        format!(
            "its {kind} from {local} to {remote} cannot leave this host, and {holder_text}: move both together, or connect via \
             the group's addresses"
        )
    }
}

impl SocketAddresses {
    /// Creates the ends of a socket, with an IPv4 address as such even if an IPv6 socket has it.
    #[must_use]
    pub fn new(tcp: bool, local: SocketAddr, remote: Option<SocketAddr>) -> Self {
        Self {
            tcp,
            local: canonical(local),
            remote: remote.map(canonical),
        }
    }

    /// Returns the ends of a socket that has an address.
    #[must_use]
    pub fn of(socket: &SocketStaticState) -> Option<Self> {
        let (tcp, local, remote) = match socket {
            SocketStaticState::Connection(fixed) => (true, fixed.local, Some(fixed.remote)),
            SocketStaticState::Unconnected(fixed) => (true, fixed.local?, None),
            SocketStaticState::Datagrams(fixed) => (false, fixed.local, fixed.remote),
            SocketStaticState::Ended { .. } | SocketStaticState::Closed(_) => return None,
        };
        Some(Self::new(tcp, local, remote))
    }

    /// Returns the peer's address if packets to the peer cannot leave the host.
    #[must_use]
    pub fn loopback_peer(&self) -> Option<SocketAddr> {
        let remote = self.remote?;
        let is_loopback = self.local.ip().is_loopback() || remote.ip().is_loopback();
        is_loopback.then_some(remote)
    }

    /// Returns true if a packet from `from` to `at` is for this socket, and not for another connection.
    fn accepts_from(&self, at: SocketAddr, from: SocketAddr) -> bool {
        let ip = self.local.ip();
        self.local.port() == at.port()
            && (ip == at.ip() || ip.is_unspecified())
            && self.remote.is_none_or(|remote| remote == from)
    }
}

/// Returns the connections over the loopback device among a tree's sockets that have their other ends in use outside
/// the tree. The calling thread must be in the tree's network namespace.
///
/// # Errors
/// Errors of netlink.
pub fn split_connections(
    tree: &[SocketAddresses],
) -> io::Result<Vec<(SocketAddresses, LoopbackSplitReason)>> {
    let mut loopback_sockets = tree.iter().filter(|one| one.loopback_peer().is_some());
    let Some(first) = loopback_sockets.next() else {
        return Ok(Vec::new());
    };
    let all_sockets: HashSet<&SocketAddresses> = tree.iter().collect();
    let unconnected: Vec<&SocketAddresses> =
        tree.iter().filter(|one| one.remote.is_none()).collect();
    let mut listed = KernelSockets::default();
    let mut found = Vec::new();
    for socket in std::iter::once(first).chain(loopback_sockets) {
        let Some(remote) = socket.remote else {
            continue;
        };
        let peer_end = SocketAddresses::new(socket.tcp, remote, Some(socket.local));
        let takes = |other: &&&SocketAddresses| {
            other.tcp == socket.tcp && other.accepts_from(remote, socket.local)
        };
        let may_await_accept = unconnected.iter().any(|other| takes(&other));
        // Connections of a listener are separate sockets, or wait in its queue.
        if all_sockets.contains(&peer_end) || (may_await_accept && !socket.tcp) {
            continue;
        }
        let halved = match socket.tcp {
            true => tcp_split(&mut listed, socket, &peer_end, may_await_accept)?,
            false => udp_split(listed.on_port(false, remote.port())?, &peer_end),
        };
        found.extend(halved.map(|halved| (*socket, halved)));
    }
    Ok(found)
}

/// Sockets that the kernel lists, by protocol and local port.
#[derive(Default)]
struct KernelSockets(HashMap<(bool, u16), Vec<(TcpState, ListedConnection)>>);

impl KernelSockets {
    fn on_port(&mut self, tcp: bool, port: u16) -> io::Result<&[(TcpState, ListedConnection)]> {
        let protocol = if tcp {
            libc::IPPROTO_TCP
        } else {
            libc::IPPROTO_UDP
        };
        Ok(match self.0.entry((tcp, port)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(sock_diag::sockets_on_port(protocol, port)?),
        })
    }

    fn connection(
        &mut self,
        wanted: &SocketAddresses,
    ) -> io::Result<Option<&(TcpState, ListedConnection)>> {
        let mut candidates = self.on_port(true, wanted.local.port())?.iter();
        Ok(candidates
            .find(|(_, one)| one.local == wanted.local && Some(one.remote) == wanted.remote))
    }
}

/// Judges a TCP connection; `waits` is true if a listener of the tree may not have accepted it yet.
fn tcp_split(
    listed: &mut KernelSockets,
    own_end: &SocketAddresses,
    peer_end: &SocketAddresses,
    may_await_accept: bool,
) -> io::Result<Option<LoopbackSplitReason>> {
    let Some((state, other)) = listed.connection(peer_end)? else {
        return Ok(None);
    };
    Ok(match (other.inode, state) {
        (0, TcpState::Established | TcpState::SynReceived | TcpState::CloseWait) => {
            (!may_await_accept).then_some(LoopbackSplitReason::Outside(None))
        }
        // No process has the other end.
        (0, _) if other.send_queue == 0 => None,
        (0, _) => {
            // The FIN arrives after all data, and its acknowledgement may still be on the way.
            let arriving = |(state, _): &(TcpState, _)| !state.has_received_fin();
            let own_entry = listed.connection(own_end)?;
            own_entry
                .is_some_and(arriving)
                .then_some(LoopbackSplitReason::DataInTransit)
        }
        (inode, _) => Some(LoopbackSplitReason::Outside(Some(inode))),
    })
}

fn udp_split(
    candidates: &[(TcpState, ListedConnection)],
    wanted: &SocketAddresses,
) -> Option<LoopbackSplitReason> {
    let from = wanted.remote?;
    let takes = |one: &&(TcpState, ListedConnection)| {
        let remote = (one.0 == TcpState::Established).then_some(one.1.remote);
        one.1.inode != 0
            && SocketAddresses::new(false, one.1.local, remote).accepts_from(wanted.local, from)
    };
    let (_, other) = candidates.iter().find(takes)?;
    Some(LoopbackSplitReason::Outside(Some(other.inode)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
    use std::time::{Duration, Instant};

    const ADDRESSES: [IpAddr; 2] = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];

    fn addresses_of(stream: &TcpStream) -> SocketAddresses {
        let peer = stream.peer_addr().expect("connected");
        SocketAddresses::new(true, stream.local_addr().expect("bound"), Some(peer))
    }

    fn listener_addresses(listener: &TcpListener) -> SocketAddresses {
        SocketAddresses::new(true, listener.local_addr().expect("bound"), None)
    }

    fn only_split(tree: &[SocketAddresses]) -> Option<LoopbackSplitReason> {
        let found = split_connections(tree).expect("inspected");
        assert!(found.len() <= 1, "{found:?}");
        found.first().map(|(_, why)| *why)
    }

    #[test]
    fn a_connection_with_one_end_outside_is_found() {
        for address in ADDRESSES {
            let listener = TcpListener::bind((address, 0)).expect("bound");
            let at = listener.local_addr().expect("an address");
            let near = TcpStream::connect(at).expect("connects");
            let (here, queue) = (addresses_of(&near), listener_addresses(&listener));
            assert_eq!(
                only_split(&[here]),
                Some(LoopbackSplitReason::Outside(None))
            );
            assert_eq!(only_split(&[here, queue]), None, "it waits within the tree");
            let (far, _) = listener.accept().expect("accepts");
            assert!(matches!(
                only_split(&[here, queue]),
                Some(LoopbackSplitReason::Outside(Some(_)))
            ));
            assert!(matches!(
                only_split(&[addresses_of(&far)]),
                Some(LoopbackSplitReason::Outside(Some(_)))
            ));
            assert_eq!(
                only_split(&[here, addresses_of(&far)]),
                None,
                "both ends are in the tree"
            );
            drop(far);
            assert_eq!(only_split(&[here, queue]), None, "nobody has the other end");
        }
    }

    #[test]
    fn data_in_transit_before_close_blocks_the_move() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bound");
        let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (mut far, _) = listener.accept().expect("accepts");
        far.set_nonblocking(true).expect("set");
        while far.write(&[7; 65_536]).is_ok() {}
        let here = addresses_of(&near);
        far.shutdown(Shutdown::Both).expect("shut");
        drop(far);
        assert_eq!(
            only_split(&[here]),
            Some(LoopbackSplitReason::DataInTransit)
        );
        let mut reader = near;
        std::io::copy(&mut reader, &mut std::io::sink()).expect("read to the end");
        let began = Instant::now();
        while only_split(&[here]).is_some() {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "exceeded time: the connection is reported as split"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn connected_udp_socket_needs_its_receiver_in_the_tree() {
        for address in ADDRESSES {
            let far = UdpSocket::bind((address, 0)).expect("bound");
            let near = UdpSocket::bind((address, 0)).expect("bound");
            let (there, here) = (far.local_addr().expect("bound"), near.local_addr());
            near.connect(there).expect("connects");
            let here = SocketAddresses::new(false, here.expect("bound"), Some(there));
            assert!(matches!(
                only_split(&[here]),
                Some(LoopbackSplitReason::Outside(Some(_)))
            ));
            assert_eq!(
                only_split(&[here, SocketAddresses::new(false, there, None)]),
                None
            );
            let any: IpAddr = match address {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let everywhere = SocketAddr::new(any, there.port());
            assert_eq!(
                only_split(&[here, SocketAddresses::new(false, everywhere, None)]),
                None
            );
            drop(far);
            assert_eq!(
                only_split(&[here]),
                None,
                "nobody takes them, here or there"
            );
        }
    }
}
