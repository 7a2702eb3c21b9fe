//! Files without a path that the kernel creates: counters, timers, signals, and kinds that cannot move.

use super::{epoll, inotify};
use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{At, FilesError, Reason};
use crate::process::files::fdinfo::FdInfo;
use crate::process::files::image::{Kind, Timer};
use crate::process::files::raw;
use crate::process::files::survey::own_info;
use crate::process::rights::Opener;
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_gettime, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const SECOND_NS: u64 = 1_000_000_000;
/// `TFD_TIMER_ABSTIME`, `TFD_TIMER_CANCEL_ON_SET`.
const ABSOLUTE: u32 = 1;
const CANCEL_ON_SET: u32 = 2;
/// `PIDFD_THREAD` (`linux/pidfd.h`), among the flags of an open file.
const PIDFD_THREAD: u32 = libc::O_EXCL as u32;
/// `CLOCK_REALTIME_ALARM`.
const REALTIME_ALARM: i32 = 8;

/// Saves a file without a path, or returns the reason why it cannot move.
pub fn save(saver: &mut Saver<'_>, subject: &Subject) -> Saved<Kind> {
    let name = subject.link.trim_start_matches("anon_inode:");
    let kind = match name {
        "[eventfd]" => event(subject),
        "[timerfd]" => timer(saver, subject)?,
        "[signalfd]" => signal(subject),
        "[eventpoll]" => return epoll::save(saver, subject),
        "inotify" => return inotify::save(saver, subject),
        "[pidfd]" => return pidfd(saver, subject),
        "[io_uring]" => return Err(Reason::IoUring.into()),
        "[fanotify]" => return Err(Reason::Fanotify.into()),
        "[perf_event]" => return Err(Reason::Perf.into()),
        "[userfaultfd]" => return Err(Reason::Userfaultfd.into()),
        name if name.contains("bpf") || name.contains("btf") => return Err(Reason::Bpf.into()),
        _ => None,
    };
    Ok(kind.ok_or(Reason::Unknown)?)
}

fn event(subject: &Subject) -> Option<Kind> {
    let count = u64::from_str_radix(subject.info.value("eventfd-count")?, 16).ok()?;
    let semaphore = subject.info.value("eventfd-semaphore")? == "1";
    Some(Kind::Event { count, semaphore })
}

fn signal(subject: &Subject) -> Option<Kind> {
    let mask = u64::from_str_radix(subject.info.value("sigmask")?, 16).ok()?;
    Some(Kind::Signal { mask })
}

fn pidfd(saver: &Saver<'_>, subject: &Subject) -> Saved<Kind> {
    let pid = subject.info.number("Pid").ok_or(Reason::PidfdOutside)?;
    // The kernel shows -1 once the process has been waited for.
    if pid == -1 {
        return Err(Reason::PidfdEnded.into());
    }
    if subject.info.flags & PIDFD_THREAD != 0 {
        return Err(Reason::PidfdOfThread.into());
    }
    let pid = saver.inner(pid).ok_or(Reason::PidfdOutside)?;
    Ok(Kind::Pidfd { pid })
}

fn timer(saver: &Saver<'_>, subject: &Subject) -> Saved<Option<Kind>> {
    let Some(mut timer) = read_timer(&subject.info) else {
        return Ok(None);
    };
    if saver.frozen && timer.interval_ns > 0 && timer.ticks > 0 {
        // A periodic timer with an unread first expiration stops until it is queried, and counts the later expirations
        // then.
        timerfd_gettime(&subject.copy).at("timerfd_gettime")?;
        let counted = own_info(&subject.copy).at("/proc/self/fdinfo")?;
        timer = read_timer(&counted).unwrap_or(timer);
    }
    if is_time_of_day(&timer) && timer.value_ns > 0 {
        timer.value_ns = timer.value_ns.saturating_add(time_of_day_ns());
    }
    Ok(Some(Kind::Timer(timer)))
}

fn read_timer(info: &FdInfo) -> Option<Timer> {
    let time = |(seconds, rest): (u64, u64)| seconds.checked_mul(SECOND_NS)?.checked_add(rest);
    Some(Timer {
        clock: info.number("clockid")?,
        set_flags: u32::from_str_radix(info.value("settime flags")?, 8).ok()?,
        value_ns: time(info.pair("it_value")?)?,
        interval_ns: time(info.pair("it_interval")?)?,
        ticks: info.number("ticks")?,
    })
}

/// Returns true if the timer is set to an absolute time of day, which means the same on every host. Other clocks count
/// from a host's boot.
fn is_time_of_day(timer: &Timer) -> bool {
    let clocks = [libc::CLOCK_REALTIME, REALTIME_ALARM];
    timer.set_flags & ABSOLUTE != 0 && clocks.contains(&timer.clock)
}

fn time_of_day_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    (now.tv_sec as u64) * SECOND_NS + now.tv_nsec as u64
}

/// Creates a file of this kind, without its state.
pub fn make(opener: &mut Opener, kind: &Kind, flags: u32) -> Result<OwnedFd, FilesError> {
    let fd = match kind {
        Kind::Event { semaphore, .. } => {
            let mode = EventfdFlags::CLOEXEC;
            let semaphore = if *semaphore {
                EventfdFlags::SEMAPHORE
            } else {
                EventfdFlags::empty()
            };
            eventfd(0, mode | semaphore).at("eventfd")?
        }
        Kind::Timer(timer) => {
            let clock = timer_clock(timer.clock)?;
            timerfd_create(clock, TimerfdFlags::CLOEXEC).at("timerfd_create")?
        }
        Kind::Signal { mask } => raw::signalfd(*mask).at("signalfd")?,
        Kind::Inotify { watches } => {
            let flags = rustix::fs::inotify::CreateFlags::CLOEXEC;
            let fd = rustix::fs::inotify::init(flags).at("inotify_init")?;
            inotify::fill(opener, &fd, watches)?;
            fd
        }
        _ => {
            let flags = rustix::event::epoll::CreateFlags::CLOEXEC;
            rustix::event::epoll::create(flags).at("epoll_create")?
        }
    };
    if flags & !(libc::O_ACCMODE as u32) != 0 {
        raw::set_status(fd.as_fd(), flags).at("F_SETFL")?;
    }
    Ok(fd)
}

fn timer_clock(clock: i32) -> Result<TimerfdClockId, FilesError> {
    Ok(match clock {
        libc::CLOCK_REALTIME => TimerfdClockId::Realtime,
        libc::CLOCK_MONOTONIC => TimerfdClockId::Monotonic,
        libc::CLOCK_BOOTTIME => TimerfdClockId::Boottime,
        REALTIME_ALARM => TimerfdClockId::RealtimeAlarm,
        libc::CLOCK_BOOTTIME_ALARM => TimerfdClockId::BoottimeAlarm,
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)).at("timerfd_create")?,
    })
}

/// Sets the count of an eventfd.
pub fn set_count(fd: &OwnedFd, count: u64) -> Result<(), FilesError> {
    if count == 0 {
        return Ok(());
    }
    rustix::io::write(fd, &count.to_ne_bytes())
        .map(|_| ())
        .at("eventfd")
}

/// Arms a timer.
pub fn arm(fd: &OwnedFd, timer: &Timer) -> Result<(), FilesError> {
    let time = |ns: u64| Timespec {
        tv_sec: (ns / SECOND_NS) as i64,
        tv_nsec: (ns % SECOND_NS) as _,
    };
    let mut flags = TimerfdTimerFlags::empty();
    let mut value_ns = timer.value_ns;
    if is_time_of_day(timer) {
        flags |= TimerfdTimerFlags::ABSTIME;
        if timer.set_flags & CANCEL_ON_SET != 0 {
            flags |= TimerfdTimerFlags::CANCEL_ON_SET;
        }
    } else if value_ns == 0 && timer.interval_ns > 0 && timer.ticks > 0 {
        // The period had ended when the timer was read; the value 0 would disarm the timer.
        value_ns = timer.interval_ns;
    }
    if value_ns > 0 {
        let spec = Itimerspec {
            it_interval: time(timer.interval_ns),
            it_value: time(value_ns),
        };
        timerfd_settime(fd, flags, &spec).at("timerfd_settime")?;
    }
    if timer.ticks > 0 {
        raw::set_ticks(fd.as_fd(), timer.ticks).at("TFD_IOC_SET_TICKS")?;
    }
    Ok(())
}
