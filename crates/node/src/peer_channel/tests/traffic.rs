use std::time::{Duration, Instant};

use holdfast_wire::{BatchId, Flow, Frame, NodeId, frame::FrozenFlowState};

use super::group::{Group, Rogue, TEST_TIMEOUT, eventually, read_frame, run, run_blocking};
use crate::peer_channel::{PeerEvent, SendError};

fn query_frame(request: u64) -> Frame {
    let flow: Flow = "tcp:10.0.0.1:80-10.0.1.2:4242".parse().unwrap();
    let flows = vec![flow];
    Frame::Query { request, flows }
}

fn state_frame(seq: u64, length: usize) -> Frame {
    let donor = NodeId(1);
    let dynamic: Vec<u8> = (0..length)
        .map(|at| (at as u64 * seq % 251) as u8)
        .collect();
    Frame::State {
        batch: BatchId {
            donor,
            boot: 1,
            seq,
        },
        flows: vec![FrozenFlowState {
            index: 0,
            dynamic: dynamic.into(),
            application: Default::default(),
        }],
        last: true,
    }
}

#[test]
fn frames_of_all_sizes_arrive_in_order() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n2) = (group.start(1), group.start(2));
        n1.wait_up(2).await;
        n2.wait_up(1).await;
        let sizes = [0, 1, 16_383, 16_384, 70_000, 8 << 20, 3, 12 << 20, 5];
        for (seq, size) in sizes.into_iter().enumerate() {
            n1.peers
                .send(n2.id, &state_frame(seq as u64, size))
                .unwrap();
            n2.peers.send(n1.id, &query_frame(seq as u64)).unwrap();
        }
        for (seq, size) in sizes.into_iter().enumerate() {
            assert!(
                n2.wait_frame().await == (n1.id, state_frame(seq as u64, size)),
                "{seq}"
            );
            assert_eq!(n1.wait_frame().await, (n2.id, query_frame(seq as u64)));
        }
        assert_eq!(n1.peers.queued_bytes(n2.id), 0);
        let (sent, received) = (n1.peers.stats(n2.id), n2.peers.stats(n1.id));
        assert!(sent.unwrap().sent_bytes > 20 << 20);
        assert!(received.unwrap().received_bytes > 20 << 20);
        eventually("a round trip", || {
            n1.peers.stats(n2.id).unwrap().round_trip.is_some()
        })
        .await;
        assert!(
            n1.metrics
                .encode()
                .contains("peer_round_trip_seconds{peer=\"n2\"}")
        );
    });
}

#[test]
fn small_frame_is_echoed() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n2) = (group.start(1), group.start(2));
        n1.wait_up(2).await;
        n2.wait_up(1).await;
        let echo = tokio::task::spawn_local(async move {
            loop {
                if let PeerEvent::Frame { from, frame } = n2.events.recv().await {
                    n2.peers.send(from, &frame).unwrap();
                }
            }
        });
        let mut trips: Vec<Duration> = Vec::new();
        for request in 0..2_000 {
            let start = Instant::now();
            n1.peers.send(NodeId(2), &query_frame(request)).unwrap();
            assert_eq!(n1.wait_frame().await, (NodeId(2), query_frame(request)));
            trips.push(start.elapsed());
        }
        echo.abort();
        trips.sort();
        println!(
            "round trip of a small frame, both daemons on one thread: median {:?}, 99th {:?}",
            trips[trips.len() / 2],
            trips[trips.len() * 99 / 100]
        );
    });
}

#[test]
fn full_queue_refuses_frames_and_recovers() {
    run(async {
        let group = Group::new();
        let mut n1 = group.start(1);
        let mut rogue = run_blocking(Rogue::connect(&group, 2)).await;
        n1.wait_up(2).await;
        let n2 = NodeId(2);
        // The rogue does not read.
        let mut accepted = 0;
        let refused = loop {
            match n1.peers.send(n2, &state_frame(accepted, 1 << 20)) {
                Ok(()) => accepted += 1,
                Err(error) => break error,
            }
            assert!(accepted < 200, "{accepted} MiB taken");
            tokio::task::yield_now().await;
        };
        let queued_bytes = n1.peers.queued_bytes(n2);
        assert_eq!(
            refused,
            SendError::QueueFull {
                peer: n2,
                queued_bytes
            }
        );
        assert!(
            queued_bytes > 30 << 20 && queued_bytes <= 32 << 20,
            "{queued_bytes}"
        );
        // The rogue reads: all accepted frames arrive, the refused one does not.
        let rogue = run_blocking(move || {
            // One reader for all frames, because a frame may begin in the record in which another ends.
            let mut reader = std::io::BufReader::new(&mut rogue.accepted);
            let mut seq = 0;
            while seq < accepted {
                match read_frame(&mut reader) {
                    Frame::Ping { .. } => {}
                    frame => {
                        assert!(frame == state_frame(seq, 1 << 20), "{seq}");
                        seq += 1;
                    }
                }
            }
            rogue
        })
        .await;
        eventually("room", || n1.peers.queued_bytes(n2) == 0).await;
        n1.peers.send(n2, &state_frame(accepted, 1 << 20)).unwrap();
        assert!(n1.peers.stats(n2).unwrap().bytes_per_second.is_some());
        drop(rogue);
    });
}

#[test]
fn slow_reader_blocks_sender() {
    run(async {
        let group = Group::new();
        let (mut n1, mut n2) = (group.start(1), group.start(2));
        n1.wait_up(2).await;
        n2.wait_up(1).await;
        // n2's engine takes nothing; n1 sends small frames until they queue up at n1.
        let mut sent = 0;
        let start = Instant::now();
        while n1.peers.queued_bytes(n2.id) < 1 << 20 {
            for _ in 0..64 {
                n1.peers.send(n2.id, &state_frame(sent, 8_000)).unwrap();
                sent += 1;
            }
            tokio::task::yield_now().await;
            assert!(
                start.elapsed() < TEST_TIMEOUT,
                "{sent} frames sent, none held back"
            );
        }
        for seq in 0..sent {
            assert!(
                n2.wait_frame().await == (n1.id, state_frame(seq, 8_000)),
                "{seq}"
            );
        }
    });
}

#[test]
fn send_to_disconnected_peer_fails() {
    run(async {
        let group = Group::new();
        let n1 = group.start(1);
        for to in [NodeId(1), NodeId(2), NodeId(9)] {
            let sent = n1.peers.send(to, &query_frame(1));
            assert_eq!(sent, Err(SendError::NotConnected(to)));
        }
        eventually("a reason", || n1.peers.problem(NodeId(2)).is_some()).await;
        let problem = n1.peers.problem(NodeId(2)).unwrap();
        assert!(
            problem.contains("connecting to") && problem.contains("refused"),
            "{problem}"
        );
    });
}
