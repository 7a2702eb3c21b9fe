//! Connections in every half-closed state move, with data in both queues, and close as they would have without the
//! move.

use crate::migration;
use crate::program::Program;
use crate::servers::server_hosts;
use holdfast_lab::testing::{SERVICE_V4, SERVICE_V6, TestNetwork, WAIT_LIMIT, pattern, wait_for};
use holdfast_sys::sockopt::set_int;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// Connections that `programs/half_closed.c` has of each family, in the order of their ports.
const STATES: [CloseTime; 6] = [
    CloseTime::AfterServerFin,
    CloseTime::AfterServerFin,
    CloseTime::BeforeServer,
    CloseTime::BeforeServer,
    CloseTime::AfterServer,
    CloseTime::AfterServer,
];
const PORT: u16 = 7000;
const SERVER_BYTES: usize = 20_000;

/// The time at which a client closes its sending side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CloseTime {
    /// Before the server closes its side.
    BeforeServer,
    /// After the server closes its side, but before the client has received the server's FIN.
    AfterServer,
    /// After the client has received everything.
    AfterServerFin,
}

struct Client {
    stream: TcpStream,
    number: u16,
    close_time: CloseTime,
}

#[test]
fn half_closed_connections_move_in_every_state() {
    let net = Arc::new(TestNetwork::new());
    let [here, there] = server_hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let words: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let program = net.a.run(|| Program::start_with("half_closed", &words));
    let clients: Vec<Client> = net.client.run(|| {
        let services = [IpAddr::from(SERVICE_V4), SERVICE_V6.into()];
        let kinds = services
            .iter()
            .flat_map(|ip| STATES.map(|closes| (*ip, closes)));
        let all = kinds.zip(0..);
        all.map(|((ip, closes), number)| Client::start(ip, number, closes))
            .collect()
    });
    wait_for("queues to be full", || program.has_written("quiet"));
    net.block_traffic_to_client(true);
    program.create_file("deaf");
    wait_for("the server to close its ends", || {
        program.has_written("half")
    });
    let mut closing_after_server = clients
        .iter()
        .filter(|one| one.close_time == CloseTime::AfterServer);
    closing_after_server
        .try_for_each(Client::close)
        .expect("shut");
    wait_for("all states", || program.has_written("settled"));
    program.assert_runs_on();
    let moved = migration::migrate(program.tree(&here), &there).expect("moves");
    program.assert_runs_on();
    let back = migration::migrate(moved, &here).expect("moves back");
    program.assert_runs_on();
    program.create_file("end");
    wait_for("the last check of all states", || {
        program.has_written("ends")
    });
    net.block_traffic_to_client(false);
    let ends = clients.into_iter().map(|client| {
        let sent = program.number(&format!("sent{}", client.number));
        let sent = sent.expect("a number") as usize;
        std::thread::spawn(move || client.assert_all_received(sent))
    });
    let ends: Vec<_> = ends.collect();
    program.assert_good_verdict(back);
    for end in ends {
        end.join().expect("a client that received everything");
    }
}

impl Client {
    /// Connects a client with a small receive buffer.
    fn start(ip: IpAddr, number: u16, closes: CloseTime) -> Self {
        let family = if ip.is_ipv6() {
            libc::AF_INET6
        } else {
            libc::AF_INET
        };
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        assert!(fd >= 0);
        // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        set_int(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 16_384).expect("set");
        rustix::net::connect(&socket, &SocketAddr::from((ip, PORT + number))).expect("connects");
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(WAIT_LIMIT)).expect("set");
        let to_server = pattern(number.into(), SERVER_BYTES);
        stream.write_all(&to_server).expect("written");
        let client = Self {
            stream,
            number,
            close_time: closes,
        };
        if closes == CloseTime::BeforeServer {
            client.close().expect("shut");
        }
        client
    }

    fn close(&self) -> std::io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    fn assert_all_received(mut self, sent: usize) {
        let mut received = Vec::new();
        self.stream.read_to_end(&mut received).expect("the end");
        assert!(
            received == pattern(self.number.into(), sent),
            "{}",
            self.number
        );
        if self.close_time == CloseTime::AfterServerFin {
            self.close().expect("shut");
        }
    }
}
