//! What a caller lists that can look at many descriptors at once, made from `/proc`.

use holdfast_sys::process::files::{FdInfo, Listed, Listing};
use std::collections::HashMap;
use std::fs;

/// A process and a descriptor of it, and the identity of the open file.
type Same = (i32, u32, u64);

/// The descriptors of these processes.
pub fn list(pids: &[i32]) -> Vec<Listing> {
    // Those that may be the same, and the identities they got.
    let mut known: HashMap<(u32, u64, Option<u32>), Vec<Same>> = HashMap::new();
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
            let alike = known
                .entry((info.mount, info.inode, info.number("eventfd-id")))
                .or_default();
            let same = alike
                .iter()
                .find(|(other, fd, _)| is_same(0, (*other, *fd), (*pid, number)));
            let file = same.map_or(next, |(_, _, file)| *file);
            if file == next {
                alike.push((*pid, number, next));
                next += 1;
            }
            let has_more = !info.rest.is_empty();
            info.rest.clear();
            descriptors.push(Listed {
                number,
                file,
                info,
                has_more,
            });
        }
        let first = pids
            .iter()
            .find(|other| is_same(2, (**other, 0), (*pid, 0)));
        Some(Listing {
            pid: *pid,
            thread_tables: false,
            table: first
                .filter(|_| !descriptors.is_empty())
                .map(|pid| *pid as u64),
            descriptors,
        })
    };
    pids.iter().filter_map(listing).collect()
}

/// `kcmp` of two open files (0) or two tables (2).
fn is_same(what: i32, one: (i32, u32), other: (i32, u32)) -> bool {
    // SAFETY: these kinds of comparison take no pointers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, what, one.1, other.1) };
    order == 0
}
