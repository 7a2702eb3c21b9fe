//! Epoll sets and inotify.

use crate::harness::{Donor, borrow_fd, close_number, put_at, read_available, stop_self};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::write;
use std::os::fd::RawFd;

/// Returns the data and events that an epoll set reports.
fn wait_events(set: RawFd) -> Vec<(u64, u32)> {
    let mut events = Vec::with_capacity(16);
    let none = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    epoll::wait(
        borrow_fd(set),
        rustix::buffer::spare_capacity(&mut events),
        Some(&none),
    )
    .expect("wait");
    let mut found: Vec<_> = events
        .iter()
        .map(|event| (event.data.u64(), { event.flags }.bits()))
        .collect();
    found.sort_unstable();
    found
}

fn add_watch(set: RawFd, fd: RawFd, data: u64, flags: epoll::EventFlags) {
    epoll::add(
        borrow_fd(set),
        borrow_fd(fd),
        epoll::EventData::new_u64(data),
        flags,
    )
    .expect("added");
}

const IN: epoll::EventFlags = epoll::EventFlags::IN;

#[test]
fn epoll_set_keeps_its_watches() {
    let donor = Donor::new(|| {
        for number in [10, 30] {
            put_at(
                epoll::create(epoll::CreateFlags::empty()).expect("made"),
                number,
            );
        }
        for number in 11..16 {
            put_at(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), number);
        }
        add_watch(10, 11, 100, IN);
        add_watch(10, 12, 200, IN | epoll::EventFlags::ET);
        add_watch(10, 13, 300, IN | epoll::EventFlags::ONESHOT);
        add_watch(30, 10, 1, IN);
        // Two numbers are watched that are closed later, and one of them is opened again as another file.
        add_watch(10, 14, 400, IN);
        put_at(rustix::io::dup(borrow_fd(14)).expect("dup"), 44);
        close_number(14);
        add_watch(10, 15, 500, IN);
        put_at(rustix::io::dup(borrow_fd(15)).expect("dup"), 45);
        close_number(15);
        put_at(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), 15);
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        assert_eq!(wait_events(30), []);
        for number in [11, 12, 13, 44, 45, 15] {
            write(borrow_fd(number), &1u64.to_ne_bytes()).expect("written");
        }
        assert_eq!(wait_events(30), [(1, 1)], "a set that watches a set");
        let all = [(100, 1), (200, 1), (300, 1), (400, 1), (500, 1)];
        assert_eq!(wait_events(10), all);
        assert_eq!(
            wait_events(10),
            [(100, 1), (400, 1), (500, 1)],
            "edge-triggered and one-shot watches report once"
        );
    });
}

#[test]
fn fired_oneshot_watch_stays_disarmed() {
    let donor = Donor::new(|| {
        put_at(
            epoll::create(epoll::CreateFlags::empty()).expect("made"),
            10,
        );
        for number in [11, 13] {
            put_at(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), number);
        }
        add_watch(10, 11, 100, IN);
        add_watch(10, 13, 300, IN | epoll::EventFlags::ONESHOT);
        stop_self();
        write(borrow_fd(13), &1u64.to_ne_bytes()).expect("written");
        assert_eq!(wait_events(10), [(300, 1)]);
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    donor.freeze(&snapshot).restore_and_check(|_| {
        for number in [11, 13] {
            write(borrow_fd(number), &1u64.to_ne_bytes()).expect("written");
        }
        assert_eq!(wait_events(10), [(100, 1)]);
        let info = std::fs::read_to_string("/proc/self/fdinfo/10").expect("read");
        let line = info
            .lines()
            .find(|line| line.contains("tfd:       13"))
            .expect("an entry");
        assert!(line.contains("events: 40000000"), "{line}");
        let again = epoll::EventData::new_u64(301);
        epoll::modify(borrow_fd(10), borrow_fd(13), again, IN).expect("armed");
        assert_eq!(wait_events(10), [(100, 1), (301, 1)]);
    });
}

#[test]
fn inotify_keeps_its_watch_descriptors() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    for path in [&first, &second] {
        std::fs::create_dir(path).expect("made");
    }
    let donor = Donor::new(|| {
        put_at(
            inotify::init(inotify::CreateFlags::NONBLOCK).expect("made"),
            10,
        );
        for _ in 0..3 {
            let used_descriptor =
                inotify::add_watch(borrow_fd(10), &second, WatchFlags::ALL_EVENTS).expect("added");
            inotify::remove_watch(borrow_fd(10), used_descriptor).expect("removed");
        }
        inotify::add_watch(borrow_fd(10), &first, WatchFlags::CREATE).expect("added");
        inotify::add_watch(
            borrow_fd(10),
            &second,
            WatchFlags::DELETE | WatchFlags::ONLYDIR,
        )
        .expect("added");
        read_available(10);
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        std::fs::write(first.join("new"), "").expect("written");
        std::fs::write(second.join("new"), "").expect("written");
        std::fs::remove_file(second.join("new")).expect("removed");
        let events = read_available(10);
        let word = |at: usize| i32::from_ne_bytes(events[at..at + 4].try_into().expect("word"));
        assert_eq!((word(0), word(4)), (4, libc::IN_CREATE as i32));
        assert_eq!((word(32), word(36)), (5, libc::IN_DELETE as i32));
        assert_eq!(events.len(), 64);
    });
}

/// Watch descriptors are read correctly although the kernel shows them in hexadecimal.
#[test]
fn many_inotify_watches_keep_their_descriptors() {
    const WATCHES: i32 = 300;
    let dir = tempfile::tempdir().expect("a directory");
    let path = |number: i32| dir.path().join(number.to_string());
    (1..=WATCHES).for_each(|number| std::fs::create_dir(path(number)).expect("made"));
    let is_kept = |number: &i32| number % 3 != 0;
    let donor = Donor::new(|| {
        put_at(
            inotify::init(inotify::CreateFlags::NONBLOCK).expect("made"),
            10,
        );
        for number in 1..=WATCHES {
            let given = inotify::add_watch(borrow_fd(10), path(number), WatchFlags::CREATE);
            assert_eq!(given, Ok(number));
        }
        for number in (1..=WATCHES).filter(|number| !is_kept(number)) {
            inotify::remove_watch(borrow_fd(10), number).expect("removed");
        }
        read_available(10);
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        for number in (1..=WATCHES).filter(is_kept) {
            std::fs::write(path(number).join("new"), "").expect("written");
            let reported = i32::from_ne_bytes(read_available(10)[..4].try_into().expect("a word"));
            assert_eq!(reported, number);
        }
    });
}

#[test]
fn unread_inotify_events_block_the_freeze() {
    let dir = tempfile::tempdir().expect("a directory");
    let donor = Donor::new(|| {
        put_at(
            inotify::init(inotify::CreateFlags::NONBLOCK).expect("made"),
            10,
        );
        inotify::add_watch(borrow_fd(10), dir.path(), WatchFlags::CREATE).expect("added");
        stop_self();
    });
    let snapshot = donor.snapshot();
    std::fs::write(dir.path().join("new"), "").expect("written");
    let error = snapshot
        .save_frozen(&donor.pids())
        .expect_err("refused")
        .to_string();
    assert!(error.contains("unread events"), "{error}");
}
