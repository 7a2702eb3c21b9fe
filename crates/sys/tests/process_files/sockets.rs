//! Unix sockets and netlink.

use crate::harness::{Donor, at, close, put, read, stop};
use crate::vary;
use holdfast_sys::socket_filter::{Instruction, SocketFilter};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, write};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept, bind, connect,
    listen, recv, send, shutdown, socket, socketpair, sockopt,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

fn pair(kind: SocketType, left: RawFd, right: RawFd) {
    let (one, other) =
        socketpair(AddressFamily::UNIX, kind, SocketFlags::empty(), None).expect("pair");
    put(one, left);
    put(other, right);
}

#[test]
fn a_pair_keeps_its_queues() {
    let donor = Donor::new(|| {
        pair(SocketType::STREAM, 10, 11);
        pair(SocketType::SEQPACKET, 20, 21);
        pair(SocketType::DGRAM, 30, 31);
        stop();
        write(at(10), b"to eleven").expect("written");
        write(at(11), b"to ten").expect("written");
        for message in [&b"one"[..], b"two"] {
            write(at(20), message).expect("written");
            write(at(31), message).expect("written");
        }
        write(at(31), b"").expect("written");
        shutdown(at(10), Shutdown::Write).expect("shut");
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    let check = |_| {
        assert_eq!(read(10), b"to ten");
        assert_eq!(read(11), b"to eleven");
        assert_eq!(read(11), b"", "that half is shut");
        write(at(11), b"back").expect("written");
        assert_eq!(read(10), b"back");
        for message in [&b"one"[..], b"two"] {
            assert_eq!(read(21), message);
            assert_eq!(read(30), message);
        }
        assert_eq!(read(30), b"", "an empty datagram");
        write(at(30), b"answer").expect("written");
        assert_eq!(read(31), b"answer");
    };
    donor.freeze(&draft).restored(check);
    drop(donor);
}

#[test]
fn a_socket_whose_peer_is_gone_has_what_it_said() {
    let donor = Donor::new(|| {
        pair(SocketType::STREAM, 10, 11);
        write(at(11), b"last words").expect("written");
        close(11);
        stop();
    });
    donor.save().restored(|_| {
        assert_eq!(read(10), b"last words");
        assert_eq!(read(10), b"");
        let sent = send(at(10), b"x", rustix::net::SendFlags::NOSIGNAL);
        assert_eq!(sent, Err(Errno::PIPE));
    });
}

fn receive_fd(from: RawFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); 256];
    let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 64];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = rustix::net::RecvFlags::DONTWAIT;
    let got = rustix::net::recvmsg(at(from), &mut parts, &mut control, flags).expect("received");
    let mut fds = Vec::new();
    for part in control.drain() {
        if let rustix::net::RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    (bytes[..got.bytes].to_vec(), fds)
}

fn send_fd(to: RawFd, bytes: &[u8], fd: RawFd) {
    let mut space = [MaybeUninit::uninit(); 256];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [at(fd)];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let flags = rustix::net::SendFlags::empty();
    rustix::net::sendmsg(at(to), &[IoSlice::new(bytes)], &mut control, flags).expect("sent");
}

#[test]
fn descriptors_in_flight_arrive() {
    let donor = Donor::new(|| {
        pair(SocketType::STREAM, 10, 11);
        pair(SocketType::DGRAM, 20, 21);
        put(eventfd(3, EventfdFlags::NONBLOCK).expect("made"), 30);
        send_fd(10, b"shared", 30);
        write(at(10), b"plain").expect("written");
        // The far end is only in flight, with a descriptor in flight in its own queue.
        let (near, far) = UnixStream::pair().expect("pair");
        send_fd(near.as_raw_fd(), b"deeper", 30);
        send_fd(20, b"alone", far.as_raw_fd());
        stop();
    });
    donor.save().restored(|_| {
        let (bytes, fds) = receive_fd(11);
        assert_eq!((&bytes[..], fds.len()), (&b"shared"[..], 1));
        write(&fds[0], &4u64.to_ne_bytes()).expect("written");
        assert_eq!(read(30), 7u64.to_ne_bytes(), "one counter");
        let (bytes, fds) = receive_fd(11);
        assert_eq!((&bytes[..], fds.len()), (&b"plain"[..], 0));
        let (bytes, fds) = receive_fd(21);
        assert_eq!((&bytes[..], fds.len()), (&b"alone"[..], 1));
        let (bytes, deeper) = receive_fd(fds[0].as_raw_fd());
        assert_eq!((&bytes[..], deeper.len()), (&b"deeper"[..], 1));
        write(&deeper[0], &9u64.to_ne_bytes()).expect("written");
        assert_eq!(read(30), 9u64.to_ne_bytes(), "the same counter");
    });
}

#[test]
fn a_listener_keeps_its_name_and_who_waits() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let donor = Donor::new(|| {
        let listener = UnixListener::bind(&path).expect("bound");
        let client = UnixStream::connect(&path).expect("connected");
        let (server, _) = listener.accept().expect("accepted");
        put(server, 12);
        put(client, 11);
        put(listener, 10);
        listen(at(10), 7).expect("listens");
        put(UnixStream::connect(&path).expect("connected"), 13);
        write(at(11), b"hello").expect("written");
        stop();
    });
    let mode = std::fs::Permissions::from_mode(0o640);
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&path, mode).expect("set");
    donor.save().restored(|_| {
        let name = SocketAddrUnix::new(&path).expect("a name");
        for number in [10, 12] {
            let own = rustix::net::getsockname(at(number)).expect("name");
            assert_eq!(SocketAddrUnix::try_from(own), Ok(name.clone()));
        }
        let peer = rustix::net::getpeername(at(11))
            .expect("name")
            .expect("connected");
        assert_eq!(SocketAddrUnix::try_from(peer), Ok(name.clone()));
        assert_eq!(read(12), b"hello");
        let waiting = accept(at(10)).expect("accepted");
        write(at(13), b"early").expect("written");
        assert_eq!(read(waiting.as_raw_fd()), b"early");
        // New clients find the listener by its name.
        let client = UnixStream::connect(&path).expect("connected");
        let server = accept(at(10)).expect("accepted");
        write(&client, b"late").expect("written");
        assert_eq!(read(server.as_raw_fd()), b"late");
        let mode = std::fs::metadata(&path).expect("stat").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
    });
    let names: Vec<_> = std::fs::read_dir(dir.path()).expect("read").collect();
    assert_eq!(names.len(), 1, "nothing is left behind");
}

/// Accepted sockets keep the listener's name after their clients have closed. A server's connections are in this state
/// for a moment.
#[test]
fn accepted_sockets_whose_peers_are_gone_keep_the_name_of_their_listener() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let gone = dir.path().join("gone");
    let lost = dir.path().join("lost");
    let orphan = |listener: &UnixListener, path, number| {
        let client = UnixStream::connect(path).expect("connected");
        put(listener.accept().expect("accepted").0, number);
        write(&client, b"last words").expect("written");
    };
    let donor = Donor::new(|| {
        let listener = UnixListener::bind(&path).expect("bound");
        orphan(&listener, &path, 11);
        orphan(&listener, &path, 12);
        put(listener, 13);
        // No socket listens by this name after the drop.
        let listener = UnixListener::bind(&gone).expect("bound");
        orphan(&listener, &gone, 14);
        orphan(&listener, &gone, 15);
        std::fs::remove_file(&gone).expect("removed");
        drop(listener);
        // The listener's file is removed, so the name does not lead to it.
        let listener = UnixListener::bind(&lost).expect("bound");
        orphan(&listener, &lost, 16);
        put(UnixStream::connect(&lost).expect("connected"), 17);
        put(listener.accept().expect("accepted").0, 18);
        put(UnixStream::connect(&lost).expect("connected"), 19);
        put(listener, 20);
        std::fs::remove_file(&lost).expect("removed");
        stop();
    });
    donor.save().restored(|_| {
        let named = [
            (11, &path),
            (12, &path),
            (14, &gone),
            (15, &gone),
            (16, &lost),
        ];
        for (number, name) in named {
            let own = rustix::net::getsockname(at(number)).expect("name");
            let name = SocketAddrUnix::new(name).expect("a name");
            assert_eq!(SocketAddrUnix::try_from(own), Ok(name));
            assert_eq!(read(number), b"last words");
            assert_eq!(read(number), b"");
        }
        let client = UnixStream::connect(&path).expect("connected");
        let server = accept(at(13)).expect("accepted");
        write(&client, b"new").expect("written");
        assert_eq!(read(server.as_raw_fd()), b"new");
        write(at(17), b"connected").expect("written");
        assert_eq!(read(18), b"connected");
        let waited = accept(at(20)).expect("accepted");
        write(at(19), b"waited").expect("written");
        assert_eq!(read(waited.as_raw_fd()), b"waited");
    });
    let names: Vec<_> = std::fs::read_dir(dir.path()).expect("read").collect();
    assert_eq!(names.len(), 1, "nothing is left behind");
}

/// A listener's file was renamed after the bind, as a JVM's attach listener does, or bound by a path relative to
/// another directory.
#[test]
fn a_listener_is_found_by_the_name_that_its_file_has() {
    let dir = tempfile::tempdir().expect("a directory");
    let at_dir = |name: &str| dir.path().join(name);
    std::fs::create_dir(at_dir("from")).expect("made");
    let bound = ["from/one", "two.tmp", "two.tmp", "three"];
    let files = ["from/one", "2a", "from/2b", "3"];
    let donor = Donor::new(|| {
        for (at, (name, file)) in bound.into_iter().zip(files).enumerate() {
            // The first two by absolute paths, the others by relative ones.
            let path = match at {
                0 | 1 => at_dir(name),
                _ => {
                    std::env::set_current_dir(dir.path()).expect("changed");
                    name.into()
                }
            };
            put(UnixListener::bind(path).expect("bound"), 10 + at as RawFd);
            std::fs::rename(at_dir(name), at_dir(file)).expect("renamed");
        }
        put(UnixStream::connect(at_dir("2a")).expect("connected"), 20);
        put(accept(at(11)).expect("accepted"), 21);
        std::env::set_current_dir("/").expect("changed");
        stop();
    });
    let names = || {
        let names = [10, 11, 12, 13, 21].map(|number| {
            let own = rustix::net::getsockname(at(number)).expect("a name");
            let name = SocketAddrUnix::try_from(own).expect("a name");
            name.path_bytes().expect("a path").to_vec()
        });
        names.to_vec()
    };
    donor.save().restored(|_| {
        let whole = |name: &str| at_dir(name).into_os_string().into_encoded_bytes();
        let two = whole("two.tmp");
        let expected = [
            whole("from/one"),
            two.clone(),
            b"two.tmp".to_vec(),
            b"three".to_vec(),
            two,
        ];
        assert_eq!(names(), expected);
        for (at_number, file) in (10..).zip(files) {
            let client = UnixStream::connect(at_dir(file)).expect("connected");
            let server = accept(at(at_number)).expect("accepted");
            write(&client, b"here").expect("written");
            assert_eq!(read(server.as_raw_fd()), b"here");
        }
        write(at(20), b"there").expect("written");
        assert_eq!(read(21), b"there");
    });
    let mut left: Vec<_> = std::fs::read_dir(dir.path()).expect("read").collect();
    left.extend(std::fs::read_dir(at_dir("from")).expect("read"));
    assert_eq!(left.len(), 1 + files.len(), "{left:?}");
}

/// Every socket option that can be read and set, and every filter, has the same value after the restore.
#[test]
fn options_and_filters_survive() {
    const ACCEPT_ALL: Instruction = Instruction {
        code: 0x06,
        jump_true: 0,
        jump_false: 0,
        operand: u32::MAX,
    };
    let filter = SocketFilter {
        program: vec![ACCEPT_ALL],
        locked: true,
    };
    let kinds = [SocketType::STREAM, SocketType::DGRAM, SocketType::SEQPACKET];
    let make = || {
        for (number, kind) in (10..).step_by(2).zip(kinds) {
            pair(kind, number, number + 1);
        }
        // `NETLINK_ROUTE` is 0.
        let netlink = socket(AddressFamily::NETLINK, SocketType::RAW, None);
        put(netlink.expect("a socket"), 16);
    };
    let numbers = [10, 12, 14, 16];
    let directory = tempfile::tempdir().expect("a directory");
    let note = |number: RawFd| directory.path().join(number.to_string());
    let donor = Donor::new(|| {
        make();
        for number in numbers {
            let varied = vary::vary(at(number), &[vary::SOCKET], &[]);
            assert!(varied.len() > 15, "{varied:?}");
            filter.attach(at(number)).expect("attached");
            let varied = postcard::to_stdvec(&varied).expect("coded");
            std::fs::write(note(number), varied).expect("written");
        }
        stop();
    });
    donor.save().restored(|_| {
        for number in numbers {
            let varied = std::fs::read(note(number)).expect("read");
            let varied = postcard::from_bytes(&varied).expect("decoded");
            let lost = vary::differences(at(number), &varied);
            assert!(lost.is_empty(), "of {number}: {lost:#?}");
            assert_eq!(SocketFilter::read(at(number)).expect("read"), filter);
        }
    });
}

#[test]
fn abstract_names_move_to_another_namespace() {
    let name = SocketAddrUnix::new_abstract_name(b"holdfast-test").expect("a name");
    let donor = Donor::new(|| {
        let make = || socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("socket");
        let listener = make();
        bind(&listener, &name).expect("bound");
        listen(&listener, 5).expect("listens");
        let client = make();
        connect(&client, &name).expect("connected");
        put(accept(&listener).expect("accepted"), 12);
        put(client, 11);
        put(listener, 10);
        stop();
    });
    let saved = donor.save();
    let again = donor.save();
    assert_eq!(
        again.refused(),
        "the socket name @holdfast-test is in use at the acceptor"
    );
    let own_network = || {
        // SAFETY: the process has one thread.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    };
    saved.restored_in(own_network, |_| {
        let own = rustix::net::getsockname(at(12)).expect("name");
        assert_eq!(SocketAddrUnix::try_from(own), Ok(name.clone()));
        write(at(11), b"through").expect("written");
        assert_eq!(read(12), b"through");
        let client = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("socket");
        connect(&client, &name).expect("connected");
    });
}

#[test]
fn datagrams_keep_their_senders() {
    let dir = tempfile::tempdir().expect("a directory");
    let (server, client) = (dir.path().join("server"), dir.path().join("client"));
    let donor = Donor::new(|| {
        put(UnixDatagram::bind(&server).expect("bound"), 10);
        put(UnixDatagram::bind(&client).expect("bound"), 11);
        connect(at(11), &SocketAddrUnix::new(&server).expect("a name")).expect("connected");
        write(at(11), b"named").expect("written");
        let unnamed = UnixDatagram::unbound().expect("socket");
        unnamed.send_to(b"unnamed", &server).expect("sent");
        stop();
    });
    donor.save().restored(|_| {
        let socket = UnixDatagram::from(at(10).try_clone_to_owned().expect("dup"));
        let mut buffer = [0; 64];
        let (length, from) = socket.recv_from(&mut buffer).expect("received");
        assert_eq!(
            (&buffer[..length], from.as_pathname()),
            (&b"named"[..], Some(&*client))
        );
        let (length, from) = socket.recv_from(&mut buffer).expect("received");
        assert_eq!(
            (&buffer[..length], from.is_unnamed()),
            (&b"unnamed"[..], true)
        );
        write(at(11), b"again").expect("written");
        assert_eq!(read(10), b"again");
    });
}

#[test]
fn options_of_sockets_are_kept() {
    let donor = Donor::new(|| {
        pair(SocketType::STREAM, 10, 11);
        sockopt::set_socket_passcred(at(10), true).expect("set");
        let time = std::time::Duration::from_millis(1500);
        sockopt::set_socket_timeout(at(10), sockopt::Timeout::Recv, Some(time)).expect("set");
        sockopt::set_socket_send_buffer_size(at(11), 99_000).expect("set");
        stop();
        // The kernel attaches credentials to data only while a receiver wants them.
        write(at(11), b"who").expect("written");
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    donor.freeze(&draft).restored(|_| {
        assert_eq!(sockopt::socket_passcred(at(10)), Ok(true));
        let time = sockopt::socket_timeout(at(10), sockopt::Timeout::Recv).expect("read");
        assert_eq!(time.map(|time| time.as_millis()), Some(1500));
        assert_eq!(sockopt::socket_send_buffer_size(at(11)), Ok(198_000));
        let mut bytes = [0; 8];
        let (length, _) = recv(at(10), &mut bytes, rustix::net::RecvFlags::empty()).expect("read");
        assert_eq!(&bytes[..length], b"who");
    });
}

#[test]
fn a_route_netlink_socket_is_made_again() {
    let ask = |number| {
        // `RTM_GETLINK` as a dump.
        let mut request = [0u8; 32];
        request[0] = 32;
        request[4] = 18;
        request[6..8].copy_from_slice(&0x0301u16.to_ne_bytes());
        write(at(number), &request).expect("sent");
        assert!(read(number).len() > 16);
    };
    let donor = Donor::new(|| {
        put(
            socket(AddressFamily::NETLINK, SocketType::RAW, None).expect("socket"),
            10,
        );
        let groups = rustix::net::netlink::SocketAddrNetlink::new(0, 1 << 4);
        bind(at(10), &groups).expect("bound");
        stop();
    });
    let saved = donor.save();
    drop(donor);
    saved.restored(|_| {
        let own = rustix::net::getsockname(at(10)).expect("name");
        let own = rustix::net::netlink::SocketAddrNetlink::try_from(own).expect("netlink");
        assert_eq!(own.groups(), 1 << 4);
        ask(10);
    });
}
