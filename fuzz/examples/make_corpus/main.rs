//! Writes the corpus: one frame of each kind, streams of several frames, flows and packets.
#![forbid(unsafe_code)]

mod conductor_frames;
mod drain_frames;
mod enrolment;
mod group_settings;
mod health_frames;
mod membership_files;
mod membership_frames;
mod pool_messages;
mod process_images;
mod replication_frames;

use bytes::Bytes;
use holdfast_api::app;
use holdfast_fuzz::handoff::flow;
use holdfast_fuzz::socket_state::State;
use holdfast_sys::tcp_info::TcpState;
use holdfast_sys::tun::{DATA_VALID, VnetHeader};
use holdfast_tcp_repair::{SocketOptions, TcpDynamicState, TcpStaticState};
use holdfast_wire::failure::{Context, Failure, KernelFault, NodeFault, PeerFault, SystemError};
use holdfast_wire::frame::{AcceptorPhaseTimes, FlowToPrepare, FrozenFlowState};
use holdfast_wire::greeting::{GreetingRefusal, NodeFacts};
use holdfast_wire::{
    BatchId, ChangeKind, ChangeRefusal, Frame, NodeId, OwnershipChange, OwnershipRecord,
    RecordState, encode,
};
use std::path::Path;

fn main() -> std::io::Result<()> {
    let frames = frames();
    let other_frames = [
        membership_frames::frames(),
        group_settings::node_frames(),
        health_frames::frames(),
        conductor_frames::frames(),
        drain_frames::frames(),
        enrolment::frames(),
        replication_frames::frames(),
    ]
    .concat();
    for frame in frames.iter().chain(&other_frames) {
        let name = frame.name().to_lowercase();
        write_input(
            "frame",
            &format!("stream-{name}"),
            &stream(254, std::slice::from_ref(frame)),
        )?;
        let body = &stream(1, std::slice::from_ref(frame))[6..];
        write_input("frame", &format!("body-{name}"), &[&[1], body].concat())?;
    }
    write_input("frame", "stream-all", &stream(6, &frames))?;
    // `choice` modulo 3: 0 if this node holds the steering table, 1 or 2 if a peer does. Below 64 node 2 sends first,
    // otherwise node 3.
    for choice in [0, 1, 2, 64, 65, 66] {
        write_input(
            "handoff",
            &format!("all-{choice}"),
            &stream(choice, &frames),
        )?;
    }
    membership_frames::write_streams()?;
    conductor_frames::write_streams()?;
    replication_frames::write_streams()?;
    enrolment::write_enrolment()?;
    group_settings::write_settings()?;
    membership_files::write_files()?;
    write_input("handoff", "given", &stream(0, &donor_answers()))?;
    write_input("handoff", "taken", &stream(66, &acceptor_frames()))?;
    let texts = [
        "tcp:10.0.0.1:80-10.0.1.2:4242",
        "udp:[fd00::1]:53-[fd00::2]:4242",
        "tcp:[::ffff:10.0.0.1]:80-[::ffff:10.0.1.2]:4242",
    ];
    for (index, text) in texts.iter().enumerate() {
        write_input("flow", &format!("{index}"), text.as_bytes())?;
    }
    for (name, example) in holdfast_fuzz::dns::examples() {
        write_input("dns", name, &example)?;
    }
    for (name, example) in holdfast_fuzz::arena::examples() {
        write_input("arena", name, &example)?;
    }
    write_packets()?;
    write_states()?;
    process_images::write_images()?;
    for (name, example) in holdfast_fuzz::migration_messages::examples() {
        write_input("conversation", name, &example)?;
    }
    write_input("vdso", "example", &holdfast_fuzz::vdso::example_vdso())?;
    write_messages()?;
    pool_messages::write_pool_messages()?;
    pool_messages::write_rserpool_messages()?;
    pool_messages::write_registrar_streams()?;
    pool_messages::write_asap_streams()?;
    write_held_packets()
}

fn write_input(target: &str, name: &str, data: &[u8]) -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(name), data)
}

fn stream(choice: u8, frames: &[Frame]) -> Vec<u8> {
    let mut bytes = vec![choice];
    for frame in frames {
        encode(frame, &mut bytes).expect("small");
    }
    bytes
}

fn batch(donor: u16, seq: u64) -> BatchId {
    let donor = NodeId(donor);
    BatchId {
        donor,
        boot: 1,
        seq,
    }
}

fn prepare(donor: u16) -> Frame {
    let flows = (11..14).map(|port| FlowToPrepare {
        flow: flow(port),
        epoch: 1,
        static_state: Bytes::from_static(b"static"),
    });
    let flows = flows.collect();
    Frame::Prepare {
        batch: batch(donor, 5),
        flows,
    }
}

fn state(donor: u16) -> Frame {
    let flows = (0..3).map(|index| FrozenFlowState {
        index,
        dynamic: Bytes::from_static(b"dynamic"),
        application: Bytes::from_static(b"application"),
    });
    let flows = flows.collect();
    Frame::State {
        batch: batch(donor, 5),
        flows,
        last: true,
    }
}

fn changes() -> Vec<OwnershipChange> {
    let kinds = [
        ChangeKind::Establish,
        ChangeKind::Divert {
            acceptor: NodeId(2),
        },
        ChangeKind::Commit,
        ChangeKind::CommitAll { flows: 2 },
        ChangeKind::Rollback,
        ChangeKind::Remove,
    ];
    let changes = kinds.map(|kind| OwnershipChange {
        flow: flow(1),
        kind,
        epoch: 2,
    });
    changes.to_vec()
}

fn frames() -> Vec<Frame> {
    let owned = OwnershipRecord::owned(NodeId(2), 3);
    let transit = OwnershipRecord {
        epoch: 2,
        state: RecordState::Transit {
            donor: NodeId(1),
            acceptor: NodeId(2),
        },
    };
    let refused = Err(ChangeRefusal {
        current: Some(transit),
    });
    vec![
        Frame::Hello {
            node: NodeId(2),
            boot: 1,
            group: "lab".to_owned(),
            facts: NodeFacts::default(),
        },
        Frame::Refused {
            reason: GreetingRefusal::Reach,
        },
        prepare(2),
        Frame::PrepareResponse {
            batch: batch(1, 3),
            results: vec![
                Ok(()),
                Err(NodeFault::TooManyConnectionsInTransit.into()),
                Ok(()),
            ],
        },
        Frame::ChangeRequest {
            request: 1,
            changes: changes(),
        },
        Frame::ChangeResponse {
            request: 4,
            results: vec![Ok(Some(owned)), Ok(None), refused],
        },
        state(2),
        done(3),
        Frame::Abort {
            batch: batch(2, 5),
            reason: Failure::from(PeerFault::HandoffAborted).within(Context::DonorAborted),
        },
        Frame::Query {
            request: 1,
            flows: vec![flow(1), flow(2)],
        },
        Frame::QueryResponse {
            request: 1,
            records: vec![Some(owned), None],
        },
        Frame::Ping { token: 1 },
        Frame::Pong { token: 1 },
    ]
}

/// Returns a failure with text, a number and an address.
fn system_call_failure() -> Failure {
    let failure = Failure::from(KernelFault::SystemCall {
        action: "TCP_REPAIR".into(),
        error: SystemError::Code(1),
    });
    failure.within(Context::Flow(flow(1)))
}

fn done(seq: u64) -> Frame {
    let times = AcceptorPhaseTimes {
        restore_us: 300,
        commit_us: 200,
    };
    let results = vec![Ok(3), Err(system_call_failure()), Ok(3)];
    Frame::Done {
        batch: batch(1, seq),
        results,
        times,
    }
}

/// Returns an acceptor's answers to the batch that the machine gives.
fn donor_answers() -> Vec<Frame> {
    let prepared = |seq| Frame::PrepareResponse {
        batch: batch(1, seq),
        results: vec![Ok(()); 3],
    };
    let ping = Frame::Ping { token: 1 };
    let mut frames = Vec::new();
    for seq in 1..9 {
        frames.extend([prepared(seq), ping.clone(), done(seq), ping.clone()]);
    }
    frames
}

/// Returns a donor's frames for a batch that the machine takes; the donor is node 3, which sends first.
fn acceptor_frames() -> Vec<Frame> {
    let ping = Frame::Ping { token: 1 };
    vec![prepare(3), ping.clone(), state(3), ping]
}

fn write_packets() -> std::io::Result<()> {
    // IPv4 and TCP with one byte of payload; lengths and headers are valid, checksums are not checked.
    let mut v4 = vec![
        0x45, 0, 0, 41, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 1, 2, 10, 0, 0, 1,
    ];
    let tcp = [
        16, 146, 0, 80, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 1, 0, 0, 0, 0, 0, b'x',
    ];
    v4.extend(tcp);
    write_input("packet", "tcp4", &v4)?;
    let mut v6 = vec![0x60, 0, 0, 0, 0, 21, 6, 64];
    v6.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    v6.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    v6.extend(tcp);
    write_input("packet", "tcp6", &v6)?;
    let mut udp = vec![
        0x45, 0, 0, 29, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 1, 2, 10, 0, 0, 1,
    ];
    udp.extend([16, 146, 0, 53, 0, 9, 0, 0, b'x']);
    write_input("packet", "udp4", &udp)
}

fn write_states() -> std::io::Result<()> {
    let mut options = SocketOptions::default();
    options.congestion_control = "cubic".to_owned();
    for (name, state) in [
        ("established", TcpState::Established),
        ("close-wait", TcpState::CloseWait),
        ("fin-wait-2", TcpState::FinWait2),
    ] {
        let fixed = TcpStaticState {
            local: "10.0.0.1:80".parse().expect("an address"),
            remote: "10.0.1.2:4242".parse().expect("an address"),
            v6_socket: false,
            window_scale: Some((7, 7)),
            sack: true,
            timestamps: true,
            ecn: false,
            segment_size: 1460,
            receive_shut: false,
            options: options.clone(),
        };
        let dynamic = TcpDynamicState {
            state,
            unread: b"unread".to_vec(),
            outgoing: b"sent unsent".to_vec(),
            unsent: 6,
            ..TcpDynamicState::default()
        };
        let bytes = postcard::to_stdvec(&State {
            static_state: fixed,
            dynamic,
        })
        .expect("plain data");
        write_input("state", name, &bytes)?;
    }
    Ok(())
}

fn write_messages() -> std::io::Result<()> {
    let flow = "udp:10.0.0.1:53-10.0.1.2:4242".parse().expect("a flow");
    let item = app::HandOffItem {
        flow,
        application_state: b"state".to_vec(),
        descriptor: true,
    };
    let piece = app::DatagramPiece {
        bytes: b"datagram".to_vec(),
        is_continued: false,
    };
    let to_daemon = [
        app::ToDaemon::Open {
            name: "echo".to_owned(),
        },
        app::ToDaemon::HandOff {
            batch: 1,
            to: "n2".to_owned(),
            drain: Default::default(),
            items: vec![item],
            last: true,
        },
        app::ToDaemon::Collected {
            flow,
            unread: vec![piece],
            last: true,
        },
        app::ToDaemon::Received { ids: vec![1, 2] },
    ];
    for (index, message) in to_daemon.iter().enumerate() {
        let bytes = app::encode(message).expect("small");
        write_input("app", &format!("to-{index}"), &bytes)?;
    }
    let from_daemon = [
        app::FromDaemon::Opened {
            node: "n1".to_owned(),
        },
        app::FromDaemon::State {
            id: 1,
            application_state: b"state".to_vec(),
            unread: Vec::new(),
            last: true,
        },
        app::FromDaemon::Kept {
            flows: vec![flow],
            reason: "why".to_owned(),
        },
    ];
    for (index, message) in from_daemon.iter().enumerate() {
        let bytes = app::encode(message).expect("small");
        write_input("app", &format!("from-{index}"), &bytes)?;
    }
    Ok(())
}

/// Writes the packets of `packet` as a TUN returns them.
fn write_held_packets() -> std::io::Result<()> {
    let header = VnetHeader {
        flags: DATA_VALID,
        ..VnetHeader::default()
    };
    for name in ["tcp4", "tcp6", "udp4"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/packet");
        let packet = std::fs::read(folder.join(name))?;
        write_input("vnet", name, &[&header.to_bytes()[..], &packet].concat())?;
    }
    Ok(())
}
