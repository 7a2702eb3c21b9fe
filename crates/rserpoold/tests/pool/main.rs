//! A pool daemon in a separate process, on loopback: its control API, programs that violate the protocol, and a
//! session.

mod session;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use holdfast_api::app::{Channel, PROTOCOL_VERSION, decode, encode};
use holdfast_api::control::{ErrorBody, POOL_ROUTES, PoolDaemonStatus, openapi};
use holdfast_api::pool::{
    DATA_BYTES_MAX, Element, ElementEvent, ElementService, FromPool, PoolSession,
    RegistrationRequest, SessionOptions, ToPool,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longest wait for any condition that must become true.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A pool daemon that ends with the test.
struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    /// Starts a daemon on ports chosen by the system. Its only registrar is at a port without a listener.
    fn start() -> Self {
        Daemon::with_registrar("127.0.0.1", 9)
    }

    /// Starts a daemon with a registrar at this address and UDP port.
    fn with_registrar(registrar: &str, udp: u16) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let config = directory.path().join("pool.toml");
        let text = format!(
            r#"
[pool]
listen = ["127.0.0.1"]
raw = false
encapsulation_port = 0
remote_encapsulation_port = {udp}
registrars = ["{registrar}"]
run_dir = "{}"
"#,
            directory.path().display()
        );
        std::fs::write(&config, text).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_rserpoold"));
        command.args(["pool", "--with-parent", "--config"]);
        command.arg(config).stdin(Stdio::piped());
        let child = command.spawn().expect("rserpoold");
        let daemon = Daemon { child, directory };
        wait_for("a daemon that answers", || {
            let programs = daemon.path("pool-app.sock").exists();
            (programs && daemon.path("pool.sock").exists()).then_some(())
        });
        daemon
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.request(&format!("GET {path} HTTP/1.1\r\n"), "")
    }

    fn post(&self, path: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        );
        self.request(&head, body)
    }

    fn request(&self, head: &str, body: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(self.path("pool.sock")).expect("a connection");
        let text = format!("{head}Host: x\r\nConnection: close\r\n\r\n{body}");
        stream.write_all(text.as_bytes()).expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status");
        (status.parse().expect("a number"), body.to_owned())
    }

    fn status(&self) -> PoolDaemonStatus {
        let (_, body) = self.get("/v1/pool");
        serde_json::from_str(&body).expect("a status")
    }

    fn assert_clean_exit(&mut self) {
        let end = wait_for("the daemon's end", || {
            self.child.try_wait().expect("a child")
        });
        assert!(end.success(), "{end}");
        assert!(!self.path("pool.sock").exists());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_for<T>(condition: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "exceeded time: {condition}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn registration(port: u16) -> RegistrationRequest {
    let address = format!("127.0.0.1:{port}").parse().expect("an address");
    RegistrationRequest::new("web", ElementService::Tcp(address))
}

#[test]
fn control_api_matches_openapi_and_errors_name_remedy() {
    let mut daemon = Daemon::start();
    let (_, description) = daemon.get("/openapi.json");
    let description: serde_json::Value = serde_json::from_str(&description).expect("JSON");
    assert_eq!(description, openapi(POOL_ROUTES));
    let status = daemon.status();
    assert_eq!((status.elements, status.sessions), (0, 0));
    let process = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id()));
    let process = process.expect("it runs");
    assert!(process.contains("NoNewPrivs:\t1"), "{process}");
    assert!(process.contains("Seccomp:\t2"), "{process}");
    assert_eq!(status.registrars.len(), 1);

    // No registrar is there: the answer says so when the wait is over.
    let report = r#"{"handle": "web", "id": "12"}"#;
    for (answer, status, expected_text) in [
        (daemon.get("/v1/resolve/web"), 404, "no registrar"),
        (
            daemon.get("/v1/resolve/%5Cq"),
            404,
            "not the text of a pool",
        ),
        (daemon.get("/v1/resolve/web?items=many"), 400, ""),
        (daemon.get("/v1/nothing"), 404, ""),
        (daemon.post("/v1/unreachable", "{}"), 400, ""),
        (
            daemon.post("/v1/unreachable", &report.replace("12", "xyz")),
            404,
            "not an element's id",
        ),
    ] {
        let (actual_status, body) = answer;
        assert_eq!(actual_status, status, "{body}");
        let body: ErrorBody = serde_json::from_str(&body).expect("an error");
        assert!(!body.what_to_do.is_empty(), "{body}");
        assert!(body.error.contains(expected_text), "{body}");
    }
    // A report about an element that no session was sent to is not forwarded to registrars, and is no error.
    assert_eq!(daemon.post("/v1/unreachable", report).0, 200);

    // The daemon ends when its standard input is closed.
    drop(daemon.child.stdin.take());
    daemon.assert_clean_exit();
}

#[test]
fn element_is_deregistered_when_channel_closes() {
    let mut daemon = Daemon::start();
    let socket = daemon.path("pool-app.sock");
    let element = Element::register(&socket, registration(80)).expect("a channel");
    wait_for("an element", || {
        (daemon.status().elements == 1).then_some(())
    });
    let (_, list) = daemon.get("/v1/elements");
    assert!(list.contains("127.0.0.1:80"), "{list}");
    assert!(list.contains(r#""registered":false"#), "{list}");
    let event = element.next_event().expect("a channel").expect("an event");
    assert_eq!(event, ElementEvent::NoRegistrar);
    let session = PoolSession::open(&socket, "web").expect("a channel");
    wait_for("a session", || {
        (daemon.status().sessions == 1).then_some(())
    });
    drop((element, session));
    wait_for("their end", || {
        let status = daemon.status();
        (status.elements + status.sessions == 0).then_some(())
    });
    // SIGTERM ends the daemon, even with an element that no registrar knows.
    let _element = Element::register(&socket, registration(81)).expect("a channel");
    let id = Pid::from_raw(daemon.child.id().cast_signed());
    kill(id, Signal::SIGTERM).expect("a signal");
    daemon.assert_clean_exit();
}

/// Returns the daemon's last message in answer to these packets; none if the daemon only closes the channel.
fn last_error(socket: &Path, packets: &[Vec<u8>]) -> Option<String> {
    let channel = Channel::connect(socket).expect("a channel");
    for packet in packets {
        if channel.send(packet, &[]).is_err() {
            break;
        }
    }
    let mut last = None;
    while let Ok(Some(packet)) = channel.receive() {
        if let Ok(FromPool::Error(text)) = decode(&packet.bytes) {
            last = Some(text);
        }
    }
    last
}

#[test]
fn invalid_message_is_refused_without_affecting_others() {
    let daemon = Daemon::start();
    let socket = daemon.path("pool-app.sock");
    let valid_element = Element::register(&socket, registration(80)).expect("a channel");
    let encoded = |message: &ToPool| encode(message).expect("an encoding");
    let register = |change: &dyn Fn(&mut RegistrationRequest)| {
        let mut wanted = registration(80);
        change(&mut wanted);
        encoded(&ToPool::Register(wanted))
    };
    let options = SessionOptions::default();
    let open = |handle: &str| {
        let handle = handle.to_owned();
        encoded(&ToPool::Open { handle, options })
    };
    let finish = encoded(&ToPool::Finish { connection: 0 });
    let (receiver, bytes) = (0, vec![0; DATA_BYTES_MAX + 1]);
    for (packets, expected_text) in [
        (vec![vec![PROTOCOL_VERSION, 250, 3]], "malformed"),
        (vec![vec![9]], "version"),
        (vec![finish], "Register or Open first"),
        (vec![open("\\q")], "pool handle"),
        (vec![open("web"), open("web")], "channel of this kind"),
        (
            vec![open("web"), encoded(&ToPool::Data { receiver, bytes })],
            "split it",
        ),
        (
            vec![register(&|wanted| wanted.policy.name = "BEST".into())],
            "LU-DPF",
        ),
        (
            vec![register(&|wanted| wanted.policy.load = Some(0.5))],
            "has no load",
        ),
        (vec![register(&|wanted| wanted.life_ms = Some(1))], "life"),
        (
            vec![register(&|wanted| {
                wanted.service = ElementService::Tcp("127.0.0.1:0".parse().expect("an address"));
            })],
            "port",
        ),
        (
            vec![register(&|wanted| {
                wanted.service = ElementService::Sctp(Vec::new())
            })],
            "address",
        ),
    ] {
        let error = last_error(&socket, &packets);
        let error = error.unwrap_or_else(|| panic!("no error about {expected_text}"));
        assert!(error.contains(expected_text), "{expected_text}: {error}");
    }
    wait_for("only the valid element", || {
        let status = daemon.status();
        (status.elements == 1 && status.sessions == 0).then_some(())
    });
    let policy = registration(80).policy;
    valid_element.set_policy(policy).expect("a channel");
}
