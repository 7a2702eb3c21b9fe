//! Pipes, FIFOs, eventfds, timers, signalfds, asynchronous signals.

use crate::harness::{
    Donor, SavedDescriptors, borrow_fd, close_number, fork_child, put_at, read_available, stop_self,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{Gid, Mode, OFlags, Uid, fchmod, fchown, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::{Errno, write};
use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe, pipe_with};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_gettime,
    timerfd_settime,
};
use std::os::fd::RawFd;

fn open_pipe_at(reader: RawFd, writer: RawFd) {
    let (from, to) = pipe().expect("pipe");
    put_at(from, reader);
    put_at(to, writer);
}

#[test]
fn pipe_keeps_content_capacity_and_both_ends() {
    let donor = Donor::new(|| {
        open_pipe_at(10, 11);
        fcntl_setpipe_size(borrow_fd(10), 1 << 17).expect("size");
        fcntl_setfl(borrow_fd(10), OFlags::NONBLOCK).expect("flags");
        write(borrow_fd(11), b"before").expect("written");
        stop_self();
        write(borrow_fd(11), b" and after").expect("written");
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    donor.freeze(&snapshot).restore_and_check(|_| {
        assert_eq!(fcntl_getpipe_size(borrow_fd(11)), Ok(1 << 17));
        assert_eq!(fcntl_getfl(borrow_fd(10)), Ok(OFlags::NONBLOCK));
        assert_eq!(fcntl_getfl(borrow_fd(11)), Ok(OFlags::WRONLY));
        assert_eq!(read_available(10), b"before and after");
        assert_eq!(
            rustix::io::read(borrow_fd(10), &mut [0; 1]),
            Err(Errno::AGAIN)
        );
        write(borrow_fd(11), b"more").expect("written");
        assert_eq!(read_available(10), b"more");
        close_number(11);
        assert_eq!(read_available(10), b"", "no other writer is open");
    });
    // The data is also still at the donor.
    donor
        .save_unchanged()
        .restore_and_check(|_| assert_eq!(read_available(10), b"before and after"));
}

/// A pipe keeps its owner and permissions, because programs reopen their standard streams by `/proc/self/fd`, and the
/// kernel checks these.
#[test]
fn pipe_keeps_owner_and_permissions() {
    let set_owner = |number: RawFd, mode: u32| {
        let (user, group) = (Uid::from_raw(12_345), Gid::from_raw(23_456));
        fchown(borrow_fd(number), Some(user), Some(group)).expect("given");
        fchmod(borrow_fd(number), Mode::from_raw_mode(mode)).expect("set");
    };
    let donor = Donor::new(|| {
        open_pipe_at(10, 11);
        open_pipe_at(20, 21);
        set_owner(20, 0o640);
        stop_self();
        set_owner(11, 0o604);
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    donor.freeze(&snapshot).restore_and_check(|_| {
        for (number, mode) in [(10, 0o604), (11, 0o604), (20, 0o640), (21, 0o640)] {
            let stat = fstat(borrow_fd(number)).expect("stat");
            assert_eq!((stat.st_uid, stat.st_gid), (12_345, 23_456));
            assert_eq!(stat.st_mode & 0o7777, mode);
        }
    });
}

#[test]
fn pipe_with_closed_end_stays_closed() {
    let donor = Donor::new(|| {
        open_pipe_at(10, 11);
        write(borrow_fd(11), b"last words").expect("written");
        close_number(11);
        open_pipe_at(20, 21);
        close_number(20);
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        assert_eq!(read_available(10), b"last words");
        assert_eq!(read_available(10), b"");
        // SAFETY: no handler is installed, only the default changed.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        assert_eq!(write(borrow_fd(21), b"x"), Err(Errno::PIPE));
    });
}

#[test]
fn pipe_packets_keep_boundaries() {
    let donor = Donor::new(|| {
        let (from, to) = pipe_with(PipeFlags::DIRECT).expect("pipe");
        put_at(from, 10);
        put_at(to, 11);
        for packet in [&b"one"[..], b"two", b"three"] {
            write(borrow_fd(11), packet).expect("written");
        }
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        for packet in [&b"one"[..], b"two", b"three"] {
            assert_eq!(read_available(10), packet);
        }
        assert!(
            fcntl_getfl(borrow_fd(11))
                .expect("flags")
                .contains(OFlags::DIRECT)
        );
    });
}

#[test]
fn fifo_is_reopened_by_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR).expect("fifo");
    let donor = Donor::new(|| {
        let both = rustix::fs::open(&path, OFlags::RDWR, Mode::empty()).expect("open");
        put_at(both, 10);
        write(borrow_fd(10), b"waiting").expect("written");
        stop_self();
    });
    let (same_kernel, other_kernel) = (donor.save_unchanged(), donor.save_unchanged());
    same_kernel.restore_and_check(|_| assert_eq!(read_available(10), b"waiting"));
    drop(donor);
    other_kernel.restore_and_check(|_| assert_eq!(read_available(10), b"waiting"));
}

#[test]
fn shared_pipe_end_stays_shared() {
    let donor = Donor::new(|| {
        open_pipe_at(10, 11);
        put_at(eventfd(0, EventfdFlags::empty()).expect("made"), 12);
        match fork_child() {
            None => {
                close_number(10);
                fcntl_setfl(borrow_fd(11), OFlags::NONBLOCK).expect("flags");
                put_at(rustix::io::dup(borrow_fd(12)).expect("dup"), 40);
                close_number(12);
                stop_self();
            }
            Some(child) => {
                let stopped = rustix::process::WaitOptions::UNTRACED;
                rustix::process::waitpid(Some(child), stopped).expect("waited");
                close_number(11);
                stop_self();
            }
        }
    });
    donor.save_unchanged().restore_and_check(|table| {
        if table == 0 {
            assert_eq!(read_available(10), b"from the child");
            assert_eq!(read_available(10), b"", "the child closed its end");
            assert_eq!(read_available(12), 5u64.to_ne_bytes());
            assert!(rustix::io::fcntl_getfd(borrow_fd(11)).is_err());
        } else {
            write(borrow_fd(40), &5u64.to_ne_bytes()).expect("written");
            write(borrow_fd(11), b"from the child").expect("written");
            assert!(
                fcntl_getfl(borrow_fd(11))
                    .expect("flags")
                    .contains(OFlags::NONBLOCK)
            );
            assert!(rustix::io::fcntl_getfd(borrow_fd(10)).is_err());
        }
    });
}

#[test]
fn eventfds_keep_their_count() {
    let donor = Donor::new(|| {
        put_at(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), 10);
        write(borrow_fd(10), &(1u64 << 40).to_ne_bytes()).expect("written");
        put_at(
            eventfd(3, EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK).expect("made"),
            11,
        );
        put_at(rustix::io::dup(borrow_fd(10)).expect("dup"), 12);
        put_at(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), 13);
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        assert_eq!(read_available(12), (1u64 << 40).to_ne_bytes());
        assert_eq!(
            rustix::io::read(borrow_fd(10), &mut [0; 8]),
            Err(Errno::AGAIN),
            "shared"
        );
        for _ in 0..3 {
            assert_eq!(read_available(11), 1u64.to_ne_bytes());
        }
        assert_eq!(
            rustix::io::read(borrow_fd(11), &mut [0; 8]),
            Err(Errno::AGAIN)
        );
        assert_eq!(
            rustix::io::read(borrow_fd(13), &mut [0; 8]),
            Err(Errno::AGAIN)
        );
    });
}

#[test]
fn timerfds_keep_their_expiry() {
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
        let new_timer = |clock| timerfd_create(clock, TimerfdFlags::NONBLOCK).expect("made");
        for number in 10..13 {
            put_at(new_timer(TimerfdClockId::Monotonic), number);
        }
        put_at(new_timer(TimerfdClockId::Realtime), 13);
        let none = TimerfdTimerFlags::empty();
        timerfd_settime(borrow_fd(10), none, &spec(1000, 7)).expect("set");
        let fast = Itimerspec {
            it_value: millisecond,
            it_interval: spec(3600, 0).it_value,
        };
        timerfd_settime(borrow_fd(11), none, &fast).expect("set");
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        timerfd_settime(
            borrow_fd(13),
            TimerfdTimerFlags::ABSTIME,
            &spec(now + 500, 0),
        )
        .expect("set");
        let mut expired = [PollFd::from_borrowed_fd(borrow_fd(11), PollFlags::IN)];
        poll(&mut expired, None).expect("expired");
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let timer = timerfd_gettime(borrow_fd(10)).expect("read");
        assert!((900..=1000).contains(&timer.it_value.tv_sec), "{timer:?}");
        assert_eq!(timer.it_interval.tv_sec, 7);
        assert_eq!(
            read_available(11),
            1u64.to_ne_bytes(),
            "an expiration that was not read"
        );
        let timer = timerfd_gettime(borrow_fd(11)).expect("read");
        assert!((3500..=3600).contains(&timer.it_value.tv_sec), "{timer:?}");
        assert_eq!(
            timerfd_gettime(borrow_fd(12))
                .expect("read")
                .it_value
                .tv_sec,
            0
        );
        let timer = timerfd_gettime(borrow_fd(13)).expect("read");
        assert!((400..=500).contains(&timer.it_value.tv_sec), "{timer:?}");
    });
}

#[test]
fn signalfd_reads_signals_after_restore() {
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
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        blocked();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::USR1)
            .expect("sent");
        assert_eq!(
            read_available(10)[..4],
            (libc::SIGUSR1 as u32).to_ne_bytes()
        );
        let info = std::fs::read_to_string("/proc/self/fdinfo/10").expect("read");
        assert!(info.contains(&format!("sigmask:\t{mask:016x}")), "{info}");
    });
}

#[test]
fn async_signal_owner_is_kept() {
    let donor = Donor::new(|| {
        open_pipe_at(10, 11);
        // SAFETY: no pointers are passed.
        unsafe {
            libc::setpgid(0, 0);
            libc::fcntl(10, libc::F_SETOWN, -libc::getpgrp());
            libc::fcntl(10, 10, libc::SIGUSR2);
        }
        fcntl_setfl(
            borrow_fd(10),
            OFlags::from_bits_retain(libc::O_ASYNC as u32),
        )
        .expect("flags");
        stop_self();
    });
    let saved: SavedDescriptors = donor.save_unchanged();
    // The process group is the donor's, and the donor still exists.
    let group = donor.pids()[0];
    saved.restore_and_check(|_| {
        // SAFETY: no pointers are passed.
        let (owner, signal) = unsafe { (libc::fcntl(10, libc::F_GETOWN), libc::fcntl(10, 11)) };
        assert_eq!((owner, signal), (-group, libc::SIGUSR2));
        let flags = fcntl_getfl(borrow_fd(10)).expect("flags").bits() as i32;
        assert_eq!(flags, libc::O_ASYNC);
    });
}
