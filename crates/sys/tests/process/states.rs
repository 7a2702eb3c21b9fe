//! Connections in every half-closed state move, with data in both queues, and close as they would have without the
//! move.

use crate::common::{Net, PATIENCE, SERVICE_V4, SERVICE_V6, pattern, wait_for};
use crate::moving;
use crate::program::Program;
use crate::servers::hosts;
use holdfast_sys::sockopt::set_int;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// Connections that `states.c` has of each family, in the order of their ports.
const STATES: [Closes; 6] = [
    Closes::Answers,
    Closes::Answers,
    Closes::First,
    Closes::First,
    Closes::After,
    Closes::After,
];
const PORT: u16 = 7000;
const HEARD: usize = 20_000;

/// The time at which a client closes its sending side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closes {
    /// Before the server closes its side.
    First,
    /// After the server closes its side, but before the client has received the server's FIN.
    After,
    /// After the client has received everything.
    Answers,
}

struct Client {
    stream: TcpStream,
    number: u16,
    closes: Closes,
}

#[test]
fn half_closed_connections_move_in_every_state() {
    let net = Arc::new(Net::new());
    let [here, there] = hosts(&net);
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let words: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let program = net.a.run(|| Program::start_with("states", &words));
    let clients: Vec<Client> = net.client.run(|| {
        let services = [IpAddr::from(SERVICE_V4), SERVICE_V6.into()];
        let kinds = services
            .iter()
            .flat_map(|ip| STATES.map(|closes| (*ip, closes)));
        let all = kinds.zip(0..);
        all.map(|((ip, closes), number)| Client::start(ip, number, closes))
            .collect()
    });
    wait_for("queues to be full", || program.said("quiet"));
    net.deafen_client(true);
    program.leave("deaf");
    wait_for("the server to close its ends", || program.said("half"));
    let mut after = clients.iter().filter(|one| one.closes == Closes::After);
    after.try_for_each(Client::close).expect("shut");
    wait_for("all states", || program.said("settled"));
    program.goes_on();
    let moved = moving::migrate(program.tree(&here), &there).expect("moves");
    program.goes_on();
    let back = moving::migrate(moved, &here).expect("moves back");
    program.goes_on();
    program.leave("end");
    wait_for("the last look at all states", || program.said("ends"));
    net.deafen_client(false);
    let ends = clients.into_iter().map(|client| {
        let sent = program.number(&format!("sent{}", client.number));
        let sent = sent.expect("a number") as usize;
        std::thread::spawn(move || client.ends_well(sent))
    });
    let ends: Vec<_> = ends.collect();
    program.ends_well(back);
    for end in ends {
        end.join().expect("a client that has heard all");
    }
}

impl Client {
    /// Connects a client with a small receive buffer.
    fn start(ip: IpAddr, number: u16, closes: Closes) -> Self {
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
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let heard = pattern(number.into(), HEARD);
        stream.write_all(&heard).expect("written");
        let client = Self {
            stream,
            number,
            closes,
        };
        if closes == Closes::First {
            client.close().expect("shut");
        }
        client
    }

    fn close(&self) -> std::io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    fn ends_well(mut self, sent: usize) {
        let mut heard = Vec::new();
        self.stream.read_to_end(&mut heard).expect("the end");
        assert!(
            heard == pattern(self.number.into(), sent),
            "{}",
            self.number
        );
        if self.closes == Closes::Answers {
            self.close().expect("shut");
        }
    }
}
