//! Crash recovery of moves: stopped processes, and complete processes that wait for a daemon.

use std::path::Path;

use holdfast_sys::process::acceptor::Restorer;
use holdfast_sys::process::donor::{GivenLock, Held};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::files::WantedLock;
use holdfast_sys::process::following::Following;
use holdfast_sys::tcp_repair::{TcpDynamic, TcpStatic};

use super::records::{Entry, Record};
use super::residents::Came;

/// Resumes processes that an earlier daemon stopped.
pub(super) fn thaw(entries: &[Entry]) -> Result<(), String> {
    held(entries).try_for_each(|held| held.resume().map_err(text))
}

/// Ends processes that an earlier daemon stopped and that run elsewhere.
pub(super) fn release(entries: &[Entry]) -> Result<(), String> {
    held(entries).try_for_each(|held| held.release().map_err(text))
}

/// Returns the locks that stopped processes may have given away.
pub(super) fn given_locks(entries: &[Entry]) -> Vec<GivenLock> {
    let lists = entries.iter().filter_map(|entry| match entry {
        Entry::Locks(list) => Some(list.clone()),
        _ => None,
    });
    lists.flatten().collect()
}

fn held(entries: &[Entry]) -> impl Iterator<Item = &Held> {
    let lists = entries.iter().filter_map(|entry| match entry {
        Entry::Held(list) => Some(list),
        _ => None,
    });
    lists.flatten()
}

/// Returns the processes with remaining pages to send, by index in the tree.
pub(super) fn followed(entries: &[Entry]) -> Option<Vec<Option<i32>>> {
    entries.iter().rev().find_map(|entry| match entry {
        Entry::Follows(pids) => Some(pids.clone()),
        _ => None,
    })
}

/// Returns the restorer of a process that was complete when its daemon died, and the locks that the process lacks;
/// `None` if the process already runs.
pub(super) fn adopt(
    entries: &[Entry],
    way_back: &Path,
) -> Result<Option<(Restorer, Vec<WantedLock>)>, String> {
    let Some(held) = restorer_of(entries) else {
        return Err("nothing is written down of its restorer".to_owned());
    };
    if entries.iter().any(|entry| matches!(entry, Entry::Runs)) {
        return Ok(None);
    }
    match Restorer::adopt(held.pid, way_back).map_err(text)? {
        Some(mut restorer) => {
            let locks = restorer.contended_locks().map_err(text)?;
            Ok(Some((restorer, locks)))
        }
        None if held.exists() => Ok(None),
        None => Err("its restorer has died, and the process with it".to_owned()),
    }
}

/// Resumes such a process. Returns its restorer, unless the process already runs, and the receiver of its remaining
/// pages.
pub(super) fn go(
    entries: &[Entry],
    restorer: Option<Restorer>,
    way_back: &Path,
    record: &Record,
) -> Result<(Option<Restorer>, Option<Following>), String> {
    if entries.iter().any(|entry| matches!(entry, Entry::Runs)) {
        return Ok((None, None));
    }
    let (mut restorer, mut following) = (restorer, None);
    if let Some(restorer) = &mut restorer {
        restorer.wake(&unfinished(entries)).map_err(text)?;
        following = restorer.follow().map_err(text)?;
        restorer.go().map_err(text)?;
    }
    let _ = std::fs::remove_file(way_back);
    record.write(&Entry::Runs)?;
    Ok((restorer, following))
}

fn unfinished(entries: &[Entry]) -> Vec<(TcpStatic, TcpDynamic)> {
    let lists = entries.iter().filter_map(|entry| match entry {
        Entry::Unfinished(list) => Some(list.clone()),
        _ => None,
    });
    lists.flatten().collect()
}

/// Ends the partial process of a daemon that died.
pub(super) fn discard(entries: &[Entry], way_back: &Path, record: &Record) {
    if let Some(held) = restorer_of(entries) {
        // A failure to end it cannot be remedied.
        let _ = held.release();
    }
    let _ = std::fs::remove_file(way_back);
    record.remove();
}

/// Returns the restorer of the process.
pub(super) fn restorer_of(entries: &[Entry]) -> Option<Held> {
    entries.iter().find_map(|entry| match entry {
        Entry::Restorer(held) => Some(*held),
        _ => None,
    })
}

/// Returns the recorded facts about the process.
pub(super) fn came_of(entries: &[Entry]) -> Came {
    let came = entries.iter().find_map(|entry| match entry {
        Entry::Takes { name, hops, group } => Some(Came {
            name: name.clone(),
            hops: *hops,
            group: group.clone(),
        }),
        _ => None,
    });
    came.unwrap_or_default()
}

fn text(error: Error) -> String {
    error.to_string()
}
