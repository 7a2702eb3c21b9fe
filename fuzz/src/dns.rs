//! DNS queries to the server of a group's names.

use holdfast_dns::{
    GroupService, NameServer, Outcome, QueryTransport, Random, Responder, ResponseLimit,
    TransportProtocol, UDP_PAYLOAD_MAX, ZoneSettings, published_names,
};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));
/// Number of addresses of the name `many`, whose answer is truncated.
const MANY: u8 = 90;

/// Answers any bytes by UDP and TCP. Answers carry the query's id, are marked as answers, and those by UDP have bounds.
/// Returns true if the bytes are a query.
pub fn run(data: &[u8]) -> bool {
    let mut responder = responder();
    let mut is_query = false;
    for transport in [QueryTransport::Udp, QueryTransport::Tcp] {
        let response = responder.handle_query(Duration::ZERO, CLIENT, transport, data);
        let Some(response) = response else {
            continue;
        };
        is_query = response.outcome != Outcome::Invalid;
        let answer = response.bytes.expect("an answer within the limit");
        assert_eq!(answer[..2], data[..2]);
        assert_ne!(answer[2] & 0x80, 0);
        let is_within_bounds = answer.len() <= usize::from(UDP_PAYLOAD_MAX);
        assert!(is_within_bounds || transport == QueryTransport::Tcp);
        let echo = responder.handle_query(Duration::ZERO, CLIENT, transport, &answer);
        assert_eq!(echo, None, "an answer gets no answer");
    }
    is_query
}

fn responder() -> Responder {
    let settings = ZoneSettings {
        origin: "example.test".parse().expect("a zone name"),
        ttl_s: 5,
        name_servers: vec![NameServer {
            label: "n1".parse().expect("a label"),
            addresses: vec![CLIENT],
        }],
    };
    let service = |name: &str, host: u8| GroupService {
        name: name.parse().expect("a label"),
        protocol: TransportProtocol::Tcp,
        address: ([10, 9, 0, host], 80).into(),
        serves: host != 2,
    };
    let mut services = vec![service("web", 1), service("web", 2), service("down", 2)];
    services.extend((3..3 + MANY).map(|host| service("many", host)));
    let mut responder = Responder::new(settings, ResponseLimit::new(100, 1), Random::new(1));
    responder.set_names(1, published_names(&[], &services, |_, _| false));
    responder
}

/// Returns queries for the corpus.
pub fn examples() -> Vec<(&'static str, Vec<u8>)> {
    let edns = [0, 0, 41, 16, 0, 0, 0, 0x80, 0, 0, 0];
    vec![
        ("a", query(&["web", "example", "test"], 1, &[])),
        ("aaaa-edns", query(&["WEB", "example", "test"], 28, &edns)),
        ("any", query(&["down", "example", "test"], 255, &edns)),
        ("many", query(&["many", "example", "test"], 1, &[])),
        ("ns", query(&["example", "test"], 2, &[])),
        ("other-zone", query(&["example", "org"], 1, &[])),
        ("srv", query(&["_web", "_tcp", "example", "test"], 33, &[])),
    ]
}

fn query(labels: &[&str], record_type: u8, additional: &[u8]) -> Vec<u8> {
    let count = u8::from(!additional.is_empty());
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, count];
    for label in labels {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, record_type, 0, 1]);
    bytes.extend(additional);
    bytes
}
