//! Connections that leave repair mode before the commit is certain.
//!
//! Leaving repair mode costs a system call for each connection, and need not wait for the commit: until then, the
//! filters let none of the packets out, and hold the ones that arrive. Connections that are closed in this state would
//! try to notify their peers for minutes, in vain, with their addresses in use: so they are put back into repair mode
//! first.

use super::{
    CreatedSocket, FileId, RestoredSockets, SocketError, SocketRestorePhase, SocketStaticState,
};
use holdfast_sys::tcp_info::TcpState;
use holdfast_tcp_repair::{TcpDynamicState, map_on_threads};
use std::mem;

/// Returns true if a connection with this state lacks something until it is activated.
pub(super) fn is_incomplete(state: &TcpDynamicState) -> bool {
    state.unsent > 0 || state.fin_unsent || state.state != TcpState::Established
}

impl RestoredSockets {
    /// Takes connections with complete state out of repair mode, with `threads` threads. Packets of the connections
    /// must be held, with ingress and egress shut.
    ///
    /// # Errors
    /// The first refusal by the kernel; the connection concerned is lost.
    pub fn leave_repair(&mut self, threads: usize) -> Result<(), SocketError> {
        let (mut in_repair, mut failed) = (Vec::new(), None);
        for (id, made) in mem::take(&mut self.created) {
            match (made.socket_static, made.phase) {
                (
                    fixed @ SocketStaticState::Connection(_),
                    SocketRestorePhase::Restored(socket, taken),
                ) if !is_incomplete(&taken.state) => {
                    in_repair.push((id, fixed, socket, taken));
                }
                (fixed, phase) => drop(self.created.insert(
                    id,
                    CreatedSocket {
                        socket_static: fixed,
                        phase,
                    },
                )),
            }
        }
        let awake = map_on_threads(in_repair, threads, |(id, fixed, socket, taken)| {
            let outcome = socket.leave_repair();
            (
                id,
                fixed,
                outcome.map(|()| SocketRestorePhase::OutOfRepair(socket, taken)),
            )
        });
        for (id, fixed, phase) in awake {
            match phase {
                Ok(phase) => drop(self.created.insert(
                    id,
                    CreatedSocket {
                        socket_static: fixed,
                        phase,
                    },
                )),
                Err(error) => failed = failed.or(Some(SocketError::from(error).with_id(id))),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Corrects the clocks of connections that were restored before the freeze, if the clocks are late.
    pub(super) fn correct_clocks(&self, now_us: u64) -> Result<(), SocketError> {
        for (id, made) in &self.created {
            let (socket, taken, is_awake) = match &made.phase {
                SocketRestorePhase::Restored(socket, taken) => (socket, taken, false),
                SocketRestorePhase::OutOfRepair(socket, taken) => (socket, taken, true),
                _ => continue,
            };
            let lag_us = taken.clock.and_then(|clock| clock.lag_us(now_us));
            if let (SocketStaticState::Connection(fixed), Some(lag_us)) =
                (&made.socket_static, lag_us)
            {
                let outcome = socket.sync_clock(fixed, &taken.state, lag_us, is_awake);
                outcome.map_err(|error| SocketError::from(error).with_id(*id))?;
            }
        }
        Ok(())
    }
}

impl RestoredSockets {
    /// Closes a socket without sending anything.
    pub(super) fn remove(&mut self, id: FileId) {
        if let Some(made) = self.created.remove(&id) {
            reenter_repair(&made);
        }
    }
}

impl Drop for RestoredSockets {
    fn drop(&mut self) {
        self.created.values().for_each(reenter_repair);
    }
}

/// Puts a connection back into repair mode before it is closed. A connection for which this fails is closed as it is.
fn reenter_repair(created: &CreatedSocket) {
    if let SocketRestorePhase::OutOfRepair(socket, _) = &created.phase {
        let _ = socket.enter_repair();
    }
}
