//! Trees that run while they are inspected, with processes that begin and end.

use crate::harness::{Donor, at, fork, put, stop};
use holdfast_sys::process::files::{Draft, Image, Limits};
use rustix::event::epoll;
use rustix::process::{Signal, kill_process};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;

/// Number of inspections, enough to meet descriptors that are just being closed.
const LOOKS: usize = 200;

#[test]
fn a_draft_has_all_that_it_refers_to() {
    let donor = Donor::new(|| {
        put(
            epoll::create(epoll::CreateFlags::empty()).expect("a set"),
            10,
        );
        stop();
        loop {
            let sockets: Vec<_> = (0..8).map(|_| UdpSocket::bind("127.0.0.1:0")).collect();
            let (one, other) = UnixStream::pair().expect("a pair");
            let event = epoll::EventData::new_u64(1);
            for socket in sockets.iter().flatten() {
                epoll::add(at(10), socket, event, epoll::EventFlags::IN).expect("added");
            }
            epoll::add(at(10), &one, event, epoll::EventFlags::IN).expect("added");
            drop((sockets, other, one));
        }
    });
    kill_process(donor.pid, Signal::CONT).expect("it runs");
    let mut before = None;
    for _ in 0..LOOKS {
        let draft = Draft::look(|| donor.pids(), &Limits::default(), before.as_ref());
        let draft = draft.unwrap_or_else(|error| panic!("{error}"));
        let bytes = postcard::to_stdvec(&draft.image).expect("encoded");
        Image::decode(&bytes).unwrap_or_else(|error| panic!("{error}"));
        before = Some(draft);
    }
}

#[test]
fn a_child_that_is_not_listed_yet_is_no_stranger() {
    let donor = Donor::new(|| {
        let (one, other) = UnixStream::pair().expect("a pair");
        put(one, 10);
        put(other, 11);
        if fork().is_none() {
            stop();
        }
        stop();
    });
    let root = donor.pids()[0];
    let draft = Draft::save(&[root], &Limits::default());
    draft.unwrap_or_else(|error| panic!("{error}"));
}
