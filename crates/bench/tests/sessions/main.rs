//! Sessions with pool elements continue when elements and registrars are killed. Real processes in a lab; needs root.

mod sctp_round_trips;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_api::control::PoolDetail;
use holdfast_api::pool::{PoolSession, SessionEvent};
use holdfast_testbed::capture::RunningCapture;
use holdfast_testbed::cluster::find_program;
use holdfast_testbed::process_lab::{ProcessLab, command_words};

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);
const REGISTRARS: [&str; 2] = ["n1", "n2"];
const ELEMENTS: [&str; 3] = ["n3", "n4", "n5"];

/// Brings up registrars, and elements that number lines.
fn start_pool(name: &str) -> ProcessLab {
    let name = format!("{name}-{}", std::process::id());
    let mut lab = ProcessLab::up(&name, 5).expect("a lab");
    lab.start_registrar("n1", None).expect("a registrar");
    wait_until_ready(&lab, "n1");
    lab.start_registrar("n2", Some("n1")).expect("a registrar");
    wait_until_ready(&lab, "n2");
    let key = lab.directory().join("key");
    std::fs::write(&key, "5a".repeat(32)).expect("a key");
    for host in ELEMENTS {
        lab.start_pool_daemon(host, &REGISTRARS)
            .expect("a pool daemon");
        start_lines_server(&mut lab, host);
    }
    lab.start_pool_daemon("c1", &REGISTRARS)
        .expect("a pool daemon");
    pool_socket(&lab, "c1");
    for registrar in REGISTRARS {
        wait_until_listed(&lab, registrar, ELEMENTS.len());
    }
    lab
}

fn wait_until_ready(lab: &ProcessLab, host: &str) {
    let client = lab.control_client(host, "registrar").expect("a client");
    let is_ready = || {
        client
            .run(|client| client.registrar())
            .ok()?
            .ready
            .then_some(())
    };
    lab.wait_for("a registrar that serves", PATIENCE, is_ready)
        .expect("a registrar");
}

/// Returns the path of the pool daemon's socket for programs, once the socket exists.
fn pool_socket(lab: &ProcessLab, host: &str) -> PathBuf {
    let path = lab.run_path(host, "pool-app.sock").expect("a host");
    let socket_exists = || path.exists().then_some(());
    lab.wait_for("a pool daemon", PATIENCE, socket_exists)
        .expect("a pool daemon");
    path
}

fn start_lines_server(lab: &mut ProcessLab, host: &str) {
    pool_socket(lab, host);
    let mut arguments = command_words(["--key"]);
    arguments.push(lab.directory().join("key").display().to_string());
    let program = find_program("lines").expect("the example");
    lab.run(host, "lines", &program, &arguments)
        .expect("an element");
}

fn pool_detail(lab: &ProcessLab, registrar: &str) -> Option<PoolDetail> {
    let client = lab.control_client(registrar, "registrar").ok()?;
    client.run(|client| client.pool("lines")).ok()
}

fn wait_until_listed(lab: &ProcessLab, registrar: &str, count: usize) {
    let are_all_listed = || (pool_detail(lab, registrar)?.elements.len() == count).then_some(());
    lab.wait_for("the elements in the pool", PATIENCE, are_all_listed)
        .expect("a pool");
}

/// Returns the host with this address.
fn host_at(lab: &ProcessLab, address: std::net::IpAddr) -> String {
    let has_address = |host: &&&str| lab.address(host).is_ok_and(|own| own == address);
    (*ELEMENTS.iter().find(has_address).expect("an element")).to_owned()
}

/// A pool user that sends one line at a time, and repeats lines without an answer.
struct PoolUser {
    session: Arc<PoolSession>,
    events: Receiver<SessionEvent>,
    connection: u64,
    line: u64,
    element_host: String,
}

impl PoolUser {
    fn open(lab: &ProcessLab) -> PoolUser {
        let path = lab.run_path("c1", "pool-app.sock").expect("a path");
        let session = Arc::new(PoolSession::open(path, "lines").expect("a session"));
        let (sender, events) = channel();
        let source = session.clone();
        std::thread::spawn(move || {
            while let Ok(Some(event)) = source.next_event() {
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        let mut user = PoolUser {
            session,
            events,
            connection: 0,
            line: 0,
            element_host: String::new(),
        };
        user.wait_until_up(lab, false);
        user
    }

    fn next_event(&self) -> SessionEvent {
        self.events.recv_timeout(PATIENCE).expect("an event")
    }

    /// Waits until the session has an element.
    fn wait_until_up(&mut self, lab: &ProcessLab, expect_resumed: bool) {
        loop {
            match self.next_event() {
                SessionEvent::Up {
                    connection,
                    addresses,
                    resumed,
                    ..
                } => {
                    assert_eq!(resumed, expect_resumed);
                    self.connection = connection;
                    self.element_host = host_at(lab, addresses[0].ip());
                    return;
                }
                SessionEvent::ElementLost { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn send_line(&self) {
        let text = format!("line {}\n", self.line + 1);
        let sent = self.session.send(self.connection, text.as_bytes());
        sent.expect("sent");
    }

    /// Waits for the answer to the last line.
    fn wait_for_answer(&mut self) {
        self.line += 1;
        let wanted = format!("{} line {}\n", self.line, self.line);
        match self.next_event() {
            SessionEvent::Data { bytes } => assert_eq!(String::from_utf8_lossy(&bytes), wanted),
            other => panic!("instead of the answer to line {}: {other:?}", self.line),
        }
    }

    fn exchange_lines(&mut self, count: usize) {
        for _ in 0..count {
            self.send_line();
            self.wait_for_answer();
        }
    }
}

fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: a lab needs root");
    }
    is_root
}

/// Lets one lab run at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Kills the element with `kill`, and follows the session to the next element, which has the session's state. The user
/// goes on within two round trips after the loss was detected, counted in the captured packets between user and
/// element.
fn kill_element(
    lab: &ProcessLab,
    user: &mut PoolUser,
    what: &str,
    kill: impl FnOnce(&ProcessLab, &str),
) {
    let file = lab.directory().join(format!("{}.pcap", user.element_host));
    let capture = RunningCapture::start(lab.lab(), "c1", "sctp or udp port 9899", &file);
    let capture = capture.expect("a capture");
    let killed_host = user.element_host.clone();
    kill(lab, &killed_host);
    user.wait_until_up(lab, true);
    assert_ne!(user.element_host, killed_host);
    user.send_line();
    user.wait_for_answer();
    user.exchange_lines(3);
    let recorded = capture.finish().expect("a whole capture");
    let [own, other] = ["c1", &user.element_host].map(|host| lab.address(host).expect("a host"));
    let round_trips = sctp_round_trips::round_trips(&recorded.file, own, other);
    println!(
        "{what} at {killed_host}: the session continues at {} after line {}, {round_trips} round trips after the loss was seen",
        user.element_host,
        user.line - 4
    );
    assert!(round_trips <= 2, "{round_trips} round trips");
}

#[test]
fn session_fails_over_with_state() {
    if !is_root() {
        return;
    }
    let _alone = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|held| held.into_inner());
    let mut lab = start_pool("sessions");
    let mut user = PoolUser::open(&lab);
    user.exchange_lines(5);
    let first = user.element_host.clone();
    kill_element(&lab, &mut user, "the program is killed", |lab, host| {
        lab.kill_by_name(host, "lines").expect("killed");
    });
    // The host's daemon has deregistered the element; another element takes its place.
    start_lines_server(&mut lab, &first);
    wait_until_listed(&lab, "n1", ELEMENTS.len());
    kill_element(
        &lab,
        &mut user,
        "program and daemon are killed",
        |lab, host| {
            lab.kill_all(host).expect("killed");
        },
    );
    assert_eq!(user.line, 13, "no line is counted twice, none is lost");
}

/// Kills the registrar at `victim`: the registrar at `other` lists all elements at all times, and users resolve there.
fn kill_registrar(lab: &ProcessLab, user: &mut PoolUser, victim: &str, other: &str) {
    let client = lab.control_client(other, "registrar").expect("a client");
    let status = || client.run(|client| client.registrar()).expect("a status");
    let (other_id, before) = (status().id, status().counters.reregistrations);
    let elements = pool_detail(lab, other).expect("a pool").elements;
    let rehomed = elements.iter().filter(|element| element.home != other_id);
    let moving = rehomed.count() as u64;
    lab.kill_all(victim).expect("killed");
    let mut elements_min = ELEMENTS.len();
    let are_all_registered = || {
        let pool = pool_detail(lab, other)?;
        elements_min = elements_min.min(pool.elements.len());
        let own_elements = pool
            .elements
            .iter()
            .filter(|element| element.home == other_id);
        (own_elements.count() == ELEMENTS.len()).then_some(())
    };
    lab.wait_for(
        "the elements at the other registrar",
        PATIENCE,
        are_all_registered,
    )
    .expect("a takeover");
    assert_eq!(elements_min, ELEMENTS.len(), "an element was lost");
    // The session needs no registrar, but a resolution does.
    user.exchange_lines(3);
    let daemon = lab.control_client("c1", "pool").expect("a client");
    let resolve = || {
        let query = Default::default();
        let answer = daemon.run(|client| client.resolve("lines", &query)).ok()?;
        (answer.elements.len() == ELEMENTS.len()).then_some(())
    };
    lab.wait_for("a resolution by the other registrar", PATIENCE, resolve)
        .expect("a resolution");
    // Elements of the killed home registrar have reregistered, or use the registrar that took them over as their home.
    let has_new_home = |host: &&str| {
        let client = lab.control_client(host, "pool").expect("a client");
        let own = client.run(|client| client.own_elements()).ok();
        let own = own.and_then(|own| own.elements.into_iter().next());
        own.is_some_and(|element| element.home.as_deref() == Some(&other_id))
    };
    let rehoming_state = || {
        let new_registrations = status().counters.reregistrations - before;
        let rehomed_hosts = ELEMENTS.iter().copied().filter(|host| has_new_home(host));
        (new_registrations + rehomed_hosts.count() as u64 >= moving).then_some(())
    };
    lab.wait_for(
        "elements that found another registrar",
        PATIENCE,
        rehoming_state,
    )
    .expect("a home");
    println!(
        "the registrar at {victim} is killed: the user and all {} elements found the one at {other}, which listed {elements_min} or more all the time",
        ELEMENTS.len(),
    );
}

#[test]
fn registrar_death_loses_no_element() {
    if !is_root() {
        return;
    }
    let _alone = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|held| held.into_inner());
    let mut lab = start_pool("registrars");
    let mut user = PoolUser::open(&lab);
    user.exchange_lines(3);
    kill_registrar(&lab, &mut user, "n1", "n2");
    // One of the two registrars was home of all elements.
    lab.start_registrar("n1", Some("n2")).expect("a registrar");
    wait_until_ready(&lab, "n1");
    wait_until_listed(&lab, "n1", ELEMENTS.len());
    kill_registrar(&lab, &mut user, "n2", "n1");
}
