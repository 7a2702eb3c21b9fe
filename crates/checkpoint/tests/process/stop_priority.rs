//! Priority of the tracer while it keeps a process stopped.

use crate::migration::Host;
use crate::program::Program;
use holdfast_checkpoint::donor::TreeTracker;

/// Number of stops of which the priority is looked at.
const STOPS: usize = 10;

/// Returns the number of a stopped process's last stop; `None` if the process is not stopped by a tracer.
fn current_stop(pid: i32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1))
            .expect("a field")
    };
    let switches = field("voluntary_ctxt_switches").parse().expect("a number");
    (field("State") == "t").then_some(switches)
}

/// Others of the program may wait for a stopped process, while a tracer of ordinary priority waits for a processor.
#[test]
fn tracer_is_realtime_while_process_is_stopped() {
    let program = Program::start_feature("anonymous");
    let pid = program.pid();
    // SAFETY: no memory is involved.
    let tracer = unsafe { libc::gettid() };
    let observer = std::thread::spawn(move || {
        let mut policies = Vec::new();
        holdfast_lab::testing::wait_for("stops", || {
            let stopped = current_stop(pid);
            // SAFETY: no memory is involved.
            let policy = unsafe { libc::sched_getscheduler(tracer) } & !libc::SCHED_RESET_ON_FORK;
            // Otherwise the process ran in between.
            if stopped.is_some() && current_stop(pid) == stopped {
                policies.push(policy);
            }
            policies.len() >= STOPS
        });
        policies
    });
    while !observer.is_finished() {
        let tracker = TreeTracker::start_with_priority(pid, true).expect("it can be tracked");
        tracker.stop_tracking().expect("it lives");
    }
    assert_eq!(
        observer.join().expect("stops were seen"),
        [libc::SCHED_RR; STOPS]
    );
    let tree = program.tree(&Host::local());
    program.assert_good_verdict(tree);
}
