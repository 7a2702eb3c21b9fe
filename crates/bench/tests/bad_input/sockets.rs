//! Sockets and states that cannot move, and programs that give invalid descriptors.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use holdfast_api::app::{Channel, FromDaemon, MESSAGE_BYTES_MAX, ToDaemon, decode};
use nix::sys::socket::{MsgFlags, recv, send};

use crate::common::{PATIENCE, World, says};
use crate::strange::{Strange, both_speak, connection, hand_off, listener_in};

#[test]
fn what_cannot_move_stays_and_says_why() {
    let Some(world) = World::up("sockets") else {
        return;
    };
    urgent_data(&world);
    wrong_descriptors(&world);
    multipath(&world);
    messages_that_are_none(&world);
    world.end();
}

fn urgent_data(world: &World) {
    use rustix::event::{PollFd, PollFlags, poll};
    let listener = listener_in(world, "n2", world.odd(), false);
    let program = Strange::open(world, "n2");
    let (mut client, mut server, flow) = connection(world, &listener);
    program.accepted(flow);
    send(client.as_raw_fd(), b"!", MsgFlags::MSG_OOB).unwrap();
    let limit = rustix::time::Timespec::try_from(PATIENCE).unwrap();
    let mut pending = [PollFd::new(&server, PollFlags::PRI)];
    assert_eq!(poll(&mut pending, Some(&limit)).unwrap(), 1);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    says(
        program.kept(flow),
        &["cannot move", "urgent data is waiting", "MSG_OOB"],
    );
    let mut byte = [0];
    recv(server.as_raw_fd(), &mut byte, MsgFlags::MSG_OOB).unwrap();
    assert_eq!(&byte, b"!");
    both_speak(&mut client, &mut server);
    world.unharmed();
}

fn wrong_descriptors(world: &World) {
    let listener = listener_in(world, "n2", world.odd(), false);
    let program = Strange::open(world, "n2");
    program.serves(world);
    let (mut client, mut server, flow) = connection(world, &listener);
    let (mut other_client, mut other_server, other) = connection(world, &listener);
    program.accepted(flow);
    program.accepted(other);
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let cases = [
        (Some(listener.as_fd()), "a listening socket cannot move"),
        (Some(other_server.as_fd()), "is another connection's"),
        (Some(datagrams.as_fd()), "not a TCP socket"),
        (Some(file.as_fd()), "not a TCP socket"),
        (None, "gave no descriptor"),
    ];
    for (descriptor, words) in cases {
        program.hand_off(flow, "n3", descriptor);
        says(program.kept(flow), &[words]);
        both_speak(&mut client, &mut server);
    }
    let unknown = "tcp:10.9.9.9:7-10.9.9.8:4242".parse().unwrap();
    let echo = world.flow(5);
    let cases = [
        (flow, "n9", "no node n9"),
        (flow, "n2", "this node"),
        (unknown, "n3", "there is no such flow"),
        (echo, "n3", "another server program has it"),
        (flow, "n3", "no server program on node n3 serves"),
    ];
    for (which, to, words) in cases {
        program.hand_off(which, to, Some(server.as_fd()));
        says(program.kept(which), &[words]);
    }
    let much = hand_off(flow, "n3", true, vec![0; 50 << 10]);
    program.say_with(&much, &[server.as_fd()]);
    says(program.kept(flow), &["more than 48 KiB"]);
    both_speak(&mut client, &mut server);
    both_speak(&mut other_client, &mut other_server);
    world.unharmed();
}

fn multipath(world: &World) {
    use rustix::net::{AddressFamily, SocketType, ipproto, socket};
    let enabled = world.run("n2", &["cat", "/proc/sys/net/mptcp/enabled"]);
    if enabled.stdout != b"1\n" {
        eprintln!("left out: this kernel speaks no Multipath TCP");
        return;
    }
    // The listener used before is closed, but connections accepted from it remain.
    let listener = listener_in(world, "n2", world.odd(), true);
    let program = Strange::open(world, "n2");
    let connect = || -> TcpStream {
        let client = socket(
            AddressFamily::INET,
            SocketType::STREAM,
            Some(ipproto::MPTCP),
        )
        .unwrap();
        rustix::net::connect(&client, &world.odd()).unwrap();
        client.into()
    };
    let mut client = world.cluster.lab().in_net("c1", connect).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut server, remote): (TcpStream, SocketAddr) = listener.accept().unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let flow = world.flow_of(world.odd(), remote);
    both_speak(&mut client, &mut server);
    program.accepted(flow);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    says(program.kept(flow), &["Multipath TCP cannot move"]);
    both_speak(&mut client, &mut server);
    world.unharmed();
}

/// Invalid messages on the socket for server programs.
fn messages_that_are_none(world: &World) {
    let told = |bytes: &[u8]| -> String {
        let program = Strange::open(world, "n2");
        // A message beyond the maximum length cannot be sent in this way.
        nix::unistd::write(&program.channel, bytes).unwrap();
        match program.hear() {
            FromDaemon::Error { text } => {
                let end = program.channel.receive().unwrap();
                assert!(end.is_none(), "{end:?}");
                text
            }
            other => panic!("{other:?}"),
        }
    };
    says(told(&[1, 0xff, 0xff, 0xff]), &["the session is closed"]);
    says(told(&[9, 0]), &["version"]);
    says(told(&vec![1; MESSAGE_BYTES_MAX + 1]), &["longer"]);
    let mut open = holdfast_api::app::encode(&ToDaemon::Open { name: "x".into() }).unwrap();
    says(told(&open), &["open already"]);
    open.truncate(open.len() - 1);
    says(told(&open), &["the session is closed"]);
    let promised = hand_off(world.flow(0), "n3", true, Vec::new());
    let promised = holdfast_api::app::encode(&promised).unwrap();
    says(told(&promised), &["1 descriptors came with 0"]);

    let path = world.cluster.run_file("n2", "app.sock").unwrap();
    let early = Channel::connect(path).unwrap();
    let withdraw = holdfast_api::app::encode(&ToDaemon::Withdraw { service: 1 }).unwrap();
    early.send(&withdraw, &[]).unwrap();
    let answer = early.receive().unwrap().unwrap();
    let answer: FromDaemon = decode(&answer.bytes).unwrap();
    says(
        format!("{answer:?}"),
        &["the first message of a session is Open"],
    );
    world.unharmed();
}
