//! Packets for sockets at loopback addresses, which the stack accepts from no other device.

use super::SocketError;
use crate::packet::{destination, send};
use crate::tcp_repair::RepairError;

/// Returns true if a packet is for a loopback address.
pub(super) fn is_near(packet: &[u8]) -> bool {
    destination(packet).is_some_and(|ip| ip.is_loopback())
}

/// Sends packets with their own headers; packets for loopback addresses arrive before this function returns.
pub(super) fn deliver(packets: &[Vec<u8>]) -> Result<(), SocketError> {
    let sent = packets.iter().try_for_each(|packet| send(packet));
    sent.map_err(|source| {
        let step = "packets over the loopback device";
        RepairError::Kernel { step, source }.into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::udp_packet;
    use std::net::{SocketAddr, UdpSocket};
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
