//! Compares procfs files of a tree and of its copy while both are stopped.

use holdfast_sys::process::inspect::tree;
use holdfast_sys::process::procfs::{Stat, Status, threads};
use std::time::{Duration, Instant};

/// Stops a tree by job control, and waits until it is stopped. Returns the PIDs, in their own namespace, of
/// processes that were stopped before.
pub fn stop(root: i32) -> Vec<i32> {
    let mut stood = Vec::new();
    for pid in tree(root).expect("a tree") {
        if Stat::read(pid).is_ok_and(|stat| stat.state == 'T') {
            stood.extend(own(pid));
        }
        signal(pid, libc::SIGSTOP);
    }
    let began = Instant::now();
    let mut looks = 0;
    // Processes born meanwhile are stopped too.
    while !tree(root).expect("a tree").iter().all(|pid| stands(*pid)) {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "exceeded time: it does not stop"
        );
        std::thread::sleep(Duration::from_millis(1));
        looks += 1;
        if looks % 100 == 0 {
            // A process that called vfork(2) stops only after its child has gone on.
            for pid in tree(root).expect("a tree") {
                if own(pid).is_some_and(|own| !stood.contains(&own)) {
                    signal(pid, libc::SIGCONT);
                }
            }
        }
    }
    stood
}

fn own(pid: i32) -> Option<i32> {
    Status::read(pid, pid).ok().map(|status| status.own_id())
}

/// Continues a stopped tree, except for the processes that were stopped before.
pub fn go_on(root: i32, stood: &[i32]) {
    let began = Instant::now();
    let stands = |pid: &i32| Stat::read(*pid).is_ok_and(|stat| matches!(stat.state, 'T' | 'Z'));
    while !tree(root).expect("a tree").iter().all(stands) {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "exceeded time: it is not stopped any more"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    for pid in tree(root).expect("a tree") {
        if own(pid).is_some_and(|own| !stood.contains(&own)) {
            signal(pid, libc::SIGCONT);
        }
    }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: no pointers are passed; the processes are the test's own.
    unsafe { libc::kill(pid, signal) };
}

/// Returns true if all threads are stopped. SIGSTOP stops one thread first, and that thread signals the others.
fn stands(pid: i32) -> bool {
    let state = |tid: i32| Stat::read(tid).map_or('X', |stat| stat.state);
    let threads = threads(pid).unwrap_or_default();
    let stands = |tid: &i32| matches!(state(*tid), 'T' | 't' | 'Z' | 'X');
    if !threads.iter().all(stands) {
        signal(pid, libc::SIGSTOP);
        return false;
    }
    true
}
