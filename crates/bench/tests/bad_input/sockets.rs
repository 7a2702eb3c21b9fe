//! Sockets and states that cannot move, and programs that give invalid descriptors.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use holdfast_api::app::{Channel, FromDaemon, MESSAGE_BYTES_MAX, ToDaemon, decode};
use nix::sys::socket::{MsgFlags, recv, send};

use crate::common::{LoadedGroup, PATIENCE, assert_contains};
use crate::scripted_program::{
    ScriptedProgram, assert_data_passes, hand_off, listener_in, open_connection,
};

#[test]
fn immovable_sockets_stay_with_reason() {
    let Some(world) = LoadedGroup::up("sockets") else {
        return;
    };
    urgent_data_keeps_connection(&world);
    wrong_descriptors_are_refused(&world);
    multipath_connection_stays(&world);
    invalid_messages_end_session(&world);
    world.finish();
}

fn urgent_data_keeps_connection(world: &LoadedGroup) {
    use rustix::event::{PollFd, PollFlags, poll};
    let listener = listener_in(world, "n2", world.odd_address(), false);
    let program = ScriptedProgram::open(world, "n2");
    let (mut client, mut server, flow) = open_connection(world, &listener);
    program.report_accepted(flow);
    send(client.as_raw_fd(), b"!", MsgFlags::MSG_OOB).unwrap();
    let limit = rustix::time::Timespec::try_from(PATIENCE).unwrap();
    let mut pending = [PollFd::new(&server, PollFlags::PRI)];
    assert_eq!(poll(&mut pending, Some(&limit)).unwrap(), 1);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    assert_contains(
        program.receive_kept_reason(flow),
        &["cannot move", "urgent data is waiting", "MSG_OOB"],
    );
    let mut byte = [0];
    recv(server.as_raw_fd(), &mut byte, MsgFlags::MSG_OOB).unwrap();
    assert_eq!(&byte, b"!");
    assert_data_passes(&mut client, &mut server);
    world.assert_unharmed();
}

fn wrong_descriptors_are_refused(world: &LoadedGroup) {
    let listener = listener_in(world, "n2", world.odd_address(), false);
    let program = ScriptedProgram::open(world, "n2");
    program.serve_odd_pool(world);
    let (mut client, mut server, flow) = open_connection(world, &listener);
    let (mut other_client, mut other_server, other) = open_connection(world, &listener);
    program.report_accepted(flow);
    program.report_accepted(other);
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let cases = [
        (Some(listener.as_fd()), "a listening socket cannot move"),
        (Some(other_server.as_fd()), "belongs to another connection"),
        (Some(datagrams.as_fd()), "not a TCP socket"),
        (Some(file.as_fd()), "not a TCP socket"),
        (None, "sent no descriptor"),
    ];
    for (descriptor, error_parts) in cases {
        program.hand_off(flow, "n3", descriptor);
        assert_contains(program.receive_kept_reason(flow), &[error_parts]);
        assert_data_passes(&mut client, &mut server);
    }
    let unknown = "tcp:10.9.9.9:7-10.9.9.8:4242".parse().unwrap();
    let echo = world.flow(5);
    let cases = [
        (flow, "n9", "no node n9"),
        (flow, "n2", "this node"),
        (unknown, "n3", "there is no such flow"),
        (echo, "n3", "another server program has the flow"),
        (flow, "n3", "no server program on node n3 serves"),
    ];
    for (requested_flow, to, words) in cases {
        program.hand_off(requested_flow, to, Some(server.as_fd()));
        assert_contains(program.receive_kept_reason(requested_flow), &[words]);
    }
    let large_state = hand_off(flow, "n3", true, vec![0; 50 << 10]);
    program.send_with_descriptors(&large_state, &[server.as_fd()]);
    assert_contains(program.receive_kept_reason(flow), &["more than 48 KiB"]);
    assert_data_passes(&mut client, &mut server);
    assert_data_passes(&mut other_client, &mut other_server);
    world.assert_unharmed();
}

fn multipath_connection_stays(world: &LoadedGroup) {
    use rustix::net::{AddressFamily, SocketType, ipproto, socket};
    let enabled = world.run("n2", &["cat", "/proc/sys/net/mptcp/enabled"]);
    if enabled.stdout != b"1\n" {
        eprintln!("left out: this kernel speaks no Multipath TCP");
        return;
    }
    // The listener used before is closed, but connections accepted from it remain.
    let listener = listener_in(world, "n2", world.odd_address(), true);
    let program = ScriptedProgram::open(world, "n2");
    let connect = || -> TcpStream {
        let client = socket(
            AddressFamily::INET,
            SocketType::STREAM,
            Some(ipproto::MPTCP),
        )
        .unwrap();
        rustix::net::connect(&client, &world.odd_address()).unwrap();
        client.into()
    };
    let mut client = world
        .cluster
        .lab()
        .run_in_net_namespace("c1", connect)
        .unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut server, remote): (TcpStream, SocketAddr) = listener.accept().unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let flow = world.flow_of(world.odd_address(), remote);
    assert_data_passes(&mut client, &mut server);
    program.report_accepted(flow);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    assert_contains(
        program.receive_kept_reason(flow),
        &["Multipath TCP cannot move"],
    );
    assert_data_passes(&mut client, &mut server);
    world.assert_unharmed();
}

/// Invalid messages on the socket for server programs.
fn invalid_messages_end_session(world: &LoadedGroup) {
    let error_of = |bytes: &[u8]| -> String {
        let program = ScriptedProgram::open(world, "n2");
        // A message beyond the maximum length cannot be sent in this way.
        nix::unistd::write(&program.channel, bytes).unwrap();
        match program.receive() {
            FromDaemon::Error { text } => {
                let end = program.channel.receive().unwrap();
                assert!(end.is_none(), "{end:?}");
                text
            }
            other => panic!("{other:?}"),
        }
    };
    assert_contains(error_of(&[1, 0xff, 0xff, 0xff]), &["the session is closed"]);
    assert_contains(error_of(&[9, 0]), &["version"]);
    assert_contains(error_of(&vec![1; MESSAGE_BYTES_MAX + 1]), &["longer"]);
    let mut open = holdfast_api::app::encode(&ToDaemon::Open { name: "x".into() }).unwrap();
    assert_contains(error_of(&open), &["already open"]);
    open.truncate(open.len() - 1);
    assert_contains(error_of(&open), &["the session is closed"]);
    let missing_descriptor = hand_off(world.flow(0), "n3", true, Vec::new());
    let promised = holdfast_api::app::encode(&missing_descriptor).unwrap();
    assert_contains(error_of(&promised), &["1 descriptors arrived with 0"]);

    let path = world.cluster.run_path("n2", "app.sock").unwrap();
    let early_channel = Channel::connect(path).unwrap();
    let withdraw = holdfast_api::app::encode(&ToDaemon::Withdraw { service: 1 }).unwrap();
    early_channel.send(&withdraw, &[]).unwrap();
    let answer = early_channel.receive().unwrap().unwrap();
    let answer: FromDaemon = decode(&answer.bytes).unwrap();
    assert_contains(
        format!("{answer:?}"),
        &["the first message of a session must be Open"],
    );
    world.assert_unharmed();
}
