//! Descriptor listings made from `/proc`, equal to the ones that a caller makes if it can read many descriptors at
//! once.

use holdfast_checkpoint::files::{
    DescriptorListing, EpollDigest, EpollLine, FdInfo, ListedDescriptor,
};
use std::collections::HashMap;
use std::fs;

/// A process, one of its descriptors, and the identity of the open file.
type FileIdentity = (i32, u32, u64);

/// Lists the descriptors of these processes.
pub fn list_descriptors(pids: &[i32]) -> Vec<DescriptorListing> {
    // Candidates for the same open file, with the identities assigned to them.
    let mut known: HashMap<(u32, u64, Option<u32>), Vec<FileIdentity>> = HashMap::new();
    let mut next = 0;
    let listing = |pid: &i32| {
        let numbers = fs::read_dir(format!("/proc/{pid}/fdinfo")).ok()?;
        let mut numbers: Vec<u32> = numbers
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        numbers.sort_unstable();
        let mut descriptors = Vec::new();
        for number in numbers {
            let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
            let mut info = FdInfo::parse(&text).expect("fdinfo");
            let candidates = known
                .entry((info.mount, info.inode, info.number("eventfd-id")))
                .or_default();
            let same_file = candidates
                .iter()
                .find(|(other, fd, _)| is_same_object(0, (*other, *fd), (*pid, number)));
            let file = same_file.map_or(next, |(_, _, file)| *file);
            if file == next {
                candidates.push((*pid, number, next));
                next += 1;
            }
            let has_more = !info.kind_lines.is_empty();
            info.kind_lines.clear();
            info.has_owner = has_signal_owner(*pid, number);
            descriptors.push(ListedDescriptor {
                number,
                file,
                info,
                has_extra_lines: has_more,
                epoll_digest: None,
            });
        }
        let first = pids
            .iter()
            .find(|other| is_same_object(2, (**other, 0), (*pid, 0)));
        Some(DescriptorListing {
            pid: *pid,
            thread_tables: false,
            table: first
                .filter(|_| !descriptors.is_empty())
                .map(|pid| *pid as u64),
            descriptors,
        })
    };
    let mut listings: Vec<DescriptorListing> = pids.iter().filter_map(listing).collect();
    let files: Vec<FileIdentity> = known.into_values().flatten().collect();
    for listing in &mut listings {
        for one in &mut listing.descriptors {
            one.epoll_digest = epoll_watches((listing.pid, one.number), &files);
        }
    }
    listings
}

/// Returns true if a descriptor has an owner for signals (F_SETOWN).
fn has_signal_owner(pid: i32, number: u32) -> bool {
    use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    use std::os::fd::AsRawFd;
    let process = Pid::from_raw(pid).expect("a pid");
    let process = pidfd_open(process, PidfdFlags::empty()).expect("a process");
    let copy = pidfd_getfd(process, number as i32, PidfdGetfdFlags::empty());
    // SAFETY: no pointers are passed.
    copy.is_ok_and(|copy| unsafe { libc::fcntl(copy.as_raw_fd(), libc::F_GETOWN) } != 0)
}

/// Returns the watches of an epoll set, if all watched files are among these files.
fn epoll_watches(set: (i32, u32), files: &[FileIdentity]) -> Option<EpollDigest> {
    let text = fs::read_to_string(format!("/proc/{}/fdinfo/{}", set.0, set.1)).ok()?;
    let lines = FdInfo::parse(&text)?.epoll();
    if lines.is_empty() {
        return None;
    }
    let mut occurrences: HashMap<u32, u32> = HashMap::new();
    let entry = |line: &EpollLine| {
        let nth = occurrences.entry(line.fd).or_default();
        let found = files
            .iter()
            .find(|(pid, fd, _)| is_watched((*pid, *fd), set, (line.fd, *nth)));
        *nth += 1;
        found.map(|(.., file)| (*file, line.fd, line.events, line.data))
    };
    let entries: Option<Vec<_>> = lines.iter().map(entry).collect();
    entries.map(EpollDigest::from_entries)
}

/// Compares an open file with the file that a set watches at a number, by `kcmp`.
fn is_watched(file: (i32, u32), set: (i32, u32), (number, nth): (u32, u32)) -> bool {
    const KCMP_EPOLL_TFD: i32 = 7;
    let slot = [set.1, number, nth];
    // SAFETY: the kernel reads three words, which outlive the call.
    let order = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            file.0,
            set.0,
            KCMP_EPOLL_TFD,
            file.1,
            slot.as_ptr(),
        )
    };
    order == 0
}

/// Compares two open files (kind 0) or two tables (kind 2) by `kcmp`.
fn is_same_object(kcmp_type: i32, one: (i32, u32), other: (i32, u32)) -> bool {
    // SAFETY: these kinds of comparison take no pointers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, kcmp_type, one.1, other.1) };
    order == 0
}
