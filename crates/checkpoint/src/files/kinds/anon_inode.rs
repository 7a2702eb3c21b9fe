//! Files without a path that the kernel creates: counters, timers, signals, and kinds that cannot move.

use super::{epoll, inotify};
use crate::file_rights::FileOpener;
use crate::files::descriptor_survey::read_own_fdinfo;
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError, StepContext};
use crate::files::fdinfo::FdInfo;
use crate::files::image::{OpenFileKind, TimerFdState};
use crate::files::syscalls;
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_gettime, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const NS_PER_SECOND: u64 = 1_000_000_000;
/// `TFD_TIMER_ABSTIME`, `TFD_TIMER_CANCEL_ON_SET`.
const TFD_TIMER_ABSTIME: u32 = 1;
const TFD_TIMER_CANCEL_ON_SET: u32 = 2;
/// `PIDFD_THREAD` (`linux/pidfd.h`), among the flags of an open file.
const PIDFD_THREAD: u32 = libc::O_EXCL as u32;
/// `CLOCK_REALTIME_ALARM`.
const CLOCK_REALTIME_ALARM: i32 = 8;

/// Saves a file without a path, or returns the reason why it cannot move.
pub fn save(saver: &mut OpenFileSaver<'_>, source: &FileBeingSaved) -> SaveResult<OpenFileKind> {
    let name = source.link.trim_start_matches("anon_inode:");
    let kind = match name {
        "[eventfd]" => save_eventfd(source),
        "[timerfd]" => save_timerfd(saver, source)?,
        "[signalfd]" => save_signalfd(source),
        "[eventpoll]" => return epoll::save(saver, source),
        "inotify" => return inotify::save(saver, source),
        "[pidfd]" => return save_pidfd(saver, source),
        "[io_uring]" => return Err(BlockReason::IoUring.into()),
        "[fanotify]" => return Err(BlockReason::Fanotify.into()),
        "[perf_event]" => return Err(BlockReason::Perf.into()),
        "[userfaultfd]" => return Err(BlockReason::Userfaultfd.into()),
        name if name.contains("bpf") || name.contains("btf") => return Err(BlockReason::Bpf.into()),
        _ => None,
    };
    Ok(kind.ok_or(BlockReason::Unknown)?)
}

fn save_eventfd(source: &FileBeingSaved) -> Option<OpenFileKind> {
    let count = u64::from_str_radix(source.info.value("eventfd-count")?, 16).ok()?;
    let semaphore = source.info.value("eventfd-semaphore")? == "1";
    Some(OpenFileKind::Event { count, semaphore })
}

fn save_signalfd(source: &FileBeingSaved) -> Option<OpenFileKind> {
    let mask = u64::from_str_radix(source.info.value("sigmask")?, 16).ok()?;
    Some(OpenFileKind::Signal { mask })
}

fn save_pidfd(saver: &OpenFileSaver<'_>, source: &FileBeingSaved) -> SaveResult<OpenFileKind> {
    let pid = source.info.number("Pid").ok_or(BlockReason::PidfdOutside)?;
    // The kernel shows -1 once the process has been waited for.
    if pid == -1 {
        return Err(BlockReason::PidfdEnded.into());
    }
    if source.info.flags & PIDFD_THREAD != 0 {
        return Err(BlockReason::PidfdOfThread.into());
    }
    let pid = saver.inner_pid(pid).ok_or(BlockReason::PidfdOutside)?;
    Ok(OpenFileKind::Pidfd { pid })
}

fn save_timerfd(
    saver: &OpenFileSaver<'_>,
    source: &FileBeingSaved,
) -> SaveResult<Option<OpenFileKind>> {
    let Some(mut timer) = read_timer(&source.info) else {
        return Ok(None);
    };
    if saver.frozen && timer.interval_ns > 0 && timer.ticks > 0 {
        // A periodic timer with an unread first expiration stops until it is queried, and counts the later expirations
        // then.
        timerfd_gettime(&source.copy).with_step("timerfd_gettime")?;
        let counted = read_own_fdinfo(&source.copy).with_step("/proc/self/fdinfo")?;
        timer = read_timer(&counted).unwrap_or(timer);
    }
    if is_time_of_day(&timer) && timer.value_ns > 0 {
        timer.value_ns = timer.value_ns.saturating_add(time_of_day_ns());
    }
    Ok(Some(OpenFileKind::Timer(timer)))
}

fn read_timer(info: &FdInfo) -> Option<TimerFdState> {
    let time = |(seconds, rest): (u64, u64)| seconds.checked_mul(NS_PER_SECOND)?.checked_add(rest);
    Some(TimerFdState {
        clock: info.number("clockid")?,
        set_flags: u32::from_str_radix(info.value("settime flags")?, 8).ok()?,
        value_ns: time(info.number_pair("it_value")?)?,
        interval_ns: time(info.number_pair("it_interval")?)?,
        ticks: info.number("ticks")?,
    })
}

/// Returns true if the timer is set to an absolute time of day, which means the same on every host. Other clocks count
/// from a host's boot.
fn is_time_of_day(timer: &TimerFdState) -> bool {
    let clocks = [libc::CLOCK_REALTIME, CLOCK_REALTIME_ALARM];
    timer.set_flags & TFD_TIMER_ABSTIME != 0 && clocks.contains(&timer.clock)
}

fn time_of_day_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    (now.tv_sec as u64) * NS_PER_SECOND + now.tv_nsec as u64
}

/// Creates a file of this kind, without its state.
pub fn make(
    opener: &mut FileOpener,
    kind: &OpenFileKind,
    flags: u32,
) -> Result<OwnedFd, FilesError> {
    let fd = match kind {
        OpenFileKind::Event { semaphore, .. } => {
            let mode = EventfdFlags::CLOEXEC;
            let semaphore = if *semaphore {
                EventfdFlags::SEMAPHORE
            } else {
                EventfdFlags::empty()
            };
            eventfd(0, mode | semaphore).with_step("eventfd")?
        }
        OpenFileKind::Timer(timer) => {
            let clock = timer_clock(timer.clock)?;
            timerfd_create(clock, TimerfdFlags::CLOEXEC).with_step("timerfd_create")?
        }
        OpenFileKind::Signal { mask } => syscalls::signalfd(*mask).with_step("signalfd")?,
        OpenFileKind::Inotify { watches } => {
            let flags = rustix::fs::inotify::CreateFlags::CLOEXEC;
            let fd = rustix::fs::inotify::init(flags).with_step("inotify_init")?;
            inotify::add_watches(opener, &fd, watches)?;
            fd
        }
        _ => {
            let flags = rustix::event::epoll::CreateFlags::CLOEXEC;
            rustix::event::epoll::create(flags).with_step("epoll_create")?
        }
    };
    if flags & !(libc::O_ACCMODE as u32) != 0 {
        syscalls::set_status(fd.as_fd(), flags).with_step("F_SETFL")?;
    }
    Ok(fd)
}

fn timer_clock(clock: i32) -> Result<TimerfdClockId, FilesError> {
    Ok(match clock {
        libc::CLOCK_REALTIME => TimerfdClockId::Realtime,
        libc::CLOCK_MONOTONIC => TimerfdClockId::Monotonic,
        libc::CLOCK_BOOTTIME => TimerfdClockId::Boottime,
        CLOCK_REALTIME_ALARM => TimerfdClockId::RealtimeAlarm,
        libc::CLOCK_BOOTTIME_ALARM => TimerfdClockId::BoottimeAlarm,
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)).with_step("timerfd_create")?,
    })
}

/// Sets the count of an eventfd.
pub fn set_count(fd: &OwnedFd, count: u64) -> Result<(), FilesError> {
    if count == 0 {
        return Ok(());
    }
    rustix::io::write(fd, &count.to_ne_bytes())
        .map(|_| ())
        .with_step("eventfd")
}

/// Arms a restored timerfd with its saved state.
pub fn arm_timerfd(fd: &OwnedFd, timer: &TimerFdState) -> Result<(), FilesError> {
    let time = |ns: u64| Timespec {
        tv_sec: (ns / NS_PER_SECOND) as i64,
        tv_nsec: (ns % NS_PER_SECOND) as _,
    };
    let mut flags = TimerfdTimerFlags::empty();
    let mut value_ns = timer.value_ns;
    if is_time_of_day(timer) {
        flags |= TimerfdTimerFlags::ABSTIME;
        if timer.set_flags & TFD_TIMER_CANCEL_ON_SET != 0 {
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
        timerfd_settime(fd, flags, &spec).with_step("timerfd_settime")?;
    }
    if timer.ticks > 0 {
        syscalls::set_timerfd_expirations(fd.as_fd(), timer.ticks)
            .with_step("TFD_IOC_SET_TICKS")?;
    }
    Ok(())
}
