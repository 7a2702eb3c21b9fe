//! The server over loopback sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use holdfast_dns::{
    ConfiguredAddress, ConfiguredName, GroupService, NameOwner, NameServer, SelectionRule,
    TransportProtocol, ZoneSettings,
};

use super::{DnsFeed, start};
use crate::config::DnsConfig;
use crate::metrics::Metrics;

struct Running {
    feed: DnsFeed,
    address: SocketAddr,
    metrics: Metrics,
}

fn start_with(names: Vec<ConfiguredName>) -> Running {
    let loopback = "127.0.0.1:0".parse().unwrap();
    let config = DnsConfig {
        listen: vec![loopback],
        zone: ZoneSettings {
            origin: "example.test".parse().unwrap(),
            ttl_s: 5,
            name_servers: vec![NameServer {
                label: "n1".parse().unwrap(),
                addresses: vec![loopback.ip()],
            }],
        },
        responses_per_s: 1_000,
        names,
    };
    let metrics = Metrics::new();
    let (feed, addresses) = start(&config, metrics.clone()).unwrap();
    Running {
        feed,
        address: addresses[0],
        metrics,
    }
}

fn query(name: &str) -> Vec<u8> {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    message.to_vec().unwrap()
}

impl Running {
    fn ask(&self, name: &str) -> Message {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        socket.send_to(&query(name), self.address).unwrap();
        let mut buffer = [0; 2_000];
        let (length, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!(from, self.address);
        Message::from_vec(&buffer[..length]).unwrap()
    }

    fn ask_until(&self, name: &str, is_expected: impl Fn(&Message) -> bool) -> Message {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let answer = self.ask(name);
            if is_expected(&answer) {
                return answer;
            }
            assert!(Instant::now() < end, "{answer:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn service(name: &str, address: &str, serves: bool) -> GroupService {
    GroupService {
        name: name.parse().unwrap(),
        protocol: TransportProtocol::Tcp,
        address: address.parse().unwrap(),
        serves,
    }
}

fn addresses(answer: &Message) -> Vec<String> {
    let address = |data: &RData| match data {
        RData::A(address) => address.0.to_string(),
        other => panic!("{other:?}"),
    };
    answer
        .answers
        .iter()
        .map(|record| address(&record.data))
        .collect()
}

#[test]
fn addresses_follow_the_engine() {
    let server = start_with(Vec::new());
    let unknown = server.ask("web.example.test.");
    assert_eq!(unknown.response_code, ResponseCode::ServFail);
    let first = service("web", "10.9.0.1:80", true);
    let second = service("web", "10.9.0.2:80", true);
    server.feed.publish(vec![first.clone(), second.clone()]);
    let answer = server.ask_until("web.example.test.", |answer| answer.answers.len() == 2);
    let next = server.ask("web.example.test.");
    assert_eq!(
        addresses(&next)[0],
        addresses(&answer)[1],
        "the addresses take turns"
    );
    let dead = GroupService {
        serves: false,
        ..first
    };
    server.feed.publish(vec![dead, second]);
    let answer = server.ask_until("web.example.test.", |answer| answer.answers.len() == 1);
    assert_eq!(addresses(&answer), ["10.9.0.2"]);
    let missing = server.ask("other.example.test.");
    assert_eq!(missing.response_code, ResponseCode::NXDomain);
    let text = server.metrics.encode();
    assert!(
        text.contains("holdfast_dns_queries_total{name=\"web\"}"),
        "{text}"
    );
    assert!(
        text.contains("holdfast_dns_responses_total{outcome=\"no_such_name\"} 1\n"),
        "{text}"
    );
    assert!(
        !text.contains("other"),
        "names of strangers are no labels: {text}"
    );
}

#[test]
fn addresses_of_other_groups_are_checked_by_connecting() {
    let remote = TcpListener::bind("127.0.0.2:0").unwrap();
    let port = remote.local_addr().unwrap().port();
    let configured = |address: &str| ConfiguredAddress {
        address: address.parse().unwrap(),
        weight: 1,
    };
    let server = start_with(vec![ConfiguredName {
        owner: NameOwner::Below("www".parse().unwrap()),
        service: "http".parse().unwrap(),
        protocol: TransportProtocol::Tcp,
        port,
        rule: SelectionRule::Rotate,
        answers_max: 64,
        addresses: vec![configured("10.9.0.1"), configured("127.0.0.2")],
    }]);
    // No connection to the group's own address would succeed here.
    server
        .feed
        .publish(vec![service("web", &format!("10.9.0.1:{port}"), true)]);
    server.ask_until("www.example.test.", |answer| answer.answers.len() == 2);
    drop(remote);
    let answer = server.ask_until("www.example.test.", |answer| answer.answers.len() == 1);
    assert_eq!(addresses(&answer), ["10.9.0.1"]);
}

#[test]
fn queries_by_tcp_get_answers_in_their_order() {
    let server = start_with(Vec::new());
    let services = (1..=60).map(|host| service("web", &format!("10.9.0.{host}:80"), true));
    server.feed.publish(services.collect());
    server.ask_until("web.example.test.", |answer| answer.truncation);
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let framed = |name: &str| {
        let query = query(name);
        [
            &u16::try_from(query.len()).unwrap().to_be_bytes()[..],
            &query,
        ]
        .concat()
    };
    let names = ["web.example.test.", "nothing.example.test."];
    stream.write_all(&names.map(framed).concat()).unwrap();
    let mut read_answer = || {
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut answer).unwrap();
        Message::from_vec(&answer).unwrap()
    };
    assert_eq!(read_answer().answers.len(), 60);
    assert_eq!(read_answer().response_code, ResponseCode::NXDomain);
    // A message that is longer than any query ends the connection.
    stream.write_all(&[0xff, 0xff]).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn server_ends_with_the_feed() {
    let server = start_with(Vec::new());
    let address = server.address;
    drop(server);
    let end = Instant::now() + Duration::from_secs(5);
    while UdpSocket::bind(address).is_err() {
        assert!(Instant::now() < end, "the socket stays");
        std::thread::sleep(Duration::from_millis(20));
    }
}
