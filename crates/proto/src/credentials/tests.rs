use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeSet;

const DAY: Duration = Duration::from_secs(86_400);
const AUTHORITY: AuthorityId = AuthorityId([7; 16]);
const OTHER_AUTHORITY: AuthorityId = AuthorityId([8; 16]);

fn list(number: u64) -> RevocationList {
    RevocationList {
        number: RevocationNumber {
            authority: AUTHORITY,
            number,
        },
        bytes: Bytes::from(number.to_be_bytes().to_vec()),
    }
}

fn machine(node: u16, has_authority: bool) -> Credentials {
    let mut config = CredentialsConfig::new(NodeId(node), vec![AUTHORITY], u64::from(node));
    config.has_authority = has_authority;
    Credentials::new(config)
}

fn outputs(machine: &mut Credentials) -> Vec<Output> {
    std::iter::from_fn(|| machine.poll_output()).collect()
}

fn send(to: u16, frame: CredentialFrame) -> Output {
    let to = NodeId(to);
    Output::Send { to, frame }
}

fn numbers(number: u64) -> CredentialFrame {
    let numbers = vec![list(number).number];
    CredentialFrame::RevocationNumbers { numbers }
}

fn list_request(to: u16) -> Output {
    let authority = AUTHORITY;
    send(to, CredentialFrame::RevocationListRequest { authority })
}

/// Nodes that are connected in any way, and whose frames arrive at once.
struct TestGroup {
    nodes: Vec<Credentials>,
    links: BTreeSet<(u16, u16)>,
}

impl TestGroup {
    fn new(count: u16) -> TestGroup {
        TestGroup {
            nodes: (0..count).map(|node| machine(node, node == 0)).collect(),
            links: BTreeSet::new(),
        }
    }

    fn connect(&mut self, now: Duration, a: u16, b: u16) {
        self.links.extend([(a, b), (b, a)]);
        self.nodes[usize::from(a)].handle_peer_connected(now, NodeId(b));
        self.nodes[usize::from(b)].handle_peer_connected(now, NodeId(a));
        self.settle(now);
    }

    /// Delivers frames and carries out commands until nothing is left. Returns the number of frames.
    fn settle(&mut self, now: Duration) -> usize {
        let mut frames = 0;
        loop {
            let mut is_idle = true;
            for from in 0..self.nodes.len() as u16 {
                while let Some(output) = self.nodes[usize::from(from)].poll_output() {
                    is_idle = false;
                    match output {
                        Output::Send { to, frame } => {
                            frames += 1;
                            assert!(self.links.contains(&(from, to.0)));
                            self.nodes[usize::from(to.0)].handle_frame(now, NodeId(from), frame);
                        }
                        Output::Execute(command) => self.execute(now, from, command),
                        Output::Event(_) => {}
                    }
                }
            }
            if is_idle {
                return frames;
            }
        }
    }

    fn execute(&mut self, now: Duration, node: u16, command: Command) {
        let machine = &mut self.nodes[usize::from(node)];
        match command {
            Command::ApplyList { from, list: bytes } => {
                let number = u64::from_be_bytes(bytes[..].try_into().unwrap());
                machine.handle_lists(now, Some(from), vec![list(number)]);
            }
            Command::MakeRequest => machine.handle_request(now, Ok(Bytes::from_static(b"request"))),
            Command::Sign { requester, .. } => {
                machine.handle_signed(now, requester, Ok(Bytes::from_static(b"certificate")));
            }
            Command::Install { .. } => {
                machine.handle_installed(now, Ok(()));
                machine.handle_certificate(now, 90 * DAY, 90 * DAY);
            }
        }
    }

    fn number(&self, node: u16) -> u64 {
        self.nodes[usize::from(node)].revocations.number(&AUTHORITY)
    }
}

#[test]
fn new_list_reaches_every_node_over_several_hops() {
    let now = Duration::ZERO;
    let mut group = TestGroup::new(5);
    for (a, b) in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 1)] {
        group.connect(now, a, b);
    }
    group.nodes[3].handle_lists(now, None, vec![list(4)]);
    let frames = group.settle(now);
    assert!((0..5).all(|node| group.number(node) == 4));
    // Each node gets the list once, and tells each neighbour its number once.
    assert!(frames <= 10 + 4 * 2, "{frames}");
    // A node that comes later gets the list too, and an older one changes nothing.
    let mut late = machine(5, false);
    late.handle_lists(now, None, vec![list(2)]);
    group.nodes.push(late);
    group.connect(now, 5, 2);
    assert!((0..6).all(|node| group.number(node) == 4));
}

#[test]
fn lists_of_unknown_authorities_are_not_asked_for() {
    let now = Duration::ZERO;
    let mut machine = machine(1, false);
    machine.handle_peer_connected(now, NodeId(2));
    let other = RevocationNumber {
        authority: OTHER_AUTHORITY,
        number: 9,
    };
    let frame = CredentialFrame::RevocationNumbers {
        numbers: vec![other],
    };
    machine.handle_frame(now, NodeId(2), frame);
    assert_eq!(outputs(&mut machine), []);
}

#[test]
fn unasked_list_is_ignored() {
    let now = Duration::ZERO;
    let mut machine = machine(1, false);
    machine.handle_peer_connected(now, NodeId(2));
    let frame = |number| CredentialFrame::RevocationList {
        list: list(number).bytes,
    };
    machine.handle_frame(now, NodeId(2), frame(5));
    // A stranger's frame has no effect either.
    machine.handle_frame(now, NodeId(3), numbers(5));
    assert_eq!(outputs(&mut machine), []);
    machine.handle_frame(now, NodeId(2), numbers(5));
    assert_eq!(outputs(&mut machine), [list_request(2)]);
    machine.handle_frame(now, NodeId(2), frame(5));
    machine.handle_frame(now, NodeId(2), frame(5));
    assert_eq!(outputs(&mut machine).len(), 1, "checked once");
}

#[test]
fn silent_lost_or_lying_peer_is_replaced_by_another() {
    let mut machine = machine(1, false);
    let now = Duration::ZERO;
    for peer in 2..=5 {
        machine.handle_peer_connected(now, NodeId(peer));
        machine.handle_frame(now, NodeId(peer), numbers(u64::from(peer)));
    }
    assert_eq!(outputs(&mut machine), [list_request(2)]);
    let due = machine.poll_timeout().unwrap();
    assert_eq!(due, Duration::from_millis(300));
    machine.handle_timeout(due);
    assert_eq!(outputs(&mut machine), [list_request(5)]);
    machine.handle_peer_lost(due, NodeId(5));
    assert_eq!(outputs(&mut machine), [list_request(4)]);
    let bytes = list(9).bytes;
    let frame = CredentialFrame::RevocationList {
        list: bytes.clone(),
    };
    machine.handle_frame(due, NodeId(4), frame);
    let check = Command::ApplyList {
        from: NodeId(4),
        list: bytes,
    };
    assert_eq!(outputs(&mut machine), [Output::Execute(check)]);
    assert_eq!(machine.poll_timeout(), None, "a check has no time limit");
    machine.handle_list_refused(due, NodeId(4), "no signature".to_owned());
    assert_eq!(outputs(&mut machine)[1..], [list_request(3)]);
    // The peer sends an older list than announced, which is new here all the same.
    let frame = CredentialFrame::RevocationList {
        list: list(1).bytes,
    };
    machine.handle_frame(due, NodeId(3), frame);
    machine.handle_lists(due, Some(NodeId(3)), vec![list(1)]);
    let announced = outputs(&mut machine);
    assert_eq!(announced.len(), 1 + 3, "{announced:?}");
    assert_eq!(machine.poll_timeout(), None);
}

#[test]
fn certificate_is_renewed_at_two_thirds_of_its_life() {
    let now = Duration::from_secs(5);
    let mut group = TestGroup::new(3);
    let mut times = BTreeSet::new();
    for node in 0..3 {
        let machine = &mut group.nodes[node];
        machine.handle_certificate(now, 90 * DAY, 90 * DAY);
        let due = machine.poll_timeout().unwrap() - now;
        assert!(due >= 60 * DAY && due < 60 * DAY + 90 * DAY / 20, "{due:?}");
        times.insert(due);
        // The clock of the host went on while that of the machine stood.
        machine.handle_certificate(now, 80 * DAY, 90 * DAY);
        assert_eq!(machine.poll_timeout().unwrap() - now, due - 10 * DAY);
    }
    assert_eq!(times.len(), 3, "spread");
    group.connect(now, 1, 2);
    group.connect(now, 1, 0);
    group.connect(now, 2, 0);
    for node in 0..3 {
        let due = group.nodes[node].poll_timeout().unwrap();
        group.nodes[node].handle_timeout(due);
        group.settle(due);
        let next = group.nodes[node].poll_timeout().unwrap() - due;
        assert!(next >= 60 * DAY, "node {node} was not renewed");
    }
}

#[test]
fn renewal_is_not_late_after_a_long_sleep_of_the_host() {
    let mut machine = machine(1, false);
    machine.handle_certificate(Duration::ZERO, 90 * DAY, 90 * DAY);
    let now = Duration::from_secs(3_600);
    // The machine's clock has stood while 80 days went by.
    machine.handle_certificate(now, 10 * DAY, 90 * DAY);
    let due = machine.poll_timeout().unwrap();
    assert!(due <= now + 90 * DAY / 20, "{due:?}");
    machine.handle_certificate(now + DAY / 24, 10 * DAY, 90 * DAY);
    assert_eq!(machine.poll_timeout(), Some(due));
}

#[test]
fn certificate_that_ends_soon_is_renewed_before_its_end() {
    let mut machine = machine(1, false);
    machine.handle_certificate(Duration::ZERO, DAY / 24, 90 * DAY);
    assert!(machine.poll_timeout().unwrap() <= DAY / 48);
}

fn asks(machine: &mut Credentials) -> Vec<u16> {
    let asked = outputs(machine)
        .into_iter()
        .filter_map(|output| match output {
            Output::Send {
                to,
                frame: CredentialFrame::RenewalRequest { .. },
            } => Some(to.0),
            _ => None,
        });
    asked.collect()
}

#[test]
fn contact_node_is_asked_first_and_each_node_once() {
    let now = Duration::ZERO;
    let mut machine = machine(1, false);
    machine.set_contact(Some(NodeId(4)));
    for peer in 2..=5 {
        machine.handle_peer_connected(now, NodeId(peer));
    }
    machine.handle_certificate(now, DAY, 90 * DAY);
    let due = machine.poll_timeout().unwrap();
    machine.handle_timeout(due);
    assert_eq!(
        outputs(&mut machine),
        [Output::Execute(Command::MakeRequest)]
    );
    machine.handle_request(due, Ok(Bytes::from_static(b"request")));
    assert_eq!(asks(&mut machine), [4]);
    let refusal = |reason| CredentialFrame::RenewalRefused { reason };
    // A node that was not asked cannot end the attempt.
    machine.handle_frame(due, NodeId(2), refusal(RenewalRefusal::Failed));
    assert!(asks(&mut machine).is_empty());
    machine.handle_frame(due, NodeId(4), refusal(RenewalRefusal::NoAuthority));
    assert_eq!(asks(&mut machine), [2]);
    let timeout = machine.poll_timeout().unwrap();
    machine.handle_timeout(timeout);
    assert_eq!(asks(&mut machine), [3]);
    machine.handle_peer_lost(timeout, NodeId(3));
    assert_eq!(asks(&mut machine), [5]);
    machine.handle_frame(timeout, NodeId(5), refusal(RenewalRefusal::Failed));
    let event = outputs(&mut machine);
    let [Output::Event(Event::RenewalFailed { error })] = &event[..] else {
        panic!("{event:?}");
    };
    assert!(error.contains("node 5"), "{error}");
    let retry = machine.poll_timeout().unwrap() - timeout;
    assert_eq!(retry, Duration::from_secs(600));
    machine.handle_certificate(timeout, DAY, 90 * DAY);
    assert_eq!(machine.poll_timeout().unwrap() - timeout, retry);
}

#[test]
fn lonely_node_is_renewed_when_a_peer_connects() {
    let mut machine = machine(1, false);
    machine.handle_certificate(Duration::ZERO, DAY, 90 * DAY);
    let due = machine.poll_timeout().unwrap();
    machine.handle_timeout(due);
    machine.handle_request(due, Ok(Bytes::from_static(b"request")));
    let later = due + Duration::from_secs(1);
    machine.handle_peer_connected(later, NodeId(2));
    assert_eq!(machine.poll_timeout(), Some(later));
}

#[test]
fn authority_signs_once_in_a_while_for_each_peer() {
    let now = Duration::ZERO;
    let mut machine = machine(1, true);
    machine.handle_peer_connected(now, NodeId(2));
    let request = Bytes::from_static(b"request");
    let ask = CredentialFrame::RenewalRequest {
        request: request.clone(),
    };
    let refused = |machine: &mut Credentials| {
        outputs(machine)
            .into_iter()
            .find_map(|output| match output {
                Output::Event(Event::RefusedPeer { reason, .. }) => Some(reason),
                _ => None,
            })
    };
    machine.handle_frame(now, NodeId(2), ask.clone());
    let sign = Command::Sign {
        requester: NodeId(2),
        request,
    };
    assert_eq!(outputs(&mut machine), [Output::Execute(sign)]);
    machine.handle_frame(now, NodeId(2), ask.clone());
    assert_eq!(refused(&mut machine), Some(RenewalRefusal::TooSoon));
    machine.handle_signed(now, NodeId(2), Ok(Bytes::from_static(b"certificate")));
    assert_eq!(outputs(&mut machine).len(), 2);
    machine.handle_frame(now, NodeId(2), ask.clone());
    assert_eq!(refused(&mut machine), Some(RenewalRefusal::TooSoon));
    let later = Duration::from_secs(301);
    machine.handle_frame(later, NodeId(2), ask);
    assert_eq!(refused(&mut machine), None);
    let long = CredentialFrame::RenewalRequest {
        request: vec![0; 5_000].into(),
    };
    machine.handle_peer_connected(later, NodeId(3));
    machine.handle_frame(later, NodeId(3), long);
    assert_eq!(refused(&mut machine), Some(RenewalRefusal::BadRequest));
}

#[test]
fn failing_authority_asks_peers_for_its_own_certificate() {
    let now = Duration::ZERO;
    let mut machine = machine(1, true);
    machine.handle_peer_connected(now, NodeId(2));
    machine.handle_certificate(now, DAY, 90 * DAY);
    let due = machine.poll_timeout().unwrap();
    machine.handle_timeout(due);
    machine.handle_request(due, Ok(Bytes::from_static(b"request")));
    assert_eq!(outputs(&mut machine).len(), 2);
    machine.handle_signed(due, NodeId(1), Err(RenewalRefusal::Failed));
    assert_eq!(asks(&mut machine), [2]);
}

#[test]
fn next_node_is_asked_after_a_certificate_that_is_refused() {
    let now = Duration::ZERO;
    let mut machine = machine(1, false);
    for peer in 2..=4 {
        machine.handle_peer_connected(now, NodeId(peer));
    }
    machine.handle_certificate(now, DAY, 90 * DAY);
    let due = machine.poll_timeout().unwrap();
    machine.handle_timeout(due);
    machine.handle_request(due, Ok(Bytes::from_static(b"request")));
    assert_eq!(asks(&mut machine), [2]);
    let renewed = CredentialFrame::Renewed {
        certificate: Bytes::from_static(b"certificate"),
    };
    let refused = || Err(InstallError::Certificate("no newer one".to_owned()));
    machine.handle_frame(due, NodeId(2), renewed.clone());
    outputs(&mut machine);
    machine.handle_installed(due, refused());
    let [Output::Event(Event::CertificateRefused { from, .. }), ask] = &outputs(&mut machine)[..]
    else {
        panic!("the refusal is not reported");
    };
    let request = Bytes::from_static(b"request");
    let expected = send(3, CredentialFrame::RenewalRequest { request });
    assert_eq!((*from, ask), (NodeId(2), &expected));
    machine.handle_frame(due, NodeId(3), renewed.clone());
    machine.handle_installed(due, refused());
    assert_eq!(asks(&mut machine), [4]);
    // A full disk is not the fault of a node: nobody else is asked.
    machine.handle_frame(due, NodeId(4), renewed);
    let full = InstallError::Host("no space is left".to_owned());
    machine.handle_installed(due, Err(full));
    let events = outputs(&mut machine);
    let last = events.last();
    assert!(
        matches!(last, Some(Output::Event(Event::RenewalFailed { error })) if error.contains("space")),
        "{events:?}"
    );
}

fn any_frame() -> impl Strategy<Value = CredentialFrame> {
    use CredentialFrame as F;
    let authority = prop::sample::select(vec![AUTHORITY, OTHER_AUTHORITY]);
    let number = (authority.clone(), 0u64..5)
        .prop_map(|(authority, number)| RevocationNumber { authority, number });
    let bytes = || vec(any::<u8>(), 0..8).prop_map(Bytes::from);
    prop_oneof![
        vec(number, 0..3).prop_map(|numbers| F::RevocationNumbers { numbers }),
        authority.prop_map(|authority| F::RevocationListRequest { authority }),
        (0u64..5).prop_map(|number| F::RevocationList {
            list: list(number).bytes
        }),
        bytes().prop_map(|request| F::RenewalRequest { request }),
        bytes().prop_map(|certificate| F::Renewed { certificate }),
        Just(F::RenewalRefused {
            reason: RenewalRefusal::Failed
        }),
    ]
}

proptest! {
    /// Frames of any peer in any order neither make the machine panic nor keep it busy.
    #[test]
    fn any_frames_are_survived(
        frames in vec((0u16..4, any_frame(), 0u64..100_000_000, any::<bool>()), 0..60),
        has_authority in any::<bool>(),
    ) {
        let mut machine = machine(1, has_authority);
        let mut now = Duration::ZERO;
        machine.handle_certificate(now, 90 * DAY, 90 * DAY);
        for (peer, frame, wait, works) in frames {
            now += Duration::from_millis(wait);
            match wait % 7 {
                0 => machine.handle_peer_connected(now, NodeId(peer)),
                1 => machine.handle_peer_lost(now, NodeId(peer)),
                _ => machine.handle_frame(now, NodeId(peer), frame),
            }
            machine.handle_timeout(now);
            let mut steps = 0;
            while let Some(output) = machine.poll_output() {
                steps += 1;
                prop_assert!(steps < 100, "the machine never comes to rest");
                match output {
                    Output::Execute(Command::ApplyList { from, list: bytes }) if works => {
                        let number = u64::from_be_bytes(bytes[..].try_into().unwrap());
                        machine.handle_lists(now, Some(from), vec![list(number)]);
                    }
                    Output::Execute(Command::ApplyList { from, .. }) => {
                        machine.handle_list_refused(now, from, "refused".to_owned());
                    }
                    Output::Execute(Command::MakeRequest) => {
                        machine.handle_request(now, works.then(Bytes::new).ok_or(String::new()));
                    }
                    Output::Execute(Command::Sign { requester, .. }) => {
                        let result = works.then(Bytes::new).ok_or(RenewalRefusal::Failed);
                        machine.handle_signed(now, requester, result);
                    }
                    Output::Execute(Command::Install { .. }) => {
                        let refused = InstallError::Certificate(String::new());
                        machine.handle_installed(now, works.then_some(()).ok_or(refused));
                        machine.handle_certificate(now, 90 * DAY, 90 * DAY);
                    }
                    Output::Send { .. } | Output::Event(_) => {}
                }
            }
            prop_assert!(machine.poll_timeout().is_none_or(|due| due > now));
        }
    }
}
