//! The worker with its port, driven as a new host and as the event loop drive them.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use holdfast_api::ca::{CertificateAuthority, CertificateRequest, NodeKey, RENEWED_DAYS};
use holdfast_api::control::{ErrorBody, NewToken, TokenState};
use holdfast_api::enrolment::{
    Enrolled, EnrolmentAnswer, EnrolmentError, EnrolmentRefusal, JoinToken, certificate_matches,
    certified_role, enrol,
};
use holdfast_daemon::tls::read_certificates;
use holdfast_wire::NodeId;
use holdfast_wire::credential_frames::RenewalRefusal;
use tokio::sync::oneshot;

use super::*;
use crate::config::Config;

const LIMIT: Duration = Duration::from_secs(20);

/// Node n1 of group `web` with its worker.
struct TestNode {
    dir: tempfile::TempDir,
    config: Config,
    worker: CredentialWorker,
    events: WorkerEvents,
    metrics: Metrics,
}

/// Makes the authority and the configuration of n1 at a loopback address that no other test uses.
fn files(has_authority: bool) -> (tempfile::TempDir, Config) {
    static TESTS: AtomicU16 = AtomicU16::new(0);
    let dir = tempfile::tempdir().unwrap();
    let authority = CertificateAuthority::init(&dir.path().join("ca"), "web").unwrap();
    authority.issue("n1", &[], 9).unwrap();
    let number = (std::process::id() as u16)
        .wrapping_mul(29)
        .wrapping_add(TESTS.fetch_add(1, Ordering::Relaxed))
        | 0x0100;
    let [high, low] = number.to_be_bytes();
    let joining = if has_authority {
        "authority = \"ca\""
    } else {
        ""
    };
    let text = format!(
        "[node]\nname = \"n1\"\nid = 1\naddress = \"127.{high}.{low}.8\"\ninterface = \"lo\"\n\
         state_dir = \"{dir}/state\"\nrun_dir = \"{dir}/run\"\n\
         [group]\nname = \"web\"\nreach = \"steer\"\ncontact = \"n1\"\n\
         [tls]\nca = \"ca/ca.pem\"\ncert = \"ca/n1.pem\"\nkey = \"ca/n1.key\"\ncrl = \"ca/ca.crl\"\n\
         [joining]\n{joining}\n",
        dir = dir.path().display()
    );
    let config = Config::parse(&dir.path().join("holdfast.toml"), &text).unwrap();
    (dir, config)
}

impl TestNode {
    fn new(has_authority: bool) -> TestNode {
        let (dir, config) = files(has_authority);
        TestNode::start(dir, config)
    }

    fn start(dir: tempfile::TempDir, config: Config) -> TestNode {
        let loaded = LoadedCredentials::load(&config).unwrap();
        let metrics = Metrics::new();
        let (worker, events) = CredentialWorker::start(&config, &loaded, metrics.clone()).unwrap();
        TestNode {
            dir,
            config,
            worker,
            events,
            metrics,
        }
    }

    fn restart(self) -> TestNode {
        let TestNode {
            dir,
            config,
            worker,
            ..
        } = self;
        drop(worker);
        // The port is free when its thread has seen the end.
        let end = Instant::now() + LIMIT;
        let address = port_of(&config);
        while std::net::TcpListener::bind(address).is_err() {
            assert!(Instant::now() < end, "the port stays open");
            std::thread::sleep(Duration::from_millis(5));
        }
        TestNode::start(dir, config)
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca")
    }

    fn authority(&self) -> CertificateAuthority {
        CertificateAuthority::open(&self.ca()).unwrap()
    }

    fn event(&mut self) -> WorkerEvent {
        self.events.blocking_recv().expect("the worker runs")
    }

    fn new_token(&self) -> (NewToken, JoinToken) {
        let made = self
            .ask(|reply| TokenCommand::New(600, JoinRole::Backup, reply))
            .unwrap();
        let token = made.token.parse().unwrap();
        (made, token)
    }

    fn ask<T>(&self, command: impl FnOnce(ReplySender<T>) -> TokenCommand) -> Result<T, ErrorBody> {
        let (reply, answer) = oneshot::channel();
        self.worker.send(WorkerCommand::Token(command(reply)));
        answer.blocking_recv().expect("an answer")
    }

    fn publish(&self, list: Vec<u8>) -> Result<RevocationStatus, ErrorBody> {
        let (reply, answer) = oneshot::channel();
        let source = ListSource::Operator(reply);
        self.worker
            .send(WorkerCommand::ApplyList(source, list.into()));
        answer.blocking_recv().expect("an answer")
    }

    fn enrol(&self, token: &JoinToken, request: &[u8]) -> Result<Enrolled, EnrolmentError> {
        enrol(port_of(&self.config), token, request, LIMIT)
    }
}

fn port_of(config: &Config) -> SocketAddr {
    let port = config.joining.as_ref().unwrap().port;
    SocketAddr::new(config.node.address, port)
}

fn refusal(result: Result<Enrolled, EnrolmentError>) -> EnrolmentRefusal {
    match result {
        Err(EnrolmentError::Refused(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

pub(super) fn list_in(dir: &Path) -> Vec<u8> {
    use rustls::pki_types::CertificateRevocationListDer;
    use rustls::pki_types::pem::PemObject;
    let pem = std::fs::read(dir.join("ca.crl")).unwrap();
    let list = CertificateRevocationListDer::from_pem_slice(&pem).unwrap();
    list.to_vec()
}

#[test]
fn host_with_a_token_gets_a_certificate_for_its_key() {
    let node = TestNode::new(true);
    let (made, token) = node.new_token();
    assert_eq!(made.address, port_of(&node.config).to_string());
    let key = NodeKey::generate().unwrap();
    let request = key.request("n2").unwrap();
    let enrolled = node.enrol(&token, &request.der).unwrap();
    let EnrolmentAnswer::Signed { certificate, group } = enrolled.answer else {
        panic!("not signed");
    };
    certificate_matches(&certificate, &enrolled.authority, "n2", &key.to_pem()).unwrap();
    let known = read_certificates(&node.ca().join("ca.pem")).unwrap();
    assert_eq!(enrolled.authority, known[0].to_vec());
    assert_eq!(enrolled.local_address, IpAddr::from([127, 0, 0, 1]));
    assert_eq!(
        (group.name.as_str(), group.contact.as_deref()),
        ("web", Some("n1"))
    );
    assert_eq!(group.nodes.len(), 1);
    assert_eq!(group.revocations, Some(list_in(&node.ca())));
    assert_eq!(node.metrics.enrolments("signed"), 1);
    let tokens = node.ask(TokenCommand::List).unwrap().tokens;
    assert_eq!(
        (tokens[0].state, tokens[0].node.as_deref()),
        (TokenState::Used, Some("n2"))
    );
}

#[test]
fn certificate_has_the_role_of_the_token_and_a_renewal_keeps_it() {
    let mut node = TestNode::new(true);
    for (name, role) in [("n2", JoinRole::ServerNode), ("n3", JoinRole::Backup)] {
        let made = node.ask(|reply| TokenCommand::New(600, role, reply));
        let token: JoinToken = made.unwrap().token.parse().unwrap();
        let request = NodeKey::generate().unwrap().request(name).unwrap();
        let answer = node.enrol(&token, &request.der).unwrap().answer;
        let EnrolmentAnswer::Signed { certificate, .. } = answer else {
            panic!("not signed");
        };
        assert_eq!(certified_role(&certificate), Some(node_role(role)));
        node.worker.send(WorkerCommand::Sign {
            requester: NodeId(2),
            name: name.to_owned(),
            certificate: Some(certificate.into()),
            request: request.der.into(),
        });
        let WorkerEvent::Signed {
            result: Ok(renewed),
            ..
        } = node.event()
        else {
            panic!("not renewed");
        };
        assert_eq!(certified_role(&renewed), Some(node_role(role)));
    }
    let tokens = node.ask(TokenCommand::List).unwrap().tokens;
    let roles = tokens.iter().map(|token| token.role);
    assert_eq!(
        roles.collect::<Vec<_>>(),
        [NodeRole::Server, NodeRole::Backup]
    );
}

#[test]
fn token_is_used_once_also_after_a_restart() {
    let node = TestNode::new(true);
    let (_, token) = node.new_token();
    let first = NodeKey::generate().unwrap().request("n2").unwrap();
    node.enrol(&token, &first.der).unwrap();
    let node = node.restart();
    let other = NodeKey::generate().unwrap().request("n3").unwrap();
    assert_eq!(
        refusal(node.enrol(&token, &other.der)),
        EnrolmentRefusal::UsedToken
    );
    // The first host may repeat its request.
    node.enrol(&token, &first.der).unwrap();
    assert_eq!(node.metrics.enrolments("refused"), 1);
}

#[test]
fn wrong_tokens_and_taken_names_are_refused() {
    let node = TestNode::new(true);
    let (made, token) = node.new_token();
    let request = |name: &str| NodeKey::generate().unwrap().request(name).unwrap().der;
    let stranger = JoinToken::generate(token.authority).unwrap();
    let refused = node.enrol(&stranger, &request("n2"));
    assert_eq!(refusal(refused), EnrolmentRefusal::UnknownToken);
    // n1 is a node, and n5 has a certificate.
    node.authority().issue("n5", &[], 9).unwrap();
    for name in ["n1", "n5"] {
        let refused = node.enrol(&token, &request(name));
        assert_eq!(refusal(refused), EnrolmentRefusal::NameTaken, "{name}");
    }
    let other_authority =
        JoinToken::with_secret(holdfast_api::enrolment::AuthorityId([1; 16]), [2; 16]);
    let refused = node.enrol(&other_authority, &request("n2"));
    assert!(
        matches!(refused, Err(EnrolmentError::OtherAuthority(_))),
        "{refused:?}"
    );
    let revoked = node
        .ask(|reply| TokenCommand::Revoke(made.id.clone(), reply))
        .unwrap();
    assert_eq!(revoked.state, TokenState::Revoked);
    let refused = node.enrol(&token, &request("n2"));
    assert_eq!(refusal(refused), EnrolmentRefusal::RevokedToken);
    let refused = node.enrol(&token, b"no request");
    assert!(matches!(refusal(refused), EnrolmentRefusal::Request(_)));
    assert_eq!(node.metrics.enrolments("signed"), 0);
}

#[test]
fn used_token_ends_with_the_revocation_of_its_certificate() {
    let node = TestNode::new(true);
    let (_, token) = node.new_token();
    let first = NodeKey::generate().unwrap().request("n2").unwrap();
    node.enrol(&token, &first.der).unwrap();
    node.authority().revoke("n2").unwrap();
    let refused = node.enrol(&token, &first.der);
    assert_eq!(refusal(refused), EnrolmentRefusal::RevokedToken);
    // Another host gets the name.
    let (_, other_token) = node.new_token();
    let other = NodeKey::generate().unwrap().request("n2").unwrap();
    node.enrol(&other_token, &other.der).unwrap();
    let refused = node.enrol(&token, &first.der);
    assert_eq!(refusal(refused), EnrolmentRefusal::RevokedToken);
    // A list from a copy of the authority counts, although the log here does not have the revocation.
    let log = node.ca().join("serials.log");
    let before = std::fs::read(&log).unwrap();
    node.authority().revoke("n2").unwrap();
    std::fs::write(&log, before).unwrap();
    node.enrol(&other_token, &other.der).unwrap();
    node.publish(list_in(&node.ca())).unwrap();
    let refused = node.enrol(&other_token, &other.der);
    assert_eq!(refusal(refused), EnrolmentRefusal::RevokedToken);
}

#[test]
fn damaged_log_of_the_authority_admits_nobody() {
    let node = TestNode::new(true);
    let (_, token) = node.new_token();
    let request = NodeKey::generate().unwrap().request("n2").unwrap();
    let log = node.ca().join("serials.log");
    let whole = std::fs::read_to_string(&log).unwrap();
    std::fs::write(&log, &whole[..whole.len() - 1]).unwrap();
    let refused = refusal(node.enrol(&token, &request.der));
    assert!(matches!(refused, EnrolmentRefusal::Failed(_)), "{refused}");
    let tokens = node.ask(TokenCommand::List).unwrap().tokens;
    assert_eq!(tokens[0].state, TokenState::Fresh);
    std::fs::write(&log, &whole).unwrap();
    node.enrol(&token, &request.der).unwrap();
}

#[test]
fn token_names_the_newest_list() {
    let node = TestNode::new(true);
    let (_, token) = node.new_token();
    assert_eq!(token.list_number(), 1);
    node.authority().issue("n2", &[], 9).unwrap();
    node.authority().revoke("n2").unwrap();
    node.publish(list_in(&node.ca())).unwrap();
    let (_, token) = node.new_token();
    assert_eq!(token.list_number(), 2);
    let request = NodeKey::generate().unwrap().request("n3").unwrap();
    let refused = node.enrol(&token.clone().require_list(3), &request.der);
    assert!(
        matches!(refused, Err(EnrolmentError::RevocationList { .. })),
        "{refused:?}"
    );
    node.enrol(&token, &request.der).unwrap();
}

#[test]
fn node_without_authority_admits_the_host_for_offline_signing() {
    let node = TestNode::new(false);
    let (_, token) = node.new_token();
    let request = NodeKey::generate().unwrap().request("n2").unwrap();
    let enrolled = node.enrol(&token, &request.der).unwrap();
    assert!(matches!(
        enrolled.answer,
        EnrolmentAnswer::SignOffline { .. }
    ));
    assert_eq!(node.metrics.enrolments("admitted"), 1);
}

#[test]
fn silent_or_hostile_connections_do_not_block_others() {
    use std::io::{Read, Write};
    let node = TestNode::new(true);
    let (_, token) = node.new_token();
    // More silent connections than one address may have.
    let silent: Vec<_> = (0..6)
        .map(|_| TcpStream::connect(port_of(&node.config)).unwrap())
        .collect();
    for mut excess in silent.iter().skip(4) {
        excess.set_read_timeout(Some(LIMIT)).unwrap();
        assert_eq!(excess.read(&mut [0]).unwrap_or(0), 0, "closed at once");
    }
    drop(silent);
    let mut garbage = TcpStream::connect(port_of(&node.config)).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    garbage.set_read_timeout(Some(LIMIT)).unwrap();
    let _ = garbage.read_to_end(&mut answer);
    let request = NodeKey::generate().unwrap().request("n2").unwrap();
    let end = Instant::now() + LIMIT;
    // The places are free when the threads have seen the ends.
    while let Err(error) = node.enrol(&token, &request.der) {
        assert!(Instant::now() < end, "{error}");
    }
}

#[test]
fn newer_list_is_put_in_force_and_survives_a_restart() {
    let mut node = TestNode::new(true);
    let old = list_in(&node.ca());
    node.authority().issue("n2", &[], 9).unwrap();
    node.authority().revoke("n2").unwrap();
    let new = list_in(&node.ca());
    let status = node.publish(new.clone()).unwrap();
    assert_eq!((status.lists[0].number, status.lists[0].revoked), (2, 1));
    let WorkerEvent::Changed {
        loaded,
        list_source,
    } = node.event()
    else {
        panic!("no change");
    };
    assert_eq!((loaded.lists.lists().count(), list_source), (1, None));
    for list in [old.clone(), new, b"no list".to_vec()] {
        assert!(node.publish(list).is_err());
    }
    let from = NodeId(2);
    let source = ListSource::Peer(from);
    node.worker
        .send(WorkerCommand::ApplyList(source, old.clone().into()));
    assert!(matches!(
        node.event(),
        WorkerEvent::ListRefused {
            from: NodeId(2),
            ..
        }
    ));
    // The configured file has the old list; the saved one counts.
    use holdfast_api::ca::revocation_list_to_pem;
    std::fs::write(node.ca().join("ca.crl"), revocation_list_to_pem(&old)).unwrap();
    let node = node.restart();
    let loaded = LoadedCredentials::load(&node.config).unwrap();
    assert_eq!(loaded.lists.lists().next().unwrap().number, 2);
}

#[test]
fn certificate_is_renewed_with_the_same_key() {
    let mut node = TestNode::new(true);
    let before = LoadedCredentials::load(&node.config)
        .unwrap()
        .certificate_life();
    node.worker.send(WorkerCommand::MakeRequest);
    let WorkerEvent::RequestMade(Ok(request)) = node.event() else {
        panic!("no request");
    };
    let sign = |name: &str, request: &Bytes| WorkerCommand::Sign {
        requester: NodeId(1),
        name: name.to_owned(),
        certificate: None,
        request: request.clone(),
    };
    // A node gets a certificate for its own name and key only.
    let other = NodeKey::generate().unwrap().request("n1").unwrap();
    for command in [sign("n2", &request), sign("n1", &other.der.clone().into())] {
        node.worker.send(command);
        let WorkerEvent::Signed {
            result: Err(reason),
            ..
        } = node.event()
        else {
            panic!("signed");
        };
        assert_eq!(reason, RenewalRefusal::BadRequest);
    }
    node.worker.send(sign("n1", &request));
    let WorkerEvent::Signed {
        result: Ok(certificate),
        ..
    } = node.event()
    else {
        panic!("not signed");
    };
    node.worker.send(WorkerCommand::Install(certificate));
    let WorkerEvent::Changed { loaded, .. } = node.event() else {
        panic!("no change");
    };
    assert!(matches!(node.event(), WorkerEvent::Installed(Ok(()))));
    let day = Duration::from_secs(86_400);
    assert!(loaded.certificate_life().0 > before.0 + 80 * day);
    assert!(loaded.certificate_life().0 <= RENEWED_DAYS * day);
    // A certificate for another key changes nothing, and neither does the present one.
    let other = CertificateRequest::from_der(&other.der).unwrap();
    let other = node.authority().sign(&other, 9).unwrap();
    let present = read_certificates(&node.config.tls.cert).unwrap();
    for certificate in [other.der, present[0].to_vec()] {
        let install = WorkerCommand::Install(certificate.into());
        node.worker.send(install);
        assert!(matches!(
            node.event(),
            WorkerEvent::Installed(Err(InstallError::Certificate(_)))
        ));
    }
    LoadedCredentials::load(&node.config).unwrap();
    let still = read_certificates(&node.config.tls.cert).unwrap();
    assert_eq!(still, present);
}

#[test]
fn revoked_node_gets_no_renewal() {
    let mut node = TestNode::new(true);
    let key = NodeKey::generate().unwrap();
    let request = key.request("n2").unwrap();
    let parsed = CertificateRequest::from_der(&request.der).unwrap();
    let signed = node.authority().sign(&parsed, 9).unwrap();
    let sign = || WorkerCommand::Sign {
        requester: NodeId(2),
        name: "n2".to_owned(),
        certificate: Some(signed.der.clone().into()),
        request: request.der.clone().into(),
    };
    node.worker.send(sign());
    let answer = node.event();
    assert!(
        matches!(answer, WorkerEvent::Signed { result: Ok(_), .. }),
        "{answer:?}"
    );
    // The daemon does not have the list yet.
    node.authority().revoke("n2").unwrap();
    node.worker.send(sign());
    let answer = node.event();
    assert!(
        matches!(answer, WorkerEvent::Signed { result: Err(_), .. }),
        "{answer:?}"
    );
}

#[test]
fn damaged_files_leave_the_former_certificates_in_use() {
    let mut node = TestNode::new(false);
    node.worker.send(WorkerCommand::Reload);
    assert!(matches!(node.event(), WorkerEvent::Changed { .. }));
    std::fs::write(node.ca().join("n1.pem"), "text").unwrap();
    node.worker.send(WorkerCommand::Reload);
    let WorkerEvent::ReloadFailed { error } = node.event() else {
        panic!("loaded");
    };
    assert!(error.contains("n1.pem"), "{error}");
    let (dir, config) = files(false);
    std::fs::create_dir_all(config.credentials_dir()).unwrap();
    std::fs::write(config.credentials_dir().join("tokens"), [9, 9]).unwrap();
    let loaded = LoadedCredentials::load(&config).unwrap();
    let started = CredentialWorker::start(&config, &loaded, Metrics::new());
    let error = started.err().expect("tokens are damaged").to_string();
    assert!(error.contains("make new tokens"), "{error}");
    drop(dir);
}

#[test]
fn node_outside_its_group_makes_no_tokens_and_admits_no_host() {
    let node = TestNode::new(true);
    let (_, token) = node.new_token();
    let knowledge = configured_group(&node.config);
    let outside = GroupKnowledge {
        is_member: false,
        ..knowledge.clone()
    };
    node.worker.send(WorkerCommand::SetGroup(outside));
    let refused = node
        .ask(|reply| TokenCommand::New(600, JoinRole::Backup, reply))
        .unwrap_err();
    assert_eq!(refused.error, "node n1 is not in group web");
    let request = NodeKey::generate().unwrap().request("n2").unwrap();
    let reason = refusal(node.enrol(&token, &request.der));
    assert_eq!(reason, EnrolmentRefusal::NotInGroup);
    // The node is back, and the token is unused.
    node.worker.send(WorkerCommand::SetGroup(knowledge));
    node.enrol(&token, &request.der).unwrap();
}
