//! Finds processes of a tree by their PIDs.

use holdfast_checkpoint::acceptor::Restorer;

/// Waits until a process has ended. The open files of a killed process are closed a moment after the kill.
pub fn wait_for_end(pid: i32) {
    holdfast_lab::testing::wait_for("the original's end", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        state.is_empty() || state.starts_with(['Z', 'X'])
    });
}

/// Returns the root's PID as the test sees it: the restorer's first child; orphans of the tree follow.
pub fn outer_pid(restorer: &Restorer, original_pid: i32) -> i32 {
    let pid = restorer.pid();
    let children =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("children");
    let children: Vec<i32> = children
        .split_whitespace()
        .map(|word| word.parse().expect("a PID"))
        .collect();
    *(children.first()).unwrap_or_else(|| panic!("process {original_pid} has ended"))
}
