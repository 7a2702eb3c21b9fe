//! Answers to queries, as a client reads them.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use holdfast_dns::{
    Endpoint, NameOwner, NameServer, Outcome, PublishedName, QueryTransport, Random, Responder,
    Response, ResponseLimit, SelectionRule, TransportProtocol, UDP_PAYLOAD_MAX, ZoneSettings,
};
use proptest::prelude::*;

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));
const SEED: u64 = 11;

fn settings() -> ZoneSettings {
    ZoneSettings {
        origin: "example.test".parse().unwrap(),
        ttl_s: 5,
        name_servers: vec![
            NameServer {
                label: "n1".parse().unwrap(),
                addresses: vec!["10.0.0.11".parse().unwrap()],
            },
            NameServer {
                label: "n2".parse().unwrap(),
                addresses: vec!["10.0.0.12".parse().unwrap(), "fd00::12".parse().unwrap()],
            },
        ],
    }
}

fn endpoint(address: &str, weight: u32, serves: bool) -> Endpoint {
    Endpoint {
        protocol: TransportProtocol::Tcp,
        address: address.parse().unwrap(),
        weight,
        serves,
    }
}

fn name(label: &str, rule: SelectionRule, endpoints: Vec<Endpoint>) -> PublishedName {
    PublishedName {
        owner: NameOwner::Below(label.parse().unwrap()),
        service: label.parse().unwrap(),
        rule,
        answers_max: match rule {
            SelectionRule::Rotate => usize::MAX,
            SelectionRule::Weighted => 1,
        },
        endpoints,
    }
}

fn responder_with(names: Vec<PublishedName>) -> Responder {
    let mut responder = unknowing_responder();
    responder.set_names(42, names);
    responder
}

fn unknowing_responder() -> Responder {
    Responder::new(
        settings(),
        ResponseLimit::new(100_000, SEED),
        Random::new(SEED),
    )
}

fn web() -> Vec<PublishedName> {
    let endpoints = vec![
        endpoint("10.9.0.1:80", 1, true),
        endpoint("10.8.0.1:80", 1, true),
        endpoint("10.7.0.1:80", 1, false),
        endpoint("[fd00:9::1]:80", 1, true),
    ];
    vec![name("web", SelectionRule::Rotate, endpoints)]
}

fn query(name: &str, record_type: RecordType) -> Message {
    let mut message = Message::new(0x1234, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), record_type));
    message
}

fn with_edns(mut message: Message, payload: u16) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(payload);
    message.set_edns(edns);
    message
}

fn respond(responder: &mut Responder, query: &Message, transport: QueryTransport) -> Response {
    let bytes = query.to_vec().unwrap();
    responder
        .handle_query(Duration::ZERO, CLIENT, transport, &bytes)
        .unwrap()
}

fn ask_message(responder: &mut Responder, query: &Message) -> Message {
    let response = respond(responder, query, QueryTransport::Udp);
    Message::from_vec(&response.bytes.unwrap()).unwrap()
}

fn ask(responder: &mut Responder, name: &str, record_type: RecordType) -> Message {
    ask_message(responder, &query(name, record_type))
}

fn addresses(records: &[Record]) -> Vec<String> {
    let address = |record: &Record| match &record.data {
        RData::A(address) => address.0.to_string(),
        RData::AAAA(address) => address.0.to_string(),
        other => panic!("{other:?}"),
    };
    records.iter().map(address).collect()
}

#[test]
fn addresses_rotate_and_those_that_do_not_serve_are_absent() {
    let mut responder = responder_with(web());
    let first = ask(&mut responder, "web.example.test.", RecordType::A);
    assert_eq!(first.response_code, ResponseCode::NoError);
    assert!(first.authoritative && first.recursion_desired && !first.recursion_available);
    assert_eq!(first.id, 0x1234);
    assert_eq!(addresses(&first.answers), ["10.9.0.1", "10.8.0.1"]);
    assert!(first.answers.iter().all(|record| record.ttl == 5));
    // A question for the other family in between has turns of its own.
    let other = ask(&mut responder, "web.example.test.", RecordType::AAAA);
    assert_eq!(addresses(&other.answers), ["fd00:9::1"]);
    let second = ask(&mut responder, "web.example.test.", RecordType::A);
    assert_eq!(addresses(&second.answers), ["10.8.0.1", "10.9.0.1"]);
}

#[test]
fn turns_continue_when_names_change() {
    let mut responder = responder_with(web());
    ask(&mut responder, "web.example.test.", RecordType::A);
    responder.set_names(43, web());
    let second = ask(&mut responder, "web.example.test.", RecordType::A);
    assert_eq!(addresses(&second.answers), ["10.8.0.1", "10.9.0.1"]);
}

#[test]
fn weighted_answers_follow_weights() {
    let endpoints = vec![
        endpoint("10.9.0.1:80", 3, true),
        endpoint("10.8.0.1:80", 1, true),
    ];
    let mut responder = responder_with(vec![name("web", SelectionRule::Weighted, endpoints)]);
    let mut heavy = 0;
    for _ in 0..4_000 {
        let answer = ask(&mut responder, "web.example.test.", RecordType::A);
        heavy += usize::from(addresses(&answer.answers) == ["10.9.0.1"]);
        assert_eq!(answer.answers.len(), 1);
    }
    assert!((2_850..3_150).contains(&heavy), "{heavy}");
}

#[test]
fn case_of_the_question_does_not_matter_and_comes_back() {
    let mut responder = responder_with(web());
    let answer = ask(&mut responder, "wEb.eXample.TEST.", RecordType::A);
    assert_eq!(answer.answers.len(), 2);
    assert_eq!(answer.queries[0].name().to_ascii(), "wEb.eXample.TEST.");
    assert_eq!(answer.answers[0].name.to_ascii(), "wEb.eXample.TEST.");
}

#[test]
fn service_records_name_one_host_for_each_address() {
    let mut responder = responder_with(web());
    for owner in ["_web._tcp.web.example.test.", "_WEB._tcp.example.test."] {
        let answer = ask(&mut responder, owner, RecordType::SRV);
        let mut targets: Vec<String> = (answer.answers.iter())
            .map(|record| match &record.data {
                RData::SRV(srv) => format!(
                    "{} {} {} {}",
                    srv.priority, srv.weight, srv.port, srv.target
                ),
                other => panic!("{other:?}"),
            })
            .collect();
        targets.sort();
        let expected = [
            "0 1 80 10-8-0-1.web.example.test.",
            "0 1 80 10-9-0-1.web.example.test.",
            "0 1 80 fd00-9-0-0-0-0-0-1.web.example.test.",
        ];
        assert_eq!(targets, expected);
        assert_eq!(answer.additionals.len(), 3);
    }
    let host = ask(&mut responder, "10-8-0-1.web.example.test.", RecordType::A);
    assert_eq!(addresses(&host.answers), ["10.8.0.1"]);
    let host = ask(
        &mut responder,
        "10-8-0-1.web.example.test.",
        RecordType::AAAA,
    );
    assert_eq!(
        (host.response_code, host.answers.len()),
        (ResponseCode::NoError, 0)
    );
    let dead = ask(&mut responder, "10-7-0-1.web.example.test.", RecordType::A);
    assert_eq!(dead.response_code, ResponseCode::ServFail);
}

#[test]
fn zone_has_its_own_records() {
    let mut responder = responder_with(web());
    let soa = ask(&mut responder, "example.test.", RecordType::SOA);
    let [
        Record {
            data: RData::SOA(soa),
            ..
        },
    ] = &soa.answers[..]
    else {
        panic!("{soa:?}");
    };
    assert_eq!((soa.serial, soa.minimum), (42, 5));
    assert_eq!(soa.mname.to_ascii(), "n1.ns.example.test.");
    let servers = ask(&mut responder, "example.test.", RecordType::NS);
    assert_eq!(servers.answers.len(), 2);
    assert_eq!(
        addresses(&servers.additionals),
        ["10.0.0.11", "10.0.0.12", "fd00::12"]
    );
    let glue = ask(&mut responder, "n2.ns.example.test.", RecordType::AAAA);
    assert_eq!(addresses(&glue.answers), ["fd00::12"]);
}

#[test]
fn name_of_the_zone_can_have_addresses() {
    let mut names = web();
    names[0].owner = NameOwner::Apex;
    let mut responder = responder_with(names);
    let answer = ask(&mut responder, "example.test.", RecordType::A);
    assert_eq!(answer.answers.len(), 2);
    let services = ask(&mut responder, "_web._tcp.example.test.", RecordType::SRV);
    assert_eq!(services.answers.len(), 3);
}

#[test]
fn negative_answers_tell_missing_names_from_missing_types() {
    let mut responder = responder_with(web());
    let cases = [
        (
            "nothing.example.test.",
            RecordType::A,
            ResponseCode::NXDomain,
        ),
        ("a.web.example.test.", RecordType::A, ResponseCode::NXDomain),
        (
            "_web._udp.example.test.",
            RecordType::SRV,
            ResponseCode::NXDomain,
        ),
        ("web.example.test.", RecordType::MX, ResponseCode::NoError),
        ("web.example.test.", RecordType::SRV, ResponseCode::NoError),
        ("example.test.", RecordType::A, ResponseCode::NoError),
        // Names without records that have names below them (RFC 8020).
        ("_tcp.example.test.", RecordType::A, ResponseCode::NoError),
        ("ns.example.test.", RecordType::ANY, ResponseCode::NoError),
    ];
    for (name, record_type, code) in cases {
        let answer = ask(&mut responder, name, record_type);
        assert_eq!(answer.response_code, code, "{name} {record_type}");
        assert!(answer.answers.is_empty() && answer.authoritative);
        let [soa] = &answer.authorities[..] else {
            panic!("{answer:?}");
        };
        assert_eq!((soa.record_type(), soa.ttl), (RecordType::SOA, 5));
    }
}

#[test]
fn name_without_a_serving_address_makes_resolvers_ask_elsewhere() {
    let endpoints = vec![
        endpoint("10.9.0.1:80", 1, false),
        endpoint("10.8.0.1:80", 0, true),
    ];
    let mut responder = responder_with(vec![name("web", SelectionRule::Rotate, endpoints)]);
    for (name, record_type) in [
        ("web.example.test.", RecordType::A),
        ("_web._tcp.example.test.", RecordType::SRV),
    ] {
        let answer = ask(&mut responder, name, record_type);
        assert_eq!(answer.response_code, ResponseCode::ServFail);
        assert!(
            answer.answers.is_empty() && answer.authorities.is_empty() && !answer.authoritative
        );
    }
    let absent = ask(&mut responder, "web.example.test.", RecordType::AAAA);
    assert_eq!(absent.response_code, ResponseCode::NoError);
}

#[test]
fn names_are_not_denied_before_they_are_known() {
    let mut responder = unknowing_responder();
    let answer = ask(&mut responder, "web.example.test.", RecordType::A);
    assert_eq!(answer.response_code, ResponseCode::ServFail);
    let soa = ask(&mut responder, "example.test.", RecordType::SOA);
    assert_eq!(soa.answers.len(), 1);
}

#[test]
fn other_zones_classes_and_transfers_are_refused() {
    let mut responder = responder_with(web());
    let mut chaos = query("version.bind.", RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    let queries = [
        query("web.example.org.", RecordType::A),
        query(".", RecordType::NS),
        query("test.", RecordType::SOA),
        query("example.test.", RecordType::AXFR),
        chaos,
    ];
    for query in queries {
        let answer = ask_message(&mut responder, &query);
        assert_eq!(answer.response_code, ResponseCode::Refused, "{query:?}");
        assert!(answer.answers.is_empty() && !answer.authoritative);
    }
}

#[test]
fn question_for_any_type_has_a_minimal_answer() {
    let mut responder = responder_with(web());
    let answer = ask(&mut responder, "web.example.test.", RecordType::ANY);
    let [
        Record {
            data: RData::HINFO(hinfo),
            ..
        },
    ] = &answer.answers[..]
    else {
        panic!("{answer:?}");
    };
    assert_eq!(&*hinfo.cpu, b"RFC8482");
    let absent = ask(&mut responder, "nothing.example.test.", RecordType::ANY);
    assert_eq!(absent.response_code, ResponseCode::NXDomain);
}

#[test]
fn long_answers_are_truncated_by_udp_alone() {
    let endpoints = (1..=60).map(|host| endpoint(&format!("10.9.0.{host}:80"), 1, true));
    let names = vec![name("web", SelectionRule::Rotate, endpoints.collect())];
    let mut responder = responder_with(names);
    let plain = query("web.example.test.", RecordType::A);
    let answer = ask_message(&mut responder, &plain);
    assert!(answer.truncation && answer.answers.is_empty());
    let answer = ask_message(&mut responder, &with_edns(plain.clone(), 4096));
    assert!(!answer.truncation);
    assert_eq!(answer.answers.len(), 60);
    assert_eq!(
        answer.edns.as_ref().map(Edns::max_payload),
        Some(UDP_PAYLOAD_MAX)
    );
    let response = respond(&mut responder, &plain, QueryTransport::Tcp);
    let answer = Message::from_vec(&response.bytes.unwrap()).unwrap();
    assert_eq!(answer.answers.len(), 60);
}

#[test]
fn additional_records_are_left_out_before_an_answer_is_truncated() {
    let endpoints = (1..=8).map(|host| endpoint(&format!("10.9.0.{host}:80"), 1, true));
    let names = vec![name("web", SelectionRule::Rotate, endpoints.collect())];
    let mut responder = responder_with(names);
    let answer = ask(&mut responder, "_web._tcp.example.test.", RecordType::SRV);
    assert!(!answer.truncation);
    assert_eq!((answer.answers.len(), answer.additionals.len()), (8, 0));
}

#[test]
fn later_versions_of_edns_are_refused() {
    let mut responder = responder_with(web());
    let mut query = with_edns(query("web.example.test.", RecordType::A), 1232);
    query.edns.as_mut().unwrap().set_version(1);
    let answer = ask_message(&mut responder, &query);
    assert_eq!(answer.response_code.low(), 0);
    assert_eq!(
        answer
            .edns
            .as_ref()
            .map(|edns| (edns.rcode_high(), edns.version())),
        Some((1, 0))
    );
    assert!(answer.answers.is_empty());
}

#[test]
fn malformed_queries_get_an_error_and_answers_get_none() {
    let mut responder = responder_with(web());
    let mut code_of = |bytes: &[u8]| {
        let response = responder.handle_query(Duration::ZERO, CLIENT, QueryTransport::Udp, bytes);
        response.map(|response| {
            assert_eq!(response.outcome, Outcome::Invalid);
            Message::from_vec(&response.bytes.unwrap())
                .unwrap()
                .response_code
        })
    };
    let valid = query("web.example.test.", RecordType::A).to_vec().unwrap();
    assert_eq!(
        code_of(&valid[..valid.len() - 1]),
        Some(ResponseCode::FormErr)
    );
    let mut many_questions = valid.clone();
    many_questions[4..6].fill(0xff);
    assert_eq!(code_of(&many_questions), Some(ResponseCode::FormErr));
    let mut update = valid.clone();
    update[2] = 5 << 3;
    assert_eq!(code_of(&update), Some(ResponseCode::NotImp));
    let mut answer = valid.clone();
    answer[2] |= 0x80;
    assert_eq!(code_of(&answer), None);
    assert_eq!(code_of(&valid[..11]), None);
}

#[test]
fn answers_to_one_network_are_limited_by_udp_alone() {
    let mut responder = Responder::new(settings(), ResponseLimit::new(3, SEED), Random::new(SEED));
    responder.set_names(1, web());
    let query = query("web.example.test.", RecordType::A);
    for _ in 0..3 {
        let response = respond(&mut responder, &query, QueryTransport::Udp);
        assert_eq!(response.outcome, Outcome::Answered);
    }
    let truncated = respond(&mut responder, &query, QueryTransport::Udp);
    assert_eq!(truncated.outcome, Outcome::Limited);
    let bytes = truncated.bytes.unwrap();
    assert_eq!(bytes.len(), query.to_vec().unwrap().len());
    assert!(Message::from_vec(&bytes).unwrap().truncation);
    let dropped = respond(&mut responder, &query, QueryTransport::Udp);
    assert_eq!((dropped.outcome, dropped.bytes), (Outcome::Limited, None));
    let by_tcp = respond(&mut responder, &query, QueryTransport::Tcp);
    assert_eq!(by_tcp.outcome, Outcome::Answered);
}

#[test]
fn response_names_the_configured_name_alone() {
    let mut responder = responder_with(web());
    let mut name_of = |name: &str, record_type| {
        respond(
            &mut responder,
            &query(name, record_type),
            QueryTransport::Udp,
        )
        .name
    };
    let web = Some(NameOwner::Below("web".parse().unwrap()));
    assert_eq!(name_of("web.example.test.", RecordType::MX), web);
    assert_eq!(name_of("_web._tcp.example.test.", RecordType::SRV), web);
    assert_eq!(name_of("nothing.example.test.", RecordType::A), None);
    assert_eq!(name_of("example.test.", RecordType::SOA), None);
}

fn any_record_type() -> impl Strategy<Value = RecordType> {
    any::<u16>().prop_map(RecordType::from)
}

fn any_endpoint() -> impl Strategy<Value = Endpoint> {
    let hosts = 1_u8..40;
    (hosts, any::<bool>(), 0_u32..4, any::<bool>()).prop_map(|(host, is_v4, weight, serves)| {
        let address = match is_v4 {
            true => format!("10.9.0.{host}:80"),
            false => format!("[fd00::{host}]:80"),
        };
        endpoint(&address, weight, serves)
    })
}

proptest! {
    #[test]
    fn any_bytes_are_handled(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut responder = responder_with(web());
        for transport in [QueryTransport::Udp, QueryTransport::Tcp] {
            let response = responder.handle_query(Duration::ZERO, CLIENT, transport, &bytes);
            if let Some(answer) = response.and_then(|response| response.bytes) {
                prop_assert_eq!(&answer[..2], &bytes[..2]);
                prop_assert!(answer[2] & 0x80 != 0);
            }
        }
    }

    #[test]
    fn changed_queries_get_answers_within_bounds(
        position in 0_usize..60,
        byte in any::<u8>(),
        payload in any::<u16>(),
        record_type in any_record_type(),
    ) {
        let mut responder = responder_with(web());
        let query = with_edns(query("web.example.test.", record_type), payload);
        let mut bytes = query.to_vec().unwrap();
        let position = position % bytes.len();
        bytes[position] = byte;
        let response = responder.handle_query(Duration::ZERO, CLIENT, QueryTransport::Udp, &bytes);
        if let Some(answer) = response.and_then(|response| response.bytes) {
            prop_assert!(answer.len() <= usize::from(UDP_PAYLOAD_MAX));
            prop_assert_eq!(&answer[..2], &bytes[..2]);
            prop_assert!(Message::from_vec(&answer).is_ok());
        }
    }

    #[test]
    fn answers_have_only_addresses_that_serve(
        endpoints in prop::collection::vec(any_endpoint(), 0..20),
        is_weighted in any::<bool>(),
        record_type in prop::sample::select(vec![RecordType::A, RecordType::AAAA]),
    ) {
        let rule = if is_weighted { SelectionRule::Weighted } else { SelectionRule::Rotate };
        let mut responder = responder_with(vec![name("web", rule, endpoints.clone())]);
        let query = with_edns(query("web.example.test.", record_type), 1232);
        let answer = ask_message(&mut responder, &query);
        let is_asked = |endpoint: &&Endpoint| endpoint.address.is_ipv4() == (record_type == RecordType::A);
        let of_family: Vec<&Endpoint> = endpoints.iter().filter(is_asked).collect();
        let serving = |address: &String| {
            of_family.iter().any(|endpoint| endpoint.serves && endpoint.address.ip().to_string() == *address)
        };
        let found = addresses(&answer.answers);
        prop_assert!(found.iter().all(serving));
        match answer.response_code {
            ResponseCode::NoError => prop_assert_eq!(found.is_empty(), of_family.is_empty()),
            ResponseCode::ServFail => prop_assert!(!of_family.is_empty() && found.is_empty()),
            other => prop_assert!(false, "{}", other),
        }
    }
}
