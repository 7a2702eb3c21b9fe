//! When a thread gets the processor.

use std::io;

/// Gives the calling thread real-time priority: the lowest of `SCHED_RR` (`sched(7)`), ahead of all ordinary threads.
/// Threads and processes that it starts are ordinary ones.
///
/// # Errors
/// `EPERM` without `CAP_SYS_NICE` and `RLIMIT_RTPRIO`, or in a control group without real-time share.
pub fn be_realtime() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `parameters` is valid for the call, which only reads it; 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> i32 {
        // SAFETY: no memory is involved; 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn a_thread_becomes_realtime_and_its_children_do_not() {
        std::thread::spawn(|| {
            be_realtime().expect("root may");
            assert_eq!(policy(), libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
            let child = std::thread::spawn(policy).join();
            assert_eq!(child.expect("it does not panic"), libc::SCHED_OTHER);
        })
        .join()
        .expect("it does not panic");
    }
}
