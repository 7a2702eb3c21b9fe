//! Descriptors as the kernel shows them from beside a process, many at once: what a caller that can look that way hands
//! in, so that `/proc` need not be read in a freeze.

use super::error::{At, FilesError};
use super::fdinfo::FdInfo;
use super::kept::Kept;
use super::survey::{DescriptorSeen, FdInfoDirectory, Holder, Survey, TableSeen};
use super::watches::Watches;
use super::{raw, survey};
use std::collections::HashMap;
use std::io;

/// The descriptors of a process.
#[derive(Clone, Debug)]
pub struct Listing {
    /// As the caller sees it.
    pub pid: i32,
    /// A thread has a descriptor table of its own.
    pub thread_tables: bool,
    /// Identity of its descriptor table; `None` where it has no descriptor.
    pub table: Option<u64>,
    /// By number.
    pub descriptors: Vec<Listed>,
}

/// A descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its number.
    pub number: u32,
    /// Identity of the open file, the same for two descriptors only where that is the same.
    pub file: u64,
    /// What `fdinfo` says of every kind.
    pub info: FdInfo,
    /// `fdinfo` has more lines: those of its kind, and locks.
    pub has_more: bool,
    /// What it watches, where it is an epoll set, nobody has locked it, and that is known.
    pub watches: Option<Watches>,
}

/// All descriptors of `pids`, as [`survey::survey`] finds them. What a listing leaves open is read from `/proc`, so the
/// processes must stand still.
///
/// # Errors
/// As there.
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

/// Reads what a listing leaves open of the descriptors of a process.
pub struct More<'a> {
    pid: i32,
    kept: &'a Kept,
    directory: Option<FdInfoDirectory>,
}

impl<'a> More<'a> {
    /// Nothing is opened yet.
    pub fn new(pid: i32, kept: &'a Kept) -> Self {
        Self {
            pid,
            kept,
            directory: None,
        }
    }

    /// All of `fdinfo`.
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
