//! The hold: a TUN device that keeps packets in transit and replays them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use holdfast_sys::packet::udp_packet;
use holdfast_sys::tun::{PACKET_LEN_MAX, Tun, VNET_HEADER_LEN, VnetHeader};
use holdfast_wire::{Flow, InboundPacket};

use super::HeldPacket;

/// Reason why the hold could not be made.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot create the TUN device for held packets: {0}. Check that /dev/net/tun exists and the daemon is root"
)]
pub struct HoldDeviceError(io::Error);

/// The hold: the TUN device that keeps packets of flows in transit, and replays them.
pub struct HoldDevice {
    tun: Tun,
    buffer: Vec<u8>,
}

impl HoldDevice {
    /// Checks that TUN devices can be made, without making one.
    ///
    /// # Errors
    /// The system's refusal to open `/dev/net/tun`.
    pub fn check_support() -> Result<(), HoldDeviceError> {
        let mut options = std::fs::File::options();
        let opened = options.read(true).write(true).open("/dev/net/tun");
        opened.map(drop).map_err(HoldDeviceError)
    }

    /// Makes the TUN device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn new(name: &str) -> Result<Self, HoldDeviceError> {
        let tun = Tun::open(name).map_err(HoldDeviceError)?;
        Ok(Self {
            tun,
            buffer: vec![0; PACKET_LEN_MAX],
        })
    }

    /// Returns the interface index, for the ingress program.
    pub fn ifindex(&self) -> u32 {
        self.tun.interface().index
    }

    /// Returns the next packet and its flow; `None` if no packet is waiting.
    pub fn read(&mut self) -> Option<(Flow, HeldPacket)> {
        loop {
            let (header, packet) = self.tun.read(&mut self.buffer).ok()?;
            let Some(inbound) = InboundPacket::parse(packet) else {
                continue;
            };
            let header = header.for_reinjection(packet);
            let mut bytes = Vec::with_capacity(VNET_HEADER_LEN + packet.len());
            bytes.extend_from_slice(&header.to_bytes());
            bytes.extend_from_slice(packet);
            return Some((
                inbound.flow,
                HeldPacket {
                    bytes,
                    segment: inbound.segment,
                },
            ));
        }
    }

    /// Gives a held packet to the stack.
    pub fn replay(&self, bytes: &[u8]) {
        let Some(header) = VnetHeader::parse(bytes) else {
            return;
        };
        if let Err(error) = self.tun.write(header, &bytes[VNET_HEADER_LEN..]) {
            tracing::debug!(%error, "cannot replay a held packet");
        }
    }

    /// Gives a packet that another node held to the stack, if the packet belongs to `flow`.
    pub fn replay_if_of_flow(&self, flow: &Flow, bytes: &[u8]) {
        let inbound = bytes.get(VNET_HEADER_LEN..).and_then(InboundPacket::parse);
        if inbound.is_some_and(|inbound| inbound.flow == *flow) {
            self.replay(bytes);
        } else {
            tracing::warn!(%flow, "the donor sent a packet of another flow");
        }
    }

    /// Gives a packet made by the daemon, with full checksums, to the stack.
    pub fn inject(&self, packet: &[u8]) {
        if let Err(error) = self.tun.write(VnetHeader::default(), packet) {
            tracing::debug!(%error, "cannot inject a packet");
        }
    }

    /// Gives a datagram of a flow to the stack.
    pub fn inject_datagram(&self, flow: &Flow, payload: &[u8]) {
        match udp_packet(flow.remote, flow.local, payload) {
            Some(packet) => self.inject(&packet),
            None => tracing::warn!(%flow, "cannot deliver a datagram that is too long"),
        }
    }
}

impl AsFd for HoldDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tun.as_fd()
    }
}
