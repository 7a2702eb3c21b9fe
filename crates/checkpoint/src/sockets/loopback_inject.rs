//! Packets for sockets at loopback addresses, which the stack accepts from no other device.

use super::SocketError;
use holdfast_sys::packet::{destination, send};
use holdfast_tcp_repair::RepairError;

/// Returns true if a packet is for a loopback address.
pub(super) fn is_to_loopback(packet: &[u8]) -> bool {
    destination(packet).is_some_and(|ip| ip.is_loopback())
}

/// Sends packets with their own headers; packets for loopback addresses arrive before this function returns.
pub(super) fn deliver(packets: &[Vec<u8>]) -> Result<(), SocketError> {
    let sent = packets.iter().try_for_each(|packet| send(packet));
    sent.map_err(|source| {
        let step = "injecting packets into the loopback device";
        RepairError::Kernel { step, source }.into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_sys::packet::udp_packet;
    use std::net::{SocketAddr, UdpSocket};
    use std::time::Duration;

    #[test]
    fn injected_packet_keeps_its_source_address() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(address).expect("bound");
            let timeout = Some(Duration::from_secs(60));
            socket.set_read_timeout(timeout).expect("set");
            let to = socket.local_addr().expect("bound");
            let from = SocketAddr::new(to.ip(), 7);
            let packet = udp_packet(from, to, b"hello").expect("a packet");
            assert!(is_to_loopback(&packet));
            deliver(&[packet]).expect("needs root");
            let mut bytes = [0; 16];
            let (length, sender) = socket.recv_from(&mut bytes).expect("received");
            assert_eq!((&bytes[..length], sender), (&b"hello"[..], from));
        }
        let remote_packet =
            ["10.0.0.1:7", "10.0.0.2:7"].map(|text| text.parse().expect("an address"));
        assert!(!is_to_loopback(
            &udp_packet(remote_packet[0], remote_packet[1], b"").expect("a packet")
        ));
        assert!(!is_to_loopback(&[]));
    }
}
