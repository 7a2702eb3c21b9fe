//! Connections that leave repair mode before it is certain that they act here.
//!
//! It costs as many system calls as there are connections, which need not wait for the commit: until then the filters let
//! nothing of them out, and hold what comes. Closed like that they would try to tell their peers for minutes, in vain, with
//! their addresses in use: so they go back into repair mode first.

use super::{FileId, Made, Phase, SocketError, SocketStatic, Sockets};
use crate::tcp_info::TcpState;
use crate::tcp_repair::{TcpDynamic, each};
use std::mem;

/// Whether a connection that has this lacks something until it acts.
pub(super) fn lacks(state: &TcpDynamic) -> bool {
    state.unsent > 0 || state.fin_unsent || state.state != TcpState::Established
}

impl Sockets {
    /// Takes connections that have all they need out of repair mode, by so many threads. Their packets must be held, ingress and
    /// egress shut.
    ///
    /// # Errors
    /// The first that the kernel refused; it is gone.
    pub fn awaken(&mut self, threads: usize) -> Result<(), SocketError> {
        let (mut asleep, mut failed) = (Vec::new(), None);
        for (id, made) in mem::take(&mut self.made) {
            match (made.fixed, made.phase) {
                (fixed @ SocketStatic::Connection(_), Phase::Restored(socket, taken))
                    if !lacks(&taken.state) =>
                {
                    asleep.push((id, fixed, socket, taken));
                }
                (fixed, phase) => drop(self.made.insert(id, Made { fixed, phase })),
            }
        }
        let awake = each(asleep, threads, |(id, fixed, socket, taken)| {
            let outcome = socket.awaken();
            (id, fixed, outcome.map(|()| Phase::Awake(socket, taken)))
        });
        for (id, fixed, phase) in awake {
            match phase {
                Ok(phase) => drop(self.made.insert(id, Made { fixed, phase })),
                Err(error) => failed = failed.or(Some(SocketError::from(error).of(id))),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// The clocks of connections that were restored ahead, as far as they are late.
    pub(super) fn keep_time(&self, now_us: u64) -> Result<(), SocketError> {
        for (id, made) in &self.made {
            let (socket, taken, is_awake) = match &made.phase {
                Phase::Restored(socket, taken) => (socket, taken, false),
                Phase::Awake(socket, taken) => (socket, taken, true),
                _ => continue,
            };
            let lag_us = taken.clock.and_then(|clock| clock.lag_us(now_us));
            if let (SocketStatic::Connection(fixed), Some(lag_us)) = (&made.fixed, lag_us) {
                let outcome = socket.keep_time(fixed, &taken.state, lag_us, is_awake);
                outcome.map_err(|error| SocketError::from(error).of(*id))?;
            }
        }
        Ok(())
    }
}

impl Sockets {
    /// Closes a socket in silence.
    pub(super) fn remove(&mut self, id: FileId) {
        if let Some(made) = self.made.remove(&id) {
            lull(&made);
        }
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        self.made.values().for_each(lull);
    }
}

/// Before it is closed. One that cannot be is closed as it is.
fn lull(made: &Made) {
    if let Phase::Awake(socket, _) = &made.phase {
        let _ = socket.lull();
    }
}
