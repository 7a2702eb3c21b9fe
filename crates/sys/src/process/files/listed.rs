//! Descriptors of many processes at once, listed by the kernel without stopping them: a caller with such a listing
//! hands it in, so that the freeze need not read `/proc`.

use super::error::{At, FilesError};
use super::fdinfo::FdInfo;
use super::kept::Kept;
use super::survey::{DescriptorSeen, FdInfoDirectory, Holder, Survey, TableSeen};
use super::watches::Watches;
use super::{raw, survey};
use std::collections::HashMap;
use std::io;

/// The descriptors of one process.
#[derive(Clone, Debug)]
pub struct Listing {
    /// PID as the caller sees it.
    pub pid: i32,
    /// True if a thread has a descriptor table of its own.
    pub thread_tables: bool,
    /// Identity of the process's descriptor table; `None` if the process has no descriptor.
    pub table: Option<u64>,
    /// Descriptors in the order of their numbers.
    pub descriptors: Vec<Listed>,
}

/// A listed descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Descriptor number.
    pub number: u32,
    /// Identity of the open file; equal for two descriptors only if both refer to the same open file.
    pub file: u64,
    /// Fields of `fdinfo` that every kind of file has.
    pub info: FdInfo,
    /// True if `fdinfo` has more lines: lines of the file's kind, and locks.
    pub has_more: bool,
    /// Digest of the watched files, if the file is an epoll set without locks and the digest is known.
    pub watches: Option<Watches>,
}

/// Returns all descriptors of `pids` like [`survey::survey`]. Details that a listing lacks are read from `/proc`, so
/// the processes must be stopped.
///
/// # Errors
/// Same as [`survey::survey`].
pub fn survey(pids: &[i32], listings: Vec<Listing>, kept: &Kept) -> Result<Survey, FilesError> {
    let mut listings: HashMap<i32, Listing> = listings
        .into_iter()
        .map(|listing| (listing.pid, listing))
        .collect();
    let mut tables: Vec<(Option<u64>, Vec<Holder>, Vec<Listed>)> = Vec::new();
    for &pid in pids {
        let Some(inner) = survey::inner_pid(pid) else {
            continue;
        };
        let Some(listing) = listings.remove(&pid) else {
            return Err(io::Error::from(io::ErrorKind::NotFound)).at(format!("process {pid}"));
        };
        if listing.thread_tables {
            survey::check_threads(pid)?;
        }
        let holder = Holder { pid, inner };
        let found = tables.iter_mut().find(|(table, holders, _)| {
            *table == listing.table && (table.is_some() || is_same_table(holders[0].pid, pid))
        });
        match found {
            Some((_, holders, _)) => holders.push(holder),
            None => tables.push((listing.table, vec![holder], listing.descriptors)),
        }
    }
    let mut survey = Survey::new();
    for (_, mut holders, listed) in tables {
        let descriptors = complete(holders[0].pid, listed, kept)?;
        holders.sort_by_key(|holder| holder.inner);
        let table = TableSeen {
            holders,
            descriptors,
        };
        survey.insert(table.holders[0].inner as u32, table);
    }
    Ok(survey)
}

fn is_same_table(one: i32, other: i32) -> bool {
    raw::compare_tables(one, other).is_ok_and(raw::Ordering::is_eq)
}

fn complete(pid: i32, listed: Vec<Listed>, kept: &Kept) -> Result<Vec<DescriptorSeen>, FilesError> {
    let mut more = More::new(pid, kept);
    let mut complete = Vec::with_capacity(listed.len());
    for one in listed {
        let info = match one.has_more {
            true => FdInfo {
                owned: one.info.owned,
                ..more.read(one.number)?
            },
            false => one.info,
        };
        complete.push(DescriptorSeen {
            number: one.number,
            info,
            file: Some(one.file),
        });
    }
    Ok(complete)
}

/// Reader for the details that a listing lacks of the descriptors of a process.
pub struct More<'a> {
    pid: i32,
    kept: &'a Kept,
    directory: Option<FdInfoDirectory>,
}

impl<'a> More<'a> {
    /// Creates a reader, which opens nothing yet.
    pub fn new(pid: i32, kept: &'a Kept) -> Self {
        Self {
            pid,
            kept,
            directory: None,
        }
    }

    /// Reads the complete `fdinfo` of a descriptor.
    pub fn read(&mut self, number: u32) -> Result<FdInfo, FilesError> {
        let pid = self.pid;
        if let Some(known) = self.kept.read(pid, number) {
            return Ok(known);
        }
        let directory = match &mut self.directory {
            Some(directory) => directory,
            none => none.insert(FdInfoDirectory::open(pid)?),
        };
        directory
            .read(number)
            .at(format!("/proc/{pid}/fdinfo/{number}"))
    }
}
