//! What procfs tells of a tree and of its copy, side by side, while both stand still.

use holdfast_sys::process::inspect::tree;
use holdfast_sys::process::procfs::Stat;
use std::time::{Duration, Instant};

/// Stops a tree by job control, and waits until it stands.
pub fn stop(root: i32) {
    for pid in tree(root).expect("a tree") {
        signal(pid, libc::SIGSTOP);
    }
    let began = Instant::now();
    // What is born meanwhile is stopped too.
    while !tree(root).expect("a tree").iter().all(|pid| stands(*pid)) {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "it does not stop"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets a stopped tree go on.
pub fn go_on(root: i32) {
    for pid in tree(root).expect("a tree") {
        assert!(stands(pid), "process {pid} is not stopped any more");
    }
    for pid in tree(root).expect("a tree") {
        signal(pid, libc::SIGCONT);
    }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: no pointers are passed; the processes are the test's own.
    unsafe { libc::kill(pid, signal) };
}

fn stands(pid: i32) -> bool {
    let state = Stat::read(pid).map_or('X', |stat| stat.state);
    if !matches!(state, 'T' | 't' | 'Z' | 'X') {
        signal(pid, libc::SIGSTOP);
        return false;
    }
    true
}
