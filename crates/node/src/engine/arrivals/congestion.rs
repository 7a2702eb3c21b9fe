//! Transfer of a connection's congestion window and threshold to its new socket (see `bpf/c/congestion.bpf.c`).

use std::os::fd::BorrowedFd;

use holdfast_bpf::shared_with_c::Congestion as MapCongestion;
use holdfast_sys::tcp_info::TcpInfo;
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use holdfast_wire::Flow;

use crate::dataplane::{Dataplane, flow_key};

/// The kernel's value for a slow-start threshold that is not set.
const NO_THRESHOLD: u32 = 0x7fff_ffff;

/// Restores congestion windows of moved sockets. Does nothing if the kernel lacks struct_ops.
pub struct CongestionRestorer {
    restorer: Option<String>,
}

impl CongestionRestorer {
    /// Uses the restorer that the data plane registered, if any.
    pub fn new(dataplane: &Dataplane) -> Self {
        let restorer = dataplane
            .programs
            .congestion_restorer_name()
            .map(str::to_owned);
        if restorer.is_none() {
            tracing::warn!(
                "this kernel lacks congestion control in eBPF: moved connections start with the initial window"
            );
        }
        Self { restorer }
    }

    /// Gives a restored socket its congestion window and threshold, unless the values are equal already, as for most
    /// connections that never had much to send. If setting fails, the socket continues with the kernel's initial
    /// window. Returns true if the map has an entry to remove later with [`CongestionRestorer::forget`].
    pub fn restore(
        &self,
        dataplane: &Dataplane,
        flow: &Flow,
        socket: BorrowedFd<'_>,
        (static_state, state): (&TcpStaticState, &TcpDynamicState),
    ) -> bool {
        let (Some(restorer), Some(table)) = (&self.restorer, &dataplane.programs.congestion) else {
            return false;
        };
        let saved = &state.congestion;
        let value = MapCongestion {
            cwnd: saved.window.max(1),
            ssthresh: saved.threshold.unwrap_or(NO_THRESHOLD),
            ecn: u32::from(static_state.ecn),
        };
        let current = TcpInfo::read(socket);
        let is_equal =
            |has: TcpInfo| has.snd_cwnd == value.cwnd && has.snd_ssthresh == value.ssthresh;
        if !static_state.ecn && current.is_ok_and(is_equal) {
            return false;
        }
        if let Err(error) = table.set(&flow_key(flow), &value) {
            tracing::debug!(%flow, %error, "cannot restore the congestion window");
            return false;
        }
        let result = holdfast_tcp_repair::set_congestion_control(socket, restorer).and_then(|()| {
            holdfast_tcp_repair::set_congestion_control(
                socket,
                &static_state.options.congestion_control,
            )
        });
        if let Err(error) = result {
            tracing::debug!(%flow, %error, "cannot restore the congestion window");
        }
        true
    }

    /// Removes the flow's map entry, after its socket was activated or given up.
    pub fn forget(&self, dataplane: &Dataplane, flow: &Flow) {
        if let Some(table) = &dataplane.programs.congestion {
            let _ = table.remove(&flow_key(flow));
        }
    }
}
