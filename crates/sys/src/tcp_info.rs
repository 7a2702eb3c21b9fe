//! State and measurements of a connection, as `TCP_INFO` reports them.

use crate::sockopt::get_bytes;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::BorrowedFd;

/// Number of bytes of the kernel's `struct tcp_info` that are read, up to and including `tcpi_rcv_wnd`.
const TCP_INFO_LEN: usize = 236;

/// A connection's state (RFC 9293 section 3.3.2), with the kernel's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TcpState {
    /// Both directions are open (ESTABLISHED).
    Established,
    /// A SYN was sent and not acknowledged (SYN-SENT).
    SynSent,
    /// A SYN was received and answered (SYN-RECEIVED).
    SynReceived,
    /// The own FIN is queued or sent, and not acknowledged (FIN-WAIT-1).
    FinWait1,
    /// The own FIN is acknowledged; the peer still sends (FIN-WAIT-2).
    FinWait2,
    /// Both FINs are acknowledged; the connection waits for stray segments to expire (TIME-WAIT).
    TimeWait,
    /// No connection (CLOSED).
    Close,
    /// The peer's FIN arrived; the own direction is open (CLOSE-WAIT).
    CloseWait,
    /// The peer's FIN arrived, then the own FIN was sent (LAST-ACK).
    LastAck,
    /// The socket waits for connections (LISTEN).
    Listen,
    /// The own FIN was sent, then the peer's arrived; the own one is not acknowledged (CLOSING).
    Closing,
}

impl TcpState {
    /// Returns the state with the number `tcpi_state` (`net/tcp_states.h`); `None` for an unknown number.
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

    /// Returns true if the program has closed its sending direction (its FIN is queued, sent or acknowledged).
    #[must_use]
    pub fn has_sent_fin(self) -> bool {
        matches!(
            self,
            Self::FinWait1 | Self::FinWait2 | Self::Closing | Self::LastAck
        )
    }

    /// Returns true if the peer's FIN has been received.
    #[must_use]
    pub fn has_received_fin(self) -> bool {
        matches!(self, Self::CloseWait | Self::LastAck | Self::Closing)
    }
}

/// The part of `struct tcp_info` (`linux/tcp.h`) that Holdfast uses. Times are in microseconds, sizes in bytes,
/// windows and counts in the kernel's units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// Connection state.
    pub state: TcpState,
    /// `TCPI_OPT_*` bits.
    pub options: u8,
    /// Window scale that the peer announced: shift of received windows.
    pub snd_wscale: u8,
    /// Window scale announced to the peer: shift of sent windows.
    pub rcv_wscale: u8,
    /// Retransmission timeout.
    pub rto_us: u32,
    /// Largest segment sent.
    pub snd_mss: u32,
    /// Segments sent and not acknowledged; for a listener, connections that wait to be accepted.
    pub unacked: u32,
    /// Segments acknowledged selectively; for a listener, the largest number of waiting connections.
    pub sacked: u32,
    /// Segments presumed lost.
    pub lost: u32,
    /// Path MTU.
    pub pmtu: u32,
    /// Smoothed round-trip time.
    pub rtt_us: u32,
    /// Variation of the round-trip time.
    pub rttvar_us: u32,
    /// Slow start threshold, segments.
    pub snd_ssthresh: u32,
    /// Congestion window, segments.
    pub snd_cwnd: u32,
    /// Segments retransmitted since the connection began.
    pub total_retrans: u32,
    /// Bytes acknowledged by the peer since the connection began.
    pub bytes_acked: u64,
    /// Bytes received in order since the connection began.
    pub bytes_received: u64,
    /// Bytes in the send queue that were never sent.
    pub notsent_bytes: u32,
    /// Smallest measured round-trip time.
    pub min_rtt_us: u32,
    /// Recent delivery rate, bytes per second.
    pub delivery_rate: u64,
    /// The peer's receive window.
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
    /// Reads the kernel's `TCP_INFO` of `fd`.
    ///
    /// # Errors
    /// Errors of `getsockopt(2)`; `InvalidData` when the kernel's answer is too short or contains an unknown state.
    pub fn read(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let mut bytes = [0u8; TCP_INFO_LEN];
        let length = get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
        Self::parse(&bytes[..length.min(TCP_INFO_LEN)]).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "unexpected size or content of TCP_INFO",
            )
        })
    }

    /// Parses a `struct tcp_info`, as `TCP_INFO` and sock_diag return it; `None` for too few bytes or an unknown state.
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
