//! A group is made with the commands of docs/joining.md: hosts join with tokens, a service gets clients, and a certificate
//! is revoked. Strangers, and tokens that are not good, change nothing. Needs root.

#[path = "../common/mod.rs"]
mod common;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::Duration;

use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_api::control::{BlockingControlClient, NewToken, NodeList, TokenRequest};
use holdfast_daemon::config::TlsConfig;
use holdfast_daemon::tls::Tls;
use holdfast_lab::{Lab, LabSpec};
use holdfast_node::config::DEFAULT_PORT;
use holdfast_testbed::cluster::find_program;
use holdfast_wire::greeting::NodeFacts;
use holdfast_wire::{Frame, NodeId, encode};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustls::StreamOwned;

use common::{PORT, eventually, lock_lab};

/// Longest wait for an answer to a client; below the first retransmission of a SYN.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(800);

/// Hosts without files of Holdfast, and the programs that the test starts on them.
struct Hosts {
    /// Killed before the lab ends.
    programs: Vec<Child>,
    lab: Lab,
    directory: tempfile::TempDir,
}

impl Hosts {
    fn up() -> Hosts {
        holdfast_lab::prune().unwrap();
        let name = format!("group-joining-{}", std::process::id());
        Hosts {
            programs: Vec::new(),
            lab: Lab::up(&LabSpec::new(&name).nodes(4).clients(1)).unwrap(),
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn config(&self, host: &str) -> PathBuf {
        self.directory.path().join(format!("{host}.toml"))
    }

    fn state_dir(&self, host: &str) -> PathBuf {
        self.directory.path().join(host)
    }

    /// Runs `holdfast` on a host to its end.
    fn holdfast(&self, host: &str, words: &[&str]) -> Output {
        let mut command = self.lab.command(host).unwrap();
        command.arg(find_program("holdfast").unwrap());
        command.args(words).output().unwrap()
    }

    /// Runs `holdfast` with words that end in the paths of the host's files.
    fn holdfast_with_files(&self, host: &str, words: &[&str]) -> Output {
        let (config, state) = (self.config(host), self.state_dir(host));
        let files = ["--config", config.to_str().unwrap(), "--state-dir"];
        let state = [state.to_str().unwrap()];
        self.holdfast(host, &[words, &files, &state].concat())
    }

    fn start(&mut self, host: &str) {
        let mut daemon = self.lab.command(host).unwrap();
        daemon.arg(find_program("holdfastd").unwrap());
        let daemon = daemon.arg("--config").arg(self.config(host)).spawn();
        let mut server = self.lab.command(host).unwrap();
        server.arg(find_program("echo").unwrap());
        let server = server
            .arg("--listen")
            .arg(format!("0.0.0.0:{PORT}"))
            .spawn();
        self.programs.extend([daemon.unwrap(), server.unwrap()]);
    }

    fn client(&self, node: &str) -> BlockingControlClient {
        let init = self.lab.init_process(node).unwrap();
        let socket = format!("/proc/{init}/root/run/holdfast/control.sock");
        BlockingControlClient::new(Path::new(&socket)).unwrap()
    }

    fn nodes(&self, node: &str) -> Option<NodeList> {
        self.client(node).run(|client| client.nodes()).ok()
    }

    /// Returns the number of a node as another node knows it; none if the node is outside the group.
    fn number(&self, at: &str, of: &str) -> Option<u16> {
        let list = self.nodes(at)?;
        let node = list.nodes.iter().find(|node| node.name == of)?;
        Some(node.id)
    }

    fn wait_for_nodes(&self, expected: &[&str]) {
        let knows_all = |node: &&str| {
            let list = self.nodes(node);
            list.is_some_and(|list| {
                list.nodes.len() == expected.len() && list.nodes.iter().all(|node| node.connected)
            })
        };
        eventually("all nodes are in the group", || {
            expected.iter().all(knows_all)
        });
    }

    fn epoch(&self, node: &str) -> u64 {
        let status = self.client(node).run(|client| client.status()).unwrap();
        status.membership.unwrap().epoch
    }

    /// Returns the token for `holdfast node join`.
    fn new_token(&self) -> String {
        let made = self.holdfast("n1", &["group", "token"]);
        assert_succeeded(&made);
        let text = String::from_utf8(made.stdout).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        let (n1, _) = self.lab.address("n1").unwrap();
        assert_eq!(words[..5], ["holdfast", "node", "join", "--token", "-"]);
        assert_eq!(words[5], n1.to_string());
        words[6].to_owned()
    }

    fn join(&self, host: &str, token: &str, more: &[&str]) -> Output {
        let (n1, _) = self.lab.address("n1").unwrap();
        let address = n1.to_string();
        let words = ["node", "join", "--token", token, &address];
        self.holdfast_with_files(host, &[&words[..], more].concat())
    }

    fn metric(&self, node: &str, line: &str) -> u64 {
        let text = self.client(node).run(|client| client.metrics()).unwrap();
        let value = text
            .lines()
            .find_map(|text| text.strip_prefix(line)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    fn has_service(&self, node: &str) -> bool {
        let list = self.client(node).run(|client| client.services());
        list.is_ok_and(|list| list.services.iter().any(|service| service.name == "echo"))
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let address = SocketAddr::new(IpAddr::V4(self.lab.service_address().0), PORT);
        let connected = self.lab.run_in_net_namespace("c1", || {
            TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)
        });
        let stream = connected.unwrap()?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(stream)
    }

    /// Asserts that new clients are served.
    fn assert_serves(&self) {
        for _ in 0..8 {
            echo(&mut self.connect().unwrap());
        }
    }

    fn daemon(&self, node: &str) -> Pid {
        let is_daemon = |pid: &i32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name.trim() == "holdfastd")
        };
        let processes = self.lab.processes(node).unwrap();
        Pid::from_raw(processes.into_iter().find(is_daemon).unwrap())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

#[track_caller]
fn assert_succeeded(output: &Output) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
}

#[track_caller]
fn assert_refused(output: &Output, text: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && errors.contains(text),
        "{errors}"
    );
}

/// Sends bytes and waits for their echo.
fn echo(stream: &mut TcpStream) {
    stream.write_all(b"are you there?").unwrap();
    let mut answer = [0; 14];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"are you there?");
}

#[test]
fn group_is_made_with_commands_and_refuses_strangers() {
    let Some(_lab_lock) = lock_lab() else {
        return;
    };
    let mut hosts = Hosts::up();
    let created = hosts.holdfast_with_files("n1", &["group", "create", "web"]);
    assert_succeeded(&created);
    hosts.start("n1");
    eventually("the first node serves", || {
        hosts.nodes("n1").is_some_and(|list| list.nodes.len() == 1)
    });
    let used = hosts.new_token();
    assert_succeeded(&hosts.join("n2", &used, &[]));
    assert_succeeded(&hosts.join("n3", &hosts.new_token(), &[]));
    hosts.start("n2");
    hosts.start("n3");
    hosts.wait_for_nodes(&["n1", "n2", "n3"]);

    let address = hosts.lab.service_address().0.to_string();
    let port = PORT.to_string();
    let add = [
        "service",
        "add",
        "echo",
        "--address",
        &address,
        "--port",
        &port,
    ];
    assert_succeeded(&hosts.holdfast("n2", &add));
    eventually("all nodes have the service", || {
        ["n1", "n2", "n3"]
            .iter()
            .all(|node| hosts.has_service(node))
    });
    hosts.assert_serves();

    refuse_tokens(&hosts, &used);
    refuse_strangers(&hosts);
    keep_services_under_another_number(&hosts);
    revoke(&hosts);
    admit_server_node(&mut hosts);
}

/// Tokens that are not good, and a name that is taken: refused, counted, and the host has no configuration.
fn refuse_tokens(hosts: &Hosts, used: &str) {
    const REFUSED: &str = "holdfast_enrolments_total{outcome=\"refused\"}";
    let (epoch, refused) = (hosts.epoch("n1"), hosts.metric("n1", REFUSED));
    let n1 = hosts.client("n1");
    let short = TokenRequest {
        lifetime_s: Some(1),
        role: None,
    };
    let expired = n1.run(|client| client.make_token(&short));
    let expired = expired.unwrap();
    let request = TokenRequest::default();
    let revoked = n1.run(|client| client.make_token(&request));
    let revoked = revoked.unwrap();
    let revocation = ["group", "token", "--revoke", &revoked.id];
    assert_succeeded(&hosts.holdfast("n1", &revocation));
    let mut unknown: holdfast_api::enrolment::JoinToken = used.parse().unwrap();
    unknown = holdfast_api::enrolment::JoinToken::with_secret(unknown.authority, [7; 16]);
    let foreign = holdfast_api::enrolment::AuthorityId([9; 16]);
    let foreign = holdfast_api::enrolment::JoinToken::with_secret(foreign, [7; 16]);

    assert_refused(
        &hosts.join("n4", used, &[]),
        "another node has used the token",
    );
    assert_refused(
        &hosts.join("n4", &revoked.token, &[]),
        "the token was revoked",
    );
    let answer = hosts.join("n4", &unknown.to_string(), &[]);
    assert_refused(&answer, "does not know this token");
    let taken = ["--name", "n2"];
    assert_refused(
        &hosts.join("n4", &hosts.new_token(), &taken),
        "has this name",
    );
    std::thread::sleep(Duration::from_millis(1_100));
    assert_refused(
        &hosts.join("n4", &expired.token, &[]),
        "the token has expired",
    );
    assert_eq!(hosts.metric("n1", REFUSED), refused + 5);
    // The host itself refuses these.
    assert_refused(&hosts.join("n4", &foreign.to_string(), &[]), "authority");
    assert_refused(&hosts.join("n4", "hf1-0", &[]), "not a join token");
    assert!(!hosts.config("n4").exists());
    assert_eq!(hosts.epoch("n1"), epoch);
    assert_eq!(hosts.nodes("n1").unwrap().nodes.len(), 3);
}

/// Datagrams and connections of strangers: refused, counted, and the view stays.
fn refuse_strangers(hosts: &Hosts) {
    const DATAGRAMS: &str = "holdfast_datagrams_refused_total{reason=\"malformed\"}";
    const CERTIFICATES: &str = "holdfast_frames_rejected_total{reason=\"certificate\"}";
    let (epoch, n2) = (hosts.epoch("n2"), hosts.lab.address("n2").unwrap().0);
    let n2 = SocketAddr::new(n2.into(), DEFAULT_PORT);
    let before = hosts.metric("n2", DATAGRAMS);
    let sent = hosts.lab.run_in_net_namespace("n4", || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        for bytes in [&b"Hd"[..], &[0; 64], &[0x48; 1_200]] {
            socket.send_to(bytes, n2).unwrap();
        }
    });
    sent.unwrap();
    eventually("the datagrams are counted", || {
        hosts.metric("n2", DATAGRAMS) == before + 3
    });

    let authority = hosts.directory.path().join("other");
    let other = CertificateAuthority::init(&authority, "web").unwrap();
    other.issue("n3", &[], NODE_DAYS).unwrap();
    let files = TlsConfig {
        ca: hosts.state_dir("n1").join("tls/ca.pem"),
        cert: authority.join("n3.pem"),
        key: authority.join("n3.key"),
        crl: None,
    };
    let stranger = Tls::from_files(&files, "n3").unwrap();
    let before = hosts.metric("n2", CERTIFICATES);
    let connect = || TcpStream::connect(n2).unwrap();
    let socket = hosts.lab.run_in_net_namespace("n4", connect).unwrap();
    let mut stream = StreamOwned::new(stranger.dial("n2").unwrap(), socket);
    let mut hello = Vec::new();
    let frame = Frame::Hello {
        node: NodeId(3),
        boot: 1,
        group: "web".to_owned(),
        facts: NodeFacts::default(),
    };
    encode(&frame, &mut hello).unwrap();
    let _ = stream.write_all(&hello);
    let _ = stream.read_to_end(&mut Vec::new());
    eventually("the certificate is counted", || {
        hosts.metric("n2", CERTIFICATES) > before
    });
    assert_eq!(hosts.epoch("n2"), epoch);
    hosts.assert_serves();
}

/// A node that the group took for failed joins again, and has the services of the group at once.
fn keep_services_under_another_number(hosts: &Hosts) {
    let former = hosts.number("n1", "n2").unwrap();
    let daemon = hosts.daemon("n2");
    kill(daemon, Signal::SIGSTOP).unwrap();
    eventually("the group removes the stopped node", || {
        hosts.number("n1", "n2").is_none()
    });
    kill(daemon, Signal::SIGCONT).unwrap();
    eventually("the node joins again", || {
        let number = hosts.number("n2", "n2");
        number.is_some_and(|number| number != former) && hosts.number("n1", "n2") == number
    });
    assert!(hosts.has_service("n2"));
    hosts.wait_for_nodes(&["n1", "n2", "n3"]);
    hosts.assert_serves();
}

/// A revoked certificate: refused by all nodes within a second, and the group goes on without the node.
fn revoke(hosts: &Hosts) {
    let authority = hosts.state_dir("n1").join("authority");
    let authority = authority.to_str().unwrap();
    let words = ["ca", "--dir", authority, "revoke", "n3"];
    assert_succeeded(&hosts.holdfast("n1", &words));
    let revoked_at = std::time::Instant::now();
    let refuses = |node: &&str| {
        let list = hosts.nodes(node).unwrap();
        (list.nodes.iter()).all(|node| node.name != "n3" || !node.connected)
    };
    eventually("no node is connected to the revoked one", || {
        ["n1", "n2"].iter().all(refuses)
    });
    let elapsed = revoked_at.elapsed();
    assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
    // Heartbeats need no connection, but keys, which end with the certificate.
    eventually("the group goes on without the revoked node", || {
        ["n1", "n2"]
            .iter()
            .all(|node| hosts.number(node, "n3").is_none())
    });
    hosts.assert_serves();
}

/// A token for a server node: its host cannot become a backup, and serves.
fn admit_server_node(hosts: &mut Hosts) {
    let made = hosts.holdfast("n1", &["group", "token", "--role", "server", "--json"]);
    assert_succeeded(&made);
    let made: NewToken = serde_json::from_slice(&made.stdout).unwrap();
    let as_backup = hosts.join("n4", &made.token, &["--role", "backup"]);
    assert_refused(&as_backup, "as a server node only");
    assert!(!hosts.config("n4").exists());
    // The same host may use its token again.
    assert_succeeded(&hosts.join("n4", &made.token, &[]));
    let config = std::fs::read_to_string(hosts.config("n4")).unwrap();
    assert!(config.contains("role = \"server\""), "{config}");
    let forged = hosts.directory.path().join("forged.toml");
    std::fs::write(&forged, config.replace("\"server\"", "\"backup\"")).unwrap();
    let mut check = hosts.lab.command("n4").unwrap();
    check.arg(find_program("holdfastd").unwrap());
    let check = check.arg("--check").arg("--config").arg(&forged).output();
    assert_refused(&check.unwrap(), "as a server node only");
    hosts.start("n4");
    eventually("the host is a server node", || {
        let list = hosts.nodes("n1");
        let mut nodes = list.into_iter().flat_map(|list| list.nodes);
        nodes.any(|node| node.name == "n4" && node.role.as_deref() == Some("server node"))
    });
}
