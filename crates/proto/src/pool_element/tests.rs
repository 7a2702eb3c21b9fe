//! Tests of registration, rule by rule, with one registrar.

use super::*;
use holdfast_wire::rserpool::{CauseCode, ErrorCause, PoolHandle, SctpTransport, TransportUse};
use std::net::{IpAddr, Ipv4Addr};

const LIFE: Duration = Duration::from_secs(300);

fn transport(port: u16) -> Transport {
    Transport::Sctp(SctpTransport {
        port,
        usage: TransportUse::DataOnly,
        addresses: [IpAddr::V4(Ipv4Addr::LOCALHOST)].into_iter().collect(),
    })
}

fn handle() -> PoolHandle {
    PoolHandle::from("pool")
}

/// An element with its clock and its home registrar's link.
struct TestBench {
    element: PoolElement,
    now: Duration,
    home: LinkId,
    events: Vec<Event>,
}

impl TestBench {
    /// Returns an element that is connected to a registrar and has sent its registration.
    fn new() -> TestBench {
        let hunt = ServerHuntConfig::new(vec![transport(1)]);
        let policy = Policy::LeastUsed { load: 1 };
        let mut config = PoolElementConfig::new(handle(), transport(80), policy, hunt, [4; 32]);
        config.life_unit = LifeUnit::Seconds;
        let mut bench = TestBench {
            element: PoolElement::new(config),
            now: Duration::from_secs(1_000),
            home: LinkId::Initiated(0),
            events: Vec::new(),
        };
        bench.element.handle_register(bench.now);
        bench.connect();
        bench
    }

    fn new_registered() -> TestBench {
        let mut bench = TestBench::new();
        bench.registration();
        bench.send_acceptance();
        bench
    }

    /// Carries out the outputs; returns the messages sent.
    fn take_sent(&mut self) -> Vec<(LinkId, Message)> {
        let mut sent = Vec::new();
        while let Some(output) = self.element.poll_output() {
            match output {
                Output::Send { link, message } => sent.push((link, message)),
                Output::Connect { link, .. } => self.home = link,
                Output::Close { .. } => {}
                Output::Event(event) => self.events.push(event),
            }
        }
        sent
    }

    fn connect(&mut self) {
        assert!(self.take_sent().is_empty());
        self.element.handle_connected(self.now, self.home);
    }

    /// Returns the registration that is sent, and checks that it is the only message.
    fn registration(&mut self) -> holdfast_wire::rserpool::PoolElement {
        let sent = self.take_sent();
        let [(link, Message::Registration { element, .. })] = &sent[..] else {
            panic!("{sent:?}");
        };
        assert_eq!(*link, self.home);
        element.clone()
    }

    fn send_response(&mut self, rejected: bool, causes: Vec<ErrorCause>) {
        let id = self.element.id();
        self.deliver(Message::RegistrationResponse {
            rejected,
            handle: handle(),
            id,
            causes,
        });
    }

    fn send_acceptance(&mut self) {
        self.send_response(false, Vec::new());
    }

    fn deliver(&mut self, message: Message) {
        self.element.handle_message(self.now, self.home, message);
    }

    fn advance_time(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.element.poll_timeout()
            && due <= end
        {
            self.now = due.max(self.now);
            self.element.handle_timeout(self.now);
        }
        self.now = end;
    }

    fn keep_alive(
        &mut self,
        link: LinkId,
        home: bool,
        handle: PoolHandle,
    ) -> Vec<(LinkId, Message)> {
        let message = Message::EndpointKeepAlive {
            home,
            registrar: RegistrarId(9),
            handle,
            id: None,
        };
        self.element.handle_message(self.now, link, message);
        self.take_sent()
    }
}

#[test]
fn element_reregisters_before_life_ends() {
    let mut bench = TestBench::new();
    let first = bench.registration();
    assert_eq!(first.registration_life, 300, "seconds");
    bench.send_acceptance();
    assert!(bench.take_sent().is_empty());
    assert!(matches!(
        bench.events.last(),
        Some(Event::Registered { .. })
    ));
    let wait = bench.element.poll_timeout().expect("T4 runs") - bench.now;
    let wait_max = LIFE - Duration::from_secs(20);
    assert!(wait_max * 9 / 10 <= wait && wait <= wait_max, "{wait:?}");
    bench.advance_time(wait);
    assert_eq!(bench.registration().id, first.id);
    bench.send_acceptance();
    let events = bench.events.len();
    bench.take_sent();
    assert_eq!(bench.events.len(), events, "a renewal causes no event");
}

#[test]
fn conflicting_identifier_is_replaced_a_limited_number_of_times() {
    let mut bench = TestBench::new();
    let mut ids = vec![bench.registration().id];
    let conflict = || vec![ErrorCause::from(CauseCode::NON_UNIQUE_ELEMENT_ID)];
    for _ in 1..8 {
        bench.send_response(true, conflict());
        ids.push(bench.registration().id);
    }
    bench.send_response(true, conflict());
    assert!(bench.take_sent().is_empty());
    assert!(matches!(
        bench.events.last(),
        Some(Event::RegistrationRefused(_))
    ));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 8);
}

#[test]
fn refused_registration_is_not_retried_until_requested() {
    let mut bench = TestBench::new();
    bench.registration();
    let causes = vec![ErrorCause::from(CauseCode::INCONSISTENT_POLICY)];
    bench.send_response(true, causes);
    assert!(bench.take_sent().is_empty());
    let text = match bench.events.last() {
        Some(Event::RegistrationRefused(refusal)) => refusal.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(text.contains("policy differs"), "{text}");
    assert_eq!(bench.element.poll_timeout(), None);
    bench.element.handle_register(bench.now);
    bench.connect();
    bench.registration();
}

#[test]
fn unanswered_registration_goes_to_another_registrar() {
    let mut bench = TestBench::new();
    bench.registration();
    let (old, timeout) = (bench.home, bench.element.config.answer_timeout);
    bench.advance_time(timeout);
    bench.connect();
    assert_ne!(bench.home, old);
    bench.registration();
    bench.advance_time(timeout);
    bench.connect();
    bench.registration();
    assert!(bench.events.contains(&Event::Unanswered { attempts: 2 }));
    // A late answer of the old registrar is ignored.
    let late_response = Message::RegistrationResponse {
        rejected: false,
        handle: handle(),
        id: bench.element.id(),
        causes: Vec::new(),
    };
    bench.element.handle_message(bench.now, old, late_response);
    assert!(!bench.element.is_registered());
}

#[test]
fn rapid_policy_updates_cause_one_registration() {
    let mut bench = TestBench::new_registered();
    for load in 2..50 {
        let policy = Policy::LeastUsed { load };
        bench
            .element
            .handle_policy(bench.now, policy)
            .expect("the same kind");
    }
    assert!(bench.take_sent().is_empty(), "too soon after the last");
    bench.advance_time(bench.element.config.update_interval);
    assert_eq!(bench.registration().policy, Policy::LeastUsed { load: 49 });
    bench.send_acceptance();
    bench.advance_time(Duration::from_secs(10));
    assert!(bench.take_sent().is_empty());
    let other = bench.element.handle_policy(bench.now, Policy::Random);
    assert!(other.is_err());
}

#[test]
fn keep_alive_is_answered_and_may_change_home() {
    let mut bench = TestBench::new_registered();
    bench.take_sent();
    let (home, accepted_link) = (bench.home, LinkId::Accepted(3));
    assert!(
        bench
            .keep_alive(accepted_link, true, PoolHandle::from("other"))
            .is_empty(),
        "KA1"
    );
    assert_eq!(bench.keep_alive(home, false, handle()).len(), 1);
    let sent = bench.keep_alive(accepted_link, true, handle());
    let ack = Message::EndpointKeepAliveAck {
        handle: handle(),
        id: bench.element.id(),
    };
    assert_eq!(sent, [(accepted_link, ack)]);
    assert_eq!(bench.element.home(), Some(RegistrarId(9)));
    // Later requests go to the new home.
    bench.advance_time(LIFE);
    assert!(
        matches!(bench.take_sent()[..], [(link, Message::Registration { .. }), ..] if link == accepted_link)
    );
}

#[test]
fn lost_registrar_is_replaced_and_gets_registration() {
    let mut bench = TestBench::new_registered();
    bench.take_sent();
    bench.element.handle_lost(bench.now, bench.home);
    bench.connect();
    bench.registration();
    assert!(bench.element.is_registered(), "until its life ends");
}

#[test]
fn expired_registration_is_reported_and_renewed() {
    let mut bench = TestBench::new_registered();
    bench.take_sent();
    let end = Message::DeregistrationResponse {
        handle: handle(),
        id: bench.element.id(),
        causes: Vec::new(),
    };
    bench.deliver(end);
    bench.take_sent();
    assert_eq!(bench.events.last(), Some(&Event::RegistrationExpired));
    bench.advance_time(Duration::from_secs(1));
    bench.registration();

    let mut disconnected = TestBench::new_registered();
    disconnected
        .element
        .handle_lost(disconnected.now, disconnected.home);
    disconnected.take_sent();
    disconnected.advance_time(LIFE);
    disconnected.take_sent();
    assert!(disconnected.events.contains(&Event::RegistrationExpired));
    assert!(!disconnected.element.is_registered());
}

#[test]
fn deregistration_is_confirmed_or_times_out() {
    let mut bench = TestBench::new_registered();
    bench.take_sent();
    bench.element.handle_deregister(bench.now);
    assert!(matches!(
        bench.take_sent()[..],
        [(_, Message::Deregistration { .. })]
    ));
    let answer = Message::DeregistrationResponse {
        handle: handle(),
        id: bench.element.id(),
        causes: Vec::new(),
    };
    bench.deliver(answer);
    bench.take_sent();
    assert_eq!(
        bench.events.last(),
        Some(&Event::Deregistered(DeregistrationResult::Confirmed))
    );
    assert!(
        bench
            .keep_alive(LinkId::Accepted(1), true, handle())
            .is_empty(),
        "the element is no longer registered"
    );
    assert_eq!(bench.element.poll_timeout(), None);

    let mut silent = TestBench::new_registered();
    silent.take_sent();
    silent.element.handle_deregister(silent.now);
    silent.advance_time(silent.element.config.deregistration_timeout);
    silent.take_sent();
    assert_eq!(
        silent.events.last(),
        Some(&Event::Deregistered(DeregistrationResult::TimedOut))
    );
    assert_eq!(silent.element.poll_timeout(), None);
}

#[test]
fn unregistered_element_deregisters_at_once() {
    let mut bench = TestBench::new_registered();
    bench.take_sent();
    let config = bench.element.config.clone();
    bench.element = PoolElement::new(config);
    bench.element.handle_deregister(bench.now);
    bench.take_sent();
    assert_eq!(
        bench.events.last(),
        Some(&Event::Deregistered(DeregistrationResult::Confirmed))
    );
}

#[test]
fn life_is_encoded_in_the_configured_unit() {
    let mut config = TestBench::new().element.config;
    config.life = Some(Duration::from_millis(1_500));
    assert_eq!(
        (config.encoded_life(), config.reregistration_interval()),
        (1, Duration::from_millis(750))
    );
    config.life_unit = LifeUnit::Milliseconds;
    assert_eq!(config.encoded_life(), 1_500);
    config.life = None;
    assert_eq!(
        (config.encoded_life(), config.reregistration_interval()),
        (-1, Duration::from_secs(600))
    );
}
