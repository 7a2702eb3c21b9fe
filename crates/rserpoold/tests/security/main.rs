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
use element::TestHost;
use flood::{Flood, FloodKind};
use holdfast_api::control::RegistrarCounters;
use holdfast_sctp::AssocId;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{CauseCode, ElementId, PoolHandle};
use nix::sched::{CloneFlags, unshare};

/// Longest wait for any condition that must become true.
const TIMEOUT: Duration = Duration::from_secs(180);

const HONEST_ADDRESS: &str = "10.1.0.9";
/// Address of a host that may register and resolve, and abuses these rights.
const ABUSER_ADDRESS: &str = "10.1.0.66";
/// Address of a host without any rights.
const STRANGER_ADDRESS: &str = "10.1.0.77";
const FIRST_REGISTRAR: &str = "10.1.0.1";
const SECOND_REGISTRAR: &str = "10.1.0.2";

const ELEMENT: ElementId = ElementId(0x11);
/// Number of requests of the honest host during each flood.
const REQUESTS_PER_FLOOD: usize = 10;

fn run_ip(words: &str) {
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
register = ["{HONEST_ADDRESS}", "{ABUSER_ADDRESS}"]
resolve = ["{HONEST_ADDRESS}", "{ABUSER_ADDRESS}"]
registrar = ["{FIRST_REGISTRAR}", "{SECOND_REGISTRAR}"]
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
struct HonestHost {
    host: TestHost,
    assoc: AssocId,
    handle: PoolHandle,
}

impl HonestHost {
    fn wait_for<T>(
        &mut self,
        condition: &str,
        mut poll: impl FnMut(&mut TestHost) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.host.receive();
            if let Some(found) = poll(&mut self.host) {
                return found;
            }
            assert!(Instant::now() < deadline, "exceeded time: {condition}");
        }
    }

    /// Asserts that every request gets a correct answer.
    fn assert_served(&mut self, during: &str) {
        let (at, pool) = (self.assoc, self.handle.clone());
        for round in 0..REQUESTS_PER_FLOOD {
            let what = format!("{during}: answer {round} to a");
            self.host.register(at, &pool, ELEMENT);
            let granted = self.wait_for(&format!("{what} registration"), |host| {
                host.take_message(at, |m| matches!(m, Message::RegistrationResponse { .. }))
            });
            assert!(granted.causes().is_empty(), "{what}: {granted:?}");
            self.host.resolve(at, &pool);
            let found = self.wait_for(&format!("{what} resolution"), |host| {
                host.take_message(at, |m| {
                    matches!(m, Message::HandleResolutionResponse { .. })
                })
            });
            let Message::HandleResolutionResponse { elements, .. } = &found else {
                unreachable!("another kind of message");
            };
            let ids: Vec<_> = elements.iter().map(|element| element.id).collect();
            assert_eq!(ids, [ELEMENT], "{what}");
        }
        assert!(self.host.is_up(at), "{during}: its association is lost");
    }

    /// Asserts that the host is served during a flood, until the registrar's counters show the flood.
    fn assert_served_during(
        &mut self,
        registrar: &Daemon,
        name: &str,
        floods: &[(FloodKind, &str)],
        counts_of: fn(&RegistrarCounters) -> Vec<u64>,
    ) {
        let status = registrar.status().expect("a registrar");
        let before = counts_of(&status.counters);
        let floods: Vec<_> = floods
            .iter()
            .map(|(kind, from)| Flood::start(*kind, from, &status))
            .collect();
        self.assert_served(name);
        let has_noticed_all = |counters: &RegistrarCounters| {
            let after = counts_of(counters);
            after
                .iter()
                .zip(&before)
                .all(|(after, before)| after > before)
        };
        self.wait_for(&format!("{name}: counters that rise"), |_| {
            registrar
                .status()
                .filter(|status| has_noticed_all(&status.counters))
        });
        self.assert_served(name);
        drop(floods);
        let after = registrar.status().expect("a registrar").counters;
        println!("{name}: {after:?}");
    }
}

fn wait_until_ready(daemon: &Daemon) {
    let deadline = Instant::now() + TIMEOUT;
    while !daemon.status().is_some_and(|status| status.ready) {
        assert!(
            Instant::now() < deadline,
            "exceeded time: no registrar that serves"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn start_honest_host(registrar: &Daemon) -> HonestHost {
    let mut host = TestHost::open(HONEST_ADDRESS);
    let at = host.connect(&registrar.status().expect("a registrar"));
    let pool = PoolHandle::from("echo");
    let mut honest = HonestHost {
        host,
        assoc: at,
        handle: pool,
    };
    honest.wait_for("an association", |host| host.is_up(at).then_some(()));
    honest
}

/// A host outside the access list gets an error that says so, and the counters show it.
fn assert_refused(registrar: &Daemon) {
    let mut host = TestHost::open(STRANGER_ADDRESS);
    let at = host.connect(&registrar.status().expect("a registrar"));
    let pool = PoolHandle::from("echo");
    let mut stranger = HonestHost {
        host,
        assoc: at,
        handle: pool,
    };
    stranger.wait_for("an association", |host| host.is_up(at).then_some(()));
    let is_denied = |message: &Message| {
        let codes: Vec<_> = message.causes().iter().map(|cause| cause.code).collect();
        assert_eq!(codes, [CauseCode::REJECTED_FOR_SECURITY], "{message:?}");
    };
    let pool = stranger.handle.clone();
    stranger.host.register(at, &pool, ElementId(0x77));
    is_denied(&stranger.wait_for("a refusal", |host| {
        host.take_message(at, |m| matches!(m, Message::RegistrationResponse { .. }))
    }));
    stranger.host.resolve(at, &pool);
    is_denied(&stranger.wait_for("a refusal", |host| {
        host.take_message(at, |m| {
            matches!(m, Message::HandleResolutionResponse { .. })
        })
    }));
    let counters = registrar.status().expect("a registrar").counters;
    assert_eq!(counters.access_denied, 2);
}

/// Creates a network namespace for this thread, and for the processes that it starts.
fn create_network() {
    unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
    run_ip("link set lo up");
    run_ip("link add a0 type veth peer name a1");
    for address in [
        FIRST_REGISTRAR,
        SECOND_REGISTRAR,
        HONEST_ADDRESS,
        ABUSER_ADDRESS,
        STRANGER_ADDRESS,
    ] {
        run_ip(&format!("address add {address}/24 dev a0"));
    }
    run_ip("link set a1 up");
    run_ip("link set a0 up");
    run_ip("route add 239.0.0.0/8 dev a0");
}

fn run_scenario() {
    create_network();
    let directory = tempfile::tempdir().expect("a directory");
    let start = |address: &str| {
        let directory = directory.path().join(address);
        Daemon::start_configured(&directory, &configuration(&directory, address))
    };
    let first = start(FIRST_REGISTRAR);
    wait_until_ready(&first);
    let mut honest = start_honest_host(&first);
    honest.assert_served("before any flood");
    assert_refused(&first);

    honest.assert_served_during(
        &first,
        "garbage",
        &[
            (FloodKind::Garbage, ABUSER_ADDRESS),
            (FloodKind::Garbage, STRANGER_ADDRESS),
            (FloodKind::Datagrams, STRANGER_ADDRESS),
        ],
        |c| vec![c.malformed, c.associations_aborted, c.access_denied],
    );
    honest.assert_served_during(
        &first,
        "registrations",
        &[(FloodKind::Registrations, ABUSER_ADDRESS)],
        |c| vec![c.limit_refusals, c.rate_limited, c.refusals],
    );
    honest.assert_served_during(
        &first,
        "unreachable reports",
        &[
            (FloodKind::Reports, ABUSER_ADDRESS),
            (FloodKind::Reports, STRANGER_ADDRESS),
        ],
        |c| vec![c.reports_ignored, c.access_denied],
    );
    honest.assert_served_during(
        &first,
        "idle associations",
        &[
            (FloodKind::Idle, ABUSER_ADDRESS),
            (FloodKind::Idle, STRANGER_ADDRESS),
        ],
        |c| vec![c.associations_refused, c.associations_aborted],
    );
    // One flooder forges the address of a registrar.
    let forged = [
        (FloodKind::Multicast, STRANGER_ADDRESS),
        (FloodKind::Multicast, SECOND_REGISTRAR),
    ];
    honest.assert_served_during(&first, "multicast", &forged, |c| vec![c.multicast_ignored]);
    let status = first.status().expect("a registrar");
    let _forged_floods = forged.map(|(kind, from)| Flood::start(kind, from, &status));
    let second = start(SECOND_REGISTRAR);
    honest.wait_for(
        "registrars that find each other despite forged messages",
        |_| {
            let id = second.status().filter(|status| status.ready)?.id;
            let peer = first.peer(&id)?;
            (peer.active && peer.connected).then_some(())
        },
    );
    honest.assert_served("with another registrar");
    let element = first.pool("echo").expect("a pool").elements;
    assert_eq!(element.len(), 1);
    let counters = first.status().expect("a registrar").counters;
    assert!(counters.keep_alives > 0, "{counters:?}");
}

#[test]
fn honest_users_are_served_during_floods() {
    std::thread::spawn(run_scenario)
        .join()
        .expect("a scenario that passes");
}

/// The flooders' part: a test of this name that does nothing unless started as a flooder.
#[test]
fn flooder_process() {
    flood::run_if_flooder();
}
