use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

const START: Duration = Duration::from_secs(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3_600);

fn id(number: u8) -> TokenId {
    TokenId([number; 32])
}

fn attempt(token: u8, name: &str) -> Attempt {
    Attempt {
        source: [10, 0, 0, 9].into(),
        token: id(token),
        is_proven: true,
        name: name.parse().unwrap(),
        is_name_taken: false,
        key: KeyDigest([name.len() as u8; 32]),
    }
}

/// A machine whose disk can fail.
struct TestNode {
    machine: Enrolment,
    disk: EnrolmentState,
    requests: u64,
}

impl TestNode {
    fn new() -> TestNode {
        TestNode {
            machine: Enrolment::new(EnrolmentConfig::default(), EnrolmentState::default()),
            disk: EnrolmentState::default(),
            requests: 0,
        }
    }

    fn with_token(token: u8) -> TestNode {
        let mut node = TestNode::new();
        node.machine
            .handle_new_token(START, id(token), HOUR)
            .unwrap();
        assert_eq!(node.settle(true), [Output::TokenSaved { id: id(token) }]);
        node
    }

    /// Carries out saves, and returns the other outputs.
    fn settle(&mut self, disk_works: bool) -> Vec<Output> {
        let mut others = Vec::new();
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Save { token, state } => {
                    if disk_works {
                        self.disk = state;
                    }
                    self.machine.handle_saved(token, disk_works);
                }
                other => others.push(other),
            }
        }
        others
    }

    /// Returns the refusal, none if the certificate is to be signed.
    fn ask(&mut self, now: Duration, attempt: &Attempt) -> Option<Refusal> {
        self.requests += 1;
        let request = RequestId(self.requests);
        self.machine.handle_attempt(now, request, attempt);
        match &self.settle(true)[..] {
            [Output::Sign { request: signed }] if *signed == request => None,
            [
                Output::Refuse {
                    request: refused,
                    reason,
                },
            ] if *refused == request => Some(*reason),
            other => panic!("{other:?}"),
        }
    }

    fn restart(&mut self) {
        self.machine = Enrolment::new(EnrolmentConfig::default(), self.disk.clone());
    }
}

#[test]
fn token_serves_one_node_once() {
    let mut node = TestNode::with_token(1);
    assert_eq!(node.ask(START, &attempt(1, "n2")), None);
    assert_eq!(
        node.ask(START, &attempt(1, "other")),
        Some(Refusal::UsedToken)
    );
    node.restart();
    assert_eq!(
        node.ask(START, &attempt(1, "other")),
        Some(Refusal::UsedToken)
    );
}

#[test]
fn use_is_on_the_disk_before_the_signature() {
    let mut node = TestNode::with_token(1);
    node.machine
        .handle_attempt(START, RequestId(1), &attempt(1, "n2"));
    let Some(Output::Save { token, state }) = node.machine.poll_output() else {
        panic!("no save");
    };
    assert!(matches!(state.tokens[0].usage, TokenUse::Used { .. }));
    assert_eq!(node.machine.poll_output(), None);
    node.machine.handle_saved(token, true);
    let request = RequestId(1);
    assert_eq!(node.machine.poll_output(), Some(Output::Sign { request }));
}

#[test]
fn lost_answer_is_repeated_for_the_same_key_only() {
    let mut node = TestNode::with_token(1);
    let mut first = attempt(1, "n2");
    for _ in 0..5 {
        assert_eq!(node.ask(START, &first), None);
        node.restart();
        // The first answer's certificate is in force.
        first.is_name_taken = true;
    }
    assert_eq!(node.ask(START, &first), Some(Refusal::UsedToken));
    let mut node = TestNode::with_token(1);
    first.is_name_taken = false;
    assert_eq!(node.ask(START, &first), None);
    let other_key = Attempt {
        key: KeyDigest([9; 32]),
        ..first
    };
    assert_eq!(node.ask(START, &other_key), Some(Refusal::UsedToken));
}

#[test]
fn expired_revoked_unknown_and_unproven_tokens_are_refused() {
    let mut node = TestNode::with_token(1);
    let unproven = Attempt {
        is_proven: false,
        ..attempt(1, "n2")
    };
    assert_eq!(node.ask(START, &unproven), Some(Refusal::UnknownToken));
    assert_eq!(
        node.ask(START, &attempt(2, "n2")),
        Some(Refusal::UnknownToken)
    );
    let end = START + HOUR;
    assert_eq!(
        node.ask(end, &attempt(1, "n2")),
        Some(Refusal::ExpiredToken)
    );
    let revoked = node.machine.handle_revoke_token(&id(1).to_string());
    assert_eq!(revoked, Ok(id(1)));
    assert_eq!(node.settle(true), [Output::TokenSaved { id: id(1) }]);
    assert_eq!(
        node.ask(START, &attempt(1, "n2")),
        Some(Refusal::RevokedToken)
    );
    assert_eq!(
        node.machine.handle_revoke_token("0102"),
        Err(TokenError::Unknown)
    );
    let late = end + EnrolmentConfig::default().retention;
    node.machine.handle_new_token(late, id(3), HOUR).unwrap();
    node.settle(true);
    assert_eq!(node.machine.tokens().len(), 1, "the old one is forgotten");
}

#[test]
fn taken_name_leaves_the_token_unused() {
    let mut node = TestNode::with_token(1);
    let taken = Attempt {
        is_name_taken: true,
        ..attempt(1, "n2")
    };
    assert_eq!(node.ask(START, &taken), Some(Refusal::NameTaken));
    assert_eq!(node.ask(START, &attempt(1, "n3")), None);
}

#[test]
fn failed_save_changes_nothing() {
    let mut node = TestNode::new();
    node.machine.handle_new_token(START, id(1), HOUR).unwrap();
    assert_eq!(node.settle(false), [Output::TokenNotSaved { id: id(1) }]);
    assert!(node.machine.tokens().is_empty());
    let mut node = TestNode::with_token(1);
    let before = node.machine.tokens().to_vec();
    // Three steps on one token, of which the first is being saved.
    node.machine
        .handle_attempt(START, RequestId(1), &attempt(1, "n2"));
    node.machine
        .handle_attempt(START, RequestId(2), &attempt(1, "n2"));
    node.machine
        .handle_revoke_token(&id(1).to_string())
        .unwrap();
    let outputs = node.settle(false);
    assert_eq!(outputs.len(), 3, "{outputs:?}");
    assert!(outputs.iter().all(|output| matches!(
        output,
        Output::Refuse {
            reason: Refusal::NotSaved,
            ..
        } | Output::TokenNotSaved { .. }
    )));
    assert_eq!(node.machine.tokens(), before);
    assert_eq!(node.ask(START, &attempt(1, "n2")), None);
}

#[test]
fn wrong_tokens_are_limited_by_source_and_in_total() {
    let mut node = TestNode::with_token(1);
    let from = |host: [u8; 4], token: u8| Attempt {
        source: host.into(),
        ..attempt(token, "n2")
    };
    for _ in 0..5 {
        let refusal = node.ask(START, &from([10, 0, 0, 1], 7));
        assert_eq!(refusal, Some(Refusal::UnknownToken));
    }
    let refusal = node.ask(START, &from([10, 0, 0, 1], 1));
    assert_eq!(refusal, Some(Refusal::TooManyWrongTokens));
    let later = START + Duration::from_secs(59);
    assert!(!node.machine.admits_source(later, [10, 0, 0, 1].into()));
    assert!(node.machine.admits_source(later, [10, 0, 0, 2].into()));
    for host in 0..95 {
        node.ask(START, &from([10, 0, 1, host], 7));
    }
    let refusal = node.ask(START, &from([10, 0, 2, 1], 1));
    assert_eq!(refusal, Some(Refusal::TooManyWrongTokens));
    let later = START + Duration::from_secs(60);
    assert_eq!(node.ask(later, &from([10, 0, 2, 1], 1)), None);
}

#[test]
fn hosts_of_one_ipv6_prefix_are_one_source() {
    let mut node = TestNode::with_token(1);
    for host in 1..=5u16 {
        let source = std::net::Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0, 0, host).into();
        node.ask(
            START,
            &Attempt {
                source,
                ..attempt(7, "n2")
            },
        );
    }
    let address = |prefix| std::net::Ipv6Addr::new(0xfd00, 0, 0, prefix, 9, 9, 9, 9).into();
    assert!(!node.machine.admits_source(START, address(1)));
    assert!(node.machine.admits_source(START, address(2)));
    let mapped = std::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped();
    assert!(node.machine.admits_source(START, mapped.into()));
}

#[test]
fn impossible_tokens_are_not_made() {
    let mut node = TestNode::with_token(1);
    let again = node.machine.handle_new_token(START, id(1), HOUR);
    assert_eq!(again, Err(TokenError::Repeated));
    for lifetime in [Duration::ZERO, HOUR * 25] {
        let refused = node.machine.handle_new_token(START, id(2), lifetime);
        assert_eq!(refused, Err(TokenError::Lifetime(86_400)));
    }
    for number in 1..TOKENS_MAX {
        let mut long = [0xee; 32];
        long[..8].copy_from_slice(&number.to_be_bytes());
        node.machine
            .handle_new_token(START, TokenId(long), HOUR)
            .unwrap();
    }
    let full = node.machine.handle_new_token(START, id(2), HOUR);
    assert_eq!(full, Err(TokenError::Full));
}

#[derive(Debug, Clone)]
enum Step {
    NewToken(u8),
    Revoke(u8),
    Attempt {
        token: u8,
        name: u8,
        key: u8,
        is_proven: bool,
    },
    Save(bool),
    Restart,
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u8..3).prop_map(Step::NewToken),
        (0u8..3).prop_map(Step::Revoke),
        (0u8..3, 0u8..2, 0u8..2, prop::bool::weighted(0.8)).prop_map(
            |(token, name, key, is_proven)| Step::Attempt {
                token,
                name,
                key,
                is_proven
            }
        ),
        prop::bool::weighted(0.7).prop_map(Step::Save),
        Just(Step::Restart),
        (0u16..300).prop_map(Step::Wait),
    ]
}

proptest! {
    /// Whatever happens, all certificates of a token are for one name and key, and the disk knows of them.
    #[test]
    fn token_never_serves_two_nodes(steps in vec(step(), 0..80)) {
        let mut now = START;
        let mut node = TestNode::new();
        let mut open_save = None;
        let mut attempts = std::collections::BTreeMap::new();
        let mut served = std::collections::BTreeMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            let request = RequestId(number as u64);
            match step {
                Step::NewToken(token) => drop(node.machine.handle_new_token(now, id(token), HOUR)),
                Step::Revoke(token) => drop(node.machine.handle_revoke_token(&id(token).to_string())),
                Step::Attempt { token, name, key, is_proven } => {
                    let attempt = Attempt {
                        key: KeyDigest([key; 32]),
                        is_proven,
                        ..attempt(token, ["a", "b"][usize::from(name)])
                    };
                    node.machine.handle_attempt(now, request, &attempt);
                    attempts.insert(request, attempt);
                }
                Step::Save(is_saved) => {
                    if let Some((token, state)) = open_save.take() {
                        if is_saved {
                            node.disk = state;
                        }
                        node.machine.handle_saved(token, is_saved);
                    }
                }
                Step::Restart => {
                    open_save = None;
                    node.restart();
                }
                Step::Wait(seconds) => now += Duration::from_secs(seconds.into()),
            }
            while let Some(output) = node.machine.poll_output() {
                match output {
                    Output::Save { token, state } => {
                        prop_assert!(open_save.is_none(), "two saves are open");
                        open_save = Some((token, state));
                    }
                    Output::Sign { request } => {
                        let attempt = &attempts[&request];
                        prop_assert!(attempt.is_proven);
                        let receiver = (attempt.name.clone(), attempt.key);
                        let first = served.entry(attempt.token).or_insert(receiver.clone());
                        prop_assert_eq!(&*first, &receiver);
                        let saved = node.disk.tokens.iter().find(|token| token.id == attempt.token);
                        let is_known = saved.is_some_and(|saved| matches!(
                            &saved.usage,
                            TokenUse::Used { name, .. } if *name == attempt.name
                        ) || saved.usage == TokenUse::Revoked);
                        prop_assert!(is_known);
                    }
                    _ => {}
                }
            }
        }
    }
}
