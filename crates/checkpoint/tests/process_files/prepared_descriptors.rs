//! Descriptors prepared before the freeze: used if no descriptor was opened or closed since, and never otherwise.

use crate::harness::{Donor, borrow_fd, close_number, fork_child, put_at, stop_self};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::OFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::IoSlice;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Opens descriptors of many kinds, connections at 10 to 12 among them; 12 is a duplicate of 11.
fn open_many_kinds() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = listener.local_addr().expect("address");
    put_at(listener, 20);
    put_at(TcpStream::connect(address).expect("connected"), 10);
    put_at(TcpStream::connect(address).expect("connected"), 11);
    for number in 30..32 {
        let accepted = rustix::net::accept(borrow_fd(20)).expect("accepted");
        put_at(accepted, number);
    }
    put_at(borrow_fd(11).try_clone_to_owned().expect("dup"), 12);
    put_at(UdpSocket::bind("[::1]:0").expect("bound"), 13);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    put_at(OwnedFd::from(reader), 14);
    put_at(OwnedFd::from(writer), 15);
    put_at(File::open("/proc/self/exe").expect("open"), 16);
    put_at(eventfd(3, EventfdFlags::empty()).expect("made"), 17);
    let (one, other) = UnixStream::pair().expect("a pair");
    put_at(one, 18);
    put_at(other, 19);
    put_at(
        epoll::create(epoll::CreateFlags::empty()).expect("made"),
        21,
    );
    for number in [10, 11, 14, 18] {
        watch_in_epoll(number, epoll::EventFlags::IN);
    }
    put_at(eventfd(3, EventfdFlags::empty()).expect("made"), 22);
}

fn watch_in_epoll(number: i32, events: epoll::EventFlags) {
    let data = epoll::EventData::new_u64(number as u64);
    epoll::add(borrow_fd(21), borrow_fd(number), data, events).expect("added");
}

/// Returns true if the prepared descriptors were used for a donor that makes a change after its first reading.
fn uses_prepared_after(change: fn()) -> bool {
    let donor = Donor::new(|| {
        open_many_kinds();
        stop_self();
        change();
        stop_self();
    });
    let snapshot = donor.snapshot();
    assert!(snapshot.has_prediction());
    donor.continue_to_next_stop();
    donor.freeze_with_prepared_flag(&snapshot).1
}

/// Sends a descriptor from 18 to 19, so that it is in flight.
fn send_in_flight(fd: OwnedFd) {
    use std::os::fd::AsFd;
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
    let bytes = [IoSlice::new(b"take it")];
    sendmsg(borrow_fd(18), &bytes, &mut control, SendFlags::empty()).expect("sent");
}

#[test]
fn unchanged_tree_uses_prepared_descriptors() {
    assert!(uses_prepared_after(|| {}));
}

#[test]
fn position_flag_and_content_changes_keep_prepared_descriptors() {
    assert!(uses_prepared_after(|| {
        rustix::fs::seek(borrow_fd(16), rustix::fs::SeekFrom::Start(7)).expect("sought");
        rustix::io::write(borrow_fd(15), b"in the pipe").expect("written");
        rustix::io::write(borrow_fd(17), &5u64.to_ne_bytes()).expect("written");
        rustix::io::write(borrow_fd(19), b"in the socket").expect("written");
        epoll::delete(borrow_fd(21), borrow_fd(11)).expect("removed");
        watch_in_epoll(13, epoll::EventFlags::OUT);
        rustix::fs::fcntl_setfl(borrow_fd(10), OFlags::RDWR | OFlags::NONBLOCK).expect("set");
        rustix::fs::fcntl_setfl(borrow_fd(12), OFlags::RDWR | OFlags::NONBLOCK).expect("set");
    }));
}

#[test]
fn new_async_owner_keeps_prepared_descriptors() {
    assert!(uses_prepared_after(|| {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let outcome = {
            use std::os::fd::AsRawFd;
            // SAFETY: no pointers are passed.
            unsafe { libc::fcntl(borrow_fd(10).as_raw_fd(), libc::F_SETOWN, own) }
        };
        assert_eq!(outcome, 0);
        rustix::fs::fcntl_setfl(
            borrow_fd(10),
            OFlags::RDWR | OFlags::from_bits_retain(0x2000),
        )
        .expect("set");
    }));
}

/// SIGURG goes to a socket's owner whatever the flags are, so an owner without O_ASYNC must be saved.
#[test]
fn new_urgent_data_owner_keeps_prepared_descriptors() {
    assert!(uses_prepared_after(|| {
        use std::os::fd::AsRawFd;
        let own = rustix::process::getpid().as_raw_nonzero().get();
        for number in [10, 13, 21] {
            // SAFETY: no pointers are passed.
            let outcome =
                unsafe { libc::fcntl(borrow_fd(number).as_raw_fd(), libc::F_SETOWN, own) };
            assert_eq!(outcome, 0);
        }
    }));
}

#[test]
fn new_descriptors_in_flight_keep_prepared_ones() {
    assert!(uses_prepared_after(|| {
        send_in_flight(borrow_fd(10).try_clone_to_owned().expect("dup"));
        send_in_flight(UdpSocket::bind("127.0.0.1:0").expect("bound").into());
        send_in_flight(borrow_fd(14).try_clone_to_owned().expect("dup"));
        send_in_flight(eventfd(1, EventfdFlags::empty()).expect("made"));
        send_in_flight(borrow_fd(17).try_clone_to_owned().expect("dup"));
    }));
}

#[test]
fn opened_or_closed_numbers_discard_prepared_descriptors() {
    assert!(!uses_prepared_after(|| put_at(
        UdpSocket::bind("127.0.0.1:0").expect("bound"),
        40
    )));
    assert!(!uses_prepared_after(|| close_number(10)));
    assert!(!uses_prepared_after(|| close_number(12)));
    // Another descriptor of the same kind with the same number.
    assert!(!uses_prepared_after(|| put_at(
        UdpSocket::bind("127.0.0.1:0").expect("bound"),
        13
    )));
    assert!(!uses_prepared_after(|| put_at(
        borrow_fd(10).try_clone_to_owned().expect("dup"),
        11
    )));
    assert!(!uses_prepared_after(|| put_at(
        eventfd(3, EventfdFlags::empty()).expect("made"),
        22
    )));
}

#[test]
fn new_close_on_exec_flag_discards_prepared_descriptors() {
    assert!(!uses_prepared_after(|| {
        rustix::io::fcntl_setfd(borrow_fd(10), rustix::io::FdFlags::CLOEXEC).expect("set");
    }));
}

#[test]
fn only_new_locks_discard_prepared_descriptors() {
    assert!(!uses_prepared_after(|| lock_shared(16)));
    let donor = Donor::new(|| {
        open_many_kinds();
        lock_shared(16);
        stop_self();
        rustix::fs::flock(borrow_fd(16), rustix::fs::FlockOperation::Unlock).expect("unlocked");
        let exclusive = rustix::fs::FlockOperation::LockExclusive;
        rustix::fs::flock(borrow_fd(16), exclusive).expect("locked");
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    assert!(donor.freeze_with_prepared_flag(&snapshot).1);
}

fn lock_shared(number: i32) {
    let shared = rustix::fs::FlockOperation::LockShared;
    rustix::fs::flock(borrow_fd(number), shared).expect("locked");
}

#[test]
fn changes_in_separate_tables_keep_prepared_descriptors() {
    let donor = Donor::new(|| {
        open_many_kinds();
        if let Some(child) = fork_child() {
            let stopped = rustix::process::WaitOptions::UNTRACED;
            rustix::process::waitpid(Some(child), stopped).expect("waited");
            stop_self();
            let seek = rustix::fs::SeekFrom::Start(9);
            rustix::fs::seek(borrow_fd(16), seek).expect("sought");
            stop_self();
            if fork_child().is_none() {
                stop_self();
            }
        } else {
            close_number(10);
        }
        stop_self();
    });
    let snapshot = donor.snapshot();
    assert!(snapshot.has_prediction());
    assert_eq!(snapshot.image.tables.len(), 2);
    donor.continue_to_next_stop();
    let (saved, prepared) = donor.freeze_with_prepared_flag(&snapshot);
    assert!(prepared);
    assert_ne!(saved.image, saved.frozen);

    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    assert!(
        !donor.freeze_with_prepared_flag(&snapshot).1,
        "a new process"
    );
}
