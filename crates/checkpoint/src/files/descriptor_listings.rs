//! Descriptors of many processes at once, listed by the kernel without stopping them: a caller with such a listing
//! hands it in, so that the freeze need not read `/proc`.

use super::descriptor_survey::{
    DescriptorSurvey, DescriptorTableHolder, FdInfoDirectory, ScannedDescriptor,
    ScannedDescriptorTable,
};
use super::epoll_digest::EpollDigest;
use super::error::{FilesError, StepContext};
use super::fdinfo::FdInfo;
use super::fdinfo_cache::FdInfoCache;
use super::{descriptor_survey, syscalls};
use std::collections::HashMap;
use std::io;

/// The descriptors of one process.
#[derive(Clone, Debug)]
pub struct DescriptorListing {
    /// PID as the caller sees it.
    pub pid: i32,
    /// True if a thread has a descriptor table of its own.
    pub thread_tables: bool,
    /// Identity of the process's descriptor table; `None` if the process has no descriptor.
    pub table: Option<u64>,
    /// Descriptors in the order of their numbers.
    pub descriptors: Vec<ListedDescriptor>,
}

/// A listed descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDescriptor {
    /// Descriptor number.
    pub number: u32,
    /// Identity of the open file; equal for two descriptors only if both refer to the same open file.
    pub file: u64,
    /// Fields of `fdinfo` that every kind of file has.
    pub info: FdInfo,
    /// True if `fdinfo` has more lines: lines of the file's kind, and locks.
    pub has_extra_lines: bool,
    /// Digest of the watched files, if the file is an epoll set without locks and the digest is known.
    pub epoll_digest: Option<EpollDigest>,
}

/// Returns all descriptors of `pids` like [`survey::survey`]. Details that a listing lacks are read from `/proc`, so
/// the processes must be stopped.
///
/// # Errors
/// Same as [`survey::survey`].
pub fn survey_from_listings(
    pids: &[i32],
    listings: Vec<DescriptorListing>,
    kept: &FdInfoCache,
) -> Result<DescriptorSurvey, FilesError> {
    let mut listings: HashMap<i32, DescriptorListing> = listings
        .into_iter()
        .map(|listing| (listing.pid, listing))
        .collect();
    let mut tables: Vec<(
        Option<u64>,
        Vec<DescriptorTableHolder>,
        Vec<ListedDescriptor>,
    )> = Vec::new();
    for &pid in pids {
        let Some(inner) = descriptor_survey::live_inner_pid(pid) else {
            continue;
        };
        let Some(listing) = listings.remove(&pid) else {
            return Err(io::Error::from(io::ErrorKind::NotFound))
                .with_step(format!("process {pid}"));
        };
        if listing.thread_tables {
            descriptor_survey::check_threads(pid)?;
        }
        let holder = DescriptorTableHolder {
            pid,
            inner_pid: inner,
        };
        let found = tables.iter_mut().find(|(table, holders, _)| {
            *table == listing.table && (table.is_some() || is_same_table(holders[0].pid, pid))
        });
        match found {
            Some((_, holders, _)) => holders.push(holder),
            None => tables.push((listing.table, vec![holder], listing.descriptors)),
        }
    }
    let mut survey = DescriptorSurvey::new();
    for (_, mut holders, listed) in tables {
        let descriptors = add_details(holders[0].pid, listed, kept)?;
        holders.sort_by_key(|holder| holder.inner_pid);
        let table = ScannedDescriptorTable {
            holders,
            descriptors,
        };
        survey.insert(table.holders[0].inner_pid as u32, table);
    }
    Ok(survey)
}

fn is_same_table(left: i32, right: i32) -> bool {
    syscalls::compare_tables(left, right).is_ok_and(syscalls::Ordering::is_eq)
}

fn add_details(
    pid: i32,
    listed: Vec<ListedDescriptor>,
    kept: &FdInfoCache,
) -> Result<Vec<ScannedDescriptor>, FilesError> {
    let mut details = DetailReader::new(pid, kept);
    let mut complete = Vec::with_capacity(listed.len());
    for descriptor in listed {
        let info = match descriptor.has_extra_lines {
            true => FdInfo {
                has_owner: descriptor.info.has_owner,
                ..details.read(descriptor.number)?
            },
            false => descriptor.info,
        };
        complete.push(ScannedDescriptor {
            number: descriptor.number,
            info,
            file_identity: Some(descriptor.file),
        });
    }
    Ok(complete)
}

/// Reader for the details that a listing lacks of the descriptors of a process.
pub struct DetailReader<'a> {
    pid: i32,
    fdinfo_cache: &'a FdInfoCache,
    directory: Option<FdInfoDirectory>,
}

impl<'a> DetailReader<'a> {
    /// Creates a reader, which opens nothing yet.
    pub fn new(pid: i32, kept: &'a FdInfoCache) -> Self {
        Self {
            pid,
            fdinfo_cache: kept,
            directory: None,
        }
    }

    /// Reads the complete `fdinfo` of a descriptor.
    pub fn read(&mut self, number: u32) -> Result<FdInfo, FilesError> {
        let pid = self.pid;
        if let Some(known) = self.fdinfo_cache.read(pid, number) {
            return Ok(known);
        }
        let directory = match &mut self.directory {
            Some(directory) => directory,
            none => none.insert(FdInfoDirectory::open(pid)?),
        };
        directory
            .read(number)
            .with_step(format!("/proc/{pid}/fdinfo/{number}"))
    }
}
