//! Epoll sets and inotify.

use crate::harness::{Donor, at, close, put, read, stop};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::write;
use std::os::fd::RawFd;

/// Returns the data and events that an epoll set reports.
fn wait(set: RawFd) -> Vec<(u64, u32)> {
    let mut events = Vec::with_capacity(16);
    let none = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    epoll::wait(
        at(set),
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

fn add(set: RawFd, fd: RawFd, data: u64, flags: epoll::EventFlags) {
    epoll::add(at(set), at(fd), epoll::EventData::new_u64(data), flags).expect("added");
}

const IN: epoll::EventFlags = epoll::EventFlags::IN;

#[test]
fn an_epoll_set_watches_what_it_watched() {
    let donor = Donor::new(|| {
        for number in [10, 30] {
            put(
                epoll::create(epoll::CreateFlags::empty()).expect("made"),
                number,
            );
        }
        for number in 11..16 {
            put(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), number);
        }
        add(10, 11, 100, IN);
        add(10, 12, 200, IN | epoll::EventFlags::ET);
        add(10, 13, 300, IN | epoll::EventFlags::ONESHOT);
        add(30, 10, 1, IN);
        // Two numbers are watched that are closed later, and one of them is opened again as another file.
        add(10, 14, 400, IN);
        put(rustix::io::dup(at(14)).expect("dup"), 44);
        close(14);
        add(10, 15, 500, IN);
        put(rustix::io::dup(at(15)).expect("dup"), 45);
        close(15);
        put(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), 15);
        stop();
    });
    donor.save().restored(|_| {
        assert_eq!(wait(30), []);
        for number in [11, 12, 13, 44, 45, 15] {
            write(at(number), &1u64.to_ne_bytes()).expect("written");
        }
        assert_eq!(wait(30), [(1, 1)], "sets may watch sets");
        let all = [(100, 1), (200, 1), (300, 1), (400, 1), (500, 1)];
        assert_eq!(wait(10), all);
        assert_eq!(
            wait(10),
            [(100, 1), (400, 1), (500, 1)],
            "once for edges and one shot"
        );
    });
}

#[test]
fn an_entry_that_fired_once_waits_to_be_armed() {
    let donor = Donor::new(|| {
        put(
            epoll::create(epoll::CreateFlags::empty()).expect("made"),
            10,
        );
        for number in [11, 13] {
            put(eventfd(0, EventfdFlags::NONBLOCK).expect("made"), number);
        }
        add(10, 11, 100, IN);
        add(10, 13, 300, IN | epoll::EventFlags::ONESHOT);
        stop();
        write(at(13), &1u64.to_ne_bytes()).expect("written");
        assert_eq!(wait(10), [(300, 1)]);
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    donor.freeze(&draft).restored(|_| {
        for number in [11, 13] {
            write(at(number), &1u64.to_ne_bytes()).expect("written");
        }
        assert_eq!(wait(10), [(100, 1)]);
        let info = std::fs::read_to_string("/proc/self/fdinfo/10").expect("read");
        let line = info
            .lines()
            .find(|line| line.contains("tfd:       13"))
            .expect("an entry");
        assert!(line.contains("events: 40000000"), "{line}");
        let again = epoll::EventData::new_u64(301);
        epoll::modify(at(10), at(13), again, IN).expect("armed");
        assert_eq!(wait(10), [(100, 1), (301, 1)]);
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
        put(
            inotify::init(inotify::CreateFlags::NONBLOCK).expect("made"),
            10,
        );
        for _ in 0..3 {
            let spent = inotify::add_watch(at(10), &second, WatchFlags::ALL_EVENTS).expect("added");
            inotify::remove_watch(at(10), spent).expect("removed");
        }
        inotify::add_watch(at(10), &first, WatchFlags::CREATE).expect("added");
        inotify::add_watch(at(10), &second, WatchFlags::DELETE | WatchFlags::ONLYDIR)
            .expect("added");
        read(10);
        stop();
    });
    donor.save().restored(|_| {
        std::fs::write(first.join("new"), "").expect("written");
        std::fs::write(second.join("new"), "").expect("written");
        std::fs::remove_file(second.join("new")).expect("removed");
        let events = read(10);
        let word = |at: usize| i32::from_ne_bytes(events[at..at + 4].try_into().expect("word"));
        assert_eq!((word(0), word(4)), (4, libc::IN_CREATE as i32));
        assert_eq!((word(32), word(36)), (5, libc::IN_DELETE as i32));
        assert_eq!(events.len(), 64);
    });
}

/// Watch descriptors are read correctly although the kernel shows them in hexadecimal.
#[test]
fn many_watches_of_inotify_keep_their_numbers() {
    const WATCHES: i32 = 300;
    let dir = tempfile::tempdir().expect("a directory");
    let path = |number: i32| dir.path().join(number.to_string());
    (1..=WATCHES).for_each(|number| std::fs::create_dir(path(number)).expect("made"));
    let stays = |number: &i32| number % 3 != 0;
    let donor = Donor::new(|| {
        put(
            inotify::init(inotify::CreateFlags::NONBLOCK).expect("made"),
            10,
        );
        for number in 1..=WATCHES {
            let given = inotify::add_watch(at(10), path(number), WatchFlags::CREATE);
            assert_eq!(given, Ok(number));
        }
        for number in (1..=WATCHES).filter(|number| !stays(number)) {
            inotify::remove_watch(at(10), number).expect("removed");
        }
        read(10);
        stop();
    });
    donor.save().restored(|_| {
        for number in (1..=WATCHES).filter(stays) {
            std::fs::write(path(number).join("new"), "").expect("written");
            let told = i32::from_ne_bytes(read(10)[..4].try_into().expect("a word"));
            assert_eq!(told, number);
        }
    });
}

#[test]
fn what_inotify_has_not_told_yet_blocks_the_freeze() {
    let dir = tempfile::tempdir().expect("a directory");
    let donor = Donor::new(|| {
        put(
            inotify::init(inotify::CreateFlags::NONBLOCK).expect("made"),
            10,
        );
        inotify::add_watch(at(10), dir.path(), WatchFlags::CREATE).expect("added");
        stop();
    });
    let draft = donor.draft();
    std::fs::write(dir.path().join("new"), "").expect("written");
    let error = draft
        .save_frozen(&donor.pids())
        .expect_err("refused")
        .to_string();
    assert!(error.contains("were not read"), "{error}");
}
