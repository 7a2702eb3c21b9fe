//! Test that an XDP program at a node's interface can send packets back: the far end must poll, and arriving packets
//! must be complete.

use std::{net::UdpSocket, process::Command, time::Duration};

use holdfast_lab::{Lab, LinkEntry, Topology};

mod common;
use common::{is_root, output_of, receive, spec};

#[test]
fn xdp_program_can_send_packets_back() {
    if !is_root() {
        return;
    }
    let object = std::env::temp_dir().join(format!("xdp-echo-{}.o", std::process::id()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/xdp_echo.bpf.c");
    let include = format!("/usr/include/{}-linux-gnu", std::env::consts::ARCH);
    let mut compiler = Command::new("clang");
    compiler
        .args([
            "-target",
            "bpf",
            "-O2",
            "-g",
            "-idirafter",
            &include,
            "-c",
            source,
            "-o",
        ])
        .arg(&object);
    assert!(compiler.status().unwrap().success());
    for topology in [
        Topology::default(),
        Topology::default().with_entry(LinkEntry::for_host("n1")),
    ] {
        let lab = Lab::up(&spec("xdp").topology(topology)).unwrap();
        output_of(
            &lab,
            "n1",
            &format!(
                "ip link set dev eth0 xdpdrv obj {} sec xdp",
                object.display()
            ),
        );
        let (target, _) = lab.address("n1").unwrap();
        let socket = lab
            .run_in_net_namespace("c1", || UdpSocket::bind("0.0.0.0:0"))
            .unwrap()
            .unwrap();
        socket.connect((target, 7)).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let mut back = [0; 2000];
        // No socket listens there: only the XDP program answers. The receiver checks the checksums.
        for length in [4usize, 500, 1472] {
            let sent = vec![length as u8; length];
            socket.send(&sent).unwrap();
            let received = receive(&socket, &mut back).unwrap();
            assert_eq!(back[..received], sent);
        }
    }
    std::fs::remove_file(object).unwrap();
}
