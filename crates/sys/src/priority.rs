//! When a thread gets the processor.

use std::io;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Real-time priority of the thread that has it, for a while; dropped, the thread is an ordinary one again.
#[derive(Debug)]
pub struct Hurry {
    /// Priority is a thread's.
    _thread: PhantomData<*const ()>,
}

impl Hurry {
    /// [`be_realtime`] until it is dropped; none where that is not allowed, or the thread is no ordinary one.
    #[must_use]
    pub fn begin() -> Option<Hurry> {
        // SAFETY: no memory is involved; 0 is the calling thread.
        let ordinary = unsafe { libc::sched_getscheduler(0) } == libc::SCHED_OTHER;
        (ordinary && be_realtime().is_ok()).then_some(Hurry {
            _thread: PhantomData,
        })
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        let parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: `parameters` is valid for the call, which only reads it; 0 is the calling thread.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters) };
    }
}

/// Whether the calling thread has real-time priority.
pub(crate) fn is_realtime() -> bool {
    // SAFETY: no memory is involved; 0 is the calling thread.
    let policy = unsafe { libc::sched_getscheduler(0) };
    policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_RR
}

/// The priority of who is waited for, lent to an ordinary thread. From Linux 6.12 on a real-time thread has no timer slack, and an
/// ordinary one again has the default: who lends asks for it before ([`timer_slack_ns`]), and sets it afterwards.
#[derive(Debug)]
#[must_use]
pub(crate) struct Loan {
    tid: i32,
}

impl Loan {
    /// None if the thread is no ordinary one, or that is not allowed.
    pub(crate) fn begin(tid: i32) -> Option<Loan> {
        let parameters = libc::sched_param {
            sched_priority: WAITED_FOR,
        };
        // SAFETY: `parameters` is valid for the call, which only reads it.
        let lent = unsafe {
            is_ordinary(tid)
                && libc::sched_setscheduler(tid, libc::SCHED_RR, &raw const parameters) == 0
        };
        lent.then_some(Loan { tid })
    }

    /// Takes back what was lent.
    pub(crate) fn end(self) {
        let parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: `parameters` is valid for the call, which only reads it.
        unsafe { libc::sched_setscheduler(self.tid, ORDINARY, &raw const parameters) };
    }
}

/// Fewer short tasks than this take less time than a thread to begin.
const TASKS_EACH: usize = 16;

/// Does short tasks on all processors, in as much of a hurry as the caller; gives the results in the order of the tasks.
pub(crate) fn share_out<T: Sync, R: Send>(tasks: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let helpers = (processors() - 1).min(tasks.len() / TASKS_EACH);
    if helpers == 0 {
        return tasks.iter().map(work).collect();
    }
    let (hurries, next) = (is_realtime(), AtomicUsize::new(0));
    // Whoever gets less of a processor does less.
    let work = || {
        let mut done = Vec::with_capacity(tasks.len());
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(at) else {
                return done;
            };
            done.push((at, work(task)));
        }
    };
    let mut done = std::thread::scope(|scope| {
        let help = || {
            let _hurry = hurries.then(Hurry::begin);
            work()
        };
        let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(help)).collect();
        let mut done = work();
        for helper in helpers {
            match helper.join() {
                Ok(of_helper) => done.extend(of_helper),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Processors that this program may use. Asked once: the library looks through files for it.
pub(crate) fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS
        .get_or_init(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

/// The timer slack of any thread, nanoseconds; none where reading it is not allowed.
pub(crate) fn timer_slack_ns(tid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(timer_slack_file(tid)).ok()?;
    text.trim().parse().ok()
}

/// Sets the timer slack of any thread, nanoseconds, unless it is that; has no effect on real-time ones.
pub(crate) fn set_timer_slack_ns(tid: i32, slack_ns: u64) {
    if timer_slack_ns(tid).is_some_and(|present| present != slack_ns) {
        // Who may read it may write it.
        let _ = std::fs::write(timer_slack_file(tid), slack_ns.to_string());
    }
}

/// Also of threads that are not their processes' first, which `/proc/PID/task/TID` does not have.
fn timer_slack_file(tid: i32) -> String {
    format!("/proc/{tid}/timerslack_ns")
}

/// Whether a thread has the priority of most.
pub(crate) fn is_ordinary(tid: i32) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::sched_getscheduler(tid) == ORDINARY }
}

/// Threads that are waited for do little: they are ahead of those that wait, who may have both processors.
const WAITED_FOR: i32 = 2;

/// The policy of ordinary threads.
pub(crate) const ORDINARY: i32 = libc::SCHED_OTHER;

/// Gives a thread that stands still the priority of who is waited for, as far as that is allowed: for threads that get another
/// before they run by themselves.
pub(crate) fn hurry_husk(tid: i32) {
    let parameters = libc::sched_param {
        sched_priority: WAITED_FOR,
    };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `parameters` is valid for the call, which only reads it.
    unsafe { libc::sched_setscheduler(tid, policy, &raw const parameters) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> i32 {
        // SAFETY: no memory is involved; 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn a_hurry_ends() {
        std::thread::spawn(|| {
            let hurry = Hurry::begin().expect("root may");
            assert_eq!(policy(), libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
            assert!(Hurry::begin().is_none());
            drop(hurry);
            assert_eq!(policy(), libc::SCHED_OTHER);
        })
        .join()
        .expect("it does not panic");
    }

    #[test]
    fn shared_out_tasks_keep_their_order() {
        for count in [0, 1, TASKS_EACH * 2, 1001] {
            let tasks: Vec<usize> = (0..count).collect();
            let expected: Vec<usize> = tasks.iter().map(|task| task * 3).collect();
            assert_eq!(share_out(&tasks, |task| task * 3), expected);
        }
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
