//! Waits for a traced thread to stop, with a time limit.
//!
//! The tracer sleeps, so the traced thread can use the tracer's processor, and the kernel wakes the tracer at the
//! stop. Neither thread spins, even if one has a higher priority. `waitid` takes no time limit, so a periodic timer
//! of the tracer's thread interrupts the call.

use std::mem::MaybeUninit;
use std::sync::Once;
use std::time::{Duration, Instant};

/// Duration of busy polling, shorter than falling asleep and waking up.
const SPIN_TIME: Duration = Duration::from_micros(10);
/// Interval between two checks of the limit.
const TICK_INTERVAL: Duration = Duration::from_millis(10);
/// Polling interval if the kernel grants no timer.
const FALLBACK_INTERVAL: Duration = Duration::from_micros(50);
/// Signal that only interrupts a system call. The kernel ignores the signal by default, so a late one does no harm.
const TICK_SIGNAL: i32 = libc::SIGURG;
/// `SIGEV_THREAD_ID`.
const SIGEV_THREAD_ID: i32 = 4;

thread_local! {
    static TICKER: Option<Ticker> = Ticker::new();
}

/// Waits in short steps, at first by busy polling. Time in which this process itself does not run does not count
/// toward the limit.
pub(crate) struct StopWait {
    began: Instant,
    waited: Duration,
    limit: Duration,
}

impl StopWait {
    pub fn new(limit: Duration) -> Self {
        Self {
            began: Instant::now(),
            waited: Duration::ZERO,
            limit,
        }
    }

    /// Waits until the tracee may have changed state, and leaves that state for the caller to collect. Returns false
    /// when the limit is exceeded.
    pub fn wait_briefly(&mut self, tid: i32) -> bool {
        if self.began.elapsed() < SPIN_TIME {
            std::hint::spin_loop();
            return true;
        }
        let sleep_start = Instant::now();
        TICKER.with(|ticker| match ticker {
            Some(ticker) => ticker.sleep_until_stop(tid),
            None => std::thread::sleep(FALLBACK_INTERVAL),
        });
        self.waited += sleep_start.elapsed().min(TICK_INTERVAL);
        !self.has_timed_out()
    }

    /// Returns true if the limit is exceeded.
    pub fn has_timed_out(&self) -> bool {
        self.waited > self.limit
    }
}

/// Timer that interrupts system calls of its thread.
struct Ticker(libc::timer_t);

impl Ticker {
    /// Creates a timer; `None` if the kernel grants no more of them.
    fn new() -> Option<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install_handler);
        // SAFETY: plain numbers and pointers, for which zero is a value.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = TICK_SIGNAL;
        // SAFETY: no memory is involved.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = MaybeUninit::uninit();
        // SAFETY: `event` is readable and `timer` writable for the call, which fills it when it succeeds.
        unsafe {
            let made =
                libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, timer.as_mut_ptr());
            (made == 0).then(|| Self(timer.assume_init()))
        }
    }

    /// Sleeps until a tracee has stopped or ended, at most one tick.
    fn sleep_until_stop(&self, tid: i32) {
        self.set_interval(TICK_INTERVAL);
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        let how = libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT | libc::__WALL;
        // A missing tracee makes the call fail, which the caller's next poll reports.
        // SAFETY: `info` is writable and outlives the call.
        unsafe { libc::waitid(libc::P_PID, tid as u32, info.as_mut_ptr(), how) };
        self.set_interval(Duration::ZERO);
    }

    /// Starts periodic ticks, since a single tick could come before the call that it must interrupt. Zero stops the
    /// timer.
    fn set_interval(&self, every: Duration) {
        let every = libc::timespec {
            tv_sec: 0,
            tv_nsec: every.as_nanos() as libc::c_long,
        };
        let times = libc::itimerspec {
            it_interval: every,
            it_value: every,
        };
        // SAFETY: this value owns the timer; `times` is readable, and no old value is requested.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, std::ptr::null_mut()) };
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        // SAFETY: this value owns the timer and does not use it again.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Installs the handler without `SA_RESTART`, so that calls end with `EINTR`.
fn install_handler() {
    extern "C" fn ignore_signal(_: i32) {}
    // SAFETY: plain numbers and pointers, for which zero is a value; the handler does nothing, so it may run at any
    // moment.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore_signal as extern "C" fn(i32) as usize;
        libc::sigaction(TICK_SIGNAL, &raw const action, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use crate::error::Error;
    use crate::trace::{StopReason, Tracee, wait_for_stop};
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    struct ChildProcess(Child);

    impl Drop for ChildProcess {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn wait_times_out_for_running_tracee_and_reports_stop() {
        let child = Command::new("sleep").arg("3600").spawn();
        let child = ChildProcess(child.expect("sleep"));
        let tracee = Tracee::seize(child.0.id() as i32, 0).expect("root may");
        let limit = Duration::from_millis(50);
        for _ in 0..2 {
            let began = Instant::now();
            let outcome = wait_for_stop(tracee.tid, limit);
            assert!(matches!(outcome, Err(Error::StopTimeout(_))), "{outcome:?}");
            assert!(began.elapsed() >= limit);
        }
        tracee.interrupt().expect("it is there");
        let stop = wait_for_stop(tracee.tid, Duration::from_secs(60));
        assert_eq!(stop.expect("it stops"), StopReason::Interrupt);
        tracee.detach().expect("it stands still");
    }
}
