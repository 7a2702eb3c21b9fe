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
const TIMER_NUMBER: u64 = u64::MAX;

pub(super) struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Deadlines, each with the number of its descriptor.
    deadlines: BTreeSet<(Instant, u64)>,
    armed_for: Option<Instant>,
}

impl Poller {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(
            &epoll,
            &timer,
            EventData::new_u64(TIMER_NUMBER),
            EventFlags::IN,
        )?;
        Ok(Self {
            epoll,
            timer,
            deadlines: BTreeSet::new(),
            armed_for: None,
        })
    }

    /// Returns a descriptor that is readable when a descriptor is ready or a deadline has passed.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches a descriptor until it is closed.
    pub(super) fn add(&self, fd: impl AsFd, number: u64, for_writing: bool) -> io::Result<()> {
        let data = EventData::new_u64(number);
        Ok(epoll::add(
            &self.epoll,
            fd,
            data,
            interest_flags(for_writing),
        )?)
    }

    /// Starts or stops watching a descriptor for send buffer space.
    pub(super) fn change(&self, fd: impl AsFd, number: u64, for_writing: bool) -> io::Result<()> {
        let data = EventData::new_u64(number);
        Ok(epoll::modify(
            &self.epoll,
            fd,
            data,
            interest_flags(for_writing),
        )?)
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
        Ok(numbers.filter(|number| *number != TIMER_NUMBER).collect())
    }

    /// Returns the numbers whose deadline has passed, each once.
    pub(super) fn take_expired(&mut self, now: Instant) -> Vec<u64> {
        let mut numbers = Vec::new();
        while let Some(&(at, number)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.pop_first();
            numbers.push(number);
        }
        numbers
    }

    /// Replaces the deadline `before` of a number.
    pub(super) fn set_deadline(
        &mut self,
        number: u64,
        before: Option<Instant>,
        at: Option<Instant>,
    ) {
        if let Some(before) = before {
            self.deadlines.remove(&(before, number));
        }
        if let Some(at) = at {
            self.deadlines.insert((at, number));
        }
    }

    /// Makes the descriptor readable at the first deadline, or at once if an event is already queued.
    pub(super) fn arm(&mut self, now: Instant, is_immediate: bool) -> io::Result<()> {
        let first = self.deadlines.first().map(|(at, _)| *at);
        let expiry = if is_immediate { Some(now) } else { first };
        if expiry == self.armed_for {
            return Ok(());
        }
        // Zero would disarm the kernel's timer.
        let wait = expiry.map(|at| {
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
        self.armed_for = expiry;
        Ok(())
    }
}

fn interest_flags(for_writing: bool) -> EventFlags {
    match for_writing {
        true => EventFlags::IN | EventFlags::OUT,
        false => EventFlags::IN,
    }
}
