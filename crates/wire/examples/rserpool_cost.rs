//! Measures the cost of decoding and encoding the registrar's hot messages: `cargo run --release --example
//! rserpool_cost`.
#![forbid(unsafe_code)]

use bytes::{Bytes, BytesMut};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{
    Addresses, ElementId, PeChecksum, Policy, PoolElement, PoolHandle, RegistrarId, SctpTransport,
    Transport, TransportUse,
};
use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::Instant;

const ROUNDS: usize = 1_000_000;

fn element(id: u32) -> PoolElement {
    PoolElement {
        id: ElementId(id),
        home: RegistrarId(1),
        registration_life: 30,
        user_transport: Transport::Sctp(SctpTransport {
            port: 4242,
            usage: TransportUse::DataAndControl,
            addresses: Addresses::from_iter([
                Ipv4Addr::new(10, 0, 0, 1).into(),
                Ipv4Addr::new(10, 0, 1, 1).into(),
            ]),
        }),
        policy: Policy::LeastUsed { load: 1 << 31 },
        asap_transport: None,
    }
}

fn messages() -> [Message; 5] {
    let handle = || PoolHandle::from("ComputePool");
    let response = |elements| Message::HandleResolutionResponse {
        updates: false,
        handle: handle(),
        policy: Some(Policy::LeastUsed { load: 0 }),
        elements,
        causes: Vec::new(),
    };
    [
        Message::Registration {
            handle: handle(),
            element: element(1),
        },
        Message::HandleResolution {
            updates: false,
            handle: handle(),
            items_max: Some(3),
        },
        response(vec![element(1)]),
        response((1..4).map(element).collect()),
        Message::EndpointKeepAliveAck {
            handle: handle(),
            id: ElementId(1),
        },
    ]
}

/// Returns the duration of one call in nanoseconds, the best of five runs.
fn nanoseconds_per_call(mut call: impl FnMut()) -> f64 {
    let run = |_| {
        let start = Instant::now();
        (0..ROUNDS).for_each(|_| call());
        start.elapsed().as_secs_f64() * 1e9 / ROUNDS as f64
    };
    (0..5).map(run).fold(f64::INFINITY, f64::min)
}

fn main() {
    println!(
        "{:<28} {:>5} {:>9} {:>9}",
        "message", "bytes", "parse ns", "encode ns"
    );
    for message in messages() {
        let mut buffer = BytesMut::new();
        message.encode(&mut buffer).expect("small");
        let bytes = Bytes::copy_from_slice(&buffer);
        let parse = nanoseconds_per_call(|| {
            black_box(Message::parse(black_box(&bytes)).expect("ours"));
        });
        let encode = nanoseconds_per_call(|| {
            buffer.clear();
            black_box(&message).encode(&mut buffer).expect("small");
        });
        println!(
            "{:<28} {:>5} {parse:>9.0} {encode:>9.0}",
            message.name(),
            bytes.len()
        );
    }
    let (handle, mut checksum) = (PoolHandle::from("ComputePool"), PeChecksum::default());
    let add = nanoseconds_per_call(|| checksum.add(black_box(&handle), ElementId(1)));
    println!("{:<28} {add:>25.1}", "checksum, one element");
    black_box(checksum.value());
}
