//! Strangers and faulty nodes on the port between nodes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;

use holdfast_api::ca::{Authority, NODE_DAYS};
use holdfast_bench::cluster::Family;
use holdfast_node::config::{DEFAULT_PORT, TlsConfig};
use holdfast_node::tls::Tls;
use holdfast_wire::{Frame, LENGTH_MAX, NodeId, VERSION, encode};
use nix::sys::signal::Signal;
use rustls::{ClientConnection, StreamOwned};

use crate::common::{PATIENCE, World, eventually};

const REFUSED: &str = "holdfast_frames_rejected_total{reason=\"certificate\"}";

#[test]
fn strangers_among_the_nodes() {
    let Some(world) = World::up("nodes") else {
        return;
    };
    let ca = world.cluster.directory().join("ca");
    let authority = Authority::open(&ca).unwrap();
    authority.issue("n9", &[], NODE_DAYS).unwrap();

    counted(&world, "tls", |mut socket| {
        socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        read_to_end(&mut socket);
    });
    // A connection cut off in the middle of a record is closed without further effect.
    let mut cut = reach_n2(&world);
    cut.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
    cut.shutdown(std::net::Shutdown::Write).unwrap();
    read_to_end(&mut cut);
    wrong_certificates(&world, &ca);
    greetings(&world, &ca);
    frames(&world, &ca);
    revocation(&world, &ca, &authority);

    world.unharmed();
    world.cluster.wait_ready().unwrap();
    world.moves("n2", world.flow(0), "n3");
    world.moves("n3", world.flow(0), "n2");
    world.end();
}

/// Runs `act` with a connection to n2 until n2 closes it, and asserts that the rejection is counted under `reason`.
fn counted(world: &World, reason: &str, act: impl FnOnce(TcpStream)) {
    let line = format!("holdfast_frames_rejected_total{{reason=\"{reason}\"}}");
    let before = world.metric("n2", &line);
    act(reach_n2(world));
    eventually(reason, || world.metric("n2", &line) > before);
    world.unharmed();
}

fn reach_n2(world: &World) -> TcpStream {
    let address = world.cluster.address("n2", Family::V4).unwrap();
    let address = SocketAddr::new(address, DEFAULT_PORT);
    let connect = || TcpStream::connect(address).unwrap();
    let socket = world.cluster.lab().in_net("n3", connect).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn wrong_certificates(world: &World, ca: &Path) {
    let other = world.cluster.directory().join("other");
    Authority::init(&other, "lab")
        .unwrap()
        .issue("n3", &[], NODE_DAYS)
        .unwrap();
    // A stranger that trusts the group's authority, but has a certificate of another authority.
    let files = TlsConfig {
        ca: ca.join("ca.pem"),
        ..files(&other, "n3")
    };
    let stranger = Tls::from_files(&files, "n3").unwrap();
    counted(world, "certificate", |socket| {
        let mut stream = StreamOwned::new(stranger.dial("n2").unwrap(), socket);
        let _ = stream.write_all(&hello(3, "lab"));
        read_to_end(&mut stream);
    });
    // A valid certificate, with a node number that belongs to another node.
    for claimed in [2, 3] {
        greets(world, ca, "n9", hello(claimed, "lab"), "node");
    }
}

/// Invalid first frames from the holder of a valid certificate.
fn greetings(world: &World, ca: &Path) {
    greets(world, ca, "n3", hello(3, "mails"), "group");
    greets(world, ca, "n3", hello(1, "lab"), "node");
    greets(world, ca, "n9", hello(9, "lab"), "node");
    greets(world, ca, "n3", ping(), "unexpected");
    let mut version = hello(3, "lab");
    version[4] = VERSION + 1;
    greets(world, ca, "n3", version, "version");
    let oversized = (LENGTH_MAX as u32 + 1).to_be_bytes().to_vec();
    greets(world, ca, "n3", oversized, "oversized");
    let malformed = vec![0, 0, 0, 3, VERSION, 0xff, 0xff];
    greets(world, ca, "n3", malformed, "malformed");
}

/// Invalid frames after a valid greeting as n3. The real n3 is connected again afterwards.
fn frames(world: &World, ca: &Path) {
    let mut version = ping();
    version[4] = VERSION + 1;
    let cases = [
        (vec![0, 0, 0, 0], "malformed"),
        (vec![0, 0, 0, 3, VERSION, 0xff, 0xff], "malformed"),
        (version, "version"),
        (u32::MAX.to_be_bytes().to_vec(), "oversized"),
        (hello(3, "lab"), "unexpected"),
    ];
    for (bytes, reason) in cases {
        greets(world, ca, "n3", [hello(3, "lab"), bytes].concat(), reason);
        world.cluster.wait_ready().unwrap();
    }
    for cut in [1, 4, 5, ping().len() - 1] {
        counted(world, "truncated", |socket| {
            let mut stream = dial(ca, "n3", socket);
            let greeting = [&hello(3, "lab")[..], &ping()[..cut]].concat();
            stream.write_all(&greeting).unwrap();
            stream.flush().unwrap();
            stream.sock.shutdown(std::net::Shutdown::Write).unwrap();
            read_to_end(&mut stream);
        });
        world.cluster.wait_ready().unwrap();
    }
}

/// A revoked certificate is refused once the daemon has reloaded the revocation list; an invalid list changes nothing.
fn revocation(world: &World, ca: &Path, authority: &Authority) {
    let n9 = Tls::from_files(&files(ca, "n9"), "n9").unwrap();
    let greet = |socket| {
        let mut stream = StreamOwned::new(n9.dial("n2").unwrap(), socket);
        let _ = stream.write_all(&hello(9, "lab"));
        read_to_end(&mut stream);
    };
    let reload = || world.cluster.signal_daemon("n2", Signal::SIGHUP).unwrap();
    authority.revoke("n9").unwrap();
    counted(world, "node", greet);
    let refused = || world.metric("n2", REFUSED);
    let before = refused();
    reload();
    eventually("the list is read anew", || {
        greet(reach_n2(world));
        refused() > before
    });
    std::fs::write(ca.join("ca.crl"), "no list").unwrap();
    reload();
    eventually("the mistake is told", || {
        world
            .cluster
            .logs()
            .contains("ca.crl: holds no revocation list")
    });
    counted(world, "certificate", greet);
}

/// Sends `bytes` as the holder of `name`'s certificate, and asserts that they are rejected for `reason`.
fn greets(world: &World, ca: &Path, name: &str, bytes: Vec<u8>, reason: &str) {
    counted(world, reason, |socket| {
        let mut stream = dial(ca, name, socket);
        stream.write_all(&bytes).unwrap();
        read_to_end(&mut stream);
    });
}

fn dial(ca: &Path, name: &str, socket: TcpStream) -> StreamOwned<ClientConnection, TcpStream> {
    let tls = Tls::from_files(&files(ca, name), name).unwrap();
    StreamOwned::new(tls.dial("n2").unwrap(), socket)
}

fn files(ca: &Path, name: &str) -> TlsConfig {
    TlsConfig {
        ca: ca.join("ca.pem"),
        cert: ca.join(format!("{name}.pem")),
        key: ca.join(format!("{name}.key")),
        crl: None,
    }
}

fn hello(node: u16, group: &str) -> Vec<u8> {
    bytes(&Frame::Hello {
        node: NodeId(node),
        boot: 1,
        group: group.to_owned(),
    })
}

fn ping() -> Vec<u8> {
    bytes(&Frame::Ping { token: 7 })
}

fn bytes(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(frame, &mut bytes).unwrap();
    bytes
}

/// Reads until the other side closes, with or without an error.
fn read_to_end(stream: &mut impl Read) {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "not closed");
                return;
            }
        }
    }
}
