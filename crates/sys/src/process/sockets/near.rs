//! Packets for sockets at addresses of the loopback device, which the stack takes from no other device.

use super::SocketError;
use crate::address::RawAddress;
use crate::sockopt::{check, check_length};
use crate::tcp_repair::RepairError;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Whether a packet is for such a socket.
pub(super) fn is_near(packet: &[u8]) -> bool {
    destination(packet).is_some_and(|ip| ip.is_loopback())
}

/// Sends packets with their own headers; those that [`is_near`] arrive before this returns.
pub(super) fn deliver(packets: &[Vec<u8>]) -> Result<(), SocketError> {
    let sent = packets.iter().try_for_each(|packet| send(packet));
    sent.map_err(|source| {
        let step = "packets over the loopback device";
        RepairError::Kernel { step, source }.into()
    })
}

fn send(packet: &[u8]) -> io::Result<()> {
    let Some(ip) = destination(packet) else {
        return Ok(());
    };
    let (family, kind) = match ip {
        IpAddr::V4(_) => (libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC),
        IpAddr::V6(_) => (libc::AF_INET6, libc::SOCK_RAW | libc::SOCK_CLOEXEC),
    };
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(family, kind, libc::IPPROTO_RAW) };
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let to = RawAddress::for_family(SocketAddr::new(ip, 0), ip.is_ipv6());
    let (to, length) = to.as_raw();
    let (bytes, count) = (packet.as_ptr().cast(), packet.len());
    // SAFETY: `packet` is readable for its length, `to` is an address of that length; both outlive the call.
    let sent = unsafe { libc::sendto(socket.as_raw_fd(), bytes, count, 0, to, length) };
    check_length(sent).map(drop)
}

fn destination(packet: &[u8]) -> Option<IpAddr> {
    match packet.first()? >> 4 {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(packet.get(16..20)?).ok()?)),
        6 => Some(IpAddr::from(
            <[u8; 16]>::try_from(packet.get(24..40)?).ok()?,
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::udp_packet;
    use std::net::UdpSocket;
    use std::time::Duration;

    #[test]
    fn a_packet_comes_from_who_it_says() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(address).expect("bound");
            let patience = Some(Duration::from_secs(60));
            socket.set_read_timeout(patience).expect("set");
            let to = socket.local_addr().expect("bound");
            let from = SocketAddr::new(to.ip(), 7);
            let packet = udp_packet(from, to, b"hello").expect("a packet");
            assert!(is_near(&packet));
            deliver(&[packet]).expect("needs root");
            let mut bytes = [0; 16];
            let (length, sender) = socket.recv_from(&mut bytes).expect("received");
            assert_eq!((&bytes[..length], sender), (&b"hello"[..], from));
        }
        let far = ["10.0.0.1:7", "10.0.0.2:7"].map(|text| text.parse().expect("an address"));
        assert!(!is_near(
            &udp_packet(far[0], far[1], b"").expect("a packet")
        ));
        assert!(!is_near(&[]));
    }
}
