//! Crash recovery of moves: stopped processes, and complete processes that wait for a daemon.

use std::path::Path;

use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::{LockHandover, ProcessRef};
use holdfast_checkpoint::files::ContendedLock;
use holdfast_checkpoint::postcopy::LazyPages;
use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState};
use holdfast_wire::failure::{Failure, KernelFault, NodeFault};

use super::arrived_processes::ProcessInfo;
use super::move_records::{MoveRecord, RecordEntry};
use crate::failure_conversion::IntoFailure;

/// Resumes processes that an earlier daemon stopped.
pub(super) fn thaw(entries: &[RecordEntry]) -> Result<(), Failure> {
    held_processes(entries)
        .try_for_each(|process| process.resume().map_err(IntoFailure::into_own_failure))
}

/// Ends processes that an earlier daemon stopped and that run elsewhere.
pub(super) fn release(entries: &[RecordEntry]) -> Result<(), Failure> {
    held_processes(entries)
        .try_for_each(|process| process.release().map_err(IntoFailure::into_own_failure))
}

/// Returns the locks that stopped processes may have given away.
pub(super) fn given_locks(entries: &[RecordEntry]) -> Vec<LockHandover> {
    let lists = entries.iter().filter_map(|entry| match entry {
        RecordEntry::GivenLocks(list) => Some(list.clone()),
        _ => None,
    });
    lists.flatten().collect()
}

/// Returns the processes that an earlier daemon stopped.
pub(super) fn held_processes(entries: &[RecordEntry]) -> impl Iterator<Item = &ProcessRef> {
    let lists = entries.iter().filter_map(|entry| match entry {
        RecordEntry::HeldProcesses(list) => Some(list),
        _ => None,
    });
    lists.flatten()
}

/// Returns the processes with remaining pages to send, by index in the tree.
pub(super) fn postcopy_pids(entries: &[RecordEntry]) -> Option<Vec<Option<i32>>> {
    entries.iter().rev().find_map(|entry| match entry {
        RecordEntry::PostcopyPids(pids) => Some(pids.clone()),
        _ => None,
    })
}

/// Returns the restorer of a process that was complete when its daemon died, and the locks that the process lacks;
/// `None` if the process already runs.
pub(super) fn adopt_restorer(
    entries: &[RecordEntry],
    adoption_socket: &Path,
) -> Result<Option<(Restorer, Vec<ContendedLock>)>, Failure> {
    let Some(restorer_ref) = restorer_of(entries) else {
        return Err(NodeFault::RestorerNotRecorded.into());
    };
    if entries
        .iter()
        .any(|entry| matches!(entry, RecordEntry::Running))
    {
        return Ok(None);
    }
    match Restorer::adopt(restorer_ref.pid, adoption_socket).map_err(IntoFailure::into_failure)? {
        Some(mut restorer) => {
            let locks = restorer
                .contended_locks()
                .map_err(IntoFailure::into_failure)?;
            Ok(Some((restorer, locks)))
        }
        None if restorer_ref.exists() => Ok(None),
        None => Err(KernelFault::RestorerDied.into()),
    }
}

/// Resumes such a process. Returns its restorer, unless the process already runs, and the receiver of its remaining
/// pages.
pub(super) fn resume_adopted(
    entries: &[RecordEntry],
    restorer: Option<Restorer>,
    adoption_socket: &Path,
    record: &MoveRecord,
) -> Result<(Option<Restorer>, Option<LazyPages>), Failure> {
    if entries
        .iter()
        .any(|entry| matches!(entry, RecordEntry::Running))
    {
        return Ok((None, None));
    }
    let (mut restorer, mut fault_handler) = (restorer, None);
    if let Some(restorer) = &mut restorer {
        restorer
            .activate_connections(&unfinished_connections(entries))
            .map_err(IntoFailure::into_failure)?;
        fault_handler = restorer
            .open_lazy_pages()
            .map_err(IntoFailure::into_failure)?;
        restorer.resume().map_err(IntoFailure::into_failure)?;
    }
    let _ = std::fs::remove_file(adoption_socket);
    record.write(&RecordEntry::Running)?;
    Ok((restorer, fault_handler))
}

fn unfinished_connections(entries: &[RecordEntry]) -> Vec<(TcpStaticState, TcpDynamicState)> {
    let lists = entries.iter().filter_map(|entry| match entry {
        RecordEntry::UnfinishedConnections(list) => Some(list.clone()),
        _ => None,
    });
    lists.flatten().collect()
}

/// Ends the partial process of a daemon that died.
pub(super) fn discard(entries: &[RecordEntry], adoption_socket: &Path, record: &MoveRecord) {
    if let Some(restorer_ref) = restorer_of(entries) {
        // A failure to end it cannot be remedied.
        let _ = restorer_ref.release();
    }
    let _ = std::fs::remove_file(adoption_socket);
    record.remove();
}

/// Returns the restorer of the process.
pub(super) fn restorer_of(entries: &[RecordEntry]) -> Option<ProcessRef> {
    entries.iter().find_map(|entry| match entry {
        RecordEntry::Restorer(held) => Some(*held),
        _ => None,
    })
}

/// Returns the recorded facts about the process.
pub(super) fn process_info(entries: &[RecordEntry]) -> ProcessInfo {
    let info = entries.iter().find_map(|entry| match entry {
        RecordEntry::Acceptor { name, hops, group } => Some(ProcessInfo {
            name: name.clone(),
            hops: *hops,
            group: group.clone(),
        }),
        _ => None,
    });
    info.unwrap_or_default()
}
