//! Measures the cost of a message in a registrar's machine, from its bytes to the bytes of the answer and of the update
//! to all peers: `cargo run --release --example registrar_cost`.
#![forbid(unsafe_code)]

use bytes::{Bytes, BytesMut};
use holdfast_proto::registrar::{
    AssociationId, PermittedHosts, PoolProtocol, Registrar, RegistrarMachineConfig,
};
use holdfast_wire::rserpool::{
    ElementId, Policy, PoolElement, PoolHandle, RegistrarId, SctpTransport, Transport,
    TransportUse, asap, enrp,
};
use std::hint::black_box;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const POOLS: u32 = 100;
const ROUNDS: usize = 300_000;

fn address(host: u32, port: u16) -> SocketAddr {
    let [_, b, c, d] = host.to_be_bytes();
    SocketAddr::from(([10, b, c, d], port))
}

fn transport(host: u32, port: u16) -> SctpTransport {
    SctpTransport {
        port,
        usage: TransportUse::DataOnly,
        addresses: [address(host, 0).ip()].into_iter().collect(),
    }
}

fn handle(id: u32) -> PoolHandle {
    PoolHandle::from(format!("pool-{:04}", id % POOLS).as_str())
}

fn registration(id: u32, load: u32) -> Bytes {
    let message = asap::Message::Registration {
        handle: handle(id),
        element: PoolElement {
            id: ElementId(id),
            home: RegistrarId(0),
            registration_life: 300_000,
            user_transport: Transport::Sctp(transport(id, 80)),
            policy: Policy::LeastUsed { load },
            asap_transport: None,
        },
    };
    let mut buffer = BytesMut::new();
    message.encode(&mut buffer).expect("it has an encoding");
    buffer.freeze()
}

fn resolution(id: u32, items: u32) -> Bytes {
    let message = asap::Message::HandleResolution {
        updates: false,
        handle: handle(id),
        items_max: Some(items),
    };
    let mut buffer = BytesMut::new();
    message.encode(&mut buffer).expect("it has an encoding");
    buffer.freeze()
}

/// Returns a registrar with peers, and with elements that each have an association.
fn registrar(elements: u32, peers: u32) -> Registrar {
    let mut config = RegistrarMachineConfig::new(RegistrarId(1), 1, transport(1, 9901));
    config.settings.access.registrar = PermittedHosts::Everyone;
    config.settings.limits.messages_per_second = 1_000_000;
    let mut registrar = Registrar::new(Duration::ZERO, config);
    for peer in 0..peers {
        let id = AssociationId(1 << 40 | u64::from(peer));
        let address_of_peer = address(0xff_0000 + peer, 9901);
        registrar.handle_association_up(
            Duration::ZERO,
            id,
            PoolProtocol::Enrp,
            &[address_of_peer],
            None,
        );
        let presence = enrp::Message {
            sender: RegistrarId(100 + peer),
            receiver: RegistrarId(0),
            body: enrp::EnrpBody::Presence {
                reply_required: false,
                checksum: None,
                server: None,
            },
        };
        let mut buffer = BytesMut::new();
        presence.encode(&mut buffer).expect("it has an encoding");
        registrar.handle_enrp(Duration::ZERO, id, &buffer.freeze());
    }
    for id in 0..elements {
        let association = AssociationId(u64::from(id));
        let address_of_element = address(id, 5000);
        registrar.handle_association_up(
            Duration::ZERO,
            association,
            PoolProtocol::Asap,
            &[address_of_element],
            None,
        );
        registrar.handle_asap(Duration::ZERO, association, &registration(id, id));
    }
    while registrar.poll_output().is_some() {}
    registrar
}

/// Returns the nanoseconds for each message, including its outputs and timers.
fn measure(registrar: &mut Registrar, messages: &[(AssociationId, Bytes)]) -> f64 {
    let mut best = f64::MAX;
    let mut now = Duration::from_secs(1);
    for _ in 0..3 {
        let start = Instant::now();
        for (from, message) in messages.iter().cycle().take(ROUNDS) {
            now += Duration::from_micros(2);
            registrar.handle_asap(now, *from, message);
            while let Some(output) = registrar.poll_output() {
                black_box(&output);
            }
            if registrar.poll_timeout().is_some_and(|at| at <= now) {
                registrar.handle_timeout(now);
            }
        }
        best = best.min(start.elapsed().as_nanos() as f64 / ROUNDS as f64);
    }
    best
}

fn main() {
    for elements in [1_000u32, 10_000, 100_000] {
        for peers in [0, 1, 5] {
            let mut machine = registrar(elements, peers);
            let shuffled_index = |round: u32| round.wrapping_mul(48_271) % elements;
            let count = elements.max(10_000);
            let messages: Vec<_> = (0..count)
                .map(|round| {
                    let id = shuffled_index(round);
                    let load = round.wrapping_mul(0x9e37_79b9) & 0xf000_0000;
                    (AssociationId(u64::from(id)), registration(id, load))
                })
                .collect();
            let changed_ns = measure(&mut machine, &messages);
            let unchanged: Vec<_> = messages.iter().take(elements as usize).cloned().collect();
            let unchanged_ns = measure(&mut machine, &unchanged);
            let resolve = |machine: &mut Registrar, items| {
                let messages: Vec<_> = (0..10_000)
                    .map(|round| {
                        (
                            AssociationId(u64::from(shuffled_index(round))),
                            resolution(round, items),
                        )
                    })
                    .collect();
                measure(machine, &messages)
            };
            let (resolve_one_ns, resolve_three_ns) =
                (resolve(&mut machine, 1), resolve(&mut machine, 3));
            println!(
                "{elements:7} elements, {peers} peers: re-registration {changed_ns:5.0} ns, the same again {unchanged_ns:5.0} ns, resolution of 1 {resolve_one_ns:5.0} ns, of 3 {resolve_three_ns:5.0} ns"
            );
        }
    }
}
