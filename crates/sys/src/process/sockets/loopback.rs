//! Connections over the loopback device, which move with both ends or not at all.

use super::SocketStatic;
use crate::address::canonical;
use crate::sock_diag::{self, Connection};
use crate::tcp_info::TcpState;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;

/// A socket of a tree, identified by its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ends {
    /// True for TCP, false for UDP.
    pub tcp: bool,
    /// Address of the socket itself.
    pub local: SocketAddr,
    /// Address of the peer, if the socket is connected.
    pub remote: Option<SocketAddr>,
}

/// Reason why a connection over the loopback device cannot move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halved {
    /// The other end is a socket of another process, with this inode number in `/proc/PID/fd`; `None` if no process has
    /// accepted it yet.
    Outside(Option<u32>),
    /// The other end was closed, and the data that it sent before has not all arrived.
    Arriving,
}

impl Halved {
    /// Returns the reason as text for a connection; `holder` is the process that has the other end, if known.
    #[must_use]
    pub fn text(&self, of: &Ends, holder: Option<i32>) -> String {
        let kind = if of.tcp {
            "connection"
        } else {
            "UDP socket, connected"
        };
        let (local, remote) = (of.local, of.remote.unwrap_or(of.local));
        let who = match (self, holder) {
            (Self::Arriving, _) => {
                return format!(
                    "its {kind} from {local} to {remote} was closed at the other end, and not all that was sent has come: let \
                     the program read it, and try again"
                );
            }
            (Self::Outside(_), Some(pid)) => format!("process {pid} has the other end"),
            (Self::Outside(Some(_)), None) => "another process has the other end".to_owned(),
            (Self::Outside(None), None) => "nobody has accepted it".to_owned(),
        };
        format!(
            "its {kind} from {local} to {remote} cannot leave this host, and {who}: move both together, or connect it over \
             addresses of the group"
        )
    }
}

impl Ends {
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
    pub fn of(socket: &SocketStatic) -> Option<Self> {
        let (tcp, local, remote) = match socket {
            SocketStatic::Connection(fixed) => (true, fixed.local, Some(fixed.remote)),
            SocketStatic::Unconnected(fixed) => (true, fixed.local?, None),
            SocketStatic::Datagrams(fixed) => (false, fixed.local, fixed.remote),
            SocketStatic::Ended { .. } | SocketStatic::Closed(_) => return None,
        };
        Some(Self::new(tcp, local, remote))
    }

    /// Returns the peer's address if packets to the peer cannot leave the host.
    #[must_use]
    pub fn over_loopback(&self) -> Option<SocketAddr> {
        let remote = self.remote?;
        let either = self.local.ip().is_loopback() || remote.ip().is_loopback();
        either.then_some(remote)
    }

    /// Returns true if a packet from `from` to `at` is for this socket, and not for another connection.
    fn takes(&self, at: SocketAddr, from: SocketAddr) -> bool {
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
pub fn halved(tree: &[Ends]) -> io::Result<Vec<(Ends, Halved)>> {
    let mut near = tree.iter().filter(|one| one.over_loopback().is_some());
    let Some(first) = near.next() else {
        return Ok(Vec::new());
    };
    let all: HashSet<&Ends> = tree.iter().collect();
    let others: Vec<&Ends> = tree.iter().filter(|one| one.remote.is_none()).collect();
    let mut listed = Listed::default();
    let mut found = Vec::new();
    for one in std::iter::once(first).chain(near) {
        let Some(remote) = one.remote else { continue };
        let mirrored = Ends::new(one.tcp, remote, Some(one.local));
        let takes = |other: &&&Ends| other.tcp == one.tcp && other.takes(remote, one.local);
        let waits = others.iter().any(|other| takes(&other));
        // Connections of a listener are separate sockets, or wait in its queue.
        if all.contains(&mirrored) || (waits && !one.tcp) {
            continue;
        }
        let halved = match one.tcp {
            true => tcp(&mut listed, one, &mirrored, waits)?,
            false => udp(listed.at(false, remote.port())?, &mirrored),
        };
        found.extend(halved.map(|halved| (*one, halved)));
    }
    Ok(found)
}

/// Sockets that the kernel lists, by protocol and local port.
#[derive(Default)]
struct Listed(HashMap<(bool, u16), Vec<(TcpState, Connection)>>);

impl Listed {
    fn at(&mut self, tcp: bool, port: u16) -> io::Result<&[(TcpState, Connection)]> {
        let protocol = if tcp {
            libc::IPPROTO_TCP
        } else {
            libc::IPPROTO_UDP
        };
        Ok(match self.0.entry((tcp, port)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(sock_diag::sockets(protocol, port)?),
        })
    }

    fn connection(&mut self, wanted: &Ends) -> io::Result<Option<&(TcpState, Connection)>> {
        let mut there = self.at(true, wanted.local.port())?.iter();
        Ok(there.find(|(_, one)| one.local == wanted.local && Some(one.remote) == wanted.remote))
    }
}

/// Judges a TCP connection; `waits` is true if a listener of the tree may not have accepted it yet.
fn tcp(listed: &mut Listed, near: &Ends, far: &Ends, waits: bool) -> io::Result<Option<Halved>> {
    let Some((state, other)) = listed.connection(far)? else {
        return Ok(None);
    };
    Ok(match (other.inode, state) {
        (0, TcpState::Established | TcpState::SynReceived | TcpState::CloseWait) => {
            (!waits).then_some(Halved::Outside(None))
        }
        // No process has the other end.
        (0, _) if other.send_queue == 0 => None,
        (0, _) => {
            // The FIN arrives after all data, and its acknowledgement may still be on the way.
            let arriving = |(state, _): &(TcpState, _)| !state.received_fin();
            let near = listed.connection(near)?;
            near.is_some_and(arriving).then_some(Halved::Arriving)
        }
        (inode, _) => Some(Halved::Outside(Some(inode))),
    })
}

fn udp(there: &[(TcpState, Connection)], wanted: &Ends) -> Option<Halved> {
    let from = wanted.remote?;
    let takes = |one: &&(TcpState, Connection)| {
        let remote = (one.0 == TcpState::Established).then_some(one.1.remote);
        one.1.inode != 0 && Ends::new(false, one.1.local, remote).takes(wanted.local, from)
    };
    let (_, other) = there.iter().find(takes)?;
    Some(Halved::Outside(Some(other.inode)))
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

    fn ends(stream: &TcpStream) -> Ends {
        let peer = stream.peer_addr().expect("connected");
        Ends::new(true, stream.local_addr().expect("bound"), Some(peer))
    }

    fn listening(listener: &TcpListener) -> Ends {
        Ends::new(true, listener.local_addr().expect("bound"), None)
    }

    fn only(tree: &[Ends]) -> Option<Halved> {
        let found = halved(tree).expect("looks");
        assert!(found.len() <= 1, "{found:?}");
        found.first().map(|(_, why)| *why)
    }

    #[test]
    fn a_connection_with_one_end_outside_is_found() {
        for address in ADDRESSES {
            let listener = TcpListener::bind((address, 0)).expect("bound");
            let at = listener.local_addr().expect("an address");
            let near = TcpStream::connect(at).expect("connects");
            let (here, queue) = (ends(&near), listening(&listener));
            assert_eq!(only(&[here]), Some(Halved::Outside(None)));
            assert_eq!(only(&[here, queue]), None, "it waits within the tree");
            let (far, _) = listener.accept().expect("accepts");
            assert!(matches!(
                only(&[here, queue]),
                Some(Halved::Outside(Some(_)))
            ));
            assert!(matches!(
                only(&[ends(&far)]),
                Some(Halved::Outside(Some(_)))
            ));
            assert_eq!(only(&[here, ends(&far)]), None, "both ends are in the tree");
            drop(far);
            assert_eq!(only(&[here, queue]), None, "nobody has the other end");
        }
    }

    #[test]
    fn what_was_sent_before_the_end_has_to_come() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bound");
        let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        let (mut far, _) = listener.accept().expect("accepts");
        far.set_nonblocking(true).expect("set");
        while far.write(&[7; 65_536]).is_ok() {}
        let here = ends(&near);
        far.shutdown(Shutdown::Both).expect("shut");
        drop(far);
        assert_eq!(only(&[here]), Some(Halved::Arriving));
        let mut reader = near;
        std::io::copy(&mut reader, &mut std::io::sink()).expect("read to the end");
        let began = Instant::now();
        while only(&[here]).is_some() {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "exceeded time: it came"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn datagrams_need_who_takes_them() {
        for address in ADDRESSES {
            let far = UdpSocket::bind((address, 0)).expect("bound");
            let near = UdpSocket::bind((address, 0)).expect("bound");
            let (there, here) = (far.local_addr().expect("bound"), near.local_addr());
            near.connect(there).expect("connects");
            let here = Ends::new(false, here.expect("bound"), Some(there));
            assert!(matches!(only(&[here]), Some(Halved::Outside(Some(_)))));
            assert_eq!(only(&[here, Ends::new(false, there, None)]), None);
            let any: IpAddr = match address {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let everywhere = SocketAddr::new(any, there.port());
            assert_eq!(only(&[here, Ends::new(false, everywhere, None)]), None);
            drop(far);
            assert_eq!(only(&[here]), None, "nobody takes them, here or there");
        }
    }
}
