//! Compares procfs files of a tree and of its copy while both are stopped.

use holdfast_checkpoint::inspect::tree_pids;
use holdfast_checkpoint::procfs::{ProcStat, ProcStatus, threads};
use std::time::{Duration, Instant};

/// Stops a tree by job control, and waits until it is stopped. Returns the PIDs, in their own namespace, of
/// processes that were stopped before.
pub fn stop_tree(root: i32) -> Vec<i32> {
    let mut already_stopped = Vec::new();
    for pid in tree_pids(root).expect("a tree") {
        if ProcStat::read(pid).is_ok_and(|stat| stat.state == 'T') {
            already_stopped.extend(own_pid(pid));
        }
        signal(pid, libc::SIGSTOP);
    }
    let started = Instant::now();
    let mut checks = 0;
    // Processes born meanwhile are stopped too.
    while !tree_pids(root)
        .expect("a tree")
        .iter()
        .all(|pid| all_threads_stopped(*pid))
    {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "exceeded time: the tree does not stop"
        );
        std::thread::sleep(Duration::from_millis(1));
        checks += 1;
        if checks % 100 == 0 {
            // A process that called vfork(2) stops only after its child has gone on.
            for pid in tree_pids(root).expect("a tree") {
                if own_pid(pid).is_some_and(|own_id| !already_stopped.contains(&own_id)) {
                    signal(pid, libc::SIGCONT);
                }
            }
        }
    }
    already_stopped
}

fn own_pid(pid: i32) -> Option<i32> {
    ProcStatus::read(pid, pid)
        .ok()
        .map(|status| status.innermost_id())
}

/// Continues a stopped tree, except for the processes that were stopped before.
pub fn continue_tree(root: i32, already_stopped: &[i32]) {
    let started = Instant::now();
    let is_stopped =
        |pid: &i32| ProcStat::read(*pid).is_ok_and(|stat| matches!(stat.state, 'T' | 'Z'));
    while !tree_pids(root).expect("a tree").iter().all(is_stopped) {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "exceeded time: the tree is not stopped again"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    for pid in tree_pids(root).expect("a tree") {
        if own_pid(pid).is_some_and(|own| !already_stopped.contains(&own)) {
            signal(pid, libc::SIGCONT);
        }
    }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: no pointers are passed; the processes are the test's own.
    unsafe { libc::kill(pid, signal) };
}

/// Returns true if all threads are stopped. SIGSTOP stops one thread first, and that thread signals the others.
fn all_threads_stopped(pid: i32) -> bool {
    let state = |tid: i32| ProcStat::read(tid).map_or('X', |stat| stat.state);
    let threads = threads(pid).unwrap_or_default();
    let is_stopped = |tid: &i32| matches!(state(*tid), 'T' | 't' | 'Z' | 'X');
    if !threads.iter().all(is_stopped) {
        signal(pid, libc::SIGSTOP);
        return false;
    }
    true
}
