//! The stack's timers. The library walks all of them a hundred times per second, which took a third of all time with
//! thousands of associations. Its four timer functions are replaced by a timer wheel, which visits only timers that are
//! about due.

use libc::{c_int, c_void};
use std::cell::UnsafeCell;

/// Number of slots in the wheel. A timer further ahead than one turn is visited once per turn.
const SLOTS: usize = 1024;
/// Binary logarithm of the ticks per slot; a tick of the stack is 1 ms.
const SLOT_BITS: u32 = 3;
/// Flags `SCTP_CALLOUT_ACTIVE` and `SCTP_CALLOUT_PENDING`, which the stack's macros read.
const ACTIVE: c_int = 2;
const PENDING: c_int = 4;

type TimerCallback = unsafe extern "C" fn(*mut c_void);

/// `struct sctp_callout` (`sctp_callout.h`), embedded in the stack's associations. `build.rs` pins the library's
/// version.
#[repr(C)]
pub struct SctpTimer {
    next: *mut SctpTimer,
    /// The pointer that points to this timer: a slot, or the previous timer's `next`.
    link: *mut *mut SctpTimer,
    time: u32,
    argument: *mut c_void,
    function: Option<TimerCallback>,
    flags: c_int,
}

struct TimerWheel {
    now: u32,
    slots: [*mut SctpTimer; SLOTS],
    /// Due timers that are being called.
    due: *mut SctpTimer,
}

struct TimerWheelCell(UnsafeCell<TimerWheel>);
// SAFETY: used only by functions that the stack calls, which happens under the stack's lock.
unsafe impl Sync for TimerWheelCell {}

static WHEEL: TimerWheelCell = TimerWheelCell(UnsafeCell::new(TimerWheel::new()));

impl TimerWheel {
    const fn new() -> Self {
        Self {
            now: 0,
            slots: [std::ptr::null_mut(); SLOTS],
            due: std::ptr::null_mut(),
        }
    }
}

/// Removes a timer from its list.
///
/// # Safety
/// The timer is pending.
unsafe fn unlink(timer: *mut SctpTimer) {
    // SAFETY: a pending timer is in a list, whose members are alive: the stack stops timers before it frees them.
    unsafe {
        let SctpTimer { next, link, .. } = *timer;
        *link = next;
        if let Some(next) = next.as_mut() {
            next.link = link;
        }
    }
}

/// Puts a timer at the head of a list.
///
/// # Safety
/// The timer is in no list; `head` does not move.
unsafe fn link(timer: *mut SctpTimer, head: *mut *mut SctpTimer) {
    // SAFETY: as in `unlink`.
    unsafe {
        let first = *head;
        (*timer).next = first;
        (*timer).link = head;
        if let Some(first) = first.as_mut() {
            first.link = &raw mut (*timer).next;
        }
        *head = timer;
    }
}

/// # Safety
/// `wheel` and `timer` are valid and not used meanwhile; the same holds for `stop` and `advance`.
unsafe fn start(
    wheel: *mut TimerWheel,
    timer: *mut SctpTimer,
    ticks: u32,
    function: TimerCallback,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let was_pending = (*timer).flags & PENDING != 0;
        if was_pending {
            unlink(timer);
        }
        let time = (*wheel).now.wrapping_add(ticks.max(1));
        (*timer).time = time;
        (*timer).argument = argument;
        (*timer).function = Some(function);
        (*timer).flags = ACTIVE | PENDING;
        let slot = (time >> SLOT_BITS) as usize % SLOTS;
        link(timer, (&raw mut (*wheel).slots[slot]).cast());
        c_int::from(was_pending)
    }
}

/// # Safety
/// As in [`start`].
unsafe fn stop(timer: *mut SctpTimer) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let was_pending = (*timer).flags & PENDING != 0;
        if was_pending {
            unlink(timer);
        }
        (*timer).flags &= !(ACTIVE | PENDING);
        c_int::from(was_pending)
    }
}

/// Advances the time and calls the due timers.
///
/// # Safety
/// As in [`start`], except that the called functions may start and stop timers.
unsafe fn advance(wheel: *mut TimerWheel, ticks: u32) {
    // SAFETY: guaranteed by the caller. No reference to the wheel is held while a function is called, and each step
    // begins at the list's head, so timers may be removed meanwhile.
    unsafe {
        let before = (*wheel).now;
        let now = before.wrapping_add(ticks);
        (*wheel).now = now;
        let offset_in_slot = before & ((1 << SLOT_BITS) - 1);
        let steps = (u64::from(ticks) + u64::from(offset_in_slot)) >> SLOT_BITS;
        for step in 0..=steps.min(SLOTS as u64 - 1) as usize {
            let slot = ((before >> SLOT_BITS) as usize + step) % SLOTS;
            let mut next = (*wheel).slots[slot];
            while let Some(timer) = next.as_mut() {
                let timer_pointer = next;
                next = timer.next;
                if now.wrapping_sub(timer.time) <= i32::MAX as u32 {
                    unlink(timer_pointer);
                    link(timer_pointer, &raw mut (*wheel).due);
                }
            }
        }
        while let Some(timer) = (*wheel).due.as_mut() {
            unlink(timer);
            timer.flags &= !PENDING;
            let (function, argument) = (timer.function, timer.argument);
            if let Some(function) = function {
                function(argument);
            }
        }
    }
}

/// Replaces the library's function of this name; the three functions below do the same.
#[unsafe(no_mangle)]
unsafe extern "C" fn sctp_os_timer_start(
    timer: *mut SctpTimer,
    ticks: u32,
    function: Option<TimerCallback>,
    argument: *mut c_void,
) -> c_int {
    match function {
        // SAFETY: the stack passes a timer of its own, and our lock is held.
        Some(function) if !timer.is_null() => unsafe {
            start(WHEEL.0.get(), timer, ticks, function, argument)
        },
        _ => 0,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sctp_os_timer_stop(timer: *mut SctpTimer) -> c_int {
    // SAFETY: the stack passes a timer of its own, and our lock is held.
    unsafe { stop(timer) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sctp_handle_tick(ticks: u32) {
    // SAFETY: `usrsctp_handle_timers` is called under our lock.
    unsafe { advance(WHEEL.0.get(), ticks) }
}

#[unsafe(no_mangle)]
extern "C" fn sctp_get_tick_count() -> u32 {
    // SAFETY: the stack runs under our lock.
    unsafe { (*WHEEL.0.get()).now }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// A timer that records its call, and starts again if requested.
    struct RecordingTimer {
        callout: SctpTimer,
        wheel: *mut TimerWheel,
        call_times: Vec<u32>,
        restart_ticks: Option<u32>,
    }

    unsafe extern "C" fn on_timer(argument: *mut c_void) {
        let noted = argument.cast::<RecordingTimer>();
        // SAFETY: the test passes a `RecordingTimer`, which lives as long as the wheel.
        unsafe {
            let now = (*(*noted).wheel).now;
            (*noted).call_times.push(now);
            if let Some(ticks) = (*noted).restart_ticks.take() {
                start_recording(noted, ticks);
            }
        }
    }

    unsafe fn start_recording(noted: *mut RecordingTimer, ticks: u32) -> c_int {
        // SAFETY: as above.
        unsafe {
            let timer = &raw mut (*noted).callout;
            start((*noted).wheel, timer, ticks, on_timer, noted.cast())
        }
    }

    fn recording_timer(wheel: *mut TimerWheel) -> RecordingTimer {
        RecordingTimer {
            callout: SctpTimer {
                next: std::ptr::null_mut(),
                link: std::ptr::null_mut(),
                time: 0,
                argument: std::ptr::null_mut(),
                function: None,
                flags: 0,
            },
            wheel,
            call_times: Vec::new(),
            restart_ticks: None,
        }
    }

    #[test]
    fn callout_layout_matches_library() {
        assert_eq!(size_of::<SctpTimer>(), 0x30);
        assert_eq!(std::mem::offset_of!(SctpTimer, time), 0x10);
        assert_eq!(std::mem::offset_of!(SctpTimer, function), 0x20);
        assert_eq!(std::mem::offset_of!(SctpTimer, flags), 0x28);
    }

    #[test]
    fn timer_may_restart_itself() {
        let mut wheel = Box::new(TimerWheel::new());
        let wheel: *mut TimerWheel = &raw mut *wheel;
        let mut timer = Box::new(recording_timer(wheel));
        let timer: *mut RecordingTimer = &raw mut *timer;
        // SAFETY: both live to the end of the test.
        unsafe {
            (*timer).restart_ticks = Some(1);
            assert_eq!(start_recording(timer, 5), 0);
            advance(wheel, 4);
            assert!((*timer).call_times.is_empty());
            advance(wheel, 1);
            assert_eq!((*timer).call_times, [5]);
            assert_eq!((*timer).callout.flags & PENDING, PENDING);
            // Due at 6, and only once.
            advance(wheel, 100_000);
            assert_eq!((*timer).call_times, [5, 100_005]);
            assert_eq!(stop(&raw mut (*timer).callout), 0);
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Start(usize, u32),
        Stop(usize),
        Advance(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        let ticks = prop_oneof![0u32..40, 0u32..20_000];
        prop_oneof![
            (0usize..12, ticks.clone()).prop_map(|(which, ticks)| Step::Start(which, ticks)),
            (0usize..12).prop_map(Step::Stop),
            ticks.prop_map(Step::Advance),
        ]
    }

    proptest! {
        #[test]
        fn timer_fires_at_first_tick_that_reaches_it(
            first: u32,
            steps in proptest::collection::vec(step(), 0..200),
        ) {
            let mut wheel = Box::new(TimerWheel::new());
            wheel.now = first;
            let wheel: *mut TimerWheel = &raw mut *wheel;
            let mut timers: Vec<Box<RecordingTimer>> = (0..12).map(|_| Box::new(recording_timer(wheel))).collect();
            let mut model: BTreeMap<usize, u32> = BTreeMap::new();
            let mut elapsed = 0u32;
            for step in steps {
                // SAFETY: wheel and timers live to the end.
                unsafe {
                    match step {
                        Step::Start(which, ticks) => {
                            let was = start_recording(&raw mut *timers[which], ticks);
                            let old = model.insert(which, elapsed + ticks.max(1));
                            prop_assert_eq!(was != 0, old.is_some());
                        }
                        Step::Stop(which) => {
                            let was = stop(&raw mut timers[which].callout);
                            prop_assert_eq!(was != 0, model.remove(&which).is_some());
                        }
                        Step::Advance(ticks) => {
                            elapsed += ticks;
                            advance(wheel, ticks);
                            for (which, timer) in timers.iter_mut().enumerate() {
                                let due = model.get(&which).is_some_and(|&at| at <= elapsed);
                                let called = std::mem::take(&mut timer.call_times);
                                prop_assert_eq!(called.len(), usize::from(due));
                            }
                            model.retain(|_, at| *at > elapsed);
                        }
                    }
                }
            }
        }
    }
}
