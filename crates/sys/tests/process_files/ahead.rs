//! Descriptors prepared before the freeze: used if no descriptor was opened or closed since, and never otherwise.

use crate::harness::{Donor, at, close, fork, put, stop};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::OFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs::File;
use std::io::IoSlice;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Opens descriptors of many kinds, connections at 10 to 12 among them; 12 is a duplicate of 11.
fn open_all() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = listener.local_addr().expect("address");
    put(listener, 20);
    put(TcpStream::connect(address).expect("connected"), 10);
    put(TcpStream::connect(address).expect("connected"), 11);
    for number in 30..32 {
        let accepted = rustix::net::accept(at(20)).expect("accepted");
        put(accepted, number);
    }
    put(at(11).try_clone_to_owned().expect("dup"), 12);
    put(UdpSocket::bind("[::1]:0").expect("bound"), 13);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    put(OwnedFd::from(reader), 14);
    put(OwnedFd::from(writer), 15);
    put(File::open("/proc/self/exe").expect("open"), 16);
    put(eventfd(3, EventfdFlags::empty()).expect("made"), 17);
    let (one, other) = UnixStream::pair().expect("a pair");
    put(one, 18);
    put(other, 19);
    put(
        epoll::create(epoll::CreateFlags::empty()).expect("made"),
        21,
    );
    for number in [10, 11, 14, 18] {
        watch(number, epoll::EventFlags::IN);
    }
    put(eventfd(3, EventfdFlags::empty()).expect("made"), 22);
}

fn watch(number: i32, events: epoll::EventFlags) {
    let data = epoll::EventData::new_u64(number as u64);
    epoll::add(at(21), at(number), data, events).expect("added");
}

/// Returns true if the prepared descriptors were used for a donor that makes a change after its first reading.
fn freeze_after(change: fn()) -> bool {
    let donor = Donor::new(|| {
        open_all();
        stop();
        change();
        stop();
    });
    let draft = donor.draft();
    assert!(draft.is_prepared());
    donor.run_on();
    donor.freeze_either_way(&draft).1
}

/// Sends a descriptor from 18 to 19, so that it is in flight.
fn send(fd: OwnedFd) {
    use std::os::fd::AsFd;
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
    let bytes = [IoSlice::new(b"take it")];
    sendmsg(at(18), &bytes, &mut control, SendFlags::empty()).expect("sent");
}

#[test]
fn where_nothing_changes() {
    assert!(freeze_after(|| {}));
}

#[test]
fn positions_flags_and_what_is_in_something() {
    assert!(freeze_after(|| {
        rustix::fs::seek(at(16), rustix::fs::SeekFrom::Start(7)).expect("sought");
        rustix::io::write(at(15), b"in the pipe").expect("written");
        rustix::io::write(at(17), &5u64.to_ne_bytes()).expect("written");
        rustix::io::write(at(19), b"in the socket").expect("written");
        epoll::delete(at(21), at(11)).expect("removed");
        watch(13, epoll::EventFlags::OUT);
        rustix::fs::fcntl_setfl(at(10), OFlags::RDWR | OFlags::NONBLOCK).expect("set");
        rustix::fs::fcntl_setfl(at(12), OFlags::RDWR | OFlags::NONBLOCK).expect("set");
    }));
}

#[test]
fn who_is_told_of_a_socket() {
    assert!(freeze_after(|| {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let outcome = {
            use std::os::fd::AsRawFd;
            // SAFETY: no pointers are passed.
            unsafe { libc::fcntl(at(10).as_raw_fd(), libc::F_SETOWN, own) }
        };
        assert_eq!(outcome, 0);
        rustix::fs::fcntl_setfl(at(10), OFlags::RDWR | OFlags::from_bits_retain(0x2000))
            .expect("set");
    }));
}

/// SIGURG goes to a socket's owner whatever the flags are, so an owner without O_ASYNC must be saved.
#[test]
fn who_is_told_of_urgent_data() {
    assert!(freeze_after(|| {
        use std::os::fd::AsRawFd;
        let own = rustix::process::getpid().as_raw_nonzero().get();
        for number in [10, 13, 21] {
            // SAFETY: no pointers are passed.
            let outcome = unsafe { libc::fcntl(at(number).as_raw_fd(), libc::F_SETOWN, own) };
            assert_eq!(outcome, 0);
        }
    }));
}

#[test]
fn what_is_in_flight_is_found() {
    assert!(freeze_after(|| {
        send(at(10).try_clone_to_owned().expect("dup"));
        send(UdpSocket::bind("127.0.0.1:0").expect("bound").into());
        send(at(14).try_clone_to_owned().expect("dup"));
        send(eventfd(1, EventfdFlags::empty()).expect("made"));
        send(at(17).try_clone_to_owned().expect("dup"));
    }));
}

#[test]
fn what_is_opened_or_closed_is_found() {
    assert!(!freeze_after(|| put(
        UdpSocket::bind("127.0.0.1:0").expect("bound"),
        40
    )));
    assert!(!freeze_after(|| close(10)));
    assert!(!freeze_after(|| close(12)));
    // Another descriptor of the same kind with the same number.
    assert!(!freeze_after(|| put(
        UdpSocket::bind("127.0.0.1:0").expect("bound"),
        13
    )));
    assert!(!freeze_after(|| put(
        at(10).try_clone_to_owned().expect("dup"),
        11
    )));
    assert!(!freeze_after(|| put(
        eventfd(3, EventfdFlags::empty()).expect("made"),
        22
    )));
}

#[test]
fn a_number_that_closes_in_exec_from_now_on() {
    assert!(!freeze_after(|| {
        rustix::io::fcntl_setfd(at(10), rustix::io::FdFlags::CLOEXEC).expect("set");
    }));
}

#[test]
fn locks_that_are_new_and_locks_that_change() {
    assert!(!freeze_after(|| lock(16)));
    let donor = Donor::new(|| {
        open_all();
        lock(16);
        stop();
        rustix::fs::flock(at(16), rustix::fs::FlockOperation::Unlock).expect("unlocked");
        let exclusive = rustix::fs::FlockOperation::LockExclusive;
        rustix::fs::flock(at(16), exclusive).expect("locked");
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    assert!(donor.freeze_either_way(&draft).1);
}

fn lock(number: i32) {
    let shared = rustix::fs::FlockOperation::LockShared;
    rustix::fs::flock(at(number), shared).expect("locked");
}

#[test]
fn processes_with_tables_of_their_own() {
    let donor = Donor::new(|| {
        open_all();
        if let Some(child) = fork() {
            let stopped = rustix::process::WaitOptions::UNTRACED;
            rustix::process::waitpid(Some(child), stopped).expect("waited");
            stop();
            let seek = rustix::fs::SeekFrom::Start(9);
            rustix::fs::seek(at(16), seek).expect("sought");
            stop();
            if fork().is_none() {
                stop();
            }
        } else {
            close(10);
        }
        stop();
    });
    let draft = donor.draft();
    assert!(draft.is_prepared());
    assert_eq!(draft.image.tables.len(), 2);
    donor.run_on();
    let (saved, prepared) = donor.freeze_either_way(&draft);
    assert!(prepared);
    assert_ne!(saved.image, saved.frozen);

    let draft = donor.draft();
    donor.run_on();
    assert!(!donor.freeze_either_way(&draft).1, "a process more");
}
