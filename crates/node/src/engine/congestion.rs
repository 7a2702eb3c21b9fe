//! Transfer of a connection's congestion window and threshold to its new socket (see `bpf/c/congestion.bpf.c`).

use std::os::fd::BorrowedFd;

use holdfast_bpf::shared::Congestion as MapCongestion;
use holdfast_sys::tcp_info::TcpInfo;
use holdfast_sys::tcp_repair::{self, TcpDynamic, TcpStatic};
use holdfast_wire::Flow;

use crate::dataplane::{Dataplane, key_of};

/// The kernel's value for a slow-start threshold that is not set.
const NO_THRESHOLD: u32 = 0x7fff_ffff;

/// Restores congestion windows of moved sockets. Does nothing if the kernel lacks struct_ops.
pub struct Congestion {
    restorer: Option<String>,
}

impl Congestion {
    /// Uses the restorer that the data plane registered, if any.
    pub fn new(dataplane: &Dataplane) -> Self {
        let restorer = dataplane.programs.congestion_restorer().map(str::to_owned);
        if restorer.is_none() {
            tracing::warn!(
                "this kernel takes no congestion control in eBPF: moved connections learn their path anew"
            );
        }
        Self { restorer }
    }

    /// Gives a restored socket its congestion window and threshold, unless the values are equal already, as for most
    /// connections that never had much to send. If setting fails, the socket continues with the kernel's initial
    /// window. Returns true if the map has an entry to remove later with [`Congestion::forget`].
    pub fn give(
        &self,
        dataplane: &Dataplane,
        flow: &Flow,
        socket: BorrowedFd<'_>,
        (fixed, state): (&TcpStatic, &TcpDynamic),
    ) -> bool {
        let (Some(restorer), Some(table)) = (&self.restorer, &dataplane.programs.congestion) else {
            return false;
        };
        let had = &state.congestion;
        let value = MapCongestion {
            cwnd: had.window.max(1),
            ssthresh: had.threshold.unwrap_or(NO_THRESHOLD),
            ecn: u32::from(fixed.ecn),
        };
        let has = TcpInfo::read(socket);
        let same = |has: TcpInfo| has.snd_cwnd == value.cwnd && has.snd_ssthresh == value.ssthresh;
        if !fixed.ecn && has.is_ok_and(same) {
            return false;
        }
        if let Err(error) = table.set(&key_of(flow), &value) {
            tracing::debug!(%flow, %error, "the congestion window is not restored");
            return false;
        }
        let given = tcp_repair::set_congestion_control(socket, restorer).and_then(|()| {
            tcp_repair::set_congestion_control(socket, &fixed.options.congestion_control)
        });
        if let Err(error) = given {
            tracing::debug!(%flow, %error, "the congestion window is not restored");
        }
        true
    }

    /// Removes the flow's map entry, after its socket was activated or given up.
    pub fn forget(&self, dataplane: &Dataplane, flow: &Flow) {
        if let Some(table) = &dataplane.programs.congestion {
            let _ = table.remove(&key_of(flow));
        }
    }
}
