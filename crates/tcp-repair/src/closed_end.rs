//! The other end of a loopback connection, closed by its program: the kernel keeps it, and it answers the segments of
//! the end that is still open. Without it, the first acknowledgement of the open end would be answered by a reset.

use super::dynamic_state::{TcpDynamicState, TcpRepairWindow};
use super::error::{RepairError, StepContext};
use super::injected_peer_packet::injected_peer_packet;
use super::reset_socket::wait_until;
use super::restore::{RestoredSocket, SocketPreparer, WindowProbe, activate, restore};
use super::static_state::TcpStaticState;
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;

/// A closed end under construction, in repair mode.
#[derive(Debug)]
pub struct ClosedLoopbackEnd {
    socket: RestoredSocket,
    fixed: TcpStaticState,
    state: TcpDynamicState,
}

impl ClosedLoopbackEnd {
    /// Makes the closed end of a connection that has received its FIN. Nothing is sent. Returns `None` if this host
    /// has that end already, from an earlier stay of the connection.
    ///
    /// # Errors
    /// The kernel's error from making, binding or connecting the socket.
    pub fn new(
        open: &TcpStaticState,
        state: &TcpDynamicState,
        preparer: &SocketPreparer,
    ) -> Result<Option<Self>, RepairError> {
        let v6_socket = open.local.is_ipv6();
        let fixed = TcpStaticState {
            local: open.remote,
            remote: open.local,
            v6_socket,
            window_scale: open.window_scale.map(|(ours, theirs)| (theirs, ours)),
            receive_shut: false,
            options: preparer.fresh_options(v6_socket).clone(),
            ..open.clone()
        };
        let state = TcpDynamicState {
            state: TcpState::FinWait2,
            write_seq: state.rcv_nxt,
            rcv_nxt: state.first_outgoing(),
            mss: state.mss,
            timestamp: state.timestamp,
            window: TcpRepairWindow {
                snd_wnd: state.window.rcv_wnd,
                max_window: state.window.rcv_wnd,
                rcv_wnd: state.window.snd_wnd,
                ..TcpRepairWindow::default()
            },
            ..TcpDynamicState::default()
        };
        let restored = preparer.prepare(&fixed);
        let restored = restored.and_then(|prepared| restore(prepared, &fixed, &state));
        match restored {
            Ok(socket) => Ok(Some(Self {
                socket,
                fixed,
                state,
            })),
            Err(error) if is_already_present(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the acknowledgement of its FIN, to be delivered before [`ClosedLoopbackEnd::leave_to_kernel`].
    #[must_use]
    pub fn packet(&self) -> Option<Vec<u8>> {
        injected_peer_packet(&self.fixed, &self.state)
    }

    /// Closes the descriptor. The kernel keeps the closed end until `tcp_fin_timeout` expires.
    ///
    /// # Errors
    /// The kernel's error, or `TimedOut` if the acknowledgement does not arrive.
    pub fn leave_to_kernel(self) -> Result<(), RepairError> {
        let state = || TcpInfo::read(self.socket.as_fd()).map(|info| info.state);
        wait_until(|| Ok(state()? == TcpState::FinWait2)).at_step("FIN-WAIT-2 (loopback)")?;
        activate(self.socket, &self.fixed, &self.state, WindowProbe::Never).map(drop)
    }
}

/// Returns true if the error means that a socket with the same addresses exists.
fn is_already_present(error: &RepairError) -> bool {
    let is_in_use = |error: &io::Error| {
        matches!(
            error.kind(),
            ErrorKind::AddrNotAvailable | ErrorKind::AddrInUse
        )
    };
    match error {
        RepairError::AddressInUse(_) => true,
        RepairError::Kernel { source, .. } => is_in_use(source),
        _ => false,
    }
}
