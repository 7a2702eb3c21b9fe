//! `TCP_INFO`: what the kernel tells about a connection.

use crate::sockopt::get_bytes;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::BorrowedFd;

/// Bytes of the kernel's `struct tcp_info` that are read here, up to and with `tcpi_rcv_wnd`.
const READ: usize = 236;

/// A connection's state (RFC 9293 section 3.3.2), with the kernel's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TcpState {
    /// Both directions open.
    Established,
    /// An own SYN is out.
    SynSent,
    /// A SYN was answered.
    SynReceived,
    /// Own FIN sent or queued, not acknowledged.
    FinWait1,
    /// Own FIN acknowledged, the peer still sends.
    FinWait2,
    /// Both FINs acknowledged; waiting.
    TimeWait,
    /// No connection.
    Close,
    /// The peer's FIN arrived, own direction open.
    CloseWait,
    /// The peer's FIN arrived, then own FIN was sent.
    LastAck,
    /// Waiting for connections.
    Listen,
    /// Own FIN was sent, then the peer's arrived, own not acknowledged.
    Closing,
}

impl TcpState {
    /// From the number in `tcpi_state` (`net/tcp_states.h`); `None` for a number without a meaning.
    #[must_use]
    pub fn from_kernel(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Established,
            2 => Self::SynSent,
            3 | 12 => Self::SynReceived,
            4 => Self::FinWait1,
            5 => Self::FinWait2,
            6 => Self::TimeWait,
            7 => Self::Close,
            8 => Self::CloseWait,
            9 => Self::LastAck,
            10 => Self::Listen,
            11 => Self::Closing,
            _ => return None,
        })
    }

    /// Whether the program has closed its sending direction (its FIN is queued, sent or acknowledged).
    #[must_use]
    pub fn sent_fin(self) -> bool {
        matches!(
            self,
            Self::FinWait1 | Self::FinWait2 | Self::Closing | Self::LastAck
        )
    }

    /// Whether the peer's FIN has been received.
    #[must_use]
    pub fn received_fin(self) -> bool {
        matches!(self, Self::CloseWait | Self::LastAck | Self::Closing)
    }
}

/// The part of `struct tcp_info` (`linux/tcp.h`) that Holdfast uses. Times are in microseconds, sizes in bytes,
/// windows and counts as the kernel has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// Connection state.
    pub state: TcpState,
    /// `TCPI_OPT_*` bits.
    pub options: u8,
    /// Window scale the peer asked for: shift of windows received.
    pub snd_wscale: u8,
    /// Window scale told to the peer: shift of windows sent.
    pub rcv_wscale: u8,
    /// Retransmission timeout.
    pub rto_us: u32,
    /// Largest segment sent.
    pub snd_mss: u32,
    /// Segments sent and not acknowledged; of a listener, connections that wait to be accepted.
    pub unacked: u32,
    /// Segments acknowledged selectively; of a listener, how many connections may wait.
    pub sacked: u32,
    /// Segments thought lost.
    pub lost: u32,
    /// Path MTU.
    pub pmtu: u32,
    /// Smoothed round-trip time.
    pub rtt_us: u32,
    /// Its variation.
    pub rttvar_us: u32,
    /// Slow start threshold, segments.
    pub snd_ssthresh: u32,
    /// Congestion window, segments.
    pub snd_cwnd: u32,
    /// Segments retransmitted since the start.
    pub total_retrans: u32,
    /// Bytes acknowledged by the peer since the start.
    pub bytes_acked: u64,
    /// Bytes received in order since the start.
    pub bytes_received: u64,
    /// Bytes in the send queue that were never sent.
    pub notsent_bytes: u32,
    /// Smallest round-trip time seen.
    pub min_rtt_us: u32,
    /// Bytes per second delivered lately.
    pub delivery_rate: u64,
    /// The peer's window.
    pub snd_wnd: u32,
}

/// Timestamps are in use (`TCPI_OPT_TIMESTAMPS`).
pub const OPT_TIMESTAMPS: u8 = 1;
/// Selective acknowledgements are in use (`TCPI_OPT_SACK`).
pub const OPT_SACK: u8 = 2;
/// Windows are scaled (`TCPI_OPT_WSCALE`).
pub const OPT_WSCALE: u8 = 4;
/// Explicit congestion notification was negotiated (`TCPI_OPT_ECN`).
pub const OPT_ECN: u8 = 8;

impl TcpInfo {
    /// Asks the kernel about `fd`.
    ///
    /// # Errors
    /// What `getsockopt(2)` gives; `InvalidData` when the kernel's answer is too short or its state unknown.
    pub fn read(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let mut bytes = [0u8; READ];
        let length = get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
        Self::parse(&bytes[..length.min(READ)])
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "TCP_INFO not understood"))
    }

    /// From the bytes of a `struct tcp_info`, as `TCP_INFO` and sock_diag give it; `None` when they are too few or the
    /// state is unknown.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let u32_at = |at: usize| {
            let field = bytes.get(at..at + 4)?;
            Some(u32::from_ne_bytes(field.try_into().ok()?))
        };
        let u64_at = |at: usize| {
            let field = bytes.get(at..at + 8)?;
            Some(u64::from_ne_bytes(field.try_into().ok()?))
        };
        let scales = *bytes.get(6)?;
        Some(Self {
            state: TcpState::from_kernel(*bytes.first()?)?,
            options: *bytes.get(5)?,
            snd_wscale: scales & 15,
            rcv_wscale: scales >> 4,
            rto_us: u32_at(8)?,
            snd_mss: u32_at(16)?,
            unacked: u32_at(24)?,
            sacked: u32_at(28)?,
            lost: u32_at(32)?,
            pmtu: u32_at(60)?,
            rtt_us: u32_at(68)?,
            rttvar_us: u32_at(72)?,
            snd_ssthresh: u32_at(76)?,
            snd_cwnd: u32_at(80)?,
            total_retrans: u32_at(100)?,
            bytes_acked: u64_at(120)?,
            bytes_received: u64_at(128)?,
            notsent_bytes: u32_at(144)?,
            min_rtt_us: u32_at(148)?,
            delivery_rate: u64_at(160)?,
            snd_wnd: u32_at(228)?,
        })
    }
}
