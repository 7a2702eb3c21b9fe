//! Tests of registration, rule by rule, with one registrar.

use super::*;
use holdfast_wire::rserpool::{Cause, CauseCode, PoolHandle, SctpTransport, TransportUse};
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
struct Bench {
    element: PoolElement,
    now: Duration,
    home: Link,
    events: Vec<Event>,
}

impl Bench {
    /// Returns an element that is connected to a registrar and has sent its registration.
    fn new() -> Bench {
        let hunt = HuntConfig::new(vec![transport(1)]);
        let policy = Policy::LeastUsed { load: 1 };
        let mut config = Config::new(handle(), transport(80), policy, hunt, [4; 32]);
        config.life_unit = LifeUnit::Seconds;
        let mut bench = Bench {
            element: PoolElement::new(config),
            now: Duration::from_secs(1_000),
            home: Link::Ours(0),
            events: Vec::new(),
        };
        bench.element.handle_register(bench.now);
        bench.connect();
        bench
    }

    fn registered() -> Bench {
        let mut bench = Bench::new();
        bench.registration();
        bench.accept();
        bench
    }

    /// Carries out the outputs; returns the messages sent.
    fn sent(&mut self) -> Vec<(Link, Message)> {
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
        assert!(self.sent().is_empty());
        self.element.handle_connected(self.now, self.home);
    }

    /// Returns the registration that is sent, and checks that it is the only message.
    fn registration(&mut self) -> holdfast_wire::rserpool::PoolElement {
        let sent = self.sent();
        let [(link, Message::Registration { element, .. })] = &sent[..] else {
            panic!("{sent:?}");
        };
        assert_eq!(*link, self.home);
        element.clone()
    }

    fn respond(&mut self, rejected: bool, causes: Vec<Cause>) {
        let id = self.element.id();
        self.tell(Message::RegistrationResponse {
            rejected,
            handle: handle(),
            id,
            causes,
        });
    }

    fn accept(&mut self) {
        self.respond(false, Vec::new());
    }

    fn tell(&mut self, message: Message) {
        self.element.handle_message(self.now, self.home, message);
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.element.poll_timeout()
            && due <= end
        {
            self.now = due.max(self.now);
            self.element.handle_timeout(self.now);
        }
        self.now = end;
    }

    fn keep_alive(&mut self, link: Link, home: bool, handle: PoolHandle) -> Vec<(Link, Message)> {
        let message = Message::EndpointKeepAlive {
            home,
            registrar: RegistrarId(9),
            handle,
            id: None,
        };
        self.element.handle_message(self.now, link, message);
        self.sent()
    }
}

#[test]
fn it_registers_and_renews_before_its_life_ends() {
    let mut bench = Bench::new();
    let first = bench.registration();
    assert_eq!(first.registration_life, 300, "seconds");
    bench.accept();
    assert!(bench.sent().is_empty());
    assert!(matches!(
        bench.events.last(),
        Some(Event::Registered { .. })
    ));
    let wait = bench.element.poll_timeout().expect("T4 runs") - bench.now;
    let most = LIFE - Duration::from_secs(20);
    assert!(most * 9 / 10 <= wait && wait <= most, "{wait:?}");
    bench.pass(wait);
    assert_eq!(bench.registration().id, first.id);
    bench.accept();
    let events = bench.events.len();
    bench.sent();
    assert_eq!(bench.events.len(), events, "a renewal is no news");
}

#[test]
fn an_identifier_in_use_is_replaced_but_not_for_ever() {
    let mut bench = Bench::new();
    let mut ids = vec![bench.registration().id];
    let conflict = || vec![Cause::from(CauseCode::NON_UNIQUE_ELEMENT_ID)];
    for _ in 1..8 {
        bench.respond(true, conflict());
        ids.push(bench.registration().id);
    }
    bench.respond(true, conflict());
    assert!(bench.sent().is_empty());
    assert!(matches!(bench.events.last(), Some(Event::Refused(_))));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 8);
}

#[test]
fn a_refusal_is_not_asked_again_until_told() {
    let mut bench = Bench::new();
    bench.registration();
    let causes = vec![Cause::from(CauseCode::INCONSISTENT_POLICY)];
    bench.respond(true, causes);
    assert!(bench.sent().is_empty());
    let text = match bench.events.last() {
        Some(Event::Refused(refusal)) => refusal.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(text.contains("policy differs"), "{text}");
    assert_eq!(bench.element.poll_timeout(), None);
    bench.element.handle_register(bench.now);
    bench.connect();
    bench.registration();
}

#[test]
fn without_an_answer_another_registrar_is_asked() {
    let mut bench = Bench::new();
    bench.registration();
    let (old, timeout) = (bench.home, bench.element.config.answer_timeout);
    bench.pass(timeout);
    bench.connect();
    assert_ne!(bench.home, old);
    bench.registration();
    bench.pass(timeout);
    bench.connect();
    bench.registration();
    assert!(bench.events.contains(&Event::Unanswered { attempts: 2 }));
    // A late answer of the old registrar is ignored.
    let late = Message::RegistrationResponse {
        rejected: false,
        handle: handle(),
        id: bench.element.id(),
        causes: Vec::new(),
    };
    bench.element.handle_message(bench.now, old, late);
    assert!(!bench.element.is_registered());
}

#[test]
fn several_loads_in_a_short_time_are_one_registration() {
    let mut bench = Bench::registered();
    for load in 2..50 {
        let policy = Policy::LeastUsed { load };
        bench
            .element
            .handle_policy(bench.now, policy)
            .expect("the same kind");
    }
    assert!(bench.sent().is_empty(), "too soon after the last");
    bench.pass(bench.element.config.update_interval);
    assert_eq!(bench.registration().policy, Policy::LeastUsed { load: 49 });
    bench.accept();
    bench.pass(Duration::from_secs(10));
    assert!(bench.sent().is_empty());
    let other = bench.element.handle_policy(bench.now, Policy::Random);
    assert!(other.is_err());
}

#[test]
fn a_keep_alive_is_answered_and_can_change_the_home() {
    let mut bench = Bench::registered();
    bench.sent();
    let (home, theirs) = (bench.home, Link::Theirs(3));
    assert!(
        bench
            .keep_alive(theirs, true, PoolHandle::from("other"))
            .is_empty(),
        "KA1"
    );
    assert_eq!(bench.keep_alive(home, false, handle()).len(), 1);
    let sent = bench.keep_alive(theirs, true, handle());
    let ack = Message::EndpointKeepAliveAck {
        handle: handle(),
        id: bench.element.id(),
    };
    assert_eq!(sent, [(theirs, ack)]);
    assert_eq!(bench.element.home(), Some(RegistrarId(9)));
    // Later requests go to the new home.
    bench.pass(LIFE);
    assert!(
        matches!(bench.sent()[..], [(link, Message::Registration { .. }), ..] if link == theirs)
    );
}

#[test]
fn a_lost_registrar_is_replaced_and_told_at_once() {
    let mut bench = Bench::registered();
    bench.sent();
    bench.element.handle_lost(bench.now, bench.home);
    bench.connect();
    bench.registration();
    assert!(bench.element.is_registered(), "until its life ends");
}

#[test]
fn an_end_of_life_is_told_and_answered() {
    let mut bench = Bench::registered();
    bench.sent();
    let end = Message::DeregistrationResponse {
        handle: handle(),
        id: bench.element.id(),
        causes: Vec::new(),
    };
    bench.tell(end);
    bench.sent();
    assert_eq!(bench.events.last(), Some(&Event::Expired));
    bench.pass(Duration::from_secs(1));
    bench.registration();

    let mut alone = Bench::registered();
    alone.element.handle_lost(alone.now, alone.home);
    alone.sent();
    alone.pass(LIFE);
    alone.sent();
    assert!(alone.events.contains(&Event::Expired));
    assert!(!alone.element.is_registered());
}

#[test]
fn leaving_is_confirmed_or_ends_in_time() {
    let mut bench = Bench::registered();
    bench.sent();
    bench.element.handle_deregister(bench.now);
    assert!(matches!(
        bench.sent()[..],
        [(_, Message::Deregistration { .. })]
    ));
    let answer = Message::DeregistrationResponse {
        handle: handle(),
        id: bench.element.id(),
        causes: Vec::new(),
    };
    bench.tell(answer);
    bench.sent();
    assert_eq!(
        bench.events.last(),
        Some(&Event::Left(Departure::Confirmed))
    );
    assert!(
        bench.keep_alive(Link::Theirs(1), true, handle()).is_empty(),
        "it is no element any more"
    );
    assert_eq!(bench.element.poll_timeout(), None);

    let mut silent = Bench::registered();
    silent.sent();
    silent.element.handle_deregister(silent.now);
    silent.pass(silent.element.config.leave_timeout);
    silent.sent();
    assert_eq!(
        silent.events.last(),
        Some(&Event::Left(Departure::TimedOut))
    );
    assert_eq!(silent.element.poll_timeout(), None);
}

#[test]
fn who_never_registered_leaves_at_once() {
    let mut bench = Bench::registered();
    bench.sent();
    let config = bench.element.config.clone();
    bench.element = PoolElement::new(config);
    bench.element.handle_deregister(bench.now);
    bench.sent();
    assert_eq!(
        bench.events.last(),
        Some(&Event::Left(Departure::Confirmed))
    );
}

#[test]
fn a_life_is_counted_in_seconds_or_as_rsplib_does() {
    let mut config = Bench::new().element.config;
    config.life = Some(Duration::from_millis(1_500));
    assert_eq!(
        (config.life_on_wire(), config.reregistration()),
        (1, Duration::from_millis(750))
    );
    config.life_unit = LifeUnit::Milliseconds;
    assert_eq!(config.life_on_wire(), 1_500);
    config.life = None;
    assert_eq!(
        (config.life_on_wire(), config.reregistration()),
        (-1, Duration::from_secs(600))
    );
}
