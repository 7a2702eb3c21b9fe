//! The other end of a connection over the loopback device, which its program has closed: it stays with the kernel, and answers what the
//! end that is still open sends. Without it the first acknowledgement of that end would be answered by a reset.

use super::dynamic_state::{TcpDynamic, Window};
use super::ended::wait_until;
use super::error::{At, RepairError};
use super::inject::injection;
use super::restore::{Preparer, RestoredSocket, WindowProbe, activate, restore};
use super::static_state::TcpStatic;
use crate::tcp_info::{TcpInfo, TcpState};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;

/// A closed end in the making, in repair mode.
#[derive(Debug)]
pub struct ClosedEnd {
    socket: RestoredSocket,
    fixed: TcpStatic,
    state: TcpDynamic,
}

impl ClosedEnd {
    /// Makes the closed end of a connection that has received its FIN. Nothing is sent. None where this host has that end: the
    /// connection was here a while ago.
    ///
    /// # Errors
    /// The kernel's refusal to make, bind or connect the socket.
    pub fn new(
        open: &TcpStatic,
        state: &TcpDynamic,
        preparer: &Preparer,
    ) -> Result<Option<Self>, RepairError> {
        let v6_socket = open.local.is_ipv6();
        let fixed = TcpStatic {
            local: open.remote,
            remote: open.local,
            v6_socket,
            window_scale: open.window_scale.map(|(ours, theirs)| (theirs, ours)),
            receive_shut: false,
            options: preparer.fresh(v6_socket).clone(),
            ..open.clone()
        };
        let state = TcpDynamic {
            state: TcpState::FinWait2,
            write_seq: state.rcv_nxt,
            rcv_nxt: state.first_outgoing(),
            mss: state.mss,
            timestamp: state.timestamp,
            window: Window {
                snd_wnd: state.window.rcv_wnd,
                max_window: state.window.rcv_wnd,
                rcv_wnd: state.window.snd_wnd,
                ..Window::default()
            },
            ..TcpDynamic::default()
        };
        let restored = preparer.prepare(&fixed);
        let restored = restored.and_then(|prepared| restore(prepared, &fixed, &state));
        match restored {
            Ok(socket) => Ok(Some(Self {
                socket,
                fixed,
                state,
            })),
            Err(error) if is_there(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The acknowledgement of its FIN, to be delivered before [`ClosedEnd::leave`].
    #[must_use]
    pub fn packet(&self) -> Option<Vec<u8>> {
        injection(&self.fixed, &self.state)
    }

    /// Leaves it to the kernel, which forgets it after a while (`tcp_fin_timeout`).
    ///
    /// # Errors
    /// The kernel's refusal, or a time limit when the acknowledgement does not come.
    pub fn leave(self) -> Result<(), RepairError> {
        let state = || TcpInfo::read(self.socket.as_fd()).map(|info| info.state);
        wait_until(|| Ok(state()? == TcpState::FinWait2)).at("end (loopback)")?;
        activate(self.socket, &self.fixed, &self.state, WindowProbe::No).map(drop)
    }
}

/// Whether a socket cannot be made because there is one with the same addresses.
fn is_there(error: &RepairError) -> bool {
    let taken = |error: &io::Error| {
        matches!(
            error.kind(),
            ErrorKind::AddrNotAvailable | ErrorKind::AddrInUse
        )
    };
    match error {
        RepairError::AddressInUse(_) => true,
        RepairError::Kernel { source, .. } => taken(source),
        _ => false,
    }
}
