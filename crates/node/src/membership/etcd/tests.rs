//! Tests of the client against a real etcd on loopback (Debian's `etcd-server`), and against servers that are none.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use holdfast_proto::membership::{StoreAnswer, StoreRequest, StoreToken};
use holdfast_wire::NodeId;
use holdfast_wire::membership_frames::{GroupData, JoinNumber, Member, VotedView};
use serde_json::json;

use super::client::{EtcdClient, EtcdError};
use super::{EtcdStore, check_endpoints};
use crate::config::{EtcdConfig, EtcdEndpoint};

/// Time limit far above any real duration; only a failing test waits so long.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A running etcd, which ends with the value.
struct Etcd {
    process: Child,
    endpoint: EtcdEndpoint,
    _directory: tempfile::TempDir,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

impl Etcd {
    /// Starts etcd, with TLS if there are certificate, key and authority; none if etcd is not installed.
    fn start(tls: Option<&Certificates>) -> Option<Etcd> {
        let scheme = tls.map_or("http", |_| "https");
        let port = free_port();
        let url = format!("{scheme}://127.0.0.1:{port}");
        let peer_url = format!("http://127.0.0.1:{}", free_port());
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(directory.path());
        for (flag, value) in [
            ("--listen-client-urls", &url),
            ("--advertise-client-urls", &url),
            ("--listen-peer-urls", &peer_url),
            ("--initial-advertise-peer-urls", &peer_url),
            ("--initial-cluster", &format!("default={peer_url}")),
        ] {
            command.args([flag, value]);
        }
        if let Some(tls) = tls {
            command.arg("--cert-file").arg(&tls.certificate);
            command.arg("--key-file").arg(&tls.key);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let process = match command.spawn() {
            Ok(process) => process,
            Err(error) => {
                eprintln!("skipped: etcd (package etcd-server): {error}");
                return None;
            }
        };
        let etcd = Etcd {
            process,
            endpoint: EtcdEndpoint::parse(&url).unwrap(),
            _directory: directory,
        };
        Some(etcd)
    }

    fn config(&self) -> EtcdConfig {
        config(vec![self.endpoint.clone()])
    }
}

/// Certificates of an authority and of a server at 127.0.0.1.
struct Certificates {
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Certificates {
    fn in_directory(directory: &Path) -> Certificates {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap();
        let issuer = rcgen::Issuer::new(params, key);
        let server_key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&server_key, &issuer).unwrap();
        let write = |name: &str, pem: String| {
            let path = directory.join(name);
            std::fs::write(&path, pem).unwrap();
            path
        };
        Certificates {
            authority: write("ca.pem", authority.pem()),
            certificate: write("etcd.pem", certificate.pem()),
            key: write("etcd.key", server_key.serialize_pem()),
        }
    }
}

fn config(endpoints: Vec<EtcdEndpoint>) -> EtcdConfig {
    EtcdConfig {
        endpoints,
        prefix: "/holdfast/".to_owned(),
        ca: None,
        certificate: None,
        key: None,
        user: None,
        password_file: None,
    }
}

/// Returns a client that waits for a disk on which other tests write, too.
fn client(config: &EtcdConfig, group: &str) -> EtcdClient {
    let mut client = EtcdClient::new(config, 0, group, &"n1".parse().unwrap()).unwrap();
    client.request_timeout = TEST_TIMEOUT;
    client
}

/// Waits until a request succeeds.
fn patiently(client: &mut EtcdClient, request: &StoreRequest) -> StoreAnswer {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        match client.carry_out(request) {
            Ok(answer) => return answer,
            Err(error) => assert!(Instant::now() < deadline, "exceeded time: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn view(epoch: u64) -> VotedView {
    let voter = Member {
        id: NodeId(1),
        name: "n1".parse().unwrap(),
        address: "10.0.0.1:7400".parse().unwrap(),
        join: JoinNumber(7),
    };
    VotedView {
        epoch,
        voters: vec![voter],
        next_id: 2,
        group_data: GroupData {
            version: 1,
            bytes: bytes::Bytes::from(vec![b'x'; 100_000]),
        },
    }
}

fn proposal(expected: Option<u64>, epoch: u64) -> StoreRequest {
    let view = view(epoch);
    StoreRequest::Propose { expected, view }
}

#[test]
fn view_is_replaced_only_if_the_expected_one_is_there() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    let (mut one, mut other) = (client(&etcd.config(), "web"), client(&etcd.config(), "web"));
    assert_eq!(
        patiently(&mut one, &StoreRequest::Read),
        StoreAnswer::View(None)
    );
    let stored = StoreAnswer::Stored;
    assert_eq!(one.carry_out(&proposal(None, 1)).unwrap(), stored);
    let first = StoreAnswer::View(Some(view(1)));
    assert_eq!(other.carry_out(&StoreRequest::Read).unwrap(), first);
    assert_eq!(other.carry_out(&proposal(None, 2)).unwrap(), first);
    assert_eq!(other.carry_out(&proposal(Some(1), 2)).unwrap(), stored);
    let second = StoreAnswer::View(Some(view(2)));
    assert_eq!(one.carry_out(&proposal(Some(1), 3)).unwrap(), second);
    // The groups of one etcd have keys of their own.
    let mut mail = client(&etcd.config(), "mail");
    let empty = StoreAnswer::View(None);
    assert_eq!(mail.carry_out(&StoreRequest::Read).unwrap(), empty);
}

#[test]
fn of_proposals_at_once_one_is_stored() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    patiently(&mut client(&etcd.config(), "web"), &proposal(None, 1));
    let config = etcd.config();
    let propose = |epoch: u64| {
        let mut client = client(&config, "web");
        patiently(&mut client, &proposal(Some(1), epoch))
    };
    let answers: Vec<(u64, StoreAnswer)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (2..10)
            .map(|epoch| scope.spawn(move || (epoch, propose(epoch))))
            .collect();
        let answers = threads.into_iter().map(|thread| thread.join().unwrap());
        answers.collect()
    });
    let StoreAnswer::View(Some(stored)) =
        patiently(&mut client(&config, "web"), &StoreRequest::Read)
    else {
        panic!("a proposal is stored");
    };
    for (epoch, answer) in answers {
        match answer {
            StoreAnswer::Stored => assert_eq!(epoch, stored.epoch),
            // Also the answer to a proposal that was stored without an answer, and repeated.
            StoreAnswer::View(Some(view)) => assert_eq!(view.epoch, stored.epoch),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn tls_and_password_are_checked() {
    let directory = tempfile::tempdir().unwrap();
    let certificates = Certificates::in_directory(directory.path());
    let Some(etcd) = Etcd::start(Some(&certificates)) else {
        return;
    };
    let mut config = etcd.config();
    config.ca = Some(certificates.authority.clone());
    let mut open = client(&config, "web");
    patiently(&mut open, &proposal(None, 1));
    let deadline = || Instant::now() + TEST_TIMEOUT;
    for (path, request) in [
        ("user/add", json!({"name": "root", "password": "secret"})),
        ("role/add", json!({"name": "root"})),
        ("user/grant", json!({"user": "root", "role": "root"})),
        ("enable", json!({})),
    ] {
        let path = format!("/v3/auth/{path}");
        open.call::<serde_json::Value>(&path, &request, deadline())
            .unwrap();
    }
    let refused = open.carry_out(&StoreRequest::Read);
    assert!(
        matches!(refused, Err(EtcdError::Refused { .. })),
        "{refused:?}"
    );
    let password_file = directory.path().join("password");
    config.user = Some("root".to_owned());
    config.password_file = Some(password_file.clone());
    std::fs::write(&password_file, "wrong\n").unwrap();
    let refused = client(&config, "web").carry_out(&StoreRequest::Read);
    assert!(
        matches!(refused, Err(EtcdError::Refused { .. })),
        "{refused:?}"
    );
    std::fs::write(&password_file, "secret\n").unwrap();
    let mut user = client(&config, "web");
    assert_eq!(
        patiently(&mut user, &proposal(Some(1), 2)),
        StoreAnswer::Stored
    );
    // Another authority's certificate is refused before the password is sent.
    let elsewhere = tempfile::tempdir().unwrap();
    config.ca = Some(Certificates::in_directory(elsewhere.path()).authority);
    let refused = client(&config, "web").carry_out(&StoreRequest::Read);
    assert!(matches!(refused, Err(EtcdError::Io(_))), "{refused:?}");
}

#[test]
fn foreign_content_and_other_groups_are_refused() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    let mut web = client(&etcd.config(), "web");
    patiently(&mut web, &proposal(None, 1));
    let mut config = etcd.config();
    // A prefix that makes the key of one group that of another.
    config.prefix = "/holdfast/web/view#".to_owned();
    let key = super::base64::encode(b"/holdfast/web/view#web/view");
    let deadline = Instant::now() + TEST_TIMEOUT;
    let put = json!({"key": key, "value": super::base64::encode(b"[settings]")});
    web.call::<serde_json::Value>("/v3/kv/put", &put, deadline)
        .unwrap();
    let error = client(&config, "web").carry_out(&StoreRequest::Read);
    assert!(matches!(error, Err(EtcdError::Content { .. })), "{error:?}");
    let saved = web.value_of(&view(1)).unwrap();
    let put = json!({"key": super::base64::encode(b"/holdfast/mail/view"), "value": super::base64::encode(&saved)});
    web.call::<serde_json::Value>("/v3/kv/put", &put, deadline)
        .unwrap();
    let error = client(&etcd.config(), "mail").carry_out(&StoreRequest::Read);
    assert!(matches!(error, Err(EtcdError::OtherGroup(_))), "{error:?}");
}

/// Starts a server that answers each connection with these bytes, or not at all.
fn start_server(answer: Option<&'static str>) -> EtcdEndpoint {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut silent = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            match answer {
                Some(answer) => {
                    let _ = stream.read(&mut [0; 4_096]);
                    let _ = stream.write_all(answer.as_bytes());
                }
                None => silent.push(stream),
            }
        }
    });
    EtcdEndpoint {
        host: "127.0.0.1".to_owned(),
        port,
        is_tls: false,
    }
}

#[test]
fn servers_that_are_not_etcd_are_refused() {
    for answer in [
        "SSH-2.0-OpenSSH_9.2\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n",
        "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone",
        "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",
    ] {
        let config = config(vec![start_server(Some(answer))]);
        let result = client(&config, "web").carry_out(&StoreRequest::Read);
        assert!(result.is_err(), "{answer}: {result:?}");
    }
}

#[test]
fn member_that_hangs_holds_up_no_other_one() {
    let Some(etcd) = Etcd::start(None) else {
        return;
    };
    patiently(&mut client(&etcd.config(), "web"), &proposal(None, 1));
    let config = config(vec![start_server(None), etcd.endpoint.clone()]);
    let name = "n1".parse().unwrap();
    let (mut store, mut answers) = EtcdStore::start(&config, "web", &name).unwrap();
    let mut answer_of = |store: &mut EtcdStore, token: u64, request: StoreRequest| {
        let token = StoreToken(token);
        assert_eq!(store.send(token, request), None);
        loop {
            let answer = answers.blocking_recv().unwrap();
            match store.on_answer(answer) {
                Some((answered, answer)) if answered == token => return answer,
                _ => {}
            }
        }
    };
    // A slow disk may hold etcd up for longer than a request may take.
    let mut tokens = 1..;
    let mut answer_in_time = |request: &StoreRequest| {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let token = tokens.next().unwrap();
            match answer_of(&mut store, token, request.clone()) {
                StoreAnswer::Unavailable => assert!(Instant::now() < deadline, "exceeded time"),
                answer => return answer,
            }
        }
    };
    let first = StoreAnswer::View(Some(view(1)));
    assert_eq!(answer_in_time(&StoreRequest::Read), first);
    let proposed = answer_in_time(&proposal(Some(1), 2));
    // A proposal that was stored without an answer in time finds itself when it is repeated.
    let second = StoreAnswer::View(Some(view(2)));
    let is_stored = proposed == StoreAnswer::Stored || proposed == second;
    assert!(is_stored, "{proposed:?}");
    let failures = check_endpoints(&config, "web", &name);
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(
        failures[0].0.starts_with("http://127.0.0.1:"),
        "{failures:?}"
    );
}

#[test]
fn silent_store_is_unavailable() {
    let config = config(vec![start_server(None), start_server(Some("nothing"))]);
    let name = "n1".parse().unwrap();
    let (mut store, mut answers) = EtcdStore::start(&config, "web", &name).unwrap();
    for request in [StoreRequest::Read, proposal(None, 1)] {
        let token = StoreToken(u64::from(request != StoreRequest::Read));
        assert_eq!(store.send(token, request), None);
        let answered = loop {
            if let Some(answered) = store.on_answer(answers.blocking_recv().unwrap()) {
                break answered;
            }
        };
        assert_eq!(answered, (token, StoreAnswer::Unavailable));
    }
    assert!(
        store.failures().contains("http://127.0.0.1"),
        "{}",
        store.failures()
    );
}
