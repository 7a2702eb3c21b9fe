//! Sessions with pool elements continue when elements and registrars are killed. Real processes in a lab; needs root.

mod wire;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_api::control::PoolDetail;
use holdfast_api::pool::{PoolSession, SessionEvent};
use holdfast_bench::capture::Capture;
use holdfast_bench::cluster::find_program;
use holdfast_bench::pools::{PoolLab, words};

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);
const REGISTRARS: [&str; 2] = ["n1", "n2"];
const ELEMENTS: [&str; 3] = ["n3", "n4", "n5"];

/// Brings up registrars, and elements that number lines.
fn scene(name: &str) -> PoolLab {
    let name = format!("{name}-{}", std::process::id());
    let mut lab = PoolLab::up(&name, 5).expect("a lab");
    lab.registrar("n1", None).expect("a registrar");
    ready(&lab, "n1");
    lab.registrar("n2", Some("n1")).expect("a registrar");
    ready(&lab, "n2");
    let key = lab.directory().join("key");
    std::fs::write(&key, "5a".repeat(32)).expect("a key");
    for host in ELEMENTS {
        lab.pool_daemon(host, &REGISTRARS).expect("a pool daemon");
        start_lines(&mut lab, host);
    }
    lab.pool_daemon("c1", &REGISTRARS).expect("a pool daemon");
    socket(&lab, "c1");
    for registrar in REGISTRARS {
        listed(&lab, registrar, ELEMENTS.len());
    }
    lab
}

fn ready(lab: &PoolLab, host: &str) {
    let client = lab.control(host, "registrar").expect("a client");
    let is_ready = || {
        client
            .run(|client| client.registrar())
            .ok()?
            .ready
            .then_some(())
    };
    lab.until("a registrar that serves", PATIENCE, is_ready)
        .expect("a registrar");
}

/// Returns the path of the pool daemon's socket for programs, once the socket exists.
fn socket(lab: &PoolLab, host: &str) -> PathBuf {
    let path = lab.run_file(host, "pool-app.sock").expect("a host");
    let is_there = || path.exists().then_some(());
    lab.until("a pool daemon", PATIENCE, is_there)
        .expect("a pool daemon");
    path
}

fn start_lines(lab: &mut PoolLab, host: &str) {
    socket(lab, host);
    let mut arguments = words(["--key"]);
    arguments.push(lab.directory().join("key").display().to_string());
    let program = find_program("lines").expect("the example");
    lab.run(host, "lines", &program, &arguments)
        .expect("an element");
}

fn pool(lab: &PoolLab, registrar: &str) -> Option<PoolDetail> {
    let client = lab.control(registrar, "registrar").ok()?;
    client.run(|client| client.pool("lines")).ok()
}

fn listed(lab: &PoolLab, registrar: &str, count: usize) {
    let all = || (pool(lab, registrar)?.elements.len() == count).then_some(());
    lab.until("the elements in the pool", PATIENCE, all)
        .expect("a pool");
}

/// Returns the host with this address.
fn host_at(lab: &PoolLab, address: std::net::IpAddr) -> String {
    let own = |host: &&&str| lab.address(host).is_ok_and(|own| own == address);
    (*ELEMENTS.iter().find(own).expect("an element")).to_owned()
}

/// A pool user that sends one line at a time, and repeats lines without an answer.
struct User {
    session: Arc<PoolSession>,
    events: Receiver<SessionEvent>,
    connection: u64,
    line: u64,
    at: String,
}

impl User {
    fn open(lab: &PoolLab) -> User {
        let path = lab.run_file("c1", "pool-app.sock").expect("a path");
        let session = Arc::new(PoolSession::open(path, "lines").expect("a session"));
        let (sender, events) = channel();
        let source = session.clone();
        std::thread::spawn(move || {
            while let Ok(Some(event)) = source.next() {
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        let mut user = User {
            session,
            events,
            connection: 0,
            line: 0,
            at: String::new(),
        };
        user.up(lab, false);
        user
    }

    fn event(&self) -> SessionEvent {
        self.events.recv_timeout(PATIENCE).expect("an event")
    }

    /// Waits until the session has an element.
    fn up(&mut self, lab: &PoolLab, as_resumed: bool) {
        loop {
            match self.event() {
                SessionEvent::Up {
                    connection,
                    addresses,
                    resumed,
                    ..
                } => {
                    assert_eq!(resumed, as_resumed);
                    self.connection = connection;
                    self.at = host_at(lab, addresses[0].ip());
                    return;
                }
                SessionEvent::Broken { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn send(&self) {
        let text = format!("line {}\n", self.line + 1);
        let sent = self.session.send(self.connection, text.as_bytes());
        sent.expect("sent");
    }

    /// Waits for the answer to the last line.
    fn answered(&mut self) {
        self.line += 1;
        let wanted = format!("{} line {}\n", self.line, self.line);
        match self.event() {
            SessionEvent::Data { bytes } => assert_eq!(String::from_utf8_lossy(&bytes), wanted),
            other => panic!("instead of the answer to line {}: {other:?}", self.line),
        }
    }

    fn lines(&mut self, count: usize) {
        for _ in 0..count {
            self.send();
            self.answered();
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

/// Serializes the labs.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Kills the element with `kill`, and follows the session to the next element, which has the session's state. The user
/// goes on within two round trips after the loss was detected, counted in the captured packets between user and
/// element.
fn dies(lab: &PoolLab, user: &mut User, what: &str, kill: impl FnOnce(&PoolLab, &str)) {
    let file = lab.directory().join(format!("{}.pcap", user.at));
    let capture = Capture::start(lab.lab(), "c1", "sctp or udp port 9899", &file);
    let capture = capture.expect("a capture");
    let killed = user.at.clone();
    kill(lab, &killed);
    user.up(lab, true);
    assert_ne!(user.at, killed);
    user.send();
    user.answered();
    user.lines(3);
    let recorded = capture.finish().expect("a whole capture");
    let [own, other] = ["c1", &user.at].map(|host| lab.address(host).expect("a host"));
    let trips = wire::round_trips(&recorded.file, own, other);
    println!(
        "{what} at {killed}: the session goes on at {} after line {}, {trips} round trips after the loss was seen",
        user.at,
        user.line - 4
    );
    assert!(trips <= 2, "{trips} round trips");
}

#[test]
fn a_session_goes_on_at_another_element_with_its_state() {
    if !is_root() {
        return;
    }
    let _alone = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|held| held.into_inner());
    let mut lab = scene("sessions");
    let mut user = User::open(&lab);
    user.lines(5);
    let first = user.at.clone();
    dies(&lab, &mut user, "the program is killed", |lab, host| {
        lab.kill(host, "lines").expect("killed");
    });
    // The host's daemon has deregistered the element; another element takes its place.
    start_lines(&mut lab, &first);
    listed(&lab, "n1", ELEMENTS.len());
    dies(
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
fn registrar_dies(lab: &PoolLab, user: &mut User, victim: &str, other: &str) {
    let client = lab.control(other, "registrar").expect("a client");
    let status = || client.run(|client| client.registrar()).expect("a status");
    let (other_id, before) = (status().id, status().counters.reregistrations);
    let homes = pool(lab, other).expect("a pool").elements;
    let moving = homes.iter().filter(|element| element.home != other_id);
    let moving = moving.count() as u64;
    lab.kill_all(victim).expect("killed");
    let mut fewest = ELEMENTS.len();
    let all_there = || {
        let pool = pool(lab, other)?;
        fewest = fewest.min(pool.elements.len());
        let own = pool
            .elements
            .iter()
            .filter(|element| element.home == other_id);
        (own.count() == ELEMENTS.len()).then_some(())
    };
    lab.until("the elements at the other registrar", PATIENCE, all_there)
        .expect("a takeover");
    assert_eq!(fewest, ELEMENTS.len(), "an element was lost");
    // The session needs no registrar, but a resolution does.
    user.lines(3);
    let daemon = lab.control("c1", "pool").expect("a client");
    let resolved = || {
        let query = Default::default();
        let answer = daemon.run(|client| client.resolve("lines", &query)).ok()?;
        (answer.elements.len() == ELEMENTS.len()).then_some(())
    };
    lab.until("a resolution by the other registrar", PATIENCE, resolved)
        .expect("a resolution");
    // Elements of the killed home registrar have reregistered, or use the registrar that took them over as their home.
    let follows = |host: &&str| {
        let client = lab.control(host, "pool").expect("a client");
        let own = client.run(|client| client.own_elements()).ok();
        let own = own.and_then(|own| own.elements.into_iter().next());
        own.is_some_and(|element| element.home.as_deref() == Some(&other_id))
    };
    let found = || {
        let anew = status().counters.reregistrations - before;
        let follow = ELEMENTS.iter().copied().filter(|host| follows(host));
        (anew + follow.count() as u64 >= moving).then_some(())
    };
    lab.until("elements that found another registrar", PATIENCE, found)
        .expect("a home");
    println!(
        "the registrar at {victim} is killed: the user and all {} elements found the one at {other}, which listed {fewest} or more all the time",
        ELEMENTS.len(),
    );
}

#[test]
fn a_registrar_dies_and_no_pool_loses_an_element() {
    if !is_root() {
        return;
    }
    let _alone = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|held| held.into_inner());
    let mut lab = scene("registrars");
    let mut user = User::open(&lab);
    user.lines(3);
    registrar_dies(&lab, &mut user, "n1", "n2");
    // One of the two registrars was home of all elements.
    lab.registrar("n1", Some("n2")).expect("a registrar");
    ready(&lab, "n1");
    listed(&lab, "n1", ELEMENTS.len());
    registrar_dies(&lab, &mut user, "n2", "n1");
}
