//! Tests of resolution, rule by rule, with one registrar.

mod probing;
mod session;

use super::*;
use holdfast_wire::rserpool::{
    CauseCode, ErrorCause, Policy, PoolElement, SctpTransport, TransportUse,
};
use std::net::{IpAddr, Ipv4Addr};

fn transport(port: u16) -> Transport {
    Transport::Sctp(SctpTransport {
        port,
        usage: TransportUse::DataAndControl,
        addresses: [IpAddr::V4(Ipv4Addr::LOCALHOST)].into_iter().collect(),
    })
}

fn handle() -> PoolHandle {
    PoolHandle::from("pool")
}

/// Returns an element at the port of its identifier.
fn element(id: u32) -> PoolElement {
    PoolElement {
        id: ElementId(id),
        home: RegistrarId(1),
        registration_life: 300,
        user_transport: transport(id as u16),
        policy: Policy::RoundRobin,
        asap_transport: None,
    }
}

/// A user with its clock, its home registrar's link and its events.
struct TestBench {
    user: PoolUser,
    now: Duration,
    home: LinkId,
    events: Vec<Event>,
    /// Links made and their addresses, since the last check.
    connects: Vec<(LinkId, Transport)>,
}

const REGISTRAR: u16 = 3863;

impl TestBench {
    fn new() -> TestBench {
        let hunt = ServerHuntConfig::new(vec![transport(REGISTRAR)]);
        TestBench {
            user: PoolUser::new(PoolUserConfig::new(hunt, [4; 32])),
            now: Duration::from_secs(1_000),
            home: LinkId::Initiated(0),
            events: Vec::new(),
            connects: Vec::new(),
        }
    }

    /// Returns a user that knows elements 1 to 3.
    fn with_known_pool() -> TestBench {
        let mut bench = TestBench::new();
        // Watched and not resolved, so that no element counts as selected.
        bench.user.handle_watch(bench.now, handle());
        bench.take_sent();
        bench.user.handle_unwatch(&handle());
        bench.deliver_answer((1..4).map(element).collect());
        bench.take_sent();
        bench.events.clear();
        bench
    }

    /// Carries out the outputs; returns the messages sent. Registrars are reached at once.
    fn take_sent(&mut self) -> Vec<(LinkId, Message)> {
        let mut sent = Vec::new();
        while let Some(output) = self.user.poll_output() {
            match output {
                Output::Send { link, message } => sent.push((link, message)),
                Output::Connect { link, to } if to == transport(REGISTRAR) => {
                    self.home = link;
                    self.user.handle_connected(self.now, link);
                }
                Output::Connect { link, to } => self.connects.push((link, to)),
                Output::Close { .. } => {}
                Output::Event(event) => self.events.push(event),
            }
        }
        sent
    }

    fn deliver(&mut self, message: Message) {
        self.user.handle_message(self.now, self.home, message);
    }

    fn deliver_answer(&mut self, elements: Vec<PoolElement>) {
        self.deliver(Message::HandleResolutionResponse {
            updates: false,
            handle: handle(),
            policy: None,
            elements,
            causes: Vec::new(),
        });
    }

    fn deliver_refusal(&mut self) {
        self.deliver(Message::HandleResolutionResponse {
            updates: false,
            handle: handle(),
            policy: None,
            elements: Vec::new(),
            causes: vec![ErrorCause::from(CauseCode::UNKNOWN_POOL_HANDLE)],
        });
    }

    fn advance_time(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.user.poll_timeout()
            && due <= end
        {
            self.now = due.max(self.now);
            self.user.handle_timeout(self.now);
        }
        self.now = end;
    }

    /// Requests an element; returns its identifier, if the answer is there at once.
    fn select(&mut self) -> Option<u32> {
        let request_id = self.user.handle_select(self.now, handle());
        let requests = self.take_sent();
        assert!(requests.len() <= 1, "{requests:?}");
        match self.events.pop() {
            Some(Event::Selected { request, element }) if request == request_id => {
                Some(element.id.0)
            }
            Some(other) => panic!("{other:?}"),
            None => None,
        }
    }

    /// Returns a session that is up, with its link and element.
    fn open_session(&mut self) -> (SessionId, LinkId, u32) {
        let id = self.user.handle_open(self.now, handle(), None);
        self.take_sent();
        let (link, to) = self.connects.pop().expect("a link to an element");
        self.user.handle_connected(self.now, link);
        self.take_sent();
        (id, link, port(&to))
    }
}

fn port(transport: &Transport) -> u32 {
    match transport {
        Transport::Sctp(transport) => transport.port.into(),
        other => panic!("{other:?}"),
    }
}

fn is_report(message: &Message, id: u32) -> bool {
    matches!(message, Message::EndpointUnreachable { id: ElementId(element), .. } if *element == id)
}

fn is_resolution(message: &Message) -> bool {
    matches!(message, Message::HandleResolution { .. })
}

#[test]
fn fresh_answer_is_used_round_robin() {
    let mut bench = TestBench::with_known_pool();
    let chosen: Vec<_> = (0..7).map(|_| bench.select()).collect();
    assert_eq!(chosen, [1, 2, 3, 1, 2, 3, 1].map(Some));
}

#[test]
fn stale_answer_is_used_and_renewed_and_expired_one_is_not_used() {
    let mut bench = TestBench::with_known_pool();
    bench.advance_time(bench.user.config.cache_fresh_for);
    bench.user.handle_select(bench.now, handle());
    bench.user.handle_select(bench.now, handle());
    let sent = bench.take_sent();
    assert_eq!(sent.len(), 1, "one question for both: {sent:?}");
    assert!(is_resolution(&sent[0].1));
    assert_eq!(bench.events.len(), 2);
    bench.deliver_answer(vec![element(9)]);
    bench.events.clear();
    assert_eq!(bench.select(), Some(9));
    bench.advance_time(bench.user.config.cache_usable_for);
    assert_eq!(bench.select(), None);
    assert!(bench.user.pools.is_empty(), "nobody needed it");
}

#[test]
fn all_waiting_requests_get_answer_or_error() {
    let mut bench = TestBench::new();
    for _ in 0..3 {
        bench.user.handle_select(bench.now, handle());
    }
    assert_eq!(bench.take_sent().len(), 1);
    bench.deliver_refusal();
    bench.take_sent();
    let unknown = |event: &&Event| {
        matches!(
            event,
            Event::RequestFailed {
                error: ResolveError::UnknownPool,
                ..
            }
        )
    };
    assert_eq!(bench.events.iter().filter(unknown).count(), 3);
}

#[test]
fn unanswered_request_tries_other_registrars_and_then_fails() {
    let mut bench = TestBench::new();
    bench.user.handle_select(bench.now, handle());
    let mut homes = vec![];
    for _ in 0..3 {
        assert_eq!(bench.take_sent().len(), 1);
        homes.push(bench.home);
        bench.advance_time(bench.user.config.answer_timeout);
    }
    homes.dedup();
    assert_eq!(homes.len(), 3);
    assert!(bench.take_sent().is_empty());
    let end = |event: &Event| {
        matches!(
            event,
            Event::RequestFailed {
                error: ResolveError::Unanswered,
                ..
            }
        )
    };
    assert!(bench.events.iter().any(end));
}

#[test]
fn request_fails_without_registrar() {
    let mut bench = TestBench::new();
    bench.user = PoolUser::new(PoolUserConfig::new(
        ServerHuntConfig::new(Vec::new()),
        [1; 32],
    ));
    bench.user.handle_select(bench.now, handle());
    bench.advance_time(Duration::from_secs(10));
    bench.take_sent();
    let end = |event: &Event| {
        matches!(
            event,
            Event::RequestFailed {
                error: ResolveError::NoRegistrar,
                ..
            }
        )
    };
    assert!(bench.events.iter().any(end));
}

#[test]
fn unreachable_element_is_reported_once_and_excluded_temporarily() {
    let mut bench = TestBench::with_known_pool();
    bench
        .user
        .handle_unreachable(bench.now, &handle(), ElementId(1));
    assert!(bench.take_sent().is_empty(), "nobody was sent to it");
    assert_eq!(bench.select(), Some(1));
    for _ in 0..5 {
        bench
            .user
            .handle_unreachable(bench.now, &handle(), ElementId(1));
    }
    let sent = bench.take_sent();
    assert_eq!(sent.len(), 1);
    assert!(is_report(&sent[0].1, 1));
    let chosen: Vec<_> = (0..4).map(|_| bench.select()).collect();
    assert_eq!(chosen, [2, 3, 2, 3].map(Some));
    // An answer that still names the element does not bring it back, but time does; the second time takes longer.
    bench.deliver_answer((1..4).map(element).collect());
    assert_eq!(bench.select(), Some(2));
    bench.advance_time(bench.user.config.unreachable_for);
    assert_eq!(bench.select(), Some(1));
    bench
        .user
        .handle_unreachable(bench.now, &handle(), ElementId(1));
    bench.take_sent();
    bench.advance_time(bench.user.config.unreachable_for);
    assert_ne!(bench.select(), Some(1));
}

#[test]
fn full_resolution_allows_reports_and_limits_items() {
    let mut bench = TestBench::with_known_pool();
    bench
        .user
        .handle_resolve_uncached(bench.now, handle(), Some(64));
    let sent = bench.take_sent();
    assert!(
        matches!(
            sent[..],
            [(
                _,
                Message::HandleResolution {
                    items_max: Some(64),
                    ..
                }
            )]
        ),
        "resolved although the pool is known: {sent:?}"
    );
    bench.deliver_answer((1..4).map(element).collect());
    bench
        .user
        .handle_unreachable(bench.now, &handle(), ElementId(3));
    let sent = bench.take_sent();
    assert!(matches!(&sent[..], [(_, report)] if is_report(report, 3)));
}

#[test]
fn report_waits_for_registrar() {
    let mut bench = TestBench::with_known_pool();
    bench.select();
    bench.user.handle_lost(bench.now, bench.home);
    let Some(Output::Connect { link, .. }) = bench.user.poll_output() else {
        panic!("no hunt");
    };
    bench
        .user
        .handle_unreachable(bench.now, &handle(), ElementId(1));
    assert!(bench.take_sent().is_empty());
    bench.user.handle_connected(bench.now, link);
    let sent = bench.take_sent();
    assert!(matches!(&sent[..], [(at, report)] if *at == link && is_report(report, 1)));
}

#[test]
fn messages_from_other_links_are_ignored() {
    let mut bench = TestBench::with_known_pool();
    let home = std::mem::replace(&mut bench.home, LinkId::Accepted(1));
    bench.deliver_answer(vec![element(9)]);
    bench.home = home;
    assert_eq!(bench.select(), Some(1));
    // An unrequested answer about another pool is not kept either.
    bench.deliver(Message::HandleResolutionResponse {
        updates: false,
        handle: PoolHandle::from("other"),
        policy: None,
        elements: vec![element(9)],
        causes: Vec::new(),
    });
    assert_eq!(bench.user.pools.len(), 1);
}

#[test]
fn watched_pool_is_refreshed_and_changes_are_reported() {
    let mut bench = TestBench::new();
    bench.user.handle_watch(bench.now, handle());
    assert!(matches!(
        bench.take_sent()[..],
        [(_, Message::HandleResolution { updates: true, .. })]
    ));
    bench.deliver_answer(vec![element(1)]);
    for elements in [vec![element(1)], vec![element(1), element(2)]] {
        bench.advance_time(bench.user.config.cache_fresh_for);
        assert_eq!(bench.take_sent().len(), 1);
        bench.deliver_answer(elements);
    }
    bench.take_sent();
    let counts: Vec<usize> = bench
        .events
        .iter()
        .filter_map(|event| match event {
            Event::PoolChanged { elements, .. } => Some(elements.len()),
            _ => None,
        })
        .collect();
    assert_eq!(counts, [1, 2], "an unchanged list is not reported");
}
