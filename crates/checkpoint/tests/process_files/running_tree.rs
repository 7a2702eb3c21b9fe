//! Trees that run while they are inspected, with processes that begin and end.

use crate::harness::{Donor, borrow_fd, fork_child, put_at, stop_self};
use holdfast_checkpoint::files::{FilesImage, FilesSnapshot, SaveLimits};
use rustix::event::epoll;
use rustix::process::{Signal, kill_process};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;

/// Number of inspections, enough to meet descriptors that are just being closed.
const INSPECTIONS: usize = 200;

#[test]
fn snapshot_of_running_tree_has_no_dangling_references() {
    let donor = Donor::new(|| {
        put_at(
            epoll::create(epoll::CreateFlags::empty()).expect("a set"),
            10,
        );
        stop_self();
        loop {
            let sockets: Vec<_> = (0..8).map(|_| UdpSocket::bind("127.0.0.1:0")).collect();
            let (one, other) = UnixStream::pair().expect("a pair");
            let event = epoll::EventData::new_u64(1);
            for socket in sockets.iter().flatten() {
                epoll::add(borrow_fd(10), socket, event, epoll::EventFlags::IN).expect("added");
            }
            epoll::add(borrow_fd(10), &one, event, epoll::EventFlags::IN).expect("added");
            drop((sockets, other, one));
        }
    });
    kill_process(donor.pid, Signal::CONT).expect("it runs");
    let mut previous = None;
    for _ in 0..INSPECTIONS {
        let snapshot =
            FilesSnapshot::take(|| donor.pids(), &SaveLimits::default(), previous.as_ref());
        let snapshot = snapshot.unwrap_or_else(|error| panic!("{error}"));
        let bytes = postcard::to_stdvec(&snapshot.image).expect("encoded");
        FilesImage::decode(&bytes).unwrap_or_else(|error| panic!("{error}"));
        previous = Some(snapshot);
    }
}

#[test]
fn unlisted_child_is_not_an_outside_process() {
    let donor = Donor::new(|| {
        let (one, other) = UnixStream::pair().expect("a pair");
        put_at(one, 10);
        put_at(other, 11);
        if fork_child().is_none() {
            stop_self();
        }
        stop_self();
    });
    let root = donor.pids()[0];
    let snapshot = FilesSnapshot::save(&[root], &SaveLimits::default());
    snapshot.unwrap_or_else(|error| panic!("{error}"));
}
