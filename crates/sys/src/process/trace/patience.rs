//! Waiting for a thread under ptrace, with a limit.
//!
//! Asleep the tracer leaves its processor to the thread it waits for, and the kernel wakes it when that stops: whatever the
//! priority of either is, nobody spins. `waitid` has no limit, so a timer of the thread's own breaks it off every now and then.

use std::mem::MaybeUninit;
use std::sync::Once;
use std::time::{Duration, Instant};

/// For how long it is looked again at once: less than it takes to fall asleep and wake up.
const SPIN: Duration = Duration::from_micros(10);
/// From one look at the limit to the next.
const TICK: Duration = Duration::from_millis(10);
/// From one look at the tracee to the next, where there is no timer.
const WITHOUT: Duration = Duration::from_micros(50);
/// Breaks a call off, and does nothing else. Ignored by default, so that one that comes late is of no matter.
const SIGNAL: i32 = libc::SIGURG;
/// `SIGEV_THREAD_ID`.
const TO_THREAD: i32 = 4;

thread_local! {
    static TICKER: Option<Ticker> = Ticker::new();
}

/// Waits a little, at first by looking again at once. Time in which this process itself does not run does not count.
pub(crate) struct Patience {
    began: Instant,
    waited: Duration,
    limit: Duration,
}

impl Patience {
    pub fn new(limit: Duration) -> Self {
        Self {
            began: Instant::now(),
            waited: Duration::ZERO,
            limit,
        }
    }

    /// Until there may be something to see of a tracee, which is left to be seen; false when it is at its end.
    pub fn wait(&mut self, tid: i32) -> bool {
        if self.began.elapsed() < SPIN {
            std::hint::spin_loop();
            return true;
        }
        let asleep = Instant::now();
        TICKER.with(|ticker| match ticker {
            Some(ticker) => ticker.wait(tid),
            None => std::thread::sleep(WITHOUT),
        });
        self.waited += asleep.elapsed().min(TICK);
        !self.is_over()
    }

    /// Whether it is at its end.
    pub fn is_over(&self) -> bool {
        self.waited > self.limit
    }
}

/// A timer that breaks calls of its thread off.
struct Ticker(libc::timer_t);

impl Ticker {
    /// None where the kernel has no more timers.
    fn new() -> Option<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(handle);
        // SAFETY: plain numbers and pointers, for which zero is a value.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = TO_THREAD;
        event.sigev_signo = SIGNAL;
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

    /// Sleeps until a tracee has stopped or ended, a tick long at most.
    fn wait(&self, tid: i32) {
        self.set(TICK);
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        let how = libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT | libc::__WALL;
        // Where there is no such tracee the caller's next look says so.
        // SAFETY: `info` is writable and outlives the call.
        unsafe { libc::waitid(libc::P_PID, tid as u32, info.as_mut_ptr(), how) };
        self.set(Duration::ZERO);
    }

    /// Lets it tick again and again, since one tick may come before the call that it is to break off; or stops it.
    fn set(&self, every: Duration) {
        let every = libc::timespec {
            tv_sec: 0,
            tv_nsec: every.as_nanos() as libc::c_long,
        };
        let times = libc::itimerspec {
            it_interval: every,
            it_value: every,
        };
        // SAFETY: the timer is ours until we are dropped; `times` is readable, and nothing is asked back.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, std::ptr::null_mut()) };
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        // SAFETY: the timer is ours, and used no more.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Without `SA_RESTART`, so that calls end with `EINTR`.
fn handle() {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: plain numbers and pointers, for which zero is a value; the handler does nothing, so it may run at any moment.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use crate::process::error::Error;
    use crate::process::trace::{Stop, Tracee, wait_for};
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_tracee_that_does_not_stop_is_not_waited_for_forever_and_one_that_does_is_seen() {
        let child = Command::new("sleep").arg("3600").spawn();
        let child = Ended(child.expect("sleep"));
        let tracee = Tracee::seize(child.0.id() as i32, 0).expect("root may");
        let limit = Duration::from_millis(50);
        for _ in 0..2 {
            let began = Instant::now();
            let waited = wait_for(tracee.tid, limit);
            assert!(matches!(waited, Err(Error::WouldNotStop(_))), "{waited:?}");
            assert!(began.elapsed() >= limit);
        }
        tracee.interrupt().expect("it is there");
        let stop = wait_for(tracee.tid, Duration::from_secs(60));
        assert_eq!(stop.expect("it stops"), Stop::Interrupt);
        tracee.detach().expect("it stands still");
    }
}
