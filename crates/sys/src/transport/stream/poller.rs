//! Readiness of many descriptors, and deadlines, behind one descriptor.

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Most descriptors reported in one turn.
const READY_MAX: usize = 64;
/// Number of the timer's descriptor.
const TIMER: u64 = u64::MAX;

pub(super) struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Deadlines, each with the number of its descriptor.
    due: BTreeSet<(Instant, u64)>,
    armed: Option<Instant>,
}

impl Poller {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        Ok(Self {
            epoll,
            timer,
            due: BTreeSet::new(),
            armed: None,
        })
    }

    /// Returns a descriptor that is readable when a descriptor is ready or a deadline has passed.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches a descriptor until it is closed.
    pub(super) fn add(&self, fd: impl AsFd, number: u64, for_room: bool) -> io::Result<()> {
        let data = EventData::new_u64(number);
        Ok(epoll::add(&self.epoll, fd, data, interest(for_room))?)
    }

    /// Starts or stops watching a descriptor for send buffer space.
    pub(super) fn change(&self, fd: impl AsFd, number: u64, for_room: bool) -> io::Result<()> {
        let data = EventData::new_u64(number);
        Ok(epoll::modify(&self.epoll, fd, data, interest(for_room))?)
    }

    /// Stops watching a descriptor.
    pub(super) fn remove(&self, fd: impl AsFd) {
        // Failure means that the descriptor was not watched.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Returns the numbers of ready descriptors.
    pub(super) fn ready(&self) -> io::Result<Vec<u64>> {
        let mut list = Vec::with_capacity(READY_MAX);
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut list),
            Some(&now),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let numbers = list.iter().map(|event| event.data.u64());
        Ok(numbers.filter(|number| *number != TIMER).collect())
    }

    /// Returns the numbers whose deadline has passed, each once.
    pub(super) fn due(&mut self, now: Instant) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some(&(at, number)) = self.due.first()
            && at <= now
        {
            self.due.pop_first();
            numbers.push(number);
        }
        numbers
    }

    /// Replaces the deadline `before` of a number.
    pub(super) fn set(&mut self, number: u64, before: Option<Instant>, at: Option<Instant>) {
        if let Some(before) = before {
            self.due.remove(&(before, number));
        }
        if let Some(at) = at {
            self.due.insert((at, number));
        }
    }

    /// Makes the descriptor readable at the first deadline, or at once if an event is already queued.
    pub(super) fn arm(&mut self, now: Instant, at_once: bool) -> io::Result<()> {
        let first = self.due.first().map(|(at, _)| *at);
        let wanted = if at_once { Some(now) } else { first };
        if wanted == self.armed {
            return Ok(());
        }
        // Zero would disarm the kernel's timer.
        let wait = wanted.map(|at| {
            at.saturating_duration_since(now)
                .max(Duration::from_micros(1))
        });
        let wait = wait.unwrap_or_default();
        let zero = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let setting = Itimerspec {
            it_interval: zero,
            it_value: Timespec {
                tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: wait.subsec_nanos().into(),
            },
        };
        // Setting the timer also clears an expiry that was not read.
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)?;
        self.armed = wanted;
        Ok(())
    }
}

fn interest(for_room: bool) -> EventFlags {
    match for_room {
        true => EventFlags::IN | EventFlags::OUT,
        false => EventFlags::IN,
    }
}
