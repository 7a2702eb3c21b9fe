//! Sockets as the kernel's observer reports them, converted to the types of `tcp-repair`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;

use holdfast_bpf::socket_snapshots::{SnapshotReader, SocketSnapshot, socket_flags};
use holdfast_sys::tcp_info::TcpState;
use holdfast_tcp_repair::{QueueLevels, TcpStaticSnapshot};

/// Snapshots many sockets in one pass, if the kernel supports it.
pub struct SocketObserver {
    observer: Option<SnapshotReader>,
    /// Inode number of the network namespace of the creating thread.
    namespace: u32,
}

impl SocketObserver {
    /// Loads the observer. A kernel without support only costs time, because sockets are then read one by one.
    #[must_use]
    pub fn new() -> Self {
        let observer = SnapshotReader::load();
        if let Err(error) = &observer {
            tracing::warn!(%error, "cannot read sockets in bulk: preparing a handoff takes longer");
        }
        Self {
            observer: observer.ok(),
            namespace: Self::namespace_inode(),
        }
    }

    /// Returns the inode number of the calling thread's network namespace.
    pub(super) fn namespace_inode() -> u32 {
        let inode = std::fs::metadata("/proc/thread-self/ns/net").map_or(0, |file| file.ino());
        u32::try_from(inode).unwrap_or(0)
    }

    /// Returns the snapshot of each socket, in the given order.
    #[must_use]
    pub fn snapshot(&mut self, sockets: &[BorrowedFd<'_>]) -> Vec<Option<SocketSnapshot>> {
        let observer = self.observer.as_mut();
        let observed = observer.map(|observer| observer.read_once(sockets));
        match observed {
            Some(Ok(seen)) => seen,
            Some(Err(error)) => {
                tracing::debug!(%error, "cannot read sockets in bulk: reading them one by one");
                vec![None; sockets.len()]
            }
            None => vec![None; sockets.len()],
        }
    }

    /// Converts a snapshot to the type of `tcp-repair`; `None` if the socket's state has no equivalent there.
    #[must_use]
    pub fn to_static_snapshot<'a>(
        &self,
        socket: &'a SocketSnapshot,
    ) -> Option<TcpStaticSnapshot<'a>> {
        let has_flag = |flag| socket.flags & flag != 0;
        Some(TcpStaticSnapshot {
            local: socket_address(socket.local, socket.local_port),
            remote: socket_address(socket.remote, socket.remote_port),
            v6_socket: has_flag(socket_flags::V6),
            window_scale: has_flag(socket_flags::WINDOW_SCALE)
                .then_some((socket.snd_wscale, socket.rcv_wscale)),
            sack: has_flag(socket_flags::SACK),
            timestamps: has_flag(socket_flags::TIMESTAMPS),
            snd_mss: socket.mss_cache,
            state: TcpState::from_kernel(socket.state)?,
            is_plain: has_flag(socket_flags::PLAIN) && socket.namespace == self.namespace,
            receive_shut: has_flag(socket_flags::RECEIVE_SHUT),
            send_buffer: socket.send_buffer,
            receive_buffer: socket.receive_buffer,
            receive_low_water: socket.receive_low_water,
            window_clamp: socket.window_clamp,
            queue: queue_lengths(socket),
            option_fingerprint: &socket.option_fingerprint,
        })
    }
}

impl Default for SocketObserver {
    fn default() -> Self {
        Self::new()
    }
}

fn socket_address(ip: [u8; 16], port: [u8; 2]) -> SocketAddr {
    let ip = IpAddr::V6(Ipv6Addr::from(ip)).to_canonical();
    SocketAddr::new(ip, u16::from_be_bytes(port))
}

/// Computes the queues as the kernel does for `SIOCOUTQ` and similar requests, and for `TCP_INFO`.
fn queue_lengths(socket: &SocketSnapshot) -> QueueLevels {
    let unsent = socket.write_seq.wrapping_sub(socket.snd_nxt);
    QueueLevels {
        unsent,
        unacknowledged: socket.snd_nxt.wrapping_sub(socket.snd_una),
        unread: socket.rcv_nxt.wrapping_sub(socket.copied_seq),
        delivery_rate: delivery_rate(socket),
        srtt_us: socket.srtt_us,
    }
}

/// Returns the delivery rate in bytes/s; 0 if unknown.
pub(super) fn delivery_rate(socket: &SocketSnapshot) -> u64 {
    let delivered = u64::from(socket.rate_delivered) * u64::from(socket.mss_cache) * 1_000_000;
    delivered
        .checked_div(u64::from(socket.rate_interval_us))
        .unwrap_or(0)
}
