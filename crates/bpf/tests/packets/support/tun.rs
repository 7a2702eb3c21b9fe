//! The hold device: a TUN that takes and returns whole GSO packets.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;

use super::host::Host;

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const IFF_TUN_NO_PI_VNET_HDR: libc::c_short = 0x0001 | 0x1000 | 0x4000;
const CSUM_TSO4_TSO6: libc::c_ulong = 1 | 2 | 4;
/// Size in bytes of `struct virtio_net_hdr` before each packet.
pub const VNET_HEADER_BYTES: usize = 10;

pub struct Tun(File);

impl Tun {
    pub const NAME: &str = "hold0";

    pub fn new(host: &Host) -> Self {
        let file = host.run(open);
        // Address generation is disabled before the device goes up, or its own neighbour solicitations would be in the
        // hold.
        host.ip(&format!("link set {} addrgenmode none", Self::NAME));
        host.ip(&format!("link set {} mtu 65535 up", Self::NAME));
        Self(file)
    }

    /// Returns the next packet with its `virtio_net_hdr`; `None` if none arrives within `wait_ms`.
    pub fn read(&self, wait_ms: i32) -> Option<Vec<u8>> {
        let mut poll = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, wait_ms) } != 1 {
            return None;
        }
        let mut packet = vec![0; 70_000];
        let length = (&self.0).read(&mut packet).expect("read the hold");
        packet.truncate(length);
        Some(packet)
    }

    /// Passes a packet to the stack.
    pub fn replay(&self, packet: &[u8]) {
        let mut packet = packet.to_vec();
        packet[0] &= 1; // NEEDS_CSUM stays, DATA_VALID is cleared
        (&self.0).write_all(&packet).expect("replay");
    }
}

fn open() -> File {
    let file = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .expect("tun");
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(Tun::NAME.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = IFF_TUN_NO_PI_VNET_HDR;
    // SAFETY: the request is a valid ifreq and lives through the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) };
    assert_eq!(result, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    // SAFETY: this request takes a number, not a pointer.
    let offload = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD, CSUM_TSO4_TSO6) };
    assert_eq!(
        offload,
        0,
        "TUNSETOFFLOAD: {}",
        std::io::Error::last_os_error()
    );
    file
}
