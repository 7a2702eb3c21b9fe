//! Unix sockets and netlink.

use crate::harness::{Donor, borrow_fd, close_number, put_at, read_available, stop_self};
use crate::vary;
use holdfast_sys::socket_filter::{FilterInstruction, SocketFilter};
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

fn open_pair_at(kind: SocketType, left: RawFd, right: RawFd) {
    let (one, other) =
        socketpair(AddressFamily::UNIX, kind, SocketFlags::empty(), None).expect("pair");
    put_at(one, left);
    put_at(other, right);
}

#[test]
fn socket_pair_keeps_its_queues() {
    let donor = Donor::new(|| {
        open_pair_at(SocketType::STREAM, 10, 11);
        open_pair_at(SocketType::SEQPACKET, 20, 21);
        open_pair_at(SocketType::DGRAM, 30, 31);
        stop_self();
        write(borrow_fd(10), b"to eleven").expect("written");
        write(borrow_fd(11), b"to ten").expect("written");
        for message in [&b"one"[..], b"two"] {
            write(borrow_fd(20), message).expect("written");
            write(borrow_fd(31), message).expect("written");
        }
        write(borrow_fd(31), b"").expect("written");
        shutdown(borrow_fd(10), Shutdown::Write).expect("shut");
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    let check = |_| {
        assert_eq!(read_available(10), b"to ten");
        assert_eq!(read_available(11), b"to eleven");
        assert_eq!(read_available(11), b"", "end of stream after the shutdown");
        write(borrow_fd(11), b"back").expect("written");
        assert_eq!(read_available(10), b"back");
        for message in [&b"one"[..], b"two"] {
            assert_eq!(read_available(21), message);
            assert_eq!(read_available(30), message);
        }
        assert_eq!(read_available(30), b"", "an empty datagram");
        write(borrow_fd(30), b"answer").expect("written");
        assert_eq!(read_available(31), b"answer");
    };
    donor.freeze(&snapshot).restore_and_check(check);
    drop(donor);
}

#[test]
fn data_of_closed_peer_stays_readable() {
    let donor = Donor::new(|| {
        open_pair_at(SocketType::STREAM, 10, 11);
        write(borrow_fd(11), b"last words").expect("written");
        close_number(11);
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        assert_eq!(read_available(10), b"last words");
        assert_eq!(read_available(10), b"");
        let sent = send(borrow_fd(10), b"x", rustix::net::SendFlags::NOSIGNAL);
        assert_eq!(sent, Err(Errno::PIPE));
    });
}

fn receive_fd(from: RawFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); 256];
    let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 64];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = rustix::net::RecvFlags::DONTWAIT;
    let got =
        rustix::net::recvmsg(borrow_fd(from), &mut parts, &mut control, flags).expect("received");
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
    let fds = [borrow_fd(fd)];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let flags = rustix::net::SendFlags::empty();
    rustix::net::sendmsg(borrow_fd(to), &[IoSlice::new(bytes)], &mut control, flags).expect("sent");
}

#[test]
fn descriptors_in_flight_arrive() {
    let donor = Donor::new(|| {
        open_pair_at(SocketType::STREAM, 10, 11);
        open_pair_at(SocketType::DGRAM, 20, 21);
        put_at(eventfd(3, EventfdFlags::NONBLOCK).expect("made"), 30);
        send_fd(10, b"shared", 30);
        write(borrow_fd(10), b"plain").expect("written");
        // The far end is only in flight, with a descriptor in flight in its own queue.
        let (near, far) = UnixStream::pair().expect("pair");
        send_fd(near.as_raw_fd(), b"deeper", 30);
        send_fd(20, b"alone", far.as_raw_fd());
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let (bytes, fds) = receive_fd(11);
        assert_eq!((&bytes[..], fds.len()), (&b"shared"[..], 1));
        write(&fds[0], &4u64.to_ne_bytes()).expect("written");
        assert_eq!(read_available(30), 7u64.to_ne_bytes(), "one counter");
        let (bytes, fds) = receive_fd(11);
        assert_eq!((&bytes[..], fds.len()), (&b"plain"[..], 0));
        let (bytes, fds) = receive_fd(21);
        assert_eq!((&bytes[..], fds.len()), (&b"alone"[..], 1));
        let (bytes, deeper) = receive_fd(fds[0].as_raw_fd());
        assert_eq!((&bytes[..], deeper.len()), (&b"deeper"[..], 1));
        write(&deeper[0], &9u64.to_ne_bytes()).expect("written");
        assert_eq!(read_available(30), 9u64.to_ne_bytes(), "the same counter");
    });
}

#[test]
fn listener_keeps_name_and_waiting_clients() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let donor = Donor::new(|| {
        let listener = UnixListener::bind(&path).expect("bound");
        let client = UnixStream::connect(&path).expect("connected");
        let (server, _) = listener.accept().expect("accepted");
        put_at(server, 12);
        put_at(client, 11);
        put_at(listener, 10);
        listen(borrow_fd(10), 7).expect("listens");
        put_at(UnixStream::connect(&path).expect("connected"), 13);
        write(borrow_fd(11), b"hello").expect("written");
        stop_self();
    });
    let mode = std::fs::Permissions::from_mode(0o640);
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&path, mode).expect("set");
    donor.save_unchanged().restore_and_check(|_| {
        let name = SocketAddrUnix::new(&path).expect("a name");
        for number in [10, 12] {
            let own = rustix::net::getsockname(borrow_fd(number)).expect("name");
            assert_eq!(SocketAddrUnix::try_from(own), Ok(name.clone()));
        }
        let peer = rustix::net::getpeername(borrow_fd(11))
            .expect("name")
            .expect("connected");
        assert_eq!(SocketAddrUnix::try_from(peer), Ok(name.clone()));
        assert_eq!(read_available(12), b"hello");
        let waiting = accept(borrow_fd(10)).expect("accepted");
        write(borrow_fd(13), b"early").expect("written");
        assert_eq!(read_available(waiting.as_raw_fd()), b"early");
        // New clients find the listener by its name.
        let client = UnixStream::connect(&path).expect("connected");
        let server = accept(borrow_fd(10)).expect("accepted");
        write(&client, b"late").expect("written");
        assert_eq!(read_available(server.as_raw_fd()), b"late");
        let mode = std::fs::metadata(&path).expect("stat").permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
    });
    let names: Vec<_> = std::fs::read_dir(dir.path()).expect("read").collect();
    assert_eq!(names.len(), 1, "only the named socket file exists");
}

/// Accepted sockets keep the listener's name after their clients have closed. A server's connections are in this state
/// for a moment.
#[test]
fn accepted_sockets_of_closed_peers_keep_the_listeners_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("socket");
    let without_listener = dir.path().join("gone");
    let unlinked = dir.path().join("lost");
    let accept_and_close_client = |listener: &UnixListener, path, number| {
        let client = UnixStream::connect(path).expect("connected");
        put_at(listener.accept().expect("accepted").0, number);
        write(&client, b"last words").expect("written");
    };
    let donor = Donor::new(|| {
        let listener = UnixListener::bind(&path).expect("bound");
        accept_and_close_client(&listener, &path, 11);
        accept_and_close_client(&listener, &path, 12);
        put_at(listener, 13);
        // No socket listens by this name after the drop.
        let listener = UnixListener::bind(&without_listener).expect("bound");
        accept_and_close_client(&listener, &without_listener, 14);
        accept_and_close_client(&listener, &without_listener, 15);
        std::fs::remove_file(&without_listener).expect("removed");
        drop(listener);
        // The listener's file is removed, so the name does not lead to it.
        let listener = UnixListener::bind(&unlinked).expect("bound");
        accept_and_close_client(&listener, &unlinked, 16);
        put_at(UnixStream::connect(&unlinked).expect("connected"), 17);
        put_at(listener.accept().expect("accepted").0, 18);
        put_at(UnixStream::connect(&unlinked).expect("connected"), 19);
        put_at(listener, 20);
        std::fs::remove_file(&unlinked).expect("removed");
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let named = [
            (11, &path),
            (12, &path),
            (14, &without_listener),
            (15, &without_listener),
            (16, &unlinked),
        ];
        for (number, name) in named {
            let own = rustix::net::getsockname(borrow_fd(number)).expect("name");
            let name = SocketAddrUnix::new(name).expect("a name");
            assert_eq!(SocketAddrUnix::try_from(own), Ok(name));
            assert_eq!(read_available(number), b"last words");
            assert_eq!(read_available(number), b"");
        }
        let client = UnixStream::connect(&path).expect("connected");
        let server = accept(borrow_fd(13)).expect("accepted");
        write(&client, b"new").expect("written");
        assert_eq!(read_available(server.as_raw_fd()), b"new");
        write(borrow_fd(17), b"connected").expect("written");
        assert_eq!(read_available(18), b"connected");
        let waited = accept(borrow_fd(20)).expect("accepted");
        write(borrow_fd(19), b"waited").expect("written");
        assert_eq!(read_available(waited.as_raw_fd()), b"waited");
    });
    let names: Vec<_> = std::fs::read_dir(dir.path()).expect("read").collect();
    assert_eq!(names.len(), 1, "only the named socket file exists");
}

/// A listener's file was renamed after the bind, as a JVM's attach listener does, or bound by a path relative to
/// another directory.
#[test]
fn listener_is_reached_by_its_files_present_name() {
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
            put_at(UnixListener::bind(path).expect("bound"), 10 + at as RawFd);
            std::fs::rename(at_dir(name), at_dir(file)).expect("renamed");
        }
        put_at(UnixStream::connect(at_dir("2a")).expect("connected"), 20);
        put_at(accept(borrow_fd(11)).expect("accepted"), 21);
        std::env::set_current_dir("/").expect("changed");
        stop_self();
    });
    let names = || {
        let names = [10, 11, 12, 13, 21].map(|number| {
            let own = rustix::net::getsockname(borrow_fd(number)).expect("a name");
            let name = SocketAddrUnix::try_from(own).expect("a name");
            name.path_bytes().expect("a path").to_vec()
        });
        names.to_vec()
    };
    donor.save_unchanged().restore_and_check(|_| {
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
            let server = accept(borrow_fd(at_number)).expect("accepted");
            write(&client, b"here").expect("written");
            assert_eq!(read_available(server.as_raw_fd()), b"here");
        }
        write(borrow_fd(20), b"there").expect("written");
        assert_eq!(read_available(21), b"there");
    });
    let mut remaining: Vec<_> = std::fs::read_dir(dir.path()).expect("read").collect();
    remaining.extend(std::fs::read_dir(at_dir("from")).expect("read"));
    assert_eq!(remaining.len(), 1 + files.len(), "{remaining:?}");
}

/// Every socket option that can be read and set, and every filter, has the same value after the restore.
#[test]
fn every_readable_option_and_filter_survives() {
    const ACCEPT_ALL: FilterInstruction = FilterInstruction {
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
            open_pair_at(kind, number, number + 1);
        }
        // `NETLINK_ROUTE` is 0.
        let netlink = socket(AddressFamily::NETLINK, SocketType::RAW, None);
        put_at(netlink.expect("a socket"), 16);
    };
    let numbers = [10, 12, 14, 16];
    let directory = tempfile::tempdir().expect("a directory");
    let note = |number: RawFd| directory.path().join(number.to_string());
    let donor = Donor::new(|| {
        make();
        for number in numbers {
            let varied = vary::vary_options(borrow_fd(number), &[vary::SOCKET_LEVEL], &[]);
            assert!(varied.len() > 15, "{varied:?}");
            filter.attach(borrow_fd(number)).expect("attached");
            let varied = postcard::to_stdvec(&varied).expect("coded");
            std::fs::write(note(number), varied).expect("written");
        }
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        for number in numbers {
            let varied = std::fs::read(note(number)).expect("read");
            let varied = postcard::from_bytes(&varied).expect("decoded");
            let lost = vary::differences(borrow_fd(number), &varied);
            assert!(lost.is_empty(), "of {number}: {lost:#?}");
            assert_eq!(SocketFilter::read(borrow_fd(number)).expect("read"), filter);
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
        put_at(accept(&listener).expect("accepted"), 12);
        put_at(client, 11);
        put_at(listener, 10);
        stop_self();
    });
    let saved = donor.save_unchanged();
    let again = donor.save_unchanged();
    assert_eq!(
        again.refusal(),
        "the socket name @holdfast-test is in use at the acceptor"
    );
    let own_network = || {
        // SAFETY: the process has one thread.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
    };
    saved.restore_in_and_check(own_network, |_| {
        let own = rustix::net::getsockname(borrow_fd(12)).expect("name");
        assert_eq!(SocketAddrUnix::try_from(own), Ok(name.clone()));
        write(borrow_fd(11), b"through").expect("written");
        assert_eq!(read_available(12), b"through");
        let client = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("socket");
        connect(&client, &name).expect("connected");
    });
}

#[test]
fn queued_datagrams_keep_their_senders() {
    let dir = tempfile::tempdir().expect("a directory");
    let (server, client) = (dir.path().join("server"), dir.path().join("client"));
    let donor = Donor::new(|| {
        put_at(UnixDatagram::bind(&server).expect("bound"), 10);
        put_at(UnixDatagram::bind(&client).expect("bound"), 11);
        connect(
            borrow_fd(11),
            &SocketAddrUnix::new(&server).expect("a name"),
        )
        .expect("connected");
        write(borrow_fd(11), b"named").expect("written");
        let unnamed = UnixDatagram::unbound().expect("socket");
        unnamed.send_to(b"unnamed", &server).expect("sent");
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let socket = UnixDatagram::from(borrow_fd(10).try_clone_to_owned().expect("dup"));
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
        write(borrow_fd(11), b"again").expect("written");
        assert_eq!(read_available(10), b"again");
    });
}

#[test]
fn listed_options_are_kept() {
    let donor = Donor::new(|| {
        open_pair_at(SocketType::STREAM, 10, 11);
        sockopt::set_socket_passcred(borrow_fd(10), true).expect("set");
        let time = std::time::Duration::from_millis(1500);
        sockopt::set_socket_timeout(borrow_fd(10), sockopt::Timeout::Recv, Some(time))
            .expect("set");
        sockopt::set_socket_send_buffer_size(borrow_fd(11), 99_000).expect("set");
        stop_self();
        // The kernel attaches credentials to data only while a receiver wants them.
        write(borrow_fd(11), b"who").expect("written");
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    donor.freeze(&snapshot).restore_and_check(|_| {
        assert_eq!(sockopt::socket_passcred(borrow_fd(10)), Ok(true));
        let time = sockopt::socket_timeout(borrow_fd(10), sockopt::Timeout::Recv).expect("read");
        assert_eq!(time.map(|time| time.as_millis()), Some(1500));
        assert_eq!(sockopt::socket_send_buffer_size(borrow_fd(11)), Ok(198_000));
        let mut bytes = [0; 8];
        let (length, _) =
            recv(borrow_fd(10), &mut bytes, rustix::net::RecvFlags::empty()).expect("read");
        assert_eq!(&bytes[..length], b"who");
    });
}

#[test]
fn route_netlink_socket_is_recreated() {
    let request_links = |number| {
        // `RTM_GETLINK` as a dump.
        let mut request = [0u8; 32];
        request[0] = 32;
        request[4] = 18;
        request[6..8].copy_from_slice(&0x0301u16.to_ne_bytes());
        write(borrow_fd(number), &request).expect("sent");
        assert!(read_available(number).len() > 16);
    };
    let donor = Donor::new(|| {
        put_at(
            socket(AddressFamily::NETLINK, SocketType::RAW, None).expect("socket"),
            10,
        );
        let groups = rustix::net::netlink::SocketAddrNetlink::new(0, 1 << 4);
        bind(borrow_fd(10), &groups).expect("bound");
        stop_self();
    });
    let saved = donor.save_unchanged();
    drop(donor);
    saved.restore_and_check(|_| {
        let own = rustix::net::getsockname(borrow_fd(10)).expect("name");
        let own = rustix::net::netlink::SocketAddrNetlink::try_from(own).expect("netlink");
        assert_eq!(own.groups(), 1 << 4);
        request_links(10);
    });
}
