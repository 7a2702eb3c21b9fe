//! Each step for many connections at once, on one or more threads. A failure of one connection does not affect the
//! others.

use super::dynamic_state::extract_polled;
use super::static_state::{poll_entry, poll_now};
use super::{
    PreparedSocket, RepairError, RestoredSocket, SocketPreparer, TcpDynamicState, TcpStaticReader,
    TcpStaticState, WindowProbe, activate, restore,
};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Smallest number of connections that justifies a second thread (starting one costs about 30 us).
const ITEMS_PER_THREAD_MIN: usize = 32;

/// Applies `step` to every item and returns the results in order; with `threads` of 2 or more, in as many slices at
/// once.
pub fn map_on_threads<T, R, F>(items: Vec<T>, threads: usize, step: F) -> Vec<R>
where
    T: Send,
    R: Send,
    F: Fn(T) -> R + Sync,
{
    if threads < 2 || items.len() < ITEMS_PER_THREAD_MIN {
        return items.into_iter().map(step).collect();
    }
    let slice_len = items.len().div_ceil(threads);
    let mut results = Vec::with_capacity(items.len());
    let mut rest = items;
    let mut pending_slices = Vec::with_capacity(threads);
    while rest.len() > slice_len {
        let slice = rest.split_off(slice_len);
        pending_slices.push(std::mem::replace(&mut rest, slice));
    }
    std::thread::scope(|scope| {
        let step = &step;
        let handles: Vec<_> = pending_slices
            .into_iter()
            .map(|slice| scope.spawn(move || slice.into_iter().map(step).collect::<Vec<R>>()))
            .collect();
        let own_results: Vec<R> = rest.into_iter().map(step).collect();
        for other in handles {
            match other.join() {
                Ok(part) => results.extend(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results.extend(own_results);
    });
    results
}

/// Does the same as [`super::read_static`] for each socket, over one netlink socket.
///
/// # Errors
/// Errors of making the netlink socket.
pub fn read_static_all(
    sockets: &[BorrowedFd<'_>],
) -> Result<Vec<Result<TcpStaticState, RepairError>>, RepairError> {
    let mut reader = TcpStaticReader::new()?;
    Ok(sockets.iter().map(|socket| reader.read(*socket)).collect())
}

/// Does the same as [`SocketPreparer::prepare`] for each connection.
pub fn prepare_all(
    preparer: &SocketPreparer,
    fixed: &[TcpStaticState],
    threads: usize,
) -> Vec<Result<PreparedSocket, RepairError>> {
    map_on_threads(fixed.iter().collect(), threads, |one| preparer.prepare(one))
}

/// Does the same as [`super::extract_into`] for each connection; `states` is resized to the number of `connections`,
/// and its buffers are reused.
pub fn extract_all(
    connections: &[(BorrowedFd<'_>, &TcpStaticState)],
    states: &mut Vec<TcpDynamicState>,
    threads: usize,
) -> Vec<Result<(), RepairError>> {
    states.resize_with(connections.len(), TcpDynamicState::default);
    let mut polls: Vec<_> = connections.iter().map(|(fd, _)| poll_entry(*fd)).collect();
    if let Err(RepairError::Kernel { step, source }) = poll_now(&mut polls) {
        let refuse = |_: &(BorrowedFd<'_>, &TcpStaticState)| {
            let source = std::io::Error::from(source.kind());
            Err(RepairError::Kernel { step, source })
        };
        return connections.iter().map(refuse).collect();
    }
    let items: Vec<_> = connections
        .iter()
        .zip(states.iter_mut())
        .zip(polls)
        .collect();
    map_on_threads(items, threads, |(((fd, fixed), state), poll)| {
        extract_polled(*fd, fixed, state, poll.revents)
    })
}

/// Does the same as [`restore`] for each connection.
pub fn restore_all(
    connections: Vec<(PreparedSocket, &TcpStaticState, &TcpDynamicState)>,
    threads: usize,
) -> Vec<Result<RestoredSocket, RepairError>> {
    map_on_threads(connections, threads, |(socket, fixed, state)| {
        restore(socket, fixed, state)
    })
}

/// Does the same as [`activate`] for each connection.
pub fn activate_all(
    connections: Vec<(RestoredSocket, &TcpStaticState, &TcpDynamicState)>,
    probe: WindowProbe,
    threads: usize,
) -> Vec<Result<OwnedFd, RepairError>> {
    map_on_threads(connections, threads, |(socket, fixed, state)| {
        activate(socket, fixed, state, probe)
    })
}
