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
        token: id(token),
        is_proven: true,
        name: name.parse().unwrap(),
        name_record: Some(NameRecord::default()),
        key: KeyDigest([name.len() as u8; 32]),
        serial: CertificateSerial(1),
    }
}

/// Records of a name with these certificates, each with its serial number and true if it is revoked.
fn record(certificates: &[(u128, bool)]) -> Option<NameRecord> {
    let certificate = |(serial, is_revoked): &(u128, bool)| IssuedCertificate {
        serial: CertificateSerial(*serial),
        is_revoked: *is_revoked,
    };
    Some(NameRecord {
        is_node: false,
        certificates: certificates.iter().map(certificate).collect(),
    })
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
            .handle_new_token(START, id(token), HOUR, JoinRole::Backup)
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
            [
                Output::Sign {
                    request: signed, ..
                },
            ] if *signed == request => None,
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
    let (request, role) = (RequestId(1), JoinRole::Backup);
    assert_eq!(
        node.machine.poll_output(),
        Some(Output::Sign { request, role })
    );
}

#[test]
fn certificate_admits_to_the_role_of_its_token() {
    for role in [JoinRole::Backup, JoinRole::ServerNode] {
        let mut node = TestNode::new();
        node.machine
            .handle_new_token(START, id(1), HOUR, role)
            .unwrap();
        node.settle(true);
        let request = RequestId(1);
        node.machine
            .handle_attempt(START, request, &attempt(1, "n2"));
        assert_eq!(node.settle(true), [Output::Sign { request, role }]);
    }
}

#[test]
fn lost_answer_is_repeated_for_the_same_key_only() {
    let mut node = TestNode::with_token(1);
    let mut first = attempt(1, "n2");
    let mut in_force = Vec::new();
    for serial in 1..=5 {
        first.serial = CertificateSerial(serial);
        assert_eq!(node.ask(START, &first), None);
        node.restart();
        // The certificates of the lost answers are in force.
        in_force.push((serial, false));
        first.name_record = record(&in_force);
    }
    assert_eq!(node.ask(START, &first), Some(Refusal::UsedToken));
    let mut node = TestNode::with_token(1);
    let first = attempt(1, "n2");
    assert_eq!(node.ask(START, &first), None);
    let other_key = Attempt {
        key: KeyDigest([9; 32]),
        ..first
    };
    assert_eq!(node.ask(START, &other_key), Some(Refusal::UsedToken));
}

#[test]
fn used_token_ends_with_its_certificate_its_name_and_its_time() {
    let mut node = TestNode::with_token(1);
    let mut host = attempt(1, "n2");
    assert_eq!(node.ask(START, &host), None);
    let mut refusal_with = |name_record: Option<NameRecord>| {
        let repetition = Attempt {
            name_record,
            serial: CertificateSerial(9),
            ..host.clone()
        };
        node.ask(START, &repetition)
    };
    // The operator has revoked the certificate, and may have given the name to another host.
    let revoked = Some(Refusal::RevokedToken);
    assert_eq!(refusal_with(record(&[(1, true)])), revoked);
    assert_eq!(refusal_with(record(&[(1, true), (2, false)])), revoked);
    // The certificate was renewed, or another host has the name.
    let used = Some(Refusal::UsedToken);
    assert_eq!(refusal_with(record(&[(1, false), (2, false)])), used);
    let joined = NameRecord {
        is_node: true,
        ..NameRecord::default()
    };
    assert_eq!(refusal_with(Some(joined)), used);
    assert_eq!(refusal_with(None), Some(Refusal::NameUnknown));
    // A former host of the name had a certificate.
    assert_eq!(refusal_with(record(&[(7, true), (1, false)])), None);
    host.name_record = record(&[(1, false), (9, false)]);
    let end = START + EnrolmentConfig::default().repetition_time;
    let before = end - Duration::from_secs(1);
    assert_eq!(node.ask(end, &host), used);
    assert_eq!(node.ask(before, &host), None);
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
    node.machine
        .handle_new_token(late, id(3), HOUR, JoinRole::Backup)
        .unwrap();
    node.settle(true);
    assert_eq!(node.machine.tokens().len(), 1, "the old one is forgotten");
}

#[test]
fn taken_name_leaves_the_token_unused() {
    let mut node = TestNode::with_token(1);
    let mut host = attempt(1, "n2");
    for (name_record, reason) in [
        (record(&[(5, false)]), Refusal::NameTaken),
        (None, Refusal::NameUnknown),
    ] {
        host.name_record = name_record;
        assert_eq!(node.ask(START, &host), Some(reason));
    }
    host.name_record = record(&[(5, true)]);
    assert_eq!(node.ask(START, &host), None);
}

#[test]
fn failed_save_changes_nothing() {
    let mut node = TestNode::new();
    node.machine
        .handle_new_token(START, id(1), HOUR, JoinRole::Backup)
        .unwrap();
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
fn wrong_tokens_of_others_keep_no_host_out() {
    let mut node = TestNode::with_token(1);
    for _ in 0..1_000 {
        assert_eq!(
            node.ask(START, &attempt(7, "n2")),
            Some(Refusal::UnknownToken)
        );
    }
    assert_eq!(node.ask(START, &attempt(1, "n2")), None);
}

#[test]
fn impossible_tokens_are_not_made() {
    let mut node = TestNode::with_token(1);
    let again = node
        .machine
        .handle_new_token(START, id(1), HOUR, JoinRole::Backup);
    assert_eq!(again, Err(TokenError::Repeated));
    for lifetime in [Duration::ZERO, HOUR * 25] {
        let refused = node
            .machine
            .handle_new_token(START, id(2), lifetime, JoinRole::Backup);
        assert_eq!(refused, Err(TokenError::Lifetime(86_400)));
    }
    for number in 1..TOKENS_MAX {
        let mut long = [0xee; 32];
        long[..8].copy_from_slice(&number.to_be_bytes());
        node.machine
            .handle_new_token(START, TokenId(long), HOUR, JoinRole::Backup)
            .unwrap();
    }
    let full = node
        .machine
        .handle_new_token(START, id(2), HOUR, JoinRole::Backup);
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
                Step::NewToken(token) => drop(node.machine.handle_new_token(now, id(token), HOUR, JoinRole::Backup)),
                Step::Revoke(token) => drop(node.machine.handle_revoke_token(&id(token).to_string())),
                Step::Attempt { token, name, key, is_proven } => {
                    let attempt = Attempt {
                        key: KeyDigest([key; 32]),
                        serial: CertificateSerial(number as u128),
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
                    Output::Sign { request, .. } => {
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
