use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use holdfast_wire::move_frames::MoveFrame;
use holdfast_wire::{Frame, LENGTH_MAX, MoveId, NodeId, VERSION};

use super::group::{
    Group, Node, Rogue, dial, eventually, frame_bytes, hello_bytes, read_to_end, run, run_blocking,
};
use crate::peer_channel::{PeerChannelOptions, PeerConnectionError};

fn ping() -> Vec<u8> {
    frame_bytes(&Frame::Ping { token: 7 })
}

/// Checks that `garbage` after a greeting is counted as `reason`, ends its connection, and does not affect other peers.
async fn assert_rejected(
    group: &Group,
    n1: &mut Node,
    n3: &mut Node,
    garbage: Vec<u8>,
    reason: &str,
) {
    let before = n1.metrics.rejections(reason);
    let rogue = run_blocking(Rogue::connect(group, 2)).await;
    assert_eq!(n1.wait_up(2).await, 2);
    run_blocking(move || {
        let mut rogue = rogue;
        rogue.dialled.write_all(&garbage).unwrap();
        rogue.dialled.flush().unwrap();
        read_to_end(&mut rogue.dialled);
        // Both directions are closed.
        read_to_end(&mut rogue.accepted);
    })
    .await;
    let loss_reason = n1.wait_lost(2).await;
    assert_eq!(
        loss_reason.rejection_reason(),
        Some(reason),
        "{loss_reason}"
    );
    assert_eq!(n1.metrics.rejections(reason), before + 1);
    assert_peers_unaffected(n1, n3).await;
}

async fn assert_peers_unaffected(n1: &mut Node, n3: &mut Node) {
    let flows = Vec::new();
    let frame = Frame::Query { request: 3, flows };
    n1.peers.send(n3.id, &frame).unwrap();
    assert_eq!(n3.wait_frame().await, (n1.id, frame.clone()));
    n3.peers.send(n1.id, &frame).unwrap();
    assert_eq!(n1.wait_frame().await, (n3.id, frame));
}

#[test]
fn bad_frames_close_only_their_connection() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n3) = (group.start(1), group.start(3));
        n1.wait_up(3).await;
        n3.wait_up(1).await;

        let malformed = vec![0, 0, 0, 3, VERSION, 0xff, 0xff];
        assert_rejected(&group, &mut n1, &mut n3, malformed, "malformed").await;
        let empty = vec![0, 0, 0, 0];
        assert_rejected(&group, &mut n1, &mut n3, empty, "malformed").await;
        let mut version = ping();
        version[4] = VERSION + 1;
        assert_rejected(&group, &mut n1, &mut n3, version, "version").await;
        let oversized = (LENGTH_MAX as u32 + 1).to_be_bytes().to_vec();
        assert_rejected(&group, &mut n1, &mut n3, oversized, "oversized").await;
        assert_rejected(
            &group,
            &mut n1,
            &mut n3,
            hello_bytes(2, "files"),
            "unexpected",
        )
        .await;
        let pong = frame_bytes(&Frame::Pong { token: 1 });
        assert_rejected(&group, &mut n1, &mut n3, pong, "unexpected").await;
        let mut second = ping();
        second.extend([0xff; 64]);
        assert_rejected(&group, &mut n1, &mut n3, second, "oversized").await;
    });
}

#[test]
fn peer_killed_mid_frame_is_lost_and_reconnects() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n3) = (group.start(1), group.start(3));
        n1.wait_up(3).await;
        n3.wait_up(1).await;
        for cut in [1, 4, 5, ping().len() - 1] {
            let rogue = run_blocking(Rogue::connect(&group, 2)).await;
            n1.wait_up(2).await;
            let before = n1.metrics.rejections("truncated");
            // Only the sending side is closed: closing the socket with unread data would make the kernel reset the
            // connection, and the peer would miss the truncation.
            run_blocking(move || {
                let mut rogue = rogue;
                rogue.dialled.write_all(&ping()[..cut]).unwrap();
                rogue.dialled.flush().unwrap();
                let half_closed = rogue.dialled.sock.shutdown(std::net::Shutdown::Write);
                half_closed.unwrap();
                read_to_end(&mut rogue.dialled);
            })
            .await;
            let loss_reason = n1.wait_lost(2).await;
            assert_eq!(
                loss_reason.rejection_reason(),
                Some("truncated"),
                "{loss_reason}"
            );
            assert_eq!(n1.metrics.rejections("truncated"), before + 1);
            assert_peers_unaffected(&mut n1, &mut n3).await;
        }
        let mut n2 = group.start_with(group.options(2, 77));
        assert_eq!(n1.wait_up(2).await, 77);
        n2.wait_up(1).await;
    });
}

/// Checks that `greeting` from the holder of `n2`'s certificate is counted as `reason`.
async fn assert_greeting_refused(group: &Group, n1: &Node, greeting: Vec<u8>, reason: &str) {
    let before = n1.metrics.rejections(reason);
    let (tls, address) = (group.tls("n2"), group.address(1));
    run_blocking(move || {
        let mut rogue = dial(&tls, address, "n1");
        rogue.write_all(&greeting).unwrap();
        read_to_end(&mut rogue);
    })
    .await;
    eventually(reason, || n1.metrics.rejections(reason) == before + 1).await;
    assert!(!n1.peers.is_up(NodeId(2)));
}

#[test]
fn bad_greetings_are_refused() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n3) = (group.start(1), group.start(3));
        n1.wait_up(3).await;
        n3.wait_up(1).await;
        assert_greeting_refused(&group, &n1, hello_bytes(2, "mails"), "group").await;
        assert_greeting_refused(&group, &n1, hello_bytes(3, "files"), "node").await;
        assert_greeting_refused(&group, &n1, hello_bytes(9, "files"), "node").await;
        assert_greeting_refused(&group, &n1, ping(), "unexpected").await;
        let mut version = hello_bytes(2, "files");
        version[4] = 9;
        assert_greeting_refused(&group, &n1, version, "version").await;
        assert_peers_unaffected(&mut n1, &mut n3).await;
    });
}

#[test]
fn dialled_node_of_another_group_is_refused() {
    run(async {
        let group = Group::new();
        let n1 = group.start(1);
        let mut options = group.options(2, 2);
        options.group = "mails".to_owned();
        let n2 = group.start_with(options);
        let problem_of =
            |node: &Node, peer: u16| node.peers.problem(NodeId(peer)).unwrap_or_default();
        // The accepting side refuses, and tells the dialling side the reason.
        eventually("n1 counts", || n1.metrics.rejections("group") > 0).await;
        eventually("n2 counts", || n2.metrics.rejections("group") > 0).await;
        eventually("n1 says", || problem_of(&n1, 2).contains("mails")).await;
        eventually("n2 says", || problem_of(&n2, 1).contains("files")).await;
        assert!(!n1.peers.is_up(NodeId(2)) && !n2.peers.is_up(NodeId(1)));
    });
}

#[test]
fn non_tls_connection_is_refused() {
    run(async {
        let group = Group::new();
        let n1 = group.start(1);
        let address = group.address(1);
        run_blocking(move || {
            let mut socket = TcpStream::connect(address).unwrap();
            socket
                .write_all(b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n")
                .unwrap();
            socket
                .set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
            read_to_end(&mut socket);
        })
        .await;
        eventually("tls", || n1.metrics.rejections("tls") == 1).await;
    });
}

#[test]
fn early_frames_of_a_guest_are_bounded_in_bytes() {
    run(async {
        let group = Group::new();
        let (membership, _frames) = tokio::sync::mpsc::channel(8);
        let n1 = group.start_with(PeerChannelOptions {
            peers: Vec::new(),
            membership: Some(membership),
            ..group.options(1, 1)
        });
        let (tls, address) = (group.tls("n2"), group.address(1));
        run_blocking(move || {
            let mut guest = dial(&tls, address, "n1");
            guest.write_all(&hello_bytes(2, "files")).unwrap();
            let piece = frame_bytes(&Frame::Move {
                id: MoveId {
                    donor: NodeId(2),
                    boot: 2,
                    seq: 1,
                },
                frame: MoveFrame::Piece {
                    kind: 1,
                    more: true,
                    bytes: vec![0; 600 << 10].into(),
                },
            });
            for _ in 0..2 {
                // The connection may end while the second frame is written.
                let _ = guest.write_all(&piece);
            }
            read_to_end(&mut guest);
        })
        .await;
        eventually("closed", || n1.metrics.rejections("unexpected") == 1).await;
    });
}

#[test]
fn link_errors_state_a_remedy() {
    let group = PeerConnectionError::WrongGroup {
        ours: "files".into(),
        theirs: "mails".into(),
    };
    assert_eq!(
        group.to_string(),
        "the peer belongs to group `mails`, this node to `files`; correct [group] name or the address"
    );
}
