//! A registrar that is stopped while another one has updates for it.

use std::path::Path;

use super::*;
use nix::sys::signal::Signal;

/// Number of elements with long handles: their updates exceed the send buffer of an association, but stay below the
/// limit at which a registrar gives up on a peer.
const ELEMENTS: u32 = 1_600;
const HANDLE_LEN: usize = 1_000;
/// Starts a registrar that never declares a peer dead, however slow the machine is.
fn patient(directory: &Path, more: &str) -> Daemon {
    let text = format!(
        r#"
[registrar]
listen = ["127.0.0.1"]
asap_port = 0
enrp_port = 0
raw = false
encapsulation_port = 0
run_dir = "{}"
heartbeat_cycle_ms = 500
last_heard_max_ms = 600000
[access]
registrar = ["127.0.0.1"]
[limits]
messages_per_second = 1000000
[sctp]
path_retransmissions = 1000
association_retransmissions = 1000
{more}"#,
        directory.display()
    );
    Daemon::configured(directory, &text)
}

/// Number of registrations in flight.
const WINDOW: usize = 200;

#[test]
fn no_update_is_lost_while_a_registrar_stands_still() {
    let directory = tempfile::tempdir().expect("a directory");
    let in_directory = |name: &str| directory.path().join(name);
    let mut host = Host::open("127.0.0.1");
    let first = patient(&in_directory("first"), "");
    ready(&mut host, &first);
    let second = patient(&in_directory("second"), &first.as_peer());
    ready(&mut host, &second);
    let at = connect(&mut host, &first);
    let handle = PoolHandle::from("x".repeat(HANDLE_LEN).as_str());
    register(&mut host, at, &handle, ElementId(1));
    in_step(&mut host, &first, &second, 1);

    second.signal(Signal::SIGSTOP);
    let mut asked = 1;
    let mut answered = 1;
    until(&mut host, "all registrations", |host| {
        while asked < ELEMENTS && asked - answered < WINDOW as u32 {
            asked += 1;
            host.register(at, &handle, ElementId(asked));
        }
        let is_answer = |message: &Message| matches!(message, Message::RegistrationResponse { .. });
        while host.take(at, is_answer).is_some() {
            answered += 1;
        }
        (answered == ELEMENTS).then_some(())
    });
    second.signal(Signal::SIGCONT);
    in_step(&mut host, &first, &second, ELEMENTS.into());
    let sent = first.status().expect("a registrar").counters;
    let came = second.status().expect("a registrar").counters;
    assert_eq!(sent.sends_refused, 0);
    let told = (came.updates_received, came.resynchronisations);
    assert_eq!(told, (ELEMENTS.into(), 0));
}
