//! Strangers and faulty nodes on the port between nodes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_daemon::config::TlsConfig;
use holdfast_daemon::tls::Tls;
use holdfast_node::config::DEFAULT_PORT;
use holdfast_testbed::cluster::IpFamily;
use holdfast_wire::greeting::NodeFacts;
use holdfast_wire::{Frame, LENGTH_MAX, NodeId, VERSION, encode};
use nix::sys::signal::Signal;
use rustls::{ClientConnection, StreamOwned};

use crate::common::{LoadedGroup, PATIENCE, eventually};

const CERTIFICATE_REJECTIONS: &str = "holdfast_frames_rejected_total{reason=\"certificate\"}";

#[test]
fn node_port_rejects_strangers_and_bad_frames() {
    let Some(world) = LoadedGroup::up("nodes") else {
        return;
    };
    let ca = world.cluster.directory().join("ca");
    let authority = CertificateAuthority::open(&ca).unwrap();
    authority.issue("n9", &[], NODE_DAYS).unwrap();

    assert_rejection_counted(&world, "tls", |mut socket| {
        socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        drain(&mut socket);
    });
    // A connection cut off in the middle of a record is closed without further effect.
    let mut half_open = connect_to_n2(&world);
    half_open.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
    half_open.shutdown(std::net::Shutdown::Write).unwrap();
    drain(&mut half_open);
    reject_wrong_certificates(&world, &ca);
    reject_bad_greetings(&world, &ca);
    reject_bad_frames(&world, &ca);
    reject_revoked_certificate(&world, &ca, &authority);

    world.assert_unharmed();
    world.cluster.wait_ready().unwrap();
    world.assert_moves("n2", world.flow(0), "n3");
    world.assert_moves("n3", world.flow(0), "n2");
    world.finish();
}

/// Runs `act` with a connection to n2 until n2 closes it, and asserts that the rejection is counted under `reason`.
fn assert_rejection_counted(world: &LoadedGroup, reason: &str, act: impl FnOnce(TcpStream)) {
    let line = format!("holdfast_frames_rejected_total{{reason=\"{reason}\"}}");
    let before = world.metric("n2", &line);
    act(connect_to_n2(world));
    eventually(reason, || world.metric("n2", &line) > before);
    world.assert_unharmed();
}

fn connect_to_n2(world: &LoadedGroup) -> TcpStream {
    let address = world.cluster.address("n2", IpFamily::V4).unwrap();
    let address = SocketAddr::new(address, DEFAULT_PORT);
    let connect = || TcpStream::connect(address).unwrap();
    let socket = world
        .cluster
        .lab()
        .run_in_net_namespace("n3", connect)
        .unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn reject_wrong_certificates(world: &LoadedGroup, ca: &Path) {
    let other_ca = world.cluster.directory().join("other");
    CertificateAuthority::init(&other_ca, "lab")
        .unwrap()
        .issue("n3", &[], NODE_DAYS)
        .unwrap();
    // A stranger that trusts the group's authority, but has a certificate of another authority.
    let files = TlsConfig {
        ca: ca.join("ca.pem"),
        ..tls_files(&other_ca, "n3")
    };
    let stranger = Tls::from_files(&files, "n3").unwrap();
    assert_rejection_counted(world, "certificate", |socket| {
        let mut stream = StreamOwned::new(stranger.dial("n2").unwrap(), socket);
        let _ = stream.write_all(&encode_hello(3, "lab"));
        drain(&mut stream);
    });
    // A valid certificate, with a node number that belongs to another node.
    for claimed_number in [2, 3] {
        assert_greeting_rejected(world, ca, "n9", encode_hello(claimed_number, "lab"), "node");
    }
}

/// Invalid first frames from the holder of a valid certificate.
fn reject_bad_greetings(world: &LoadedGroup, ca: &Path) {
    assert_greeting_rejected(world, ca, "n3", encode_hello(3, "mails"), "group");
    assert_greeting_rejected(world, ca, "n3", encode_hello(1, "lab"), "node");
    assert_greeting_rejected(world, ca, "n9", encode_hello(9, "lab"), "node");
    assert_greeting_rejected(world, ca, "n3", encode_ping(), "unexpected");
    let mut version = encode_hello(3, "lab");
    version[4] = VERSION + 1;
    assert_greeting_rejected(world, ca, "n3", version, "version");
    let oversized = (LENGTH_MAX as u32 + 1).to_be_bytes().to_vec();
    assert_greeting_rejected(world, ca, "n3", oversized, "oversized");
    let malformed = vec![0, 0, 0, 3, VERSION, 0xff, 0xff];
    assert_greeting_rejected(world, ca, "n3", malformed, "malformed");
}

/// Invalid frames after a valid greeting as n3. The real n3 is connected again afterwards.
fn reject_bad_frames(world: &LoadedGroup, ca: &Path) {
    let mut version = encode_ping();
    version[4] = VERSION + 1;
    let cases = [
        (vec![0, 0, 0, 0], "malformed"),
        (vec![0, 0, 0, 3, VERSION, 0xff, 0xff], "malformed"),
        (version, "version"),
        (u32::MAX.to_be_bytes().to_vec(), "oversized"),
        (encode_hello(3, "lab"), "unexpected"),
    ];
    for (bytes, reason) in cases {
        assert_greeting_rejected(
            world,
            ca,
            "n3",
            [encode_hello(3, "lab"), bytes].concat(),
            reason,
        );
        world.cluster.wait_ready().unwrap();
    }
    for cut_length in [1, 4, 5, encode_ping().len() - 1] {
        assert_rejection_counted(world, "truncated", |socket| {
            let mut stream = dial_n2(ca, "n3", socket);
            let greeting = [&encode_hello(3, "lab")[..], &encode_ping()[..cut_length]].concat();
            stream.write_all(&greeting).unwrap();
            stream.flush().unwrap();
            stream.sock.shutdown(std::net::Shutdown::Write).unwrap();
            drain(&mut stream);
        });
        world.cluster.wait_ready().unwrap();
    }
}

/// A revoked certificate is refused once the daemon has reloaded the revocation list; an invalid list changes nothing.
fn reject_revoked_certificate(world: &LoadedGroup, ca: &Path, authority: &CertificateAuthority) {
    let n9 = Tls::from_files(&tls_files(ca, "n9"), "n9").unwrap();
    let send_greeting = |socket| {
        let mut stream = StreamOwned::new(n9.dial("n2").unwrap(), socket);
        let _ = stream.write_all(&encode_hello(9, "lab"));
        drain(&mut stream);
    };
    let reload = || world.cluster.signal_daemon("n2", Signal::SIGHUP).unwrap();
    authority.revoke("n9").unwrap();
    assert_rejection_counted(world, "node", send_greeting);
    let count_rejections = || world.metric("n2", CERTIFICATE_REJECTIONS);
    let before = count_rejections();
    reload();
    eventually("the revocation list is reloaded", || {
        send_greeting(connect_to_n2(world));
        count_rejections() > before
    });
    std::fs::write(ca.join("ca.crl"), "no list").unwrap();
    reload();
    eventually("the error is logged", || {
        world
            .cluster
            .log_tails()
            .contains("ca.crl: contains no revocation list")
    });
    assert_rejection_counted(world, "certificate", send_greeting);
}

/// Sends `bytes` as the holder of `name`'s certificate, and asserts that they are rejected for `reason`.
fn assert_greeting_rejected(
    world: &LoadedGroup,
    ca: &Path,
    name: &str,
    bytes: Vec<u8>,
    reason: &str,
) {
    assert_rejection_counted(world, reason, |socket| {
        let mut stream = dial_n2(ca, name, socket);
        stream.write_all(&bytes).unwrap();
        drain(&mut stream);
    });
}

fn dial_n2(ca: &Path, name: &str, socket: TcpStream) -> StreamOwned<ClientConnection, TcpStream> {
    let tls = Tls::from_files(&tls_files(ca, name), name).unwrap();
    StreamOwned::new(tls.dial("n2").unwrap(), socket)
}

fn tls_files(ca: &Path, name: &str) -> TlsConfig {
    TlsConfig {
        ca: ca.join("ca.pem"),
        cert: ca.join(format!("{name}.pem")),
        key: ca.join(format!("{name}.key")),
        crl: None,
    }
}

/// Returns the greeting of a daemon that has just started.
fn encode_hello(node: u16, group: &str) -> Vec<u8> {
    static BOOT: AtomicU64 = AtomicU64::new(1);
    encode_frame(&Frame::Hello {
        node: NodeId(node),
        boot: BOOT.fetch_add(1, Ordering::Relaxed),
        group: group.to_owned(),
        facts: NodeFacts::default(),
    })
}

fn encode_ping() -> Vec<u8> {
    encode_frame(&Frame::Ping { token: 7 })
}

fn encode_frame(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(frame, &mut bytes).unwrap();
    bytes
}

/// Reads until the other side closes, with or without an error.
fn drain(stream: &mut impl Read) {
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
