//! The steps for many connections at once, on one or two threads. A failure of one connection is its own.

use super::dynamic_state::extract_polled;
use super::static_state::{poll_entry, poll_now};
use super::{
    PreparedSocket, Preparer, RepairError, RestoredSocket, StaticReader, TcpDynamic, TcpStatic,
    WindowProbe, activate, restore,
};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Fewer connections than this are not worth a second thread (starting one costs about 30 us).
const WORTH_A_THREAD: usize = 32;

/// Applies `step` to every item, in order; with `threads` of 2 or more, in as many slices at once.
pub fn each<T, R, F>(items: Vec<T>, threads: usize, step: F) -> Vec<R>
where
    T: Send,
    R: Send,
    F: Fn(T) -> R + Sync,
{
    if threads < 2 || items.len() < WORTH_A_THREAD {
        return items.into_iter().map(step).collect();
    }
    let share = items.len().div_ceil(threads);
    let mut results = Vec::with_capacity(items.len());
    let mut rest = items;
    let mut slices = Vec::with_capacity(threads);
    while rest.len() > share {
        let tail = rest.split_off(share);
        slices.push(std::mem::replace(&mut rest, tail));
    }
    std::thread::scope(|scope| {
        let step = &step;
        let others: Vec<_> = slices
            .into_iter()
            .map(|slice| scope.spawn(move || slice.into_iter().map(step).collect::<Vec<R>>()))
            .collect();
        let last: Vec<R> = rest.into_iter().map(step).collect();
        for other in others {
            match other.join() {
                Ok(part) => results.extend(part),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results.extend(last);
    });
    results
}

/// [`super::read_static`] for each, over one netlink socket.
///
/// # Errors
/// What making that socket gives.
pub fn read_static_all(
    sockets: &[BorrowedFd<'_>],
) -> Result<Vec<Result<TcpStatic, RepairError>>, RepairError> {
    let mut reader = StaticReader::new()?;
    Ok(sockets.iter().map(|socket| reader.read(*socket)).collect())
}

/// [`Preparer::prepare`] for each.
pub fn prepare_all(
    preparer: &Preparer,
    fixed: &[TcpStatic],
    threads: usize,
) -> Vec<Result<PreparedSocket, RepairError>> {
    each(fixed.iter().collect(), threads, |one| preparer.prepare(one))
}

/// [`super::extract_into`] for each; `states` is made as long as `connections` and its buffers are used again.
pub fn extract_all(
    connections: &[(BorrowedFd<'_>, &TcpStatic)],
    states: &mut Vec<TcpDynamic>,
    threads: usize,
) -> Vec<Result<(), RepairError>> {
    states.resize_with(connections.len(), TcpDynamic::default);
    let mut polls: Vec<_> = connections.iter().map(|(fd, _)| poll_entry(*fd)).collect();
    if let Err(RepairError::Kernel { step, source }) = poll_now(&mut polls) {
        let refuse = |_: &(BorrowedFd<'_>, &TcpStatic)| {
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
    each(items, threads, |(((fd, fixed), state), poll)| {
        extract_polled(*fd, fixed, state, poll.revents)
    })
}

/// [`restore`] for each.
pub fn restore_all(
    connections: Vec<(PreparedSocket, &TcpStatic, &TcpDynamic)>,
    threads: usize,
) -> Vec<Result<RestoredSocket, RepairError>> {
    each(connections, threads, |(socket, fixed, state)| {
        restore(socket, fixed, state)
    })
}

/// [`activate`] for each.
pub fn activate_all(
    connections: Vec<(RestoredSocket, &TcpStatic, &TcpDynamic)>,
    probe: WindowProbe,
    threads: usize,
) -> Vec<Result<OwnedFd, RepairError>> {
    each(connections, threads, |(socket, fixed, state)| {
        activate(socket, fixed, state, probe)
    })
}
