//! A registrar under all kinds of floods serves one honest element and one honest user, and its counters show how the
//! floods were handled (RFC 5355).
//!
//! All hosts are addresses of one network namespace. Each flooder is a separate process: this program, started again.

#[path = "../registrar/daemon.rs"]
#[expect(dead_code, reason = "shared with the registrar's tests")]
mod daemon;
#[path = "../registrar/element.rs"]
#[expect(dead_code, reason = "shared with the registrar's tests")]
mod element;
mod flood;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use daemon::Daemon;
use element::Host;
use flood::{Flood, Kind};
use holdfast_api::control::RegistrarCounters;
use holdfast_sys::transport::AssocId;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{CauseCode, ElementId, PoolHandle};
use nix::sched::{CloneFlags, unshare};

/// Longest wait for any condition that must become true.
const PATIENCE: Duration = Duration::from_secs(180);

const HONEST: &str = "10.1.0.9";
/// Address of a host that may register and resolve, and abuses these rights.
const ALLOWED: &str = "10.1.0.66";
/// Address of a host without any rights.
const STRANGER: &str = "10.1.0.77";
const FIRST: &str = "10.1.0.1";
const SECOND: &str = "10.1.0.2";

const ELEMENT: ElementId = ElementId(0x11);
/// Number of requests of the honest host during each flood.
const ROUNDS: usize = 10;

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status();
    assert!(status.expect("the program ip").success(), "ip {words}");
}

fn configuration(directory: &Path, address: &str) -> String {
    format!(
        r#"
[registrar]
listen = ["{address}"]
encapsulation_port = 0
run_dir = "{}"
keep_alive_interval_ms = 500
keep_alive_timeout_ms = 120000
heartbeat_cycle_ms = 500
last_heard_max_ms = 120000
[access]
register = ["{HONEST}", "{ALLOWED}"]
resolve = ["{HONEST}", "{ALLOWED}"]
registrar = ["{FIRST}", "{SECOND}"]
[limits]
associations_per_host = 20
elements_per_host = 5
pools_per_host = 3
messages_per_second = 500
first_message_ms = 15000
malformed = 4
registration_bytes = 300
[sctp]
path_retransmissions = 1000
association_retransmissions = 1000
[multicast]
announce_ms = 300
enrp = true
interfaces = ["a0"]
mentor_hunt_ms = 500
[log]
filter = "warn"
"#,
        directory.display()
    )
}

/// An element and a user that follow the protocol.
struct Honest {
    host: Host,
    at: AssocId,
    pool: PoolHandle,
}

impl Honest {
    fn until<T>(&mut self, what: &str, mut look: impl FnMut(&mut Host) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.host.turn();
            if let Some(found) = look(&mut self.host) {
                return found;
            }
            assert!(Instant::now() < deadline, "exceeded time: {what}");
        }
    }

    /// Asserts that every request gets a correct answer.
    fn is_served(&mut self, during: &str) {
        let (at, pool) = (self.at, self.pool.clone());
        for round in 0..ROUNDS {
            let what = format!("{during}: answer {round} to a");
            self.host.register(at, &pool, ELEMENT);
            let granted = self.until(&format!("{what} registration"), |host| {
                host.take(at, |m| matches!(m, Message::RegistrationResponse { .. }))
            });
            assert!(granted.causes().is_empty(), "{what}: {granted:?}");
            self.host.resolve(at, &pool);
            let found = self.until(&format!("{what} resolution"), |host| {
                host.take(at, |m| {
                    matches!(m, Message::HandleResolutionResponse { .. })
                })
            });
            let Message::HandleResolutionResponse { elements, .. } = &found else {
                unreachable!("taken as one");
            };
            let ids: Vec<_> = elements.iter().map(|element| element.id).collect();
            assert_eq!(ids, [ELEMENT], "{what}");
        }
        assert!(self.host.is_up(at), "{during}: its association is lost");
    }

    /// Asserts that the host is served during a flood, until the registrar's counters show the flood.
    fn outlives(
        &mut self,
        registrar: &Daemon,
        name: &str,
        floods: &[(Kind, &str)],
        noticed: fn(&RegistrarCounters) -> Vec<u64>,
    ) {
        let status = registrar.status().expect("a registrar");
        let before = noticed(&status.counters);
        let floods: Vec<_> = floods
            .iter()
            .map(|(kind, from)| Flood::start(*kind, from, &status))
            .collect();
        self.is_served(name);
        let all = |counters: &RegistrarCounters| {
            let after = noticed(counters);
            after
                .iter()
                .zip(&before)
                .all(|(after, before)| after > before)
        };
        self.until(&format!("{name}: counters that tell"), |_| {
            registrar.status().filter(|status| all(&status.counters))
        });
        self.is_served(name);
        drop(floods);
        let after = registrar.status().expect("a registrar").counters;
        println!("{name}: {after:?}");
    }
}

fn ready(daemon: &Daemon) {
    let deadline = Instant::now() + PATIENCE;
    while !daemon.status().is_some_and(|status| status.ready) {
        assert!(
            Instant::now() < deadline,
            "exceeded time: no registrar that serves"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn honest(registrar: &Daemon) -> Honest {
    let mut host = Host::open(HONEST);
    let at = host.connect(&registrar.status().expect("a registrar"));
    let pool = PoolHandle::from("echo");
    let mut honest = Honest { host, at, pool };
    honest.until("an association", |host| host.is_up(at).then_some(()));
    honest
}

/// A host outside the access list gets an error that says so, and the counters show it.
fn refused_by_name(registrar: &Daemon) {
    let mut host = Host::open(STRANGER);
    let at = host.connect(&registrar.status().expect("a registrar"));
    let pool = PoolHandle::from("echo");
    let mut stranger = Honest { host, at, pool };
    stranger.until("an association", |host| host.is_up(at).then_some(()));
    let denied = |message: &Message| {
        let codes: Vec<_> = message.causes().iter().map(|cause| cause.code).collect();
        assert_eq!(codes, [CauseCode::REJECTED_FOR_SECURITY], "{message:?}");
    };
    let pool = stranger.pool.clone();
    stranger.host.register(at, &pool, ElementId(0x77));
    denied(&stranger.until("a refusal", |host| {
        host.take(at, |m| matches!(m, Message::RegistrationResponse { .. }))
    }));
    stranger.host.resolve(at, &pool);
    denied(&stranger.until("a refusal", |host| {
        host.take(at, |m| {
            matches!(m, Message::HandleResolutionResponse { .. })
        })
    }));
    let counted = registrar.status().expect("a registrar").counters;
    assert_eq!(counted.denied, 2);
}

/// Creates a network namespace for this thread, and for the processes that it starts.
fn network() {
    unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
    ip("link set lo up");
    ip("link add a0 type veth peer name a1");
    for address in [FIRST, SECOND, HONEST, ALLOWED, STRANGER] {
        ip(&format!("address add {address}/24 dev a0"));
    }
    ip("link set a1 up");
    ip("link set a0 up");
    ip("route add 239.0.0.0/8 dev a0");
}

fn scene() {
    network();
    let directory = tempfile::tempdir().expect("a directory");
    let start = |address: &str| {
        let directory = directory.path().join(address);
        Daemon::configured(&directory, &configuration(&directory, address))
    };
    let first = start(FIRST);
    ready(&first);
    let mut honest = honest(&first);
    honest.is_served("in peace");
    refused_by_name(&first);

    honest.outlives(
        &first,
        "garbage",
        &[
            (Kind::Garbage, ALLOWED),
            (Kind::Garbage, STRANGER),
            (Kind::Datagrams, STRANGER),
        ],
        |c| vec![c.malformed, c.aborted, c.denied],
    );
    honest.outlives(
        &first,
        "registrations",
        &[(Kind::Registrations, ALLOWED)],
        |c| vec![c.over_limit, c.limited, c.refusals],
    );
    honest.outlives(
        &first,
        "unreachable reports",
        &[(Kind::Reports, ALLOWED), (Kind::Reports, STRANGER)],
        |c| vec![c.reports_unheeded, c.denied],
    );
    honest.outlives(
        &first,
        "idle associations",
        &[(Kind::Idle, ALLOWED), (Kind::Idle, STRANGER)],
        |c| vec![c.associations_refused, c.aborted],
    );
    // One flooder forges the address of a registrar.
    let forged = [(Kind::Multicast, STRANGER), (Kind::Multicast, SECOND)];
    honest.outlives(&first, "multicast", &forged, |c| vec![c.multicast_unheeded]);
    let status = first.status().expect("a registrar");
    let _forging = forged.map(|(kind, from)| Flood::start(kind, from, &status));
    let second = start(SECOND);
    honest.until("registrars that find each other all the same", |_| {
        let id = second.status().filter(|status| status.ready)?.id;
        let peer = first.peer(&id)?;
        (peer.active && peer.connected).then_some(())
    });
    honest.is_served("with another registrar");
    let element = first.pool("echo").expect("a pool").elements;
    assert_eq!(element.len(), 1);
    let reported = first.status().expect("a registrar").counters;
    assert!(reported.keep_alives > 0, "{reported:?}");
}

#[test]
fn floods_leave_honest_users_served() {
    std::thread::spawn(scene)
        .join()
        .expect("a scene that ends well");
}

/// The flooders' part: a test of this name that does nothing unless started as a flooder.
#[test]
fn flooder() {
    flood::run_if_asked();
}
