//! Groups of descriptors that refer to one open file, and so have one position and one set of flags.

use super::{DigestedPart, TreeDigest};
use crate::error::{Context, Result};
use crate::files::compare_open_files;
use crate::procfs;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// A process by the PID that it sees itself, and a descriptor number.
type InnerFd = (i32, u32);
/// The same process by the PID that the caller sees, and the number.
type OuterFd = (i32, u32);

/// Adds, for each descriptor of an open file that has several, the first one. A process is given by the PID that it
/// sees itself, and the PID that the caller sees.
pub(super) fn add(digest: &mut TreeDigest, processes: &[(i32, i32)]) -> Result<()> {
    // Only descriptors with the same name can refer to one open file.
    let mut by_link: BTreeMap<String, Vec<(InnerFd, OuterFd)>> = BTreeMap::new();
    for (own, pid) in processes {
        for number in procfs::numeric_entries(&format!("/proc/{pid}/fd"), *pid)? {
            let link = procfs::link_text(*pid, &format!("fd/{number}"))?;
            let number = number as u32;
            let found = by_link.entry(link).or_default();
            found.push(((*own, number), (*pid, number)));
        }
    }
    for descriptors in by_link.into_values() {
        for group in group_by_open_file(descriptors)?
            .iter()
            .filter(|same| same.len() > 1)
        {
            let first = group.iter().min().copied().unwrap_or_default();
            let checksum = crc32c::crc32c(format!("{first:?}").as_bytes());
            for (process, number) in group.iter().copied() {
                digest.insert(DigestedPart::Sharing { process, number }, checksum);
            }
        }
    }
    Ok(())
}

/// Groups descriptors by open file. The kernel shows no identity of an open file, but an order.
fn group_by_open_file(descriptors: Vec<(InnerFd, OuterFd)>) -> Result<Vec<Vec<InnerFd>>> {
    let mut files: Vec<(OuterFd, Vec<InnerFd>)> = Vec::new();
    for (own, seen) in descriptors {
        let mut failed = None;
        let position = files.binary_search_by(|(other, _)| {
            compare_open_files(*other, seen).unwrap_or_else(|error| {
                failed = Some(error);
                Ordering::Equal
            })
        });
        if let Some(error) = failed {
            return Err(error).context(|| format!("comparing descriptor {} of {}", seen.1, seen.0));
        }
        match position {
            Ok(at) => files[at].1.push(own),
            Err(at) => files.insert(at, (seen, vec![own])),
        }
    }
    Ok(files.into_iter().map(|(_, own)| own).collect())
}
