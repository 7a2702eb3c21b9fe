//! Pipes, FIFOs, eventfds, timers, signalfds, asynchronous signals.

use crate::harness::{Donor, Saved, at, close, fork, put, read, stop};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{Gid, Mode, OFlags, Uid, fchmod, fchown, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::{Errno, write};
use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe, pipe_with};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_gettime,
    timerfd_settime,
};
use std::os::fd::RawFd;

fn put_pipe(reader: RawFd, writer: RawFd) {
    let (from, to) = pipe().expect("pipe");
    put(from, reader);
    put(to, writer);
}

#[test]
fn a_pipe_keeps_content_capacity_and_both_ends() {
    let donor = Donor::new(|| {
        put_pipe(10, 11);
        fcntl_setpipe_size(at(10), 1 << 17).expect("size");
        fcntl_setfl(at(10), OFlags::NONBLOCK).expect("flags");
        write(at(11), b"before").expect("written");
        stop();
        write(at(11), b" and after").expect("written");
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    donor.freeze(&draft).restored(|_| {
        assert_eq!(fcntl_getpipe_size(at(11)), Ok(1 << 17));
        assert_eq!(fcntl_getfl(at(10)), Ok(OFlags::NONBLOCK));
        assert_eq!(fcntl_getfl(at(11)), Ok(OFlags::WRONLY));
        assert_eq!(read(10), b"before and after");
        assert_eq!(rustix::io::read(at(10), &mut [0; 1]), Err(Errno::AGAIN));
        write(at(11), b"more").expect("written");
        assert_eq!(read(10), b"more");
        close(11);
        assert_eq!(read(10), b"", "no writer is left over");
    });
    // The data is also still at the donor.
    donor
        .save()
        .restored(|_| assert_eq!(read(10), b"before and after"));
}

/// A pipe keeps its owner and permissions, because programs reopen their standard streams by `/proc/self/fd`, and the
/// kernel checks these.
#[test]
fn a_pipe_keeps_its_owner_and_permissions() {
    let own = |number: RawFd, mode: u32| {
        let (user, group) = (Uid::from_raw(12_345), Gid::from_raw(23_456));
        fchown(at(number), Some(user), Some(group)).expect("given");
        fchmod(at(number), Mode::from_raw_mode(mode)).expect("set");
    };
    let donor = Donor::new(|| {
        put_pipe(10, 11);
        put_pipe(20, 21);
        own(20, 0o640);
        stop();
        own(11, 0o604);
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    donor.freeze(&draft).restored(|_| {
        for (number, mode) in [(10, 0o604), (11, 0o604), (20, 0o640), (21, 0o640)] {
            let stat = fstat(at(number)).expect("stat");
            assert_eq!((stat.st_uid, stat.st_gid), (12_345, 23_456));
            assert_eq!(stat.st_mode & 0o7777, mode);
        }
    });
}

#[test]
fn a_pipe_whose_other_end_is_closed_stays_so() {
    let donor = Donor::new(|| {
        put_pipe(10, 11);
        write(at(11), b"last words").expect("written");
        close(11);
        put_pipe(20, 21);
        close(20);
        stop();
    });
    donor.save().restored(|_| {
        assert_eq!(read(10), b"last words");
        assert_eq!(read(10), b"");
        // SAFETY: no handler is installed, only the default changed.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        assert_eq!(write(at(21), b"x"), Err(Errno::PIPE));
    });
}

#[test]
fn packets_in_a_pipe_stay_apart() {
    let donor = Donor::new(|| {
        let (from, to) = pipe_with(PipeFlags::DIRECT).expect("pipe");
        put(from, 10);
        put(to, 11);
        for packet in [&b"one"[..], b"two", b"three"] {
            write(at(11), packet).expect("written");
        }
        stop();
    });
    donor.save().restored(|_| {
        for packet in [&b"one"[..], b"two", b"three"] {
            assert_eq!(read(10), packet);
        }
        assert!(fcntl_getfl(at(11)).expect("flags").contains(OFlags::DIRECT));
    });
}

#[test]
fn a_fifo_is_found_by_its_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR).expect("fifo");
    let donor = Donor::new(|| {
        let both = rustix::fs::open(&path, OFlags::RDWR, Mode::empty()).expect("open");
        put(both, 10);
        write(at(10), b"waiting").expect("written");
        stop();
    });
    let (same_kernel, elsewhere) = (donor.save(), donor.save());
    same_kernel.restored(|_| assert_eq!(read(10), b"waiting"));
    drop(donor);
    elsewhere.restored(|_| assert_eq!(read(10), b"waiting"));
}

#[test]
fn an_end_that_a_child_shares_stays_shared() {
    let donor = Donor::new(|| {
        put_pipe(10, 11);
        put(eventfd(0, EventfdFlags::empty()).expect("made"), 12);
        match fork() {
            None => {
                close(10);
                fcntl_setfl(at(11), OFlags::NONBLOCK).expect("flags");
                put(rustix::io::dup(at(12)).expect("dup"), 40);
                close(12);
                stop();
            }
            Some(child) => {
                let stopped = rustix::process::WaitOptions::UNTRACED;
                rustix::process::waitpid(Some(child), stopped).expect("waited");
                close(11);
                stop();
            }
        }
    });
    donor.save().restored(|table| {
        if table == 0 {
            assert_eq!(read(10), b"from the child");
            assert_eq!(read(10), b"", "the child closed its end");
            assert_eq!(read(12), 5u64.to_ne_bytes());
            assert!(rustix::io::fcntl_getfd(at(11)).is_err());
        } else {
            write(at(40), &5u64.to_ne_bytes()).expect("written");
            write(at(11), b"from the child").expect("written");
            assert!(
                fcntl_getfl(at(11))
                    .expect("flags")
                    .contains(OFlags::NONBLOCK)
            );
            assert!(rustix::io::fcntl_getfd(at(10)).is_err());
        }
    });
}

#[test]
fn counters_keep_their_count() {
    let donor = Donor::new(|| {
        put(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), 10);
        write(at(10), &(1u64 << 40).to_ne_bytes()).expect("written");
        put(
            eventfd(3, EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK).expect("made"),
            11,
        );
        put(rustix::io::dup(at(10)).expect("dup"), 12);
        put(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), 13);
        stop();
    });
    donor.save().restored(|_| {
        assert_eq!(read(12), (1u64 << 40).to_ne_bytes());
        assert_eq!(
            rustix::io::read(at(10), &mut [0; 8]),
            Err(Errno::AGAIN),
            "shared"
        );
        for _ in 0..3 {
            assert_eq!(read(11), 1u64.to_ne_bytes());
        }
        assert_eq!(rustix::io::read(at(11), &mut [0; 8]), Err(Errno::AGAIN));
        assert_eq!(rustix::io::read(at(13), &mut [0; 8]), Err(Errno::AGAIN));
    });
}

#[test]
fn timers_keep_time() {
    let spec = |value: i64, interval: i64| Itimerspec {
        it_value: Timespec {
            tv_sec: value,
            tv_nsec: 0,
        },
        it_interval: Timespec {
            tv_sec: interval,
            tv_nsec: 0,
        },
    };
    let millisecond = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let donor = Donor::new(|| {
        let made = |clock| timerfd_create(clock, TimerfdFlags::NONBLOCK).expect("made");
        for number in 10..13 {
            put(made(TimerfdClockId::Monotonic), number);
        }
        put(made(TimerfdClockId::Realtime), 13);
        let none = TimerfdTimerFlags::empty();
        timerfd_settime(at(10), none, &spec(1000, 7)).expect("set");
        let fast = Itimerspec {
            it_value: millisecond,
            it_interval: spec(3600, 0).it_value,
        };
        timerfd_settime(at(11), none, &fast).expect("set");
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        timerfd_settime(at(13), TimerfdTimerFlags::ABSTIME, &spec(now + 500, 0)).expect("set");
        let mut expired = [PollFd::from_borrowed_fd(at(11), PollFlags::IN)];
        poll(&mut expired, None).expect("expired");
        stop();
    });
    donor.save().restored(|_| {
        let timer = timerfd_gettime(at(10)).expect("read");
        assert!((900..=1000).contains(&timer.it_value.tv_sec), "{timer:?}");
        assert_eq!(timer.it_interval.tv_sec, 7);
        assert_eq!(
            read(11),
            1u64.to_ne_bytes(),
            "an expiration that was not read"
        );
        let timer = timerfd_gettime(at(11)).expect("read");
        assert!((3500..=3600).contains(&timer.it_value.tv_sec), "{timer:?}");
        assert_eq!(timerfd_gettime(at(12)).expect("read").it_value.tv_sec, 0);
        let timer = timerfd_gettime(at(13)).expect("read");
        assert!((400..=500).contains(&timer.it_value.tv_sec), "{timer:?}");
    });
}

#[test]
fn signals_are_read_from_a_signalfd() {
    let mask: u64 = 1 << (libc::SIGUSR1 - 1) | 1 << (libc::SIGCHLD - 1);
    let blocked = || {
        // SAFETY: an all-zero set is a valid one, and is initialised by the kernel's layout.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGUSR1);
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        }
    };
    let donor = Donor::new(|| {
        // SAFETY: `mask` is a kernel signal set of 8 bytes; the new descriptor is put at its number.
        unsafe {
            let fd = libc::syscall(libc::SYS_signalfd4, -1, &raw const mask, 8, 0) as i32;
            libc::dup2(fd, 10);
        }
        stop();
    });
    donor.save().restored(|_| {
        blocked();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::USR1)
            .expect("sent");
        assert_eq!(read(10)[..4], (libc::SIGUSR1 as u32).to_ne_bytes());
        let info = std::fs::read_to_string("/proc/self/fdinfo/10").expect("read");
        assert!(info.contains(&format!("sigmask:\t{mask:016x}")), "{info}");
    });
}

#[test]
fn who_gets_the_signals_stays_who_it_was() {
    let donor = Donor::new(|| {
        put_pipe(10, 11);
        // SAFETY: no pointers are passed.
        unsafe {
            libc::setpgid(0, 0);
            libc::fcntl(10, libc::F_SETOWN, -libc::getpgrp());
            libc::fcntl(10, 10, libc::SIGUSR2);
        }
        fcntl_setfl(at(10), OFlags::from_bits_retain(libc::O_ASYNC as u32)).expect("flags");
        stop();
    });
    let saved: Saved = donor.save();
    // The process group is the donor's, and the donor still exists.
    let group = donor.pids()[0];
    saved.restored(|_| {
        // SAFETY: no pointers are passed.
        let (owner, signal) = unsafe { (libc::fcntl(10, libc::F_GETOWN), libc::fcntl(10, 11)) };
        assert_eq!((owner, signal), (-group, libc::SIGUSR2));
        let flags = fcntl_getfl(at(10)).expect("flags").bits() as i32;
        assert_eq!(flags, libc::O_ASYNC);
    });
}
