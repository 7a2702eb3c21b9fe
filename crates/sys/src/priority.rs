//! Scheduling priorities of threads (`sched(7)`): real-time priority for the threads that a freeze waits for.

use std::io;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Gives the calling thread real-time priority: the lowest of `SCHED_RR` (`sched(7)`), ahead of all ordinary threads.
/// Threads and processes that the thread starts are ordinary.
///
/// # Errors
/// `EPERM` without `CAP_SYS_NICE` and `RLIMIT_RTPRIO`, or in a control group without real-time share.
pub fn become_realtime() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `parameters` is valid for the call, which only reads it; 0 is the calling thread.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Temporary real-time priority of the thread that holds the value. Dropping the value makes the thread ordinary again.
#[derive(Debug)]
pub struct RealtimeGuard {
    /// Binds the value to its thread, because a priority belongs to a thread.
    _thread: PhantomData<*const ()>,
}

impl RealtimeGuard {
    /// Makes the thread real-time as [`become_realtime`] does, until the value is dropped. Returns `None` if the kernel
    /// does not allow that or the thread is not an ordinary one.
    #[must_use]
    pub fn begin() -> Option<RealtimeGuard> {
        // SAFETY: no memory is involved; 0 is the calling thread.
        let ordinary = unsafe { libc::sched_getscheduler(0) } == libc::SCHED_OTHER;
        (ordinary && become_realtime().is_ok()).then_some(RealtimeGuard {
            _thread: PhantomData,
        })
    }
}

impl Drop for RealtimeGuard {
    fn drop(&mut self) {
        let parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: `parameters` is valid for the call, which only reads it; 0 is the calling thread.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters) };
    }
}

/// Returns true if the calling thread has real-time priority.
pub fn is_realtime() -> bool {
    // SAFETY: no memory is involved; 0 is the calling thread.
    let policy = unsafe { libc::sched_getscheduler(0) };
    policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_RR
}

/// Real-time priority, lent to an ordinary thread that other threads wait for. Since Linux 6.12 a real-time thread has
/// no timer slack, and gets the default slack when it becomes ordinary again, so the lender reads the slack first
/// ([`timer_slack_ns`]) and sets it afterwards.
#[derive(Debug)]
#[must_use]
pub struct PriorityBoost {
    tid: i32,
}

impl PriorityBoost {
    /// Raises the thread's priority. Returns `None` if the thread is not an ordinary one or the kernel does not
    /// allow it.
    pub fn begin(tid: i32) -> Option<PriorityBoost> {
        let parameters = libc::sched_param {
            sched_priority: BOOSTED_PRIORITY,
        };
        // SAFETY: `parameters` is valid for the call, which only reads it.
        let outcome = unsafe {
            has_ordinary_policy(tid)
                && libc::sched_setscheduler(tid, libc::SCHED_RR, &raw const parameters) == 0
        };
        outcome.then_some(PriorityBoost { tid })
    }

    /// Makes the thread ordinary again.
    pub fn end(self) {
        let parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: `parameters` is valid for the call, which only reads it.
        unsafe { libc::sched_setscheduler(self.tid, ORDINARY_POLICY, &raw const parameters) };
    }
}

/// Smallest number of short tasks that justifies one more thread: fewer take less time than the thread needs to start.
const TASKS_PER_THREAD_MIN: usize = 40;

/// Runs short tasks on all processors, with real-time priority if the caller has it. The results are in task order.
pub fn run_parallel<T: Sync, R: Send>(tasks: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let helpers = (processors() - 1).min(tasks.len() / TASKS_PER_THREAD_MIN);
    if helpers == 0 {
        return tasks.iter().map(work).collect();
    }
    let (realtime, next) = (is_realtime(), AtomicUsize::new(0));
    // Each thread takes the next task when it is ready for it, so a thread with less processor time does fewer tasks.
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
            let _guard = realtime.then(RealtimeGuard::begin);
            work()
        };
        let helpers: Vec<_> = (0..helpers).map(|_| scope.spawn(help)).collect();
        let mut done = work();
        for helper in helpers {
            match helper.join() {
                Ok(results) => done.extend(results),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Returns the number of processors that this program may use. The value is cached, because the standard library reads
/// several files for it.
pub fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS
        .get_or_init(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

/// Returns the timer slack of any thread, in nanoseconds; `None` if the kernel does not allow reading it.
pub fn timer_slack_ns(tid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(timer_slack_file(tid)).ok()?;
    text.trim().parse().ok()
}

/// Sets the timer slack of any thread, in nanoseconds, if it differs. Real-time threads are not affected.
pub fn set_timer_slack_ns(tid: i32, slack_ns: u64) {
    if timer_slack_ns(tid).is_some_and(|present| present != slack_ns) {
        // The permission to read the file includes the permission to write it.
        let _ = std::fs::write(timer_slack_file(tid), slack_ns.to_string());
    }
}

/// Returns the path of a thread's slack file. `/proc/TID` also serves threads that are not their process's first;
/// `/proc/PID/task/TID` does not have this file.
fn timer_slack_file(tid: i32) -> String {
    format!("/proc/{tid}/timerslack_ns")
}

/// Returns true if a thread has the ordinary scheduling policy.
pub fn has_ordinary_policy(tid: i32) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::sched_getscheduler(tid) == ORDINARY_POLICY }
}

/// Priority of threads that others wait for: one above the waiting threads, which may occupy both processors. Such a
/// thread runs briefly.
const BOOSTED_PRIORITY: i32 = 2;

/// Scheduling policy of ordinary threads.
pub const ORDINARY_POLICY: i32 = libc::SCHED_OTHER;

/// Gives a stopped thread the priority `BOOSTED_PRIORITY` if the kernel allows it: for threads of a stub process (the
/// one that becomes the restored process), which get their final priority before they run on their own.
pub fn boost_stub_thread(tid: i32) {
    let parameters = libc::sched_param {
        sched_priority: BOOSTED_PRIORITY,
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
    fn realtime_guard_restores_policy_on_drop() {
        std::thread::spawn(|| {
            let guard = RealtimeGuard::begin().expect("root may");
            assert_eq!(policy(), libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
            assert!(RealtimeGuard::begin().is_none());
            drop(guard);
            assert_eq!(policy(), libc::SCHED_OTHER);
        })
        .join()
        .expect("it does not panic");
    }

    #[test]
    fn parallel_results_keep_task_order() {
        for count in [0, 1, TASKS_PER_THREAD_MIN * 2, 1001] {
            let tasks: Vec<usize> = (0..count).collect();
            let expected: Vec<usize> = tasks.iter().map(|task| task * 3).collect();
            assert_eq!(run_parallel(&tasks, |task| task * 3), expected);
        }
    }

    #[test]
    fn realtime_is_not_inherited_by_threads() {
        std::thread::spawn(|| {
            become_realtime().expect("root may");
            assert_eq!(policy(), libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
            let child = std::thread::spawn(policy).join();
            assert_eq!(child.expect("it does not panic"), libc::SCHED_OTHER);
        })
        .join()
        .expect("it does not panic");
    }
}
